"""What is said of the lives of virtual workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetpipe.decide.elastic.worker_life import WorkerLife
from hetpipe.decide.lifecycle.root_cause import Failure, Rank
from hetpipe.errors import JobFailed
from hetpipe.values.events import Waiting, WorkerLost, WorkerQuarantined
from hetpipe.values.ids import AgentId
from hetpipe.values.life_state import LifeState


def lost(worker: WorkerLife, cause: Failure) -> WorkerLost:
    """A life of it has ended."""
    return WorkerLost(worker.vw, worker.incarnation, cause.sentence)


def quarantined(worker: WorkerLife, cause: Failure) -> WorkerQuarantined:
    """It is not started anew."""
    how_often = "once" if worker.deaths == 1 else f"{worker.deaths} times"
    sentence = f"{worker} died {how_often} and is not started anew; the last time, {cause.sentence}"
    return WorkerQuarantined(worker.vw, sentence)


def final(failure: Failure, kind: str) -> Failure:
    """A death that a job of this synchronisation survives only by going back to a checkpoint."""
    if failure.rank is Rank.REPORTED:
        return failure
    why = f"under `{kind}` only the stages hold the weights, which are lost with one of them"
    return replace(failure, sentence=f"{failure.sentence}; {why}", calls_for_rewind=True)


def nobody_left(cause: Failure | None, *, now: float) -> Failure:
    """All of them are out, because of `cause` more than of anything else; None: each was asked to go."""
    if cause is None:
        sentence = "no virtual worker is left: all of them were drained; resume from the newest checkpoint"
        return Failure(Rank.GONE, JobFailed.__name__, sentence, now)
    return replace(cause, sentence=f"no virtual worker is left; {cause.sentence}", at=now)


def nobody_back(worker: WorkerLife, absent: Sequence[AgentId], alone_seconds: float, *, now: float) -> Failure:
    """Nobody trains, and the agents of one that could do not come back."""
    sentence = f"no virtual worker is left, and agent {_names(absent)} did not come back within {alone_seconds:.0f} s"
    cause = "" if worker.cause is None else f"; {worker.cause.sentence}"
    return Failure(Rank.GONE, JobFailed.__name__, sentence + cause, now)


def unheard(worker: WorkerLife, error: str, *, now: float) -> Failure:
    """The clock shard could not be told of it for too long."""
    waited = worker.unheard_seconds(now)
    sentence = f"for {waited:.0f} s the coordinator could not have {worker} {_doing(worker)}: {worker.unheard}"
    return Failure(Rank.GONE, error, sentence, now)


def waiting(worker: WorkerLife, absent: Sequence[AgentId], *, now: float) -> Waiting | None:
    """What its next life waits for, if it is something to tell of."""
    if worker.unheard:
        awaited = f"the clock shard to have {worker} {_doing(worker)} ({worker.unheard})"
    elif absent:
        awaited = f"agent {_names(absent)} to come back with its devices, to start {worker} anew"
    else:
        return None
    return Waiting(f"the coordinator waits for {awaited}", now - worker.since)


def _doing(worker: WorkerLife) -> str:
    return {LifeState.ADMITTING: "admitted", LifeState.LEAVING: "drained"}.get(worker.state, "evicted")


def _names(agents: Sequence[AgentId]) -> str:
    return ", ".join(agents)
