"""A stage's part of a checkpoint: what is in it, how it is written at a barrier, and what a stage restores from it.

Everything is called by the model's own names, so neither the cut nor the number of parameter servers has to be that of
the checkpoint. What is the same for all virtual workers (buffers, parameters that are not trained, and the weights
where no parameter server holds them) is written by the lowest ones that pass the barrier, the keepers; the optimizer's
state by each.

A run that is resumed takes all of it; `layout.optimizer_source` says whose optimizer state. A virtual worker that comes
back to a run which has a checkpoint of its own takes only its own optimizer state, if there is one: the weights it gets
from the parameter servers, the buffers from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hetpipe.checkpoint.format import SCALARS, CheckpointReader, OptimizerState, copy_exactly, save_part
from hetpipe.checkpoint.layout import NUM_KEEPERS, STATE_NAMES, PartLabel, optimizer_source
from hetpipe.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify_file
from hetpipe.clock import Clock as TimeSource
from hetpipe.errors import CheckpointError, CheckpointNotWritten
from hetpipe.observe.log import get_logger
from hetpipe.values.ids import Clock, JobId, VirtualWorkerIndex
from hetpipe.values.requests import CheckpointFile
from hetpipe.values.run import StageConfig
from hetpipe.values.sync import SyncTraits

_log = get_logger(__name__)

#: Pause before asking again whether a checkpoint is complete.
_PAUSE_SECONDS = 0.05

#: Pause before writing the run's last checkpoint again.
_RETRY_SECONDS = 1.0

#: How long who leaves stays for the others' parts: its next life begins with the newest complete checkpoint, but an
#: agent that is to end does not wait for long.
LEAVER_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContent:
    """What a stage has for a checkpoint, by the model's names; `PartWriter` says which of it goes into its file."""

    weights: Mapping[str, Tensor]
    """Empty where parameter servers hold them."""
    buffers: Mapping[str, Tensor]
    """And parameters that are not trained."""
    optimizer: OptimizerState


@dataclass(frozen=True, slots=True)
class PartWriter:
    """Writes one stage's parts."""

    folder: Callable[[Clock], Path]
    """Of the checkpoint at a clock."""
    job_id: JobId
    name: str
    """Of the stage's file."""
    state_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What the model's `state_dict` calls a tensor, where that is not its one name."""

    def write(self, clock: Clock, content: StageContent, *, is_keeper: bool) -> Path:
        """Write the part durably, whole or not at all; returns its path.

        Args:
            clock: of the barrier.
            content: of the stage.
            is_keeper: whether its virtual worker writes what is the same for all.

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


class ReportStagePart(Protocol):
    """Tell the clock shard of a stage's part; see `Synchroniser.report_checkpoint`."""

    def __call__(self, clock: Clock, path: Path | None, *, failure: str = "") -> bool:
        """Returns whether all parts are there."""
        ...


class Rest(Protocol):
    """Wait, watched like any other wait of the stage."""

    def __call__(self, reason: str, *, seconds: float, extra_seconds: float) -> None:
        """Wait for so long; `extra_seconds` are added to what waits for `reason` may take in all.

        Raises:
            DeadlineExceeded: they took longer.
        """
        ...


def keepers_of(present: Iterable[VirtualWorkerIndex]) -> Sequence[VirtualWorkerIndex]:
    """Who writes what is the same for all, of those who pass the barrier."""
    return sorted(present)[:NUM_KEEPERS]


class StageCheckpoints:
    """One stage's work for checkpoints. What cannot be written costs the run that checkpoint, unless it ends there."""

    def __init__(
        self,
        writer: PartWriter,
        content: Callable[[], StageContent],
        *,
        report: ReportStagePart,
        rest: Rest,
        clock: TimeSource,
        last_checkpoint_seconds: float,
    ) -> None:
        """Prepare.

        Args:
            writer: of the stage's files.
            content: of the stage, whose pipeline is drained.
            report: tells the clock shard.
            rest: waits.
            clock: the time.
            last_checkpoint_seconds: `patience.last_checkpoint`.
        """
        self._writer = writer
        self._content = content
        self._report = report
        self._rest = rest
        self._clock = clock
        self._last_checkpoint_seconds = last_checkpoint_seconds

    def run(self, clock: Clock, *, is_keeper: bool, is_last: bool, leaves: bool = False) -> None:
        """Write and report this stage's part of the checkpoint at `clock`. The pipeline is drained.

        Args:
            clock: of the barrier.
            is_keeper: whether its virtual worker writes what is the same for all.
            is_last: whether the run ends at this barrier; then this returns when the checkpoint is complete.
            leaves: whether its virtual worker leaves the run here; then this waits for that, too, but not for long.

        Raises:
            CheckpointNotWritten: the run's last checkpoint could not be written for `patience.last_checkpoint`.
            DeadlineExceeded: the others did not write their parts of it in time.
        """
        extra_seconds = self._last_checkpoint_seconds if is_last else 0.0
        try:
            path = self._written(clock, is_keeper=is_keeper, extra_seconds=extra_seconds)
            stays_until = inf if is_last else self._now + (LEAVER_SECONDS if leaves else 0.0)
            while not self._report(clock, path) and self._now < stays_until:
                reason = f"the other parts of the checkpoint at clock {clock}"
                self._rest(reason, seconds=_PAUSE_SECONDS, extra_seconds=extra_seconds)
        except CheckpointNotWritten as error:
            _log.error("checkpoint_not_written", error=type(error).__name__, clock=clock, reason=str(error))
            if is_last:
                raise

    def _written(self, clock: Clock, *, is_keeper: bool, extra_seconds: float) -> Path:
        """The file of this stage; of the run's last checkpoint it is tried again while the disk is full or broken."""
        until = self._now + extra_seconds
        while True:
            try:
                return self._writer.write(clock, self._content(), is_keeper=is_keeper)
            except CheckpointNotWritten as error:
                if self._now >= until:
                    self._report(clock, None, failure=str(error))
                    raise
                reason = f"room for the checkpoint that ends the run: {error}"
                self._rest(reason, seconds=_RETRY_SECONDS, extra_seconds=extra_seconds)

    @property
    def _now(self) -> float:
        return self._clock.monotonic()


# -- at the beginning --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTargets:
    """Where a stage takes up what a checkpoint holds. A tensor that is there twice is named twice."""

    weights: Sequence[tuple[str, Tensor]]
    """The model's parameter name and the module's own tensor."""
    buffers: Sequence[tuple[str, Tensor]]
    """And parameters that are not trained."""
    load_optimizer: Callable[[Mapping[str, Mapping[str, Any]]], None]
    """Takes the state of every parameter among `weights`."""


def restore(config: StageConfig, targets: RestoreTargets, sync: SyncTraits) -> Clock:
    """Load what this stage begins with.

    Returns:
        The clock that the run starts from: 0, or the checkpoint's. It means nothing to a stage that comes back.

    Raises:
        CheckpointError: the checkpoint to resume from is damaged, or of another model or optimizer.
    """
    if config.restore is None:
        return Clock(0)
    folder = Path(config.restore)
    if config.incarnation > 0 and folder.is_relative_to(config.run_dir):
        _take_own_state(config, folder, targets)
        return Clock(0)
    manifest = read_manifest(folder)
    shared = _reader(folder, manifest, manifest.shared_files)
    for name, tensor in targets.weights:
        copy_exactly(tensor, shared.tensor(f"weights/{name}"), name)
    for name, tensor in targets.buffers:
        copy_exactly(tensor, shared.tensor(f"buffers/{name}"), name)
    is_shared = sync.averages_gradients
    source = optimizer_source(manifest.members, config.vw, is_shared=is_shared)
    targets.load_optimizer(_optimizer_state(folder, manifest, source, targets))
    return manifest.progress.clock


def _take_own_state(config: StageConfig, folder: Path, targets: RestoreTargets) -> None:
    """Load the optimizer state of this virtual worker's earlier life; where there is none to be had, go without.

    While it was away, checkpoints may have been made without it: then it is in an earlier one.
    """
    for candidate in (folder, *_others(folder)):
        try:
            manifest = read_manifest(candidate)
            if config.vw in manifest.num_stages:
                targets.load_optimizer(_optimizer_state(candidate, manifest, config.vw, targets))
                return
        except CheckpointError as error:
            _log.warning("optimizer_state_not_read", reason=str(error))
    _log.warning("optimizer_state_begins_anew", vw=config.vw)


def _others(folder: Path) -> list[Path]:
    """The complete checkpoints before this one, newest first; all there are where a newer one has replaced it."""
    complete = [path.parent for path in folder.parent.glob(f"clock-*/{MANIFEST}")]
    return sorted((path for path in complete if path < folder or not folder.exists()), reverse=True)


def _optimizer_state(
    folder: Path, manifest: Manifest, source: VirtualWorkerIndex, targets: RestoreTargets
) -> dict[str, dict[str, Any]]:
    own = _reader(folder, manifest, manifest.files_of(source))
    return own.optimizer_state(name for name, _ in targets.weights)


def _reader(folder: Path, manifest: Manifest, files: Sequence[CheckpointFile]) -> CheckpointReader:
    """A reader that checks each file against the manifest before it uses it."""
    known = {folder / file.name: file for file in files}
    return CheckpointReader(known, check=lambda path: verify_file(folder, known[path], manifest))
