"""The proof of models that are cut by their own forward notices what would train to something else."""

from __future__ import annotations

import copy
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from hetpipe.errors import CallableError
from hetpipe.model.cut_model import CutModel
from hetpipe.model.forward import StageForward
from hetpipe.pipeline import chain
from hetpipe.pipeline.compute import Differentiation, StageCompute
from hetpipe.pipeline.cut_proof import prove_cut_model
from hetpipe.pipeline.data import Batch
from hetpipe.pipeline.layer_memory import _Held
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
    assert len(chain) > 1
    prove_cut_model(made, chain, given_loss=loss, loss=on_output(chain, loss), batches=(batches[0], batches[1]), seed=3)


def test_a_model_that_is_cut_rightly_is_proven() -> None:
    prove(Good)


class Recomputed(Good):
    """Recomputes a layer reentrantly."""

    def forward(self, value: Tensor) -> Tensor:
        kept = self.first(value)
        recomputed: Tensor = checkpoint(self.second, kept, use_reentrant=True)
        result: Tensor = self.norm(recomputed) + kept
        return result


class Reversing(torch.autograd.Function):
    """Calls a module in its forward, and differentiates it in its backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(value)
        result: Tensor = module(value)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        with torch.enable_grad():
            value = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.module(value), gradient)
        return value.grad, None


class Reversible(Good):
    def forward(self, value: Tensor) -> Tensor:
        kept = self.first(value)
        once = Reversing.apply(kept, self.second).tanh()  # type: ignore[no-untyped-call]
        result: Tensor = self.norm(Reversing.apply(once, self.second)) + kept  # type: ignore[no-untyped-call]
        return result


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("build", [Recomputed, Reversible])
def test_gradients_that_a_nested_backward_accumulates_are_those_of_a_plain_loop(build: Callable[[], nn.Module]) -> None:
    prove(build)
    torch.manual_seed(3)
    model, target = build(), torch.arange(4.0)
    other = copy.deepcopy(model)
    value = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    loss(model(value), target).backward()  # type: ignore[no-untyped-call]
    torch.manual_seed(3)
    start = get_gradient_edge(loss(other(value), target))
    found, _ = Differentiation().run([(start, None)], dict(other.named_parameters()), (), {})
    for name, parameter in model.named_parameters():
        gradient = found[name]
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("build", [Hidden, Remembering])
def test_a_model_that_would_train_to_something_else_is_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(CallableError, match="does not compute what the model computes"):
        prove(build)


class Rich(nn.Module):
    """What cutting can get wrong: a tie, a write in place, draws, buffers, a mask, hooks, what is handed back."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.embedding.weight.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.norm, self.swap = nn.Dropout(0.5), nn.BatchNorm1d(WIDTH), Swap()
        self.first.register_forward_hook(lambda _module, _inputs, output: output * 2)

    def forward(self, ids: Tensor) -> Tensor:
        ids += 1  # the loader's tensor, as long as nobody else reads it
        mask = (ids % 7 > 3).unsqueeze(1)
        hidden = self.first(self.embedding(ids))
        hidden += 1.0
        kept = self.drop(hidden)
        kept, hidden = self.swap(kept, hidden)
        other = self.norm(self.second(hidden.tanh())).masked_fill(~mask, 0.0)
        result: Tensor = nn.functional.linear(self.drop(other) - kept, self.embedding.weight)
        return result


class Swap(nn.Module):
    """Hands back its arguments in another order."""

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return other, one


def prove_rich() -> None:
    def made() -> nn.Module:
        torch.manual_seed(3)
        return Rich()

    generator = torch.Generator().manual_seed(0)
    batches = [Batch((torch.randint(0, 8, (4,), generator=generator),), torch.arange(4.0), 4) for _ in range(2)]
    chain = layers_of(made(), batches[0], loss)
    assert len(chain) > 4
    prove_cut_model(made, chain, given_loss=loss, loss=on_output(chain, loss), batches=(batches[0], batches[1]), seed=3)


def test_a_model_with_everything_is_proven() -> None:
    prove_rich()


def mutate(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, old: str, new: str) -> None:
    """Make one method again from its source, with `new` instead of `old`."""
    method = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(old) == 1, f"{owner.__name__}.{name} is another one today; mutate what it has become"
    namespace: dict[str, Any] = {**vars(inspect.getmodule(method)), "chain": chain}
    exec(compile(source.replace(old, new), f"<mutated {name}>", "exec"), namespace)
    monkeypatch.setattr(owner, name, namespace[name])


#: What is broken → whose method, and how.
MUTATIONS: dict[str, tuple[type, str, str, str]] = {
    "a weight that came is not put where it is tied": (CutModel, "ties_in_place", "owner[key] = weight", "pass"),
    "the gradient of a tie does not come back": (CutModel, "_tie", "weight.clone()", "weight.detach().clone()"),
    "a write in place is lost at the cut": (StageForward, "_keep", "] = tensor", "] = tensor.clone()"),
    "the seed is that of another call": (StageCompute, "_seed_for", "shift), key)", "shift), self._layers[0].name)"),
    "a stage does not update its buffers": (
        _Held,
        "run",
        "swapped is None:\n        return run_layers(",
        "swapped is None:\n        return chain.copied_buffers(self._layers)(run_layers)(",
    ),
    "values cross in another order than they are unpacked": (
        CutModel,
        "run",
        "for each in end.crossing)",
        "for each in reversed(end.crossing))",
    ),
    "the mask is that of the minibatch before": (
        CutModel,
        "run",
        'integers = {key: given[f"input:{key}"] for key in self._integers}',
        'integers = vars(self).setdefault(f"_{first}", {key: given[f"input:{key}"] for key in self._integers})',
    ),
    "an input that the model changes is changed again behind the cut": (
        CutModel,
        "run",
        "{key: value.clone() for key, value in integers.items()}",
        "integers",
    ),
    "hooks of parameters are lost": (StageCompute, "backward", "of_weights = hooked(", "hooked((), of_weights) or ("),
    "what a module hands back is another argument": (
        StageForward,
        "_answered",
        "iter(found), parts_of(args, kwargs)",
        "iter(found), parts_of(args, kwargs)[::-1]",
    ),
}


@pytest.mark.parametrize("broken", MUTATIONS)
def test_what_is_broken_about_the_cutting_is_noticed_before_training(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, *MUTATIONS[broken])
    with pytest.raises(CallableError, match=r"^model: ") as caught:
        prove_rich()
    mistakes = (NameError, TypeError, AttributeError)  # of the mutation itself
    assert not isinstance(caught.value.__cause__, mistakes)


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
    with pytest.raises(CallableError, match="compared with the model on the same seeds"):
        prove(Good)
