"""A recording of one forward of the uncut model: its calls, and what each of them creates, uses and modifies."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode

from hetpipe.errors import CallableError
from hetpipe.model.calls import (
    SET_DATA,
    CustomFunction,
    Interception,
    OpenCall,
    Region,
    Watchers,
    calling_frame,
    checkpointing_above,
    has_own_call,
    looks_into,
    name_of,
    user_frame,
    version_of,
)
from hetpipe.model.draws import at_end, drawing_functions, elsewhere, is_number, is_uniform
from hetpipe.model.graph import (
    CHANGED_INSIDE,
    CHECKPOINTED,
    DECIDES,
    DIFFERENTIATES,
    DRAWN,
    DRAWS,
    HOOKED,
    RAISES,
    SIZED,
    SWITCHES,
    UNSEEN,
    RecordedCall,
    Recording,
    Step,
    Value,
)
from hetpipe.model.rejections import only_rejects
from hetpipe.model.sizes import NUMBERED_BY_SIZE, READS_SIZE, SizeWatch, keeps_size
from hetpipe.model.structure import (
    OF_EVERY_MODULE,
    Attributes,
    Named,
    Opaque,
    Several,
    Skeleton,
    parts_of,
    take_apart,
    tensors_in,
    tensors_of_call,
    with_attributes,
)
from hetpipe.model.user_errors import place_of_call, place_of_function


@dataclass(slots=True)
class Recorded:
    """A recording, with further data that a forward needs."""

    recording: Recording
    skeletons: dict[str, Skeleton]
    """Entry → structure of its result."""
    drawing_paths: frozenset[str]
    """Modules that draw random numbers."""
    drawing_functions: frozenset[Any]
    """Functions that draw random numbers."""
    seeded_after: dict[str, str]
    """Entry → the following entry, if that draws and is recomputed: its seed is set right after the former, so that
    `torch.utils.checkpoint` stashes that seed."""
    output: Any
    """Return value of the model."""
    decisions: tuple[str, ...]
    """Lines of user code that branch on shared values, as ` (FILE line N)`."""
    asked: tuple[int, ...]
    """Boolean queries of shared values that other minibatches may answer otherwise, by their numbers from 0."""
    drawn: tuple[int, ...]
    """Those of values that depend on random numbers: any minibatch may answer them otherwise."""
    rewritten: frozenset[str]
    """Buffers and frozen parameters that the forward writes, by names in the model."""
    assigned: frozenset[str]
    """Those of them in whose place it puts another tensor."""
    left: Mapping[str, Attributes]
    """Entry → attributes of modules in which its call leaves values."""


@dataclass(slots=True)
class _StepNote:
    started: int
    frame: int
    key: str
    label: str
    inputs: set[int] = field(default_factory=set)
    given: frozenset[int] = frozenset()
    outputs: list[int] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    opens: int | None = None
    opaque: str = ""
    is_amid_region: bool = False
    is_reentrant: bool = False
    draw: str = ""


def record(
    model: nn.Module,
    call: Callable[[], Any],
    inputs: Mapping[str, Tensor],
    results_of: Callable[[Any], Any],
    *,
    denied: AbstractSet[int] = frozenset(),
    rewritten: AbstractSet[str] = frozenset(),
    assigned: AbstractSet[str] = frozenset(),
) -> Recorded:
    """Record `call`, which calls `model` with `inputs` and possibly more.

    Buffers and frozen parameters that a forward writes depend on weights, like what reads them. Which ones these are is
    a result of a first recording, and an argument of the second.

    Args:
        model: the model, in the mode to record; its buffers change.
        call: runs one forward.
        inputs: its floating inputs, by name.
        results_of: selects what the loss needs of the result of `call`, as nested containers of tensors.
        denied: indices (from 0) of the boolean queries whose answers are inverted.
        rewritten: `Recorded.rewritten` of every mode.
        assigned: `Recorded.assigned` of every mode.

    Raises:
        CallableError: the forward changes a trainable parameter.
    """
    return _Recorder(model, inputs, denied, rewritten, assigned).run(call, results_of)


_DIFFERENTIATING = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})

#: Limit on the boolean queries of random numbers that a recording answers both ways; beyond it the module is not cut.
_MOST_DRAWN = 64

#: Recordings in which draws that are not uniform, or no numbers, give something else.
_ELSEWHERE = 8

#: The function on shared values before which a model is cut, for LayerDrop; it draws at each call.
_DRAW = "rand"

#: What switches the gradient of a tensor on or off.
_SWITCHES = frozenset({"requires_grad_", "set requires_grad"})

#: Comparisons of a tensor with a number, monotonic in the tensor.
_COMPARISONS = frozenset({"__ge__", "__gt__", "__le__", "__lt__", "ge", "gt", "le", "lt"})


def _ends(uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest numbers in [0, 1), in the shape of `uniform`."""
    return torch.zeros_like(uniform), torch.full_like(uniform, 1 - torch.finfo(uniform.dtype).eps / 2)


def _states() -> tuple[bytes | Tensor, Any, Any]:
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()[1:3]
    return torch.get_rng_state(), random.getstate(), of_numpy


def _same_python(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    numpys = (one[2], other[2])
    same_numpy = numpys[0] is numpys[1] or (
        None not in numpys and numpys[0][1] == numpys[1][1] and bool((numpys[0][0] == numpys[1][0]).all())
    )
    return bool(one[1] == other[1]) and same_numpy


class _Recorder(Interception):
    """Records one forward. Keeps every tensor alive, so that tensors can be identified by their `id`."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        denied: AbstractSet[int],
        rewritten: AbstractSet[str],
        assigned: AbstractSet[str],
    ) -> None:
        self._decisions: dict[str, None] = {}
        names: dict[int, str] = {}
        for name, module in model.named_modules():
            names.setdefault(id(module), name)
        super().__init__()
        self._names = names
        self._model = model
        self._parameters = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = {id(p): name for name, p in model.named_parameters() if not p.requires_grad}
        self._buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self._rewritten = rewritten
        #: Names of weights whose gradients it has switched.
        self._switched: set[str] = set()
        #: Names of what this forward has written.
        self._written: set[str] = set()
        #: Memory → the parameter or buffer in it: `parameter.data` is another tensor in the same memory.
        self._owners = {
            _storage(tensor): (name, tensor) for name, tensor in (*model.named_buffers(), *model.named_parameters())
        }
        #: Buffer → where modules look it up, and the tensor found there last.
        self._places = {
            self._buffers[id(tensor)]: (module._buffers, key, tensor)  # noqa: SLF001 - where assignments go
            for module in model.modules()
            for key, tensor in module._buffers.items()  # noqa: SLF001
            if tensor is not None
        }
        self._assigned = assigned
        for tensor in (*model.buffers(), *model.parameters()):
            if self._name_of(tensor) in rewritten:
                self.marked(tensor)
        self._denied = denied
        self._num_questions = 0
        #: Whether functions of the model itself draw in a region that is recomputed, which stages do not seed.
        self._draws_in_region = False
        self._asked: list[int] = []
        self._drawn_questions: list[int] = []
        #: Questions that stand for other results of all draws by which user code may decide in any way.
        self._elsewhere = range(0)
        #: Shared values that depend on random numbers; and those of them that are in [0, 1).
        self._drawn: set[int] = set()
        self._uniform: set[int] = set()
        #: Results of comparisons that every random number answers alike.
        self._settled: set[int] = set()
        self._count = 0
        self._frames: list[RecordedCall] = []
        self._steps: list[tuple[int, _StepNote]] = []
        self._values: list[Value] = []
        self._tensors: list[Tensor] = []
        self._indices: dict[int, int] = {}
        self._skeletons: dict[str, Skeleton] = {}
        self._left: dict[str, Attributes] = {}
        self._drawing_paths: set[str] = set()
        self._drawing_functions: set[Any] = set()
        self._seeded_after: dict[str, str] = {}
        self._last_entries: dict[int, tuple[str, FrameType | None]] = {}
        #: Frame → why no cut may be inside it, as found during its execution, and the line of the user's code.
        self._closed: dict[int, tuple[str, str]] = {}
        #: Frame → since when, and why, no cut may be inside it.
        self._closed_behind: dict[int, tuple[int, str]] = {}
        #: Frame → where calls inside of it have changed its shared values, which stages that run these frames do again.
        self._changed_inside: dict[int, list[tuple[int, int, str]]] = {}
        self._states: Any = None
        #: Values whose size depends on weights, like the tokens of one expert.
        self._sized: set[int] = set()
        self._sizes = SizeWatch(self.depends)
        self._inputs = {name: self._noted(self.marked(tensor), shared_in=None) for name, tensor in inputs.items()}

    def run(self, call: Callable[[], Any], results_of: Callable[[Any], Any]) -> Recorded:
        modules = {
            id(module): module for module in self._model.modules() if not isinstance(module, torch.jit.ScriptModule)
        }
        with self.watching(Watchers(modules.values(), self._names), drawing_functions().values()):
            output = call()
            self._note_assignments()
        assigned = self._assigned | {
            name for name, (table, key, tensor) in self._places.items() if table.get(key) is not tensor
        }
        if self._closed.get(0, ("", ""))[0] == DRAWS or self._draws_in_region:  # its draws follow the seed at its start
            self._seeded_after[""] = ""
        recording = Recording(
            tuple(
                replace(
                    note,
                    closed=note.closed or self._closed.get(index, ("", ""))[0],
                    closed_at=self._closed.get(index, ("", ""))[1] if not note.closed else "",
                    closed_behind=self._closed_behind.get(index),
                    changed_inside=tuple(self._changed_inside.get(index, ())),
                )
                for index, note in enumerate(self._frames)
            ),
            tuple(self._step(ended, note) for ended, note in self._steps),
            tuple(
                replace(value, has_gradient=tensor.requires_grad)
                for value, tensor in zip(self._values, self._tensors, strict=True)
            ),
            self._inputs,
            frozenset(self._indices[id(t)] for t in tensors_in(results_of(output)) if id(t) in self._indices),
            frozenset(self._switched),
        )
        return Recorded(
            recording,
            self._skeletons,
            frozenset(self._drawing_paths),
            frozenset(self._drawing_functions),
            self._seeded_after,
            output,
            tuple(self._decisions),
            tuple(self._asked),
            tuple(self._drawn_questions),
            frozenset(self._written | assigned),
            frozenset(assigned),
            self._left,
        )

    # -- modules -----------------------------------------------------------------------------------------------------

    def on_module(self, module: nn.Module, path: str, run: Any, args: Any, kwargs: Any) -> Any:
        region = checkpointing_above(calling_frame(), until="on_module")
        parent = self.stack[-1] if self.stack else None
        self._look_for_draws()
        self._note_assignments()
        key = "" if parent is None else parent.key(path)
        frame = OpenCall(key, len(self._frames))
        self._frames.append(
            RecordedCall(
                key,
                path,
                None if parent is None else parent.index,
                CHECKPOINTED if region.is_inside or self._recomputes(module) else "",
                is_reentrant=region.is_reentrant,
            )
        )
        if parent is not None and any(map(self._is_unseen, tensors_of_call(args, kwargs))):
            self._close(parent.index, UNSEEN)
        if region.is_inside and parent is not None and parent.has_own_call:
            self._close(parent.index, CHECKPOINTED)
        frame.has_own_call = has_own_call(type(module))
        started, first_new = self._now(), len(self._values)
        given = frozenset(self._known(tensors_of_call(args, kwargs)) - {-1})
        before = self._states
        self.stack.append(frame)
        try:
            result = self.opened(run, args, kwargs)
            self._look_for_draws()
        except Exception:
            self._close_behind(parent, RAISES)
            raise
        finally:
            self.stack.pop()
        draws = not self._drew_nothing(before, self._states)
        if draws:
            self._drawing_paths.add(path)
        if parent is None:
            return result
        if region.is_inside and draws:
            last, last_region = self._last_entries.get(parent.index, (parent.position, None))
            if last_region is not None and last_region is region.frame:
                self._close(parent.index, CHECKPOINTED)
            self._seeded_after[last] = key
        note = _StepNote(started, parent.index, key, path, given=given, opens=frame.index)
        note.is_amid_region = self._continues(parent.index, region)
        whole = result
        if left := self._left_in(module, first_new):
            self._left[key] = left
            whole = with_attributes(result, [(self._model.get_submodule(path), name) for path, name in left])
        self._note_outputs(note, whole, args, kwargs)
        self._last_entries[parent.index] = (key, region.frame)
        return result

    def _left_in(self, module: nn.Module, first_new: int) -> Attributes:
        """Attributes of `module` and its submodules with values of entries from `first_new` on."""
        return tuple(
            (self._names[id(part)], name)
            for part in module.modules()
            for name, value in vars(part).items()
            if isinstance(value, Tensor | tuple | list | dict)
            and name not in OF_EVERY_MODULE
            and any(self._is_new(tensor, first_new) for tensor in tensors_in(value))
        )

    def _is_new(self, tensor: Tensor, first_new: int) -> bool:
        index = self._indices.get(id(tensor), -1)
        return index >= first_new and self._values[index].shared_in is None

    def _continues(self, frame: int, region: Region) -> bool:
        """Whether the last entry of `frame` was in the same region."""
        return region.is_inside and self._last_entries.get(frame, ("", None))[1] is region.frame

    def _recomputes(self, module: nn.Module) -> bool:
        """Whether a layer that overrides `__call__` runs its forward under `torch.utils.checkpoint`."""
        return bool(getattr(module, "gradient_checkpointing", False)) and module.training and has_own_call(type(module))

    # -- functions ---------------------------------------------------------------------------------------------------

    def on_function(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if function in _DIFFERENTIATING:
            for frame in self.stack:
                self._close(frame.index, DIFFERENTIATES)
        return self._call(function, name, args, kwargs, tensors, is_shared=False)

    def on_shared(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if not self.stack:
            return function(*args, **kwargs)
        name = name_of(function)
        result = self._call(function, name, args, kwargs, tensors, is_shared=True)
        self._note_draws(function, name, args, kwargs, tensors, result)
        if isinstance(result, bool) and looks_into(name, args) and not self._settled.issuperset(self._known(tensors)):
            number = self._num_questions
            self._num_questions += 1
            if self._drawn.isdisjoint(self._known(tensors)):
                self._decisions[place_of_call(calling_frame())] = None
                self._asked.append(number)
            else:
                self._drawn_questions.append(number)
                if len(self._drawn_questions) > _MOST_DRAWN:
                    self._close(self.stack[-1].index, DRAWN)
            return result != (number in self._denied)
        is_number = not isinstance(result, Tensor) and looks_into(name, args)
        is_drawn = is_number and not self._drawn.isdisjoint(self._known(tensors))
        return self._number_drawn(tensors, result) if is_drawn else result

    def _number_drawn(self, tensors: Sequence[Tensor], result: Any) -> Any:
        """Answer of a query that reads random numbers, which may decide anything: tried are both ends of [0, 1)."""
        if not (isinstance(result, float) and self._known(tensors) <= self._uniform):
            self._close(self.stack[-1].index, DRAWN)
            return result
        ends = dict(zip(self._ask(2), _ends(tensors[0]), strict=True))
        return next((float(end) for number, end in ends.items() if number in self._denied), result)

    def on_draw(self, function: Any, args: Any, kwargs: Any) -> Any:
        if not self.stack:
            return function(*args, **kwargs)
        frame, name = self.stack[-1], name_of(function)
        self._look_for_draws()
        key = frame.key(f"shared {name}")
        draw = partial(function, *args, **kwargs)
        note = _StepNote(self._now(), frame.index, "", name)
        result = draw()
        self._states = _states()
        self._drawing_functions.add(function)
        if checkpointing_above(calling_frame(), until="on_module").is_inside:
            self._close(frame.index, CHECKPOINTED)
            self._draws_in_region |= frame.index == 0
            return result
        if is_number(result) and is_uniform(function):  # not one index per sample, of which there may be fewer
            note.draw = key
        self._steps.append((self._now(), note))
        return self._drawn_otherwise(draw, key, result)

    def _drawn_otherwise(self, draw: partial[Any], key: str, result: Any) -> Any:
        """Result of a draw from `random` or NumPy, which may decide anything: one number is tried at both ends.

        Where a comparison may depend on more than these, all such draws of the forward are tried with other seeds.
        """
        ends = self._ask(2) if is_number(result) else range(0)
        if (end := next((index for index, number in enumerate(ends) if number in self._denied), None)) is not None:
            return at_end(draw, is_high=end == 1)
        if ends and is_uniform(draw.func):
            return result
        self._elsewhere = self._elsewhere or self._ask(_ELSEWHERE)
        seed = next((index for index, number in enumerate(self._elsewhere) if number in self._denied), None)
        return result if seed is None else elsewhere(draw, crc32(f"{seed} {key}".encode()))

    def _ask(self, count: int) -> range:
        """Numbers of that many questions which random numbers answer."""
        numbers = range(self._num_questions, self._num_questions + count)
        self._num_questions += count
        self._drawn_questions += numbers
        if len(self._drawn_questions) > _MOST_DRAWN:
            self._close(self.stack[-1].index, DRAWN)
        return numbers

    def _known(self, tensors: Iterable[Tensor]) -> set[int]:
        """Indices of the values among `tensors`; -1 stands for any other."""
        return {self._indices.get(id(tensor), -1) for tensor in tensors}

    def _note_draws(
        self, function: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor], result: Any
    ) -> None:
        """Note whether the result of a function on shared values depends on random numbers."""
        uniform = [tensor for tensor in tensors if self._indices.get(id(tensor)) in self._uniform]
        is_compared = uniform and name in _COMPARISONS and len(tensors) == len(uniform) == 1 and args[0] is uniform[0]
        # LayerDrop of 0.0 asks, and never drops.
        if is_compared and torch.equal(*(function(end, *args[1:], **kwargs) for end in _ends(uniform[0]))):
            self._settled |= self._known([result])
            return
        draws = function in self._drawing_functions
        if draws or not self._drawn.isdisjoint(self._known(tensors)):
            found = self._known(tensors_in(result)) - {-1}
            self._drawn |= found
            if draws and name == _DRAW:
                self._uniform |= found

    def _call(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor], *, is_shared: bool) -> Any:
        frame = self.stack[-1]
        self._look_for_draws()
        self._note_assignments()
        note = _StepNote(self._now(), frame.index, "" if is_shared else frame.key(name), name)
        for tensor in tensors:
            self._note_use(note, tensor)
        versions = [version_of(tensor) for tensor in tensors]
        # A module's `to` sets the data that the parameter has.
        is_same = name == SET_DATA and len({_storage(tensor) for tensor in tensors}) == 1
        before = self._states
        try:
            with self._sizes.watching(tensors, is_shared=is_shared), self._uses_inside(function, note):
                result = function(*args, **kwargs)
        except Exception:
            self._close_behind(frame, RAISES)
            raise
        if isinstance(function, CustomFunction) and function.kind is BackwardHookFunction:
            self._close_behind(frame, HOOKED)
        self._states = _states()
        region = checkpointing_above(calling_frame(), until="on_module")
        if not self._drew_nothing(before, self._states):
            self._drawing_functions.add(function)
            if is_shared and name == _DRAW and not region.is_inside:
                note.draw = frame.key(f"shared {name}")
            if region.is_inside:
                self._close(frame.index, CHECKPOINTED)
                self._draws_in_region |= frame.index == 0
        changed = [each for each, was in zip(tensors, versions, strict=True) if version_of(each) != was]
        self._note_changes(note, changed, is_shared=is_shared)
        if name == SET_DATA and not is_same:
            self._note_write(note, tensors[0])
        note.is_amid_region = self._continues(frame.index, region)
        note.is_reentrant = region.is_reentrant or any(self._frames[each.index].is_reentrant for each in self.stack)
        self._note_outputs(note, result, args, kwargs, shared_in=frame.index if is_shared else None)
        if self._sizes.is_found or not (self._sized.isdisjoint(note.inputs) or keeps_size(name, args, self._is_sized)):
            self._note_sized(note, result)
        if note.key:
            self._last_entries[frame.index] = (note.key, region.frame)
        return result

    def _uses_inside(self, function: Any, note: _StepNote) -> AbstractContextManager[object]:
        """Note what a custom function uses beside its arguments: weights of modules that it calls."""
        return _Uses(partial(self._note_use, note)) if isinstance(function, CustomFunction) else nullcontext()

    def _note_sized(self, note: _StepNote, result: Any) -> None:
        """Note that the size of the result of a call depends on weights."""
        if isinstance(result, tuple | list) and note.label in NUMBERED_BY_SIZE:
            self._close(note.frame, SIZED)
        self._sized.update(
            self._indices[id(leaf)] for leaf in tensors_in(result) if leaf.dim() and id(leaf) in self._indices
        )

    def _is_sized(self, tensor: Tensor) -> bool:
        return self._indices.get(id(tensor)) in self._sized

    def on_metadata(self, name: str, tensors: Sequence[Tensor]) -> None:
        if name in _SWITCHES:
            found = {self._parameters[id(t)] for t in tensors if id(t) in self._parameters}
            self._switched |= found
            for frame in self.stack if found else ():
                self._close_behind(frame, SWITCHES)
        if name in READS_SIZE and self.stack and any(map(self._is_sized, tensors)):
            self._close(self.stack[-1].index, SIZED)

    # -- notes -------------------------------------------------------------------------------------------------------

    def _now(self) -> int:
        self._count += 1
        return self._count

    def _note_use(self, note: _StepNote, tensor: Tensor) -> None:
        identity = id(tensor)
        if identity in self._parameters:
            note.parameters.add(self._parameters[identity])
            return
        if identity in self._frozen:
            note.frozen.add(self._frozen[identity])
            if self._frozen[identity] in self._rewritten:
                note.buffers.add(self._frozen[identity])
            return
        if identity in self._buffers:
            note.buffers.add(self._buffers[identity])
        if identity in self._indices:
            note.inputs.add(self._indices[identity])
        elif self._is_unseen(tensor):
            self._close(note.frame, UNSEEN)

    def _is_unseen(self, tensor: Tensor) -> bool:
        """Whether a tensor that depends on weights was made by something that cannot be intercepted."""
        return tensor.requires_grad and id(tensor) not in self._indices and not self._name_of(tensor)

    def _note_changes(self, note: _StepNote, changed: Sequence[Tensor], *, is_shared: bool) -> None:
        for tensor in changed:
            self._note_write(note, tensor)
            # What no call has made is an input, or was there before: every frame has it.
            index = self._noted(tensor, shared_in=0 if is_shared else None)
            note.changed.add(index)
            if is_shared:
                self._note_change_inside(self._values[index].shared_in)
            if note.key:
                self.marked(tensor)

    def _note_change_inside(self, owner: int | None) -> None:
        """Note that the current frame changes a shared value of the frame `owner`: later stages may not run it."""
        indices = [frame.index for frame in self.stack]
        if owner in indices:
            for index in indices[indices.index(owner) : -1]:
                found = (self._count, indices[-1], self._located(index, CHANGED_INSIDE))
                self._changed_inside.setdefault(index, []).append(found)

    def _note_write(self, note: _StepNote, tensor: Tensor) -> None:
        """Note that a call has written `tensor`, and the parameter or buffer in the same memory.

        Raises:
            CallableError: it is a trainable parameter.
        """
        name = self._name_of(tensor)
        if not name:
            name, owner = self._owners.get(_storage(tensor), ("", tensor))
            if not name or _storage(owner) != _storage(tensor):
                return
        self._owners[_storage(tensor)] = (name, tensor)
        if name in self._parameters.values():
            mode = "training" if self._model.training else "evaluation"
            raise CallableError(
                f"model: its forward changes the trainable parameter {name} in {mode} ({note.label}"
                f"{place_of_call(calling_frame())}); only the job's optimizer changes weights, for stages and shards "
                "keep them: switch that off where the model is built, or compute the changed value from the parameter "
                "in each forward (torch.nn.utils.parametrize); if only the first forward does it, run the model once "
                "on a sample before you return it"
            )
        note.written.add(name)
        note.buffers.add(name)
        self._written.add(name)

    def _name_of(self, tensor: Tensor) -> str:
        """Name in the model of a parameter or buffer; empty for any other tensor."""
        identity = id(tensor)
        return self._buffers.get(identity) or self._frozen.get(identity) or self._parameters.get(identity, "")

    def _note_assignments(self) -> None:
        """Note, as a step of its own, buffers in whose places the forward has put another tensor since the last one."""
        for name in self._assigned:
            table, key, before = self._places[name]
            tensor = table.get(key)
            if tensor is not None and tensor is not before:
                self._places[name] = (table, key, tensor)  # keeps it alive, for its id
                self._buffers[id(tensor)] = name
                self.marked(tensor)
                frame = self.stack[-1].index if self.stack else 0
                note = _StepNote(self._now(), frame, "", name, buffers={name}, written={name})
                self._steps.append((self._now(), note))

    def _note_outputs(
        self, note: _StepNote, result: Any, args: Any, kwargs: Any, *, shared_in: int | None = None
    ) -> None:
        if isinstance(result, Tensor) and not note.key:
            leaves: list[Any] = [result]
        else:
            leaves, skeleton = take_apart(result, parts_of(args, kwargs))
            if note.key:
                self._skeletons[note.key] = skeleton
                note.opaque = _opaque_type(skeleton)
                if not note.opaque and any(leaf.is_nested for leaf in leaves if isinstance(leaf, Tensor)):
                    note.opaque = "nested tensor"
                elif note.opaque and note.opens is None:  # an array, whose elements may decide anything
                    self._close(note.frame, DECIDES)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                note.outputs.append(-1)
                if note.opens is None and note.key and not only_rejects(user_frame(calling_frame())):
                    self._close(note.frame, DECIDES)
                continue
            if id(leaf) in self._parameters or id(leaf) in self._frozen:
                note.outputs.append(-1)
                continue
            note.outputs.append(self._noted(leaf, shared_in=shared_in))
            if note.key:
                self.marked(leaf)
        self._steps.append((self._now(), note))

    def _noted(self, tensor: Tensor, *, shared_in: int | None) -> int:
        index = self._indices.get(id(tensor))
        if index is None:
            index = self._indices[id(tensor)] = len(self._values)
            self._tensors.append(tensor)
            self._values.append(
                Value(
                    kind_of(tensor),
                    0 if tensor.is_nested else tensor.numel() * tensor.element_size(),
                    has_gradient=False,
                    storage=_storage(tensor),
                    shared_in=shared_in,
                )
            )
        return index

    @staticmethod
    def _step(ended: int, note: _StepNote) -> Step:
        return Step(
            note.started,
            ended,
            note.frame,
            note.key,
            note.label,
            frozenset(note.inputs),
            note.given,
            tuple(note.outputs),
            frozenset(note.parameters),
            frozenset(note.buffers),
            frozenset(note.written),
            frozenset(note.frozen),
            frozenset(note.changed),
            note.opens,
            note.opaque,
            note.is_amid_region,
            note.is_reentrant,
            note.draw,
        )

    def _close_behind(self, frame: OpenCall | None, reason: str) -> None:
        """Note that no cut from here on may be inside `frame`."""
        if frame is not None and frame.index not in self._closed_behind:
            self._closed_behind[frame.index] = (self._count, self._located(frame.index, reason))

    def _located(self, frame: int, reason: str) -> str:
        """The reason, with the name of the frame's module and the line of the user's code."""
        return reason.format(self._frames[frame].path or "the model") + place_of_call(calling_frame())

    def _close(self, frame: int, reason: str) -> None:
        if frame in self._closed:
            return
        at = ""
        if reason == DRAWS:  # somewhere in the frame, before the call that noticed
            at = place_of_function(self._model.get_submodule(self._frames[frame].path).forward)
        elif reason != CHECKPOINTED:
            at = place_of_call(calling_frame())
        self._closed[frame] = (reason, at)

    # -- random numbers ----------------------------------------------------------------------------------------------

    def _look_for_draws(self) -> None:
        """Check whether Python's generators were used since the last call."""
        states = _states()
        if self.stack and self._states is not None and not _same_python(self._states, states):
            self._close(self.stack[-1].index, DRAWS)
        self._states = states

    @staticmethod
    def _drew_nothing(before: Any, after: Any) -> bool:
        return before is None or (torch.equal(before[0], after[0]) and _same_python(before, after))


def kind_of(tensor: Tensor) -> str:
    """The dtype by name; of a tensor without strides, what it is."""
    if tensor.is_nested:
        return "nested tensor"
    return str(tensor.dtype if tensor.layout is torch.strided else tensor.layout).removeprefix("torch.")


class _Uses(TorchFunctionMode):
    """Hands on the tensors in the arguments of each function that is called."""

    def __init__(self, on_use: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._on_use = on_use

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_of_call(args, kwargs):
            self._on_use(tensor)
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() or -id(tensor)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


def _opaque_type(skeleton: Skeleton) -> str:
    match skeleton:
        case Opaque(kind):
            return kind.__name__
        case Several(_, items) | Named(_, _, items):
            return next((found for item in items if (found := _opaque_type(item))), "")
        case _:
            return ""
