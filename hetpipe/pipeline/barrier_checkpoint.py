"""A stage's part of a checkpoint: written at the barrier, reported, and at the end of the run waited for."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path

from torch import Tensor

from hetpipe.errors import CheckpointNotWritten
from hetpipe.observe.log import get_logger
from hetpipe.observe.timeline import Activity
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.setup import StageParts
from hetpipe.pipeline.waiting import Waiter
from hetpipe.values.ids import Clock

_log = get_logger(__name__)

#: Pause before asking again whether a checkpoint is complete.
_PAUSE_SECONDS = 0.05

#: Pause before writing the run's last checkpoint again.
_RETRY_SECONDS = 1.0

#: How long who leaves stays for the others' parts: its next life begins with the newest complete checkpoint, but an
#: agent that is to end does not wait for long.
LEAVER_SECONDS = 3.0


class CheckpointWork:
    """One stage's work for checkpoints. What cannot be written costs the run that checkpoint, unless it ends there."""

    def __init__(self, parts: StageParts, inbox: Inbox, waiter: Waiter) -> None:
        self._parts = parts
        self._inbox = inbox
        self._waiter = waiter

    def run(
        self, clock: Clock, *, buffers: Mapping[str, Tensor], is_keeper: bool, is_last: bool, leaves: bool = False
    ) -> None:
        """Write and report this stage's part of the checkpoint at `clock`. The pipeline is drained.

        Args:
            clock: of the barrier.
            buffers: of the model, as they are after the barrier, by the model's names.
            is_keeper: whether its virtual worker writes what is the same for all: buffers, parameters that are not
                trained, and the weights where no parameter server holds them.
            is_last: whether the run ends at this barrier; then this returns when the checkpoint is complete.
            leaves: whether its virtual worker leaves the run here; then this waits for that, too, but not for long.

        Raises:
            CheckpointNotWritten: the run's last checkpoint could not be written for `patience.last_checkpoint`.
            DeadlineExceeded: the others did not write their parts of it in time.
        """
        with self._parts.timeline.span(Activity.CHECKPOINT, clock=clock):
            try:
                path = self._written(clock, buffers if is_keeper else None, is_last=is_last)
                stays_until = inf if is_last else self._now + (LEAVER_SECONDS if leaves else 0.0)
                while not self._parts.synchroniser.report_checkpoint(clock, path) and self._now < stays_until:
                    self._rest(f"the other parts of the checkpoint at clock {clock}", _PAUSE_SECONDS, is_last=is_last)
            except CheckpointNotWritten as error:
                _log.error("checkpoint_not_written", error=type(error).__name__, clock=clock, reason=str(error))
                if is_last:
                    raise
        self._waiter.proceed()

    def _written(self, clock: Clock, buffers: Mapping[str, Tensor] | None, *, is_last: bool) -> Path:
        """The file of this stage; of the run's last checkpoint it is tried again while the disk is full or broken."""
        until = self._now + (self._parts.last_checkpoint_seconds if is_last else 0.0)
        while True:
            try:
                return self._write(clock, buffers)
            except CheckpointNotWritten as error:
                if self._now >= until:
                    self._parts.synchroniser.report_checkpoint(clock, None, failure=str(error))
                    raise
                self._rest(f"room for the checkpoint that ends the run: {error}", _RETRY_SECONDS, is_last=is_last)

    def _write(self, clock: Clock, buffers: Mapping[str, Tensor] | None) -> Path:
        """The file of this stage; `buffers` are None if others write what is the same for all."""
        parts = self._parts
        has_weights = buffers is not None and not parts.has_shards
        return parts.part_writer.write(
            clock,
            weights=parts.weights.at_barrier.views if has_weights else {},
            buffers={} if buffers is None else {**buffers, **_frozen(parts)},
            optimizer=parts.weights.optimizer.state(),
        )

    @property
    def _now(self) -> float:
        return self._parts.clock.monotonic()

    def _rest(self, reason: str, seconds: float, *, is_last: bool) -> None:
        extra = self._parts.last_checkpoint_seconds if is_last else 0.0
        with self._inbox.bell:
            self._waiter.sleep(reason, for_clock=False, at_most_seconds=seconds, extra_seconds=extra)


def _frozen(parts: StageParts) -> dict[str, Tensor]:
    return {
        name: layer.module.get_parameter(local).detach()
        for layer in parts.layers
        for local, name in layer.frozen.items()
    }
