"""What a profile says of each cut is what really crosses there, each way; and where there is none, why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hetpipe.decide.planner.assembly import profile_of
from hetpipe.pipeline.callables import own_loss
from hetpipe.pipeline.chain import Values, alive_behind, forbidden_in
from hetpipe.pipeline.compute import StageCompute
from hetpipe.pipeline.flop_counter import FlopCounter
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.measurement import LayerMeasurement, Measurement, Work
from hetpipe.values.profile import Profile
from tests.model import zoo
from tests.model.harness import CPU, Made, P, Subject, copies, differences, values_of
from tests.model.test_cutting import Program, batch


class OwnBuffers(nn.Module):
    """A buffer that is written between two layers and read behind the second: no cut between."""

    counted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("counted", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.counted.add_(1)
        x = self.second(x)
        found: Tensor = self.third(x + self.counted)
        return found


Sent = list[tuple[Values, Sequence[Tensor | None]]]


def profiled(subject: Subject, made: Made, loss: Callable[[Any], Tensor] = own_loss) -> tuple[Profile, Sent]:
    """The profile of a model, and what its layers, each a stage of its own, really hand over and back at each cut."""
    layers = subject.layers
    computes = [
        StageCompute(
            (layer,),
            vw=VirtualWorkerIndex(0),
            seed=5,
            device=CPU,
            loss=(lambda _, __: loss(subject.cut.output)) if layer is layers[-1] else None,
            watches_activations=False,
        )
        for layer in layers
    ]
    own = [{name: subject.weights[name] for name in layer.parameters.values()} for layer in layers]
    values: Values = copies(values_of(made))
    forward: list[Values] = []
    measured = []
    for position, (compute, weights) in enumerate(zip(computes, own, strict=True)):
        values = compute.forward(P, weights, copies(tuple(value.detach() for value in values)))
        forward.append(values)
        measured.append(measurement(subject, position, values))
    computes[-1].loss(P, values, None)
    backward: list[Sequence[Tensor | None]] = []
    gradients: Sequence[Tensor | None] | None = None
    for compute, weights in reversed(list(zip(computes, own, strict=True))):
        gradients = compute.backward(P, weights, gradients).inputs
        backward.insert(0, gradients)
    # What comes into layer i + 1 and goes back from there crosses the cut behind layer i.
    sent = list(zip(forward[:-1], backward[1:], strict=True))
    return profile_of("m", 2, measured=[Measurement("cpu", tuple(measured), 0, 1, 0.0)]), sent


def measurement(subject: Subject, position: int, values: Values) -> LayerMeasurement:
    layer, nothing = subject.layers[position], Work(0, 0)
    alive = alive_behind(subject.layers, position, values)
    num_bytes = sum(value.nbytes for value in values)
    return LayerMeasurement(
        layer.name, (), 0, num_bytes, 1.0, 1.0, nothing, nothing, alive=alive, forbidden=forbidden_in(layer)
    )


def num_bytes(tensors: Sequence[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@settings(max_examples=3)
@given(st.integers(0, 10**6), st.integers(4, 14))
def test_the_values_at_each_cut_are_those_that_cross_it_each_way(seed: int, length: int) -> None:
    made = batch()
    subject = Subject(lambda: Program(seed, length), made)
    profile, sent = profiled(subject, made)

    assert Profile.model_validate(profile.model_dump()) == profile
    for layer, (values, gradients) in zip(profile.layers[:-1], sent, strict=True):
        assert [value.num_bytes for value in layer.alive] == [value.nbytes for value in values]
        assert layer.output_bytes == num_bytes(values)
        # A random program makes values of which it does nothing more: these have a gradient by type, and none comes.
        for value, gradient in zip(layer.alive, gradients, strict=True):
            assert gradient is None or (value.has_gradient and gradient.nbytes == value.num_bytes)


def test_every_byte_of_a_u_net_is_in_its_profile() -> None:
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    subject = Subject(zoo.u_net, (image,), loss=lambda output: output.square().mean())
    profile, sent = profiled(subject, (image,), lambda output: output.square().mean())

    assert len(profile.layers) > 20
    assert [(layer.output_bytes, layer.backward_bytes) for layer in profile.layers[:-1]] == [
        (num_bytes(values), num_bytes(gradients)) for values, gradients in sent
    ]


def test_a_tied_weight_is_named_at_every_cut_between_its_uses_and_moves_both_ways() -> None:
    made = batch()
    profile, _ = profiled(Subject(lambda: Program(0, 8), made), made)
    size = Program(0, 8).embedding.weight.nbytes
    layers = profile.layers[:-1]

    crosses = ["parameter:embedding.weight" in [value.name for value in layer.alive] for layer in layers]

    assert crosses[0]
    assert crosses == sorted(crosses, reverse=True)  # up to its last use, and not behind it
    assert sum(crosses) > len(layers) // 2
    assert layers[0].tie_bytes == size
    assert all(layer.tie_bytes >= size for layer, has_tie in zip(layers, crosses, strict=True) if has_tie)
    assert all(size < layer.backward_bytes < layer.output_bytes for layer in layers if layer.tie_bytes)


def test_forbidden_places_have_their_reasons() -> None:
    made = (torch.randn(2, 4),)
    subject = Subject(OwnBuffers, made, loss=lambda output: output.sum())
    found: list[Any] = [each for layer in subject.layers for each in forbidden_in(layer)]

    assert [(each.before, each.upto, each.reason) for each in found] == [
        ("second", found[0].upto, "counted is used before and after it, and the forward writes it")
    ]
    assert found[0].places >= 2
    assert len(subject.layers) == 1 + sum(not cut.reason for cut in subject.cut.survey.cuts)


def test_operations_of_a_cut_model_can_be_counted() -> None:
    """Torch's counter tracks modules by calls within their forwards, which a cut model would take for its own."""
    made = batch()
    subject = Subject(lambda: Program(0, 8), made)
    whole = subject.stages((), made)
    with FlopCounter(is_backward=False) as counter:
        counted = subject.stages((1, 5), made)

    assert counter.flops > 0
    assert not differences(whole, counted)
