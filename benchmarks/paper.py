"""The HetPipe paper's cluster (§8.1) and models like its two, small enough for one machine: bytes and times scaled.

Four nodes of four GPUs: TITAN V, TITAN RTX, RTX 2060 and Quadro P4000; PCIe 3 x16 within nodes, InfiniBand of 56 Gbit/s
between them. All bytes are divided by `BYTES`: parameters, activations, and the memory of devices. All times are
multiplied by `SECONDS`. Links are slowed down by both, so every transfer, computation and wait has the proportions of
the cluster, and rates times `SECONDS` are those of the cluster.

A layer has the model's parameters and the width of its output, divided; it learns from the first 16 features, and the
rest of its output is zeros, of which a link only sees the size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.sizes import sized
from benchmarks.sleeper import keep_time
from hetpipe.values.cluster import Cluster, DeviceType, LinkOverride, Links, LinkSpec
from hetpipe.values.profile import LayerProfile, Profile
from tests.decide.planner import models

#: How many times fewer bytes, and how many times slower.
BYTES = 1000
SECONDS = sized(5.0, 0.1)

#: What a framework and its libraries take of each device's memory.
_RESERVED_BYTES = 1 << 30

BATCH_SIZE = 32
NUM_CLASSES = 10
_FEATURES = 16
_FLOAT_BYTES = 4
#: Of the training data, in units of the distance between their points.
_NOISE = 0.8


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of the small model."""

    inputs: int
    outputs: int
    """Floats per sample that enter and leave it."""
    hidden: int
    """Width of its two matrices; 0: it has no parameters."""

    @property
    def parameter_bytes(self) -> int:
        """Of both matrices."""
        return _FLOAT_BYTES * self.hidden * (_FEATURES + min(_FEATURES, self.outputs))


def _shapes(full: Profile) -> list[Shape]:
    row = _FLOAT_BYTES * full.batch_size * BYTES
    widths = [max(_FEATURES, round(size / row)) for size in (full.input_bytes, *(x.output_bytes for x in full.layers))]
    widths[-1] = NUM_CLASSES
    return [
        Shape(inputs, outputs, max(1, round(layer.parameter_bytes / (BYTES * _FLOAT_BYTES * 2 * _FEATURES))))
        if layer.parameter_bytes
        else Shape(inputs, outputs, 0)
        for layer, inputs, outputs in zip(full.layers, widths, widths[1:], strict=False)
    ]


class Layer(nn.Module):
    """Features plus what two matrices make of them, and zeros up to the width of the output."""

    def __init__(self, shape: Shape, num_layers: int) -> None:
        super().__init__()
        self._zeros = max(0, shape.outputs - _FEATURES)
        self._keeps = shape.outputs >= _FEATURES
        if shape.hidden:
            self.first = nn.Parameter(torch.randn(_FEATURES, shape.hidden) / math.sqrt(_FEATURES))
            scale = 1 / math.sqrt(shape.hidden * num_layers)
            self.second = nn.Parameter(scale * torch.randn(shape.hidden, min(_FEATURES, shape.outputs)))

    def forward(self, value: Tensor) -> Tensor:
        """`value`: samples × inputs; returns samples × outputs."""
        features = value[:, :_FEATURES]
        if hasattr(self, "first"):
            change = torch.tanh(features @ self.first) @ self.second
            features = features + change if self._keeps else change
        return nn.functional.pad(features, (0, self._zeros)) if self._zeros else features


def layers_of(full: Profile) -> list[nn.Module]:
    """The layers of the small model, with weights from torch's generator."""
    shapes = _shapes(full)
    return [Layer(shape, len(shapes)) for shape in shapes]


def _model(full: Callable[[], Profile]) -> nn.Module:
    keep_time()
    return nn.Sequential(*layers_of(full()))


#: As a job file names them.
vgg19 = partial(_model, models.vgg19)
resnet152 = partial(_model, models.resnet152)

#: The paper's models.
MODELS: Mapping[str, Callable[[], Profile]] = {"vgg19": models.vgg19, "resnet152": models.resnet152}


#: Minibatches of every contender, over all its virtual workers or devices.
NUM_MINIBATCHES = sized(192, 48)


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Classes around points that no plane separates well, with noise: each sample from its number."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._width = _shapes(models.vgg19())[0].inputs
        points = torch.Generator().manual_seed(0)
        self._points = torch.randn(3 * NUM_CLASSES, _FEATURES, generator=points)

    def __len__(self) -> int:
        """Number of samples."""
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The features, then zeros; and the class."""
        own = torch.Generator().manual_seed(index)
        point = int(torch.randint(len(self._points), (), generator=own))
        features = self._points[point] + _NOISE * torch.randn(_FEATURES, generator=own)
        return nn.functional.pad(features, (0, self._width - _FEATURES)), torch.tensor(point % NUM_CLASSES)


def data() -> Samples:
    """The training data, for one pass."""
    return Samples(NUM_MINIBATCHES * BATCH_SIZE)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(output, target)


def profile(full: Profile) -> Profile:
    """The profile of the small model, of a model's `full` one: its own bytes, scaled times."""
    shapes = _shapes(full)
    layers = tuple(
        LayerProfile(
            name=str(index),
            parameter_bytes=shape.parameter_bytes,
            activation_bytes=layer.activation_bytes // BYTES,
            output_bytes=_FLOAT_BYTES * BATCH_SIZE * shape.outputs,
            forward_ms={kind: SECONDS * time for kind, time in layer.forward_ms.items()},
            backward_ms={kind: SECONDS * time for kind, time in layer.backward_ms.items()},
        )
        for index, (layer, shape) in enumerate(zip(full.layers, shapes, strict=True))
    )
    return Profile(
        version=1,
        model=full.model,
        batch_size=BATCH_SIZE,
        input_bytes=_FLOAT_BYTES * BATCH_SIZE * shapes[0].inputs,
        layers=layers,
    )


#: The nodes of the paper's cluster, fastest first; a smoke run has two small ones.
NODES = sized(models.PAPER, ("VV", "QQ"))


def cluster(*nodes: str) -> Cluster:
    """Nodes n0, n1, … with the devices that letters name, by default the paper's; see `models.cluster`."""
    full = models.cluster(*(nodes or NODES))
    return full.model_copy(
        update={
            "device_types": {
                kind: DeviceType(memory_bytes=((size << 30) - _RESERVED_BYTES) // BYTES)
                for kind, size in models.GIB.items()
            },
            "links": Links(intra_node=_slowed(full.links.intra_node), inter_node=_slowed(full.links.inter_node)),
        }
    )


def taken_apart(workers: Sequence[str]) -> Cluster:
    """The cluster with a node per device, in the order of the stages of each virtual worker.

    A job that cuts its model itself gets devices in that order. Links are those of the whole cluster, where devices of
    one type are on one node.
    """
    whole = cluster()
    kinds = "".join(workers)
    apart = cluster(*kinds)
    within = [
        LinkOverride(**whole.links.intra_node.model_dump(), between=(f"n{one}", f"n{other}"))
        for one, kind in enumerate(kinds)
        for other in range(one)
        if kinds[other] == kind
    ]
    return apart.model_copy(update={"links": apart.links.model_copy(update={"overrides": tuple(within)})})


def _slowed(link: LinkSpec) -> LinkSpec:
    return link.model_copy(
        update={
            "bandwidth_bytes_per_second": link.bandwidth_bytes_per_second / BYTES / SECONDS,
            "latency_seconds": link.latency_seconds * SECONDS,
        }
    )
