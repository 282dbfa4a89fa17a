"""What the harness itself measures: growth of processes, clocks from histories, orders to running processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.keeper import Keeper, Spec, owned
from tests.chaos.outcome import Tally
from tests.chaos.processes import Growth, Holding, Ledger, holding_of
from tests.chaos.run_folder import HistoryTail
from tests.chaos.trial import Verdict, layer_faults
from tests.polling import wait_until


def ledger(*sizes: int) -> Ledger:
    """One process looked at every second."""
    found = Ledger()
    found._found["p", 1] = [Holding(float(at), size << 20, 10, 30) for at, size in enumerate(sizes)]
    return found


def test_growth_compares_the_beginning_with_the_end() -> None:
    flat = ledger(50, *[100] * 7, 101, 130).growth(born=0.5, since=1.0, until=9.0)
    assert all(figure.is_flat for figure in flat["p"])
    (memory, _, _) = ledger(50, *range(100, 109)).growth(born=0.5, since=1.0, until=9.0)["p"]
    assert not memory.is_flat
    assert str(memory) == "resident MiB 100 → 107 (+7.0%)"
    assert ledger(1, 1).growth(born=0.5, since=5.0, until=9.0) == {}
    assert ledger(*range(100, 109)).growth(born=-1.0, since=1.0, until=8.0) == {}


@pytest.mark.parametrize(("what", "last", "flat"), [("threads", 11, True), ("threads", 12, False), ("files", 9, True)])
def test_a_thread_more_is_none(what: str, last: float, flat: bool) -> None:  # noqa: FBT001 - from a table
    assert Growth(what, 10, last).is_flat is flat


def test_what_this_process_holds() -> None:
    holding = holding_of(os.getpid(), at=1.0)
    assert holding is not None
    assert holding.resident_bytes > 1 << 20
    assert holding.threads >= 1
    assert holding.files >= 3
    assert holding_of(2**22 + 1, at=1.0) is None


def write(folder: Path, **record: Any) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "shard-0.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_the_tail_of_a_history_tells_the_clock_and_who_counts(tmp_path: Path) -> None:
    folder, tail = tmp_path / "history", HistoryTail(tmp_path)
    tail.look()
    assert tail.published == -1
    write(folder, event="join", vw=1, incarnation=0, clock=0)
    write(folder, event="publish", clock=3)
    tail.look()
    assert (tail.published, tail.members) == (3, {1: 0})
    write(folder, event="evict", vw=1, incarnation=0, clock=3)
    tail.look()
    assert tail.members == {}
    with (folder / "shard-0.jsonl").open("a") as file:
        file.write('{"event": "publish", ')
    tail.look()
    with (folder / "shard-0.jsonl").open("a") as file:
        file.write('"clock": 4}\n')
    tail.look()
    assert tail.published == 4, "a line is read when it is whole"


def test_witnesses_tell_what_is_lost_doubled_and_torn() -> None:
    whole, ledger = [1, 0, 2], {0: 1, 2: 2}
    assert layer_faults(dict.fromkeys("abcd", whole), ledger) == Verdict(())
    assert layer_faults({name: [1, 0, 1] for name in "abcd"}, ledger) == Verdict(
        tuple(f"{name}: 1 samples lost (first [2]), 0 doubled (first [])" for name in "abcd"), Tally(lost_samples=4)
    )
    assert layer_faults({**dict.fromkeys("abc", whole), "d": [2, 1, 2]}, ledger) == Verdict(
        ("d: 0 samples lost (first []), 2 doubled (first [0, 1])", "layers differ: a wave was torn"),
        Tally(doubled_samples=2, torn_layers=1),
    )
    frozen = {"a": {0: 1}}
    assert layer_faults({**dict.fromkeys("bcd", whole), "a": [1, 0, 0]}, ledger, frozen) == Verdict(())
    assert layer_faults(dict.fromkeys("abcd", whole), ledger, frozen).tally.doubled_samples > 0
    assert layer_faults({"a": whole}, ledger).problems == ("the final weights have layers ['a'], not 4",)


#: Says that it is ready, and reaches a failpoint again and again.
VICTIM = """
import os, sys, time
from hetpipe import failpoints
print("ready", flush=True)
while True:
    failpoints.reach("push.before_send")
    time.sleep(0.01)
"""


@pytest.mark.processes
def test_whoever_dies_is_started_again_and_can_be_told_to_fail(tmp_path: Path) -> None:
    arming, marks = tmp_path / "arming", tmp_path / "marks"
    arming.mkdir()
    marks.mkdir()
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "HETPIPE_CHAOS_ARM": str(arming),
        "PYTHONPATH": f"{Path(__file__).parent / 'remote'}:{root}",
    }
    with Keeper(tmp_path / "processes", "test-of-the-keeper") as keeper:
        kept = keeper.keep(
            Spec(key="victim", command=[sys.executable, "-c", VICTIM], environment=environment, ready="ready")
        )
        kept.wait_up(timeout_seconds=20.0)
        first = kept.life
        (arming / str(first.pid)).write_text(f"push.before_send=kill\n{marks}\n")
        wait_until(lambda: first.code is not None, timeout_seconds=20.0, what="death")
        assert first.code == -signal.SIGKILL
        assert json.loads((marks / "0-push.before_send").read_text())["pid"] == first.pid
        kept.wait_up(timeout_seconds=20.0)
        assert len(kept.lives) == 2
    assert list(owned("test-of-the-keeper")) == []


@pytest.mark.processes
def test_nobody_outlives_the_keeper(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('ready', flush=True); sys.stdin.read()"
    with Keeper(tmp_path, "test-of-orphans") as keeper:
        kept = keeper.keep(
            Spec(key="parent", command=[sys.executable, "-c", child], environment=dict(os.environ), ready="ready")
        )
        kept.wait_up(timeout_seconds=20.0)
        assert len(list(owned("test-of-orphans"))) == 2
        kept.wanted = False
        kept.kill()
        wait_until(lambda: not kept.is_up, timeout_seconds=20.0, what="death")
    assert list(owned("test-of-orphans")) == []
