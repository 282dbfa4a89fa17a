"""A stage's part of a checkpoint: its contents, its writing at a barrier, and its restoration.

All contents have the model's own names, so neither the cut nor the number of parameter servers has to match that of the
checkpoint. Shared content (buffers, parameters that are not trained, and the weights where no parameter server holds
them) is written by the lowest virtual workers that pass the barrier, the keepers; optimizer state by every virtual
worker.

A resumed run restores everything; `layout.optimizer_source` selects the optimizer state. A virtual worker that rejoins
a run with checkpoints of its own restores only its own optimizer state, if available: it gets the weights from the
parameter servers, and the buffers from the other virtual workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hetpipe import failpoints
from hetpipe.checkpoint.format import SCALARS, CheckpointReader, OptimizerState, copy_exactly, save_part
from hetpipe.checkpoint.layout import LOSS_SCALE, NUM_KEEPERS, STATE_NAMES, PartLabel, optimizer_source
from hetpipe.checkpoint.locations import Checkpoint, opened
from hetpipe.checkpoint.manifest import Manifest, verify_file
from hetpipe.checkpoint.store import CheckpointStore
from hetpipe.checkpoint.uploads import PartUploads, ReportStagePart
from hetpipe.clock import Clock as TimeSource
from hetpipe.errors import CheckpointError, CheckpointNotWritten
from hetpipe.observe.log import get_logger
from hetpipe.storage.objects import RETRY_SECONDS
from hetpipe.values.ids import Clock, JobId, VirtualWorkerIndex
from hetpipe.values.requests import CheckpointFile
from hetpipe.values.run import StageConfig
from hetpipe.values.storage_url import is_below, is_url, run_url
from hetpipe.values.sync import SyncTraits

_log = get_logger(__name__)

#: Pause between polls for the completion of a checkpoint.
_PAUSE_SECONDS = 0.05

#: Pause before retrying to write the run's last checkpoint.
_RETRY_SECONDS = 1.0

#: Timeout of a leaving virtual worker for the others' parts: its next incarnation starts from the newest complete
#:#: checkpoint, but an agent that is shutting down cannot wait for long.
LEAVER_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContent:
    """A stage's contents for a checkpoint, by the model's names; `PartWriter` selects those for its file."""

    weights: Mapping[str, Tensor]
    """Empty where parameter servers hold them."""
    buffers: Mapping[str, Tensor]
    """Including parameters that are not trained."""
    optimizer: OptimizerState


@dataclass(frozen=True, slots=True)
class PartWriter:
    """Writes one stage's parts."""

    folder: Callable[[Clock], Path]
    """Folder of the checkpoint at a clock."""
    job_id: JobId
    name: str
    """Label of the stage's file."""
    state_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names in the model's `state_dict` of tensors that have several, or another one."""
    remote: CheckpointStore | None = None
    """The object store of the run's checkpoints; None: the folders are shared."""

    def write(self, clock: Clock, content: StageContent, *, is_keeper: bool) -> Path:
        """Write the part atomically and durably; returns its path.

        Args:
            clock: of the barrier.
            content: of the stage.
            is_keeper: whether its virtual worker writes the shared content.

        Raises:
            CheckpointNotWritten: the disk is full or broken.
        """
        tensors: dict[str, Tensor] = {}
        if is_keeper:
            tensors.update({f"weights/{key}": value for key, value in content.weights.items()})
            tensors.update({f"buffers/{key}": value for key, value in content.buffers.items()})
        scalars: dict[str, dict[str, float | int]] = {}
        for parameter, state in content.optimizer.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{parameter}/{key}"] = value
                else:
                    scalars.setdefault(parameter, {})[key] = value
        facts: dict[str, object] = {SCALARS: scalars}
        if is_keeper and self.state_names:
            facts[STATE_NAMES] = {name: list(names) for name, names in sorted(self.state_names.items())}
        return save_part(self.folder(clock), PartLabel(self.job_id, clock, self.name), tensors, facts)


# -- at a barrier ------------------------------------------------------------------------------------------------------


class SupervisedWait(Protocol):
    """A wait supervised like any other wait of the stage."""

    def __call__(self, reason: str, *, seconds: float, extra_seconds: float) -> None:
        """Wait for the given time; `extra_seconds` are added to the total time limit for `reason`.

        Raises:
            DeadlineExceeded: the total time limit was exceeded.
        """
        ...


def keepers_of(present: Iterable[VirtualWorkerIndex]) -> Sequence[VirtualWorkerIndex]:
    """The virtual workers that write the shared content, among those that pass the barrier."""
    return sorted(present)[:NUM_KEEPERS]


class StageCheckpoints:
    """One stage's checkpoints. A failed write costs the run only that checkpoint, unless it is the last one."""

    def __init__(
        self,
        writer: PartWriter,
        content: Callable[[], StageContent],
        *,
        report: ReportStagePart,
        rest: SupervisedWait,
        clock: TimeSource,
        last_checkpoint_seconds: float,
    ) -> None:
        """Create the writer of one stage's checkpoints.

        Args:
            writer: of the stage's files.
            content: of the stage, whose pipeline is drained.
            report: reports to the clock shard.
            rest: performs waits.
            clock: the time.
            last_checkpoint_seconds: `patience.last_checkpoint`.
        """
        self._writer = writer
        self._content = content
        self._report = report
        self._rest = rest
        self._clock = clock
        self._last_checkpoint_seconds = last_checkpoint_seconds
        self._uploads = None if writer.remote is None else PartUploads(writer.remote, report)

    def run(self, clock: Clock, *, is_keeper: bool, is_last: bool, leaves: bool = False) -> None:
        """Write and report this stage's part of the checkpoint at `clock`. The pipeline must be drained.

        Args:
            clock: of the barrier.
            is_keeper: whether its virtual worker writes the shared content.
            is_last: whether the run ends at this barrier; then this returns only when the checkpoint is complete.
            leaves: whether its virtual worker leaves the run here; then this waits for completion as well, but not for
                long.

        Raises:
            CheckpointNotWritten: the run's last checkpoint could not be written for `patience.last_checkpoint`.
            DeadlineExceeded: other stages did not write their parts in time.
        """
        extra_seconds = self._last_checkpoint_seconds if is_last else 0.0
        try:
            path = self._written(clock, is_keeper=is_keeper, extra_seconds=extra_seconds)
            if leaves:
                failpoints.reach("takeover.state_written")
            stays_until = inf if is_last else self._now + (LEAVER_SECONDS if leaves else 0.0)
            if self._uploads is not None and not self._is_uploaded(clock, path, stays_until, extra_seconds):
                return  # the upload continues in the background, and is reported from there
            while not self._report(clock, path) and self._now < stays_until:
                reason = f"the other parts of the checkpoint at clock {clock}"
                self._rest(reason, seconds=_PAUSE_SECONDS, extra_seconds=extra_seconds)
        except CheckpointNotWritten as error:
            _log.error("checkpoint_not_written", error=type(error).__name__, clock=clock, reason=str(error))
            if is_last:
                raise

    def _is_uploaded(self, clock: Clock, path: Path, stays_until: float, extra_seconds: float) -> bool:
        """Upload the part in the background; wait for it until `stays_until`, and return whether it is done.

        Raises:
            CheckpointNotWritten: it failed, and was reported.
        """
        assert self._uploads is not None, "the store is remote"
        upload = self._uploads.begin(
            clock, path, retry_seconds=max(RETRY_SECONDS, extra_seconds), is_last=stays_until == inf
        )
        while not upload.done():
            if self._now >= stays_until:
                return False
            reason = f"the upload of its part of the checkpoint at clock {clock}"
            self._rest(reason, seconds=_PAUSE_SECONDS, extra_seconds=extra_seconds)
        upload.result()
        return stays_until > self._now

    def _written(self, clock: Clock, *, is_keeper: bool, extra_seconds: float) -> Path:
        """Write this stage's file; for the run's last checkpoint with retries while the disk is full or broken."""
        until = self._now + extra_seconds
        while True:
            try:
                return self._writer.write(clock, self._content(), is_keeper=is_keeper)
            except CheckpointNotWritten as error:
                if self._now >= until:
                    self._report(clock, None, failure=str(error))
                    raise
                reason = f"disk space for the checkpoint that ends the run: {error}"
                self._rest(reason, seconds=_RETRY_SECONDS, extra_seconds=extra_seconds)

    @property
    def _now(self) -> float:
        return self._clock.monotonic()


# -- restoring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTargets:
    """Destinations of restored tensors in a stage. A tensor that is used twice is listed twice."""

    weights: Sequence[tuple[str, Tensor]]
    """The model's parameter name and the module's own tensor."""
    buffers: Sequence[tuple[str, Tensor]]
    """Including parameters that are not trained."""
    load_optimizer: Callable[[Mapping[str, Mapping[str, Any]]], None]
    """Restores the state of all parameters in `weights`, and that of the loss scale under `LOSS_SCALE`."""


def restore(config: StageConfig, targets: RestoreTargets, sync: SyncTraits, *, storage: str | None = None) -> Clock:
    """Restore the initial state of this stage.

    Args:
        config: of the stage.
        targets: where its state goes.
        sync: of the job.
        storage: the job's.

    Returns:
        The clock that the run starts from: 0, or the checkpoint's. Not meaningful for a rejoining stage.

    Raises:
        CheckpointError: the checkpoint to resume from is corrupted, or of another model or optimizer.
    """
    if config.restore is None:
        return Clock(0)
    with opened(config.restore, cache=Path(config.run_dir)) as checkpoint:
        if config.incarnation > 0 and _is_own(config, config.restore, storage):
            _take_own_state(config, checkpoint, targets)
            return Clock(0)
        manifest = checkpoint.manifest()
        shared = _reader(checkpoint, manifest, manifest.shared_files)
        for name, tensor in targets.weights:
            copy_exactly(tensor, shared.tensor(f"weights/{name}"), name)
        for name, tensor in targets.buffers:
            copy_exactly(tensor, shared.tensor(f"buffers/{name}"), name)
        is_shared = sync.averages_gradients
        source = optimizer_source(manifest.members, config.vw, is_shared=is_shared)
        targets.load_optimizer(_optimizer_state(checkpoint, manifest, source, targets))
        return manifest.progress.clock


def take_over(optimizer: Sequence[Path], shared: Sequence[Path], targets: RestoreTargets) -> None:
    """Load the state that another virtual worker left with, from its parts of the checkpoint of that barrier.

    Args:
        optimizer: its parts.
        shared: parts with the shared content, to load as well; empty: not needed.
        targets: where it goes.

    Raises:
        CheckpointError: a file is corrupted, or of another model or optimizer.
    """
    if shared:
        reader = CheckpointReader(shared)
        for name, tensor in targets.weights:
            copy_exactly(tensor, reader.tensor(f"weights/{name}"), name)
        for name, tensor in targets.buffers:
            copy_exactly(tensor, reader.tensor(f"buffers/{name}"), name)
    names = [*(name for name, _ in targets.weights), LOSS_SCALE]
    targets.load_optimizer(CheckpointReader(optimizer).optimizer_state(names))


def _is_own(config: StageConfig, restore: str, storage: str | None) -> bool:
    """Whether the checkpoint belongs to this run, and not to the one that it resumes."""
    if is_url(restore):
        return storage is not None and is_below(restore, run_url(storage, config.run_dir))
    return Path(restore).is_relative_to(config.run_dir)


def _take_own_state(config: StageConfig, newest: Checkpoint, targets: RestoreTargets) -> None:
    """Restore the optimizer state of this virtual worker's previous incarnation, if available.

    Checkpoints made during its absence do not contain it; then an earlier one does.
    """
    for candidate in (newest, *newest.older()):
        try:
            manifest = candidate.manifest()
            if config.vw in manifest.num_stages:
                targets.load_optimizer(_optimizer_state(candidate, manifest, config.vw, targets))
                return
        except CheckpointError as error:
            _log.warning("optimizer_state_not_read", reason=str(error))
    _log.warning("optimizer_state_begins_anew", vw=config.vw)


def _optimizer_state(
    checkpoint: Checkpoint, manifest: Manifest, source: VirtualWorkerIndex, targets: RestoreTargets
) -> dict[str, dict[str, Any]]:
    own = _reader(checkpoint, manifest, manifest.files_of(source))
    return own.optimizer_state([*(name for name, _ in targets.weights), LOSS_SCALE])


def _reader(checkpoint: Checkpoint, manifest: Manifest, files: Sequence[CheckpointFile]) -> CheckpointReader:
    """A reader that verifies each file against the manifest before its use."""
    known = checkpoint.paths(files)
    return CheckpointReader(known, check=lambda path: verify_file(path.parent, known[path], manifest))
