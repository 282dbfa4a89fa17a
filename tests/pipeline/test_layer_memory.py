"""Recomputed runs: what they keep, what a second forward sees and leaves, and what cannot be recomputed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import CallableError
from hetpipe.pipeline.chain import chain_of
from hetpipe.pipeline.compute import StageCompute
from hetpipe.pipeline.host_link import EmulatedHostLink
from hetpipe.pipeline.layer_memory import LayerMemory
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex
from hetpipe.values.memory import LayerPolicy

SAMPLES, WIDTH = 16, 8
BYTES = SAMPLES * WIDTH * 4
"""Of one float32 activation."""


class Seen(nn.Module):
    """Notes its calls; writes a buffer from call `late` on."""

    count: Tensor
    constant: Tensor

    def __init__(self, late: int = 1) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("constant", torch.ones(()))
        self.late = late
        self.calls = 0
        self.read: list[float] = []

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        self.read.append(float(self.count))
        if self.calls >= self.late:
            self.count += 1
        return (value * self.constant).sigmoid()


class Functional(nn.Module):
    """Calls `torch.func.grad`, which does not run under hooks on saved tensors."""

    def forward(self, value: Tensor) -> Tensor:
        torch.func.grad(lambda x: (x * x).sum())(torch.ones(2))
        return value.sigmoid()


def stage(modules: Sequence[nn.Module], policies: Sequence[LayerPolicy]) -> StageCompute:
    """All layers but the first, so that the stage's input has a gradient."""
    layers = chain_of(nn.Sequential(nn.Identity(), *modules))[1:]
    device = torch.device("cpu")
    link = EmulatedHostLink(SYSTEM_CLOCK) if "swap" in policies else None
    memory = LayerMemory(layers, policies, link)
    return StageCompute(layers, vw=VirtualWorkerIndex(0), seed=0, device=device, loss=None, memory=memory)


def minibatch() -> tuple[Tensor]:
    return (torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)),)


def passed(compute: StageCompute, p: int) -> Tensor:
    """Forward and backward of one minibatch; the gradient of its input."""
    (output,) = compute.forward(Minibatch(p), {}, minibatch())
    (gradient,) = compute.backward(Minibatch(p), {}, [torch.ones_like(output)]).inputs
    assert gradient is not None
    return gradient


@pytest.mark.parametrize(
    ("policies", "kept"),
    [
        # Each sigmoid saves its result; the input of the stage is kept as well.
        ("kkk", 1 + 3),
        ("rrr", 1),
        # The results before and behind the run: the first is the run's input.
        ("krk", 1 + 2),
        ("rkr", 1 + 1),
        ("rnn", 1 + 2),
    ],
)
def test_a_run_keeps_its_input_alone(policies: str, kept: int) -> None:
    words: dict[str, LayerPolicy] = {"k": "keep", "r": "recompute", "n": "recompute-new-run"}
    compute = stage([nn.Sigmoid(), nn.Sigmoid(), nn.Sigmoid()], [words[letter] for letter in policies])
    passed(compute, 1)
    assert compute.activation_bytes_peak == kept * BYTES


def test_a_second_forward_reads_the_buffers_of_the_first_and_what_it_writes_is_discarded() -> None:
    seen = Seen()
    compute = stage([seen, nn.Sigmoid()], ["recompute", "recompute"])
    for p in (1, 2, 3):
        compute.forward(Minibatch(p), {}, minibatch())
    for p in (1, 2, 3):
        compute.backward(Minibatch(p), {}, [torch.ones(SAMPLES, WIDTH)])
    assert seen.read == [0, 1, 2, 0, 1, 2]
    assert float(seen.count) == 3


def test_a_run_that_modifies_its_input_works_on_a_copy() -> None:
    modules = [nn.Sigmoid(), nn.ReLU(inplace=True), nn.ReLU(inplace=True)]
    for policies in (["keep", "recompute", "recompute"], ["recompute", "recompute-new-run", "recompute"]):
        compute = stage(modules, policies)  # type: ignore[arg-type]
        plain = stage([nn.Sigmoid(), nn.ReLU(), nn.ReLU()], ["keep"] * 3)
        for p in (1, 2):
            assert torch.equal(passed(compute, p), passed(plain, p))


def test_a_buffer_that_is_first_written_later_ends_the_run_with_its_name() -> None:
    compute = stage([Seen(late=3)], ["recompute"])
    passed(compute, 1)
    with pytest.raises(
        CallableError,
        match=r"layers 1 cannot be recomputed: a forward modified buffer count, which .* `memory: \{1: keep\}`",
    ):
        passed(compute, 2)


@pytest.mark.parametrize("policies", [["recompute", "recompute"], ["swap", "swap"]])
def test_what_refuses_hooks_cannot_be_recomputed_or_swapped(policies: list[LayerPolicy]) -> None:
    with pytest.raises(CallableError, match=r"layers 1, 2 cannot be recomputed, nor .*: one uses torch.func.grad"):
        passed(stage([nn.Sigmoid(), Functional()], policies), 1)
