"""What a stage begins with when it does not begin anew: its part of a checkpoint.

A run that is resumed takes weights, buffers and optimizer state, by the model's own names, so neither the cut nor the
number of parameter servers has to be that of the checkpoint; `spec.checkpoint.optimizer_source` says whose optimizer
state. A virtual worker that comes back to a run which has a checkpoint of its own takes only its own optimizer state,
if there is one: the weights it gets from the parameter servers, the buffers from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetpipe.checkpoint.format import CheckpointReader, copy_exactly
from hetpipe.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify_file
from hetpipe.errors import CheckpointError
from hetpipe.job.file import Job
from hetpipe.observe.log import get_logger
from hetpipe.pipeline.chain import Layer
from hetpipe.values.checkpoint import optimizer_source
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.requests import CheckpointFile
from hetpipe.values.run import StageConfig
from hetpipe.values.sync import SYNC_KINDS
from hetpipe.weights.optimizer import StageOptimizer

_log = get_logger(__name__)


def restore(job: Job, config: StageConfig, layers: Sequence[Layer], optimizer: StageOptimizer) -> Clock:
    """Load what this stage begins with into its layers and its optimizer.

    Returns:
        The clock that the run starts from: 0, or the checkpoint's. It means nothing to a stage that comes back.

    Raises:
        CheckpointError: the checkpoint to resume from is damaged, or of another model or optimizer.
    """
    if config.restore is None:
        return Clock(0)
    folder = Path(config.restore)
    if config.incarnation > 0 and folder.is_relative_to(config.run_dir):
        _take_own_state(config, folder, layers, optimizer)
        return Clock(0)
    manifest = read_manifest(folder)
    shared = _reader(folder, manifest, manifest.shared_files)
    for layer in layers:
        for local, name in layer.parameters.items():
            copy_exactly(layer.module.get_parameter(local), shared.tensor(f"weights/{name}"), name)
        for local, name in layer.frozen.items():
            copy_exactly(layer.module.get_parameter(local), shared.tensor(f"buffers/{name}"), name)
        for local, name in layer.buffers.items():
            copy_exactly(layer.module.get_buffer(local), shared.tensor(f"buffers/{name}"), name)
    is_shared = SYNC_KINDS[job.sync.kind].averages_gradients
    source = optimizer_source(manifest.members, config.vw, is_shared=is_shared)
    optimizer.load_state(_optimizer_state(folder, manifest, source, layers))
    return manifest.progress.clock


def _take_own_state(config: StageConfig, folder: Path, layers: Sequence[Layer], optimizer: StageOptimizer) -> None:
    """Load the optimizer state of this virtual worker's earlier life; where there is none to be had, go without.

    While it was away, checkpoints may have been made without it: then it is in an earlier one.
    """
    for candidate in (folder, *_others(folder)):
        try:
            manifest = read_manifest(candidate)
            if config.vw in manifest.num_stages:
                optimizer.load_state(_optimizer_state(candidate, manifest, config.vw, layers))
                return
        except CheckpointError as error:
            _log.warning("optimizer_state_not_read", reason=str(error))
    _log.warning("optimizer_state_begins_anew", vw=config.vw)


def _others(folder: Path) -> list[Path]:
    """The complete checkpoints before this one, newest first; all there are where a newer one has replaced it."""
    complete = [path.parent for path in folder.parent.glob(f"clock-*/{MANIFEST}")]
    return sorted((path for path in complete if path < folder or not folder.exists()), reverse=True)


def _optimizer_state(
    folder: Path, manifest: Manifest, source: VirtualWorkerIndex, layers: Sequence[Layer]
) -> dict[str, dict[str, Any]]:
    own = _reader(folder, manifest, manifest.files_of(source))
    return own.optimizer_state(name for layer in layers for name in layer.parameters.values())


def _reader(folder: Path, manifest: Manifest, files: Sequence[CheckpointFile]) -> CheckpointReader:
    """A reader that checks each file against the manifest before it uses it."""
    known = {folder / file.name: file for file in files}
    return CheckpointReader(known, check=lambda path: verify_file(folder, known[path], manifest))
