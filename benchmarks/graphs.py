"""Graphs of real models, from hetpipe's own recording of their forward on the meta device: nothing is computed.

A node is a call that depends on the model's input; its time is that of its floating-point operations and of the bytes
that it reads and writes on a device of `_FLOPS` and `_BYTES_PER_SECOND`, twice as long backward; what it makes is kept
until its backward, unless it is a view.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.sizes import sized
from benchmarks.vpipe import Graph, Node, Value
from hetpipe.model.calls import name_of
from hetpipe.model.graph import CutPoint, Recording, Step, cuts_of, layers_from, work_until
from hetpipe.model.recording import record
from hetpipe.pipeline.torchvision_operators import prepare_import

_FLOPS, _BYTES_PER_SECOND = 40e12, 700e9
_TICKS_PER_SECOND = 10**12

#: Calls that count floating-point operations.
_COUNTED = frozenset({"linear", "conv2d", "addmm", "matmul", "bmm", "baddbmm", "scaled_dot_product_attention"})
_VIEWS = frozenset(
    {"view", "reshape", "transpose", "permute", "flatten", "split", "chunk", "expand", "unsqueeze", "squeeze", "detach"}
    | {"__getitem__", "contiguous", "size", "to", "type", "float", "t", "unflatten", "view_as", "expand_as"}
)


@dataclass(frozen=True, slots=True)
class Modelled:
    """One model."""

    graph: Graph
    """Its calls."""
    layers: tuple[int, ...]
    """The first call of each layer as the planner sees them, and the end."""


@dataclass(frozen=True, slots=True)
class _Case:
    make: Callable[[], nn.Module]
    inputs: Mapping[str, Tensor]
    results_of: Callable[[Any], Any] = lambda output: output


class SeparableConvolution(nn.Module):
    """ReLU, a depthwise and a pointwise convolution, and BatchNorm, twice."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(2) for layer in self._half(width, size)))

    @staticmethod
    def _half(width: int, size: int) -> list[nn.Module]:
        depthwise = nn.Conv2d(width, width, size, padding=size // 2, groups=width, bias=False)
        return [nn.ReLU(), depthwise, nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)]

    def forward(self, image: Tensor) -> Tensor:
        """Of the same shape."""
        found: Tensor = self.layers(image)
        return found


class Cell(nn.Module):
    """Five sums of two operations each, on the outputs of the two cells before or of earlier sums, as in AmoebaNet."""

    #: Per sum: two (state, operation).
    SUMS = (((0, 5), (1, 3)), ((1, 5), (0, 0)), ((0, 3), (2, 5)), ((3, 0), (1, 3)), ((2, 3), (4, 5)))

    def __init__(self, before: int, last: int, width: int) -> None:
        super().__init__()
        self.entries = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))
            for wide in (before, last)
        )
        sizes = [size for pair in self.SUMS for _, size in pair]
        self.operations = nn.ModuleList(
            SeparableConvolution(width, size) if size else nn.AvgPool2d(3, 1, padding=1) for size in sizes
        )

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        """Concatenated sums, five times the width."""
        states = [entry(each) for entry, each in zip(self.entries, (before, last), strict=True)]
        operations = iter(self.operations)
        for (one, _), (other, _) in self.SUMS:
            states.append(next(operations)(states[one]) + next(operations)(states[other]))
        return torch.cat(states[2:], dim=1)


class AmoebaNetLike(nn.Module):
    """Three groups of cells on ever smaller images."""

    def __init__(self, cells: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.groups = nn.ModuleList()
        before = last = width
        for group in range(3):
            found = nn.ModuleList()
            for _ in range(cells):
                found.append(Cell(before, last, width << group))
                before, last = last, 5 * (width << group)
            self.groups.append(found)
            before = last
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(last, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        before = last = self.stem(x)
        for group in self.groups:
            before = last = self.pool(last)
            for cell in group:  # type: ignore[attr-defined]
                before, last = last, cell(before, last)
        logits: Tensor = self.head(last.mean((2, 3)))
        return logits


def _vision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        prepare_import()
        model: nn.Module = getattr(importlib.import_module("torchvision.models"), name)()
        return model

    return make


def _language(name: str, config: str, **sizes: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        prepare_import()
        package = importlib.import_module("transformers")
        model: nn.Module = getattr(package, name)(getattr(package, config)(**sizes))
        return model

    return make


def _images(rows: int) -> dict[str, Tensor]:
    return {"x": torch.empty(rows, 3, 224, 224, device="meta")}


def _tokens(rows: int, length: int, target: int) -> dict[str, Tensor]:
    sizes = {"input_ids": length, "labels": target}
    return {key: torch.empty(rows, size, dtype=torch.long, device="meta") for key, size in sizes.items()}


def _loss(output: Any) -> Any:
    return output.loss


_BERT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_GPT2 = {"n_embd": 1600, "n_layer": 48, "n_head": 25}
_T5 = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "decoder_start_token_id": 0}

#: All but the generated one need the extra `models`; a smoke run does without.
_CASES: Mapping[str, _Case] = {
    "AmoebaNet-like": _Case(lambda: AmoebaNetLike(sized(17, 1), 64), _images(32)),
    "GPT-2-48": _Case(_language("GPT2LMHeadModel", "GPT2Config", **_GPT2), _tokens(8, 1024, 1024), _loss),
    "BERT-24": _Case(_language("BertForMaskedLM", "BertConfig", **_BERT), _tokens(16, 512, 512), _loss),
    "T5": _Case(_language("T5ForConditionalGeneration", "T5Config", **_T5), _tokens(16, 512, 128), _loss),
    "ResNet-152": _Case(_vision("resnet152"), _images(64)),
    "DenseNet-201": _Case(_vision("densenet201"), _images(64)),
}

NAMES = tuple(_CASES)[: sized(len(_CASES), 1)]


def modelled(name: str) -> Modelled:
    """The graph of one of `NAMES`, and its layers."""
    case = _CASES[name]
    with torch.device("meta"):
        model = case.make()
    return recorded(model, case.inputs, case.results_of)


def recorded(
    model: nn.Module, batch: Mapping[str, Tensor], results_of: Callable[[Any], Any] = lambda output: output
) -> Modelled:
    """The graph of a model, and its layers as the planner sees them.

    Args:
        model: the model.
        batch: its keyword arguments; like the model, they may be on the meta device.
        results_of: what the loss needs of its output.
    """
    model.train()
    inputs = {key: value for key, value in batch.items() if value.is_floating_point()}
    rewritten = frozenset[str]()
    while True:  # the second recording knows the buffers that the forward writes
        counter = _Counter(model, batch)
        found = record(model, counter.run, inputs, results_of, rewritten=rewritten)
        if found.rewritten == rewritten:
            break
        rewritten = found.rewritten
    weights = {name: (str(p.dtype).removeprefix("torch."), p.nbytes) for name, p in model.named_parameters()}
    cuts = [cut for cut in cuts_of(found.recording, weights) if not cut.reason]
    return _graph(found.recording, layers_from(cuts, work_until(found.recording, weights)), weights, counter.flops)


class _Counter(TorchFunctionMode):
    """Floating-point operations of each call in `_COUNTED`, in their order."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._model, self._batch = model, batch
        self.flops: list[tuple[str, int]] = []

    def run(self) -> Any:
        """One forward."""
        with self:
            return self._model(**self._batch)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, if it is one of them."""
        name = name_of(func)
        if name not in _COUNTED:
            return func(*args, **(kwargs or {}))
        with FlopCounterMode(display=False) as counting:
            result = func(*args, **(kwargs or {}))
        self.flops.append((name, counting.get_total_flops()))
        return result


def _graph(
    recording: Recording,
    borders: tuple[CutPoint, ...],
    weights: Mapping[str, tuple[str, int]],
    flops: list[tuple[str, int]],
) -> Modelled:
    steps = sorted((step for step in recording.steps if step.opens is None and step.key), key=lambda each: each.started)
    counts = iter(flops)
    nodes, used = list[Node](), set[str]()
    #: Per value, the call that made it, or changed it last; per (maker, value) its readers.
    makers: dict[int, int] = {}
    readers: dict[tuple[int, int], list[int]] = {}
    for call, step in enumerate(steps):
        for value in step.inputs & makers.keys():
            readers.setdefault((makers[value], value), []).append(call)
        new = [output for output in step.outputs if output >= 0 and output not in makers]
        makers.update((value, call) for value in (*new, *step.changed))
        own = step.parameters - used
        used |= own
        nodes.append(_node(recording, step, new, sum(weights[name][1] for name in own), _next_flops(step, counts)))
    made = (Value(maker, tuple(each), recording.values[value].num_bytes) for (maker, value), each in readers.items())
    starts = [step.started for step in steps]
    firsts = [next(call for call, started in enumerate(starts) if started >= cut.order) for cut in borders]
    return Modelled(Graph(tuple(nodes), tuple(made)), (0, *dict.fromkeys(firsts), len(steps)))


def _next_flops(step: Step, counts: Any) -> int:
    """Of a call that was counted; those on shared values alone are no steps, and are passed over."""
    name = step.label.rsplit(".", 1)[-1]
    return next(flops for counted, flops in counts if counted == name) if name in _COUNTED else 0


def _node(recording: Recording, step: Step, new: list[int], parameter_bytes: int, flops: int) -> Node:
    if step.label.rsplit(".", 1)[-1] in _VIEWS:
        return Node(0, 0, parameter_bytes, 0)
    made = sum(recording.values[value].num_bytes for value in new)
    moved = made + parameter_bytes + sum(recording.values[value].num_bytes for value in step.inputs)
    forward = int(_TICKS_PER_SECOND * (flops / _FLOPS + moved / _BYTES_PER_SECOND))
    return Node(forward, 2 * forward, parameter_bytes, made)
