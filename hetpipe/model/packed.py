"""Entries of a minibatch that are not one tensor, such as a list of boxes, as one vector of bytes.

Links, layers and proofs know a minibatch as a fixed number of tensors. Such an entry has another number of them in each
minibatch, so it is packed where the minibatch is read, and unpacked where the model is called: to everything in
between it is an integer input. The vector is a magic number, the length of the header, the header (JSON: the structure,
then per leaf a number, or dtype and shape of a tensor), and the bytes of the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hetpipe.errors import CallableError
from hetpipe.model.structure import Number, is_opaque, put_together, take_apart
from hetpipe.model.structure_text import NotDescribable, plain_skeleton, skeleton_of

#: Begins every packed entry.
_MAGIC = bytes.fromhex("d3a1c97c6e4b42f09b1f58e0a7c36d15")
#: Bytes of the length that follows it.
_LENGTH = 8
_HEADER_AT = len(_MAGIC) + _LENGTH


def pack(value: Any) -> Tensor:
    """Pack nested tuples, lists, mappings and dataclasses of tensors, numbers, texts and None.

    Raises:
        NotDescribable: it contains something else.
    """
    leaves, skeleton = take_apart(value, ())
    if is_opaque(skeleton) or any(leaf.layout is not torch.strided for leaf in leaves if isinstance(leaf, Tensor)):
        raise NotDescribable("an object other than a dense tensor, a number, a text or a container of these")
    header = json.dumps([plain_skeleton(skeleton), [_plain(leaf) for leaf in leaves]]).encode()
    start = _MAGIC + len(header).to_bytes(_LENGTH, "little") + header
    tensors = (leaf.detach().contiguous().reshape(-1).view(torch.uint8) for leaf in leaves if isinstance(leaf, Tensor))
    return torch.cat([torch.frombuffer(bytearray(start), dtype=torch.uint8), *tensors])


def unpack(tensor: Tensor) -> Any:
    """Unpack what `pack` has packed, on the device of `tensor`; any other tensor is returned as it is.

    Raises:
        CallableError: a packed entry is damaged, or of a type that this process has not imported.
    """
    if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or not _begins_packed(tensor):
        return tensor
    end = _HEADER_AT + int.from_bytes(bytes(tensor[len(_MAGIC) : _HEADER_AT].tolist()), "little")
    try:
        structure, plain = json.loads(bytes(tensor[_HEADER_AT:end].tolist()))
        leaves: list[Tensor | Number] = []
        for leaf in plain:
            if isinstance(leaf, list):
                dtype, shape = getattr(torch, leaf[0]), leaf[1:]
                start, end = end, end + math.prod(shape) * dtype.itemsize
                # A copy: a write in place concerns this tensor only, and views need aligned memory.
                leaves.append(tensor[start:end].clone().view(dtype).reshape(shape))
            else:
                leaves.append(leaf)
        return put_together(skeleton_of(structure), iter(leaves), ())
    except (NotDescribable, ValueError, TypeError, KeyError, AttributeError, RuntimeError, StopIteration) as error:
        raise CallableError(f"model: a packed entry of a minibatch cannot be unpacked: {error}") from error


def entries_text(tensors: Mapping[str, Tensor]) -> str:
    """The entries of a minibatch as text, by shapes: `input_ids [4, 9], boxes (list)`, `input 0 [4, 3]`."""
    found = {f"input {name}" if name.isdigit() else name: unpack(tensor) for name, tensor in tensors.items()}
    return ", ".join(
        f"{name} {list(value.shape)}" if isinstance(value, Tensor) else f"{name} ({type(value).__name__})"
        for name, value in found.items()
    )


def _plain(leaf: Tensor | Number) -> Number | list[str | int]:
    if isinstance(leaf, Tensor):
        return [str(leaf.dtype).removeprefix("torch."), *leaf.shape]
    return leaf


def _begins_packed(tensor: Tensor) -> bool:
    return len(tensor) >= _HEADER_AT and bytes(tensor[: len(_MAGIC)].tolist()) == _MAGIC
