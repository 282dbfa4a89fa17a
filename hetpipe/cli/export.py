"""Export: the weights and buffers of a run's newest checkpoint as one safetensors file, by the model's own names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hetpipe.errors import CheckpointError, UserError
from hetpipe.ps.manifest import newest_checkpoint, read_manifest, sync_dir, verify_file

#: Virtual worker 0's files hold the weights and the buffers.
_WEIGHT_FILES = "vw-0-"
_PREFIXES = ("weights/", "buffers/")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    checkpoint: Path
    clock: int
    num_tensors: int
    num_bytes: int


def export_weights(run_dir: Path, out: Path) -> Exported:
    """Write `out`, whole or not at all; an older file there is replaced.

    Raises:
        CheckpointError: the run has no complete checkpoint, or a file of it is damaged.
        UserError: `out` cannot be written.
    """
    if out.is_dir():
        raise UserError(f"{out} is a folder; name the file to write, for example {out / 'model.safetensors'}")
    checkpoint = newest_checkpoint(run_dir)
    manifest = read_manifest(checkpoint)
    files = [file for file in manifest.files if file.name.startswith(_WEIGHT_FILES)]
    for file in files:
        verify_file(checkpoint, file)
    # Torch takes seconds to import; by now it is known to be needed.
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from torch import Tensor

    from hetpipe.pipeline.checkpoint import CheckpointReader

    reader = CheckpointReader(checkpoint / file.name for file in files)
    tensors: dict[str, Tensor] = {}
    for prefix in _PREFIXES:
        tensors |= {key.removeprefix(prefix): reader.tensor(key) for key in reader.keys(prefix)}
    if not tensors:
        raise CheckpointError(f"{checkpoint} holds no weights")
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        save_file(tensors, unfinished, metadata={"format": "pt"})
        with unfinished.open("rb+") as written:
            os.fsync(written.fileno())
        unfinished.replace(out)
        sync_dir(out.absolute().parent)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"cannot write {out}: {error}") from error
    return Exported(checkpoint, manifest.progress.clock, len(tensors), out.stat().st_size)
