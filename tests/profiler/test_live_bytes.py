"""The counter of live tensors: births, deaths, views, graphs, the peak."""

from __future__ import annotations

import torch
from torch import nn

from hetpipe.profiler.live_bytes import LiveBytes


def test_counts_from_birth_to_death() -> None:
    with LiveBytes() as live:
        a = torch.zeros(100)
        b = a + 1
        assert live.now_bytes == 800
        del a
        assert live.now_bytes == 400
        del b
        assert (live.now_bytes, live.peak_bytes) == (0, 800)


def test_a_view_keeps_its_whole_storage_and_counts_once() -> None:
    with LiveBytes() as live:
        base = torch.zeros(100)
        view = base[:3].view(3, 1)
        assert live.now_bytes == 400
        del base
        assert live.now_bytes == 400
        del view
        assert live.now_bytes == 0


def test_what_was_there_before_is_not_counted_unless_asked_for() -> None:
    before = torch.zeros(100)
    with LiveBytes() as live:
        view = before[:50]
        before.add_(1)
        assert live.now_bytes == 0
        live.count([before, view])
        assert live.now_bytes == 400
    del before, view
    assert live.now_bytes == 0


def test_a_resized_storage_counts_with_its_new_size() -> None:
    with LiveBytes() as live:
        tensor = torch.zeros(10)
        tensor.resize_(1000)
        assert live.now_bytes == 4000
        del tensor
        assert (live.now_bytes, live.peak_bytes) == (0, 4000)


def test_an_empty_tensor_is_nothing() -> None:
    with LiveBytes() as live:
        tensors = [torch.zeros(0) for _ in range(3)]
        assert live.now_bytes == 0
    assert len(tensors) == 3


def test_sees_what_a_graph_of_autograd_keeps_and_what_its_backward_makes() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    inputs = torch.randn(8, 10)
    with LiveBytes() as live:
        output = model(inputs)
        result_of_relu, result = 8 * 20 * 4, 8 * 5 * 4
        assert live.now_bytes == result_of_relu + result
        gradients = torch.autograd.grad(output.sum(), list(model.parameters()))
        assert live.now_bytes == result + sum(gradient.nbytes for gradient in gradients)
        assert live.peak_bytes > live.now_bytes
        del output, gradients
        assert live.now_bytes == 0


def test_the_peak_can_begin_anew() -> None:
    with LiveBytes() as live:
        first = torch.zeros(100)
        del first
        live.restart_peak()
        assert live.peak_bytes == 0
        torch.zeros(10)
        assert live.peak_bytes == 40


def test_other_devices_do_not_count() -> None:
    with LiveBytes() as live:
        shapes = torch.zeros(1000, device="meta")
        assert live.now_bytes == 0
    assert shapes.is_meta
