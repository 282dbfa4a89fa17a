"""The inspection of a job that runs on this machine, in a child process, while the run's services start.

It finds every mistake that can be found without training: optimizer, schedule, imports, loss, metrics, data, model, one
minibatch, and a difference between the model and its layers. The job is then submitted with the report, so no agent
inspects the model again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetpipe.forking.environment import SERVICE_ENVIRONMENT, SINGLE_THREADED
from hetpipe.job.file import Job
from hetpipe.phases import PHASE
from hetpipe.profiler.cache import cache_folder
from hetpipe.runs.child_answer import await_child
from hetpipe.runs.shell import Shell
from hetpipe.server.agent.child import ChildSpec
from hetpipe.server.agent.environment import child_environment
from hetpipe.server.agent.inspection_order import InspectionAnswer, InspectionOrder
from hetpipe.values import wire
from hetpipe.values.plan import ModelReport


def inspect_locally(
    job: Job, import_path: Path, *, run_folder: Path, logs: Path, shell: Shell, on_phase: Callable[[str, float], None]
) -> ModelReport:
    """Inspect the job's code and its model, like an agent on this machine.

    Args:
        job: the job.
        import_path: the first folder to import user code from.
        run_folder: the folder of the run, to which the model is written for its stages.
        logs: the folder for the output of the process.
        shell: the command's environment.
        on_phase: receives the phase of the process and its duration in seconds, every second; called in this thread.

    Raises:
        CallableError, JobError: the job cannot be trained, by its path in the job.
        JobFailed: the process ended without an answer.
        DeadlineExceeded: the process was silent for longer than the job's `patience.inspection`.
    """
    # Like an agent on this machine.
    own = {**shell.environment, **SERVICE_ENVIRONMENT}
    environment = {**child_environment(own, job.environment, None), **SINGLE_THREADED}
    order = InspectionOrder(
        job=job.model_dump(mode="json"),
        import_path=str(import_path.absolute()),
        with_model=True,
        measure=(),
        cache_folder=str(cache_folder(environment)),
        run_folder=str(run_folder.absolute()),
    )
    spec = ChildSpec(
        name="inspection",
        command=shell.inspection,
        first_line=wire.to_json(InspectionOrder, order),
        environment=environment,
        log_path=logs / "inspection.out",
    )

    def on_message(message: dict[str, Any]) -> None:
        if message.get("kind") == PHASE:
            on_phase(str(message["phase"]), float(message["seconds"]))

    patience_seconds = job.patience.inspection.total_seconds()
    found = await_child(
        spec,
        "the inspection of the model",
        on_message,
        patience_seconds=patience_seconds,
        starter=shell.fork_server.start,
        clock=shell.clock,
    )
    answer: InspectionAnswer = wire.revive(InspectionAnswer, found)
    assert answer.model is not None, "it was asked for"
    return answer.model
