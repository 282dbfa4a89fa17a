"""Count the live and peak bytes of tensors.

`LiveBytes` intercepts every operation of its thread (and of the backward passes that it starts). A storage counts from
its allocation until the last reference, in Python or in an autograd graph, is gone. Temporary workspaces of kernels are
not counted, nor are tensors made outside of the block, unless passed to `count`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch ships it untyped
    """Count bytes of live tensors while the block runs; tensors that outlive it are tracked until freed.

    >>> with LiveBytes() as live:
    ...     a = torch.zeros(4)
    ...     b = a + a
    ...     del a
    >>> live.now_bytes, live.peak_bytes
    (16, 32)
    """

    def __init__(self, device_type: str = "cpu") -> None:
        """Restrict counting to storages on one device type (`cpu`, `cuda`)."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch ships it untyped
        self._device_type = device_type
        # A storage may be freed in any thread, and by the garbage collector in this one while the lock is held.
        self._lock = threading.RLock()
        #: Identity of a live storage → its weak reference and the bytes it was counted with.
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._looks = True
        self.now_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        """Start counting."""
        super().__enter__()  # type: ignore[no-untyped-call]  # torch ships it untyped
        return self

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count preexisting storages, from now until they are freed."""
        for tensor in tensors:
            self._see(tensor.untyped_storage())

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Exclude what this thread allocates in the block."""
        self._looks = False
        try:
            yield
        finally:
            self._looks = True

    def restart_peak(self) -> None:
        """Reset the peak to the current bytes."""
        with self._lock:
            self.peak_bytes = self.now_bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, then count the storages of its results."""
        result = func(*args, **(kwargs or {}))
        if not self._looks:
            return result
        for tensor in _tensors(result):
            if tensor.device.type == self._device_type:
                storage = tensor.untyped_storage()
                identity = storage_identity(storage)
                # A view of a storage from before the block is no allocation.
                if identity in self._live or not any(
                    storage_identity(given.untyped_storage()) == identity for given in _tensors((args, kwargs))
                ):
                    self._see(storage)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        """Count `storage`, or update the size of a resized one."""
        identity, num_bytes = storage_identity(storage), storage.nbytes()
        with self._lock:
            known = self._live.get(identity)
            if known is None:
                reference = weakref.ref(storage, lambda _: self._forget(identity))
                before = 0
            else:
                reference, before = known
            self._live[identity] = reference, num_bytes
            self.now_bytes += num_bytes - before
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _forget(self, identity: int) -> None:
        with self._lock:
            _, num_bytes = self._live.pop(identity)
            self.now_bytes -= num_bytes


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors among the arguments or results of an operation, which nest nothing but lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Identity that is unique among live storages; data addresses are not, as empty storages share one."""
    return int(storage._cdata)  # noqa: SLF001 - torch has no public name for it
