"""A fixed selection of histories; `make simulate` runs ten thousand, `make explore` the small scopes whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.bugs import BUGS
from tests.simulation.explore import explore
from tests.simulation.job import draw
from tests.simulation.scheduler import Violation
from tests.simulation.world import run

#: Histories per test.
_HISTORIES = 25


@pytest.mark.matrix
@pytest.mark.parametrize("first", range(0, 8 * _HISTORIES, _HISTORIES))
def test_no_history_breaks_a_promise(first: int) -> None:
    broken = [history for seed in range(first, first + _HISTORIES) if (history := run(seed)).violation is not None]
    assert not broken


def test_a_seed_replays_its_history() -> None:
    assert run(11) == run(11)


@pytest.mark.matrix
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_clock_can_advance_from_every_state_near_a_normal_run(staleness: int) -> None:
    found = explore(staleness, 2500, waves=staleness + 2)
    assert found.states >= 2500


@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_bug_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    # Where the machines have changed, another history may be the one that shows it.
    seeds = (bug.seed, *range(40))
    assert run(bug.seed, job=bug.suits(draw(bug.seed))).violation is None
    bug.patch(monkeypatch)
    seen = (run(seed, job=bug.suits(draw(seed))).violation for seed in seeds)
    assert any(violation is not None for violation in seen), f"nobody saw it: {bug.what}"


def test_the_page_names_every_bug() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    told = page.replace("`", "")
    assert [name for name, bug in BUGS.items() if f"| {bug.what} | {name} |" not in told] == []


@pytest.mark.parametrize(
    "name", ["dead-in-minimum", "minimum-of-nothing", "published-early", "rejoins-below", "no-incarnation"]
)
def test_the_exploration_sees_a_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name].patch(monkeypatch)
    with pytest.raises(Violation):
        explore(0, 4000, waves=2)


def test_the_exploration_sees_a_bug_of_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explore(0, 1500, waves=2, crashes=0, copies=0, drains=2).states >= 1500
    BUGS["leaver-not-awaited"].patch(monkeypatch)
    with pytest.raises(Violation):
        explore(0, 4000, waves=2, crashes=0, copies=0, drains=2)
