"""The state of layers as frames: bit for bit, in frames of bounded size, and of the layers that are due."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hetpipe.errors import MalformedFrame
from hetpipe.link.policy import Frame, FrameKind
from hetpipe.pipeline import handover
from hetpipe.pipeline.handover import LayerState, States, frames_of, received
from hetpipe.values.ids import Clock, LayerIndex

CLOCK = Clock(4)


def states() -> States:
    """Of a layer with an optimizer's state, one without parameters, and one with a scalar and other dtypes."""
    weight = torch.randn(3, 4)
    return {
        LayerIndex(2): LayerState(
            {"a.weight": weight, "a.bias": torch.tensor([float("nan"), -0.0])},
            {"a.mean": torch.randn(4), "a.count": torch.tensor(7)},
            {"a.weight": {"exp_avg": weight * 2, "step": torch.tensor(3.0), "num_updates": 3, "lr": 0.1}},
        ),
        LayerIndex(3): LayerState(),
        LayerIndex(4): LayerState({"c": torch.ones(2, dtype=torch.bfloat16)}, {}, {"c": {"num_updates": 3}}),
    }


def carried(frames: list[Frame], layers: range = range(2, 5)) -> States:
    arriving: Iterator[Frame] = iter(frames)
    found = received(lambda: next(arriving), CLOCK, layers)
    assert next(arriving, None) is None, "every frame is taken"
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def assert_same(found: States, expected: States) -> None:
    assert found.keys() == expected.keys()
    for index, state in expected.items():
        for mine, given in ((found[index].weights, state.weights), (found[index].buffers, state.buffers)):
            assert mine.keys() == given.keys()
            assert all(torch.equal(_bits(mine[name]), _bits(value)) for name, value in given.items())
        assert found[index].optimizer.keys() == state.optimizer.keys()
        for name, entries in state.optimizer.items():
            other = found[index].optimizer[name]
            assert list(other) == list(entries)
            for key, value in entries.items():
                same = torch.equal(other[key], value) if isinstance(value, torch.Tensor) else other[key] == value  # type: ignore[arg-type]
                assert same, (name, key)


@pytest.mark.parametrize("frame_bytes", [1, 64, 1 << 20])
def test_it_arrives_as_it_was(frame_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_FRAME_BYTES", frame_bytes)
    given = states()
    frames = list(frames_of(given, CLOCK))
    assert [frame.minibatch for frame in frames] == list(range(len(frames)))[::-1]
    assert {(frame.kind, frame.clock) for frame in frames} == {(FrameKind.HANDOVER, CLOCK)}
    assert_same(carried(frames), given)


def test_a_frame_holds_no_more_tensors_than_a_link_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "MAX_TENSORS", 2)
    given = states()
    frames = list(frames_of(given, CLOCK))
    assert max(len(frame.tensors) for frame in frames) == 2
    assert_same(carried(frames), given)


@pytest.mark.parametrize(("layers", "clock"), [(range(2, 4), CLOCK), (range(3, 6), CLOCK), (range(2, 5), Clock(5))])
def test_other_layers_than_those_that_are_due(layers: range, clock: Clock) -> None:
    frames = iter(list(frames_of(states(), CLOCK)))
    due = f"layers {layers.start} to {layers.stop - 1} are due at clock {clock}"
    with pytest.raises(MalformedFrame, match=f"hands over layers 2, 3, 4 at clock 4, where {due}"):
        received(lambda: next(frames), clock, layers)
