"""Export of a run's newest checkpoint as one safetensors file, with the model's own names."""

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
    """Result of an export."""

    checkpoint: Path
    clock: int
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TrainedState:
    """A model's tensors in a checkpoint."""

    checkpoint: Path
    clock: int
    tensors: dict[str, Tensor]
    """As the model's `state_dict` names them: a tied weight under all of its names, each with memory of its own, and no
    buffer that is not persistent. Checkpoints of older versions have a tied weight under its first name only."""


def read_trained_state(run_dir: Path) -> TrainedState:
    """Read a run's newest complete checkpoint.

    Raises:
        CheckpointError: there is none, or one of its files is corrupted.
    """
    checkpoint = newest_checkpoint(run_dir)
    manifest = read_manifest(checkpoint)
    # torch takes seconds to import, so only import it when it is needed.
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
        raise CheckpointError(f"{checkpoint} contains no weights")
    return TrainedState(checkpoint, manifest.progress.clock, tensors)


def export_weights(run_dir: Path, out: Path) -> Exported:
    """Write `out` atomically, replacing an existing file.

    Raises:
        CheckpointError: the run has no complete checkpoint, or one of its files is corrupted.
        UserError: `out` cannot be written.
    """
    if out.is_dir():
        raise UserError(
            f"{out} is a folder; give a file name, for example {out / 'model.safetensors'}, or write a Hugging "
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
