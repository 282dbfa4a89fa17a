"""Validation of a resume: the keys of a job that must not change, and finished runs. Pure.

A checkpoint is written by the model's own names, so the cut, the devices, the number of parameter servers and that of
virtual workers may change. It holds weights of one model, a ledger of the samples of one data set, and states of one
optimizer: the keys that these depend on must not change.

Counts continue. So does the clock, for any N: the first minibatch after it is clock·N + 1 with the new N. Minibatches
and samples are counted over all virtual workers, so the length of a run given by `minibatches` follows from its new
number of virtual workers, and includes those before the resume. Learning rates continue at the number of updates that
each optimizer has made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetpipe.decide.sync.segment import is_finished
from hetpipe.errors import JobError, UserError
from hetpipe.job.file import Job
from hetpipe.values.sync import Progress


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A key that a resumed run keeps, and the reason."""

    path: str
    of: Callable[[Job], object]
    reason: str


def _momentum_of_rmsprop(job: Job) -> str:
    """Presence of RMSprop's momentum. Other optimizers of torch create their momentum when it is first needed."""
    used = job.optimizer.name == "RMSprop" and job.optimizer.arguments.get("momentum", 0)
    return "above 0" if used else "0"


_STATE_GOES_WITH_IT = "the optimizer keeps more state with it"

_FIXED = (
    _Fixed("model", lambda job: job.model, "the checkpoint holds the weights of that model"),
    _Fixed("data.train", lambda job: job.data.train, "the checkpoint lists the used samples of that data"),
    _Fixed("data.length", lambda job: job.data.length, "the checkpoint lists the used samples by their positions"),
    _Fixed("seed", lambda job: job.seed, "the order of the samples and the dropout masks follow from it"),
    _Fixed("batch_size", lambda job: job.batch_size, "minibatches are counted by it"),
    _Fixed("optimizer.name", lambda job: job.optimizer.name, "its state is in the checkpoint"),
    _Fixed("optimizer.amsgrad", lambda job: job.optimizer.arguments.get("amsgrad", False), _STATE_GOES_WITH_IT),
    _Fixed("optimizer.centered", lambda job: job.optimizer.arguments.get("centered", False), _STATE_GOES_WITH_IT),
    _Fixed("optimizer.momentum", _momentum_of_rmsprop, _STATE_GOES_WITH_IT + ", if it is RMSprop's"),
    _Fixed("weights", lambda job: job.weights, "a policy's state is in the checkpoint"),
)


def check_resumed(old: Job, new: Job) -> None:
    """Reject a job `new` that cannot continue a run of `old`.

    Raises:
        JobError: with every key that must not change.
    """
    problems = [
        f"{fixed.path}: is {fixed.of(new)} here and {fixed.of(old)} in the run to resume, but must not change: "
        f"{fixed.reason}"
        for fixed in _FIXED
        if fixed.of(new) != fixed.of(old)
    ]
    if problems:
        raise JobError(problems)


def check_not_finished(job: Job, progress: Progress, *, num_samples: int, where: str) -> None:
    """Reject a resume from `progress` at which `job` is finished.

    Args:
        job: of the new run.
        progress: of the checkpoint.
        num_samples: of the training set.
        where: name of the old run.

    Raises:
        UserError: it is finished.
    """
    if job.minibatches is not None and not job.is_planned:
        return  # the total depends on the number of virtual workers
    if not is_finished(progress, job.data_spec(num_samples)):
        return
    if job.epochs is not None:
        done, longer = f"{progress.epoch} of {job.epochs} epochs", f"--set epochs={2 * max(job.epochs, progress.epoch)}"
    else:
        each = 2 * -(-progress.minibatches // job.num_workers)
        done, longer = f"{progress.minibatches} of {job.total_minibatches} minibatches", f"--set minibatches={each}"
    raise UserError(
        f"{where} is finished: it trained {done}, so there is nothing to resume; continue training with {longer}, "
        f"or use its weights with `hetpipe export {where} model.safetensors`"
    )
