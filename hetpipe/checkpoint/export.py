"""Export of a run's newest checkpoint as one safetensors file, with the model's own names.

Both the run and the file may be in an object store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hetpipe.checkpoint.best import find_best
from hetpipe.checkpoint.locations import opened, search_at
from hetpipe.checkpoint.manifest import no_checkpoint
from hetpipe.durable import replacing
from hetpipe.errors import CheckpointError, UserError
from hetpipe.storage.objects import ObjectStore
from hetpipe.values.storage_url import checked_url, is_url

if TYPE_CHECKING:
    from torch import Tensor

_PREFIXES = ("weights/", "buffers/")


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export."""

    checkpoint: str
    clock: int
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TrainedState:
    """A model's tensors in a checkpoint."""

    checkpoint: str
    clock: int
    tensors: dict[str, Tensor] = field(repr=False)
    """As the model's `state_dict` names them: a tied weight under all of its names, each with memory of its own, and no
    buffer that is not persistent. Checkpoints of older versions have a tied weight under its first name only."""


def read_trained_state(run: str | Path, *, is_best: bool = False) -> TrainedState:
    """Read the newest complete checkpoint of a run, by its folder or URL; or its best one.

    Raises:
        CheckpointError: there is none, or one of its files is corrupted.
    """
    if is_best:
        if is_url(str(run)):
            raise CheckpointError(f"{run} is in an object store, where only the newest checkpoints are kept")
        return read_checkpoint_state(str(find_best(Path(run))[0]))
    found = search_at(str(run))
    if found.folder is None:
        raise no_checkpoint(str(run), found)
    return read_checkpoint_state(found.folder)


def read_checkpoint_state(folder: str) -> TrainedState:
    """Read one checkpoint, by its folder or URL.

    Raises:
        CheckpointError: it is incomplete, or one of its files is corrupted.
    """
    # torch takes seconds to import, so only import it when it is needed.
    from hetpipe.checkpoint.format import CheckpointReader

    tensors: dict[str, Tensor] = {}
    with opened(folder) as checkpoint:
        manifest = checkpoint.manifest()
        reader = CheckpointReader(checkpoint.paths(manifest.shared_files))
        for prefix in _PREFIXES:
            for key in reader.keys(prefix):
                name = key.removeprefix(prefix)
                tensor = reader.tensor(key)
                for index, alias in enumerate(reader.state_names.get(name, (name,))):
                    tensors[alias] = tensor.clone() if index else tensor
    if not tensors:
        raise CheckpointError(f"{folder} contains no weights")
    return TrainedState(folder, manifest.progress.clock, tensors)


def export_weights(run: str | Path, out: str | Path, *, is_best: bool = False) -> Exported:
    """Write `out` atomically, replacing an existing file or object.

    Args:
        run: folder or URL of the run.
        out: the file or URL.
        is_best: of its best checkpoint instead of the newest.

    Raises:
        CheckpointError: the run has no complete checkpoint, or one of its files is corrupted.
        UserError: `out` cannot be written.
    """
    if not is_url(str(out)):
        return _export(run, Path(out), str(out), is_best=is_best)
    try:
        place, _, name = checked_url(str(out)).rpartition("/")
        store = ObjectStore(place)
    except ValueError as error:
        raise UserError(f"cannot write {out}: {error}; give a URL like s3://BUCKET/model.safetensors") from error
    with TemporaryDirectory(prefix="hetpipe-export-") as folder:
        path = Path(folder) / name
        exported = _export(run, path, str(out), is_best=is_best)
        try:
            store.put_file(name, path)
        except OSError as error:
            raise UserError(f"cannot write {out}: {error}") from error
    return exported


def _export(run: str | Path, out: Path, shown: str, *, is_best: bool) -> Exported:
    if out.is_dir():
        raise UserError(
            f"{out} is a folder; give a file name, for example {out / 'model.safetensors'}, or write a Hugging "
            "Face model with --to hf"
        )
    state = read_trained_state(run, is_best=is_best)
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with replacing(out.absolute()) as unfinished:
            save_file(state.tensors, unfinished, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {shown}: {error}") from error
    return Exported(state.checkpoint, state.clock, len(state.tensors), out.stat().st_size)
