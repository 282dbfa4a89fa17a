"""(v) Frozen layers whose results are cached: pairs of runs, in turn.

One virtual worker of two stages on one node, a trunk of eight layers and a head; the data are dealt in order, so that
units are minibatches, or shuffled, so that they are samples. Once the trunk is heavy, so that reading pays; once it is
so light that reading and computing take about as long. There `auto` may cost no more than 2 %. Speeds are those of all
passes but the first, by the history of the last stage.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from benchmarks.paired import interval
from benchmarks.sizes import sized

ROOT = Path(__file__).resolve().parents[1]
_BATCH = 32
_BATCHES = sized(40, 4)
_EPOCHS = sized(6, 3)
_NUM_FROZEN = 8
#: Width of the trunk.
WIDTHS: Mapping[str, int] = {"heavy": sized(1024, 64), "light": 16}
_TIMEOUT_SECONDS = 600.0


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Inputs of the trunk's width, by index."""

    def __init__(self, width: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(_BATCH * _BATCHES, width, generator=generator)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], torch.tensor(index % 2)


def model(width: int) -> nn.Module:
    """The trunk, and the head."""
    trunk = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(_NUM_FROZEN)]
    return nn.Sequential(*trunk, nn.Linear(width, 2))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(output, target)


@dataclass(frozen=True, slots=True)
class Contest:
    """Two jobs that differ in their section `freeze` alone."""

    freeze: Mapping[str, Any]
    baseline: Mapping[str, Any]
    shuffle: bool = False
    epochs: int = _EPOCHS


_TRUNK = {"layers": _NUM_FROZEN}
CONTESTS: Mapping[str, Contest] = {
    "auto / off, {}, in order": Contest({**_TRUNK, "cache": "auto"}, {**_TRUNK, "cache": "off"}),
    "auto / off, {}, shuffled": Contest({**_TRUNK, "cache": "auto"}, {**_TRUNK, "cache": "off"}, shuffle=True),
}


def _job(width: int, freeze: Mapping[str, Any], contest: Contest) -> dict[str, Any]:
    arguments = {"args": {"width": width}}
    return {
        "name": "frozen-cache",
        "model": {"call": "benchmarks.frozen_cache:model", **arguments},
        "loss": "benchmarks.frozen_cache:loss",
        "data": {"train": {"call": "benchmarks.frozen_cache:Samples", **arguments}, "shuffle": contest.shuffle},
        "batch_size": _BATCH,
        "epochs": contest.epochs,
        "optimizer": {"name": "SGD", "lr": 0.001},
        "workers": {"count": 1, "stages": [[4, 5]]},
        "sync": {"kind": "none", "minibatches_per_wave": 2},
        **({"freeze": dict(freeze)} if freeze else {}),
    }


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run."""

    speed: float
    """Samples per second after the first pass."""
    median_speed: float
    """Samples per second of the median pass after the first, from the last step of the pass before it."""
    reads: int
    """Minibatches read from the cache."""
    processor: float
    """Seconds of processor of all processes of the run, from its start to its end."""


def train(width: int, freeze: Mapping[str, Any], contest: Contest) -> Figures:
    """Train the job once."""
    with tempfile.TemporaryDirectory(prefix="hetpipe-bench-") as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(yaml.safe_dump(_job(width, freeze, contest)))
        run_dir = folder / "run"
        program = str(Path(sys.executable).with_name("hetpipe"))
        before = _processor_seconds()
        command = [program, "train", str(folder / "job.yaml"), "--json", "--run-dir", str(run_dir)]
        subprocess.run(
            command,
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_SECONDS,
        )
        processor = _processor_seconds() - before
        lines = map(json.loads, (run_dir / "history" / "vw-0-stage-1.jsonl").read_text().splitlines())
        steps = [line["t"] for line in lines if line["event"] == "step"]
        result = json.loads((run_dir / "result.json").read_text())
    later, ends = steps[_BATCHES:], steps[_BATCHES - 1 :: _BATCHES]
    passes = [after - before for before, after in itertools.pairwise(ends)]
    return Figures(
        _BATCH * (len(later) - 1) / (later[-1] - later[0]),
        _BATCH * _BATCHES / statistics.median(passes),
        result["cache"]["reads"] if freeze else 0,
        processor,
    )


def _processor_seconds() -> float:
    """Of the programs that have been run so far, and of all processes that they have waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(rounds: int) -> dict[str, Any]:
    """Ratios of the speeds of each contest and trunk, their mean's 95 % interval, and how much was read."""
    found: dict[str, Any] = {}
    for (name, contest), (trunk, width) in itertools.product(CONTESTS.items(), WIDTHS.items()):
        pairs = pairs_of(width, contest, rounds)
        figures = summary([one.speed / other.speed for one, other in pairs])
        found[name.format(trunk)] = {**figures, "minibatches read": pairs[-1][0].reads}
    return found


def pairs_of(width: int, contest: Contest, rounds: int) -> list[tuple[Figures, Figures]]:
    """Figures of both jobs, as often as there are rounds, in an order that changes from pair to pair."""
    found = []
    for number in range(rounds):
        if number % 2 == 0:
            one = train(width, contest.freeze, contest)
            found.append((one, train(width, contest.baseline, contest)))
        else:
            other = train(width, contest.baseline, contest)
            found.append((train(width, contest.freeze, contest), other))
    return found


def summary(ratios: list[float]) -> dict[str, Any]:
    """The median of ratios, the 95 % interval of their mean, and each of them."""
    bounds = interval(ratios)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "95 % interval of the mean": bounds and [round(bound, 3) for bound in bounds],
        "each": [round(ratio, 3) for ratio in ratios],
    }
