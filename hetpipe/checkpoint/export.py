"""Export: the weights and buffers of a run's newest checkpoint as one safetensors file, by the model's own names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetpipe.checkpoint.manifest import newest_checkpoint, read_manifest
from hetpipe.durable import replacing
from hetpipe.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from torch import Tensor

_PREFIXES = ("weights/", "buffers/")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    checkpoint: Path
    clock: int
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TrainedState:
    """What a checkpoint holds of a model."""

    checkpoint: Path
    clock: int
    tensors: dict[str, Tensor]
    """As the model's `state_dict` names them: a tied weight under all of its names, each with memory of its own, and no
    buffer that is not persistent. Checkpoints of older versions have a tied weight under its first name only."""


def read_trained_state(run_dir: Path) -> TrainedState:
    """Read a run's newest complete checkpoint.

    Raises:
        CheckpointError: there is none, or a file of it is damaged.
    """
    checkpoint = newest_checkpoint(run_dir)
    manifest = read_manifest(checkpoint)
    # Torch takes seconds to import; by now it is known to be needed.
    from hetpipe.checkpoint.format import CheckpointReader

    reader = CheckpointReader(checkpoint / file.name for file in manifest.shared_files)
    tensors: dict[str, Tensor] = {}
    for prefix in _PREFIXES:
        for key in reader.keys(prefix):
            name = key.removeprefix(prefix)
            tensor = reader.tensor(key)
            for index, alias in enumerate(reader.state_names.get(name, (name,))):
                tensors[alias] = tensor.clone() if index else tensor
    if not tensors:
        raise CheckpointError(f"{checkpoint} holds no weights")
    return TrainedState(checkpoint, manifest.progress.clock, tensors)


def export_weights(run_dir: Path, out: Path) -> Exported:
    """Write `out`, whole or not at all; an older file there is replaced.

    Raises:
        CheckpointError: the run has no complete checkpoint, or a file of it is damaged.
        UserError: `out` cannot be written.
    """
    if out.is_dir():
        raise UserError(
            f"{out} is a folder; name the file to write, for example {out / 'model.safetensors'}, or write a Hugging "
            "Face model with --to hf"
        )
    state = read_trained_state(run_dir)
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with replacing(out.absolute()) as unfinished:
            save_file(state.tensors, unfinished, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {error}") from error
    return Exported(state.checkpoint, state.clock, len(state.tensors), out.stat().st_size)
