"""(t) A move of layers with 64 MiB of state, at a barrier and without one, against a plain barrier and new processes.

Two virtual workers of two stages of 50 ms (`sleeper`), one parameter server: a real run with 7 processes. Between the
two slow layers is one with 64 MiB of state that takes no time: trained weights, their momentum and frozen weights. A
script lets it move there and back between the stages of virtual worker 0, with barriers in between at which nothing
changes. Then virtual worker 1 is drained and added again, as layers moved before: it writes a checkpoint, its processes
end, and new ones join at a later barrier. In a second run an operator moves the layer there and back, as often, which
needs no barrier. In a third a script does, while minibatches are in flight; `python -m benchmarks.moves live` is that
run alone.

A pause is the time between the last update of the first stage before a barrier and its first one behind it, so that
filling and draining the pipeline is part of all of them. A gap is the time between two passes or updates of one stage
of virtual worker 0, from the trace; those during a move are from the third wave before its first one, in which the
stage is built anew, to that one.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from benchmarks.sizes import sized
from benchmarks.sleeper import STAGE_SECONDS, Sleeper, keep_time
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.server.decisions_file import read_decisions
from hetpipe.values.decisions import MoveDecision

ROOT = Path(__file__).resolve().parents[1]
N = 4
#: Moves, each behind a barrier at which nothing moves; and as many without a barrier.
NUM_MOVES = sized(10, 2)
#: The first wave of a virtual worker by the layers of its first move without a barrier, and from one to the next.
FIRST_LIVE, LIVE_EVERY = 6, 6
#: Bytes of a tensor of this layer: weights, as many of momentum, and frozen ones; 64 MiB together.
_TRAINED_BYTES = sized(8 << 20, 1 << 16)
_FROZEN_BYTES = sized(48 << 20, 1 << 16)
_FLOAT_BYTES = 4
_WIDTH = 64
_TIMEOUT_SECONDS = 240.0


class State(nn.Module):
    """A layer with much state and little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(_TRAINED_BYTES // _FLOAT_BYTES))
        self.frozen = nn.Parameter(torch.zeros(_FROZEN_BYTES // _FLOAT_BYTES), requires_grad=False)

    def forward(self, value: Tensor) -> Tensor:
        """Compute, at once."""
        return value * self.trained[:_WIDTH] + self.frozen[:_WIDTH]


def model() -> nn.Module:
    """Two slow layers, and the state between them."""
    keep_time()
    return nn.Sequential(Sleeper(), State(), Sleeper())


def _script() -> Iterator[dict[str, Any]]:
    """A barrier at which nothing moves, then one with a move, and so on; the first two clocks warm everything up."""
    for number in range(NUM_MOVES):
        clock = 2 + 2 * number
        yield {"at": {"clock": clock}, "do": "barrier"}
        yield {"at": {"clock": clock + 1}, "do": "move", "vw": 0, "stages": _stages(number)}


def _live_script() -> Iterator[dict[str, Any]]:
    for number in range(NUM_MOVES):
        p = N * (FIRST_LIVE + LIVE_EVERY * number) + 1
        yield {"at": {"p": p}, "do": "move", "vw": 0, "stages": _stages(number)}


def _stages(number: int) -> list[int]:
    """The cut of a move: to the later stage and back."""
    return [1, 2] if number % 2 == 0 else [2, 1]


JOB: dict[str, Any] = {
    "name": "moves",
    "model": "benchmarks.moves:model",
    "loss": "benchmarks.sleeper:loss",
    "data": {"train": "benchmarks.sleeper:data"},
    "batch_size": 1,
    "minibatches": N * 2000,
    "optimizer": {"name": "SGD", "lr": 0.001, "momentum": 0.9},
    "workers": {"count": 2, "stages": [[2, 1], [2, 1]]},
    "sync": {"kind": "wsp", "D": 1, "minibatches_per_wave": N, "deterministic": True},
    "parameter_servers": {"count": 1},
}


def steps(run_dir: Path, vw: int) -> list[dict[str, Any]]:
    """The updates of the first stage of a virtual worker, in order."""
    path = run_dir / "history" / f"vw-{vw}-stage-0.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in map(json.loads, (one for one in lines if one.endswith("\n"))) if line["event"] == "step"]


def _wait(run: subprocess.Popen[str], run_dir: Path, vw: int, incarnation: int, p: int) -> None:
    """Until a virtual worker has made the update after minibatch `p`."""
    deadline = SYSTEM_CLOCK.monotonic() + _TIMEOUT_SECONDS
    while not any(line["incarnation"] >= incarnation and line["p"] >= p for line in steps(run_dir, vw)):
        if run.poll() is not None or SYSTEM_CLOCK.monotonic() > deadline:
            raise RuntimeError(f"virtual worker {vw} has not come to minibatch {p}: exit status {run.poll()}")
        SYSTEM_CLOCK.sleep(0.25)


def _hetpipe(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("hetpipe")), *arguments]


@contextmanager
def _training(script: Iterator[dict[str, Any]] | None = None) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run of the job, and its folder; ends the run."""
    folder = Path(tempfile.mkdtemp(prefix="hetpipe-bench-"))
    job = JOB if script is None else JOB | {"elastic": {"script": list(script)}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    run_dir = folder / "run"
    with (folder / "stderr").open("w") as stderr:
        command = _hetpipe("train", str(folder / "job.yaml"), "--json", "--run-dir", str(run_dir))
        run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield run, run_dir
    finally:
        run.terminate()
        run.communicate(timeout=_TIMEOUT_SECONDS)


def train() -> Path:
    """Moves at barriers, then virtual worker 1 is drained and added again; returns the folder of the run."""
    with _training(_script()) as (run, run_dir):
        _wait(run, run_dir, 0, 0, N * (2 * NUM_MOVES + 4))
        for asked in (("drain", "1", "--wait"), ("add",)):
            command = _hetpipe("workers", *asked, "--run-dir", str(run_dir))
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        _wait(run, run_dir, 1, 1, 1)
    return run_dir


def train_live() -> Path:
    """Moves without barriers; returns the folder of the run."""
    with _training(_live_script()) as (run, run_dir):
        _wait(run, run_dir, 0, 0, N * (FIRST_LIVE + LIVE_EVERY * NUM_MOVES))
    return run_dir


def train_by_hand() -> list[float]:
    """Seconds of the pauses of virtual worker 0 in a run whose layers an operator moves."""
    clocks: list[int] = []
    with _training() as (run, run_dir):
        _wait(run, run_dir, 0, 0, 2 * N)
        for number in range(NUM_MOVES):
            layers = "1,2" if number % 2 == 0 else "2,1"
            command = _hetpipe("workers", "move", "0", layers, "--run-dir", str(run_dir))
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            deadline = SYSTEM_CLOCK.monotonic() + _TIMEOUT_SECONDS
            while len(clocks) <= number:
                clocks = [line.at.clock for line in read_decisions(run_dir) if isinstance(line, MoveDecision)]
                if run.poll() is not None or SYSTEM_CLOCK.monotonic() > deadline:
                    raise RuntimeError(f"move {number} did not take effect: exit status {run.poll()}")
                SYSTEM_CLOCK.sleep(0.25)
            _wait(run, run_dir, 0, 0, (clocks[-1] + 1) * N)
    moments = {line["p"]: line["t"] for line in steps(run_dir, 0)}
    return [moments[clock * N + 1] - moments[clock * N] for clock in clocks]


def pauses(run_dir: Path) -> tuple[dict[int, float], float]:
    """Seconds of the pause at each clock for virtual worker 0, and those without virtual worker 1."""
    moments = {line["p"]: line["t"] for line in steps(run_dir, 0)}
    found = {clock: moments[clock * N + 1] - moments[clock * N] for clock in range(2, 2 + 2 * NUM_MOVES)}
    of_other = steps(run_dir, 1)
    left = max(line["t"] for line in of_other if line["incarnation"] == 0)
    return found, min(line["t"] for line in of_other if line["incarnation"] == 1) - left


def gaps(run_dir: Path, stage: int) -> tuple[list[float], list[float]]:
    """Stages of 50 ms: the longest gap during each move without a barrier, and two waves after each."""
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    computed = [event for event in events if (event.get("pid"), event["ph"]) == (0, "X") and event["name"][:1] in "FBs"]
    lane = sorted({event["tid"] for event in computed})[stage]
    busy = sorted(
        (event["ts"], event["ts"] + event["dur"], event["args"].get("p", 0))
        for event in computed
        if event["tid"] == lane
    )
    longest: dict[int, float] = {}
    newest = 0
    for (_, end, p), (start, _, _) in pairwise(busy):
        newest = max(newest, p)
        wave = (newest - 1) // N
        longest[wave] = max(longest.get(wave, 0.0), (start - end) * 1e-6 / STAGE_SECONDS)
    firsts = [FIRST_LIVE + LIVE_EVERY * number for number in range(NUM_MOVES)]
    moved = [max(longest[wave] for wave in range(first - 3, first + 1)) for first in firsts]
    return moved, [longest[first + 2] for first in firsts]


def measure_live() -> dict[str, Any]:
    """Gaps in stages of 50 ms, in the order of the moves: to the later stage, back, and so on."""
    run_dir = train_live()
    found: dict[str, Any] = {}
    for stage, name in enumerate(("first", "last")):
        moved, between = gaps(run_dir, stage)
        found |= {
            f"without a barrier: longest gaps of the {name} stage": [round(gap, 2) for gap in moved],
            f"without a barrier: longest gap of the {name} stage, median": round(statistics.median(moved), 2),
            f"without a barrier: longest gap of the {name} stage, worst": round(max(moved), 2),
            f"longest gap of the {name} stage where nothing moves, worst": round(max(between), 2),
        }
    return found


def measure() -> dict[str, Any]:
    """Three runs: medians in minibatches of 50 ms."""
    run_dir, by_hand = train(), train_by_hand()
    found, restart = pauses(run_dir)
    plain = [seconds for clock, seconds in found.items() if clock % 2 == 0]
    moved = [seconds for clock, seconds in found.items() if clock % 2]
    beyond = [with_move - without for without, with_move in zip(plain, moved, strict=True)]
    return {
        "plain barrier, seconds": round(statistics.median(plain), 3),
        "barrier with a move, seconds": round(statistics.median(moved), 3),
        "without a barrier, an operator's move, seconds": round(statistics.median(by_hand), 3),
        "without a barrier / barrier with a move": round(statistics.median(by_hand) / statistics.median(moved), 3),
        "beyond a plain barrier, minibatches": round(statistics.median(beyond) / STAGE_SECONDS, 2),
        "beyond a plain barrier, worst, minibatches": round(max(beyond) / STAGE_SECONDS, 2),
        **measure_live(),
        "drained and added again, seconds": round(restart, 3),
        "move / new processes": round(statistics.median(moved) / restart, 4),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure_live() if sys.argv[1:] == ["live"] else measure()) + "\n")
