"""A fixed selection of histories; `make simulate` plays ten thousand, `make explore` the small scopes whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.bugs import BUGS, IN_STORMS
from tests.simulation.explore import explore
from tests.simulation.history import play
from tests.simulation.scheduler import Violation
from tests.simulation.setting import draw_short, draw_storm

#: Histories per test.
_HISTORIES = 25


@pytest.mark.matrix
@pytest.mark.parametrize(
    "first", [0, _HISTORIES, *(pytest.param(n * _HISTORIES, marks=pytest.mark.exhaustive) for n in (2, 3))]
)
def test_no_history_breaks_a_promise(first: int) -> None:
    assert [played for seed in range(first, first + _HISTORIES) if (played := play(draw_short(seed))).violation] == []


@pytest.mark.matrix
def test_some_storms() -> None:
    assert [storm for seed in range(10) if (storm := play(draw_storm(seed))).violation] == []


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(100, 700, 100))
def test_many_storms(first: int) -> None:
    assert [storm for seed in range(first, first + 100) if (storm := play(draw_storm(seed))).violation] == []


def test_a_seed_replays_its_history() -> None:
    assert play(draw_short(11)) == play(draw_short(11))


@pytest.mark.matrix
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_clock_can_advance_from_every_state_near_a_normal_run(staleness: int) -> None:
    found = explore(staleness, 2500, waves=staleness + 2)
    assert found.states >= 2500


@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_bug_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    assert play(bug.suits(draw_short(bug.seed))).violation is None
    bug.patch(monkeypatch)
    # Where the machines have changed, another history may be the one that shows it.
    seeds = (bug.seed, *range(40))
    assert any(play(bug.suits(draw_short(seed))).violation for seed in seeds), f"nobody saw it: {bug.what}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(IN_STORMS))
def test_a_storm_sees_a_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name].patch(monkeypatch)
    seeds = (IN_STORMS[name], *range(40))
    assert any(play(draw_storm(seed)).violation for seed in seeds), f"nobody saw it: {BUGS[name].what}"


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
