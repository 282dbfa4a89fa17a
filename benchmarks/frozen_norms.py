"""(v) What norms of gradients that decide cost by themselves: two runs that take turns.

The job of `frozen_cache`, with norms that decide after each pass and so small an α that no layer ever freezes, and
without `freeze`; they may cost 2 %. Both runs are there at once, and one of them stands still (SIGSTOP) while the other
one has its turn, so that each pair of turns finds the machine alike. Compared are the steps of the last stage in a
pair's turns, by its history: those after the first pass, with the barriers between passes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from benchmarks.frozen_cache import NUM_BATCHES, ROOT, WIDTHS, Contest, job_of, summary
from benchmarks.sizes import sized
from hetpipe.clock import SYSTEM_CLOCK

_CONTEST = Contest({"every": "epoch", "alpha": "1/100", "cache": "off"}, {}, epochs=sized(10_000, 500))
_PAIRS_PER_ROUND = sized(8, 2)
#: Seconds of a turn: more than a pass.
_TURN_SECONDS = sized(2.0, 0.2)
#: Before a turn counts: what was on its way when a run was stopped.
_SETTLE_SECONDS = sized(0.2, 0.05)
_START_SECONDS = 120.0


class Turns:
    """One run, which has its turn from time to time."""

    def __init__(self, folder: Path, width: int, freeze: Mapping[str, Any]) -> None:
        """Start it in `folder`."""
        folder.mkdir()
        (folder / "job.yaml").write_text(yaml.safe_dump(job_of(width, freeze, _CONTEST)))
        self._history = folder / "run" / "history" / "vw-0-stage-1.jsonl"
        program = str(Path(sys.executable).with_name("hetpipe"))
        self._process = subprocess.Popen(
            [program, "train", str(folder / "job.yaml"), "--json", "--run-dir", str(folder / "run")],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait_moving(self) -> None:
        """Until the first pass is over."""
        deadline = SYSTEM_CLOCK.monotonic() + _START_SECONDS
        while len(self.steps()) <= NUM_BATCHES:
            if self._process.poll() is not None or SYSTEM_CLOCK.monotonic() > deadline:
                raise RuntimeError(f"a run of {self._history.parent.parent} does not come under way")
            SYSTEM_CLOCK.sleep(0.05)

    def take(self) -> tuple[float, float]:
        """Go on for a turn, and stop; when it began and ended to count."""
        self._signal(signal.SIGCONT)
        SYSTEM_CLOCK.sleep(_SETTLE_SECONDS)
        began = SYSTEM_CLOCK.monotonic()
        SYSTEM_CLOCK.sleep(_TURN_SECONDS)
        ended = SYSTEM_CLOCK.monotonic()
        self.stop()
        return began, ended

    def stop(self) -> None:
        """Have all its processes stand still."""
        self._signal(signal.SIGSTOP)

    def steps(self) -> list[float]:
        """When each step of the last stage was."""
        if not self._history.exists():
            return []
        whole = self._history.read_text().rpartition("\n")[0].splitlines()
        return [line["t"] for line in map(json.loads, whole) if line["event"] == "step"]

    def end(self) -> None:
        """Kill all its processes."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        for pid in _descendants(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """A process, and all that it and they have started."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


@contextmanager
def _running(folder: Path, width: int, freeze: Mapping[str, Any]) -> Iterator[Turns]:
    run = Turns(folder, width, freeze)
    try:
        yield run
    finally:
        run.end()


def measure(rounds: int) -> dict[str, Any]:
    """Ratios of the steps of each pair of turns for each trunk, and their mean's 95 % interval."""
    found = {}
    for trunk, width in WIDTHS.items():
        with tempfile.TemporaryDirectory(prefix="hetpipe-bench-") as name, ExitStack() as runs:
            freezes = {"norms": _CONTEST.freeze, "without": _CONTEST.baseline}
            both = {of: runs.enter_context(_running(Path(name) / of, width, freeze)) for of, freeze in freezes.items()}
            for run in both.values():
                run.wait_moving()
            for run in both.values():
                run.stop()
            turns: dict[str, list[tuple[float, float]]] = {of: [] for of in both}
            for number in range(rounds * _PAIRS_PER_ROUND):
                for of in list(both)[:: 1 if number % 2 == 0 else -1]:
                    turns[of].append(both[of].take())
            speeds = {of: _speeds(both[of].steps(), turns[of]) for of in both}
        ratios = [one / other for one, other in zip(speeds["norms"], speeds["without"], strict=True) if other]
        found[f"norms / without, {trunk}"] = summary(ratios)
    return found


def _speeds(steps: list[float], turns: list[tuple[float, float]]) -> list[float]:
    """Steps per second of each turn."""
    return [sum(began <= at < ended for at in steps) / (ended - began) for began, ended in turns]
