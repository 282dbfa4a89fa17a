"""Back in balance: a device that becomes slow, and a block of layers that becomes active on one stage.

Two virtual workers of two stages on emulated devices, as real processes: twelve layers of 12 ms each. In one run a
device takes four times as long as its profile says; the run has to notice it, and to move layers away from it. In
another one a script activates three layers that are all on the second stage, with `elastic.recut` and without. A
decision is a clock from which on the plan of a virtual worker is another one. What counts is how many it takes until
the run is at 0.9 of the simulator's ideal: the rate of the fastest of all cuts, for a simulator that knows of the slow
device or the active layers, with links and parameter servers that cost no software.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.protocol import train
from benchmarks.sizes import sized
from benchmarks.sleeper import keep_time
from hetpipe.decide.planner.active_profile import active_profile
from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.simulator.documents import costs_of, simulated_plan, with_cuts
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import read_document
from hetpipe.values.ids import DeviceId
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile

NUM_LAYERS = 12
N, STALENESS = 4, 1
#: A run is in balance again from this share of the ideal on.
GOAL = 0.9
SLOW_DEVICE, SLOWDOWN = "n1/0", 4.0
#: The layers of the second stage that become active, and the clock of the line.
ACTIVE_BEFORE = (0, 1, 2, 6, 7, 8)
ACTIVATED = (9, 10, 11)
ACTIVATED_AT = sized(20, 6)
NUM_MINIBATCHES = sized({"straggler": 400, "activated": 480}, {"straggler": 180, "activated": 96})

_KIND = "TITAN_V"
_FORWARD_MS, _BACKWARD_MS = 4.0, 8.0
_WIDTH, _BATCH_SIZE, _DTYPE_BYTES, _NUM_SAMPLES = 64, 4, 4, 100_000
#: Waves behind a decision that do not count: in them layers move, and the pipeline fills.
_MARGIN = 2


def model() -> nn.Module:
    """Equal layers, which two cores compute in passing."""
    keep_time()
    return nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)))


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Noise from each sample's number."""

    def __len__(self) -> int:
        """Number of samples."""
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample."""
        value = torch.sin(torch.arange(_WIDTH) * float(index + 1))
        return value, value.flip(0)


def data() -> Samples:
    """The training data."""
    return Samples()


def profile() -> dict[str, Any]:
    """The profile file of the model."""
    row = _BATCH_SIZE * _WIDTH * _DTYPE_BYTES
    layers = [
        {
            "name": str(index),
            "parameter_bytes": (_WIDTH * _WIDTH + _WIDTH) * _DTYPE_BYTES,
            "activation_bytes": 2 * row,
            "output_bytes": row,
            "forward_ms": {_KIND: _FORWARD_MS},
            "backward_ms": {_KIND: _BACKWARD_MS},
        }
        for index in range(NUM_LAYERS)
    ]
    return {
        "version": 1,
        "model": "benchmarks.balance:model",
        "batch_size": _BATCH_SIZE,
        "input_bytes": row,
        "layers": layers,
    }


def cluster() -> dict[str, Any]:
    """The cluster file: two nodes of two devices, with links that take no time to speak of."""
    link = {"bandwidth_bytes_per_second": 1e9, "latency_seconds": 0.0001, "efficiency": 0.8}
    return {
        "device_types": {_KIND: {}},
        "nodes": [{"name": f"n{node}", "devices": [_KIND] * 2} for node in range(2)],
        "links": {"intra_node": link, "inter_node": link},
    }


def job(name: str, **changes: Any) -> dict[str, Any]:
    """The job file, with other sections."""
    return {
        "name": f"balance-{name}",
        "model": "benchmarks.balance:model",
        "loss": "torch.nn.functional:mse_loss",
        "data": {"train": "benchmarks.balance:data"},
        "batch_size": _BATCH_SIZE,
        "minibatches": NUM_MINIBATCHES[name],
        "optimizer": {"name": "SGD", "lr": 0.001},
        "workers": {"stages": "auto", "devices": [["n0/0", "n1/0"], ["n0/1", "n1/1"]]},
        "sync": {"kind": "wsp", "D": STALENESS, "minibatches_per_wave": N},
        "parameter_servers": {"count": 1},
        "survive": {"patience_waves": sized(5, 2)},
        "cluster": {"file": cluster(), "profile": profile(), "emulate": True} | changes.pop("cluster", {}),
        **changes,
    }


@dataclass(frozen=True, slots=True)
class Found:
    """The rates of a run, in minibatches per second of all virtual workers."""

    clocks: tuple[int, ...]
    """Of the decisions."""
    before: float
    """Up to the first decision."""
    after: tuple[float, ...]
    """Behind each decision, up to the next one or the end."""
    ideal: float

    @property
    def needed(self) -> int | None:
        """Decisions until the rate is at `GOAL` of the ideal; None: it never is."""
        good = (number for number, rate in enumerate(self.after, start=1) if rate >= GOAL * self.ideal)
        return next(good, None)


def _steps(run_dir: Path, vw: int) -> dict[int, float]:
    """Minibatch → the moment of its update on the first stage."""
    lines = (run_dir / "history" / f"vw-{vw}-stage-0.jsonl").read_text().splitlines()
    return {line["p"]: line["t"] for line in map(json.loads, lines) if line["event"] == "step"}


def decided_at(run_dir: Path, since: int) -> list[int]:
    """The clocks from `since` on at which the plan of a virtual worker becomes another one, in order."""
    lines = (run_dir / "history" / "shard-0.jsonl").read_text().splitlines()
    return sorted(
        {line["clock"] for line in map(json.loads, lines) if line["event"] == "plan" and line["clock"] >= since}
    )


def rates(run_dir: Path, clocks: Sequence[int], num_workers: int) -> Iterator[float]:
    """Minibatches per second of all virtual workers from each clock on, up to the next one."""
    steps = [_steps(run_dir, vw) for vw in range(num_workers)]
    last = min(max(own) for own in steps) // N - 1
    for clock, following in pairwise([*clocks, last]):
        first = clock + _MARGIN if clock + _MARGIN < following else clock
        begin, end = (steps[0][wave * N] for wave in (first, following))
        yield sum(begin < moment <= end for own in steps for moment in own.values()) / (end - begin)


def ideal(run_dir: Path, *, inactive: Sequence[int] = (), slow: Mapping[DeviceId, float] | None = None) -> float:
    """The simulated minibatches per second of the fastest cut: of the virtual worker with a slow device, or of all."""
    document = read_document(PlanDocument, run_dir / "forecast.json")
    known = Profile.model_validate_json(json.dumps(profile()))
    devices = Cluster.model_validate_json(json.dumps(cluster()))
    plan = simulated_plan(document, costs_of(document, known, devices))
    costs = Costs(active_profile(known, inactive), devices)
    options = SimulationOptions(staleness=STALENESS, minibatches=40 * N, stragglers=slow or {}, staggered=True)
    whose = [
        vw for vw, stages in enumerate(plan.workers) if slow is None or any(stage.device in slow for stage in stages)
    ]
    cuts = [(0, border, NUM_LAYERS) for border in range(1, NUM_LAYERS)]
    found = (simulate(with_cuts(plan, dict.fromkeys(whose, cut)), costs, options) for cut in cuts)
    return max(one.samples_per_second for one in found) / _BATCH_SIZE


def straggler() -> Found:
    """A device is slow from the start."""
    run_dir, _, _ = train(job("straggler", cluster={"stragglers": {SLOW_DEVICE: SLOWDOWN}}))
    clocks = decided_at(run_dir, 1)
    before, *after = rates(run_dir, [1, *clocks], 2)
    return Found(tuple(clocks), before, tuple(after), ideal(run_dir, slow={DeviceId(SLOW_DEVICE): SLOWDOWN}))


def activated(*, recut: bool) -> Found:
    """A block becomes active on the second stage."""
    active = [*ACTIVE_BEFORE, *ACTIVATED]
    line = {"at": {"clock": ACTIVATED_AT}, "do": "activate", "active": active}
    run_dir, _, _ = train(job("activated", elastic={"active": [*ACTIVE_BEFORE], "script": [line], "recut": recut}))
    clocks = decided_at(run_dir, 1) if recut else [ACTIVATED_AT]
    before, *after = rates(run_dir, [1, *clocks], 2)
    inactive = [layer for layer in range(NUM_LAYERS) if layer not in active]
    return Found(tuple(clocks), before, tuple(after), ideal(run_dir, inactive=inactive))


def figures(found: Found) -> dict[str, Any]:
    """One run, for people."""
    return {
        "clocks of the decisions": [*found.clocks],
        "minibatches/s before": round(found.before, 2),
        "minibatches/s behind each decision": [round(rate, 2) for rate in found.after],
        "simulator's ideal": round(found.ideal, 2),
        "measured / ideal, at the end": round(found.after[-1] / found.ideal, 3) if found.after else None,
        f"decisions until {GOAL} of the ideal": found.needed,
    }


def measure() -> dict[str, dict[str, Any]]:
    """All of the runs, by what happens."""
    return {
        f"a device takes {SLOWDOWN:g} times as long": figures(straggler()),
        "a block becomes active on one stage, with elastic.recut": figures(activated(recut=True)),
        "the same without": figures(activated(recut=False)),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(), indent=1) + "\n")
