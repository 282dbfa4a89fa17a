"""What `--resume` may change of a job, and when a run is not to be resumed. Pure.

A checkpoint fits the job it was made by: its clock counts waves of N minibatches, its ledger holds samples of one data
set, its optimizer states belong to the virtual workers there were. What these depend on must stay; all else may change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetpipe.errors import JobError, UserError
from hetpipe.spec.job import Job
from hetpipe.spec.sync import Progress
from hetpipe.sync.segment import is_finished


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A key that a resumed run keeps, and why."""

    path: str
    of: Callable[[Job], object]
    reason: str


_FIXED = (
    _Fixed("model", lambda job: job.model, "the checkpoint holds the weights of that model"),
    _Fixed("data.train", lambda job: job.data.train, "the checkpoint says which samples of that data were used"),
    _Fixed("seed", lambda job: job.seed, "the order of the samples and the dropout masks follow from it"),
    _Fixed("batch_size", lambda job: job.batch_size, "minibatches are numbered by it"),
    _Fixed("workers.count", lambda job: job.num_workers, "every virtual worker has its own optimizer state"),
    _Fixed("optimizer.name", lambda job: job.optimizer.name, "its state is in the checkpoint"),
    _Fixed(
        "sync.minibatches_per_wave",
        lambda job: job.sync.minibatches_per_wave,
        "the clock counts waves of so many minibatches",
    ),
    _Fixed("weights", lambda job: job.weights, "a policy's state is in the checkpoint"),
)


def check_resumed(old: Job, new: Job) -> None:
    """Refuse to go on with `new` where `old` was stopped.

    Raises:
        JobError: with every key that must stay.
    """
    problems = [
        f"{fixed.path}: is {fixed.of(new)} here and {fixed.of(old)} in the run to resume, but must stay: {fixed.reason}"
        for fixed in _FIXED
        if fixed.of(new) != fixed.of(old)
    ]
    if problems:
        raise JobError(problems)


def check_not_finished(job: Job, progress: Progress, *, num_samples: int, where: str) -> None:
    """Refuse to go on from `progress` when `job` has nothing left to do there.

    Args:
        job: of the new run.
        progress: of the checkpoint.
        num_samples: of the training set.
        where: names the old run.

    Raises:
        UserError: it is finished.
    """
    if not is_finished(progress, job.data_spec(num_samples)):
        return
    if job.epochs is not None:
        done, longer = f"{progress.epoch} of {job.epochs} epochs", f"--set epochs={2 * job.epochs}"
    else:
        total, length = job.total_minibatches, job.minibatches or 0
        done, longer = f"{progress.minibatches} of {total} minibatches", f"--set minibatches={2 * length}"
    raise UserError(
        f"{where} is finished: it trained {done}, so there is nothing to resume; train on with {longer}, "
        f"or use its weights with `hetpipe export {where} model.safetensors`"
    )
