"""Each corruption is caught as what it is; the shipped ones are read from their committed files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe.checker import Kind, check_run
from tests.checker.activate_corruptions import ACTIVATE_CORRUPTIONS
from tests.checker.cache_corruptions import CACHE_CORRUPTIONS
from tests.checker.corruptions import CORRUPTIONS, corrupted_lines
from tests.checker.freeze_corruptions import FREEZE_CORRUPTIONS
from tests.checker.generate import SHIPPED, shipped_names
from tests.checker.plan_corruptions import PLAN_CORRUPTIONS
from tests.checker.policy_corruptions import POLICY_CORRUPTIONS
from tests.checker.scenario import Scenario, write_run
from tests.checker.simulator import as_lines, simulate
from tests.checker.wave_corruptions import WAVE_CORRUPTIONS

#: The breaches that `wsp.md` §7 names, one shipped history each.
NAMED_BY_THE_DESIGN = {
    "stale_clock",
    "unpublished_clock",
    "mixed_stages",
    "mixed_directions",
    "wave_applied_twice",
    "torn_wave",
    "never_committed",
    "sample_twice",
    "sample_never",
    "clock_fell",
}


def test_the_clean_history_has_no_violation() -> None:
    report = check_run(SHIPPED / "clean", require_complete=True)
    assert report.ok, "\n".join(report.lines())
    assert report.minibatches == 15
    assert report.counts.waves == 8


@pytest.mark.parametrize("name", [name for name, corruption in CORRUPTIONS.items() if corruption.shipped])
def test_each_shipped_corruption_is_caught(name: str) -> None:
    report = check_run(SHIPPED / name)
    assert CORRUPTIONS[name].kinds[0].value in report.kinds(), "\n".join(report.lines())
    assert set(report.kinds()) == set(CORRUPTIONS[name].kinds)


@pytest.mark.parametrize("name", list(CORRUPTIONS))
def test_each_corruption_is_caught_and_nothing_else_is_reported(name: str, tmp_path: Path) -> None:
    write_run(tmp_path, Scenario(), corrupted_lines(name))
    report = check_run(tmp_path)
    assert set(report.kinds()) == set(CORRUPTIONS[name].kinds), "\n".join(report.lines())


def test_the_design_s_breaches_are_shipped_and_every_kind_has_a_corruption() -> None:
    assert set(shipped_names()) >= NAMED_BY_THE_DESIGN
    corruptions = [
        *CORRUPTIONS.values(),
        *POLICY_CORRUPTIONS.values(),
        *WAVE_CORRUPTIONS.values(),
        *PLAN_CORRUPTIONS.values(),
        *FREEZE_CORRUPTIONS.values(),
        *ACTIVATE_CORRUPTIONS.values(),
    ]
    caught = {kind for corruption in corruptions for kind in corruption.kinds}
    caught |= {kind for _, kind in CACHE_CORRUPTIONS}
    assert caught == set(Kind) - {Kind.INCOMPLETE}


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_files_are_what_the_generator_writes(name: str, tmp_path: Path) -> None:
    write_run(tmp_path, Scenario(), corrupted_lines(name))
    wanted = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    shipped = SHIPPED / name
    assert {path.relative_to(shipped): path.read_bytes() for path in shipped.rglob("*") if path.is_file()} == wanted
    assert sum(map(len, wanted.values())) < 30_000


def test_counts_of_doubled_and_torn_waves() -> None:
    doubled, torn = check_run(SHIPPED / "wave_applied_twice"), check_run(SHIPPED / "torn_wave")
    assert (doubled.waves_applied_twice, doubled.torn_waves) == (1, 0)
    assert (torn.waves_applied_twice, torn.torn_waves) == (0, 1)


@pytest.mark.parametrize("seed", range(6))
def test_every_line_but_a_pull_is_missed(seed: int, tmp_path: Path) -> None:
    """Take any line away from a whole run, and the checker sees it."""
    scenario = Scenario(seed=seed, deterministic=seed % 2 == 0, checkpoint_every=2)
    lines = as_lines(simulate(scenario))
    for file, content in lines.items():
        for position in range(seed, len(content), 6):
            if '"event":"pull"' in content[position]:
                continue
            shorter = {**lines, file: content[:position] + content[position + 1 :]}
            write_run(tmp_path, scenario, shorter)
            assert not check_run(tmp_path, require_complete=True).ok, content[position]


@pytest.mark.parametrize("seed", range(6))
def test_no_event_of_the_training_itself_may_be_doubled(seed: int, tmp_path: Path) -> None:
    scenario = Scenario(seed=seed, deterministic=seed % 2 == 0)
    lines = as_lines(simulate(scenario))
    harmless = ('"event":"pull"', '"event":"staged"', '"event":"barrier"', '"indices":[]')
    for file, content in lines.items():
        for position in range(seed, len(content), 6):
            if any(mark in content[position] for mark in harmless):
                continue  # asking, sending or announcing once more changes nothing
            longer = {**lines, file: content[: position + 1] + content[position:]}
            write_run(tmp_path, scenario, longer)
            assert not check_run(tmp_path).ok, content[position]
