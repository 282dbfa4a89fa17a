"""From the command to the first minibatch: `hetpipe train` of the demo's job, phase by phase.

The demo trains `examples/digits`: 2 virtual workers of 2 stages each, 2 parameter servers. Times are those that the
run's own processes have written down; so are those of its stages, from the agent's order to the stage being ready. With
processes that are started as programs (`HETPIPE_FORK_SERVER=0`) the same is measured beside it, run by run in turn.
Where other work shares the machine, the time of processors tells more than the time that passed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.sizes import sized
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.forking.fork_server import VARIABLE

ROOT = Path(__file__).resolve().parents[1]

#: Enough for every stage to have computed; the run ends soon afterwards.
MINIBATCHES = 8

#: prctl option: what a command leaves behind becomes a child of this process, so that its processor time is known.
_PR_SET_CHILD_SUBREAPER = 36

#: What is measured, by the value of the switch.
WAYS: Mapping[str, str] = {"forked": "1", "each a program": "0"} if sized(2, 1) == 2 else {"forked": "1"}

#: A phase ends with the last such line of a log before the first minibatch.
_ENDS: Mapping[str, tuple[str, str]] = {
    "services registered": ("coordinator.log", "member_registered"),
    "job inspected and handed in": ("coordinator.log", "job_submitted"),
    "stages started": ("agent.log", "child_started"),
    "stages ready": ("agent.log", "stage_ready"),
}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def _first_minibatch(run_dir: Path) -> float:
    """When a last stage had gone forward and back for the first time, in monotonic seconds."""
    histories = sorted((run_dir / "history").glob("vw-*.jsonl"))
    return min(float(line["t"]) for path in histories for line in _lines(path) if line["event"] == "backward")


def _train(run_dir: Path, switch: str) -> None:
    command = [str(Path(sys.executable).with_name("hetpipe")), "train", "examples/digits/job.yaml"]
    wish = ["--set", f"minibatches={MINIBATCHES}", "--set", "epochs=null", "--run-dir", str(run_dir)]
    environment = {**os.environ, VARIABLE: switch}
    done = subprocess.run(
        [*command, *wish], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600.0, check=False
    )
    assert done.returncode == 0, done.stderr


def _processor_seconds() -> float:
    """Of all children of this process that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _children() -> set[int]:
    """Process ids of the children of this process: an earlier benchmark may have left some that do not end."""
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def run(switch: str) -> dict[str, float]:
    """One run: seconds from the command to the end of each phase, and the rest."""
    folder = Path(tempfile.mkdtemp(prefix="hetpipe-bench-"))
    run_dir = folder / "run"
    others, used = _children(), _processor_seconds()
    began, offset = SYSTEM_CLOCK.monotonic(), SYSTEM_CLOCK.wall() - SYSTEM_CLOCK.monotonic()
    _train(run_dir, switch)
    ended = SYSTEM_CLOCK.monotonic()
    first = _first_minibatch(run_dir)
    found: dict[str, float] = {}
    for phase, (log, event) in _ENDS.items():
        lines = [line for line in _lines(run_dir / "logs" / log) if line["event"] == event]
        found[phase] = max(datetime.fromisoformat(line["t"]).timestamp() - offset for line in lines) - began
    found["first minibatch"] = first - began
    ready = [line["seconds"] for line in _lines(run_dir / "logs" / "agent.log") if line["event"] == "stage_ready"]
    found["a stage, asked for to ready"] = statistics.median(ready)
    found[f"the whole run of {MINIBATCHES} minibatches"] = ended - began
    while left := _children() - others:  # what is left of the command becomes a child of this process when it ends
        os.waitpid(left.pop(), 0)
    found["processor time of all processes"] = _processor_seconds() - used
    shutil.rmtree(folder, ignore_errors=True)
    return found


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Medians by way of starting, in seconds."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, switch in WAYS.items():
                runs[way].append(run(switch))
    finally:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    return {
        way: {phase: round(statistics.median(one[phase] for one in found), 2) for phase in found[0]}
        for way, found in runs.items()
    }
