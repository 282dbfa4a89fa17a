"""A storm: which faults come in which order, what is told of them, and a short one for real."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.cells import Deed
from tests.chaos.cluster import COORDINATOR, REDIS, ROOT, RUNS
from tests.chaos.disks import MountMeans, probe
from tests.chaos.keeper import Keeper, Kept, Life, Spec
from tests.chaos.outcome import Outcome, Tally
from tests.chaos.storm import DEVICES, DISK_BYTES, StormOptions
from tests.chaos.storm_faults import (
    AGENTS,
    BEYOND,
    CERTAIN,
    FOLLOWER,
    SHARDS,
    STAGES,
    VICTIMS,
    Selection,
    StormFault,
    Strike,
    schedule,
    single_faults,
)
from tests.chaos.storm_job import Screen
from tests.chaos.storm_report import Entry, StormReport
from tests.polling import wait_until
from tests.storage.redis_server import needs_redis


def storm(seed: int, count: int, selection: Selection | None = None) -> list[StormFault]:
    return list(itertools.islice(schedule(seed, (selection or Selection()).admits), count))


def fault(*names: str) -> StormFault:
    strikes = (name.partition("/") for name in names)
    return StormFault(tuple(Strike(Deed(deed), victim) for deed, _, victim in strikes))


def test_a_seed_always_makes_the_same_storm_and_another_one_another() -> None:
    assert storm(7, 200) == storm(7, 200)
    assert storm(7, 200) != storm(8, 200)


@pytest.mark.parametrize("seed", range(20))
def test_a_storm_of_half_an_hour_has_every_fault_of_one_process_and_a_short_one_every_kind(seed: int) -> None:
    faults = storm(seed, 400)
    assert set(single_faults()) <= set(faults)
    opening = faults[: len(Deed) + len(CERTAIN)]
    assert set(CERTAIN) <= set(opening)
    assert {each.row for each in opening} >= set(Deed)
    first_hour = faults[: 60 + 60]
    assert sum(len(each.strikes) == 1 for each in first_hour) > 50
    assert sum(len(each.strikes) == 2 for each in first_hour) > 50


def test_what_is_certain_names_the_losses_that_a_node_of_the_control_plane_brings() -> None:
    names = {each.name for each in CERTAIN}
    assert "kill/coordinator+kill/shard-0" in names
    assert "kill/coordinator+lose_disk/shard-0" in names
    assert "fill_disk/shard-0+kill/coordinator+kill/shard-0" in names


def test_two_at_once_strike_two_and_none_that_lose_all_that_is_known_of_a_job() -> None:
    pairs = [each for each in storm(3, 4000) if len(each.strikes) == 2]
    assert all(len(each.victims) == 2 for each in pairs)
    assert not {frozenset(each.name.split("+")) for each in pairs} & {frozenset(name.split("+")) for name in BEYOND}
    assert {each.gap_seconds for each in pairs} == {0.0, 0.5, 2.0}


def test_only_and_without_are_about_strikes_or_with_a_plus_about_whole_faults() -> None:
    assert {each.name for each in storm(0, 50, Selection(only=("pause/redis",)))} == {"pause/redis"}
    kinds = Counter(strike.deed for each in storm(0, 90, Selection(only=("kill/*",))) for strike in each.strikes)
    assert set(kinds) == {Deed.KILL}
    left = storm(0, 400, Selection(without=("*/submit", "*coordinator+lose_disk/*")))
    assert not any(FOLLOWER in each.victims for each in left)
    assert fault("kill/coordinator", "lose_disk/shard-0") not in left
    assert fault("lose_disk/shard-0") in left
    certain = CERTAIN[1]
    assert Selection(only=("*coordinator+lose_disk/*",)).admits(certain)
    assert not Selection(only=("kill/*",)).admits(certain)
    assert storm(0, 1, Selection(only=("nothing/*",))) == []


def test_every_victim_is_there() -> None:
    there = {COORDINATOR, REDIS, RUNS, FOLLOWER, *SHARDS, *AGENTS, *STAGES}
    assert {victim for victims in VICTIMS.values() for victim in victims} == there
    assert len(AGENTS) == len(DEVICES)
    assert sum(DEVICES) == len(STAGES)
    assert set(VICTIMS[Deed.FILL_DISK]) == set(DISK_BYTES)


def test_a_storm_lasts_until_its_time_is_over_and_there_were_enough_faults() -> None:
    half_an_hour = StormOptions(seconds=1800.0, seed=0)
    assert not half_an_hour.is_over(elapsed=1799.0, num_faults=100)
    assert not half_an_hour.is_over(elapsed=1801.0, num_faults=59)
    assert half_an_hour.is_over(elapsed=1801.0, num_faults=60)
    assert StormOptions(seconds=1800.0, seed=0, num_faults=3).is_over(elapsed=1.0, num_faults=3)


def entry(number: int, *names: str, seconds: float, sentence: str = "", screen: tuple[str, ...] = ()) -> Entry:
    outcome = Outcome(case=fault(*names), survived=not sentence, sentence=sentence, recovery_seconds=seconds)
    return Entry(number=number, at_seconds=60.0 * number, outcome=outcome, job="cluster-1/run-1", screen=screen)


def report(*entries: Entry, problems: tuple[str, ...] = (), tally: Tally | None = None) -> StormReport:
    return StormReport(
        entries=entries,
        tally=tally or Tally(jobs=2, waves=9, samples=18),
        problems=problems,
        unproven=["cluster-1/run-1"],
        seconds=120.0,
        seed=7,
        mounts="tmpfs",
        skipped={"a": "b"},
        again="play",
    )


def test_the_table_tells_by_kind_what_was_survived_and_how_soon() -> None:
    found = report(
        entry(1, "kill/redis", seconds=1.0),
        entry(2, "kill/agent-1", seconds=4.0, screen=("lost",)),
        entry(3, "kill/coordinator", "lose_disk/shard-0", seconds=99.0, sentence="nobody came"),
    )
    assert not found.ok
    assert found.lines() == [
        "                           survived / tried   recovery: median   longest   told on the screen",
        "coordinator + clock shard               0/1                  -         -   0/1",
        "kill                                    2/2              2.5 s     4.0 s   1/2",
        "all: 2 of 3 faults survived in 2.0 min, recovery 2.5 s (median), seed 7; disks: tmpfs",
        *Tally(jobs=2, waves=9, samples=18).lines(),
        "history ended by a full disk, judged by their weights alone: cluster-1/run-1",
        "not tried: a: b",
        "not survived: fault 3, kill/coordinator+lose_disk/shard-0: nobody came",
        "verdict: NOT survived",
        "again with: play",
    ]
    values = json.loads(json.dumps(found.to_json()))
    assert (values["ok"], values["survived"], len(values["faults"])) == (False, 2, 3)


def test_a_storm_is_not_survived_where_a_job_was_wrong_or_none_was_judged() -> None:
    good = entry(1, "kill/redis", seconds=1.0)
    assert report(good).ok
    assert not report(good, problems=("run-1: 3 samples lost",)).ok
    assert not report(good, tally=Tally()).ok


def test_a_line_of_progress_tells_the_fault_the_recovery_and_the_screen() -> None:
    told = entry(2, "kill/agent-1", seconds=4.0, screen=("virtual worker 1 is lost", "it is back")).line()
    assert told == (
        " 2:00 fault 2: kill/agent-1: survived, whole again after 4.0 s; screen: virtual worker 1 is lost (and 1 more)"
    )
    assert (
        "NOT SURVIVED: nobody came; screen: nothing"
        in entry(1, "kill/redis", seconds=0.0, sentence="nobody came").line()
    )


def test_the_screen_of_a_follower_is_read_over_its_lives_without_the_progress_table(tmp_path: Path) -> None:
    follower = Kept(Spec(key="submit", command=[], environment={}, ready="t="), tmp_path, lives=[Life(0, 1, 0.0)])
    screen = Screen(follower)
    assert screen.news() == ()
    (tmp_path / "submit.0.out").write_text("t=0.1 event=note\nt=1.0 state=running epoch=1 samples=3/9\nt=1.5 torn")
    assert screen.news() == ("event=note",)
    follower.lives.append(Life(1, 2, 3.0))
    with (tmp_path / "submit.0.out").open("a") as file:
        file.write(" no more\n")
    (tmp_path / "submit.1.out").write_text("t=0.0 follows again\n")
    (tmp_path / "submit.err").write_text("error: gone\n")
    assert screen.news() == ("torn no more", "follows again", "error: gone")
    assert screen.news() == ()


#: Lives until it is killed; the next time it ends by itself.
FOLLOW = "[ -e mark ] && exit 3; touch mark; echo ready; read forever"


@pytest.mark.processes
def test_whoever_follows_is_started_again_when_it_was_killed_and_not_when_it_has_ended(tmp_path: Path) -> None:
    with Keeper(tmp_path / "processes", "test-of-followers") as keeper:
        kept = keeper.keep(
            Spec(
                key="submit",
                command=["sh", "-c", FOLLOW],
                environment=dict(os.environ),
                ready="ready",
                current=tmp_path,
                restarts=False,
            )
        )
        kept.wait_up(timeout_seconds=20.0)
        kept.kill()
        wait_until(lambda: kept.exit_status is not None, timeout_seconds=20.0, what="end by itself")
        assert kept.exit_status == 3
        assert len(kept.lives) == 2


#: Fills a disk, frees some of it meanwhile, and looks at it when the disk is gone.
USE_A_DISK = """
import sys
from pathlib import Path
from tests.chaos.disks import Disk, MountMeans, in_namespace

folder = Path(sys.argv[1])
assert in_namespace([sys.executable, __file__, *sys.argv[1:]]) is not MountMeans.NONE
with Disk(folder, 1 << 20) as disk:
    (folder / "kept").write_bytes(b"x" * 1000)
    with disk.full():
        try:
            (folder / "more").write_bytes(b"x" * 100_000)
        except OSError as error:
            print(error.strerror)
    (folder / "more").write_bytes(b"x" * 100_000)
print(sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.processes
def test_a_full_disk_takes_nothing_until_there_is_room_again_and_what_it_held_is_kept(tmp_path: Path) -> None:
    if probe() is MountMeans.NONE:
        pytest.skip("no disk can be mounted here")
    script = tmp_path / "use_a_disk.py"
    script.write_text(USE_A_DISK)
    command = [sys.executable, str(script), str(tmp_path / "disk")]
    found = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60.0, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    )
    assert found.stdout.splitlines() == ["No space left on device", "['kept', 'more']"]


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.timeout(240)
@needs_redis
def test_a_short_storm_is_survived_and_says_so(tmp_path: Path) -> None:
    options = ["--faults", "2", "--every", "1", "--samples", "100", "--seed", "3", "--json"]
    only = ["--only", "kill/redis", "--only", "restart/redis", "--only", "kill/agent-1", "--only", "kill/shard-1"]
    command = [sys.executable, "-m", "tests.chaos.storm", *options, *only, "--folder", str(tmp_path / "storm")]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200.0, cwd=ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    values = json.loads(found.stdout.splitlines()[-1])
    assert values["survived"] == 2
    assert (
        values["judges"]["lost_samples"] == values["judges"]["doubled_samples"] == values["judges"]["violations"] == 0
    )
    assert not (tmp_path / "storm").exists(), "nothing is kept where all went well"
