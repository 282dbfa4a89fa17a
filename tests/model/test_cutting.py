"""A model cut anywhere computes the bits of the uncut one: random modules, and what users do to real ones."""

from __future__ import annotations

import json
import random
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetpipe.errors import CallableError
from hetpipe.model.calls import CustomFunction
from hetpipe.model.description import from_plain, to_plain
from hetpipe.model.graph import ALIASED, CHECKPOINTED, DECIDES, SIZED, VARIES
from tests.model import zoo
from tests.model.harness import Subject, assert_cut_anywhere, differences

WIDTH = 6


class Block(nn.Module):
    """A module with glue of its own that returns several things."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> dict[str, Any]:
        inner = self.inner(self.norm(hidden))
        if scale is not None:
            inner = inner * scale
        return {"hidden": hidden + inner, "extra": (inner.mean(), None, [inner.detach()]), "size": inner.shape[0]}


class Deciding(nn.Module):
    """Asks for a number that depends on weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        inner: Tensor = self.linear(other)
        halved = inner * 0.5
        return halved if float(one.detach().mean()) > 0 else inner.tanh() + one


class Program(nn.Module):
    """A forward of random steps over everything that it has made so far."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        self.steps = [random.Random(seed + step).randrange(1 << 30) for step in range(length)]
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.deciding = Deciding()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.relu = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("offset", torch.linspace(-1.0, 1.0, WIDTH))
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:  # noqa: C901 - a case per kind
        keep = (mask > 0).unsqueeze(-1)
        made = [self.embedding(ids) * keep]
        for step in self.steps:
            draw = random.Random(step)
            one, other = draw.choice(made), made[-1]
            kind = draw.randrange(11)
            if kind == 0:
                made.append(self.linears[draw.randrange(3)](one) + other)
            elif kind == 1:
                found = draw.choice(list(self.blocks))(one, other.sigmoid() if draw.random() < 0.5 else None)
                made.append(found["hidden"] * found["size"] + found["extra"][0] + found["extra"][2][0])
            elif kind == 2:
                made.append(self.norm(other.transpose(1, 2)).transpose(1, 2))
            elif kind == 3:
                made.append(self.drop(one))
            elif kind == 4:
                made.append(self.relu(self.linears[0](one)))
            elif kind == 5:
                fresh = one * self.scale
                fresh += other
                made.append(fresh)
            elif kind == 6:
                made.append(one.masked_fill(~keep, 0.0) + self.offset)
            elif kind == 7:
                first, second = torch.cat([one, other], -1).chunk(2, dim=-1)
                made.append(first - second)
            elif kind == 8:  # decided by shared values, and by what depends on weights
                made.append(one * 2 if bool(mask.all()) else one + 1)
                made.append(self.deciding(one, other))
            elif kind == 9:
                filled = torch.zeros_like(other)
                filled[:, :2] = one[:, :2]
                made.append(filled + other)
            else:
                made.append(nn.functional.dropout(other, 0.2, self.training))
        logits = self.head(sum(made[-3:], made[0]))
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def batch(rows: int = 2, length: int = 5, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length - 1 - seed % 2 :] = seed % 2
    return {"ids": ids, "mask": mask, "labels": ids.roll(1)}


@settings(max_examples=4)
@given(st.integers(0, 10_000), st.integers(1, 8))
def test_random_modules_have_the_uncut_models_bits_at_every_cut(seed: int, length: int) -> None:
    subject = Subject(lambda: Program(seed, length), batch())
    assert not differences(subject.uncut(batch()), subject.watched(batch()))
    assert_cut_anywhere(subject, batch(), at_most=12)
    # Another length, other rows and another answer of mask.all(), on the same cuts.
    assert_cut_anywhere(subject, batch(3, 7, seed=1), at_most=6)


def test_a_u_net_is_cut_at_every_call() -> None:
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    subject = Subject(zoo.u_net, (image,), loss=lambda output: output.square().mean())
    assert not differences(subject.uncut((image,)), subject.watched((image,)))
    assert assert_cut_anywhere(subject, (image,)) > 20


def sentences(length: int = zoo.TOKENS) -> dict[str, Tensor]:
    rows = [zoo.tokens()[index] for index in range(3)]
    return {key: torch.stack([row[key] for row in rows])[:, :length].contiguous() for key in rows[0]}


def test_gpt2_of_other_lengths_is_cut_as_of_the_first_one() -> None:
    subject = Subject(zoo.gpt2, sentences())
    assert not differences(subject.uncut(sentences()), subject.watched(sentences()))
    for length in (3, 7):
        assert_cut_anywhere(subject, sentences(length), at_most=2)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_as_hugging_face_switches_it_on(*, use_reentrant: bool) -> None:
    def build() -> nn.Module:
        model: Any = zoo.gpt2()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model  # type: ignore[no-any-return]

    subject = Subject(build, sentences())
    assert any(cut.reason == CHECKPOINTED for cut in subject.cut.survey.cuts)
    assert assert_cut_anywhere(subject, sentences(), at_most=8) > 5
    assert any("h.1" in layer.name for layer in subject.layers), "a cut between two blocks"


class Recomputing(nn.Module):
    """Checkpoints its blocks by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3)]
        )

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            recomputed: Tensor = checkpoint(block, value, use_reentrant=False)
            value = value + recomputed
        return value


def test_a_recomputed_region_draws_the_same_numbers_again() -> None:
    value = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    recomputed = Subject(Recomputing, (value,), loss=lambda output: output.square().mean())
    assert assert_cut_anywhere(recomputed, (value,)) >= 2

    class Plain(Recomputing):
        def forward(self, value: Tensor) -> Tensor:
            for block in self.blocks:
                value = value + block(value)
            return value

    # The seeds have other names, so the draws differ; without them the two are one computation.
    plain = Subject(Plain, (value,), loss=lambda output: output.square().mean())
    assert not differences(recomputed.watched((value,)), plain.watched((value,)))


class Aliasing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value) * 1
        part = value[:, :2]
        bias = self.second(value * 2)
        value += 1
        result: Tensor = bias + value.sum() + part.sum()
        return result


def test_no_cut_between_two_values_that_share_memory_which_is_changed() -> None:
    value = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    subject = Subject(Aliasing, (value,), loss=lambda output: output.square().mean())
    reasons = {cut.label: cut.reason for cut in subject.cut.survey.cuts}
    assert reasons["second"].endswith(ALIASED.rpartition("{}")[2])
    assert_cut_anywhere(subject, (value,))


def test_a_module_that_decides_by_what_depends_on_weights_runs_whole() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.deciding, self.last = nn.Linear(WIDTH, WIDTH), Deciding(), nn.Linear(WIDTH, WIDTH)

        def forward(self, value: Tensor) -> Tensor:
            value = self.first(value)
            result: Tensor = self.last(self.deciding(value, value))
            return result

    value = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    subject = Subject(Outer, (value,), loss=lambda output: output.square().mean())
    assert {cut.label for cut in subject.cut.survey.cuts if cut.reason.startswith(DECIDES.format("deciding"))} >= {
        "mean"
    }
    assert [layer.name for layer in subject.layers][-2:] == ["deciding", "last"]
    for sign in (1.0, -1.0, 3.0, -3.0):
        assert_cut_anywhere(subject, (sign * value,))


class Choosing(nn.Module):
    """Uses one of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.plus, self.minus = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.plus(value) if float(value.detach().mean()) > 0 else self.minus(value)
        return result


def test_a_parameter_that_the_example_does_not_use_is_in_the_layer_that_calls_its_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.choosing, self.last = nn.Linear(WIDTH, WIDTH), Choosing(), nn.Linear(WIDTH, WIDTH)
            self.unused = nn.Linear(WIDTH, WIDTH)

        def forward(self, value: Tensor) -> Tensor:
            result: Tensor = self.last(self.choosing(self.first(value).tanh() + value.sign()))
            return result

    value = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).abs()
    subject = Subject(Outer, (value,), loss=lambda output: output.square().mean())
    owners = {name: layer.name for layer in subject.layers for name in layer.parameters.values()}
    assert owners["choosing.minus.weight"] == owners["choosing.plus.weight"] == "choosing"
    assert owners["unused.weight"] == "last"
    for made in (value, -value):
        assert not differences(subject.uncut((made,)), subject.watched((made,)))
        assert assert_cut_anywhere(subject, (made,)) >= 4
    unused = subject.stages((), (value,)).gradients["choosing.minus.weight"]
    assert unused is None
    assert subject.stages((), (-value,)).gradients["choosing.minus.weight"] is not None


class Experts(nn.Module):
    """A mixture that skips the experts without tokens, which only sizes tell."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.adds = adds
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, value: Tensor) -> Tensor:
        chosen = self.gate(value).argmax(-1)
        mixed = torch.zeros_like(value)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == index)
            if (rows.numel() if self.adds else len(value[chosen == index])) == 0:
                continue
            if self.adds:
                mixed.index_add_(0, rows, expert(value[rows]))
            else:
                mixed[rows] = expert(value[rows])
        return mixed


@pytest.mark.parametrize("adds", [True, False])
def test_a_module_whose_path_depends_on_sizes_that_depend_on_weights_runs_whole(*, adds: bool) -> None:
    def build() -> nn.Module:
        return Mixed(Experts(adds=adds))

    generator = torch.Generator().manual_seed(0)
    subject = Subject(build, (torch.randn(2, WIDTH, generator=generator),), loss=lambda output: output.square().mean())
    (why,) = subject.cut.survey.whole
    assert why.startswith(SIZED.format("experts"))
    assert [layer.name for layer in subject.layers] == ["first", "tanh", "experts", "add", "last"]
    for _ in range(4):
        made = (3 * torch.randn(2, WIDTH, generator=generator),)
        assert not differences(subject.uncut(made), subject.watched(made))
        assert_cut_anywhere(subject, made)


class Mixed(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(WIDTH, WIDTH), experts, nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value).tanh()
        result: Tensor = self.last(value + self.experts(value))
        return result


class Selecting(Experts):
    """Computes with some rows only, whatever their number."""

    def forward(self, value: Tensor) -> Tensor:
        chosen = self.gate(value).sum(-1) > 0
        value = value.clone()
        value[chosen] = self.experts[0](value[chosen]).sin()
        return value


def test_sizes_that_nobody_reads_forbid_no_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(4, WIDTH, generator=generator),)
    subject = Subject(lambda: Mixed(Selecting(adds=True)), made, loss=lambda output: output.square().mean())
    assert not subject.cut.survey.whole
    for _ in range(3):
        assert assert_cut_anywhere(subject, (torch.randn(4, WIDTH, generator=generator),)) > 6


class Skipping(nn.Module):
    """LayerDrop."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.entry, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(10)])

    def forward(self, value: Tensor) -> Tensor:
        value = self.entry(value).tanh()
        for layer in self.layers:
            if self.training and torch.rand([]) < self.share:
                continue
            value = value + layer(value).tanh()
        result: Tensor = self.head(value)
        return result


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_layers_that_are_skipped_at_random_are_cut_before_their_draws(share: float) -> None:
    made = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)),)
    subject = Subject(lambda: Skipping(share), made, loss=lambda output: output.square().mean())
    assert not differences(subject.uncut(made), subject.watched(made))
    names = [layer.name for layer in subject.layers]
    layers = [f"layers.{index}" for index in range(10)]
    assert (len(names) == 3 + 3 * 10) if share == 0.0 else (names == ["entry", "tanh", *layers])
    for seed in range(3):
        with patch("tests.model.harness.SEED", seed):
            assert_cut_anywhere(subject, made, at_most=4)


class SkippingTwice(nn.Module):
    """LayerDrop in two towers, of which the second reads the first at each layer, and which returns all it has made."""

    def __init__(self, *, returns_all: bool) -> None:
        super().__init__()
        self.entry, self.other, self.returns_all = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), returns_all
        self.first, self.second = (nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)]) for _ in range(2))

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:
        value = self.entry(value)
        kept = self.other(value)
        made: tuple[Tensor, ...] = ()
        for layer in self.first:
            draw = torch.rand([])
            if not (self.training and draw < 0.5):
                value = layer(value).relu_()
            made = (*made, value)
        for layer in self.second:
            if not (self.training and torch.rand(1).item() < 0.5):
                kept = layer(kept + value).tanh()
        return (kept, *made) if self.returns_all else (kept,)


@pytest.mark.parametrize("returns_all", [True, False])
def test_layers_that_are_skipped_in_two_towers(*, returns_all: bool) -> None:
    made = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)),)
    subject = Subject(
        lambda: SkippingTwice(returns_all=returns_all),
        made,
        loss=lambda output: torch.stack([each.square().mean() for each in output]).sum(),
    )
    names = [layer.name for layer in subject.layers]
    first = [f"first.{index}" for index in range(4)]
    assert names == ["entry", "other", *(first[:2] if returns_all else [*first, "add", "add@1", "add@2"])]
    for seed in range(4):
        with patch("tests.model.harness.SEED", seed):
            assert_cut_anywhere(subject, made)


class Collecting(nn.Module):
    """LayerDrop that returns what every layer that ran has made, and reads Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, value: Tensor) -> dict[str, Any]:
        made: tuple[Tensor, ...] = ()
        for layer in self.layers:
            if random.random() < 0.5:
                value = layer(value).tanh()
                made = (*made, value)
        return {"last": value * 1.0, "all": made}


class Collected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), Collecting(), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.last(self.inner(self.first(value))["last"])
        return result


def test_a_structure_that_was_not_recorded_crosses_cuts() -> None:
    made = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)),)
    subject = Subject(Collected, made, loss=lambda output: output.square().mean())
    for seed in range(6):
        with patch("tests.model.harness.SEED", seed):
            assert assert_cut_anywhere(subject, made) >= 2


class Variational(nn.Module):
    """Draws from a distribution, which validates its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale, self.decoder = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        drawn = torch.distributions.Normal(self.mean(value), self.scale(value).exp(), validate_args=True).rsample()
        result: Tensor = self.decoder(drawn)
        return result


def test_the_validation_of_a_distribution_forbids_no_cut() -> None:
    made = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)),)
    subject = Subject(Variational, made, loss=lambda output: output.square().mean())
    assert not differences(subject.uncut(made), subject.watched(made))
    assert assert_cut_anywhere(subject, made) > 6


class Rejecting(nn.Module):
    """Raises where values are not finite, in several ways of writing it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, value: Tensor, scale: float | None = None) -> Tensor:
        value = self.first(value)
        if scale is None and (torch.isnan(value).any() or torch.isinf(value).any()):
            where = torch.isnan(value).nonzero()
            raise ValueError(f"not a number at {where}")
        value = self.second(value)
        torch._assert(value.dim() == 2, "no rows")  # type: ignore[no-untyped-call]
        assert value.abs().max().item() < LARGE, "too large"
        torch._assert((value < LARGE).all(), "too large")  # type: ignore[no-untyped-call]  # torchvision does
        if not value.isfinite().all():
            raise ValueError("not finite")
        if float(value.detach().sum()) > LARGE:
            raise ValueError("too large")
        result: Tensor = self.third(value)
        return result


LARGE = 1e6


def test_conditions_that_only_raise_forbid_no_cut() -> None:
    made = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)),)
    subject = Subject(Rejecting, made, loss=lambda output: output.square().mean())
    assert not differences(subject.uncut(made), subject.watched(made))
    assert assert_cut_anywhere(subject, made) > 9


class Handling(nn.Module):
    """Raises where it takes another path, and returns where the next condition would raise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        try:
            if value.sum() > 0:
                raise ValueError("positive")  # noqa: TRY301 - what is tested
            value = self.second(value)
        except ValueError:
            value = self.third(value)
        result: Tensor = value
        if value.sum() > 0:
            if value.dim() == 2:
                return self.second(result)  # type: ignore[no-any-return]
            raise ValueError("no rows")
        return result


def test_conditions_whose_error_is_handled_choose_a_path() -> None:
    made = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    subject = Subject(Handling, (made,), loss=lambda output: output.square().mean())
    for factor in (1, -1, 20, -20):
        batch = (factor * made,)
        assert not differences(subject.uncut(batch), subject.watched(batch))
        assert_cut_anywhere(subject, batch)
    first = cast("nn.Linear", subject.bare.get_submodule("first"))
    assert {bool(first(factor * made).sum() > 0) for factor in (20, -20)} == {True, False}
    assert len(subject.layers) == 1, [layer.name for layer in subject.layers]


class Scaled(torch.autograd.Function):
    """A gradient of its own, and several functions inside."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(value, scale)
        return (value * scale).sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        value, scale = ctx.saved_tensors
        changed = gradient * (value * scale).cos()
        return changed * scale, (changed * value).sum(0)


class Noisy(Scaled):
    """Draws as well."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: Tensor) -> Tensor:
        return Scaled.forward(ctx, value, scale) + torch.rand_like(value)


#: As users keep it.
scaled: Any = Scaled.apply
noisy: Any = Noisy.apply


class Customised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        value = scaled(self.first(value), self.scale).tanh()
        value = value + checkpoint(scaled, value, self.scale, use_reentrant=False)
        result: Tensor = self.last(noisy(value, self.scale))
        return result


def test_a_function_with_a_backward_of_its_own_is_one_call() -> None:
    value = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    subject = Subject(Customised, (value,), loss=lambda output: output.square().mean())
    labels = [cut.label for cut in subject.cut.survey.cuts]
    assert labels == ["Scaled", "tanh", "Scaled", "add", "Noisy", "last"]
    assert subject.cut.description.training.drawing_functions == {CustomFunction(Noisy)}
    assert not differences(subject.uncut((value,)), subject.watched((value,)))
    assert assert_cut_anywhere(subject, (value,)) >= 4
    description = from_plain(json.loads(json.dumps(to_plain(subject.cut.description))))
    assert description == subject.cut.description


class TiedRegions(nn.Module):
    """One weight, used inside and outside of recomputed regions: a module's call, and functions of its forward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value = self.tied(self.first(value)).tanh()
        value = value + checkpoint(self.tied, value, use_reentrant=self.use_reentrant)
        value = self.first(value)
        value = checkpoint(
            lambda inner: (self.tied(inner).tanh() @ self.tied.weight).sin(), value, use_reentrant=self.use_reentrant
        )
        result: Tensor = self.tied(value) + self.first.bias
        return result


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in evaluation
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_tied_weight_is_recomputed_with_what_came(*, use_reentrant: bool) -> None:
    value = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    subject = Subject(
        lambda: TiedRegions(use_reentrant=use_reentrant), (value,), loss=lambda output: output.square().mean()
    )
    assert assert_cut_anywhere(subject, (value,)) >= (1 if use_reentrant else 4)
    inside = {cut.label: cut.reason for cut in subject.cut.survey.cuts if cut.label in {"matmul", "sin"}}
    assert set(inside.values()) == {CHECKPOINTED}


class Paired(nn.Module):
    """A module with many parameters, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.LSTM(WIDTH, WIDTH, num_layers=3)
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.shared(self.between(self.shared(value)[0]))[0]
        return result


def test_tied_weights_cross_in_the_models_order_in_every_process() -> None:
    value = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    subject = Subject(Paired, (value,), loss=lambda output: output.square().mean())
    expected = [f"parameter:{name}" for name, _ in subject.cut.model.named_parameters() if name.startswith("shared")]
    borders = [subject.cut.value_names(layer) for layer in range(1, len(subject.layers))]
    crossing = [names for names in ([n for n in each if n.startswith("parameter:")] for each in borders) if names]
    assert crossing
    assert all(names == expected for names in crossing)
    assert_cut_anywhere(subject, (value,))


class Masking(nn.Module):
    """Does without its mask where that masks nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, value: Tensor, mask: Tensor) -> Tensor:
        value = self.first(value)
        if not bool(mask.all()):
            value = (value * mask.unsqueeze(-1)).relu()
        result: Tensor = self.third(self.second(value))
        return result


@pytest.mark.parametrize("has_padding", [False, True])
def test_no_cut_where_a_mask_without_padding_takes_another_way(*, has_padding: bool) -> None:
    value = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    padded = (value, torch.tensor([1, 1, 0, 1]))
    whole = (value, torch.ones(4, dtype=torch.long))
    recorded = padded if has_padding else whole
    subject = Subject(Masking, recorded, loss=lambda output: output.square().mean())
    assert [layer.name for layer in subject.layers] == ["first", "third"]
    assert {cut.label for cut in subject.cut.survey.cuts if cut.reason == VARIES} >= {"second"}
    for made in (padded, whole):
        assert_cut_anywhere(subject, made)


class Wavering(nn.Module):
    """Uses another value in every second minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        kept = self.first(value)
        self.calls += 1
        result: Tensor = self.second(kept.tanh())
        return result + kept if self.calls > 2 else result


def test_a_model_that_needs_other_values_later_is_told_so() -> None:
    value = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    subject = Subject(Wavering, (value,), loss=lambda output: output.square().mean())
    last = len(subject.layers) - 1
    with pytest.raises(CallableError, match=r"takes a different path|is used here"):
        subject.stages((last,), (value,))
