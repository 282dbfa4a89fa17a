"""Layers measured one by one, compared with what whole stages keep and compute."""

from __future__ import annotations

import pytest
import torch

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import CallableError
from hetpipe.pipeline.compute import StageCompute
from hetpipe.profiler.chain_measurement import measure_chain
from hetpipe.profiler.live_bytes import LiveBytes
from hetpipe.profiler.sampling import Sampling
from hetpipe.profiler.subject import MINIBATCH, VIRTUAL_WORKER, Subject
from hetpipe.values.measurement import Measurement
from tests.profiler import models

CHAINS = ["linear_relu", "in_place", "batch_norm", "views", "tuples", "residual", "frozen"]


def measured(subject: Subject) -> Measurement:
    return measure_chain(
        subject,
        torch.device("cpu"),
        "cpu",
        sampling=Sampling.fixed(1),
        clock=SYSTEM_CLOCK,
        on_layer=lambda _: None,
    )


def kept_by_one_stage(subject: Subject) -> int:
    """Bytes alive between the forward and the backward of the whole chain on one stage, its minibatch included."""
    compute = StageCompute(subject.chain, vw=VIRTUAL_WORKER, seed=0, device=torch.device("cpu"), loss=subject.loss)
    weights = {
        name: layer.module.get_parameter(local).detach().requires_grad_()
        for layer in subject.chain
        for local, name in layer.parameters.items()
    }
    with LiveBytes() as live:
        live.count([*subject.batch.inputs, subject.batch.target])
        compute.loss(MINIBATCH, compute.forward(MINIBATCH, weights, subject.batch.inputs), subject.batch.target)
        return live.now_bytes


@pytest.mark.parametrize("name", CHAINS)
def test_the_layers_add_up_to_what_a_stage_of_all_of_them_keeps(name: str) -> None:
    subject = models.subject(name)
    layers = measured(subject).layers
    assert sum(layer.activation_bytes for layer in layers) == kept_by_one_stage(subject)


@pytest.mark.parametrize("name", ["digits", "text"])
def test_the_examples_add_up_too(name: str) -> None:
    subject = models.example(name)
    layers = measured(subject).layers
    assert sum(layer.activation_bytes for layer in layers) == kept_by_one_stage(subject)


def test_sizes_of_a_chain_by_hand() -> None:
    found = measured(models.subject("linear_relu"))
    rows = 16 * 4
    assert found.input_bytes == rows * 5
    assert [layer.parameter_bytes for layer in found.layers] == [4 * 6 * 64, 0, 4 * 65 * 32, 0, 4 * 33 * 3]
    assert [layer.output_bytes for layer in found.layers] == [rows * 64, rows * 64, rows * 32, rows * 32, rows * 3]
    labels, log_softmax, weight_of_loss = 16 * 8, rows * 3, 4
    assert [layer.activation_bytes for layer in found.layers] == [
        rows * 5,
        rows * 64,
        0,  # its input is the result of the layer before, which counts there
        rows * 32,
        labels + log_softmax + weight_of_loss,
    ]


def test_work_of_a_chain_by_hand() -> None:
    layers = measured(models.subject("linear_relu")).layers
    assert [layer.forward.flops for layer in layers] == [2 * 16 * 5 * 64, 0, 2 * 16 * 64 * 32, 0, 2 * 16 * 32 * 3]
    # Of the weights, and but for the first layer of the inputs.
    assert [layer.backward.flops for layer in layers] == [2 * 16 * 5 * 64, 0, 4 * 16 * 64 * 32, 0, 4 * 16 * 32 * 3]
    assert all(layer.forward.operations > 0 for layer in layers)


def test_attention_counts_as_work() -> None:
    block = measured(models.example("text")).layers[1]
    texts, positions, width = 8, 64, 96
    products = 2 * texts * positions * width * (3 * width + width + 8 * width)
    attention = 2 * 2 * texts * positions * positions * width
    assert block.forward.flops == products + attention
    assert block.backward.flops == 2 * products + 5 * attention // 2
    assert block.backward.model_flops == 2 * products + 2 * attention, "it computes its scores again"


def test_frozen_parameters_are_neither_trained_nor_kept() -> None:
    layers = measured(models.subject("frozen")).layers
    assert layers[1].parameters == ()
    assert layers[1].parameter_bytes == layers[1].activation_bytes == 0


def test_a_layer_that_works_in_place_gets_its_inputs_afresh_each_time() -> None:
    subject = models.subject("shifts")
    before = [value.clone() for value in subject.batch.inputs]
    measured(subject)
    assert all(torch.equal(a, b) for a, b in zip(before, subject.batch.inputs, strict=True))


def test_times_are_medians_of_the_clock() -> None:
    class Ticking:
        """Every look at it takes one millisecond more than the last."""

        def __init__(self) -> None:
            self.looks = 0
            self.now = 0.0

        def monotonic(self) -> float:
            self.looks += 1
            self.now += self.looks / 1000
            return self.now

        def wall(self) -> float:
            return 1000.0

        def sleep(self, seconds: float) -> None:
            raise AssertionError(seconds)

    found = measure_chain(
        models.subject("frozen"),
        torch.device("cpu"),
        "cpu",
        sampling=Sampling.fixed(3),
        clock=Ticking(),
        on_layer=lambda _: None,
    )
    # Looks of the first layer: four at the warm-up, start, elapsed, then (lap, lap, lap, elapsed) three times, of which
    # the middle one counts.
    assert found.layers[0].forward_ms == pytest.approx(12.0)
    assert found.layers[0].backward_ms == pytest.approx(13.0)
    assert (found.repeats, found.measured_at) == (3, 1000.0)


class Slow:
    """A clock on which each look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now

    def wall(self) -> float:
        return 1000.0

    def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


def test_a_slow_layer_is_measured_a_few_times_only() -> None:
    found = measure_chain(
        models.subject("frozen"),
        torch.device("cpu"),
        "cpu",
        sampling=Sampling.within(num_layers=20),
        clock=Slow(),
        on_layer=lambda _: None,
    )
    assert found.repeats == Sampling().fewest


def test_an_error_of_a_layer_is_one_sentence() -> None:
    with pytest.raises(CallableError, match=r"layer 1 \(1\) failed on input of shape \[16, 4\]: ValueError: no good"):
        measured(models.subject("raises"))


def test_hears_of_each_layer() -> None:
    heard: list[int] = []
    measure_chain(
        models.subject("frozen"),
        torch.device("cpu"),
        "cpu",
        sampling=Sampling.fixed(1),
        clock=SYSTEM_CLOCK,
        on_layer=heard.append,
    )
    assert heard == [0, 1, 2]
