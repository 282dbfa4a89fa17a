"""Tokens and operations of a sample, and what becomes of them in the result of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hetpipe.coordinator.summary import peak_of, speeds
from hetpipe.pipeline.model_work import model_work, tokens_of
from hetpipe.planner.partition import plan_job
from hetpipe.spec.ids import JobId, Term
from hetpipe.spec.plan import ModelWork, ProofReport
from tests.coordinator.builders import agent_info, job, model

PROOF = ProofReport("whole model", "bits", 4, 0.3, ("outputs",), work=ModelWork(128, 2e9))


def test_operations_of_two_linear_layers_are_those_of_their_matrix_products() -> None:
    """The forward takes 2·(30·20 + 20·10); the backward as much for weights, and for inputs but those of the data."""
    layers, data = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 10)), torch.randn(8, 30)
    parameters = list(layers.parameters())
    work = model_work([data], lambda: layers(data).square().mean(), parameters, tokens_per_sample=None)

    assert work == ModelWork(None, 2.0 * (2 * (30 * 20 + 20 * 10) + 20 * 10))
    assert all(parameter.grad is None for parameter in parameters)


def test_what_cannot_be_counted_is_not_known_and_ends_nothing() -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("no such kernel")

    ids = torch.zeros(4, 16, dtype=torch.int64)
    assert model_work([ids], fail, [], tokens_per_sample=None) == ModelWork(16, None)
    assert model_work([ids], fail, [], tokens_per_sample=7) == ModelWork(7, None)


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


def test_the_result_has_tokens_and_the_share_of_the_peak() -> None:
    nothing = {"tokens_per_second": None, "model_flops_utilisation": None}

    assert speeds(PROOF, 10.0, 1e11) == {"tokens_per_second": 1280.0, "model_flops_utilisation": 0.2}
    assert speeds(PROOF, 10.0, None) == {"tokens_per_second": 1280.0, "model_flops_utilisation": None}
    assert speeds(None, 10.0, 1e11) == speeds(replace(PROOF, work=ModelWork(None, None)), 10.0, 1e11) == nothing


def test_the_peak_is_that_of_all_devices_by_the_names_that_drivers_report() -> None:
    info = agent_info()
    plan = plan_job(job(), model(), [info], Term(1), JobId("j"))
    num_devices = sum(len(worker.stages) for worker in plan.virtual_workers)
    gpus = tuple(replace(each, type="NVIDIA GeForce RTX 2060", memory_bytes=6 << 30) for each in info.devices)

    assert peak_of(plan, [info]) is None, "a CPU has no peak in the catalogue"
    assert peak_of(plan, [replace(info, devices=gpus)]) == pytest.approx(num_devices * 6.45e12, rel=0.05)
