"""(y) What PipeTransformer's steps gain: a small transformer on eight emulated devices, real training, paired seeds.

Eight equal devices, and eight of four speeds (1, 1, 1.5, 1.5, 2, 2, 3, 3), which sleep to take the time of the profile.
Two replicas of four stages under `allreduce` and `flush` begin; norms of gradients freeze up to a third of the trained
layers after each pass. Test samples are from the same fixed source as the training samples.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.sizes import sized
from benchmarks.sleeper import keep_time

ROOT = Path(__file__).resolve().parents[1]
_WIDTH, _TOKENS, _BLOCKS, _CLASSES = 32, 8, 8, 4
_BATCH = 16
_TRAIN = sized(640, 256)
_TEST = 2048
_EPOCHS = sized(10, 3)
#: Milliseconds of a block's forward on the slowest device; its backward takes twice as long.
_BLOCK_MS = sized(12.0, 2.0)
_TIMEOUT_SECONDS = 900.0

#: Device → its speed.
_EQUAL: Mapping[str, tuple[float, ...]] = {"equal": (1.0,) * 8}
CLUSTERS = sized({**_EQUAL, "unequal": (1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 3.0, 3.0)}, _EQUAL)
_NORMS = {"every": "epoch", "alpha": "1/3", "cache": "off"}
#: The steps, each with those before it.
_ALL: Mapping[str, Mapping[str, Any]] = {
    "without": {},
    "freeze": _NORMS,
    "+ recut": {**_NORMS, "recut": True},
    "+ compress": {**_NORMS, "compress": True},
    "+ cache": {**_NORMS, "compress": True, "cache": "auto"},
}
STEPS = sized(_ALL, {step: _ALL[step] for step in ("without", "+ compress")})


class Block(nn.Module):
    """Attention and MLP, each behind a normalisation and beside a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attention = nn.MultiheadAttention(_WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        """Tokens to tokens."""
        normal = self.before(value)
        value = value + self.attention(normal, normal, normal, need_weights=False)[0]
        mixed: Tensor = value + self.mlp(self.between(value))
        return mixed


class Head(nn.Module):
    """The mean of the tokens, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        """Tokens to logits."""
        logits: Tensor = self.classes(value.mean(1))
        return logits


def model() -> nn.Module:
    """An embedding, blocks, and a head."""
    keep_time()
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), *(Block() for _ in range(_BLOCKS)), Head())


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens around the centres of their class, and the classes."""
    centres = torch.randn(_CLASSES, _TOKENS, _WIDTH, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(_CLASSES, (count,), generator=generator)
    noise = torch.randn(count, _TOKENS, _WIDTH, generator=generator)
    return 0.35 * centres[classes] + noise, classes


def data() -> torch.utils.data.Dataset[tuple[Tensor, ...]]:
    """The training data."""
    return torch.utils.data.TensorDataset(*samples(_TRAIN, 1))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(output, target)


def _profile(kinds: Mapping[str, float]) -> dict[str, Any]:
    row = 4 * _BATCH * _TOKENS * _WIDTH
    times = [_BLOCK_MS / 2, *[_BLOCK_MS] * _BLOCKS, _BLOCK_MS / 4]
    layers = [
        {
            "name": str(index),
            "parameter_bytes": sum(4 * each.numel() for each in layer.parameters()),
            "activation_bytes": 8 * row,
            "output_bytes": row,
            "forward_ms": {kind: time / speed for kind, speed in kinds.items()},
            "backward_ms": {kind: 2 * time / speed for kind, speed in kinds.items()},
        }
        for index, (layer, time) in enumerate(zip(model().children(), times, strict=True))
    ]
    return {"version": 1, "model": "transformer", "batch_size": _BATCH, "input_bytes": row, "layers": layers}


def job(speeds: tuple[float, ...], freeze: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The job file."""
    kinds = {f"x{speed:g}": speed for speed in speeds}
    links = {"bandwidth_bytes_per_second": 1e9, "latency_seconds": 0.0001}
    return {
        "name": "transformer",
        "seed": seed,
        "model": "benchmarks.transformer:model",
        "loss": "benchmarks.transformer:loss",
        "data": {"train": "benchmarks.transformer:data", "shuffle": False},
        "batch_size": _BATCH,
        "epochs": _EPOCHS,
        "optimizer": {"name": "AdamW", "lr": 0.001},
        "weights": "flush",
        "workers": {"count": 2, "stages": [[3, 2, 2, 3]] * 2},
        "sync": {"kind": "allreduce", "minibatches_per_wave": 8},
        "cluster": {
            "file": {
                "device_types": {kind: {"memory_bytes": 1 << 33} for kind in kinds},
                "nodes": [{"name": "n0", "devices": [f"x{speed:g}" for speed in speeds]}],
                "links": {"intra_node": links, "inter_node": links},
            },
            "profile": _profile(kinds),
            "emulate": True,
        },
        **({"freeze": dict(freeze)} if freeze else {}),
    }


def train(speeds: tuple[float, ...], freeze: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Samples per second, the accuracy on the test samples, and the layers frozen at the end."""
    with tempfile.TemporaryDirectory(prefix="hetpipe-bench-") as name:
        folder, program = Path(name), str(Path(sys.executable).with_name("hetpipe"))
        (folder / "job.yaml").write_text(yaml.safe_dump(job(speeds, freeze, seed)))
        run_dir, weights = folder / "run", folder / "model.safetensors"
        for command in (
            [program, "train", str(folder / "job.yaml"), "--json", "--run-dir", str(run_dir)],
            [program, "check", str(run_dir)],
            [program, "export", str(run_dir), str(weights)],
        ):
            ended = subprocess.run(
                command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
            )
            if ended.returncode:
                raise RuntimeError(f"{' '.join(command)}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
        result = json.loads((run_dir / "result.json").read_text())
        trained = model()
        trained.load_state_dict(load_file(weights))
    with torch.no_grad():
        inputs, classes = samples(_TEST, 2)
        accuracy = (trained(inputs).argmax(1) == classes).float().mean().item()
    frozen = result.get("frozen") or [{"frozen": 0}]
    return {"speed": result["samples_per_second"], "accuracy": accuracy, "frozen": frozen[-1]["frozen"]}


def measure(rounds: int) -> dict[str, Any]:
    """For each cluster and step the speed and the accuracy beside the job without, seed by seed."""
    found: dict[str, Any] = {}
    for cluster, speeds in CLUSTERS.items():
        runs = {step: [train(speeds, freeze, seed) for seed in range(rounds)] for step, freeze in STEPS.items()}
        for step, own in runs.items():
            pairs = list(zip(own, runs["without"], strict=True))
            ratios = [one["speed"] / other["speed"] for one, other in pairs]
            found[f"{cluster}, {step}"] = {
                "samples per second": [round(one["speed"], 1) for one in own],
                "ratio": round(statistics.median(ratios), 3),
                "accuracy": [round(one["accuracy"], 4) for one in own],
                "accuracy difference": [round(one["accuracy"] - other["accuracy"], 4) for one, other in pairs],
                "frozen": [one["frozen"] for one in own],
            }
    return found
