"""The job's key `init_from`: the initial weights of a run from a run, a checkpoint or a safetensors file.

Weights and buffers only: the optimizer, the clock and the ledger of samples begin anew. Strict: every tensor of the
model is in the source, with its shape, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hetpipe.checkpoint.export import read_checkpoint_state, read_trained_state
from hetpipe.checkpoint.manifest import MANIFEST
from hetpipe.errors import CheckpointError, UserError
from hetpipe.values.storage_url import is_url

#: Most tensors that a message names.
_MAX_NAMED = 5


def load_initial_weights(model: nn.Module, source: str, folder: Path) -> None:
    """Load the weights of `source` into `model`; draws no random numbers.

    Args:
        model: as built by the job's `model`.
        source: see the job's key `init_from`.
        folder: of a relative path.

    Raises:
        UserError: it cannot be read, or does not fit the model.
    """
    tensors = _read(source, folder)
    _check_fit(model.state_dict(), tensors, source)
    model.load_state_dict(tensors)


def _read(source: str, folder: Path) -> Mapping[str, Tensor]:
    place = source if is_url(source) else str(folder / source)
    try:
        if is_url(source):
            return read_trained_state(place).tensors
        if not Path(place).exists():
            raise FileNotFoundError(f"there is nothing of that name in {folder}")
        if Path(place).is_file():
            return load_file(place)
        if (Path(place) / MANIFEST).exists():
            return read_checkpoint_state(place).tensors
        return read_trained_state(place).tensors
    except (CheckpointError, OSError, SafetensorError) as error:
        raise UserError(
            f"init_from: {source} cannot be read: {error}; give the folder or URL of a run, the folder of one of its "
            "checkpoints, or a file *.safetensors"
        ) from error


def _check_fit(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], source: str) -> None:
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    unequal = [
        f"{name} is {_shape(given[name])} there and {_shape(tensor)} in the model"
        for name, tensor in wanted.items()
        if name in given and given[name].shape != tensor.shape
    ]
    problems = [
        *([f"it lacks {_named(missing)}"] if missing else []),
        *([f"the model has no {_named(unknown)}"] if unknown else []),
        *([_named(unequal, "; ")] if unequal else []),
    ]
    if problems:
        raise UserError(
            f"init_from: {source} does not fit the model: {'; '.join(problems)}; `hetpipe export` writes a file whose "
            "tensors can be renamed or left out"
        )


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a scalar"


def _named(names: Iterable[str], between: str = ", ") -> str:
    found = list(names)
    more = f"{between}and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return between.join(found[:_MAX_NAMED]) + more
