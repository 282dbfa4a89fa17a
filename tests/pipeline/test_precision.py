"""Layers, loss and metrics compute in the job's precision; what crosses cuts is short, what is trained is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import CallableError
from hetpipe.link.policy import Frame, FrameKind
from hetpipe.link.wire import encode
from hetpipe.pipeline.chain import Layer, Values, chain_of
from hetpipe.pipeline.compute import Gradients, StageCompute
from hetpipe.pipeline.cut_proof import prove_cut_model
from hetpipe.pipeline.data import Batch
from hetpipe.pipeline.layering import layers_of, on_output
from hetpipe.pipeline.precision import autocast
from hetpipe.pipeline.proof import prove_model
from hetpipe.profiler.chain_measurement import measure_chain
from hetpipe.profiler.sampling import Sampling
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex
from hetpipe.values.precision import Precision
from tests.profiler import models as profiled

CPU = torch.device("cpu")
P = Minibatch(1)
SAMPLES, WIDTH = 64, 32


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def batch() -> Batch:
    return Batch((torch.randn(SAMPLES, WIDTH),), torch.arange(SAMPLES) % 4, SAMPLES)


def weights_of(layers: tuple[Layer, ...]) -> dict[str, Tensor]:
    return {
        name: layer.module.get_parameter(local).detach().requires_grad_()
        for layer in layers
        for local, name in layer.parameters.items()
    }


def trained(layers: tuple[Layer, ...], given: Batch) -> tuple[list[Values], list[Gradients]]:
    """What crosses each cut forward, and what each layer, a stage of its own, makes of its backward."""
    computes = [
        StageCompute(
            (layer,),
            vw=VirtualWorkerIndex(0),
            seed=0,
            device=CPU,
            loss=on_output(layers, cross_entropy) if layer is layers[-1] else None,
        )
        for layer in layers
    ]
    values, crossing = given.inputs, []
    for compute, layer in zip(computes, layers, strict=True):
        values = compute.forward(P, weights_of((layer,)), tuple(value.detach().clone() for value in values))
        crossing.append(values)
    computes[-1].loss(P, values, given.target)
    gradients, found = None, []
    for compute, layer in reversed(list(zip(computes, layers, strict=True))):
        found.append(compute.backward(P, weights_of((layer,)), gradients))
        gradients = found[-1].inputs
    return crossing[:-1], found[::-1]


def sent_bytes(tensors: tuple[Tensor | None, ...], kind: FrameKind) -> int:
    outgoing = encode(Frame(kind, 1, 0, 0, tuple(None if each is None else each.detach() for each in tensors)))
    return len(outgoing.first) + sum(tensor.nbytes for tensor in outgoing.following)


@pytest.mark.parametrize("of", ["a chain", "its own forward"])
def test_half_as_many_bytes_cross_each_cut_both_ways(of: str) -> None:
    found: dict[Precision, list[int]] = {}
    for precision in ("fp32", "bf16"):
        given = batch()
        layers = (
            chain_of(chain(), precision=precision)
            if of == "a chain"
            else layers_of(Skips(), given, cross_entropy, precision=precision)
        )
        crossing, gradients = trained(layers, given)
        assert len(crossing) >= 2
        assert all(g.dtype == torch.float32 for each in gradients for g in each.weights.values() if g is not None)
        found[precision] = [
            *(sent_bytes(values, FrameKind.FORWARD) for values in crossing),
            *(sent_bytes(each.inputs, FrameKind.BACKWARD) for each in gradients[1:]),
        ]
    payload = SAMPLES * WIDTH * 2
    assert [whole - half for whole, half in zip(found["fp32"], found["bf16"], strict=True)] == [
        payload for _ in found["bf16"]
    ]


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.third(torch.relu(self.second(torch.relu(self.first(x)))))
        return found


class Tied(nn.Module):
    """One weight, used three times, on three stages if it is cut everywhere; and a recomputed block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH)
        self.between, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.weight(x)))
        x = self.norm(checkpoint(self.between, x, use_reentrant=False))
        x = nn.functional.linear(torch.relu(x), self.weight.weight)
        found: Tensor = nn.functional.linear(torch.relu(x), self.weight.weight)
        return found


def test_a_model_with_ties_and_recomputation_is_proven_to_the_bit() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Tied()

    first, second = batch(), batch()
    layers = layers_of(build(), first, cross_entropy, precision="bf16")
    assert len(layers) >= 3
    loss = on_output(layers, cross_entropy)
    proof = prove_cut_model(build, layers, given_loss=cross_entropy, loss=loss, batches=(first, second), seed=1)
    assert proof.is_exact


def test_with_the_cache_of_casts_a_cut_between_two_uses_would_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why `autocast` has none: mutated, the proof finds it."""

    def cached(precision: Precision, device: torch.device) -> Any:
        return torch.autocast(device.type, torch.bfloat16)

    for module in ("chain", "cut_proof", "compute"):
        monkeypatch.setattr(f"hetpipe.pipeline.{module}.autocast", cached)
    with pytest.raises(CallableError, match="does not compute what the model computes"):
        test_a_model_with_ties_and_recomputation_is_proven_to_the_bit()


def test_a_chain_is_proven_to_the_bit() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))

    layers = chain_of(build(), precision="bf16")
    assert prove_model(build, layers, loss=cross_entropy, batches=(batch(), batch()), seed=1).is_exact


def test_loss_and_evaluation_compute_in_it_and_nothing_behind_them() -> None:
    dtypes: list[torch.dtype] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        dtypes.append((output @ output.T).dtype)
        return nn.functional.cross_entropy(output, target)

    layers, given = chain_of(chain(), precision="bf16"), batch()
    compute = StageCompute(layers, vw=VirtualWorkerIndex(0), seed=0, device=CPU, loss=loss)
    weights = weights_of(layers)
    compute.loss(P, compute.forward(P, weights, given.inputs), given.target)
    (output,) = compute.evaluate(1, weights, given.inputs)
    assert dtypes == [torch.bfloat16]
    assert output.dtype == torch.bfloat16
    with compute.autocast():
        loss(output.float(), given.target)
    assert dtypes == [torch.bfloat16] * 2
    assert not torch.is_autocast_enabled("cpu")


def test_fp32_leaves_everything_as_it_is() -> None:
    with autocast("fp32", CPU):
        assert not torch.is_autocast_enabled("cpu")


def test_a_profile_is_measured_in_it() -> None:
    found = {}
    for precision in ("fp32", "bf16"):
        subject = profiled.subject("linear_relu", precision=precision)
        found[precision] = measure_chain(
            subject, CPU, "cpu", sampling=Sampling.fixed(1), clock=SYSTEM_CLOCK, on_layer=lambda _: None
        )
    assert [found[each].precision for each in found] == ["fp32", "bf16"]
    assert [found[each].compute_dtype for each in found] == ["float32", "bfloat16"]
    for whole, half in zip(found["fp32"].layers[:-1], found["bf16"].layers[:-1], strict=True):
        assert half.output_bytes * 2 == whole.output_bytes
        assert half.parameter_bytes == whole.parameter_bytes
