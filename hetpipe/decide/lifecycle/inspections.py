"""Scheduling of model inspections over the agents, and their results. Pure.

The first agent reports the model, unless the job was submitted with one. For a job that is planned without a profile
the model is measured once on every available device type: by the first agent on its types, then by others on the
missing types.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hetpipe.errors import PlanError
from hetpipe.job.file import Job
from hetpipe.values.commands import InspectCommand, InspectionPhase, InspectionResult, InspectionStep
from hetpipe.values.events import Measuring, Submission
from hetpipe.values.ids import AgentId, JobId
from hetpipe.values.measurement import Measurement, ProfileStep
from hetpipe.values.plan import ModelReport
from hetpipe.values.run import AgentInfo, type_of


@dataclass(frozen=True, slots=True)
class Inspected:
    """Results of the inspections."""

    model: ModelReport
    measurements: tuple[Measurement, ...] = ()
    """One per available device type; empty if no measurement was needed."""


@dataclass(frozen=True, slots=True)
class InspectionRequest:
    """A request to one agent."""

    agent: AgentInfo
    with_model: bool
    measure: tuple[str, ...]
    """Device types."""


def inspect_command(asked: InspectionRequest, job: Job, job_id: JobId, submission: Submission) -> InspectCommand:
    """The command for an inspection request."""
    return InspectCommand(
        job_id=job_id,
        job_json=json.dumps(job.model_dump(mode="json")),
        import_path=submission.import_path,
        # Its model file replaces the one before a rewind, which no stage is built from any more.
        run_dir=submission.first_run_dir,
        with_model=asked.with_model,
        measure=asked.measure,
        code=submission.code_digest,
    )


def is_to_measure(job: Job) -> bool:
    """Whether a profile is needed but not given by the job: to plan the run, or for emulation."""
    return job.cluster.profile is None and (job.cluster.emulate or not job.is_planned)


def next_to_measure(
    agents: Sequence[AgentInfo], *, asked: int, measured: Collection[str]
) -> tuple[int, tuple[str, ...]] | None:
    """The next agent to measure, with the device types; None when every type has been measured.

    Args:
        agents: agents in the order of requests.
        asked: number of agents that have answered.
        measured: the measured types.

    Returns:
        The index of the agent, and the types; None when every type has been measured.

    Raises:
        PlanError: an agent did not measure one of its types.
    """
    for position, agent in enumerate(agents):
        missing = tuple(kind for kind in dict.fromkeys(map(type_of, agent.devices)) if kind not in measured)
        if missing and position < asked:
            raise PlanError(
                f"agent {agent.agent} on {agent.host} registered devices of type {', '.join(missing)} but found none "
                "to measure the model on; restart the agent, or give cluster.profile"
            )
        if missing:
            return position, missing
    return None


class Inspections:
    """The inspections of one job, one at a time."""

    def __init__(self, agents: Sequence[AgentInfo], *, to_measure: bool, model: ModelReport | None = None) -> None:
        """Start with the first of `agents`, each with the claimed devices only.

        Args:
            agents: in the order of requests.
            to_measure: whether the model is to be measured.
            model: the report submitted with the job; None if the first agent is to make one.
        """
        self._agents = agents
        self._to_measure = to_measure
        #: Number of agents that have answered or have no missing types.
        self._requested = 0
        self._step: ProfileStep | None = None
        #: Its current phase, if reported.
        self._phase: InspectionPhase | None = None
        self._model = model
        self._measured: dict[str, Measurement] = {}

    def next(self) -> InspectionRequest | None:
        """The next request; None when everything is known.

        Raises:
            PlanError: the last answer is incomplete.
        """
        self._step = self._phase = None
        found = (
            next_to_measure(self._agents, asked=self._requested, measured=self._measured) if self._to_measure else None
        )
        position, missing = found or (0, ())
        if found is None and (self._requested or self._model is not None):
            return None
        with_model, self._requested = self._requested == 0 and self._model is None, position + 1
        return InspectionRequest(self._agents[position], with_model, missing)

    def is_asked(self, agent: AgentId) -> bool:
        """Whether this agent's answer is pending."""
        return self._requested > 0 and self._agents[self._requested - 1].agent == agent

    def on_progress(self, report: InspectionStep | InspectionPhase) -> None:
        """Record the progress of the inspecting agent."""
        if isinstance(report, InspectionPhase):
            self._phase = report
        else:
            self._step = report.step

    def add(self, result: InspectionResult) -> None:
        """Record the answer of the inspecting agent."""
        self._model = self._model or result.model
        self._measured.update((measurement.device_type, measurement) for measurement in result.measurements)

    @property
    def inspected(self) -> Inspected:
        """The results, once `next` returns None."""
        assert self._model is not None
        return Inspected(self._model, tuple(self._measured.values()))

    @property
    def measuring(self) -> Measuring | None:
        """The layer that is being measured now."""
        return None if self._step is None else Measuring(self._step, self._agents[self._requested - 1].agent)

    @property
    def awaited(self) -> str:
        """Description of the current wait."""
        agent = self._agents[self._requested - 1]
        who = f"agent {agent.agent} on {agent.host}"
        if self._step is None:
            phase = self._phase
            now = "" if phase is None else f", which is {phase.phase} ({phase.seconds:.0f} s)"
            return f"{who} to import and inspect the model{now}"
        step = self._step
        layer = f"layer {step.done + 1} of {step.total}"
        return f"{who}, which is measuring the model on {step.device_type}: {layer} ({step.layer})"
