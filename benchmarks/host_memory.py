"""Host memory of a node, as `hetpipe plan` predicts it and as a real local run takes it.

Each case is profiled, planned on CPU devices of one node, and trained with the cuts of that plan. Measured is the sum
of the proportional set sizes of the run's processes, sampled: what memory they share counts once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from benchmarks.sizes import sized

ROOT = Path(__file__).resolve().parents[1]

VOCABULARY = sized(16_384, 64)
WIDTH = sized(512, 16)
NUM_BLOCKS = sized(8, 4)
LENGTH = sized(64, 8)
BATCH_SIZE = 4
MINIBATCHES_PER_WAVE = 4
NUM_WAVES = 3

#: Seconds between two looks at the processes.
_PERIOD_SECONDS = 0.2

NODE = "n0"


class Block(nn.Module):
    """Attention and a feed-forward part, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        q, k, v = self.into(self.norms[0](x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return y


class Gpt(nn.Module):
    """A decoder of tokens that is cut by its own forward."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, length] ids to [batch, length, vocabulary] logits."""
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def tied() -> nn.Module:
    """With one weight for embedding and head."""
    return Gpt(is_tied=True)


def untied() -> nn.Module:
    """With two."""
    return Gpt(is_tied=False)


class _Data:
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return ids[:-1], ids[1:]


def data() -> _Data:
    """Random ids and the next ones."""
    return _Data()


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of every token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration."""

    model: str
    workers: int
    stages: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.model}, V = {self.workers}, K = {self.stages}"

    def job(self, stages: list[list[int]] | None) -> dict[str, Any]:
        """The job file; `stages`: layers of each stage, by virtual worker, None before the plan."""
        return {
            "name": "host-memory",
            "model": f"benchmarks.host_memory:{self.model}",
            "loss": "benchmarks.host_memory:loss",
            "data": {"train": "benchmarks.host_memory:data"},
            "batch_size": BATCH_SIZE,
            "minibatches": NUM_WAVES * MINIBATCHES_PER_WAVE * self.workers,
            "optimizer": {"name": "AdamW", "lr": 0.0003},
            "workers": {"stages": "auto" if stages is None else stages},
            "sync": {"kind": "wsp", "D": 0, "minibatches_per_wave": MINIBATCHES_PER_WAVE},
        }


ALL_CASES = (Case("untied", 1, 2), Case("untied", 1, 4), Case("untied", 2, 2), Case("tied", 1, 2), Case("tied", 1, 4))
CASES = sized(ALL_CASES, ALL_CASES[3:4])


def cluster(num_devices: int) -> dict[str, Any]:
    """One node of CPU devices, without limits."""
    link = {"bandwidth_bytes_per_second": 1e10}
    return {
        "device_types": {"cpu": {"memory_bytes": 1 << 40}},
        "nodes": [{"name": NODE, "devices": ["cpu"] * num_devices}],
        "links": {"intra_node": link, "inter_node": link},
    }


def measure(case: Case, folder: Path | None = None) -> Mapping[str, Any]:
    """MiB that are predicted for the node, and that a run took at most; with the largest parts of both."""
    folder = folder or Path(tempfile.mkdtemp(prefix="hetpipe-bench-"))
    job, profile, devices = folder / "job.yaml", folder / "profile.json", folder / "cluster.yaml"
    job.write_text(yaml.safe_dump(case.job(None)))
    devices.write_text(yaml.safe_dump(cluster(case.workers * case.stages)))
    _hetpipe("profile", str(job), "--types", "cpu", "--out", str(profile))
    names = [f"{NODE}/{index}" for index in range(case.workers * case.stages)]
    groups = [names[first : first + case.stages] for first in range(0, len(names), case.stages)]
    inputs = ["--profile", str(profile), "--cluster", str(devices)]
    allocation = ["--allocation", "explicit", "--workers", json.dumps(groups)]
    plan = json.loads(_hetpipe("plan", str(job), *inputs, *allocation, "--json").splitlines()[-1])
    counts = [[last - first for first, last in (s["layers"] for s in vw["stages"])] for vw in plan["virtual_workers"]]
    job.write_text(yaml.safe_dump(case.job(counts)))
    inspection, training = _peaks([*_PROGRAM, "train", str(job), "--run-dir", str(folder / "run")])
    measured = max(inspection.num_bytes, training.num_bytes)
    (node,) = plan["host_memory"]
    return {
        "predicted MiB": _mib(node["peak_bytes"]),
        "measured MiB": _mib(measured),
        "predicted / measured": round(node["peak_bytes"] / measured, 3),
        "predicted / measured, inspection": round(node["inspection_bytes"] / inspection.num_bytes, 3),
        "predicted MiB, by process": {one["name"]: _mib(one["bytes"]) for one in node["processes"]},
        "measured MiB, by process": training.parts,
        "measured MiB, by process, inspection": inspection.parts,
    }


_PROGRAM = (str(Path(sys.executable).with_name("hetpipe")),)


def _hetpipe(*arguments: str) -> str:
    done = subprocess.run([*_PROGRAM, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def _mib(num_bytes: float) -> int:
    return round(num_bytes / 2**20)


@dataclass(slots=True)
class _Peak:
    """The largest sum over all processes so far."""

    num_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    """MiB of each process then."""

    def look(self, sizes: Mapping[str, int]) -> None:
        """Take another look into account."""
        if sum(sizes.values()) > self.num_bytes:
            self.num_bytes = sum(sizes.values())
            self.parts = {name: _mib(size) for name, size in sizes.items()}


def _peaks(command: list[str]) -> tuple[_Peak, _Peak]:
    """Run a command; the peaks while it has an inspection, and otherwise."""
    inspection, training = _Peak(), _Peak()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as started:
        done = threading.Event()
        while started.poll() is None:
            sizes = dict(_sizes(started.pid))
            (inspection if any("inspect_process" in name for name in sizes) else training).look(sizes)
            done.wait(_PERIOD_SECONDS)
    if started.returncode:
        raise subprocess.CalledProcessError(started.returncode, command)
    return inspection, training


def _sizes(root: int) -> Iterator[tuple[str, int]]:
    """(name, PSS in bytes) of `root` and of all processes that descend from it."""
    children: dict[int, list[int]] = {}
    for found in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((found / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(found.name))
    ahead = [root]
    while ahead:
        process = ahead.pop()
        ahead += children.get(process, [])
        folder = Path(f"/proc/{process}")
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            lines = (folder / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        size = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
        yield f"{_role(words)} ({process})", size


def _role(words: list[str]) -> str:
    programs = [os.path.basename(word) for word in words if not word.startswith("-")]  # noqa: PTH119 - a word
    known = ("stage_process", "inspect_process", "fork_server", "parameter-server", "coordinator", "agent", "train")
    return next((role for role in known if any(role in program for program in programs)), programs[0])
