"""The files of a checkpoint: safetensors in a canonical layout, by the model's own names.

Keys: `weights/NAME`, `buffers/NAME`, `optimizer/NAME/KEY`. Nothing in a file depends on the partition or on the number
of parameter servers, so other tools can read it. Non-tensor data is stored in the file's metadata: numbers of the
optimizer's state, which elements of its parameter a slice holds, and the file's label.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hetpipe.checkpoint.layout import FACTS, LABEL, SLICES, STATE_NAMES, PartLabel, StoredSlice
from hetpipe.durable import replacing
from hetpipe.errors import CheckpointError, CheckpointNotWritten, HetpipeError
from hetpipe.failpoints import reach
from hetpipe.values import wire

OptimizerState = Mapping[str, Mapping[str, Tensor | float | int]]

#: Metadata key for the facts beside `LABEL` and `SLICES`: numbers of the optimizer's state. Version 1 stores them
#: directly in the file's metadata.
SCALARS = "optimizer_scalars"


def save_slices(folder: Path, label: PartLabel, pieces: Sequence[tuple[StoredSlice, Tensor]]) -> Path:
    """Write a shard's part atomically and durably; returns its path. Failpoints are reached on the way.

    Raises:
        CheckpointNotWritten: the disk is full or broken.
    """
    tensors: dict[str, Tensor] = {}
    cut: dict[str, Any] = {}
    for piece, tensor in pieces:
        if tensor.numel() == torch.Size(piece.shape).numel():
            tensors[f"weights/{piece.parameter}"] = tensor.view(piece.shape)
        else:
            tensors[piece.key] = tensor
            cut[piece.key] = wire.plain(StoredSlice, piece)
    return save_part(folder, label, tensors, {SLICES: cut}, points="snapshot")


def save_part(
    folder: Path, label: PartLabel, tensors: Mapping[str, Tensor], facts: Mapping[str, object], *, points: str = ""
) -> Path:
    """Write one file atomically and durably; returns its path.

    Args:
        folder: of the checkpoint.
        label: the identity stored in the file, including its name.
        tensors: key → tensor.
        facts: non-tensor data, as JSON values.
        points: prefix of the failpoints on the way; empty: none.

    Raises:
        CheckpointNotWritten: the disk is full or broken.
    """
    path = folder / label.name
    plain = _apart(tensors)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path, points=points) as temporary:
            if points:
                reach(f"{points}.temp_open")
            metadata = {LABEL: wire.plain(PartLabel, label), **facts}
            save_file(plain, temporary, metadata={FACTS: json.dumps(metadata)})
    except (OSError, SafetensorError, HetpipeError) as error:  # the last one only in tests
        raise CheckpointNotWritten(
            f"{path} cannot be written: {error}; free disk space there, or use another disk"
        ) from error
    return path


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values on the CPU, contiguous, each in a storage of its own, as safetensors requires.

    Views of a flat buffer get a storage over the part of its memory that they view: a copy would be as large as the
    model. The result is therefore valid only as long as `tensors` are, and must not be modified. Aliases are copied.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, value in tensors.items():
        plain = value.detach().cpu().contiguous()
        if plain.data_ptr() in seen:
            plain = plain.clone()
        elif plain.nbytes != plain.untyped_storage().nbytes():
            memory = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else None
            plain = plain.clone() if memory is None else torch.frombuffer(memory, dtype=plain.dtype).view(plain.shape)
        seen.add(plain.data_ptr())
        found[key] = plain
    return found


class CheckpointReader:
    """Looks up tensors by name in the files of a checkpoint."""

    def __init__(self, paths: Iterable[Path], check: Callable[[Path], None] | None = None) -> None:
        """Index the files.

        Args:
            paths: the files.
            check: called once with each file before it is used; raises CheckpointError.

        Raises:
            CheckpointError: one of them is not a safetensors file of a checkpoint.
        """
        self._check = check
        self._checked: set[Path] = set()
        self._where: dict[str, Path] = {}
        self._pieces: dict[str, list[tuple[StoredSlice, Path]]] = {}
        self._scalars: dict[str, tuple[dict[str, float | int], Path]] = {}
        #: Names in the model's `state_dict` of tensors that have several, or another one.
        self.state_names: dict[str, tuple[str, ...]] = {}
        for path in paths:
            try:
                self._verify(path)
            except Exception as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error

    def _verify(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            facts = json.loads(metadata[FACTS]) if FACTS in metadata else {}
            for key, piece in facts.get(SLICES, {}).items():
                found: StoredSlice = wire.revive(StoredSlice, piece)
                if key != found.key:
                    raise CheckpointError(f"{key} is stored as {found.key}")
                self._pieces.setdefault(found.whole, []).append((found, path))
            for name, names in facts.get(STATE_NAMES, {}).items():
                self.state_names[str(name)] = tuple(map(str, names))
            for key in file.keys():  # noqa: SIM118 - not a mapping
                self._where.setdefault(key, path)
            scalars = facts.get(SCALARS) or json.loads(metadata.get(SCALARS, "{}"))
            for name, values in scalars.items():
                self._scalars.setdefault(name, (values, path))

    def tensor(self, key: str) -> Tensor:
        """Read the tensor `key`; slices are joined.

        Raises:
            CheckpointError: it does not exist, or its slices are incomplete.
        """
        if key in self._pieces and key not in self._where:
            return self._put_together(key, sorted(self._pieces[key], key=lambda entry: entry[0].start))
        path = self._where.get(key)
        if path is None:
            raise CheckpointError(f"the checkpoint has no {key}; it may belong to another model")
        return self._read(path, key)

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, in order; slices are listed as the whole tensor."""
        pieces = {piece.key for entries in self._pieces.values() for piece, _ in entries}
        return sorted(key for key in (self._where.keys() - pieces) | self._pieces.keys() if key.startswith(prefix))

    def optimizer_state(self, parameters: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The optimizer's state for the given parameters."""
        state: dict[str, dict[str, Any]] = {}
        for name in parameters:
            prefix = f"optimizer/{name}/"
            entries: dict[str, Any] = {}
            if name in self._scalars:
                values, path = self._scalars[name]
                self._use(path)
                entries.update(values)
            entries.update({key.removeprefix(prefix): self.tensor(key) for key in self.keys(prefix)})
            state[name] = entries
        return state

    def _use(self, path: Path) -> None:
        if self._check is not None and path not in self._checked:
            self._check(path)
            self._checked.add(path)

    def _read(self, path: Path, key: str) -> Tensor:
        self._use(path)
        try:
            with safe_open(path, framework="pt") as file:
                found: Tensor = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return found

    def _put_together(self, key: str, entries: Sequence[tuple[StoredSlice, Path]]) -> Tensor:
        shape, end = entries[0][0].shape, 0
        parts: list[Tensor] = []
        for piece, path in entries:
            part = self._read(path, piece.key)
            fits = piece.shape == shape and piece.start == end and part.shape == (piece.stop - piece.start,)
            if not fits or part.dtype != (parts or [part])[0].dtype:
                raise CheckpointError(
                    f"{path} has {piece.key} as {list(part.shape)} {part.dtype}, which does not match"
                )
            parts.append(part)
            end = piece.stop
        if end != torch.Size(shape).numel():
            raise CheckpointError(f"the checkpoint has {key} only up to element {end} of {torch.Size(shape).numel()}")
        return torch.cat(parts).view(shape)


def copy_exactly(target: Tensor, source: Tensor, name: str) -> None:
    """Copy `source` into `target`.

    Raises:
        CheckpointError: shape or dtype differ.
    """
    if target.shape != source.shape or target.dtype != source.dtype:
        raise CheckpointError(
            f"{name} is {list(source.shape)} {source.dtype} in the checkpoint, "
            f"{list(target.shape)} {target.dtype} in the model"
        )
    with torch.no_grad():
        target.copy_(source)
