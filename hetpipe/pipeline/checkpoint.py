"""One stage's part of a checkpoint: a safetensors file in a canonical layout, by the model's own names.

Keys: `weights/NAME` and `buffers/NAME` (virtual worker 0 only), `optimizer/NAME/KEY` (every virtual worker's own).
Nothing in it depends on the partition, so another one can read it. What is no tensor goes into the file's metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hetpipe.errors import CheckpointError
from hetpipe.spec.ids import StageIndex, VirtualWorkerIndex

OptimizerState = Mapping[str, Mapping[str, Tensor | float | int]]

_SCALARS = "optimizer_scalars"


def file_name(vw: VirtualWorkerIndex, stage: StageIndex) -> str:
    """The file of one stage."""
    return f"vw-{vw}-stage-{stage}.safetensors"


def save_part(
    folder: Path, name: str, *, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], optimizer: OptimizerState
) -> Path:
    """Write a part durably, whole or not at all; returns its path."""
    tensors: dict[str, Tensor] = {}
    tensors.update({f"weights/{key}": value for key, value in weights.items()})
    tensors.update({f"buffers/{key}": value for key, value in buffers.items()})
    scalars: dict[str, dict[str, float | int]] = {}
    for parameter, state in optimizer.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{parameter}/{key}"] = value
            else:
                scalars.setdefault(parameter, {})[key] = value
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    temporary = folder / f"{name}.tmp"
    plain = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    save_file(plain, temporary, metadata={_SCALARS: json.dumps(scalars)})
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


class CheckpointReader:
    """Finds tensors by name in the files of a checkpoint."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Open the files.

        Raises:
            CheckpointError: one of them is no safetensors file.
        """
        self._where: dict[str, Path] = {}
        self._scalars: dict[str, dict[str, float | int]] = {}
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    self._where.update(dict.fromkeys(file.keys(), path))
                    self._scalars.update(json.loads((file.metadata() or {}).get(_SCALARS, "{}")))
            except Exception as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error

    def tensor(self, key: str) -> Tensor:
        """The tensor stored under `key`.

        Raises:
            CheckpointError: there is none.
        """
        path = self._where.get(key)
        if path is None:
            raise CheckpointError(f"the checkpoint has no {key}; is it of another model?")
        with safe_open(path, framework="pt") as file:
            found: Tensor = file.get_tensor(key)
        return found

    def keys(self, prefix: str) -> list[str]:
        """The stored keys that begin with `prefix`, in order."""
        return sorted(key for key in self._where if key.startswith(prefix))

    def optimizer_state(self, parameters: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The optimizer's state for the given parameters."""
        state: dict[str, dict[str, Any]] = {}
        for name in parameters:
            prefix = f"optimizer/{name}/"
            entries: dict[str, Any] = dict(self._scalars.get(name, {}))
            entries.update({key.removeprefix(prefix): self.tensor(key) for key in self.keys(prefix)})
            state[name] = entries
        return state


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
