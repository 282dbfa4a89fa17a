"""A forward on weights that no longer exist during its backward (`predict`, `spectrain`; `policies.md`).

The predicted weights Ŵ exist for one forward. Wherever the backward reads a weight, it must read the current one
(PipeOptim; `policies.md`): every tensor that an operation saves from the storage of Ŵ is recorded by its position, and
unpacked from the same position in the storage of the current weights. This covers weights and their views: transposes,
slices, parts of a fused matrix, two uses of one weight.

Every other saved tensor is an activation and keeps the value computed on Ŵ, even if it derives from weights alone:
weight * mask, a dtype conversion (autocast), contiguous() of a transpose, weight normalisation, and the block into
which cuDNN copies the weights of a recurrent layer, so that on GPUs the backward of `nn.LSTM` and similar modules reads
Ŵ.

Not supported are layers that need Ŵ later outside autograd (a view of a weight kept as an attribute), that save weights
under their own hooks (`save_on_cpu`; `torch.utils.checkpoint` is fine, as it saves none), or that use `torch.func.grad`
and similar functions, which do not run under hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hetpipe.errors import CallableError
from hetpipe.pipeline.saved_tensors import Packed, keep, refuses_hooks, saving_with, storage_address, stored_view


class _Storage:
    """The storage that saved positions refer to: that of the current weights, once a backward sets it."""

    def __init__(self) -> None:
        self._bytes: torch.UntypedStorage | None = None
        self._whole: dict[torch.dtype, Tensor] = {}

    def point_at(self, weight: Tensor) -> None:
        """Refer to the storage of `weight` from now on."""
        self._bytes = weight.untyped_storage()
        self._whole.clear()

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The whole storage as a vector."""
        found = self._whole.get(dtype)
        if found is None:
            assert self._bytes is not None, "a backward began without Remapping.read_from"
            found = self._whole[dtype] = torch.empty(0, dtype=dtype, device=self._bytes.device).set_(self._bytes)
        return found


class Remapping:
    """Context of one forward on weights that do not outlive it; redirects the reads of its backward.

    After the block, nothing refers to the storage of those weights: it may be overwritten or freed. The graph holds the
    leaves themselves, as the tensors whose gradients are requested; they are emptied (through `leaf.data`, as in
    `nn.Module.to` and FSDP) until `read_from` fills them with the current weights.

    Single use, single thread.
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        """Prepare a forward on `leaves` (by parameter name): they require gradients and are views of one buffer."""
        self._leaves = leaves
        first = next(iter(leaves.values()), None)
        self._address = None if first is None else storage_address(first)
        self._current = _Storage()
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> Self:
        """Start packing."""
        self._hooks = saving_with(self.pack)
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Stop packing, and release the weights.

        Raises:
            CallableError: a layer used an operation that torch does not support under hooks.
        """
        assert self._hooks is not None, "left before it was entered"
        self._hooks.__exit__()
        self._hooks = None
        for name, leaf in self._leaves.items():
            assert storage_address(leaf) == self._address, f"{name} is not in the buffer of the other weights"
            leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        if error is not None and refuses_hooks(error):
            raise CallableError(
                "model: a layer uses torch.func.grad or a similar function, which cannot run on predicted weights; "
                "compute it with torch.autograd.grad, or choose weights that are not predicted, such as stash"
            ) from error

    def pack(self, tensor: Tensor) -> Packed:
        """Replace `tensor` by the object to keep in the graph."""
        if self._address is None or storage_address(tensor) != self._address:
            return keep(tensor)
        return stored_view(tensor, self._current)

    def apart(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copy those of `outputs` that share the storage of the weights, because they outlive it."""
        return tuple(
            output.clone() if self._address is not None and storage_address(output) == self._address else output
            for output in outputs
        )

    def read_from(self, weights: Mapping[str, Tensor]) -> None:
        """Make the following backward read `weights`, which are in one buffer of the same layout."""
        for name, leaf in self._leaves.items():
            leaf.data = weights[name].detach()
        if weights:
            self._current.point_at(next(iter(weights.values())))
