"""What the framework takes beside the model."""

from __future__ import annotations

import torch
from torch import nn

from hetpipe.pipeline.chain import chain_of
from hetpipe.profiler.assembly import reserve_for
from hetpipe.profiler.reserve import framework_reserve
from tests.profiler.builders import measurement

MIB = 1 << 20
CPU = torch.device("cpu")


def test_it_is_what_torch_takes_whatever_the_size_of_the_model() -> None:
    small = framework_reserve(CPU, chain_of(nn.Sequential(nn.Linear(4, 4))))
    large = framework_reserve(CPU, chain_of(nn.Sequential(nn.Linear(4096, 4096))))
    assert small > 50 * MIB, "Python and torch alone take more"
    assert abs(large - small) < 16 * MIB, "64 MiB of weights do not count"


def test_tensors_of_a_model_count_once() -> None:
    tied = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048))
    tied[1].weight = tied[0].weight
    counted = framework_reserve(CPU, ()) - framework_reserve(CPU, chain_of(nn.Sequential(tied)))
    assert 15 * MIB < counted < 18 * MIB, "one matrix of 16 MiB, and two biases"


def test_the_most_of_the_types_in_question_is_left() -> None:
    here = [measurement("cpu", reserve_bytes=300), measurement("T4", reserve_bytes=500)]
    assert reserve_for(here, ["cpu", "V100_PCIE_16GB"]) == 300
    assert reserve_for(here, ["cpu", "T4", "T4"]) == 500
    assert reserve_for(here, ["V100_PCIE_16GB"]) == 0
