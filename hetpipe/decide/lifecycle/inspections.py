"""Which agent looks at a job's model next, and what all of them found. Pure.

The first agent reports the model, unless the job was handed in with a report of it. For a job that is planned without a
profile the model is measured once on every type of device that is there: by the first agent on the types it has, then
by others on the types that are still missing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hetpipe.errors import PlanError
from hetpipe.job.file import Job
from hetpipe.values.commands import InspectCommand, InspectionPhase, InspectionResult, InspectionStep
from hetpipe.values.events import Submission
from hetpipe.values.ids import AgentId, JobId
from hetpipe.values.measurement import Measurement, ProfileStep
from hetpipe.values.plan import ModelReport
from hetpipe.values.run import AgentInfo, type_of


@dataclass(frozen=True, slots=True)
class Inspected:
    """What the inspections found."""

    model: ModelReport
    measurements: tuple[Measurement, ...] = ()
    """One per type of device that is there; empty if nothing was to be measured."""


@dataclass(frozen=True, slots=True)
class InspectionRequest:
    """What one agent is asked for."""

    agent: AgentInfo
    with_model: bool
    measure: tuple[str, ...]
    """Device types."""


def inspect_command(asked: InspectionRequest, job: Job, job_id: JobId, submission: Submission) -> InspectCommand:
    """What an agent is told to look at."""
    return InspectCommand(
        job_id=job_id,
        job_json=json.dumps(job.model_dump(mode="json")),
        import_path=submission.import_path,
        run_dir=submission.run_dir,
        with_model=asked.with_model,
        measure=asked.measure,
    )


def is_to_measure(job: Job) -> bool:
    """Whether a profile is needed that the job does not name: to plan the run, or to play other devices."""
    return job.cluster.profile is None and (job.cluster.emulate or not job.is_planned)


def next_to_measure(
    agents: Sequence[AgentInfo], *, asked: int, measured: Collection[str]
) -> tuple[int, tuple[str, ...]] | None:
    """Who measures what next; None when every type has been measured.

    Args:
        agents: in the order in which they are asked.
        asked: the first so many have answered.
        measured: the types that were measured.

    Returns:
        The position of the agent, and the types.

    Raises:
        PlanError: an agent that has answered did not measure a type that it has.
    """
    for position, agent in enumerate(agents):
        missing = tuple(kind for kind in dict.fromkeys(map(type_of, agent.devices)) if kind not in measured)
        if missing and position < asked:
            raise PlanError(
                f"agent {agent.agent} on {agent.host} registered devices of type {', '.join(missing)} but found none "
                "to measure the model on; start the agent anew, or give cluster.profile"
            )
        if missing:
            return position, missing
    return None


class Inspections:
    """The inspections of one job, one at a time."""

    def __init__(self, agents: Sequence[AgentInfo], *, to_measure: bool, model: ModelReport | None = None) -> None:
        """Begin with the first of `agents`, each with the claimed devices alone.

        Args:
            agents: in the order in which they are asked.
            to_measure: the model is to be measured.
            model: a report that the job was handed in with; None: the first agent is to make one.
        """
        self._agents = agents
        self._to_measure = to_measure
        #: The first so many agents were asked, or had nothing new.
        self._asked = 0
        self._step: ProfileStep | None = None
        #: What it is doing, if it has said so.
        self._phase: InspectionPhase | None = None
        self._model = model
        self._measured: dict[str, Measurement] = {}

    def next(self) -> InspectionRequest | None:
        """Whom to ask now; None when all is known.

        Raises:
            PlanError: the last answer lacks what was asked for.
        """
        self._step = self._phase = None
        found = next_to_measure(self._agents, asked=self._asked, measured=self._measured) if self._to_measure else None
        position, missing = found or (0, ())
        if found is None and (self._asked or self._model is not None):
            return None
        with_model, self._asked = self._asked == 0 and self._model is None, position + 1
        return InspectionRequest(self._agents[position], with_model, missing)

    def is_asked(self, agent: AgentId) -> bool:
        """Whether it is this agent's answer that is awaited."""
        return self._asked > 0 and self._agents[self._asked - 1].agent == agent

    def heard(self, news: InspectionStep | InspectionPhase) -> None:
        """The agent that was asked is measuring, or doing something else."""
        if isinstance(news, InspectionPhase):
            self._phase = news
        else:
            self._step = news.step

    def add(self, result: InspectionResult) -> None:
        """Take the answer of the agent that was asked."""
        self._model = self._model or result.model
        self._measured.update((measurement.device_type, measurement) for measurement in result.measurements)

    @property
    def inspected(self) -> Inspected:
        """What was found, once `next` has no more to ask."""
        assert self._model is not None
        return Inspected(self._model, tuple(self._measured.values()))

    @property
    def awaited(self) -> str:
        """Who is waited for, and for what."""
        agent = self._agents[self._asked - 1]
        who = f"agent {agent.agent} on {agent.host}"
        if self._step is None:
            phase = self._phase
            now = "" if phase is None else f", which is {phase.phase} ({phase.seconds:.0f} s)"
            return f"{who} to import and inspect the model{now}"
        step = self._step
        layer = f"layer {step.done + 1} of {step.total}"
        return f"{who}, which is measuring the model on {step.device_type}: {layer} ({step.layer})"
