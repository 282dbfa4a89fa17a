"""Modules that do more than return values: caches, attributes, hooks, exceptions, threads, switched gradients."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetpipe.model.graph import CHANGED_INSIDE, DRAWN, HOOKED, OPAQUE, RAISES, SIDE_CHANNEL_BEHIND, SWITCHES, VARIES
from hetpipe.pipeline.proof import shares_tensors
from tests.model.harness import Subject, assert_cut_anywhere, differences

WIDTH = 6


class Three(nn.Module):
    """Three layers and a head, which subclasses call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.head(self.third(self.second(self.first(value).tanh()).tanh()).tanh())
        return result


class Inner(nn.Module):
    """A linear layer that does something with what it makes."""

    def __init__(self, note: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.note = nn.Linear(WIDTH, WIDTH), note

    def forward(self, value: Tensor) -> Any:
        made = self.linear(value).tanh()
        noted = self.note(self, made)
        return made if noted is None else noted


class Around(Three):
    """Two of them between other layers."""

    def __init__(self, note: Callable[[Any, Tensor], Any], take: Callable[[Any], Tensor] = lambda made: made) -> None:
        super().__init__()
        self.one, self.other, self.take = Inner(note), Inner(note), take

    def forward(self, value: Tensor) -> Tensor:
        value = self.take(self.one(self.first(value)))
        return super().forward(self.take(self.other(self.second(value))))


def made(rows: int = 3, seed: int = 0) -> tuple[Tensor, ...]:
    return (torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)),)


def subject_of(build: Callable[[], nn.Module], example: tuple[Tensor, ...] | None = None) -> Subject:
    """The model, which has the uncut one's bits at every cut."""
    given = made() if example is None else example
    subject = Subject(build, given, loss=lambda output: output.square().mean())
    assert not differences(subject.uncut(given), subject.watched(given))
    assert_cut_anywhere(subject, given)
    return subject


def reasons_of(subject: Subject) -> str:
    return " ".join({cut.reason for cut in subject.cut.survey.cuts})


def phrase(reason: str) -> str:
    """The longest part of a reason between its names."""
    return max(reason.split("{}"), key=len)


# -- caches and attributes -----------------------------------------------------------------------------------------


class Cached(Three):
    """Appends to a list that a call inside has made, and reads it before and after cuts."""

    def forward(self, value: Tensor) -> Tensor:
        cache: list[Tensor] = []
        self.one(value, cache)
        # No cut is behind this use; but a later stage would have to run it again, with nothing in the list.
        return super().forward(cache[0] + value)

    def __init__(self) -> None:
        super().__init__()
        self.one = Appending()


class Appending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor, cache: list[Tensor]) -> None:
        cache.append(self.linear(value).tanh())


def test_no_cut_behind_a_value_that_only_a_list_has() -> None:
    subject = subject_of(Cached)
    assert phrase(SIDE_CHANNEL_BEHIND) in reasons_of(subject)
    assert [layer.name for layer in subject.layers] == ["one", "tanh"]


def set_attribute(module: Any, value: Tensor) -> None:
    module.kept = value.square().mean()


def append(module: Any, value: Tensor) -> None:
    module.store = [*getattr(module, "store", [])[-1:], value * 2]


class AuxiliaryLoss(Around):
    """Modules leave values in their attributes, and the model adds them up at its end."""

    def __init__(self, note: Callable[[Any, Tensor], Any], read: Callable[[Any], Tensor]) -> None:
        super().__init__(note)
        self.read = read

    def forward(self, value: Tensor) -> Tensor:
        result = super().forward(value)
        return result + self.read(self.one) + self.read(self.other)


@pytest.mark.parametrize(
    ("note", "read"),
    [(set_attribute, lambda module: module.kept), (append, lambda module: module.store[-1].mean())],
)
def test_what_a_module_leaves_in_an_attribute_crosses_cuts(
    note: Callable[[Any, Tensor], Any], read: Callable[[Any], Tensor]
) -> None:
    subject = subject_of(lambda: AuxiliaryLoss(note, read))
    assert not subject.cut.survey.whole
    assert len(subject.layers) > 12
    crossing = {each.name for cut in subject.cut.survey.cuts for each in cut.crossing}
    assert any(name.startswith("/one:") for name in crossing)


class Shared(Around):
    """Two modules append what they also return to one list."""

    def __init__(self) -> None:
        super().__init__(lambda module, value: module.store.append(value))
        store: list[Tensor] = []
        self.one.store = self.other.store = self.store = store  # type: ignore[assignment]  # of modules, any attribute

    def forward(self, value: Tensor) -> Tensor:
        self.store.clear()
        result = super().forward(value)
        return result + self.store[0].mean() * self.store[1].mean()


def test_a_list_that_modules_share_is_filled_on_every_stage() -> None:
    assert len(subject_of(Shared).layers) > 10


class Closure(Around):
    """A hook keeps what a module returns, where nobody sees it."""

    def __init__(self) -> None:
        super().__init__(lambda _, value: None)
        kept: list[Tensor] = []
        self.one.linear.register_forward_hook(lambda _module, _inputs, output: kept.append(output.tanh()))
        self.read: Callable[[], Tensor] = kept.pop

    def forward(self, value: Tensor) -> Tensor:
        result = super().forward(value)
        return result + self.read().mean()


def test_what_a_hook_keeps_elsewhere_forbids_cuts() -> None:
    assert len(subject_of(Closure).layers) > 1


# -- containers ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Made:
    value: Tensor
    count: int = dataclasses.field(init=False, default=2)


class Nested:
    """Tensors in another kind of tensor."""

    @staticmethod
    def of(_: Any, value: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor([row[:3] for row in value])

    @staticmethod
    def taken(nested: Any) -> Any:
        return torch.nested.to_padded_tensor(nested, 0.0, (3, WIDTH))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("note", "take"),
    [
        (lambda _, value: Made(value), lambda result: result.value),
        (lambda _, value: collections.defaultdict(list, value=value), lambda mapping: mapping["value"]),
        (lambda _, value: iter([value]), next),
        (Nested.of, Nested.taken),
    ],
)
def test_no_cut_where_a_result_cannot_be_rebuilt(
    note: Callable[[Any, Tensor], Any], take: Callable[[Any], Any]
) -> None:
    subject = subject_of(lambda: Around(note, take))
    assert phrase(OPAQUE) in reasons_of(subject)
    assert len(subject.layers) > 1


# -- exceptions, hooks, threads ------------------------------------------------------------------------------------


class Catching(Three):
    """Has an exception handler around everything, which also catches what ends the forward of a stage."""

    def forward(self, value: Tensor) -> Tensor:
        try:
            return super().forward(value)
        except BaseException:  # noqa: BLE001 - as users write it
            return self.second(value)  # type: ignore[no-any-return]


def test_a_forward_that_catches_everything_is_cut() -> None:
    assert len(subject_of(Catching).layers) == len(subject_of(Three).layers) > 5


class Trying(Three):
    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value).tanh()
        try:
            value = self.second(value, 1)
        except TypeError:
            value = self.second(value)
        result: Tensor = self.head(self.third(value).tanh())
        return result


def test_no_cut_behind_a_call_whose_exception_is_caught() -> None:
    subject = subject_of(Trying)
    assert phrase(RAISES) in reasons_of(subject)
    assert [layer.name for layer in subject.layers] == ["first", "tanh"]


class Hooked(Three):
    def __init__(self) -> None:
        super().__init__()
        self.second.register_full_backward_hook(lambda _module, gradients, _outputs: (gradients[0] * 0.5,))


def test_no_cut_behind_a_module_with_a_hook_on_its_gradient() -> None:
    subject = subject_of(Hooked)
    assert phrase(HOOKED) in reasons_of(subject)
    assert len(subject.layers) > 1


class Threaded(Three):
    def forward(self, value: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            value = pool.submit(self.first, value).result()
        result: Tensor = self.head(self.second(value).tanh())
        return result


class Inference(Three):
    def forward(self, value: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = self.first(value).mean() + 2
        return super().forward(value * scale.clone())


def test_threads_and_tensors_of_the_inference_mode_are_taken() -> None:
    assert len(subject_of(Threaded).layers) == 1
    assert len(subject_of(Inference).layers) > 5


# -- weights, random numbers, gradients ----------------------------------------------------------------------------


class Adversarial(Three):
    """Switches the gradients of its critic off for a while."""

    def forward(self, value: Tensor) -> Tensor:
        fake = self.first(value).tanh()
        critic = self.second(fake.detach()).mean()
        self.second.requires_grad_(requires_grad=False)
        fooled = self.second(fake).mean()
        self.second.requires_grad_(requires_grad=True)
        result: Tensor = self.head(self.third(fake)) + critic - fooled
        return result


def test_no_cut_around_a_switch_of_gradients() -> None:
    subject = subject_of(Adversarial)
    assert phrase(SWITCHES) in reasons_of(subject)
    assert len(subject.layers) > 1


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        ids += 1
        result: Tensor = self.embedding(ids)
        return result


class Counted(Three):
    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.counting(ids)) * (ids[:, None] + 1)


def test_no_cut_behind_a_module_that_changes_an_input_of_others() -> None:
    subject = subject_of(Counted, (torch.arange(4),))
    assert phrase(CHANGED_INSIDE) in reasons_of(subject)


class Decoder(Three):
    """Changes an input of the forward around it before its layers, and within them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        ids.masked_fill_(ids == 2, 7)
        value = self.second(self.first(self.embedding(ids * 1)).tanh())
        ids += 1
        result: Tensor = self.head(self.third(value + ids[:, None]).tanh())
        return result


class Decoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.last = Decoder(), nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.last(self.decoder(ids)) * (ids[:, None] * 1)
        return result


def test_cuts_inside_a_module_that_changes_an_input_of_others() -> None:
    """Every stage that runs the forward of such a module changes its own copy; one behind it would not."""
    subject = subject_of(Decoded, (torch.arange(4),))
    names = [layer.name for layer in subject.layers]
    assert {"decoder.first", "decoder.second", "decoder.third"} <= set(names)
    assert phrase(CHANGED_INSIDE) in reasons_of(subject)
    assert "last" not in names


class Skipping(nn.Module):
    """LayerDrop, by a number."""

    def __init__(self, number: Callable[[], float]) -> None:
        super().__init__()
        self.entry, self.head, self.number = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), number
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, value: Tensor) -> Tensor:
        value = self.entry(value).tanh()
        for layer in self.layers:
            if self.training and self.number() < 0.5:
                continue
            value = value + layer(value).tanh()
        result: Tensor = self.head(value)
        return result


@pytest.mark.parametrize(
    ("number", "names", "why"),
    [
        (lambda: torch.rand(1).item(), ["entry", "tanh", *(f"layers.{index}" for index in range(3))], VARIES),
        (lambda: torch.randint(9, (1,)).item() / 9, ["entry"], DRAWN),
        (lambda: torch.rand(2).tolist()[0], ["entry"], DRAWN),
    ],
)
def test_numbers_that_are_drawn_decide_like_tensors(number: Callable[[], float], names: list[str], why: str) -> None:
    subject = subject_of(lambda: Skipping(number))
    assert [layer.name for layer in subject.layers] == names
    assert phrase(why) in reasons_of(subject)


class Requiring(nn.Module):
    """Makes a value require a gradient, as Wav2Vec2 does for checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value = value[:, None]
        if self.training:
            value.requires_grad = True
        result: Tensor = self.second(self.first(value).tanh())
        return result


def test_a_value_that_is_made_to_require_a_gradient_crosses_cuts() -> None:
    made = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)),)
    subject = Subject(Requiring, made, loss=lambda output: output.square().mean())
    assert assert_cut_anywhere(subject, made) >= 3


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one * 1 + other * 0

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None


class Partly(Three):
    def forward(self, value: Tensor) -> Tensor:
        one = self.first(value).tanh()
        two = self.second(value).t().contiguous().t()
        return super().forward(NoGradient.apply(one, two))  # type: ignore[no-untyped-call]


def test_a_value_without_gradient_stays_without() -> None:
    subject = subject_of(Partly)
    assert len(subject.layers) > 6


def test_two_models_may_share_modules_without_tensors() -> None:
    function = nn.ReLU()
    one, other = (nn.Sequential(nn.Linear(2, 2), function) for _ in range(2))
    assert not shares_tensors(one, other.modules())
    assert shares_tensors(one, nn.Sequential(one[0]).modules())
