"""The proof of models that are cut by their own forward notices what would train to something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hetpipe.errors import CallableError
from hetpipe.model.cut_model import CutModel
from hetpipe.model.forward import StageForward
from hetpipe.pipeline.cut_proof import prove_cut_model
from hetpipe.pipeline.data import Batch
from hetpipe.pipeline.layering import layers_of, on_output

WIDTH = 5


class Good(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        kept = self.drop(self.first(value))
        result: Tensor = self.norm(self.second(kept.tanh())) + kept
        return result


class Hidden(Good):
    """Uses a weight where it is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.references = [self.first.weight]

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = nn.functional.linear(super().forward(value), self.references[0])
        return result


class Remembering(Good):
    """Keeps something of the minibatch before."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.zeros(())

    def forward(self, value: Tensor) -> Tensor:
        result = super().forward(value) + self.before
        self.before = result.detach().mean()
        return result


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(1) - target).square().mean()


def prove(build: Callable[[], nn.Module]) -> None:
    def made() -> nn.Module:
        torch.manual_seed(3)
        return build()

    generator = torch.Generator().manual_seed(0)
    batches = tuple(Batch((torch.randn(4, WIDTH, generator=generator),), torch.arange(4.0), 4) for _ in range(2))
    chain = layers_of(made(), batches[0], loss)
    assert len(chain) > 2
    prove_cut_model(made, chain, given_loss=loss, loss=on_output(chain, loss), batches=(batches[0], batches[1]), seed=3)


def test_a_model_that_is_cut_rightly_is_proven() -> None:
    prove(Good)


@pytest.mark.parametrize("build", [Hidden, Remembering])
def test_a_model_that_would_train_to_something_else_is_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(CallableError, match="does not compute what the model computes"):
        prove(build)


def test_a_gradient_that_does_not_come_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = CutModel.gradient_flags
    monkeypatch.setattr(CutModel, "gradient_flags", lambda self, layer: (False,) * len(flags(self, layer)))
    with pytest.raises(CallableError, match=r"first difference at .* \(gradient of first"):
        prove(Good)


def test_draws_that_are_not_seeded_by_name_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = StageForward.__init__

    def unseeded(self: StageForward, *args: object, **kwargs: object) -> None:
        kept(self, *args, **{**kwargs, "seed": lambda _: None})  # type: ignore[arg-type]

    monkeypatch.setattr(StageForward, "__init__", unseeded)
    with pytest.raises(CallableError, match="compared with the model as one stage"):
        prove(Good)
