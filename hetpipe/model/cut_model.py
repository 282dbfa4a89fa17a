"""A user's model, unchanged, as a row of layers that can be cut apart and run on several stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from hetpipe.errors import CallableError
from hetpipe.model.absent import AbsentTensor
from hetpipe.model.calls import Watchers
from hetpipe.model.forward import Normalise, StageForward, Ways
from hetpipe.model.forward_log import LogCodec, LoggedCall, noted
from hetpipe.model.graph import (
    CHECKPOINTED,
    CutPoint,
    ForbiddenPlaces,
    agreeing,
    cuts_of,
    first_uses,
    forbidden_places,
    layers_from,
    reads_of,
    work_until,
)
from hetpipe.model.recording import Recorded, record
from hetpipe.model.structure import Leaf, Several, Skeleton, tensors_in
from hetpipe.model.user_errors import forward_failure, is_out_of_memory

Values = tuple[Tensor, ...]

#: Where modules look up one tensor: a module's own dictionary, and the key in it.
Places = tuple[tuple[dict[str, Tensor], str], ...]

_INPUTS = "inputs"

#: How many questions to shared values are answered both ways when a model is recorded: each is one more forward.
_MOST_QUESTIONS = 8

#: How many lines that decide are named when a minibatch is refused.
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Signature:
    """How a minibatch becomes a call of the model."""

    keys: tuple[str, ...]
    """Names of the tensors, in order; of positional ones their numbers."""
    is_mapping: bool
    """`model(**batch)`, or else `model(*inputs)`."""

    def call(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Any:
        """Call the model."""
        if self.is_mapping:
            return model(**{key: tensors[key] for key in self.keys})
        return model(*(tensors[key] for key in self.keys))


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """What stands between two neighbouring cuts."""

    name: str
    """The entry that it begins with."""
    parameters: tuple[str, ...]
    """Trainable ones that are first used here, by their names in the model."""
    frozen: tuple[str, ...]
    """First used here."""
    buffers: tuple[str, ...]
    """First used here."""
    reads: tuple[str, ...] = ()
    """Buffers and frozen parameters of other layers that a stage reads which runs this one."""


@dataclass(frozen=True, slots=True)
class ModeDescription:
    """What differs between training and evaluation; modules are named by their paths."""

    skeletons: Mapping[str, Skeleton]
    """Entry → what it returned. The order counts."""
    open_paths: frozenset[str]
    watched_paths: frozenset[str]
    """Modules whose calls are seen: open ones, and those that are called in an open one and run whole."""
    normalised: frozenset[tuple[str, int]]
    drawing_paths: frozenset[str]
    drawing_functions: frozenset[Any]
    seeded_after: Mapping[str, str]
    cuts: tuple[CutPoint, ...]
    """The chosen ones, in order."""


@dataclass(frozen=True, slots=True)
class CutDescription:
    """How a model is cut: what a stage needs beside the model itself, and what is found out by recording it once."""

    signature: Signature
    floating: tuple[str, ...]
    """Keys of the inputs that are floating; the others cross every cut."""
    layers: tuple[ModelLayer, ...]
    training: ModeDescription
    evaluation: ModeDescription
    decisions: tuple[str, ...] = ()
    """Lines of user code that ask integer inputs for a yes or no, as ` (FILE line N)`."""


@dataclass(frozen=True, slots=True)
class CutSurvey:
    """What recording a model shows beyond its description."""

    cuts: tuple[CutPoint, ...]
    """All places, forbidden ones too, as training has them."""
    whole: tuple[str, ...]
    """Why modules that are not cut inside run whole, each as a clause, in the order of the forward."""
    forbidden: tuple[ForbiddenPlaces, ...]
    """Where no layer can end, and why."""


def describe(
    model: nn.Module,
    signature: Signature,
    example: Values,
    *,
    results_of: Callable[[Any], Any],
    set_training: Callable[[bool], None],
    keep_all: bool = False,
    splits_ties: bool = True,
) -> tuple[CutDescription, CutSurvey]:
    """Run `model` twice on `example`, in training and in evaluation, to see what it does. Its buffers stay.

    Args:
        model: as the user's callable returned it.
        signature: how it is called.
        example: a minibatch.
        results_of: what the loss needs of its output.
        set_training: puts the training flags for training (True) or evaluation.
        keep_all: make every allowed cut the border of a layer, also those that are not worth it.
        splits_ties: allow cuts between the uses of one weight.

    Returns:
        The description, and what else was found.

    Raises:
        CallableError: it does not run.
    """
    floating = tuple(key for key, value in zip(signature.keys, example, strict=True) if _is_floating(value))
    specs = _specs(model)
    records: dict[bool, Recorded] = {}
    variants: dict[bool, list[Recorded]] = {}
    with _kept_buffers(model):
        for training in (False, True):
            set_training(training)
            needed = results_of if training else whole_output
            with torch.set_grad_enabled(training):
                records[training] = _recorded(model, signature, example, floating, needed)
                variants[training] = _variants(model, signature, example, floating, needed, records[training])
    set_training(True)
    every = {
        training: [cuts_of(each.recording, specs, splits_ties=splits_ties) for each in (records[training], *others)]
        for training, others in variants.items()
    }
    found = {training: agreeing(own, others) for training, (own, *others) in every.items()}
    allowed = {cut.key: cut for cut in found[False] if not cut.reason}
    common = [cut for cut in found[True] if not cut.reason and cut.key in allowed]
    chosen = tuple(common) if keep_all else layers_from(common, work_until(records[True].recording, specs))
    cuts = {True: chosen, False: tuple(allowed[cut.key] for cut in chosen)}
    borders = {cut.key for cut in chosen}
    reads = [
        frozenset[str]().union(*of_each)
        for of_each in zip(
            *(
                reads_of(each.recording, [cut for cut in own if cut.key in borders])
                for training, others in variants.items()
                for each, own in zip((records[training], *others), every[training], strict=True)
            ),
            strict=True,
        )
    ]
    description = CutDescription(
        signature,
        floating,
        _layers(model, records[True], chosen, reads),
        _mode(records[True], variants[True], chosen, len(floating)),
        _mode(records[False], variants[False], cuts[False], len(floating)),
        records[True].decisions,
    )
    frames = records[True].recording.frames
    whole = dict.fromkeys(frame.why_closed for frame in frames if frame.closed and frame.closed != CHECKPOINTED)
    places = forbidden_places(found[True], found[False], [cut.order for cut in chosen])
    return description, CutSurvey(found[True], tuple(whole), places)


def _specs(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Trainable parameter → its type and bytes."""
    trainable = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {name: (str(p.dtype).removeprefix("torch."), p.nbytes) for name, p in trainable}


def _recorded(
    model: nn.Module,
    signature: Signature,
    example: Values,
    floating: Sequence[str],
    results_of: Callable[[Any], Any],
    denied: int | None = None,
) -> Recorded:
    tensors = {key: value.detach().clone() for key, value in zip(signature.keys, example, strict=True)}
    try:
        return record(
            model,
            lambda: signature.call(model, tensors),
            {key: tensors[key] for key in floating},
            results_of,
            denied=denied,
        )
    except CallableError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CallableError(forward_failure(model, tensors, error)) from error


def whole_output(output: Any) -> Any:
    """What a loss of the job needs of a model's output: all of it."""
    return output


def _variants(
    model: nn.Module,
    signature: Signature,
    example: Values,
    floating: Sequence[str],
    results_of: Callable[[Any], Any],
    recorded: Recorded,
) -> list[Recorded]:
    """What the forward does where a question to shared values gets the other answer, a question at a time.

    Other minibatches give these answers. Those with which the model does not run are left out: no data give them.
    """
    found = []
    for question in range(min(recorded.num_questions, _MOST_QUESTIONS)):
        with suppress(CallableError):
            found.append(_recorded(model, signature, example, floating, results_of, question))
    return found


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])


@dataclass(frozen=True, slots=True)
class _Mode:
    """A description, with the modules of one instance."""

    ways: Ways
    cuts: tuple[CutPoint, ...]


class CutModel:
    """One instance of the user's model, with the places where it can be cut.

    Attributes:
        description: how it is cut.
        survey: what was found when it was recorded; no more than its layers' borders where another process did that.
        output: what the model returned in the last forward that reached its end.
        ties: the weights of other stages that the last forward ran on, by name.
    """

    def __init__(self, model: nn.Module, description: CutDescription, survey: CutSurvey | None = None) -> None:
        """Take `model`, which may have been made without memory, as `description` says."""
        self.model = model
        self.description = description
        self.signature = description.signature
        self.layers = description.layers
        self.survey = survey or CutSurvey(description.training.cuts, (), ())
        self._orders = [cut.order for cut in description.training.cuts]
        self._floating = description.floating
        self._integers = tuple(key for key in self.signature.keys if key not in self._floating)
        self.parameter_places = _places(model, "_parameters")
        self.buffer_places = _places(model, "_buffers")
        self._modes = {
            True: _Mode(_ways(model, description.training), description.training.cuts),
            False: _Mode(_ways(model, description.evaluation), description.evaluation.cuts),
        }
        self.output: Any = None
        self.ties: Mapping[str, Tensor] = {}

    # -- the boundary ------------------------------------------------------------------------------------------------

    def border(self, layer: int, *, training: bool = True) -> CutPoint | None:
        """The cut before `layer`; None at both ends of the model."""
        return self._modes[training].cuts[layer - 1] if 0 < layer < len(self.layers) else None

    def forbidden_in(self, layer: int) -> tuple[ForbiddenPlaces, ...]:
        """The places within `layer` where it cannot be cut."""
        return tuple(each for each in self.survey.forbidden if bisect_left(self._orders, each.order) == layer)

    def gradient_flags(self, layer: int) -> tuple[bool, ...]:
        """Per value that comes into `layer`: whether its gradient goes back."""
        cut = self.border(layer)
        if cut is None:
            return (False,) * len(self.signature.keys)
        return (False,) * (1 + len(self._integers)) + tuple(each.has_gradient for each in cut.crossing)

    def value_names(self, layer: int) -> tuple[str, ...]:
        """The names of the values that come into `layer`."""
        return self._names(self.border(layer))

    def _names(self, cut: CutPoint | None) -> tuple[str, ...]:
        if cut is None:
            return tuple(f"input:{key}" for key in self.signature.keys)
        return ("log", *(f"input:{key}" for key in self._integers), *(each.name for each in cut.crossing))

    # -- computing ---------------------------------------------------------------------------------------------------

    def run(
        self,
        first: int,
        last: int,
        weights: Mapping[str, Tensor],
        values: Values,
        *,
        seed: Callable[[str], None],
        normalise: Normalise,
        on_value: Callable[[str, int, Tensor], None] | None = None,
    ) -> Values:
        """Run layers [first, last).

        Training if gradients are enabled, else evaluation. Weights of the layers stand in their places already.

        Args:
            first: the first layer.
            last: the one behind the last.
            weights: trainable parameter of these layers → what stands for it.
            values: what comes into `first`, as `value_names` says.
            seed: seeds the generators by the name of what draws.
            normalise: gives values the layout that they have when they cross a cut.
            on_value: hears of every value that crosses some cut, as it is made.

        Returns:
            What comes into `last`; of the last layer the tensors of the model's output, those left aside that only
            earlier stages have and the loss does not need.
        """
        with self._decisions_named():
            training = torch.is_grad_enabled()
            mode = self._modes[training]
            start, end = self.border(first, training=training), self.border(last, training=training)
            given = self._given(start, values, normalise)
            integers = {key: given[f"input:{key}"] for key in self._integers}
            forward = StageForward(
                mode.ways,
                start,
                end,
                log=values[0] if start is not None else None,
                received=given,
                device=values[-1].device,
                seed=seed,
                normalise=normalise,
            )
            forward.on_value = on_value
            floating = forward.take_inputs(
                self._floating, {key: given[f"input:{key}"] for key in self._floating if f"input:{key}" in given}
            )
            # The model may change its inputs in place; the next stage gets them as they came.
            tensors = {**{key: value.clone() for key, value in integers.items()}, **floating}
            ties = {
                name.removeprefix("parameter:"): value for name, value in given.items() if name.startswith("parameter:")
            }
            self.ties = ties
            with self.ties_in_place(ties):
                forward.run(
                    lambda: self.signature.call(self.model, tensors), floating, [*weights.values(), *ties.values()]
                )
            if end is None:
                self.output = forward.output
                # What the loss does not need may have been left behind on earlier stages.
                return tuple(value for value in tensors_in(forward.output) if not isinstance(value, AbsentTensor))
            inputs = LoggedCall(
                _INPUTS, _inputs_skeleton(len(self._floating)), tuple(noted(floating[key]) for key in self._floating)
            )
            log = mode.ways.codec.encode([inputs, *forward.entries()])
            made = {
                **forward.values,
                **{f"input:{key}": value for key, value in floating.items()},
                **{f"parameter:{name}": value for name, value in ties.items()},
            }
            made |= {
                f"parameter:{name}": self._tie(weights[name])
                for name in (each.name.removeprefix("parameter:") for each in end.crossing if each.name not in made)
                if name in weights
            }
            return (log, *integers.values(), *(_crossing(each.name, end, made) for each in end.crossing))

    @contextmanager
    def _decisions_named(self) -> Iterator[None]:
        """Add to what is refused in this block where the forward decides by its integer inputs."""
        try:
            yield
        except CallableError as error:
            if not self.description.decisions:
                raise
            places = ",".join(self.description.decisions[:_MOST_NAMED])
            raise CallableError(f"{error}; its inputs decide about that{places}") from error

    def _given(self, start: CutPoint | None, values: Values, normalise: Normalise) -> dict[str, Tensor]:
        names = self._names(start)
        if len(names) != len(values):
            raise CallableError(
                f"model: a minibatch of {len(values)} tensors, where the one on which the model was cut has "
                f"{len(names)}: {', '.join(names)}; give every minibatch the same entries"
            )
        return {
            name: normalise(value) if value.is_floating_point() else value
            for name, value in zip(names, values, strict=True)
        }

    @staticmethod
    def _tie(weight: Tensor) -> Tensor:
        """What travels of a weight of this stage that a later one uses, too: its gradient comes back through it."""
        return weight.clone()

    @contextmanager
    def ties_in_place(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """In this block, weights of other stages, which have come, stand in every place where they are used.

        A backward needs it as well, for what recomputed regions read.
        """
        kept: list[tuple[dict[str, Tensor], str, Tensor]] = []
        try:
            for name, weight in weights.items():
                for owner, key in self.parameter_places[name]:
                    kept.append((owner, key, owner[key]))
                    owner[key] = weight
            yield
        finally:
            for owner, key, before in kept:
                owner[key] = before


def _crossing(name: str, end: CutPoint, made: Mapping[str, Tensor]) -> Tensor:
    """A value that crosses a cut: one that came or was made.

    Raises:
        CallableError: it was not made in this minibatch.
    """
    if name in made:
        return made[name]
    raise CallableError(
        f"model: {name.lstrip('/')} crosses the cut before {end.label} and is not made in this minibatch, as it was in "
        "the one on which the model was cut: it depends on the data what is made; let it train with `workers: {stages: "
        "1}`"
    )


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _inputs_skeleton(count: int) -> Several:
    return Several(tuple, (Leaf(),) * count)


def _places(model: nn.Module, attribute: str) -> dict[str, Places]:
    """The model's name of a tensor → every place where a module looks it up."""
    names = {
        id(tensor): name
        for name, tensor in (model.named_parameters() if attribute == "_parameters" else model.named_buffers())
    }
    found: dict[str, list[tuple[dict[str, Tensor], str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        table = cast("dict[str, Tensor | None]", getattr(module, attribute))
        for key, tensor in table.items():
            if tensor is not None:
                found[names[id(tensor)]].append((cast("dict[str, Tensor]", table), key))
    return {name: tuple(places) for name, places in found.items()}


def _mode(
    recorded: Recorded, variants: Sequence[Recorded], cuts: tuple[CutPoint, ...], num_floating: int
) -> ModeDescription:
    paths = {frame.position: frame.path for frame in recorded.recording.frames}
    open_paths = frozenset(paths[position] for cut in cuts for position in cut.around)
    everything = (recorded, *variants)
    inside = {
        frame.path
        for each in everything
        for frame in each.recording.frames
        if frame.parent is not None and each.recording.frames[frame.parent].path in open_paths
    }
    otherwise = {
        f"{key} in variant {number}": skeleton
        for number, each in enumerate(variants)
        for key, skeleton in each.skeletons.items()
        if recorded.skeletons.get(key) != skeleton
    }
    return ModeDescription(
        {_INPUTS: _inputs_skeleton(num_floating), **recorded.skeletons, **otherwise},
        open_paths or frozenset({""}),
        open_paths | inside | {""},
        frozenset(place for cut in cuts for each in cut.crossing for place in each.places),
        frozenset[str]().union(*(each.drawing_paths for each in everything)),
        frozenset[Any]().union(*(each.drawing_functions for each in everything)),
        recorded.seeded_after,
        cuts,
    )


def _ways(model: nn.Module, mode: ModeDescription) -> Ways:
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names.setdefault(id(module), name)
    by_name = {names[id(module)]: module for module in model.modules()}
    return Ways(
        LogCodec(mode.skeletons),
        mode.open_paths,
        mode.normalised,
        mode.drawing_paths,
        mode.drawing_functions,
        mode.seeded_after,
        Watchers((by_name[path] for path in sorted(mode.watched_paths)), names),
    )


def _layers(
    model: nn.Module, recorded: Recorded, cuts: tuple[CutPoint, ...], reads: Sequence[frozenset[str]]
) -> tuple[ModelLayer, ...]:
    uses = first_uses(recorded.recording)
    orders = [cut.order for cut in cuts]
    last = len(cuts)

    def owner(name: str) -> int:
        if name not in uses:
            return last
        return sum(order <= uses[name] for order in orders)

    parameters: list[list[str]] = [[] for _ in range(last + 1)]
    frozen: list[list[str]] = [[] for _ in range(last + 1)]
    buffers: list[list[str]] = [[] for _ in range(last + 1)]
    for name, parameter in model.named_parameters():
        (parameters if parameter.requires_grad else frozen)[owner(name)].append(name)
    for name, _ in model.named_buffers():
        buffers[owner(name)].append(name)
    first = next((step.label for step in sorted(recorded.recording.steps, key=lambda s: s.started) if step.key), "")
    labels = [first, *(cut.label for cut in cuts)]
    names: list[str] = []
    for label, cut in zip(labels, (None, *cuts), strict=True):
        name = label or "model"
        names.append(name if name not in names or cut is None else cut.key.lstrip("/"))
    return tuple(
        ModelLayer(name, tuple(p), tuple(f), tuple(b), tuple(sorted(r - set(f) - set(b))))
        for name, p, f, b, r in zip(names, parameters, frozen, buffers, reads, strict=True)
    )
