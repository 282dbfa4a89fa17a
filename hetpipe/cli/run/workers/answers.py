"""Requests to drain and add virtual workers, and their results, for `hetpipe workers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetpipe.errors import HetpipeError
from hetpipe.runs.outcome import Output
from hetpipe.runs.status import worker_json
from hetpipe.values.events import WorkerStatus
from hetpipe.values.life_state import LifeState

#: Descriptions of states, as the result of a request.
_STATE_TEXTS = {
    LifeState.STARTING: "is starting",
    LifeState.READY: "is there",
    LifeState.LEAVING: "leaves at the next barrier",
    LifeState.DONE: "has reached the end of the run",
    LifeState.ENDING: "is being ended",
    LifeState.AWAITING: "is restarted as soon as possible",
    LifeState.ADMITTING: "is being restarted",
    LifeState.OUT: "is out",
}


def one_by_one(
    vws: Sequence[int], request: Callable[[int], Sequence[WorkerStatus]], output: Output
) -> list[WorkerStatus]:
    """Send a request for each. If one is rejected, print the results of those accepted before it."""
    statuses: list[WorkerStatus] = []
    try:
        for vw in vws:
            statuses += request(vw)
    except HetpipeError:
        for worker in statuses:
            output.note(line_of(worker))
        raise
    return statuses


def answer(workers: Sequence[WorkerStatus], output: Output) -> None:
    """Print the results."""
    output.answer({"workers": [worker_json(worker) for worker in workers]}, *map(line_of, workers))


def line_of(worker: WorkerStatus) -> str:
    """The result for one virtual worker, as a sentence."""
    text = _STATE_TEXTS.get(worker.state, worker.state)
    if worker.devices:
        text = f"is new, and joins at a barrier as soon as it is ready; it has {', '.join(worker.devices)}"
    return f"virtual worker {worker.vw} {text}"
