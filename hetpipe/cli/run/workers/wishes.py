"""What becomes of virtual workers that were asked to leave or to join, for the commands that ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetpipe.errors import HetpipeError
from hetpipe.runs.outcome import Output
from hetpipe.runs.status import worker_json
from hetpipe.values.events import WorkerStatus
from hetpipe.values.life_state import LifeState

#: What a state means, for people who asked for something.
_STATE_TEXTS = {
    LifeState.STARTING: "is starting",
    LifeState.READY: "is there",
    LifeState.LEAVING: "leaves at the next barrier",
    LifeState.DONE: "has come to the end of the run",
    LifeState.ENDING: "is being ended",
    LifeState.AWAITING: "comes back as soon as it can",
    LifeState.ADMITTING: "is coming back",
    LifeState.OUT: "is out",
}


def one_by_one(vws: Sequence[int], ask: Callable[[int], Sequence[WorkerStatus]], output: Output) -> list[WorkerStatus]:
    """Ask for each. If one is refused, what becomes of those before it is said: they have been asked."""
    told: list[WorkerStatus] = []
    try:
        for vw in vws:
            told += ask(vw)
    except HetpipeError:
        for worker in told:
            output.note(line_of(worker))
        raise
    return told


def answer(workers: Sequence[WorkerStatus], output: Output) -> None:
    """Tell what becomes of each."""
    output.answer({"workers": [worker_json(worker) for worker in workers]}, *map(line_of, workers))


def line_of(worker: WorkerStatus) -> str:
    """A sentence about one of them."""
    text = _STATE_TEXTS.get(worker.state, worker.state)
    if worker.devices:
        text = f"is new, and joins at a barrier as soon as it is ready; it has {', '.join(worker.devices)}"
    return f"virtual worker {worker.vw} {text}"
