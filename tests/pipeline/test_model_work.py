"""Tokens and operations of a sample, and what becomes of them in the result of a run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hetpipe.decide.lifecycle.summary import peak_of
from hetpipe.decide.planner.partition import plan_job
from hetpipe.job.file import Job, load_job
from hetpipe.pipeline.flop_counter import FlopCounter
from hetpipe.pipeline.model_work import model_work, tokens_of
from hetpipe.values.ids import JobId, Term
from hetpipe.values.plan import ModelWork, ProofReport
from hetpipe.values.utilisation import Peak
from tests.server.coordinator.builders import BASE, agent_info, job, model

PROOF = ProofReport("whole model", "bits", 4, 0.3, ("outputs",), work=ModelWork(128, 2e9))


def test_operations_of_two_linear_layers_are_those_of_their_matrix_products() -> None:
    """The forward takes 2·(30·20 + 20·10); the backward as much for weights, and for inputs but those of the data."""
    layers, data = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 10)), torch.randn(8, 30)
    parameters = list(layers.parameters())
    work = model_work(len(data), lambda: layers(data).square().mean(), parameters, tokens_per_sample=None)

    assert work == ModelWork(None, 2.0 * (2 * (30 * 20 + 20 * 10) + 20 * 10))
    assert all(parameter.grad is None for parameter in parameters)


def test_operations_of_a_convolution_are_those_of_its_matrix_product() -> None:
    """A 3x3 convolution of 4 into 6 channels at 10 · 10 places: 2·(4·9)·6·100 forward, as much for its weights."""
    layer, data = nn.Conv2d(4, 6, 3, padding=1, bias=False), torch.randn(2, 4, 10, 10)
    forward = 2 * (4 * 9) * 6 * 10 * 10
    work = model_work(len(data), lambda: layer(data).square().mean(), list(layer.parameters()), tokens_per_sample=None)
    assert work == ModelWork(None, 2.0 * forward)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_the_user_recomputes_is_counted_once(*, reentrant: bool) -> None:
    """PaLM, appendix B: model FLOPs are without rematerialisation, whoever asks for it."""
    layers, data = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 10)), torch.randn(8, 30)
    data.requires_grad_()  # a reentrant checkpoint needs one input that does
    parameters = list(layers.parameters())

    def plain() -> torch.Tensor:
        out: torch.Tensor = layers(data).square().mean()
        return out

    def checkpointed() -> torch.Tensor:
        again: torch.Tensor = checkpoint(layers, data, use_reentrant=reentrant)
        return again.square().mean()

    with FlopCounter(is_backward=False) as forward:
        loss = checkpointed()
    with FlopCounter(is_backward=True) as backward:
        torch.autograd.backward(loss)
    once = 2 * 8 * (30 * 20 + 20 * 10)
    assert forward.model_flops == forward.flops == once
    assert backward.flops - backward.model_flops == backward.recomputed_flops >= 2 * 8 * 30 * 20
    assert backward.model_flops == 2 * once, "weights and inputs of both"
    if not reentrant:  # whose backward is no use to autograd.grad
        find = partial(model_work, len(data), parameters=parameters, tokens_per_sample=None)
        assert find(compute_loss=checkpointed) == find(compute_loss=plain)


def test_attention_takes_twice_in_the_backward_what_it_takes_in_the_forward() -> None:
    """Its kernels keep no scores: the fifth product of the backward computes them again."""
    heads = torch.randn(2, 3, 16, 8, requires_grad=True)
    scores_and_values = 2 * (2 * 2 * 3 * 16 * 16 * 8)
    with FlopCounter(is_backward=False) as forward:
        out = nn.functional.scaled_dot_product_attention(heads, heads, heads)
    with FlopCounter(is_backward=True) as backward:
        torch.autograd.backward(out.sum())
    assert forward.model_flops == scores_and_values
    assert (backward.flops, backward.model_flops) == (5 * scores_and_values // 2, 2 * scores_and_values)


def test_the_format_of_a_model_is_that_of_most_of_its_bytes() -> None:
    layers = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))
    data = torch.randn(2, 4)
    work = model_work(len(data), data.sum, list(layers.parameters()), tokens_per_sample=None)
    assert work.compute_dtype == "bfloat16"
    assert model_work(len(data), data.sum, [], tokens_per_sample=None).compute_dtype == "float32"


def test_what_cannot_be_counted_is_not_known_and_ends_nothing() -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("no such kernel")

    ids = torch.zeros(4, 16, dtype=torch.int64)
    assert model_work(len(ids), fail, [], tokens_per_sample=None) == ModelWork(None, None)
    assert model_work(len(ids), fail, [], tokens_per_sample=7) == ModelWork(7, None)


@pytest.mark.parametrize(
    ("shape", "dtype", "tokens"),
    [
        ((8, 128), torch.int64, 128),
        ((8, 4, 16), torch.int32, 64),
        ((8,), torch.int64, None),
        ((8, 28, 28), torch.uint8, None),
        ((8, 128), torch.float32, None),
    ],
)
def test_ids_are_tokens(shape: tuple[int, ...], dtype: torch.dtype, tokens: int | None) -> None:
    assert tokens_of([torch.zeros(*shape, dtype=dtype)]) == tokens


class TestPeakOfARun:
    """The devices' types are those of the job's cluster file, or those that drivers report."""

    def test_it_is_that_of_all_devices_by_the_names_that_drivers_report(self) -> None:
        gpus = tuple(replace(each, type="NVIDIA GeForce RTX 2060", memory_bytes=6 << 30) for each in INFO.devices)
        assert peak_of(PLAN, [replace(INFO, devices=gpus)], job(), PROOF) == Peak(NUM_DEVICES * 6.45e12)

    def test_a_processor_has_none_unless_the_cluster_file_gives_it_one(self) -> None:
        unknown = peak_of(PLAN, [INFO], job(), PROOF)
        assert unknown.flops is None
        assert unknown.unknown == (
            "no peak is known for cpu, not listed in the catalogue of device types; give device_types.cpu.peak_flops "
            "in the cluster file"
        )
        described = job_on({"file": cluster(cpu={"memory_bytes": 1 << 30, "peak_flops": 2e11})})
        assert peak_of(PLAN, [INFO], described, PROOF) == Peak(NUM_DEVICES * 2e11)

    def test_the_file_says_of_which_type_a_device_is(self) -> None:
        own = cluster(ACME={"memory_bytes": 1 << 30, "peak_flops": 3e12})
        assert peak_of(PLAN, [INFO], job_on({"file": own}), PROOF) == Peak(NUM_DEVICES * 3e12)

    def test_narrow_models_are_held_against_the_peak_of_their_format(self) -> None:
        bfloat16 = replace(PROOF, work=ModelWork(None, 1.0, "bfloat16"))
        a100 = tuple(replace(each, type="NVIDIA A100-SXM4-40GB", memory_bytes=40 << 30) for each in INFO.devices)
        assert peak_of(PLAN, [replace(INFO, devices=a100)], job(), bfloat16) == Peak(NUM_DEVICES * 312e12)

    def test_played_devices_have_none(self) -> None:
        played = job_on({"file": cluster(T4={}), "profile": profile("T4"), "emulate": True})
        assert peak_of(PLAN, [INFO], played, PROOF).unknown.startswith("the devices are emulated (`cluster.emulate`)")


INFO = agent_info()
PLAN = plan_job(job(), model(), [INFO], Term(1), JobId("j"))
NUM_DEVICES = sum(len(worker.stages) for worker in PLAN.virtual_workers)


def job_on(section: dict[str, object]) -> Job:
    """The job on a cluster that is described."""
    return load_job({**BASE, "cluster": section})


def cluster(**types: dict[str, object]) -> dict[str, object]:
    """The agent's devices, all of the one type."""
    (kind,) = types
    link = {"bandwidth_bytes_per_second": 1e9}
    nodes: dict[str, list[str]] = {}
    for device in INFO.devices:
        nodes.setdefault(device.device.rpartition("/")[0], []).append(kind)
    return {
        "device_types": types,
        "nodes": [{"name": name, "devices": devices} for name, devices in nodes.items()],
        "links": {"intra_node": link, "inter_node": link},
    }


def profile(kind: str) -> dict[str, object]:
    layer = {"parameter_bytes": 4, "activation_bytes": 4, "output_bytes": 4}
    times = {"forward_ms": {kind: 1.0}, "backward_ms": {kind: 1.0}}
    layers = [{"name": str(index), **layer, **times} for index in range(2)]
    return {"version": 1, "model": "m", "batch_size": 4, "input_bytes": 4, "layers": layers}
