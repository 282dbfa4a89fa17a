"""Saved tensors of one minibatch that are in host memory between its forward and its backward (`memory-policy.md` §4).

A storage moves once, however many operations have saved it or a part of it. Weights, buffers and the inputs of the
stage are not moved: they stay on the device anyway.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hetpipe.pipeline.host_link import HostLink, Transfer
from hetpipe.pipeline.saved_tensors import (
    Kept,
    Pack,
    Packed,
    modified_in_place,
    storage_address,
    stored_view,
    version_of,
)


class SwappedStorage:
    """A storage that saved tensors of swapped layers refer to."""

    def __init__(self, tensor: Tensor) -> None:
        """Hold the storage of `tensor` on the device until `leave`."""
        self._tensor: Tensor | None = tensor.detach()
        self._version = version_of(tensor)
        self._out: Transfer | None = None
        self._back: Transfer | None = None
        self._whole: dict[torch.dtype, Tensor] = {}

    def leave(self, link: HostLink) -> Transfer:
        """Start to move it to host memory.

        Raises:
            CallableError: it was modified in place after an operation had saved it.
        """
        tensor = self._tensor
        assert tensor is not None, "it leaves once"
        if version_of(tensor) != self._version:
            raise modified_in_place(tensor)
        self._out, self._tensor = link.take_out(_bytes_of(tensor.untyped_storage())), None
        return self._out

    def come_back(self, link: HostLink) -> None:
        """Start to move it back to the device."""
        assert self._out is not None, "it comes back once, after it has left"
        self._back, self._out = link.bring_back(self._out.destination), None

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The whole storage as a vector, after its return."""
        found = self._whole.get(dtype)
        if found is None:
            assert self._back is not None, "a backward began before its tensors were asked for"
            self._back.wait()
            storage = self._back.destination.untyped_storage()
            found = self._whole[dtype] = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
        return found


class SwappedTensors:
    """Tensors of one minibatch that the swapped layers of a stage have saved."""

    def __init__(self, link: HostLink, staying: Iterable[Tensor]) -> None:
        """Move tensors over `link`, but those that share memory with one of `staying`."""
        self._link = link
        self._staying = {storage_address(tensor) for tensor in staying} | {None}
        #: Address of a storage → the storage. All are alive until `leave`, so that addresses are unique.
        self._swapped: dict[int, SwappedStorage] = {}
        self._kept: dict[int | None, Kept] = {}
        self._is_back = False

    def swap(self, outer: Pack) -> Pack:
        """The pack function of a swapped layer; `outer` packs what is not moved."""

        def pack(tensor: Tensor) -> Packed:
            address = storage_address(tensor)
            if address is None or address in self._staying or address in self._kept:
                return outer(tensor)
            storage = self._swapped.get(address)
            if storage is None:
                storage = self._swapped[address] = SwappedStorage(tensor)
            return stored_view(tensor, storage)

        return pack

    def keep(self, outer: Pack) -> Pack:
        """The pack function of a kept layer: tensors also saved by a swapped layer before it move with that one's."""

        def pack(tensor: Tensor) -> Packed:
            address = storage_address(tensor)
            if address in self._swapped:
                return stored_view(tensor, self._swapped[address])
            packed = outer(tensor)
            if isinstance(packed, Kept):
                self._kept[address] = packed
            return packed

        return pack

    def leave(self) -> Transfer | None:
        """Start to move everything to host memory, after the forward; returns the last transfer."""
        self._kept.clear()
        last = None
        for storage in self._swapped.values():
            last = storage.leave(self._link)
        return last

    def come_back(self) -> None:
        """Start to move everything back, unless that has begun: the last layer's first, which are needed first."""
        if self._is_back:
            return
        self._is_back = True
        for storage in reversed(self._swapped.values()):
            storage.come_back(self._link)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
