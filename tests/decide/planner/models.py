"""Profiles like those of known models, and the paper's cluster: what sweeps over plans are made of.

Times follow from each layer's floating-point operations and a type's speed on such work; bytes are those of float32.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.values.profile import LayerProfile, Profile

#: What the paper's types reach on convolutions and matrix products: TITAN V, TITAN RTX, RTX 2060, Quadro P4000.
FLOPS_PER_SECOND: Mapping[str, float] = {"V": 8.5e12, "R": 8.0e12, "G": 4.2e12, "Q": 2.9e12}
GIB: Mapping[str, int] = {"V": 12, "R": 24, "G": 6, "Q": 8}

_FLOAT_BYTES = 4
#: A backward takes about twice the forward: gradients of the inputs and of the weights.
_BACKWARD = 2.0


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer on one sample."""

    name: str
    flops: float
    parameters: int
    kept: int
    """Elements that the backward needs."""
    output: int
    """Elements."""


def vgg19(batch_size: int = 32) -> Profile:
    """VGG-19 on 224 × 224: 144 M parameters, most of them in one layer at the end; large outputs at the beginning."""
    widths = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0)
    layers: list[_Layer] = []
    channels, size = 3, 224
    for index, width in enumerate(widths):
        if not width:
            size //= 2
            layers.append(_Layer(f"pool{index}", 4.0 * channels * size * size, 0, 0, channels * size * size))
            continue
        weights, output = 9 * channels * width, width * size * size
        layers.append(_Layer(f"conv{index}", 2.0 * weights * size * size, weights + width, 2 * output, output))
        channels = width
    features = channels * size * size
    for name, width in (("fc6", 4096), ("fc7", 4096), ("fc8", 1000)):
        layers.append(_Layer(name, 2.0 * features * width, features * width + width, 2 * width, width))
        features = width
    return _profile("vgg-19-like", layers, batch_size, 3 * 224 * 224)


def resnet152(batch_size: int = 32) -> Profile:
    """ResNet-152 by blocks: 60 M parameters in 52 layers of about equal work."""
    layers = [_Layer("stem", 2.4e8, 9408 + 128, 2 * 64 * 112 * 112, 64 * 56 * 56)]
    inputs, size = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 8), (256, 36), (512, 3))):
        for block in range(blocks):
            if stage and not block:
                size //= 2
            outputs = 4 * width
            weights = inputs * width + 9 * width * width + width * outputs + (0 if block else inputs * outputs)
            area = size * size
            kept = area * (2 * 2 * width + 2 * outputs)
            name = f"block{stage}.{block}"
            layers.append(_Layer(name, 2.0 * weights * area, weights + 6 * width, kept, outputs * area))
            inputs = outputs
    layers.append(_Layer("head", 2.0 * inputs * 1000, inputs * 1000 + 1000, inputs, 1000))
    return _profile("resnet-152-like", layers, batch_size, 3 * 224 * 224)


def gpt2(batch_size: int = 4, *, num_blocks: int = 12, width: int = 768, length: int = 512) -> Profile:
    """GPT-2 by blocks: equal ones between an embedding and a head that hold a large part of the parameters."""
    vocabulary = 50_257
    layers = [_Layer("embedding", 2.0 * length * width, (vocabulary + length) * width, length * width, length * width)]
    for block in range(num_blocks):
        flops = 2.0 * length * 12 * width * width + 4.0 * length * length * width
        kept = length * width * 16 + 12 * length * length
        layers.append(_Layer(f"block{block}", flops, 12 * width * width + 13 * width, kept, length * width))
    head = 2.0 * length * width * vocabulary
    layers.append(_Layer("head", head, vocabulary * width, length * vocabulary, length * vocabulary))
    return _profile("gpt-2-like", layers, batch_size, length)


def random_model(seed: int = 0, num_layers: int = 16, batch_size: int = 16) -> Profile:
    """Layers without any pattern; types differ in speed from layer to layer, too."""
    source = random.Random(seed)
    layers = []
    for index in range(num_layers):
        work_ms = 4 * source.random() ** 2 + 0.2
        layers.append(
            LayerProfile(
                name=f"layer{index}",
                parameter_bytes=int(40e6 * source.random() ** 3),
                activation_bytes=int(60e6 * source.random()),
                output_bytes=int(20e6 * source.random() ** 2),
                forward_ms={
                    kind: work_ms * 8.5e12 / flops * source.uniform(0.8, 1.25)
                    for kind, flops in FLOPS_PER_SECOND.items()
                },
                backward_ms={
                    kind: 2 * work_ms * 8.5e12 / flops * source.uniform(0.8, 1.25)
                    for kind, flops in FLOPS_PER_SECOND.items()
                },
            )
        )
    return Profile(version=1, model="random", batch_size=batch_size, input_bytes=10**7, layers=tuple(layers))


def _profile(model: str, layers: Sequence[_Layer], batch_size: int, inputs: int) -> Profile:
    return Profile(
        version=1,
        model=model,
        batch_size=batch_size,
        input_bytes=_FLOAT_BYTES * batch_size * inputs,
        layers=tuple(_profiled(layer, batch_size) for layer in layers),
    )


def _profiled(layer: _Layer, batch_size: int) -> LayerProfile:
    forward_ms = {kind: 1000 * batch_size * layer.flops / speed for kind, speed in FLOPS_PER_SECOND.items()}
    return LayerProfile(
        name=layer.name,
        parameter_bytes=_FLOAT_BYTES * layer.parameters,
        activation_bytes=_FLOAT_BYTES * batch_size * layer.kept,
        output_bytes=_FLOAT_BYTES * batch_size * layer.output,
        forward_ms=forward_ms,
        backward_ms={kind: _BACKWARD * time for kind, time in forward_ms.items()},
    )


def cluster(*nodes: str, network: float = 7e9) -> Cluster:
    """Nodes n0, n1, … with the devices that letters name; PCIe 3 x16 within, 56 Gbit/s between them."""
    return Cluster(
        device_types={kind: DeviceType(memory_bytes=size << 30) for kind, size in GIB.items()},
        nodes=tuple(Node(name=f"n{index}", devices=tuple(kinds)) for index, kinds in enumerate(nodes)),
        links=Links(
            intra_node=LinkSpec(bandwidth_bytes_per_second=15.75e9, latency_seconds=1e-5, efficiency=0.7),
            inter_node=LinkSpec(bandwidth_bytes_per_second=network, latency_seconds=3e-5, efficiency=0.7),
        ),
    )


PAPER = ("VVVV", "RRRR", "GGGG", "QQQQ")


def subsets(nodes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Each way to leave out one node."""
    for index in range(len(nodes)):
        yield (*nodes[:index], *nodes[index + 1 :])
