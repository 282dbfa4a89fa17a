"""A fixed selection of histories; `make simulate` plays ten thousand, `make explore` the small scopes whole."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest

from tests.docs.pages import ROOT, code_spans, table_after
from tests.pairwise import every_nth
from tests.simulation import seeded
from tests.simulation.bugs import BUGS, IN_STORMS
from tests.simulation.explore import Explored, explore
from tests.simulation.history import play
from tests.simulation.scheduler import Violation
from tests.simulation.setting import draw_short, draw_storm

#: Histories per test.
_HISTORIES = 25


@pytest.mark.matrix
@pytest.mark.parametrize("first", [0, *(pytest.param(n * _HISTORIES, marks=pytest.mark.exhaustive) for n in (1, 2, 3))])
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


@pytest.mark.parametrize("name", every_nth(2, sorted(BUGS)))
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


#: By its name in the simulation: what detects a seeded bug, as the page says.
DETECTED_BY = {
    bug[0]: told
    for _, introduced, told, _ in table_after(ROOT / "docs" / "reliability.md", "## Seeded bugs")
    if (bug := code_spans(introduced))
}


def test_the_page_names_every_bug() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    told = page.replace("`", "")
    assert [name for name, bug in BUGS.items() if f"| {bug.what} | {name} |" not in told] == []
    assert DETECTED_BY.keys() == BUGS.keys()


def leaving() -> Explored:
    return explore(0, 4000, waves=2, crashes=0, copies=0, drains=2)


@pytest.mark.parametrize("name", every_nth(3, (name for name, told in DETECTED_BY.items() if "exploration" in told)))
def test_the_exploration_sees_a_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name].patch(monkeypatch)
    with pytest.raises(Violation):
        _ = [scope() for scope in (partial(explore, 0, 4000, waves=2), partial(explore, 1, 4000, waves=3), leaving)]


def test_the_exploration_of_leaving_sees_no_bug_where_none_is() -> None:
    assert leaving().states >= 1500


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "file"),
    [(name, span) for name, told in DETECTED_BY.items() for span in code_spans(told) if span.startswith("tests/")],
)
def test_a_test_that_the_page_names_sees_a_bug(name: str, file: str) -> None:
    """With the bug in the process that runs the tests of the file."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.simulation.seeded", "--hypothesis-profile=seeded"]
    command = [sys.executable, "-m", "pytest", *options, file]
    environment = {**os.environ, seeded.VARIABLE: name}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout
    assert " error" not in ended.stdout.splitlines()[-1], ended.stdout
