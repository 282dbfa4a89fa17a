"""One minibatch through the layers of one stage: the user's own forward, replayed from a log, ended by an exception.

Calls before the stage's first entry are answered: from the log, from received values, or with absent tensors. Later
calls are executed. The call that is the next stage's first entry ends the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.errors import CallableError
from hetpipe.model.absent import AbsentTensor
from hetpipe.model.calls import (
    PARAMETERS,
    Interception,
    OpenCall,
    Watchers,
    calling_frame,
    checkpointing_above,
    version_of,
)
from hetpipe.model.forward_log import LogCodec, LoggedCall, TensorNote, check_of, noted
from hetpipe.model.graph import CutPoint
from hetpipe.model.structure import (
    SINGLE,
    Leaf,
    parts_of,
    put_together,
    set_attributes,
    take_apart,
    tensors_of_call,
    with_attributes,
)

#: Normalises the layout of a value that may cross a cut, in the forward and its gradient in the backward.
Normalise = Callable[[Tensor], Tensor]


class Stop(BaseException):
    """Ends the forward at the stage's last entry."""


@dataclass(frozen=True, slots=True)
class ModeContext:
    """Data shared by the forwards of a model in one mode: training or evaluation."""

    codec: LogCodec
    open_paths: frozenset[str]
    """Modules with a cut inside."""
    normalised: frozenset[tuple[str, int]]
    """Entries and leaves that cross some cut of the model."""
    drawing_paths: frozenset[str]
    drawing_functions: frozenset[Any]
    seeded_after: Mapping[str, str]
    left: Mapping[str, tuple[tuple[nn.Module, str], ...]]
    """Entry → attributes of modules in which its call leaves values."""
    watchers: Watchers
    """Watchers of the modules that are called in open ones."""


def _newest(ran: Mapping[int, int], places: Iterable[tuple[str, int]]) -> int:
    """Position in the log of the newest entry of `places`; -1 if none is in it."""
    return max(ran.get(check_of(key), -1) for key, _ in places)


class StageForward(Interception):
    """One forward between two cuts; afterwards `values` holds what crosses the second one."""

    def __init__(
        self,
        context: ModeContext,
        start: CutPoint | None,
        end: CutPoint | None,
        *,
        log: Tensor | None,
        received: Mapping[str, Tensor],
        device: torch.device,
        seed: Callable[[str], None],
        normalise: Normalise,
    ) -> None:
        """Prepare the forward.

        Args:
            context: the model's, in the current mode.
            start: the cut it starts at; None for the beginning of the model.
            end: the cut it ends at; None for the end of the model.
            log: the calls before `start`.
            received: values that cross `start`, by name.
            device: device of the stage.
            seed: seeds the generators for the entry or function of a given name.
            normalise: gives a value the memory layout that it has after crossing a cut.
        """
        super().__init__()
        self._context = context
        self._around_start = frozenset(start.around) if start is not None else frozenset()
        self._around_end = frozenset(end.around) if end is not None else frozenset()
        self._end_key = None if end is None else end.end
        self._log = context.codec.decode(log) if log is not None else []
        self._next = 0
        self._received: dict[tuple[str, int], Tensor] = {}
        #: Check of an entry's name → its position in the log.
        ran = {check: index for index, (check, _, _) in enumerate(self._log)}
        for crossing in () if start is None else start.crossing:
            # Of those that cross instead of one another, the last one that earlier stages have computed.
            last = max(crossing.all_places, key=partial(_newest, ran)) if crossing.others else crossing.places
            for place in last:
                self._received[place] = received[crossing.name]
        self._wanted: dict[tuple[str, int], list[str]] = {}
        for crossing in () if end is None else end.crossing:
            for place in chain.from_iterable(crossing.all_places):
                self._wanted.setdefault(place, []).append(crossing.name)
        self._device = device
        self._seed = seed
        self._normalise = normalise
        #: Marks tensors that already have the layout of a crossing value.
        self._normal_mark = object()
        self.values: dict[str, Tensor] = {}
        self.output: Any = None
        self._left: tuple[OpenCall, ...] = ()
        #: Called with every value that crosses some cut of the model, as it is computed; used by the proof.
        self.on_value: Callable[[str, int, Tensor], None] | None = None

    def take_inputs(self, names: Sequence[str], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Floating inputs: those `given`, and absent tensors of the logged shapes for the others."""
        if not self._log:
            return dict(given)
        leaves = self._log.pop(0)[2]
        return {
            name: given[name]
            if name in given
            else AbsentTensor(f"input {name}", leaf.shape, leaf.dtype, self._device, requires_grad=leaf.requires_grad)
            for name, leaf in zip(names, leaves, strict=True)
            if isinstance(leaf, TensorNote)
        }

    def run(self, call: Callable[[], Any], inputs: Mapping[str, Tensor], weights: Sequence[Tensor]) -> None:
        """Run the user's forward.

        Args:
            call: calls the model.
            inputs: its floating inputs by name; those not available here as `AbsentTensor`s.
            weights: tensors in the places of trainable parameters.

        Raises:
            CallableError: the forward diverged from the recording.
        """
        for tensor in (*inputs.values(), *weights):
            self.marked(tensor)
        try:
            with self.watching(self._context.watchers, self._context.drawing_functions):
                self.output = call()
        except Stop:
            return
        except Exception:
            if not self._left:
                raise
        if self._left:  # the model's own code has caught the exception that ends the forward
            return
        if self._end_key is not None:
            raise CallableError(
                f"model: its forward ended without reaching {self._end_key.lstrip('/')}, before which it is cut: which "
                "modules it calls depends on the data; train the model with `workers: {stages: 1}`"
            )
        if self._next < len(self._log):
            raise self._astray("the end of the model")

    def entries(self) -> list[LoggedCall]:
        """The log for the next stage."""
        return [entry for frame in self._left for entry in frame.entries]

    # -- modules -----------------------------------------------------------------------------------------------------

    def on_module(self, module: nn.Module, path: str, run: Any, args: Any, kwargs: Any) -> Any:
        """Answer the call of a module, run it whole, enter it, or end the forward before it."""
        context = self._context
        if self._left:
            raise Stop
        if not self.stack:
            return self._entered("", run, args, kwargs)
        frame = self.stack[-1]
        key = frame.key(path)
        if key == self._end_key and self._next == len(self._log):
            self._stop()
        if self._next < len(self._log):
            if key not in self._around_start:
                return self._answered(frame, key, args, kwargs)
            return self._noted(frame, key, self._entered(key, run, args, kwargs), args, kwargs)
        if path in context.open_paths:
            return self._noted(frame, key, self._entered(key, run, args, kwargs), args, kwargs)
        if path in context.drawing_paths and key not in context.seeded_after.values():
            self._seed(key)
        shared = self._shared_among(tensors_of_call(args, kwargs))
        result = run(*args, **kwargs)
        self._mark_changed(shared)
        return self._noted(frame, key, result, args, kwargs)

    def _entered(self, key: str, run: Any, args: Any, kwargs: Any) -> Any:
        self.stack.append(OpenCall(key, logs=key in self._around_end))
        try:
            if key in self._context.seeded_after:
                self._seed(self._context.seeded_after[key])
            return self.opened(run, args, kwargs)
        finally:
            self.stack.pop()

    # -- functions ---------------------------------------------------------------------------------------------------

    def on_function(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Answer a function call, execute it, or end the forward before it."""
        if self._left:
            raise Stop
        if not self.stack:
            return function(*args, **kwargs)
        frame = self.stack[-1]
        key = frame.key(name)
        if self._next < len(self._log):
            return self._answered(frame, key, args, kwargs)
        if key == self._end_key:
            self._stop()
        if function in self._context.drawing_functions and not self._is_recomputed():
            self._seed(key)
        shared = self._shared_among(tensors)
        result = function(*args, **kwargs)
        self._mark_changed(shared)
        return self._noted(frame, key, result, args, kwargs)

    def on_shared(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Seed the generators before a function that draws, or end the forward before it."""
        if function in self._context.drawing_functions:
            self._seed_shared(function)
        return function(*args, **kwargs)

    def on_draw(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Seed the generators before a draw from `random` or NumPy, or end the forward before it."""
        self._seed_shared(function)
        return function(*args, **kwargs)

    def _seed_shared(self, function: Any) -> None:
        if not self.stack or self._is_recomputed():
            return
        key = self.stack[-1].key(f"shared {getattr(function, '__name__', '')}")
        if key == self._end_key:
            self._stop()
        self._seed(key)

    @staticmethod
    def _is_recomputed() -> bool:
        """Whether the current function will be recomputed, from the state of the generators at its region's start."""
        return checkpointing_above(calling_frame(), until="on_module").is_inside

    def depends(self, tensor: Tensor) -> bool:
        """Whether the tensor depends on weights or floating inputs."""
        mark = getattr(tensor, "_hetpipe_mark", None)
        return mark is self.mark or mark is self._normal_mark or type(tensor) in PARAMETERS

    def _shared_among(self, tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
        """Tensors that do not depend on weights yet, with their version counters."""
        marks = (self.mark, self._normal_mark)
        return [
            (tensor, version_of(tensor))
            for tensor in tensors
            if getattr(tensor, "_hetpipe_mark", None) not in marks and type(tensor) not in PARAMETERS
        ]

    def _mark_changed(self, shared: list[tuple[Tensor, int]]) -> None:
        for tensor, version in shared:
            if version_of(tensor) != version:
                self.marked(tensor)

    # -- entries -----------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._left = tuple(self.stack)
        raise Stop

    def _answered(self, frame: OpenCall, key: str, args: Any, kwargs: Any) -> Any:
        """Result of a call that an earlier stage executed."""
        check, skeleton, leaves = self._log[self._next]
        if check != check_of(key):
            raise self._astray(key.lstrip("/"))
        self._next += 1
        found: list[Any] = []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, TensorNote):
                found.append(leaf)
                continue
            tensor = self._received.get((key, index))
            if tensor is None:
                tensor = AbsentTensor(
                    key.lstrip("/"), leaf.shape, leaf.dtype, self._device, requires_grad=leaf.requires_grad
                )
            setattr(tensor, "_hetpipe_mark", self._normal_mark)  # noqa: B010 - mypy knows of no such attribute
            self._keep(key, index, tensor)
            found.append(tensor)
        if frame.logs:
            frame.entries.append(LoggedCall(key, skeleton, leaves))
        self._seed_after(key)
        if isinstance(skeleton, Leaf):
            return found[0]
        return self._returned(key, put_together(skeleton, iter(found), parts_of(args, kwargs)))

    def _returned(self, key: str, whole: Any) -> Any:
        """What an entry returns; what it leaves in attributes is put there."""
        left = self._context.left.get(key)
        if left is None:
            return whole
        result, *values = whole
        set_attributes(left, values)
        return result

    def _noted(self, frame: OpenCall, key: str, result: Any, args: Any, kwargs: Any) -> Any:
        """Result of a call of this stage: marked, normalised if it may cross a cut, kept if it crosses the next one."""
        # `contiguous()` may return its argument here but not in the recording, where nothing was normalised.
        if isinstance(result, Tensor) and isinstance(self._context.codec.skeleton(key), Leaf):
            tensor = self._noted_tensor(key, 0, result)
            if frame.logs:
                frame.entries.append(LoggedCall(key, SINGLE, (noted(tensor),)))
            self._seed_after(key)
            return tensor
        whole = with_attributes(result, self._context.left[key]) if key in self._context.left else result
        leaves, skeleton = take_apart(whole, parts_of(args, kwargs))
        found = [
            self._noted_tensor(key, index, leaf) if isinstance(leaf, Tensor) else leaf
            for index, leaf in enumerate(leaves)
        ]
        if frame.logs:
            frame.entries.append(LoggedCall(key, skeleton, tuple(noted(leaf) for leaf in found)))
        self._seed_after(key)
        if all(new is leaf for new, leaf in zip(found, leaves, strict=True)):
            return result
        return self._returned(key, put_together(skeleton, iter(found), parts_of(args, kwargs)))

    def _noted_tensor(self, key: str, index: int, tensor: Tensor) -> Tensor:
        """One tensor of a result of this stage: the tensor itself, or its normalised copy."""
        if getattr(tensor, "_hetpipe_mark", None) is not self._normal_mark:
            if (key, index) in self._context.normalised:
                tensor = self._normalise(tensor) if tensor.is_floating_point() else tensor
                setattr(tensor, "_hetpipe_mark", self._normal_mark)  # noqa: B010
                if self.on_value is not None:
                    self.on_value(key, index, tensor)
            elif type(tensor) not in PARAMETERS:
                self.marked(tensor)
        self._keep(key, index, tensor)
        return tensor

    def _keep(self, key: str, index: int, tensor: Tensor) -> None:
        for name in self._wanted.get((key, index), ()):
            self.values[name] = tensor

    def _seed_after(self, key: str) -> None:
        behind = self._context.seeded_after.get(key)
        if behind is not None:
            self._seed(behind)

    def _astray(self, where: str) -> CallableError:
        return CallableError(
            f"model: its forward takes a different path on this stage than on the one before it, at {where}: it "
            "depends on the data, or on something other than tensors that differs between processes; train the model "
            "with `workers: {stages: 1}`"
        )
