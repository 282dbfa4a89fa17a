"""Interception of the module and function calls in a model's own forward.

A module is intercepted at the attribute through which its `forward` is looked up (set on the instance for the duration
of a forward), or, where its class overrides `__call__` (Hugging Face's layers, which start gradient checkpointing
there), at `__call__`. Functions are intercepted by a `TorchFunctionMode`, and calls of a user's own
`torch.autograd.Function`, which torch shows to no mode, at its `apply`: each is one call, as it has one backward. Draws
from `random` and NumPy are intercepted in these modules (`model/draws.py`).
Modules that run whole are not intercepted inside.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.autograd.function import Function, _SingleLevelFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import checkpoint

from hetpipe.model.absent import AbsentParameter
from hetpipe.model.draws import replaced
from hetpipe.model.structure import tensors_of_call

#: Attribute that holds the watcher of a module whose class overrides `__call__`, for the duration of a forward.
_WATCHER = "_hetpipe_watcher"

#: Attribute of tensors that depend on weights: the forward they belong to.
_MARK = "_hetpipe_mark"

#: Functions and properties that read a tensor's metadata only, not its elements.
_METADATA = frozenset(
    {
        "__format__",
        "__hash__",
        "__len__",
        "__repr__",
        "data_ptr",
        "dim",
        "element_size",
        "get_device",
        "has_names",
        "is_complex",
        "is_conj",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_neg",
        "is_pinned",
        "is_same_size",
        "is_shared",
        "is_signed",
        "is_storage",
        "is_tensor",
        "ndimension",
        "nelement",
        "numel",
        "register_hook",
        "requires_grad_",
        "result_type",
        "retain_grad",
        "size",
        "storage_offset",
        "storage_type",
        "stride",
        "untyped_storage",
    }
)

#: Properties whose value is a tensor.
_TENSOR_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})

#: Name of `tensor.data = value`, which replaces the elements of a tensor.
SET_DATA = "set data"

#: Types of a parameter in a module: a real one, or the placeholder for one of another stage.
PARAMETERS = frozenset({nn.Parameter, AbsentParameter})

_CHECKPOINT_FILE = checkpoint.__file__

Forward = Callable[..., Any]


def name_of(function: Any) -> str:
    """Name of a function; `get T` for a property."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in {"__get__", "__set__", "__delete__"}:
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        return f"{name.strip('_')} {owner}"
    return str(name)


def looks_into(name: str, args: Sequence[Any]) -> bool:
    """Whether the function of that name reads the elements of its arguments, not only their metadata."""
    kind, space, owner = name.partition(" ")
    if space:
        return (kind == "get" and owner in _TENSOR_PROPERTIES) or name == SET_DATA
    return name not in _METADATA and not (name == "type" and len(args) == 1)


def version_of(tensor: Tensor) -> int:
    """Number of writes in place so far; torch does not count those to a tensor of its inference mode."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - the only name for it


class OpenCall:
    """A call of a module in progress."""

    __slots__ = ("entries", "has_own_call", "index", "logs", "position", "times")

    def __init__(self, position: str, index: int = 0, *, logs: bool = False) -> None:
        self.position = position
        self.index = index
        self.logs = logs
        self.has_own_call = False
        #: Name → number of calls of it so far within this call.
        self.times: dict[str, int] = {}
        self.entries: list[Any] = []

    def key(self, name: str) -> str:
        """Unique name of the next call of `name` within this call."""
        times = self.times
        count = times.get(name, 0)
        times[name] = count + 1
        at = f"@{count}" if count else ""
        return f"{self.position}/{name}{at}"


class Interception(TorchFunctionMode):
    """Intercepts the calls of one forward; subclasses define `on_module`, `on_function` and `on_shared`."""

    def __init__(self) -> None:
        """Start with no watchers."""
        super().__init__()
        self.stack: list[OpenCall] = []
        self.mark = object()
        #: Whether a custom `torch.autograd.Function` is being applied, which may call modules.
        self.is_suspended = False

    def on_module(self, module: nn.Module, path: str, run: Forward, args: Any, kwargs: Any) -> Any:
        """Handle the call of a module inside another one."""
        raise NotImplementedError

    def on_function(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Handle a function call whose arguments depend on weights."""
        raise NotImplementedError

    def on_draw(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Handle a draw from `random` or NumPy."""
        return function(*args, **kwargs)

    def on_metadata(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Notice that metadata of values that depend on weights are read."""

    def on_shared(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Handle a function call with shared values only, or without tensors."""
        return function(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__iter__:
            func = _iterate
        if func is torch._assert and isinstance(args[0], Tensor):  # noqa: SLF001 - dispatched for absent tensors, while plain ones are asked directly
            return self._asserted(types, *args, **kwargs)
        tensors = tensors_of_call(args, kwargs)
        for tensor in tensors:
            if self.depends(tensor):
                break
        else:
            return self.on_shared(func, args, kwargs, tensors)
        name = name_of(func)
        if not looks_into(name, args):
            self.on_metadata(name, tensors)
            if name == "set requires_grad" and args[0].requires_grad == args[1]:
                return None  # of a value that is received, as of any that is no leaf, torch sets not even the same
            return func(*args, **kwargs)
        if func is _iterate:
            return iter(self.on_function(Tensor.unbind, "unbind", args, kwargs, tensors))
        return self.on_function(func, name, args, kwargs, tensors)

    def _asserted(self, types: Any, condition: Tensor, message: str) -> None:
        if not self.__torch_function__(Tensor.__bool__, types, (condition,)):
            raise AssertionError(message)

    def depends(self, tensor: Tensor) -> bool:
        """Whether the tensor depends on weights or floating inputs."""
        return getattr(tensor, _MARK, None) is self.mark or type(tensor) in PARAMETERS

    def marked(self, tensor: Tensor) -> Tensor:
        """Mark the tensor as dependent on weights; returns it."""
        setattr(tensor, _MARK, self.mark)
        return tensor

    def module_called(self, module: nn.Module, path: str, run: Forward, args: Any, kwargs: Any) -> Any:
        """Handle the call of a module with interception suspended; only `opened` resumes it."""
        above = self._leave()
        try:
            return self.on_module(module, path, run, args, kwargs)
        finally:
            self._come_back(above)

    def custom_called(self, function: CustomFunction, args: Any, kwargs: Any) -> Any:
        """Handle the call of a custom `torch.autograd.Function` with interception suspended."""
        above = self._leave()
        self.is_suspended = True
        try:
            return self.__torch_function__(function, (), args, kwargs)
        finally:
            self.is_suspended = False
            self._come_back(above)

    def draw_called(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Handle a draw from `random` or NumPy with interception suspended."""
        above = self._leave()
        try:
            return self.on_draw(function, args, kwargs)
        finally:
            self._come_back(above)

    def opened(self, run: Forward, args: Any, kwargs: Any) -> Any:
        """Run a module's forward with its calls intercepted."""
        with self:
            return run(*args, **kwargs)

    def _leave(self) -> list[TorchFunctionMode]:
        """Suspend the interception of functions; returns the modes that user code has pushed above this one."""
        above: list[TorchFunctionMode] = []
        while (mode := _pop_mode()) is not self:  # type: ignore[no-untyped-call]  # torch ships it untyped
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)  # type: ignore[no-untyped-call]
        return above

    def _come_back(self, above: list[TorchFunctionMode]) -> None:
        for _ in above:
            _pop_mode()  # type: ignore[no-untyped-call]
        _push_mode(self)  # type: ignore[no-untyped-call]
        for mode in reversed(above):
            _push_mode(mode)  # type: ignore[no-untyped-call]

    @contextmanager
    def watching(self, watchers: Watchers, draws: Iterable[Any]) -> Iterator[None]:
        """Intercept the forwards of the modules of `watchers`, functions between them, and `draws`, in this block."""
        with watchers.reporting_to(self), replaced(draws, _watched_draw), self:
            yield


@dataclass(frozen=True, slots=True, eq=False)
class _Watched:
    """A watched module and the original entry of its instance dictionary."""

    module: nn.Module
    path: str
    kind: type[nn.Module]
    function: Any
    """The `forward` of its class."""
    attribute: str
    before: Any
    """The original entry."""
    watcher: Any

    def is_current(self, before: Any) -> bool:
        """Whether a call of the module still resolves to the same function."""
        kind: Any = type(self.module)
        return kind is self.kind and kind.forward is self.function and before is self.before


class Watchers:
    """Watchers of some modules of a model: built once, installed for the duration of a forward.

    Supports one forward at a time.
    """

    def __init__(self, modules: Iterable[nn.Module], names: Mapping[int, str]) -> None:
        """Watch `modules`; `names` maps the `id` of a module to its name in the model."""
        self._target: Interception | None = None
        #: Thread of the forward. Modules that it calls on threads of its own run unwatched.
        self._thread = 0
        self._watched = [self._made(module, names[id(module)]) for module in modules]

    @contextmanager
    def reporting_to(self, target: Interception) -> Iterator[None]:
        """Report calls of the modules to `target` in this block."""
        outer, self._target, self._thread = self._target, target, get_ident()
        undo: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for index, watched in enumerate(self._watched):
                table = vars(watched.module)
                before = table.get(watched.attribute, _ABSENT)
                current = watched
                if not watched.is_current(before):
                    current = self._watched[index] = self._made(watched.module, watched.path)
                    before = table.get(current.attribute, _ABSENT)
                undo.append((table, current.attribute, before))
                table[current.attribute] = current.watcher
            yield
        finally:
            self._target = outer
            for table, attribute, before in reversed(undo):
                if before is _ABSENT:
                    table.pop(attribute, None)
                else:
                    table[attribute] = before

    def _made(self, module: nn.Module, path: str) -> _Watched:
        kind: Any = type(module)
        attribute = _WATCHER if has_own_call(kind) else "forward"
        before = vars(module).get(attribute, _ABSENT)
        if attribute == _WATCHER:
            _watch_calls_of(kind)

            def watcher(run: Forward, args: Any, kwargs: Any) -> Any:
                return self._called(module, path, run, args, kwargs)

            return _Watched(module, path, kind, kind.forward, attribute, before, watcher)
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._called(module, path, original, args, kwargs)

        return _Watched(module, path, kind, kind.forward, attribute, before, forward)

    def _called(self, module: nn.Module, path: str, run: Forward, args: Any, kwargs: Any) -> Any:
        if self._thread != get_ident():
            return run(*args, **kwargs)
        assert self._target is not None, "a watcher is installed only while there is a target"
        if self._target.is_suspended:
            return run(*args, **kwargs)
        return self._target.module_called(module, path, run, args, kwargs)


def _iterate(tensor: Tensor) -> Iterator[Tensor]:
    return iter(tensor.unbind(0))


_ABSENT = object()


@dataclass(frozen=True, slots=True)
class CustomFunction:
    """The `apply` of a user's own `torch.autograd.Function`."""

    kind: type[Function]

    @property
    def __name__(self) -> str:
        """The class's name, which stands for the call."""
        return self.kind.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it, without interception."""
        above: Any = super(_SingleLevelFunction, self.kind)
        return above.apply(*args, **kwargs)


def _watched_apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Apply a custom function, intercepted in a forward that is watched.

    Regions of `torch.utils.checkpoint` are such functions too; what they call is intercepted instead.
    """
    function = CustomFunction(cls)
    if cls.__module__ != checkpoint.__name__:
        for mode in reversed(_get_current_function_mode_stack()):  # type: ignore[no-untyped-call]  # as above
            if isinstance(mode, Interception):
                return mode.custom_called(function, args, kwargs)
    return function(*args, **kwargs)


def _watched_draw(function: Any) -> Any:
    """A function that draws, intercepted in a forward that is watched, on its own thread."""

    @functools.wraps(function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        for mode in reversed(_get_current_function_mode_stack()):  # type: ignore[no-untyped-call]  # as above
            if isinstance(mode, Interception):
                return mode.draw_called(function, args, kwargs)
        return function(*args, **kwargs)

    return draw


# `Function.apply` looks it up here, and so do the bound methods that user code keeps: `square = Square.apply`.
_SingleLevelFunction.apply = classmethod(_watched_apply)  # type: ignore[attr-defined]  # there is only that above it


def has_own_call(kind: type[nn.Module]) -> bool:
    """Whether the class overrides `nn.Module.__call__`."""
    call: Any = kind.__call__
    return call is not nn.Module.__call__


def _watch_calls_of(kind: type[nn.Module]) -> None:
    """Route calls of instances of `kind` that have a watcher through it; other instances are unaffected."""
    original: Any = kind.__call__
    if getattr(original, "_hetpipe_watches", False):
        return

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        watcher = vars(self).get(_WATCHER)
        if watcher is None:
            return original(self, *args, **kwargs)
        return watcher(functools.partial(original, self), args, kwargs)

    call._hetpipe_watches = True  # type: ignore[attr-defined]  # noqa: SLF001 - of our own function
    kind.__call__ = call  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Position of a call relative to `torch.utils.checkpoint`."""

    frame: FrameType | None = None
    """Python frame of the innermost region around the call; None outside of any."""
    is_reentrant: bool = False

    @property
    def is_inside(self) -> bool:
        """Whether the call is recomputed during the backward."""
        return self.frame is not None


def checkpointing_above(frame: FrameType | None, *, until: str) -> Region:
    """Find the checkpointed region around a call, within the forward of the module that makes it.

    Args:
        frame: innermost frame of the search, which goes outwards.
        until: name of the function of this package in which the enclosing forward starts; ends the search.
    """
    found: FrameType | None = None
    is_reentrant = False
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _CHECKPOINT_FILE:
            found = found or frame
            is_reentrant = is_reentrant or code.co_name == "forward"
        if code.co_name == until and code.co_filename.startswith(_OWN_FOLDER):
            break
        frame = frame.f_back
    return Region(found, is_reentrant)


_OWN_FOLDER = __file__.rpartition("/")[0]


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost Python frame from `frame` outwards that is neither of this package nor of torch's dispatch."""
    while frame is not None and frame.f_code.co_filename.startswith((_OWN_FOLDER, _OVERRIDES_FILE)):
        frame = frame.f_back
    return frame


_OVERRIDES_FILE = overrides.__file__


def calling_frame() -> FrameType | None:
    """Python frame of the caller's caller."""
    return sys._getframe(2)  # noqa: SLF001 - the only name for it
