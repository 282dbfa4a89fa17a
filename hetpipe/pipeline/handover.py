"""The state of layers as frames between neighbouring stages: weights, buffers, optimizer state (plan-versions.md §4).

The first frame lists what follows, as JSON in a uint8 tensor; the next ones carry the tensors in that order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from hetpipe.errors import MalformedFrame
from hetpipe.link.policy import MAX_TENSORS, Frame, FrameKind
from hetpipe.pipeline.chain import Layer
from hetpipe.pipeline.frozen_cache import digest_of
from hetpipe.values.ids import Clock, LayerIndex

#: Tensor bytes after which a new frame begins: a link keeps a frame in memory as a whole.
_FRAME_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LayerState:
    """The training state of one layer, by the model's names."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    """w^(c) of its trainable parameters."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Including parameters that are not trained."""
    optimizer: dict[str, dict[str, Tensor | float | int]] = field(default_factory=dict)
    """Parameter → `StageOptimizer.state` of it."""

    @classmethod
    def as_built(cls, layer: Layer) -> Self:
        """That of a layer as its module is."""
        module = layer.module
        weights = {name: module.get_parameter(local).detach() for local, name in layer.parameters.items()}
        return cls(weights, constant_state(layer))

    @property
    def digest(self) -> str:
        """Of its weights and buffers, hexadecimal."""
        return digest_of(tuple(value.cpu() for value in (*self.weights.values(), *self.buffers.values()))).hex()


States = dict[LayerIndex, LayerState]


def constant_state(layer: Layer) -> dict[str, Tensor]:
    """Buffers of a layer and its parameters that are not trained, by the model's names; live."""
    module = layer.module
    frozen = {name: module.get_parameter(local).detach() for local, name in layer.frozen.items()}
    return frozen | {name: module.get_buffer(local) for local, name in layer.buffers.items()}


def frames_of(states: Mapping[LayerIndex, LayerState], clock: Clock) -> Iterator[Frame]:
    """Encode `states` as the frames of the barrier at `clock`."""
    groups = groups_of(states)
    for number, group in enumerate(groups, start=1):
        yield Frame(FrameKind.HANDOVER, len(groups) - number, clock, 0, group)


def groups_of(states: Mapping[LayerIndex, LayerState], *, frame_bytes: int = _FRAME_BYTES) -> list[tuple[Tensor, ...]]:
    """The tensors of the frames that carry `states`: first the list of what follows.

    A new frame begins after `frame_bytes`.
    """
    tensors: list[Tensor] = []
    listed = {}
    for index, state in states.items():
        optimizer: dict[str, dict[str, object]] = {}
        for name, entries in state.optimizer.items():
            own = optimizer[name] = {}
            for key, value in entries.items():
                own[key] = None if isinstance(value, Tensor) else value
                tensors += [value] if isinstance(value, Tensor) else []
        tensors += [*state.weights.values(), *state.buffers.values()]
        listed[str(index)] = {"optimizer": optimizer, "weights": [*state.weights], "buffers": [*state.buffers]}
    header = torch.frombuffer(bytearray(json.dumps(listed).encode()), dtype=torch.uint8)
    return [(header,), *_grouped(tensors, frame_bytes)]


def _grouped(tensors: list[Tensor], frame_bytes: int) -> Iterator[tuple[Tensor, ...]]:
    group: list[Tensor] = []
    for tensor in tensors:
        if len(group) == MAX_TENSORS or sum(each.nbytes for each in group) >= frame_bytes:
            yield tuple(group)
            group = []
        group.append(tensor)
    if group:
        yield tuple(group)


def received(receive: Callable[[], Frame], clock: Clock, layers: range) -> States:
    """Receive the states of layers.

    Args:
        receive: waits for the next frame from the neighbour.
        clock: of the barrier.
        layers: that it must be of.

    Raises:
        MalformedFrame: the frames are of other layers or another barrier.
    """
    header = receive()
    frames = [header, *(receive() for _ in range(header.minibatch))]
    states = states_in(frames)
    if {frame.clock for frame in frames} != {clock} or list(states) != list(layers):
        raise MalformedFrame(
            f"a neighbour hands over layers {', '.join(map(str, states))} at clock {header.clock}, where layers "
            f"{layers.start} to {layers.stop - 1} are due at clock {clock}"
        )
    return states


def states_in(frames: Sequence[Frame]) -> States:
    """What frames with the tensors of `groups_of`, in that order, carry."""
    listed = _listed(frames[0])
    tensors = iter([tensor for frame in frames[1:] for tensor in frame.tensors if tensor is not None])
    states: States = {}
    for index, content in listed.items():
        optimizer = {
            name: {key: next(tensors) if value is None else value for key, value in entries.items()}
            for name, entries in content["optimizer"].items()
        }
        weights = {name: next(tensors) for name in content["weights"]}
        buffers = {name: next(tensors) for name in content["buffers"]}
        states[LayerIndex(int(index))] = LayerState(weights, buffers, optimizer)
    return states


def buffers_listed(first: Frame) -> list[tuple[LayerIndex, str]]:
    """The buffers that the frames behind this one carry, layer and name, in their order; they carry nothing else."""
    return [(LayerIndex(int(index)), name) for index, content in _listed(first).items() for name in content["buffers"]]


def _listed(first: Frame) -> dict[str, dict[str, Any]]:
    (text,) = first.tensors
    assert text is not None, "the first frame lists the others"
    listed: dict[str, dict[str, Any]] = json.loads(bytes(text.numpy().tobytes()))
    return listed
