"""What the framework takes beside the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetpipe.decide.planner.assembly import reserve_for
from hetpipe.pipeline.chain import chain_of
from hetpipe.profiler import profiling
from hetpipe.profiler.profiling import framework_reserve
from tests.profiler.builders import measurement

MIB = 1 << 20
CPU = torch.device("cpu")


def test_python_and_torch_are_in_it() -> None:
    assert framework_reserve(CPU, ()) > 50 * MIB


def test_the_model_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_resident_bytes", lambda: 100 * MIB)
    weights = nn.Linear(512, 1024, bias=False)
    assert framework_reserve(CPU, chain_of(nn.Sequential(weights, nn.ReLU()))) == 98 * MIB


def test_tensors_of_a_model_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_resident_bytes", lambda: 100 * MIB)
    tied = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    tied[1].weight = tied[0].weight
    assert framework_reserve(CPU, chain_of(nn.Sequential(tied))) == 99 * MIB


def test_the_most_of_the_types_in_question_is_left() -> None:
    here = [measurement("cpu", reserve_bytes=300), measurement("T4", reserve_bytes=500)]
    assert reserve_for(here, ["cpu", "V100_PCIE_16GB"]) == 300
    assert reserve_for(here, ["cpu", "T4", "T4"]) == 500
    assert reserve_for(here, ["V100_PCIE_16GB"]) == 0
