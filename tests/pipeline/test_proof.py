"""Proof before training: what would be trained to something else is refused with place and fix, and nothing else is."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from hetpipe.errors import CallableError
from hetpipe.pipeline.chain import chain_of
from hetpipe.pipeline.data import Batch
from hetpipe.pipeline.proof import Proof, UncutFailure, prove_data, prove_model
from hetpipe.pipeline.seeds import generator_states, seed_generators
from tests.models import hook_parameter

WIDTH, CLASSES, SAMPLES, VOCABULARY = 6, 3, 4, 11

Factory = Callable[[], nn.Module]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def batches(kind: str = "floats") -> tuple[Batch, Batch]:
    generator = torch.Generator().manual_seed(7)

    def one() -> Batch:
        floats = torch.randn(SAMPLES, WIDTH, generator=generator)
        inputs = {
            "floats": (floats,),
            "integers": (torch.randint(0, VOCABULARY, (SAMPLES, 5), generator=generator),),
            "images": (torch.randn(SAMPLES, 2, 8, 8, generator=generator),),
            "two": (floats, torch.randint(0, VOCABULARY, (SAMPLES,), generator=generator)),
        }[kind]
        return Batch(inputs, torch.randint(0, CLASSES, (SAMPLES,), generator=generator), SAMPLES)

    return one(), one()


def proven(factory: Factory, *, kind: str = "floats", loss: Callable[[Any, Any], Any] = cross_entropy) -> Proof:
    def build() -> nn.Module:
        seed_generators(3)
        return factory()

    return prove_model(build, chain_of(build()), loss=loss, batches=batches(kind), seed=3)


def refusal(factory: Factory, **changes: Any) -> str:
    with pytest.raises(CallableError) as caught:
        proven(factory, **changes)
    return str(caught.value)


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *between, nn.Linear(WIDTH, CLASSES))


# -- what would be trained to something else ------------------------------------------------------------------------


class TiedHead(nn.Module):
    """Scores by an embedding that it has hidden from `register_parameter`."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)
        self.tied = [embedding]

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean(dim=1)
        scores: Tensor = self.out(pooled) + (pooled @ self.tied[0].weight.t())[:, :CLASSES]
        return scores


def test_a_head_that_reads_an_embedding_hidden_in_a_list_is_refused_with_the_path() -> None:
    def factory() -> nn.Module:
        embedding = nn.Embedding(VOCABULARY, WIDTH)
        return nn.Sequential(embedding, nn.Tanh(), TiedHead(embedding))

    sentence = refusal(factory, kind="integers")
    assert re.match(
        r"model: the cut model does not compute what the model computes: first difference at layer 2 "
        r"\(output 0, \d\.\de-\d\)\. Parameter 2\.tied\[0\]\.weight is used there but not registered\.",
        sentence,
    ), sentence
    assert "both of them in one layer" in sentence


class Shifted(nn.Sequential):
    """A chain by its class, and something else by its forward."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)  # type: ignore[no-untyped-call]  # torch ships it untyped
        return y * 2


class Glued(nn.Sequential):
    """An activation between its layers that is no layer."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[1](torch.relu(self[0](x)))
        return y


class Twice(nn.Sequential):
    """Calls a layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[2](self[1](self[1](self[0](x))))
        return y


class Same(nn.Sequential):
    """Has a forward of its own, which computes what the chain computes."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("factory", "where"),
    [
        (lambda: Shifted(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)), "what the model returns after its last"),
        (lambda: Glued(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)), "at layer 1"),
        (
            lambda: Twice(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)),
            "The model's own forward calls layer 1 before layer 2",
        ),
    ],
)
def test_a_sequential_with_a_forward_of_its_own_is_compared_with_it(factory: Factory, where: str) -> None:
    sentence = refusal(factory)
    assert where in sentence and "a method layers()" in sentence
    assert proven(lambda: Same(*mlp(nn.Tanh()))).is_exact


class Backbone(nn.Module):
    """Layers in a list of the user's choice."""

    def __init__(self, order: Sequence[int] = (0, 1, 2)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)])
        self.order = order

    def layers(self) -> Sequence[nn.Module]:
        return [self.blocks[index] for index in self.order]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class NoForward(nn.Module):
    """`layers()` is all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def layers(self) -> Sequence[nn.Module]:
        return [self.first, nn.Tanh(), self.last]


def test_layers_that_disagree_with_forward_are_refused_at_the_first_place() -> None:
    assert proven(Backbone).is_exact
    sentence = refusal(lambda: Backbone((1, 0, 2)))
    assert "first difference at what the model returns after its last layer" in sentence
    assert "The model's own forward calls blocks.0 before blocks.1" in sentence


def test_layers_without_a_forward_are_the_definition_and_the_user_is_told() -> None:
    proof = proven(NoForward)
    assert proof.is_exact
    (notice,) = proof.notices
    assert notice.startswith("NoForward has layers() and no forward of its own: the sequence of its layers")


class ListOfParameters(nn.Module):
    """A parameter that is in no one's `parameters()`."""

    def __init__(self) -> None:
        super().__init__()
        self.ref = [nn.Parameter(torch.ones(CLASSES))]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.ref[0]


class ReadsItsOwnByList(nn.Linear):
    """Its registered weight, read by way of a list."""

    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)
        self.ref = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.ref[0].detach() + 0 * self.weight, self.bias)


def test_a_parameter_in_a_plain_list_is_refused_by_its_path() -> None:
    sentence = refusal(lambda: mlp(nn.Tanh()).append(ListOfParameters()))
    assert sentence.startswith("model: Parameter 3.ref[0] is used in layer 3 but not registered"), sentence
    sentence = refusal(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), ReadsItsOwnByList()))
    assert "first difference at layer 1 (output 0, " in sentence
    assert "Parameter 1.ref[0] is used there but not registered." in sentence


class Skips(nn.Module):
    """Hands a value on by a list that two layers share."""

    def __init__(self, shared: list[Tensor], *, gives: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH if gives else CLASSES)
        self.shared, self.gives = shared, gives

    def forward(self, x: Tensor) -> Tensor:
        given = x if self.gives else x + self.shared[0]
        if self.gives:
            self.shared[:] = [x.detach()]
        y: Tensor = self.linear(given)
        return y


def test_a_value_that_layers_hand_on_behind_the_boundary_is_refused() -> None:
    def factory() -> nn.Module:
        shared: list[Tensor] = []
        return nn.Sequential(Skips(shared, gives=True), nn.Tanh(), Skips(shared, gives=False))

    sentence = refusal(factory)
    assert sentence.startswith("model: layer 2 computes something else when it is run again without the layers before")


class Counts(nn.Module):
    """Computes something else each time, by what is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_a_layer_that_keeps_something_that_is_no_buffer_is_refused() -> None:
    assert "layer 1" in refusal(lambda: mlp(Counts()))


class _KeepsNewest(torch.autograd.Function):
    newest: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _KeepsNewest.newest = x.detach().clone()
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * _KeepsNewest.newest


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _KeepsNewest.apply(x)  # type: ignore[no-untyped-call]  # torch ships it untyped
        return y


def test_a_backward_that_reads_the_newest_forward_is_refused() -> None:
    sentence = refusal(lambda: mlp(Square()))
    assert "with two minibatches in flight" in sentence and "in layer 0" in sentence


class Scales(nn.Module):
    """Evaluates by something that is no flag."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    def train(self, mode: bool = True) -> Scales:  # noqa: FBT001, FBT002 - torch's own
        self.scale = 1.0 if mode else 0.5
        return super().train(mode)


def test_an_eval_that_changes_more_than_flags_is_refused() -> None:
    sentence = refusal(lambda: mlp(Scales()))
    assert "first difference at layer 1" in sentence and "This is in evaluation mode" in sentence


class Center(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output + self.centers, target)


class Drifts(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.mean += output.detach().mean()
        return cross_entropy(output, target)


def test_a_loss_with_parameters_of_its_own_or_with_a_memory_is_refused() -> None:
    center, drifts, calls = Center(), Drifts(), []

    def with_parameters(output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = center(output, target)
        return loss

    def counts(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        return cross_entropy(output, target) * len(calls)

    assert "loss: it computes with parameters of its own (of shape [3])" in refusal(mlp, loss=with_parameters)
    assert "loss: its buffer mean changes when it is called" in refusal(mlp, loss=drifts)
    assert "so it keeps state between calls" in refusal(mlp, loss=counts)


def test_hooks_that_no_stage_would_call_are_refused_by_name() -> None:
    def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2

    def on_the_model() -> nn.Module:
        model = mlp()
        model.register_forward_hook(doubled)
        return model

    sentence = refusal(on_the_model)
    assert "doubled (register_forward_hook) is on the model itself, which no stage calls" in sentence

    def on_a_list() -> nn.Module:
        model = Backbone()
        model.blocks.register_full_backward_hook(lambda *_: None)
        return model

    assert "is on module blocks, which no stage calls" in refusal(on_a_list)

    def after_accumulation() -> nn.Module:
        model = mlp()
        weight: Any = model.get_parameter("0.weight")
        weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return model

    assert "parameter 0.weight has a hook of register_post_accumulate_grad_hook" in refusal(after_accumulation)


def test_a_hook_on_a_parameter_that_reads_the_parameter_it_was_made_with_is_refused() -> None:
    def factory() -> nn.Module:
        model = mlp()
        weight = model.get_parameter("0.weight")
        hook_parameter(model, "0.weight", lambda gradient: gradient + 0.1 * weight)
        return model

    assert "first difference at layer 0 (gradient of 0.weight, " in refusal(factory)


def test_a_model_that_is_another_one_each_time_is_refused() -> None:
    def factory() -> nn.Module:
        model = mlp()
        with torch.no_grad():
            model.get_parameter("0.weight").copy_(torch.tensor(np.random.default_rng().normal(size=(WIDTH, WIDTH))))
        return model

    assert "built twice under one seed, its parameter 0.weight differs" in refusal(factory)


# -- what is right ---------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws from all three generators."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        noise = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002 - what users call
        return x * float(noise)


class Split(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, : WIDTH // 2], x.t()


class Join(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.cat([left, right.t()[:, WIDTH // 2 :]], dim=1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.cell(self.embedding(x))[0]
        return output[:, -1]


class Recomputes(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return y


class TakesTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        added: Tensor = x + self.embedding(y)
        return added


class FrozenNorm(nn.Sequential):
    """The usual way to keep a normalisation frozen."""

    def train(self, mode: bool = True) -> FrozenNorm:  # noqa: FBT001, FBT002 - torch's own
        super().train(mode)
        self[1].eval()
        return self


class Wrapped(Backbone):
    """Layers that are made at each call."""

    def layers(self) -> Sequence[nn.Module]:
        return [nn.Sequential(self.blocks[0], nn.Dropout(0.2)), nn.Sequential(self.blocks[1], self.blocks[2])]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks[2](self.blocks[1](nn.functional.dropout(self.blocks[0](x), 0.2, self.training)))
        return y


def doubled_gradient(module: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor]:
    return (inputs[0] * 2,)


def with_hooks() -> nn.Module:
    model = mlp(nn.Tanh(), nn.Dropout(0.2))
    hook_parameter(model, "0.weight", lambda gradient: gradient * 0.5)
    hook_parameter(model, "0.weight", lambda gradient: gradient.clamp(-0.01, 0.01))
    model[1].register_forward_hook(lambda module, args, output: output * 3)
    model[3].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[1].register_full_backward_hook(doubled_gradient)
    return model


def frozen_part() -> nn.Module:
    return mlp(nn.BatchNorm1d(WIDTH).eval(), nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False))


def channels_last() -> nn.Module:
    convolutions = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    model: nn.Module = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64, CLASSES))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]  # not in its stub


def reused() -> nn.Module:
    relu = nn.ReLU(inplace=True)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), relu, nn.Linear(WIDTH, WIDTH), relu, nn.Linear(WIDTH, CLASSES))


SINGLETON = mlp(nn.Tanh())

SANE: dict[str, tuple[Factory, str]] = {
    "dropout": (lambda: mlp(nn.Dropout(0.5), nn.ReLU(inplace=True)), "floats"),
    "batch norm": (lambda: mlp(nn.BatchNorm1d(WIDTH)), "floats"),
    "frozen by eval()": (frozen_part, "floats"),
    "frozen by train()": (
        lambda: FrozenNorm(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)),
        "floats",
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES)),
        "images",
    ),
    "convolutions, channels last": (channels_last, "images"),
    "embedding": (
        lambda: nn.Sequential(nn.EmbeddingBag(VOCABULARY, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, CLASSES)),
        "integers",
    ),
    "recurrent": (lambda: nn.Sequential(Recurrent(), nn.Linear(WIDTH, CLASSES)), "integers"),
    "layers()": (Backbone, "floats"),
    "weight norm": (
        lambda: mlp(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
        "floats",
    ),
    "spectral norm": (lambda: mlp(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))), "floats"),
    "tuples": (lambda: mlp(Split(), Join()), "floats"),
    "two inputs": (lambda: nn.Sequential(TakesTwo(), nn.Linear(WIDTH, CLASSES)), "two"),
    "hooks": (with_hooks, "floats"),
    "random and NumPy": (lambda: mlp(Noisy(), Noisy()), "floats"),
    "recomputation": (lambda: mlp(Recomputes(reentrant=False)), "floats"),
    "recomputation, reentrant": (lambda: mlp(Recomputes(reentrant=True)), "floats"),
    "one module in two places": (reused, "floats"),
    "a model that is made once": (lambda: SINGLETON, "floats"),
    "a transformer": (
        lambda: nn.Sequential(
            nn.Embedding(VOCABULARY, 8),
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            nn.Flatten(),
            nn.Linear(40, CLASSES),
        ),
        "integers",
    ),
    "one layer": (lambda: nn.Sequential(nn.Linear(WIDTH, CLASSES)), "floats"),
    "float64": (lambda: nn.Sequential(Double(), nn.Linear(WIDTH, CLASSES).double()), "floats"),
}


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


@pytest.mark.parametrize("name", SANE)
def test_sane_models_are_proven_to_the_bit(name: str) -> None:
    factory, kind = SANE[name]
    proof = proven(factory, kind=kind)
    assert proof.is_exact and proof.samples == SAMPLES and proof.notices == ()


def test_layers_that_are_made_anew_at_each_call_are_compared_as_a_whole() -> None:
    proof = proven(Wrapped)
    assert not proof.is_exact
    assert "as a whole and within rounding" in proof.notices[0]

    class Differs(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.blocks[2](self.blocks[1](nn.functional.dropout(self.blocks[0](x), 0.3, self.training)))
            return y

    assert "first difference at what the model returns" in refusal(Differs)


def test_the_layers_and_the_generators_are_left_as_they_were() -> None:
    def build() -> nn.Module:
        seed_generators(3)
        return mlp(nn.BatchNorm1d(WIDTH), Noisy(), nn.Dropout(0.5).eval())

    chain = chain_of(build())
    state = {name: value.clone() for layer in chain for name, value in layer.module.state_dict().items()}
    flags = [part.training for layer in chain for part in layer.module.modules()]
    before = generator_states()
    prove_model(build, chain, loss=cross_entropy, batches=batches(), seed=3)
    assert generator_states() == before
    assert flags == [part.training for layer in chain for part in layer.module.modules()]
    after = {name: value for layer in chain for name, value in layer.module.state_dict().items()}
    assert all(torch.equal(after[name], value) for name, value in state.items())


def test_a_layer_that_fails_is_named_with_its_input() -> None:
    with pytest.raises(UncutFailure, match=re.escape("layer 1 (1) failed on input of shape [4, 3]: RuntimeError")):
        proven(lambda: nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)))


def test_a_model_that_no_plain_loop_could_train_is_refused_as_such() -> None:
    with pytest.raises(UncutFailure, match="model: the backward of the model itself failed: RuntimeError"):
        proven(lambda: mlp(nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)))


def test_a_lazy_module_is_refused_with_the_fix() -> None:
    assert "run the model once on a sample" in refusal(lambda: nn.Sequential(nn.LazyLinear(CLASSES)))


def test_too_little_memory_is_told_as_what_the_proof_needs() -> None:
    class Hungry(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise MemoryError

    assert "does not fit into this host's memory" in refusal(lambda: mlp(Hungry()))


# -- data ------------------------------------------------------------------------------------------------------------


class Augmented:
    """Sample i, moved by what `draw` gives."""

    def __init__(self, draw: Callable[[], float], start: float = 0.0) -> None:
        self._draw, self._start = draw, start

    def __len__(self) -> int:
        return 2 * SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        moved = self._start + self._draw()
        return torch.full((WIDTH,), index + moved), moved


def read(dataset: Any) -> Batch:
    from hetpipe.pipeline.data import read_batch

    seed_generators(5)
    return read_batch(dataset, range(SAMPLES))


def data_proven(make: Callable[[], Augmented]) -> None:
    def build() -> Augmented:
        seed_generators(4)
        return make()

    prove_data("data.train", "mydata:train", build, build(), read)


def test_data_that_draw_from_seeded_generators_are_proven() -> None:
    def drawn() -> int:
        return int(np.random.randint(2**31))  # noqa: NPY002 - what users call

    for draw in (random.random, np.random.rand, lambda: float(torch.rand(()))):
        data_proven(lambda draw=draw: Augmented(draw, start=float(draw())))  # type: ignore[misc]
    data_proven(lambda: Augmented(lambda: float(np.random.default_rng(drawn()).random())))


def test_a_generator_that_the_data_set_keeps_is_refused_with_the_fix() -> None:
    with pytest.raises(
        CallableError, match=r"data\.train: the inputs of one minibatch, read twice under one seed"
    ) as it:
        data_proven(lambda: Augmented(np.random.default_rng(7).random))
    assert "numpy.random.default_rng(numpy.random.randint(2**31))" in str(it.value)


def test_a_data_set_that_is_another_one_each_time_is_refused() -> None:
    with pytest.raises(CallableError, match=r"differ when `mydata:train\(\)` has been called again"):
        data_proven(lambda: Augmented(lambda: 0.0, start=float(np.random.default_rng().random())))
