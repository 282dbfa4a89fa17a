"""(m), (q) What a minibatch of one stage costs beside a plain loop, on models that are cut by their own forward.

One virtual worker of one stage, `sync: none`, no other process: the stage's own thread runs the runtime with a real
history, metrics and timeline. Whenever it has made an update, the timeline, which hears of it, runs the same minibatch
through the plain loop on the same thread: a model of its own, torch's optimizer, the same samples. So the two alternate
minibatch by minibatch, and a machine that drifts slows them alike. Seconds are those of the clock; those of the
processor, of this one thread, tell more where others use the machine.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from benchmarks.against import interval
from benchmarks.sizes import sized
from benchmarks.stages import Setting, Stage, run_stage, use_one_thread
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.job.file import OptimizerSpec
from hetpipe.observe.history import History
from hetpipe.observe.metrics import Metrics
from hetpipe.observe.timeline import Activity, Timeline
from hetpipe.pipeline.callables import LossFunction, MapDataset, own_loss
from hetpipe.pipeline.data import read_batch
from hetpipe.pipeline.layering import layers_of, on_output
from hetpipe.pipeline.precision import autocast
from hetpipe.values.precision import Precision

#: Pairs of minibatches that count, and those before them that fill caches and the heap.
PAIRS, WARM_UP = sized(16, 2), sized(3, 1)
#: Of the case with many lengths, each once.
LENGTHS = sized(range(33, 233), range(3, 6))

BATCH_SIZE = 8
GPU_BATCH_SIZE, GPU_TOKENS = 32, 512
TOKENS = sized(128, 6)


@dataclass(frozen=True, slots=True)
class Gpt2Size:
    """Sizes of a GPT-2."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int


GPT2 = sized(Gpt2Size(12, 768, 12, 50257, 1024), Gpt2Size(2, 16, 2, 50, 16))
#: Less to compute for as many calls: what a call costs shows more.
SMALL_GPT2 = sized(Gpt2Size(12, 256, 4, 8192, 256), Gpt2Size(2, 16, 2, 50, 16))


def gpt2_of_transformers() -> tuple[Any, Any] | None:
    """Its classes for the configuration and the model; None where it is not installed, or not with what it needs."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    return GPT2Config, GPT2LMHeadModel


class Block(nn.Module):
    """One of GPT-2's blocks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attention and a perceptron, each beside a skip."""
        rows, length, width = hidden.shape
        parts = self.attention(self.before_attention(hidden)).split(width, dim=2)
        query, key, value = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        found = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
        hidden = hidden + self.drop(self.projection(found.transpose(1, 2).reshape(rows, length, width)))
        inner = functional.gelu(self.up(self.before_mlp(hidden)), approximate="tanh")
        result: Tensor = hidden + self.drop(self.down(inner))
        return result


class OwnGpt2(nn.Module):
    """GPT-2 with its tied head and its own loss."""

    def __init__(self, size: Gpt2Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.positions, size.width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList([Block(size.width, size.heads) for _ in range(size.layers)])
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Logits, and the loss of the next token."""
        del attention_mask  # all ones here
        hidden = self.drop(
            self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        )
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        wanted = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()), "logits": logits}


def gpt2(size: Gpt2Size) -> nn.Module:
    """That of transformers where it is installed, with random weights; else one of the same sizes."""
    classes = gpt2_of_transformers()
    if classes is None:
        return OwnGpt2(size)
    config_class, model_class = classes
    config = config_class(
        vocab_size=size.vocabulary,
        n_positions=size.positions,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = model_class(config)
    return model


class BasicBlock(nn.Module):
    """One of ResNet-18's blocks."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample: nn.Module | None = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, image: Tensor) -> Tensor:
        """Two convolutions beside a skip."""
        kept = image if self.downsample is None else self.downsample(image)
        image = self.relu(self.bn1(self.conv1(image)))
        image = self.bn2(self.conv2(image))
        image += kept
        result: Tensor = self.relu(image)
        return result


class ResNet18(nn.Module):
    """ResNet-18 as torchvision has it, of which nothing need be installed."""

    def __init__(self, width: int = sized(64, 4), classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        blocks: list[nn.Module] = []
        for level in range(4):
            inner, outer = width * 2 ** max(0, level - 1), width * 2**level
            blocks += [BasicBlock(inner, outer, 1 if level == 0 else 2), BasicBlock(outer, outer, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8 * width, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Logits."""
        image = self.maxpool(self.relu(self.bn1(self.conv1(image))))
        result: Tensor = self.fc(torch.flatten(self.avgpool(self.blocks(image)), 1))
        return result


class Sentences:
    """Random tokens. All samples of a minibatch, which is read in one go, have its length."""

    def __init__(self, size: Gpt2Size, lengths: Sequence[int], batch_size: int = BATCH_SIZE) -> None:
        self._size = size
        self._batch_size = batch_size
        self._lengths = lengths
        self._reads = 0

    def __len__(self) -> int:
        """One minibatch of each length."""
        return self._batch_size * len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """A sample."""
        length = self._lengths[self._reads // self._batch_size % len(self._lengths)]
        self._reads += 1
        ids = torch.randint(0, self._size.vocabulary, (length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


class Images:
    """Random images and classes."""

    def __init__(self, count: int) -> None:
        self._images = torch.randn(BATCH_SIZE, 3, *sized((224, 224), (32, 32)))
        self._count = count

    def __len__(self) -> int:
        """Samples."""
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """A sample."""
        return self._images[index % BATCH_SIZE], index % 1000


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared."""

    build: Callable[[], nn.Module]
    data: Callable[[], MapDataset]
    """Called for each of the two: they read the same."""
    num_minibatches: int
    optimizer: str
    arguments: Mapping[str, float]
    loss: LossFunction | None = None
    """None: the model's own."""
    batch_size: int = BATCH_SIZE
    minibatches_per_wave: int = 1
    """N. The policy `wave` delays updates by N − 1 minibatches also where there is one stage; a plain loop does not."""


def _fixed(size: Gpt2Size) -> Sentences:
    return Sentences(size, (TOKENS,) * (WARM_UP + PAIRS))


def _many_lengths() -> Sentences:
    lengths = list(LENGTHS)
    random.Random(0).shuffle(lengths)
    return Sentences(SMALL_GPT2, [*lengths[:WARM_UP], *lengths])


_ADAMW = {"lr": 1e-4, "weight_decay": 0.01}
_SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}

CASES: Mapping[str, Case] = {
    "GPT-2": Case(lambda: gpt2(GPT2), lambda: _fixed(GPT2), WARM_UP + PAIRS, "AdamW", _ADAMW),
    "ResNet-18": Case(
        ResNet18,
        lambda: Images(BATCH_SIZE * (WARM_UP + PAIRS)),
        WARM_UP + PAIRS,
        "SGD",
        _SGD,
        functional.cross_entropy,
    ),
    "many lengths": Case(lambda: gpt2(SMALL_GPT2), _many_lengths, WARM_UP + len(LENGTHS), "AdamW", _ADAMW),
}

#: A size that keeps a GPU busy; the others leave it waiting for the processor that starts its kernels.
GPU_CASES: Mapping[str, Case] = {
    **CASES,
    f"GPT-2, {GPU_BATCH_SIZE} × {GPU_TOKENS}": Case(
        lambda: gpt2(GPT2),
        lambda: Sentences(GPT2, (GPU_TOKENS,) * (WARM_UP + PAIRS), GPU_BATCH_SIZE),
        WARM_UP + PAIRS,
        "AdamW",
        _ADAMW,
        batch_size=GPU_BATCH_SIZE,
    ),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where and in which precision both compute."""

    device: torch.device
    precision: Precision = "fp32"

    def now(self) -> Moment:
        """When everything asked of the device has been done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return Moment(SYSTEM_CLOCK.monotonic(), time.thread_time())


@dataclass(frozen=True, slots=True)
class Moment:
    """Seconds of the clock, and of this thread's processor."""

    wall: float
    processor: float

    def since(self, other: Moment) -> Moment:
        """The time between."""
        return Moment(self.wall - other.wall, self.processor - other.processor)


@dataclass(slots=True)
class Pairs:
    """Minibatch by minibatch what each took."""

    hetpipe: list[Moment] = field(default_factory=list)
    plain: list[Moment] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Medians of seconds, and plain / hetpipe with the bounds of its 95 % interval."""
        hetpipe, plain = self.hetpipe[WARM_UP:], self.plain[WARM_UP:]
        found: dict[str, float] = {}
        for kind in ("wall", "processor"):
            ours, theirs = ([getattr(each, kind) for each in side] for side in (hetpipe, plain))
            mean, low, high = interval([b / a for a, b in zip(ours, theirs, strict=True)])
            found |= {
                f"hetpipe, {kind} seconds": statistics.median(ours),
                f"plain loop, {kind} seconds": statistics.median(theirs),
                f"hetpipe / plain loop, {kind}": mean,
                f"hetpipe / plain loop, {kind}, low": low,
                f"hetpipe / plain loop, {kind}, high": high,
            }
        return {name: round(value, 4) for name, value in found.items()}


CPU = Place(torch.device("cpu"))


class PlainLoop:
    """Forward, backward, step, as people write it."""

    def __init__(self, case: Case, place: Place) -> None:
        torch.manual_seed(0)
        self._place = place
        self._batch_size = case.batch_size
        self._model = case.build().to(place.device)
        self._loss = case.loss
        self._data = case.data()
        self._optimizer = getattr(torch.optim, case.optimizer)(self._model.parameters(), **case.arguments)

    def _samples(self, p: int) -> range:
        return range((p - 1) * self._batch_size, p * self._batch_size)

    def minibatch(self, p: int) -> float:
        """Train on the p-th one; its loss."""
        samples = default_collate([self._data[index] for index in self._samples(p)])
        samples = tree_map_only(Tensor, lambda tensor: tensor.to(self._place.device), samples)
        self._optimizer.zero_grad()
        with autocast(self._place.precision, self._place.device):
            if self._loss is None:
                loss = own_loss(self._model(**samples))
            else:
                loss = self._loss(self._model(samples[0]), samples[1])  # type: ignore[assignment]
        loss.backward()  # type: ignore[no-untyped-call]  # torch ships it untyped
        self._optimizer.step()
        return float(loss.detach())


class _Alternating(Timeline):
    """After each update of the stage, the same minibatch through the plain loop."""

    def __init__(self, path: Path, loop: PlainLoop, pairs: Pairs, place: Place) -> None:
        super().__init__(path, process_index=0, process_name="vw", thread_index=0, thread_name="stage")
        self._loop = loop
        self._pairs = pairs
        self._now = place.now
        self._since = self._now()

    def begin(self) -> None:
        """Now the stage's first minibatch begins."""
        self._since = self._now()

    def record(
        self, activity: Activity, *, start_seconds: float, end_seconds: float, p: int | None = None, **args: Any
    ) -> None:
        """See `Timeline`."""
        super().record(activity, start_seconds=start_seconds, end_seconds=end_seconds, p=p, **args)
        if activity is Activity.STEP and p is not None:
            between = self._now()
            self._pairs.hetpipe.append(between.since(self._since))
            self._loop.minibatch(p)
            self._since = self._now()
            self._pairs.plain.append(self._since.since(between))


def pairs_of(name: str, place: Place = CPU) -> Pairs:
    """Measure one case, in this process."""
    case = GPU_CASES[name]
    use_one_thread()
    pairs = Pairs()
    torch.manual_seed(0)
    layers = layers_of(case.build(), read_batch(case.data(), range(4)), case.loss, precision=place.precision)
    specification = {"name": case.optimizer, **case.arguments}
    setting = Setting(
        case.minibatches_per_wave,
        case.num_minibatches // case.minibatches_per_wave,
        OptimizerSpec.model_validate(specification),
        has_shards=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        timeline = _Alternating(Path(folder) / "trace.jsonl", PlainLoop(case, place), pairs, place)
        history = History(Path(folder) / "history.jsonl", host="127.0.0.1", pid=1, role="stage", term=1)
        metrics = Metrics(Path(folder) / "metrics.jsonl")
        stage = Stage(
            layers,
            on_output(layers, case.loss),
            case.data(),
            case.batch_size,
            timeline,
            history,
            metrics,
            device=place.device,
        )
        gc.freeze()  # as a stage does
        timeline.begin()
        run_stage(setting, stage, upstream=None, downstream=None)
        for record in (timeline, history, metrics):
            record.close()
    return pairs


def measure(place: Place = CPU) -> dict[str, dict[str, float]]:
    """Every case in a process of its own."""
    found: dict[str, dict[str, float]] = {}
    context = multiprocessing.get_context("spawn")
    for name in CASES if place.device.type == "cpu" else GPU_CASES:
        with context.Pool(1) as workers:
            found[name] = workers.apply(pairs_of, (name, place)).figures()
        sys.stderr.write(f"models: {name} done\n")
    return found
