"""(y) What PipeTransformer's steps gain: a small vision transformer that is fine-tuned on eight emulated devices.

One process trains it first, to tell 32 shapes apart; then every run fine-tunes these weights, with a new head, for
eight classes of four shapes each. Eight equal devices, and eight of four speeds (1, 1, 1.5, 1.5, 2, 2, 3, 3), which
sleep to take the time of the profile. Two replicas of four stages under `allreduce` and `flush` begin; norms of
gradients freeze up to a third of the trained layers after each pass.

Accuracy does not depend on how long devices take, so seeds whose speed is not measured are trained by the same
processes on devices that take a hundredth of the time. Seed 0 is trained on both, which must give the same weights, bit
for bit.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.paired import interval
from benchmarks.sizes import sized
from benchmarks.sleeper import keep_time
from hetpipe.checkpoint.export import read_trained_state

ROOT = Path(__file__).resolve().parents[1]
_WIDTH, _HEADS, _BLOCKS = 32, 2, 12
_SIDE, _PATCHES = 16, 8
_SHAPES, _CLASSES = 32, 8
#: Standard deviation of the noise of a pixel, in the training before and in the fine-tuning; that of a shape is 1.
_NOISE_BEFORE, _NOISE = 1.0, 0.7
_BATCH = 8
_REPLICAS = 2
_TRAIN = sized(768, 256)
_TEST = 2048
_EPOCHS = sized(10, 3)
_PRETRAINING_STEPS, _PRETRAINING_BATCH = sized(500, 2), 128
#: Milliseconds of a block's forward on the slowest device; its backward takes twice as long.
_BLOCK_MS = sized(16.0, 2.0)
#: Devices of runs for the accuracy alone are so many times as fast.
_QUICK = 100.0
ACCURACY_SEEDS = sized(10, 1)
_TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Replica:
    """One of two alike pipelines."""

    speeds: tuple[float, ...]
    """Of the device of each stage."""
    layers: tuple[int, ...]
    """Of each stage: the cut with the fastest slowest stage."""


_EQUAL = {"equal": Replica((1.0, 1.0, 1.0, 1.0), (4, 3, 3, 4))}
CLUSTERS = sized({**_EQUAL, "unequal": Replica((1.0, 1.5, 2.0, 3.0), (2, 2, 4, 6))}, _EQUAL)
_NORMS = {"every": "epoch", "alpha": "1/3", "cache": "off"}
WITHOUT, ALL = "without", "freeze + recut + compress + cache"
#: The steps of PipeTransformer, alone and together: AutoPipe is `recut` and `compress`, which includes AutoDP.
_STEPS: Mapping[str, Mapping[str, Any]] = {
    WITHOUT: {},
    "freeze": _NORMS,
    "freeze + recut": {**_NORMS, "recut": True},
    "freeze + recut + compress": {**_NORMS, "compress": True},
    "freeze + cache": {**_NORMS, "cache": "on"},
    ALL: {**_NORMS, "compress": True, "cache": "on"},
}
STEPS = sized(_STEPS, {step: _STEPS[step] for step in (WITHOUT, ALL)})


class Embedding(nn.Module):
    """Patches of an image, and where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(_SIDE * _SIDE // _PATCHES, _WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(_PATCHES, _WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        """[samples, patches, pixels] to tokens."""
        tokens: Tensor = self.patch(value) + self.place
        return tokens


class Block(nn.Module):
    """Attention and MLP, each behind a normalisation and beside a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.asked, self.attended = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        """Tokens to tokens."""
        asked = self.asked(self.before(value)).unflatten(-1, (3, _HEADS, _WIDTH // _HEADS))
        query, key, content = asked.permute(2, 0, 3, 1, 4)
        attention = nn.functional.scaled_dot_product_attention(query, key, content)
        value = value + self.attended(attention.transpose(1, 2).flatten(2))
        mixed: Tensor = value + self.mlp(self.between(value))
        return mixed


class Head(nn.Module):
    """The mean of the tokens, classified."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.norm, self.classes = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, classes)

    def forward(self, value: Tensor) -> Tensor:
        """Tokens to logits."""
        logits: Tensor = self.classes(self.norm(value.mean(1)))
        return logits


def _transformer(classes: int) -> nn.Sequential:
    return nn.Sequential(Embedding(), *(Block() for _ in range(_BLOCKS)), Head(classes))


def model() -> nn.Module:
    """An embedding, blocks, and a head for the classes."""
    keep_time()
    return _transformer(_CLASSES)


def images(count: int, seed: int, noise: float) -> tuple[Tensor, Tensor]:
    """Patches of noisy images, and which shape each shows.

    A shape is a smooth random picture, moved by up to a pixel and of changing contrast.
    """
    drawn = torch.randn(_SHAPES, 1, _SIDE, _SIDE, generator=torch.Generator().manual_seed(7))
    smooth = nn.functional.avg_pool2d(nn.functional.pad(drawn, (1, 1, 1, 1), mode="circular"), 3, stride=1)[:, 0]
    pictures = smooth / smooth.std((1, 2), keepdim=True)
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.randint(_SHAPES, (count,), generator=generator)
    moves = torch.randint(-1, 2, (2, count, 1), generator=generator)
    down, right = (torch.arange(_SIDE) + moves) % _SIDE
    shown = pictures[shapes[:, None, None], down[:, :, None], right[:, None, :]]
    contrast = 0.6 + 0.8 * torch.rand(count, 1, 1, generator=generator)
    noisy = contrast * shown + noise * torch.randn(count, _SIDE, _SIDE, generator=generator)
    return noisy.reshape(count, _PATCHES, -1), shapes


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Patches of images, and the class of the shape that each shows."""
    patches, shapes = images(count, seed, _NOISE)
    return patches, shapes % _CLASSES


def data(seed: int) -> torch.utils.data.Dataset[tuple[Tensor, ...]]:
    """The training data of a seed."""
    return torch.utils.data.TensorDataset(*samples(_TRAIN, 1_000 + seed))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(output, target)


def pretrained() -> tuple[Mapping[str, Tensor], float]:
    """Weights of a transformer that tells the shapes apart, and its accuracy on the test images."""
    torch.manual_seed(0)
    trained = _transformer(_SHAPES)
    optimizer = torch.optim.AdamW(trained.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.003, total_steps=_PRETRAINING_STEPS)
    for step in range(_PRETRAINING_STEPS):
        patches, shapes = images(_PRETRAINING_BATCH, 1_000_000 + step, _NOISE_BEFORE)
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(patches), shapes).backward()  # type: ignore[no-untyped-call]  # torch ships it untyped
        optimizer.step()
        schedule.step()
    return trained.state_dict(), _accuracy(trained, *images(_TEST, 2, _NOISE_BEFORE))


def _accuracy(trained: nn.Module, patches: Tensor, wanted: Tensor) -> float:
    with torch.no_grad():
        return float((trained(patches).argmax(1) == wanted).float().mean())


def _profile(kinds: Mapping[str, float], faster: float) -> dict[str, Any]:
    row = 4 * _BATCH * _PATCHES * _WIDTH
    times = [_BLOCK_MS / 2, *[_BLOCK_MS] * _BLOCKS, _BLOCK_MS / 4]
    layers = [
        {
            "name": str(index),
            "parameter_bytes": sum(4 * each.numel() for each in layer.parameters()),
            "activation_bytes": 8 * row,
            "output_bytes": row,
            "forward_ms": {kind: time / speed / faster for kind, speed in kinds.items()},
            "backward_ms": {kind: 2 * time / speed / faster for kind, speed in kinds.items()},
        }
        for index, (layer, time) in enumerate(zip(model().children(), times, strict=True))
    ]
    return {"version": 1, "model": "transformer", "batch_size": _BATCH, "input_bytes": row, "layers": layers}


@dataclass(frozen=True, slots=True)
class Case:
    """What a run trains."""

    replica: Replica
    freeze: Mapping[str, Any]
    seed: int
    quick: bool = False

    def job(self, weights: Path) -> dict[str, Any]:
        """The job file, which fine-tunes the file `weights`."""
        speeds = self.replica.speeds * _REPLICAS
        kinds = {f"x{speed:g}": speed for speed in speeds}
        faster = _QUICK if self.quick else 1.0
        links = {"bandwidth_bytes_per_second": 1e9 * faster, "latency_seconds": 0.0001 / faster}
        return {
            "name": "transformer",
            "seed": self.seed,
            "model": "benchmarks.transformer:model",
            "init_from": str(weights),
            "loss": "benchmarks.transformer:loss",
            "data": {"train": {"call": "benchmarks.transformer:data", "args": {"seed": self.seed}}, "shuffle": False},
            "batch_size": _BATCH,
            "epochs": _EPOCHS,
            "optimizer": {
                "name": "AdamW",
                "lr": 0.001,
                "groups": [{"parameters": [f"{_BLOCKS + 1}.*"], "lr": 0.02}],
            },
            "weights": "flush",
            "workers": {"count": _REPLICAS, "stages": [list(self.replica.layers)] * _REPLICAS},
            "sync": {"kind": "allreduce", "minibatches_per_wave": 8},
            "cluster": {
                "file": {
                    "device_types": {kind: {"memory_bytes": 1 << 33} for kind in kinds},
                    "nodes": [{"name": "n0", "devices": [f"x{speed:g}" for speed in speeds]}],
                    "links": {"intra_node": links, "inter_node": links},
                },
                "profile": _profile(kinds, faster),
                "emulate": True,
            },
            **({"freeze": dict(self.freeze)} if self.freeze else {}),
        }


@dataclass(frozen=True, slots=True)
class Trained:
    """What became of a run."""

    speed: float
    """Samples per second of the whole run."""
    accuracy: float
    """On the test samples."""
    frozen: tuple[int, ...]
    """F of each segment with frozen layers."""
    members: tuple[int, ...]
    """Virtual workers of each lineup that trained."""
    weights: Mapping[str, Tensor]


def train(case: Case, trunk: Mapping[str, Tensor]) -> Trained:
    """Fine-tune `trunk` with the new head of the case's seed."""
    torch.manual_seed(case.seed)
    tuned = _transformer(_CLASSES)
    own = tuned.state_dict()
    with tempfile.TemporaryDirectory(prefix="hetpipe-bench-") as name:
        folder, program = Path(name), str(Path(sys.executable).with_name("hetpipe"))
        start, run_dir = folder / "start.safetensors", folder / "run"
        save_file({key: trunk[key] if trunk[key].shape == own[key].shape else own[key] for key in own}, start)
        (folder / "job.yaml").write_text(yaml.safe_dump(case.job(start)))
        command = [program, "train", str(folder / "job.yaml"), "--json", "--run-dir", str(run_dir)]
        ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
        result = json.loads((run_dir / "result.json").read_text())
        if result["staleness"]["violations"] != 0:
            raise RuntimeError(f"{' '.join(command)}: {result['staleness']['violations']} violations in the history")
        plan = json.loads((run_dir / "plan.json").read_text())
        tuned.load_state_dict(read_trained_state(str(run_dir)).tensors)
    frozen = [one["frozen"] for one in result.get("frozen") or ()]
    reached = [
        len(one["workers"]) for one in plan.get("freeze_lineups") or () if one["frozen"] <= max(frozen, default=0)
    ]
    accuracy = _accuracy(tuned, *samples(_TEST, 3))
    return Trained(
        result["samples_per_second"],
        accuracy,
        tuple(frozen),
        tuple(reached or [_REPLICAS]),
        tuned.state_dict(),
    )


def measure(rounds: int) -> dict[str, Any]:
    """Each step's speed with one seed, those with all steps and without with `rounds` seeds, and all accuracies."""
    trunk, known = pretrained()
    found: dict[str, Any] = {"pre-training": {"accuracy": round(known, 4)}}
    for cluster, replica in CLUSTERS.items():
        speeds = {
            step: [train(Case(replica, freeze, seed), trunk) for seed in range(rounds if step in (WITHOUT, ALL) else 1)]
            for step, freeze in STEPS.items()
        }
        for step, own in speeds.items():
            pairs = list(zip(own, speeds[WITHOUT], strict=False))
            found[f"{cluster}, {step}"] = {
                "samples per second": [round(one.speed, 1) for one in own],
                "ratio": round(statistics.median(one.speed / other.speed for one, other in pairs), 3),
                "ratios": [round(one.speed / other.speed, 3) for one, other in pairs],
                "accuracy of seed 0": round(own[0].accuracy, 4),
                "frozen": [list(one.frozen) for one in own],
                "virtual workers": list(own[0].members),
            }
        found[f"{cluster}, accuracy"] = _accuracies(replica, speeds, trunk)
    return found


def _accuracies(
    replica: Replica, measured: Mapping[str, Sequence[Trained]], trunk: Mapping[str, Tensor]
) -> dict[str, Any]:
    """All steps beside none, seed by seed; on quick devices where a seed's speed is not measured.

    Raises:
        RuntimeError: the weights of seed 0 are others on quick devices than on slow ones.
    """
    runs = {}
    for step in (WITHOUT, ALL):
        own = list(measured[step][:ACCURACY_SEEDS])
        again = train(Case(replica, STEPS[step], seed=0, quick=True), trunk)
        if any(not torch.equal(tensor, own[0].weights[name]) for name, tensor in again.weights.items()):
            raise RuntimeError(f"{step}: the weights differ between quick and slow devices")
        others = range(len(own), ACCURACY_SEEDS)
        runs[step] = own + [train(Case(replica, STEPS[step], seed, quick=True), trunk) for seed in others]
    differences = [one.accuracy - other.accuracy for one, other in zip(runs[ALL], runs[WITHOUT], strict=True)]
    bounds = interval(differences)
    return {
        "without": [round(one.accuracy, 4) for one in runs[WITHOUT]],
        "all": [round(one.accuracy, 4) for one in runs[ALL]],
        "difference": [round(difference, 4) for difference in differences],
        "mean difference": round(statistics.mean(differences), 5),
        "95 % interval": bounds and [round(bound, 5) for bound in bounds],
        "frozen": [list(one.frozen) for one in runs[ALL]],
    }


def tables(found: Mapping[str, Any]) -> str:
    """What `measure` has found as the tables of docs/benchmarks.md."""
    lines = []
    for cluster in CLUSTERS:
        head = [
            cluster,
            "samples/s, seed 0",
            "/ without, each seed",
            "accuracy, seed 0",
            f"frozen of {_BLOCKS + 2}, seed 0",
            "virtual workers",
        ]
        lines += [f"| {' | '.join(head)} |", "|---|---|---|---|---|---|"]
        for step in STEPS:
            row = found[f"{cluster}, {step}"]
            cells = [
                step,
                f"{row['samples per second'][0]:.0f}",
                ", ".join(f"{ratio:.2f}" for ratio in row["ratios"]),
                f"{row['accuracy of seed 0']:.3f}",
                ", ".join(map(str, row["frozen"][0])) or "0",
                ", then ".join(map(str, row["virtual workers"])),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += ["| accuracy | without | all steps | difference in points, mean and 95 % interval |", "|---|---|---|---|"]
    for cluster in CLUSTERS:
        row = found[f"{cluster}, accuracy"]
        means = [f"{statistics.mean(row[contender]):.4f}" for contender in ("without", "all")]
        bounds = row["95 % interval"] or (math.nan, math.nan)
        points = " to ".join(f"{100 * bound:+.2f}" for bound in bounds)
        lines.append(f"| {cluster} | {means[0]} | {means[1]} | {100 * row['mean difference']:+.2f} ({points}) |")
    return "\n".join(lines)
