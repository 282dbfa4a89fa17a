"""Callbacks of `hetpipe.train`: methods of a user's object that are called as the run proceeds."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.checkpoint.locations import manifest_at, search_at
from hetpipe.checkpoint.manifest import newest_listed
from hetpipe.report.view import View
from hetpipe.runs.run_folder import RunFolder
from hetpipe.values.events import Evaluated, JobEnded, JobEvent, JobState, ProgressTable, Rewound, VirtualWorkerRow
from hetpipe.values.storage_url import is_url


class Callback:
    """Base class; override what is needed.

    All methods are called one after the other in the thread of `train`, in the program's own process and not in those
    that train, so that they can neither slow the run down nor change it; a slow method only delays the next calls. An
    exception ends the run, and `train` raises it.
    """

    def on_event(self, event: JobEvent) -> None:
        """Any event, before the methods below: progress about once a second, faults, conditions, the end."""

    def on_wave(self, worker: VirtualWorkerRow, progress: ProgressTable) -> None:
        """A virtual worker has committed waves since the last call for it, a second ago: `worker.clock` in all."""

    def on_epoch(self, epoch: int) -> None:
        """A pass over the training data has ended, the first one is 1; after a rewind an epoch may end again."""

    def on_evaluation(self, evaluation: Evaluated) -> None:
        """An evaluation was made; `values` has the loss and the job's metrics."""

    def on_checkpoint(self, checkpoint: str) -> None:
        """A checkpoint is complete: its folder or URL. With several within a second, the newest one."""


class CallbacksView(View):
    """Shows events on another view, and passes them to callbacks. Not thread-safe."""

    def __init__(self, view: View, callbacks: Sequence[Callback], folder: RunFolder) -> None:
        """Wrap `view`.

        Args:
            view: closed with this one.
            callbacks: called in this order.
            folder: of the run.
        """
        self._view = view
        self._callbacks = callbacks
        self._folder = folder
        self._checkpoint: str | None = None
        #: The current pass over the data; 0 before the first report of progress.
        self._epoch = 0
        #: Virtual worker → its clock at its last call.
        self._clocks: dict[int, int] = {}

    def show(self, event: JobEvent) -> None:
        """Implement `View.show`."""
        self._view.show(event)
        for callback in self._callbacks:
            callback.on_event(event)
        match event:
            case ProgressTable():
                self._on_progress(event)
                self._look_for_checkpoint(is_rare=False)
            case Evaluated():
                self._look_for_checkpoint()
                for callback in self._callbacks:
                    callback.on_evaluation(event)
            case Rewound():
                self._clocks.clear()
                self._epoch = 0
            case JobEnded(state=state):
                self._look_for_checkpoint()
                if state is not JobState.FAILED and self._checkpoint is not None:
                    self._end_last_epochs(manifest_at(self._checkpoint).progress.epoch)

    def say(self, sentence: str) -> None:
        """Implement `View.say`."""
        self._view.say(sentence)

    def close(self) -> None:
        """Implement `View.close`."""
        self._view.close()

    def _on_progress(self, table: ProgressTable) -> None:
        for row in table.rows:
            if row.clock > self._clocks.get(row.vw, 0):
                self._clocks[row.vw] = row.clock
                for callback in self._callbacks:
                    callback.on_wave(row, table)
        for epoch in range(max(self._epoch, 1), table.epoch):
            if self._epoch:
                self._end_epoch(epoch)
        self._epoch = max(table.epoch, self._epoch)

    def _end_last_epochs(self, completed: int) -> None:
        """End the epochs since the last report of progress; a run of less than a second has no report at all."""
        current = self._epoch
        if not current:
            start = self._folder.read_record().restored_from
            current = 1 if start is None else manifest_at(start).progress.epoch + 1
        for epoch in range(current, completed + 1):
            self._end_epoch(epoch)

    def _end_epoch(self, epoch: int) -> None:
        for callback in self._callbacks:
            callback.on_epoch(epoch)

    def _look_for_checkpoint(self, *, is_rare: bool = True) -> None:
        """Call `on_checkpoint` if there is a newer one; an object store is asked only `is_rare`ly."""
        place = self._folder.place if self._folder.has_job else str(self._folder.path)
        if not is_url(place):
            listed = newest_listed(self._folder.path)
            found = None if listed is None else str(listed)
        else:
            found = search_at(place, manifest_at).folder if is_rare else None
        if found is not None and found != self._checkpoint:
            self._checkpoint = found
            for callback in self._callbacks:
                callback.on_checkpoint(found)
