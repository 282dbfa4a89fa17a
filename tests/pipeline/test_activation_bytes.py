"""What the first forward keeps, times the most in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetpipe.pipeline.chain import chain_of
from hetpipe.pipeline.compute import StageCompute
from hetpipe.pipeline.remapping import Remapping
from hetpipe.profiler.live_bytes import LiveBytes
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex

SAMPLES, WIDTH = 16, 8
BYTES = SAMPLES * WIDTH * 4
"""Of one float32 activation."""


class Apply(nn.Module):
    """Any function of the input and a matrix, with a buffer and a frozen parameter at hand."""

    def __init__(self, function: Callable[[Apply, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.frozen = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
        self.mask = nn.Buffer(torch.ones(SAMPLES, WIDTH))
        self.constant = torch.ones(SAMPLES, WIDTH)
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self, x)


def stage(*modules: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> StageCompute:
    """All layers but the first, so that the stage's input has a gradient."""
    layers = chain_of(nn.Sequential(nn.Identity(), *modules))[1:]
    return StageCompute(layers, vw=VirtualWorkerIndex(0), seed=0, device=torch.device("cpu"), loss=loss)


def leaves(*modules: nn.Module) -> dict[str, Tensor]:
    """Weights, all in one storage."""
    named = [(n, p) for n, p in nn.Sequential(nn.Identity(), *modules).named_parameters() if p.requires_grad]
    memory = torch.full((sum(p.numel() for _, p in named),), 0.1)
    parts = torch.split(memory, [p.numel() for _, p in named])
    return {n: part.view(p.shape).detach().requires_grad_() for (n, p), part in zip(named, parts, strict=True)}


def x() -> tuple[Tensor]:
    return (torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)),)


def measured(modules: Sequence[nn.Module], in_flight: int = 1) -> int:
    compute, weights = stage(*modules), leaves(*modules)
    for p in range(1, in_flight + 1):
        compute.forward(Minibatch(p), weights, x())
    assert compute.activation_bytes_peak == 0
    for p in range(1, in_flight + 1):
        compute.backward(Minibatch(p), weights, (torch.ones(SAMPLES, WIDTH),))
    return compute.activation_bytes_peak


CASES: dict[str, tuple[Callable[[Apply, Tensor], Tensor], int]] = {
    "nothing is saved: the input waits for its gradient": (lambda _, x: x + 1, 1),
    "a weight is none": (lambda m, x: x @ m.w, 1),
    "nor a view of one": (lambda m, x: (x[0] * m.w[3]).expand(SAMPLES, WIDTH), 1),
    "a frozen weight and a buffer are none": (lambda m, x: (x @ m.frozen) * m.mask, 1),
    "an output that the last operation saves": (lambda _, x: torch.tanh(x), 2),
    "one between": (lambda m, x: torch.tanh(x) + 1, 2),
    "in place": (lambda m, x: torch.relu_(x @ m.w), 2),
    "saved twice": (lambda m, x: (y := torch.tanh(x)) * y, 2),
    "a part keeps the whole": (lambda m, x: torch.tanh(x)[:1].exp().expand(SAMPLES, WIDTH).clone() * 2, 2),
    "a graph that nobody needs": (lambda m, x: x + torch.tanh(torch.tanh(x)).detach().sum(), 1),
    "a constant": (lambda m, x: x * m.constant, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_what_counts(name: str) -> None:
    function, activations = CASES[name]
    extra = WIDTH * 4 if name == "a part keeps the whole" else 0
    assert measured([Apply(function)]) == activations * BYTES + extra


def test_times_the_most_in_flight() -> None:
    modules = [nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH)]
    assert measured(modules) == 2 * BYTES
    assert measured(modules, in_flight=3) == 6 * BYTES


def test_as_much_as_lives_between_forward_and_backward() -> None:
    modules = [nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True), nn.BatchNorm1d(WIDTH), nn.GELU()]
    compute, weights = stage(*modules), leaves(*modules)
    with LiveBytes() as live:
        (value,) = x()
        compute.forward(Minibatch(1), weights, (value,))
        del value
        kept = live.now_bytes
        compute.backward(Minibatch(1), weights, (torch.ones(SAMPLES, WIDTH),))
    assert compute.activation_bytes_peak == kept


def differentiates(module: Apply, value: Tensor) -> Tensor:
    """Runs under no hooks."""
    gradient: Tensor = torch.func.grad(lambda y: (y @ module.w).square().sum())(value)
    return gradient


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_is_recomputed_is_not_kept(*, use_reentrant: bool) -> None:
    def recomputed(module: Apply, value: Tensor) -> Tensor:
        result: Tensor = checkpoint(
            lambda y: torch.tanh(torch.sigmoid(y) @ module.w), value, use_reentrant=use_reentrant
        )
        return result

    assert measured([Apply(recomputed)]) == BYTES
    assert measured([Apply(lambda m, y: torch.tanh(torch.sigmoid(y) @ m.w))]) == 3 * BYTES


def test_the_loss_counts_on_the_last_stage() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    compute, weights = stage(nn.Linear(WIDTH, WIDTH), loss=loss), leaves(nn.Linear(WIDTH, WIDTH))
    for p in (Minibatch(1), Minibatch(2)):
        outputs = compute.forward(p, weights, x())
        compute.loss(p, outputs, torch.zeros(SAMPLES, WIDTH))
        del outputs
        compute.backward(p, weights, None)
    assert compute.activation_bytes_peak == 2 * BYTES


def test_a_predicted_forward_keeps_the_same() -> None:
    modules = [nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH)]
    compute, predicted, current = stage(*modules), leaves(*modules), leaves(*modules)
    compute.forward(Minibatch(1), predicted, x(), Remapping(predicted))
    compute.backward(Minibatch(1), current, (torch.ones(SAMPLES, WIDTH),))
    assert compute.activation_bytes_peak == 2 * BYTES


def test_layers_that_refuse_hooks_train_unmeasured() -> None:
    """The first forward begins again, and finds what it found the first time."""
    normalisation = nn.BatchNorm1d(WIDTH)
    modules = [normalisation, nn.Dropout(), Apply(differentiates)]
    compute, weights = stage(*modules), leaves(*modules)
    (output,) = compute.forward(Minibatch(1), weights, x())
    gradients = compute.backward(Minibatch(1), weights, (torch.ones(SAMPLES, WIDTH),))
    assert compute.activation_bytes_peak == 0
    assert normalisation.num_batches_tracked == 1
    torch.testing.assert_close(normalisation.running_mean, 0.1 * x()[0].mean(0))
    (again,) = compute.forward(Minibatch(1), weights, x())
    assert torch.equal(output, again)
    assert all(gradient is not None for gradient in gradients.weights.values())


def test_layers_that_refuse_hooks_and_work_in_place_cannot_begin_again() -> None:
    module = Apply(lambda m, value: differentiates(m, value.mul_(2)))
    compute, weights = stage(module), leaves(module)
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        compute.forward(Minibatch(1), weights, x())
