"""Interception: what a model's own forward calls, module by module and function by function.

Modules are watched where their `forward` is looked up (an attribute of the instance for the time of a forward), or,
where a class has a `__call__` of its own (Hugging Face's layers, which begin gradient checkpointing there), around
that. Functions are seen by a `TorchFunctionMode`. Both stay out of modules that run whole.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils import checkpoint

from hetpipe.model.absent import AbsentParameter
from hetpipe.model.structure import tensors_of_call

#: Where a module whose class has a `__call__` of its own keeps its watcher for the time of a forward.
_WATCHER = "_hetpipe_watcher"

#: What a tensor carries that depends on weights: the forward it belongs to.
_MARK = "_hetpipe_mark"

#: Functions and properties that look at a tensor without looking into it.
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

#: Properties that are tensors.
_TENSOR_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})

#: What stands for a parameter in a module, here or on another stage.
PARAMETERS = frozenset({nn.Parameter, AbsentParameter})

_CHECKPOINT_FILE = checkpoint.__file__

Forward = Callable[..., Any]


def name_of(function: Any) -> str:
    """What a function is called; `get T` for a property."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in {"__get__", "__set__", "__delete__"}:
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        return f"{name.strip('_')} {owner}"
    return str(name)


def looks_into(name: str, args: Sequence[Any]) -> bool:
    """Whether the function of that name computes with the elements of its arguments, and not only with their shapes."""
    kind, space, owner = name.partition(" ")
    if space:
        return kind == "get" and owner in _TENSOR_PROPERTIES
    return name not in _METADATA and not (name == "type" and len(args) == 1)


class OpenCall:
    """One call of a module, while it runs."""

    __slots__ = ("entries", "has_own_call", "index", "logs", "position", "times")

    def __init__(self, position: str, index: int = 0, *, logs: bool = False) -> None:
        self.position = position
        self.index = index
        self.logs = logs
        self.has_own_call = False
        #: What was called here how often.
        self.times: dict[str, int] = {}
        self.entries: list[Any] = []

    def key(self, name: str) -> str:
        """The name of the next call of `name` here."""
        times = self.times
        count = times.get(name, 0)
        times[name] = count + 1
        at = f"@{count}" if count else ""
        return f"{self.position}/{name}{at}"


class Interception(TorchFunctionMode):
    """Watches one forward. `on_module` and `on_function` say what happens."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        super().__init__()
        self.stack: list[OpenCall] = []
        self.mark = object()

    def on_module(self, module: nn.Module, path: str, run: Forward, args: Any, kwargs: Any) -> Any:
        """A module is called inside another one."""
        raise NotImplementedError

    def on_function(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """A function computes with what depends on weights."""
        raise NotImplementedError

    def on_shared(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """A function computes with shared values, or with none."""
        return function(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__iter__:
            func = _iterate
        tensors = tensors_of_call(args, kwargs)
        for tensor in tensors:
            if self.depends(tensor):
                break
        else:
            return self.on_shared(func, args, kwargs, tensors)
        name = name_of(func)
        if not looks_into(name, args):
            return func(*args, **kwargs)
        if func is _iterate:
            return iter(self.on_function(Tensor.unbind, "unbind", args, kwargs, tensors))
        return self.on_function(func, name, args, kwargs, tensors)

    def depends(self, tensor: Tensor) -> bool:
        """Whether the tensor depends on weights or floating inputs."""
        return getattr(tensor, _MARK, None) is self.mark or type(tensor) in PARAMETERS

    def marked(self, tensor: Tensor) -> Tensor:
        """The same tensor, which depends on weights from now on."""
        setattr(tensor, _MARK, self.mark)
        return tensor

    def module_called(self, module: nn.Module, path: str, run: Forward, args: Any, kwargs: Any) -> Any:
        """A module is called: what is done about it is not seen, and what it does only in `opened`."""
        above = self._leave()
        try:
            return self.on_module(module, path, run, args, kwargs)
        finally:
            self._come_back(above)

    def opened(self, run: Forward, args: Any, kwargs: Any) -> Any:
        """Run a module's forward and see what it calls."""
        with self:
            return run(*args, **kwargs)

    def _leave(self) -> list[TorchFunctionMode]:
        """Stop to see functions; returns the modes that user code has put above this one."""
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
    def watching(self, watchers: Watchers) -> Iterator[None]:
        """In this block, forwards of the modules of `watchers` are seen, and functions between them."""
        with watchers.reporting_to(self), self:
            yield


@dataclass(frozen=True, slots=True, eq=False)
class _Watched:
    """One module, and what stands in its dictionary while it is watched."""

    module: nn.Module
    path: str
    kind: type[nn.Module]
    function: Any
    """The `forward` of its class."""
    attribute: str
    before: Any
    """What stood there when this was made."""
    watcher: Any

    def is_current(self, before: Any) -> bool:
        """Whether a call of the module still means what it meant then."""
        kind: Any = type(self.module)
        return kind is self.kind and kind.forward is self.function and before is self.before


class Watchers:
    """What reports the calls of some modules of a model: made once, in place for the time of a forward.

    Not for two forwards at once.
    """

    def __init__(self, modules: Iterable[nn.Module], names: Mapping[int, str]) -> None:
        """Watch `modules`; `names`: `id` of a module → its name in the model."""
        self._target: Interception | None = None
        self._watched = [self._made(module, names[id(module)]) for module in modules]

    @contextmanager
    def reporting_to(self, target: Interception) -> Iterator[None]:
        """In this block, calls of the modules go to `target`."""
        outer, self._target = self._target, target
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
                assert self._target is not None, "it is in place while there is a target"
                return self._target.module_called(module, path, run, args, kwargs)

            return _Watched(module, path, kind, kind.forward, attribute, before, watcher)
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            assert self._target is not None, "it is in place while there is a target"
            return self._target.module_called(module, path, original, args, kwargs)

        return _Watched(module, path, kind, kind.forward, attribute, before, forward)


def _iterate(tensor: Tensor) -> Iterator[Tensor]:
    return iter(tensor.unbind(0))


_ABSENT = object()


def has_own_call(kind: type[nn.Module]) -> bool:
    """Whether instances are called in another way than `nn.Module` has it."""
    call: Any = kind.__call__
    return call is not nn.Module.__call__


def _watch_calls_of(kind: type[nn.Module]) -> None:
    """From now on, instances of `kind` with a watcher are called through it; the others as ever."""
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
    """Where a call stands with regard to `torch.utils.checkpoint`."""

    frame: FrameType | None = None
    """Of Python, of the innermost region around the call; None: it is in none."""
    is_reentrant: bool = False

    @property
    def is_inside(self) -> bool:
        """Whether the call is recomputed in the backward."""
        return self.frame is not None


def checkpointing_above(frame: FrameType | None, *, until: str) -> Region:
    """The region around a call, inside the forward of the module that makes it.

    Args:
        frame: where to begin to look, outwards.
        until: the name of the function of this package at which the forward around it begins.
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


def calling_frame() -> FrameType | None:
    """The Python frame of the caller's caller."""
    return sys._getframe(2)  # noqa: SLF001 - the only name for it
