"""Export of a run's newest checkpoint as one safetensors file, with the model's own names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetpipe.checkpoint.manifest import newest_checkpoint, read_manifest
from hetpipe.durable import replacing
from hetpipe.errors import CheckpointError, UserError

_PREFIXES = ("weights/", "buffers/")


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export."""

    checkpoint: Path
    clock: int
    num_tensors: int
    num_bytes: int


def export_weights(run_dir: Path, out: Path) -> Exported:
    """Write `out` atomically, replacing an existing file.

    Raises:
        CheckpointError: the run has no complete checkpoint, or one of its files is corrupted.
        UserError: `out` cannot be written.
    """
    if out.is_dir():
        raise UserError(f"{out} is a folder; give a file name, for example {out / 'model.safetensors'}")
    checkpoint = newest_checkpoint(run_dir)
    manifest = read_manifest(checkpoint)
    # torch takes seconds to import, so only import it when it is needed.
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from torch import Tensor

    from hetpipe.checkpoint.format import CheckpointReader

    reader = CheckpointReader(checkpoint / file.name for file in manifest.shared_files)
    tensors: dict[str, Tensor] = {}
    for prefix in _PREFIXES:
        tensors |= {key.removeprefix(prefix): reader.tensor(key) for key in reader.keys(prefix)}
    if not tensors:
        raise CheckpointError(f"{checkpoint} contains no weights")
    try:
        with replacing(out.absolute()) as unfinished:
            save_file(tensors, unfinished, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {error}") from error
    return Exported(checkpoint, manifest.progress.clock, len(tensors), out.stat().st_size)
