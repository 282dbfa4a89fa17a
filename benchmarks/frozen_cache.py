"""(v) Frozen layers whose results are cached: two runs at the same time, in turns of a twentieth of a second.

One virtual worker of two stages on one node, a trunk of eight layers and a head; the data are dealt in order, so that
units are minibatches, or shuffled, so that they are samples. Once the trunk is heavy, so that reading pays; once it is
so light that it does not. There `auto` may cost no more than 2 %. Times are those of a run's own turns, by its history.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from benchmarks.paired import interval
from benchmarks.sizes import sized
from benchmarks.turns import Contender, in_turns
from hetpipe.observe.segments import read_lines

ROOT = Path(__file__).resolve().parents[1]
_BATCH = 32
_BATCHES = sized(40, 4)
_NUM_FROZEN = 8
#: Of a run, behind its first pass.
_BLOCKS = sized(30, 2)
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Trunk:
    """The layers before the head."""

    width: int
    block: int
    """Passes whose times are added, so that they take seconds, many turns."""

    @property
    def epochs(self) -> int:
        """Passes of a run."""
        return 1 + _BLOCKS * self.block


TRUNKS: Mapping[str, Trunk] = {"heavy": Trunk(sized(1024, 64), sized(2, 1)), "light": Trunk(16, sized(10, 1))}


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


_FROZEN = {"layers": _NUM_FROZEN}
CONTESTS: Mapping[str, Contest] = {
    "auto / off, {}, in order": Contest({**_FROZEN, "cache": "auto"}, {**_FROZEN, "cache": "off"}),
    "auto / off, {}, shuffled": Contest({**_FROZEN, "cache": "auto"}, {**_FROZEN, "cache": "off"}, shuffle=True),
}


def _job(trunk: Trunk, freeze: Mapping[str, Any], contest: Contest) -> dict[str, Any]:
    arguments = {"args": {"width": trunk.width}}
    return {
        "name": "frozen-cache",
        "model": {"call": "benchmarks.frozen_cache:model", **arguments},
        "loss": "benchmarks.frozen_cache:loss",
        "data": {"train": {"call": "benchmarks.frozen_cache:Samples", **arguments}, "shuffle": contest.shuffle},
        "batch_size": _BATCH,
        "epochs": trunk.epochs,
        "optimizer": {"name": "SGD", "lr": 0.001},
        "workers": {"count": 1, "stages": [[4, 5]]},
        "sync": {"kind": "none", "minibatches_per_wave": 2},
        **({"freeze": dict(freeze)} if freeze else {}),
    }


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run: seconds of its turns."""

    first: float
    """From the first forward to the last step of the first pass."""
    blocks: tuple[float, ...]
    """Of each block, from the last step before it to its last one."""
    reads: int
    """Minibatches read from the cache."""

    @property
    def whole(self) -> float:
        """From the first forward to the last step."""
        return self.first + sum(self.blocks)


class Run:
    """One run of a job, which takes turns with another."""

    def __init__(self, trunk: Trunk, freeze: Mapping[str, Any], contest: Contest, folder: Path) -> None:
        """Start it in `folder`, which is empty."""
        job = folder / "job.yaml"
        job.write_text(yaml.safe_dump(_job(trunk, freeze, contest)))
        self._block = trunk.block
        self._run_dir = folder / "run"
        program = str(Path(sys.executable).with_name("hetpipe"))
        command = [program, "train", str(job), "--json", "--run-dir", str(self._run_dir)]
        self.contender = Contender(command, ROOT, self._progress)

    def figures(self) -> Figures:
        """What it took; it has ended."""
        forward, steps = self._times(0, "forward")[0], self._times(1, "step")
        ends = [*steps[_BATCHES - 1 :: _BATCHES * self._block]]
        began, *at = map(self.contender.worked_until, (forward, *ends))
        cache = json.loads((self._run_dir / "result.json").read_text()).get("cache")
        blocks = tuple(after - before for before, after in itertools.pairwise(at))
        return Figures(at[0] - began, blocks, cache["reads"] if cache else 0)

    def _progress(self) -> int:
        with suppress(FileNotFoundError):
            return (self._run_dir / "metrics" / "vw-0.jsonl").stat().st_size
        return 0

    def _times(self, stage: int, event: str) -> list[float]:
        lines = map(json.loads, read_lines(self._run_dir / "history" / f"vw-0-stage-{stage}.jsonl"))
        return [line["t"] for line in lines if line["event"] == event]


def compare(trunk: Trunk, contest: Contest, rounds: int) -> dict[str, Any]:
    """Speed of the first job of a contest, divided by that of the second one.

    Returns:
        Of blocks of passes behind the first one, in pairs: the geometric mean and its 95 % interval. Then, for each
        pair of runs, the ratio of the whole, and how many seconds more the first pass took.
    """
    pairs = [_pair(trunk, contest) for _ in range(rounds)]
    logs = [math.log(b / a) for one, other in pairs for a, b in zip(one.blocks, other.blocks, strict=True)]
    bounds = interval(logs)
    assert bounds is not None, "a run has several blocks"
    return {
        "ratio": round(math.exp(math.fsum(logs) / len(logs)), 4),
        "95 % interval": [round(math.exp(bound), 4) for bound in bounds],
        "whole runs": [round(other.whole / one.whole, 4) for one, other in pairs],
        "first pass, seconds more": [round(one.first - other.first, 4) for one, other in pairs],
        "a pass, seconds": round(math.fsum(pairs[0][1].blocks) / (trunk.epochs - 1), 4),
        "minibatches read": pairs[-1][0].reads,
    }


def _pair(trunk: Trunk, contest: Contest) -> tuple[Figures, Figures]:
    with tempfile.TemporaryDirectory(prefix="hetpipe-bench-") as name:
        runs: list[Run] = []
        for freeze in (contest.freeze, contest.baseline):
            folder = Path(name) / str(len(runs))
            folder.mkdir()
            runs.append(Run(trunk, freeze, contest, folder))
        in_turns([run.contender for run in runs], longest_seconds=_TIMEOUT_SECONDS)
        one, other = (run.figures() for run in runs)
        return one, other


def measure(rounds: int) -> dict[str, Any]:
    """Figures of each contest and trunk."""
    return {
        name.format(kind): compare(trunk, contest, rounds)
        for (name, contest), (kind, trunk) in itertools.product(CONTESTS.items(), TRUNKS.items())
    }
