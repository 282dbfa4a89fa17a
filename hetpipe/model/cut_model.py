"""A user's unmodified model as a sequence of layers that can run on several stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from hetpipe.errors import CallableError
from hetpipe.model.absent import AbsentTensor
from hetpipe.model.calls import Watchers
from hetpipe.model.forward import ModeContext, Normalise, StageForward
from hetpipe.model.forward_log import LogCodec, LoggedCall, noted
from hetpipe.model.graph import (
    CHECKPOINTED,
    CutPoint,
    ForbiddenPlaces,
    agreeing,
    aligned,
    buffers_kept_together,
    cuts_of,
    first_layers,
    forbidden_places,
    last_layers,
    layers_from,
    reads_of,
    weights_kept_together,
    work_until,
)
from hetpipe.model.packed import unpack
from hetpipe.model.recording import Recorded, record
from hetpipe.model.structure import Attributes, Leaf, Several, Skeleton, tensors_in
from hetpipe.model.user_errors import forward_failure, is_out_of_memory
from hetpipe.values.profile import TIE

Values = tuple[Tensor, ...]

#: All entries through which modules look up one tensor: a module's own dictionary and the key in it.
Places = tuple[tuple[dict[str, Tensor], str], ...]

_INPUTS = "inputs"

#: Limit on the boolean queries of shared values that a recording answers both ways; each costs one more forward.
_MOST_QUESTIONS = 8

#: Limit on the deciding lines that an error lists when a minibatch is rejected.
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Signature:
    """The call of the model with a minibatch."""

    keys: tuple[str, ...]
    """Names of the tensors, in order; for positional ones their indices as text."""
    is_mapping: bool
    """True: `model(**batch)`; False: `model(*inputs)`."""

    def call(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Any:
        """Call the model with one minibatch, whose packed entries are unpacked."""
        if self.is_mapping:
            return model(**{key: unpack(tensors[key]) for key in self.keys})
        return model(*(tensors[key] for key in self.keys))


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """The part of the model between two neighbouring cuts."""

    name: str
    """Its first entry."""
    parameters: tuple[str, ...]
    """Trainable parameters whose first use is in this layer, by their names in the model."""
    frozen: tuple[str, ...]
    """Frozen parameters whose first use is in this layer."""
    buffers: tuple[str, ...]
    """Buffers whose first use is in this layer."""
    reads: tuple[str, ...] = ()
    """Buffers and frozen parameters of other layers that a stage with this layer reads."""
    modules: tuple[str, ...] = ()
    """Paths of the modules whose last call ends in this layer; the model itself is in the last one."""


@dataclass(frozen=True, slots=True)
class ModeDescription:
    """The parts of a description that differ between training and evaluation; modules are named by their paths."""

    skeletons: Mapping[str, Skeleton]
    """Entry → structure of its result. The order is significant."""
    open_paths: frozenset[str]
    watched_paths: frozenset[str]
    """Modules whose calls are intercepted: open ones, and those called directly in an open one and run whole."""
    normalised: frozenset[tuple[str, int]]
    drawing_paths: frozenset[str]
    drawing_functions: frozenset[Any]
    seeded_after: Mapping[str, str]
    left: Mapping[str, Attributes]
    """Entry → attributes of modules in which its call leaves values."""
    cuts: tuple[CutPoint, ...]
    """The chosen cuts, in order."""


@dataclass(frozen=True, slots=True)
class CutDescription:
    """The cut of a model: everything a stage needs beside the model itself. The result of one recording."""

    signature: Signature
    floating: tuple[str, ...]
    """Keys of the floating-point inputs; all other inputs cross every cut."""
    layers: tuple[ModelLayer, ...]
    training: ModeDescription
    evaluation: ModeDescription
    decisions: tuple[str, ...] = ()
    """Lines of user code that branch on integer inputs, as ` (FILE line N)`."""
    rewritten: tuple[str, ...] = ()
    """Buffers and frozen parameters that the forward writes. They depend on weights, and one layer uses each."""
    assigned: tuple[str, ...] = ()
    """Those of them in whose place it puts another tensor."""


@dataclass(frozen=True, slots=True)
class CutSurvey:
    """Findings of a recording beyond the description."""

    cuts: tuple[CutPoint, ...]
    """All candidate cuts of the training forward, including forbidden ones."""
    whole: tuple[str, ...]
    """Why modules without a cut inside run whole, one clause each, in the order of the forward."""
    forbidden: tuple[ForbiddenPlaces, ...]
    """The places where no layer can end, with reasons."""


def describe(
    model: nn.Module,
    signature: Signature,
    example: Values,
    *,
    results_of: Callable[[Any], Any],
    set_training: Callable[[bool], None],
    preserved: Callable[[], AbstractContextManager[object]],
    keep_all: bool = False,
    splits_ties: bool = True,
) -> tuple[CutDescription, CutSurvey]:
    """Record `model` on `example`, once in training and once in evaluation mode. Its buffers are restored.

    Args:
        model: the model as returned by the user's callable.
        signature: how to call it.
        example: a minibatch.
        results_of: selects the part of its output that the loss needs.
        set_training: sets the training flags for training (True) or evaluation.
        preserved: restores the states of all generators after a block, so that every recording draws the same.
        keep_all: end a layer at every allowed cut, including those not worth their traffic.
        splits_ties: allow cuts between the uses of one weight.

    Returns:
        The description, and the further findings.

    Raises:
        CallableError: the model fails on `example`.
    """
    floating = tuple(key for key, value in zip(signature.keys, example, strict=True) if _is_floating(value))
    specs = _specs(model)

    def recordings(rewritten: frozenset[str], assigned: frozenset[str], *, training: bool) -> _Recordings:
        def recorded(denied: AbstractSet[int]) -> Recorded:
            set_training(training)
            with torch.set_grad_enabled(training), kept_buffers(model), preserved():
                results = results_of if training else whole_output
                return _recorded(model, signature, example, floating, results, denied, rewritten, assigned)

        return _variants(recorded)

    training, evaluation, rewritten, assigned = _until_all_writes_are_known(recordings)
    set_training(True)
    each = (*training.each, *evaluation.each)
    cuts = _cuts_of_each(training, evaluation, specs, rewritten, splits_ties=splits_ties)
    found = training.agreeing(cuts[: len(training.each)])
    found_in_evaluation = evaluation.agreeing(cuts[len(training.each) :])

    allowed = {cut.key: cut for cut in found_in_evaluation if not cut.reason}
    common = [cut for cut in found if not cut.reason and cut.key in allowed]
    chosen = tuple(common) if keep_all else layers_from(common, work_until(training.main.recording, specs))
    borders = {cut.key for cut in chosen}
    layered = [(one.recording, [cut for cut in own if cut.key in borders]) for one, own in zip(each, cuts, strict=True)]
    uses = [first_layers(recording, own) for recording, own in layered]
    reads = [
        frozenset[str]().union(*of_each)
        for of_each in zip(*(reads_of(recording, own) for recording, own in layered), strict=True)
    ]
    description = CutDescription(
        signature,
        floating,
        _layers(model, uses, reads, chosen, training.main, rewritten),
        _mode(training, chosen, len(floating)),
        _mode(evaluation, tuple(allowed[cut.key] for cut in chosen), len(floating)),
        training.main.decisions,
        tuple(sorted(rewritten)),
        tuple(sorted(assigned)),
    )
    closed = (frame for frame in training.main.recording.frames if frame.closed and frame.closed != CHECKPOINTED)
    whole = tuple(dict.fromkeys(frame.why_closed for frame in closed))
    return description, CutSurvey(found, whole, forbidden_places(found, found_in_evaluation, [c.order for c in chosen]))


@dataclass(frozen=True, slots=True)
class _Recordings:
    """The recordings of the forward in one mode, training or evaluation."""

    main: Recorded
    """The one by which the model is cut."""
    variants: tuple[Recorded, ...]
    """With other answers to boolean queries of shared values."""
    always: frozenset[str]
    """The entries that every minibatch has, whatever it skips."""

    @property
    def each(self) -> tuple[Recorded, ...]:
        """All of them, the main one first."""
        return (self.main, *self.variants)

    def agreeing(self, cuts: Sequence[Sequence[CutPoint]]) -> tuple[CutPoint, ...]:
        """The cuts of the main one, with those forbidden in which the others differ; `cuts` are those of each."""
        own, *others = cuts
        entries = (one.recording.entries for one in self.variants)
        return agreeing(own, list(zip(others, entries, strict=True)), self.always)


class _Record(Protocol):
    """Records one mode, given the buffers and frozen parameters that a forward writes and assigns, as far as known."""

    def __call__(self, rewritten: frozenset[str], assigned: frozenset[str], /, *, training: bool) -> _Recordings: ...


def _until_all_writes_are_known(record: _Record) -> tuple[_Recordings, _Recordings, frozenset[str], frozenset[str]]:
    """Record both modes until no forward writes a buffer that was not known to be written when it was recorded.

    Returns:
        Those of training and of evaluation, and the buffers and frozen parameters that any of them writes, and in
        whose place one puts another tensor.
    """
    rewritten, assigned = frozenset[str](), frozenset[str]()
    while True:
        evaluation = record(rewritten, assigned, training=False)
        training = record(rewritten, assigned, training=True)
        each = (*training.each, *evaluation.each)
        written = rewritten.union(*(one.rewritten for one in each))
        assigned = assigned.union(*(one.assigned for one in each))
        if written == rewritten:
            return training, evaluation, rewritten, assigned
        rewritten = written


def _cuts_of_each(
    training: _Recordings,
    evaluation: _Recordings,
    specs: Mapping[str, tuple[str, int]],
    rewritten: frozenset[str],
    *,
    splits_ties: bool,
) -> list[tuple[CutPoint, ...]]:
    """All cuts of every recording, training's first, with the reasons for which some are forbidden."""
    aligned_in_modes = []
    for mode in (training, evaluation):
        own, *others = (cuts_of(one.recording, specs, splits_ties=splits_ties) for one in mode.each)
        aligned_in_modes += aligned(own, others)
    recordings = [one.recording for one in (*training.each, *evaluation.each)]
    cuts = buffers_kept_together(list(zip(recordings, aligned_in_modes, strict=True)), rewritten)
    return weights_kept_together(list(zip(recordings, cuts, strict=True)), specs)


def _specs(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Trainable parameter → dtype and bytes."""
    trainable = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {name: (str(p.dtype).removeprefix("torch."), p.nbytes) for name, p in trainable}


def _recorded(
    model: nn.Module,
    signature: Signature,
    example: Values,
    floating: Sequence[str],
    results_of: Callable[[Any], Any],
    denied: AbstractSet[int],
    rewritten: frozenset[str],
    assigned: frozenset[str],
) -> Recorded:
    tensors = {key: value.detach().clone() for key, value in zip(signature.keys, example, strict=True)}
    try:
        return record(
            model,
            lambda: signature.call(model, tensors),
            {key: tensors[key] for key in floating},
            results_of,
            denied=denied,
            rewritten=rewritten,
            assigned=assigned,
        )
    except CallableError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CallableError(forward_failure(model, tensors, error)) from error


def whole_output(output: Any) -> Any:
    """Select the whole output of a model: what a loss of the job needs."""
    return output


def _variants(again: Callable[[AbstractSet[int]], Recorded]) -> _Recordings:
    """Record the forward, and with the answer to each boolean query of shared values inverted, one query at a time.

    Other minibatches may give these answers. Answers with which the model fails are skipped: no data gives them. Where
    random numbers skip layers, the first recording skips none.
    """
    base = frozenset[int]()
    recorded = again(base)
    found = _inverted(again, recorded, base)
    drawn = [number for number in recorded.drawn if number in found]
    skipped = frozenset(number for number in drawn if _calls(found[number]) > _calls(recorded))
    if skipped:
        with suppress(CallableError):
            fullest = again(skipped)
            base, recorded, found = skipped, fullest, _inverted(again, fullest, skipped)
    skipping = {number for number in drawn if number in found and _calls(found[number]) < _calls(recorded)}
    always = recorded.recording.entries
    if skipping:
        try:
            always &= again(base ^ skipping).recording.entries
        except CallableError:  # it cannot do without any of them
            always = frozenset()
    return _Recordings(recorded, tuple(found.values()), always)


def _inverted(
    again: Callable[[AbstractSet[int]], Recorded], recorded: Recorded, base: AbstractSet[int]
) -> dict[int, Recorded]:
    """Boolean query → the recording with its answer inverted against that of `base`."""
    found: dict[int, Recorded] = {}
    for question in (*recorded.asked[:_MOST_QUESTIONS], *recorded.drawn):
        with suppress(CallableError):
            found[question] = again(base ^ {question})
    return found


def _calls(recorded: Recorded) -> int:
    return len(recorded.recording.frames)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers and frozen parameters of `model` after this block: the tensors, and what is in them."""
    tensors = [
        (cast("dict[str, Tensor]", table), key, tensor, tensor.detach().clone())
        for module in model.modules()
        for table in (module._buffers, module._parameters)  # noqa: SLF001 - where assignments go
        for key, tensor in table.items()
        if tensor is not None and not tensor.requires_grad
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for table, key, tensor, content in tensors:
                table[key] = tensor
                tensor.copy_(content)


@dataclass(frozen=True, slots=True)
class _Mode:
    """A description's mode, resolved to the modules of one instance."""

    context: ModeContext
    cuts: tuple[CutPoint, ...]


class CutModel:
    """One instance of the user's model, with the places where it is cut.

    Attributes:
        description: how it is cut.
        survey: findings of the recording; if another process made it, the borders of the layers only.
        output: return value of the last forward that reached the model's end.
        ties: weights of other stages that the last forward used, by name.
    """

    def __init__(self, model: nn.Module, description: CutDescription, survey: CutSurvey | None = None) -> None:
        """Cut `model`, which may have been built without memory, according to `description`."""
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
        places = {**self.parameter_places, **self.buffer_places}
        self.rewritten_places = tuple(place for name in description.rewritten for place in places[name])
        self.rewritten_parameters = tuple(
            place for name in description.rewritten for place in self.parameter_places.get(name, ())
        )
        self._modes = {
            True: _Mode(_context(model, description.training), description.training.cuts),
            False: _Mode(_context(model, description.evaluation), description.evaluation.cuts),
        }
        #: Further entries with assigned buffers, which are to have the same tensors.
        self.registered: dict[str, Places] = {}
        self.output: Any = None
        self.ties: Mapping[str, Tensor] = {}

    # -- the boundary ------------------------------------------------------------------------------------------------

    def border(self, layer: int, *, training: bool = True) -> CutPoint | None:
        """The cut before `layer`; None at either end of the model."""
        return self._modes[training].cuts[layer - 1] if 0 < layer < len(self.layers) else None

    def forbidden_in(self, layer: int) -> tuple[ForbiddenPlaces, ...]:
        """The places within `layer` where the model cannot be cut."""
        return tuple(each for each in self.survey.forbidden if bisect_left(self._orders, each.order) == layer)

    def gradient_flags(self, layer: int) -> tuple[bool, ...]:
        """Per value received by `layer`: whether it has a gradient that is sent back."""
        cut = self.border(layer)
        if cut is None:
            return (False,) * len(self.signature.keys)
        return (False,) * (1 + len(self._integers)) + tuple(each.has_gradient for each in cut.crossing)

    def is_tied(self, layer: int) -> bool:
        """Whether `layer` or a later one uses a trainable parameter of an earlier one."""
        cut = self.border(layer)
        return cut is not None and any(each.name.startswith("parameter:") for each in cut.crossing)

    def value_names(self, layer: int) -> tuple[str, ...]:
        """Names of the values received by `layer`."""
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

        Training if gradients are enabled, else evaluation. The weights of the layers must be in place.

        Args:
            first: index of the first layer.
            last: index after the last layer.
            weights: trainable parameter of these layers → the tensor in its place.
            values: values received by `first`, in the order of `value_names`.
            seed: seeds the generators for the entry or function of a given name.
            normalise: gives a value the memory layout that it has after crossing a cut.
            on_value: called with every value that crosses any cut, as it is computed.

        Returns:
            Values for `last`; for the last layer the tensors of the model's output, except those that only earlier
            stages have and the loss does not need.
        """
        with self._decisions_named(), self._assignments_kept(first, last):
            training = torch.is_grad_enabled()
            mode = self._modes[training]
            start, end = self.border(first, training=training), self.border(last, training=training)
            given = self._given(start, values, normalise)
            integers = {key: given[f"input:{key}"] for key in self._integers}
            forward = StageForward(
                mode.context,
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
            # The model may modify its inputs in place; the next stage receives the originals.
            tensors = {**{key: value.clone() for key, value in integers.items()}, **floating}
            ties = {name.removeprefix(TIE): value for name, value in given.items() if name.startswith(TIE)}
            self.ties = ties
            with self.ties_in_place(ties):
                forward.run(
                    lambda: self.signature.call(self.model, tensors),
                    floating,
                    [*weights.values(), *ties.values(), *(owner[key] for owner, key in self.rewritten_places)],
                )
            if end is None:
                self.output = forward.output
                # Tensors that the loss does not need may exist on earlier stages only.
                return tuple(value for value in tensors_in(forward.output) if not isinstance(value, AbsentTensor))
            inputs = LoggedCall(
                _INPUTS, _inputs_skeleton(len(self._floating)), tuple(noted(floating[key]) for key in self._floating)
            )
            log = mode.context.codec.encode([inputs, *forward.entries()])
            made = {
                **forward.values,
                **{f"input:{key}": value for key, value in floating.items()},
                **{f"{TIE}{name}": value for name, value in ties.items()},
            }
            made |= {
                f"{TIE}{name}": self._tie(weights[name])
                for name in (each.name.removeprefix(TIE) for each in end.crossing if each.name not in made)
                if name in weights
            }
            return (log, *integers.values(), *(_crossing(each.name, end, made) for each in end.crossing))

    @contextmanager
    def _decisions_named(self) -> Iterator[None]:
        """Append the lines that branch on integer inputs to the errors of this block."""
        try:
            yield
        except CallableError as error:
            if not self.description.decisions:
                raise
            places = ",".join(self.description.decisions[:_MOST_NAMED])
            raise CallableError(f"{error}; the model's integer inputs decide that{places}") from error

    @contextmanager
    def _assignments_kept(self, first: int, last: int) -> Iterator[None]:
        """Let the buffers in whose place the forward puts other tensors change in training, where their layer runs."""
        before = {name: self.buffer_places[name][0] for name in self.description.assigned}
        kept = {name: owner[key] for name, (owner, key) in before.items()}
        try:
            yield
        finally:
            own = {name for layer in self.layers[first:last] for name in layer.buffers}
            for name, (owner, key) in before.items():
                is_new = name in own and torch.is_grad_enabled()
                tensor = owner[key].detach() if is_new else kept[name]
                for table, place in (*self.buffer_places[name], *self.registered.get(name, ())):
                    table[place] = tensor

    def _given(self, start: CutPoint | None, values: Values, normalise: Normalise) -> dict[str, Tensor]:
        names = self._names(start)
        if len(names) != len(values):
            raise CallableError(
                f"model: a minibatch has {len(values)} tensors, but the one on which the model was cut has "
                f"{len(names)}: {', '.join(names)}; give every minibatch the same entries"
            )
        return {
            name: normalise(value) if value.is_floating_point() else value
            for name, value in zip(names, values, strict=True)
        }

    @staticmethod
    def _tie(weight: Tensor) -> Tensor:
        """The copy to send of a weight that a later stage uses too; its gradient returns through it."""
        return weight.clone()

    @contextmanager
    def ties_in_place(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Put received weights of other stages in every place where modules look them up, in this block.

        Backwards need this too: recomputed regions read the weights.
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
    """A value that crosses a cut, whether received or computed here.

    Raises:
        CallableError: it was not computed in this minibatch.
    """
    if name in made:
        return made[name]
    raise CallableError(
        f"model: {name.lstrip('/')} crosses the cut before {end.label}, but is not computed in this minibatch as it "
        "was in the one on which the model was cut: which values are computed depends on the data; train the model "
        "with `workers: {stages: 1}`"
    )


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _inputs_skeleton(count: int) -> Several:
    return Several(tuple, (Leaf(),) * count)


def _places(model: nn.Module, attribute: str) -> dict[str, Places]:
    """Name of a tensor in the model → every entry through which a module looks it up."""
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


def _mode(recordings: _Recordings, cuts: tuple[CutPoint, ...], num_floating: int) -> ModeDescription:
    recorded = recordings.main
    paths = {frame.position: frame.path for frame in recorded.recording.frames}
    open_paths = frozenset(paths[position] for cut in cuts for position in cut.around)
    inside = {
        frame.path
        for each in recordings.each
        for frame in each.recording.frames
        if frame.parent is not None and each.recording.frames[frame.parent].path in open_paths
    }
    otherwise = {
        f"{key} in variant {number}": skeleton
        for number, each in enumerate(recordings.variants)
        for key, skeleton in each.skeletons.items()
        if recorded.skeletons.get(key) != skeleton
    }
    return ModeDescription(
        {_INPUTS: _inputs_skeleton(num_floating), **recorded.skeletons, **otherwise},
        open_paths or frozenset({""}),
        open_paths | inside | {""},
        frozenset(place for cut in cuts for each in cut.crossing for places in each.all_places for place in places),
        frozenset[str]().union(*(each.drawing_paths for each in recordings.each)),
        frozenset[Any]().union(*(each.drawing_functions for each in recordings.each)),
        recorded.seeded_after,
        {key: left for each in reversed(recordings.each) for key, left in each.left.items()},
        cuts,
    )


def _context(model: nn.Module, mode: ModeDescription) -> ModeContext:
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names.setdefault(id(module), name)
    by_name = {names[id(module)]: module for module in model.modules()}
    return ModeContext(
        LogCodec(mode.skeletons),
        mode.open_paths,
        mode.normalised,
        mode.drawing_paths,
        mode.drawing_functions,
        mode.seeded_after,
        {
            key: tuple((model.get_submodule(path), attribute) for path, attribute in left)
            for key, left in mode.left.items()
        },
        Watchers((by_name[path] for path in sorted(mode.watched_paths)), names),
    )


def _layers(
    model: nn.Module,
    uses: Sequence[Mapping[str, int]],
    reads: Sequence[frozenset[str]],
    cuts: tuple[CutPoint, ...],
    recorded: Recorded,
    rewritten: AbstractSet[str],
) -> tuple[ModelLayer, ...]:
    """The layers between `cuts`, with what each of them owns and reads.

    Args:
        model: the model.
        uses: per recording, the one of `recorded` first: parameter or buffer → the first layer that uses it.
        reads: per layer, the buffers and frozen parameters that it reads.
        cuts: borders of layers, of `recorded`.
        recorded: the training forward.
        rewritten: buffers and frozen parameters that the forward writes.
    """
    last = len(cuts)
    calls = last_layers(recorded.recording, cuts)

    def owner(name: str) -> int:
        # Where no recording uses it, as of an expert without tokens, the innermost call around it may in another one.
        known = next((each[name] for each in uses if name in each), None)
        while known is None:
            name = name.rpartition(".")[0]
            known = calls.get(name)
        return known

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
    modules: list[list[str]] = [[] for _ in range(last + 1)]
    for path, layer in sorted(calls.items()):
        modules[layer].append(path)
    return tuple(
        ModelLayer(name, tuple(p), tuple(f), tuple(b), tuple(sorted(r - set(f) - set(b) - rewritten)), tuple(m))
        for name, p, f, b, r, m in zip(names, parameters, frozen, buffers, reads, modules, strict=True)
    )
