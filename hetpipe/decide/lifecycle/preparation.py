"""Preparation of a job, from its submission to the task that plans it. Pure: facts in, instructions and steps out.

Devices and parameter servers are claimed (`job_queue.py`), the model is inspected (`inspections.py`), links that are
not stated are measured (`link_survey.py`); then the shell prepares the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetpipe.decide.lifecycle.configs import Assignment, with_agents
from hetpipe.decide.lifecycle.exchange import Instruction, Prepare, Prepared, ResourcesOffered, SendCommand
from hetpipe.decide.lifecycle.inspections import Inspections, inspect_command, is_to_measure
from hetpipe.decide.lifecycle.job_queue import ClusterView, Turn, claim_devices, missing
from hetpipe.decide.lifecycle.lifecycle import JobStep
from hetpipe.decide.lifecycle.link_survey import LinkReport, LinkSurvey
from hetpipe.decide.lifecycle.planning import num_devices_wanted
from hetpipe.decide.lifecycle.root_cause import Failure, Rank
from hetpipe.errors import PlanError
from hetpipe.job.file import Job
from hetpipe.values.commands import InspectionPhase, InspectionResult, InspectionStep, LinkAwaited, LinkResult, StageKey
from hetpipe.values.events import JobState, Measuring, QueuePlace, Submission
from hetpipe.values.ids import AgentId, JobId, Term
from hetpipe.values.members import MemberId, MemberInfo
from hetpipe.values.run import AgentInfo

InspectionReport = InspectionStep | InspectionPhase | InspectionResult
PreparationInput = ResourcesOffered | InspectionReport | LinkReport

PreparationOutput = JobStep | Instruction | Failure
"""A step of the job, an instruction for the shell, or why the job cannot continue."""


class JobPreparation:
    """Preparation of one job. Not thread-safe; every call takes the monotonic time."""

    def __init__(self, job_id: JobId, job: Job, submission: Submission) -> None:
        self._job_id = job_id
        #: As submitted; once prepared, as executed.
        self.job = job
        self.submission = submission
        #: Claimed devices, by agent, and claimed shards, by index. Empty before resources are claimed.
        self.agents: tuple[AgentInfo, ...] = ()
        self.shards: tuple[MemberInfo, ...] = ()
        #: Whether a task that configures shards is in progress: they must not be released before it ends.
        self.is_preparing = False
        #: Position in the queue; None before resources are searched for, and once they are claimed.
        self.place: QueuePlace | None = None
        self._inspections: Inspections | None = None
        #: Set after the inspections of a job whose plan depends on links that are not stated.
        self._survey: LinkSurvey | None = None
        #: Samples of an evaluation, as determined by another coordinator.
        self._eval_samples: int | None = None
        #: Whether the job has trained before, and is prepared again from its newest checkpoint.
        self.goes_back = False
        #: Highest term of processes that still existed then.
        self.above = Term(0)

    def take_over(self, assignment: Assignment, *, eval_samples: int | None) -> None:
        """Start as prepared by another coordinator."""
        self.agents, self.shards = assignment.agents, assignment.shards
        self._eval_samples = eval_samples

    def handle(self, fact: PreparationInput, *, state: JobState, now: float) -> list[PreparationOutput]:
        """Process one fact; facts that are too late for the job's `state` have no effect.

        Returns:
            Instructions, in order.
        """
        match fact, state:
            case ResourcesOffered(), JobState.SUBMITTED | JobState.PENDING:
                return self._cluster_seen(fact.cluster, fact.turn, now=now)
            case ((InspectionStep() | InspectionPhase() | InspectionResult()), JobState.INSPECTING):
                assert self._inspections is not None
                return self._on_inspection_report(fact, self._inspections, now=now)
            case ((LinkAwaited() | LinkResult()), JobState.INSPECTING) if self._survey is not None:
                return self._surveyed(self._survey, self._survey.handle(fact, now=now))
        return []

    def tick(self, *, now: float) -> list[PreparationOutput]:
        """Advance the time while links are measured."""
        if self._survey is None or self._survey.is_over:
            return []
        return self._surveyed(self._survey, self._survey.tick(now=now))

    @property
    def is_measuring_links(self) -> bool:
        """Whether links are being measured; the duration is bounded."""
        return self._survey is not None and not self._survey.is_over

    def may_report_link(self, agent: AgentId, report: LinkReport) -> bool:
        """Whether `agent` may send this report of a link."""
        return self._survey is not None and self._survey.may_report(agent, report)

    def may_be_end(self, agent: AgentId, stage: StageKey) -> bool:
        """Whether this is the key of the process that `agent` starts to measure a link."""
        return self._survey is not None and self._survey.may_be(agent, stage)

    def is_asked(self, agent: AgentId) -> bool:
        """Whether `agent` may report an inspection; also true if none is pending, as it is ignored then."""
        return self._inspections is None or self._inspections.is_asked(agent)

    def enlarge(self, agents: Sequence[AgentInfo]) -> None:
        """Claim more devices while the job runs."""
        self.agents = with_agents(self.agents, agents)

    def prepare(self) -> Prepare:
        """Prepare the job, once its model is inspected."""
        assert self._inspections is not None
        self.is_preparing = True
        inspected = self._inspections.inspected
        return Prepare(inspected, self.agents, self.shards, goes_back=self.goes_back, above=self.above)

    def queue_again(self, lacks: str) -> None:
        """Release all claims: there is no work yet that would be lost."""
        self.agents, self.shards, self._inspections, self._survey = (), (), None, None
        self.place = QueuePlace(1, lacks, self.job.priority)

    def renew(self, known: Mapping[MemberId, MemberInfo]) -> None:
        """Update the registrations of members, by name: their addresses may have changed."""
        self.shards = tuple(known.get(shard.id, shard) for shard in self.shards)
        agents = [(agent, known.get(MemberId(agent.agent))) for agent in self.agents]
        self.agents = tuple(
            replace(old, host=new.host, pid=new.pid, links=new.links) if new else old for old, new in agents
        )

    @property
    def members(self) -> tuple[MemberId, ...]:
        """Members required to restart training: those that hold the weights."""
        agents = () if self.job.has_shards else tuple(MemberId(agent.agent) for agent in self.agents)
        return (*(shard.id for shard in self.shards), *agents)

    def prepared(self, prepared: Prepared) -> None:
        """Record that the job is prepared, for the first time or again."""
        self.job = prepared.run.job
        self.submission = prepared.submission or self.submission
        self.goes_back = False

    def assignment(self, prepared: Prepared) -> Assignment:
        """The assignment of the plan to members."""
        return prepared.run.assignment(self.submission, self.agents, self.shards)

    @property
    def eval_samples(self) -> int | None:
        """Samples in a complete evaluation; None if unknown."""
        return self._eval_samples if self._inspections is None else self._inspections.inspected.model.eval_samples

    def remark(self, step: JobStep) -> str:
        """Remark on a step for followers; empty if none."""
        if step is not JobStep.INSPECTED or self._inspections is None:
            return ""
        proof = self._inspections.inspected.model.proof
        links = "" if self._survey is None else self._survey.remark
        return "; ".join(filter(None, ("" if proof is None else proof.sentence, links)))

    def measuring(self, state: JobState) -> Measuring | None:
        """The layer that is being measured now."""
        is_inspecting = state is JobState.INSPECTING and self._survey is None
        return self._inspections.measuring if is_inspecting and self._inspections is not None else None

    def awaited(self, state: JobState) -> str:
        """Description of the current wait."""
        match state:
            case JobState.INSPECTING if self._survey is not None and not self._survey.is_over:
                return self._survey.awaited
            case JobState.INSPECTING:
                return "the inspection of the model" if self._inspections is None else self._inspections.awaited
            case _:
                addresses = ", ".join(shard.address for shard in self.shards)
                return f"the parameter servers at {addresses} to accept the plan"

    def _cluster_seen(self, cluster: ClusterView, turn: Turn, *, now: float) -> list[PreparationOutput]:
        lacks = missing(self.job, cluster)
        if turn.behind is not None:
            lacks = f"{lacks}; job {turn.behind} goes first" if lacks else f"job {turn.behind} goes first"
        if lacks:
            is_new = self.place is None
            self.place = QueuePlace(turn.position, lacks, self.job.priority)
            return [JobStep.CLUSTER_LACKS] if is_new else []
        self.place = None
        self.agents = claim_devices(num_devices_wanted(self.job), cluster.agents)
        self.shards = cluster.shards[: self.job.parameter_servers.count]
        to_measure, model = is_to_measure(self.job), self.submission.model
        self._inspections = Inspections(self.agents, to_measure=to_measure, model=model)
        return [JobStep.CLUSTER_READY, *self._inspect(self._inspections, now=now)]

    def _on_inspection_report(
        self, report: InspectionReport, inspections: Inspections, *, now: float
    ) -> list[PreparationOutput]:
        match report:
            case InspectionStep() | InspectionPhase():
                inspections.on_progress(report)
                return []
            case InspectionResult(error="") as result:
                inspections.add(result)
                return self._inspect(inspections, now=now)
            case InspectionResult(error=error, problems=problems):
                return [Failure(Rank.REPORTED, error, "; ".join(problems), now, problems)]

    def _inspect(self, inspections: Inspections, *, now: float) -> list[PreparationOutput]:
        """Request the next inspection, or continue if there is none."""
        try:
            asked = inspections.next()
        except PlanError as error:
            return [Failure(Rank.REPORTED, PlanError.__name__, str(error), now)]
        if asked is not None:
            command = inspect_command(asked, self.job, self._job_id, self.submission)
            return [SendCommand(asked.agent.agent, command)]
        if self.job.cluster.file is not None or (self.job.is_planned and not self.job.cluster.emulate):
            return [JobStep.INSPECTED, self.prepare()]
        survey = LinkSurvey(self.agents, job_id=self._job_id, run_dir=self.submission.run_dir, link=self.job.link)
        self._survey = survey
        return self._surveyed(survey, survey.begin(now=now))

    def _surveyed(self, survey: LinkSurvey, commands: Sequence[SendCommand]) -> list[PreparationOutput]:
        """Continue with the links, or after them once all are measured."""
        if not survey.is_over:
            return [*commands]
        self.agents = survey.with_links(self.agents)
        return [*commands, JobStep.INSPECTED, self.prepare()]
