"""How fast is the partitioner, is its answer exact, and how does it grow with layers and devices?

Three models: `convolutions` (large activations in front, large parameters behind, like VGG and ResNet), `transformer`
(four kinds of layers that repeat, all cuts alike) and `random` (times, sizes and the types' relative speeds without any
pattern). Types and memory are roughly those of the paper's TITAN V, TITAN RTX, RTX 2060 and Quadro P4000. Every round
has another seed; nothing is kept from one round to the next.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.sizes import sized
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.planner.costs import Costs, MemoryModel
from hetpipe.decide.planner.partitioner import Partitioner
from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.values.profile import LayerProfile, Profile

Model = Literal["convolutions", "transformer", "random"]
Layout = Literal["one type per node", "all types on every node"]

MODELS: tuple[Model, ...] = ("convolutions", "transformer", "random")
LAYOUTS: tuple[Layout, ...] = ("one type per node", "all types on every node")
KINDS = "VRGQ"
MOST_LAYERS = sized(1000, 100)
MOST_EXACT_DEVICES = 16
MANY_DEVICES = sized(64, 32)

_GIB = 1 << 30
_MIB = 1 << 20
_SLOWER = {"V": 1.0, "R": 1.25, "G": 1.9, "Q": 3.2}
_MEMORY_GIB = {"V": 12, "R": 24, "G": 6, "Q": 8}
_MEMORY = MemoryModel(minibatches_per_wave=4)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is partitioned."""

    model: Model
    layout: Layout
    num_layers: int
    num_devices: int
    """A multiple of 4, or fewer than 4: as many of the types."""


def measure(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Title and figures of one table after the other; seconds are medians."""
    title = f"partitioner, {MOST_LAYERS} layers × {MOST_EXACT_DEVICES} devices on 4 nodes"
    settings = [Setting(model, layout, MOST_LAYERS, MOST_EXACT_DEVICES) for model in MODELS for layout in LAYOUTS]
    yield title, {f"{s.model}, {s.layout}": _figures(s, rounds) for s in settings}
    title = f"partitioner, {MOST_LAYERS} layers × {MANY_DEVICES} devices on 16 nodes (beam, one round)"
    settings = [Setting(model, layout, MOST_LAYERS, MANY_DEVICES) for model in MODELS for layout in LAYOUTS]
    yield title, {f"{s.model}, {s.layout}": _figures(s, 1) for s in settings}
    for layout in LAYOUTS:
        layers = [
            Setting("convolutions", layout, size, MOST_EXACT_DEVICES)
            for size in sized((125, 250, 500, 1000, 2000), (50, 100))
        ]
        yield (
            f"partitioner, twice the layers, {layout}",
            {f"{s.num_layers} layers": _figures(s, rounds) for s in layers},
        )
        devices = [Setting("convolutions", layout, MOST_LAYERS, size) for size in sized((4, 8, 16, 32), (4, 8))]
        title = f"partitioner, twice the devices, {layout}"
        yield title, {f"{s.num_devices} devices": _figures(s, rounds) for s in devices}
    yield "partitioner within an allocation search (milliseconds per call)", _small_calls(rounds)


def _figures(setting: Setting, rounds: int) -> dict[str, Any]:
    seconds, gaps, num_states = [], [], 0
    for seed in range(rounds):
        costs = Costs(profile(setting.model, setting.num_layers, seed), cluster(setting.layout, setting.num_devices))
        begun = SYSTEM_CLOCK.monotonic()
        found = Partitioner(costs).find(list(costs.cluster.devices), _MEMORY)
        seconds.append(SYSTEM_CLOCK.monotonic() - begun)
        assert found is not None, "these settings have room"
        gaps.append(found.gap)
        num_states = found.num_states
    return {
        "seconds": round(statistics.median(seconds), 3),
        "slowest": round(max(seconds), 3),
        "largest gap": f"{max(gaps):.2%}" if max(gaps) else "exact",
        "states": num_states,
    }


def _small_calls(rounds: int) -> dict[str, Any]:
    """New sets of 4 and of 8 devices on a warm `Partitioner`, and sets that are like earlier ones."""
    figures: dict[str, Any] = {}
    for num_devices, model in ((size, model) for size in (4, 8) for model in MODELS):
        first, again = [], []
        for seed in range(rounds):
            costs = Costs(profile(model, 100, seed), cluster("one type per node", MOST_EXACT_DEVICES))
            partitioner = Partitioner(costs)
            source = random.Random(seed)
            sets = [source.sample(list(costs.cluster.devices), num_devices) for _ in range(20)]
            shapes = {tuple(sorted(costs.cluster.devices[device] for device in devices)): devices for devices in sets}
            first += [_milliseconds(partitioner, devices) for devices in shapes.values()]
            again += [_milliseconds(partitioner, devices) for devices in sets]
        figures[f"{model}, {num_devices} devices, 100 layers"] = {
            "new": round(statistics.median(first), 2),
            "slowest new": round(max(first), 2),
            "like an earlier one": round(statistics.median(again), 3),
        }
    return figures


def _milliseconds(partitioner: Partitioner, devices: Sequence[Any]) -> float:
    begun = SYSTEM_CLOCK.monotonic()
    partitioner.find(devices, _MEMORY)
    return 1000 * (SYSTEM_CLOCK.monotonic() - begun)


def cluster(layout: Layout, num_devices: int) -> Cluster:
    """Nodes of four devices; PCIe within a node, 56 Gbit/s between nodes."""
    if layout == "one type per node":
        num_nodes = max(4, num_devices // 4)
        each = num_devices // num_nodes
        nodes = [kind * each for kind in KINDS for _ in range(num_nodes // 4)]
    else:
        nodes = [KINDS] * (num_devices // 4)
    return Cluster(
        device_types={kind: DeviceType(memory_bytes=_MEMORY_GIB[kind] * _GIB) for kind in KINDS},
        nodes=tuple(Node(name=f"n{index}", devices=tuple(node)) for index, node in enumerate(nodes)),
        links=Links(
            intra_node=LinkSpec(bandwidth_bytes_per_second=15.75e9, latency_seconds=10e-6, efficiency=0.8),
            inter_node=LinkSpec(bandwidth_bytes_per_second=7e9, latency_seconds=20e-6, efficiency=0.7),
        ),
    )


def profile(model: Model, num_layers: int, seed: int) -> Profile:
    """A model whose total work and size do not depend on the number of layers: 800 ms on the fastest type."""
    source = random.Random(seed)
    layers = [_layer(model, index, num_layers, source) for index in range(num_layers)]
    return Profile(version=1, model=model, batch_size=32, input_bytes=19_267_584, layers=tuple(layers))


def _layer(model: Model, index: int, num_layers: int, source: random.Random) -> LayerProfile:
    share, depth = 1000 / num_layers, index / num_layers
    match model:
        case "convolutions":
            time_ms = 0.8 * share * (1.3 - 0.6 * depth) * source.uniform(0.7, 1.3)
            output_bytes = int(8 * _MIB * (1 - depth) ** 2) + _MIB // 4
            kept_bytes, parameter_bytes = int(2 * share * output_bytes), int(share * (0.1 + 2 * depth**3) * _MIB)
        case "transformer":
            time_ms = share * (0.6, 1.2, 0.1, 1.3)[index % 4] * source.uniform(0.98, 1.02)
            output_bytes = 4 * _MIB
            kept_bytes, parameter_bytes = int(2 * share * _MIB), int(share * _MIB)
        case "random":
            time_ms = 3.2 * share * source.random() ** 3
            output_bytes = int(20 * _MIB * source.random() ** 4)
            kept_bytes, parameter_bytes = (
                int(share * 20 * _MIB * source.random()),
                int(share * 4 * _MIB * source.random() ** 3),
            )
    spread = 0.5 if model == "random" else 0.1
    times = {kind: time_ms * slower * source.uniform(1 - spread, 1 + spread) for kind, slower in _SLOWER.items()}
    return LayerProfile(
        name=f"layer{index}",
        parameter_bytes=parameter_bytes,
        activation_bytes=kept_bytes,
        output_bytes=output_bytes,
        forward_ms={kind: time / 3 for kind, time in times.items()},
        backward_ms={kind: 2 * time / 3 for kind, time in times.items()},
    )
