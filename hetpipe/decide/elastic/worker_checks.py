"""Whether a virtual worker has been silent for too long. Pure.

A process that hangs still has an agent that sends heartbeats: only what it does not say gives it away.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetpipe.decide.elastic.worker_life import WorkerLife
from hetpipe.decide.lifecycle.root_cause import Failure, Rank
from hetpipe.decide.lifecycle.stage_table import StageState, StageTable
from hetpipe.errors import DeadlineExceeded, JobFailed
from hetpipe.values.life_state import COMPUTING, LifeState


def overdue(
    worker: WorkerLife, stages: StageTable, *, stall_seconds: float, ready_seconds: float, now: float
) -> Iterator[Failure]:
    """What is wrong with the newest life by the clock alone.

    Args:
        worker: who.
        stages: the processes of the job.
        stall_seconds: after so long without a word a stage that is ready hangs.
        ready_seconds: after so long without a word a stage of a later life that is to get ready hangs; for the first
            ones the job has a limit.
        now: monotonic seconds.
    """
    if worker.state in COMPUTING:
        for life in stages.of(worker.vw):
            silent = now - life.heard
            if life.state is StageState.READY and not life.exited and silent > stall_seconds:
                sentence = f"{life} hangs: it has reported nothing for {silent:.0f} s"
                yield Failure(Rank.GONE, JobFailed.__name__, sentence, now)
    elif worker.state is LifeState.STARTING and worker.incarnation:
        for life in stages.of(worker.vw):
            if life.state is StageState.STARTING and now - life.heard >= ready_seconds:
                last = f"; the last was that it is {life.phase}" if life.phase else ""
                sentence = f"{life} is not ready, and has said nothing for {ready_seconds:.0f} s{last}"
                yield Failure(Rank.GONE, DeadlineExceeded.__name__, sentence, now)
