"""Survey of links between nodes: those without a valid measurement are measured one at a time. Pure.

`LinkSurvey` is one survey, for a job before it is planned or, in `ClusterLinks`, for an operator. Each agent of a pair
runs one end: the first listens and measures, the second connects to the address reported by the first. A pair that
fails is skipped: its link is assumed, with a remark. The result is sent to both agents, so that it is not measured
again while it is valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hetpipe.decide.lifecycle.exchange import SendCommand
from hetpipe.errors import ResourceExhausted
from hetpipe.values.addresses import split_address
from hetpipe.values.commands import (
    KeepLinksCommand,
    LinkAwaited,
    LinkResult,
    LinkTask,
    MeasureLinkCommand,
    StageKey,
    end_key,
)
from hetpipe.values.ids import AgentId, JobId
from hetpipe.values.link_measurement import LinksProgress, MeasuredLinks, merged
from hetpipe.values.measurement import CPU_TYPE
from hetpipe.values.policies import AskedLink
from hetpipe.values.run import AgentInfo

LinkReport = LinkAwaited | LinkResult

#: Prefix of the ids that agents use in place of a job's id; those of jobs end with a dash and twelve digits.
_PREFIX = "links."

#: Timeout for one pair: two processes import torch, connect to each other, and measure for some seconds.
PAIR_SECONDS = 60.0

#: Timeout for all pairs of one job: the next job measures the others.
SURVEY_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Two agents whose link is measured."""

    first: AgentInfo
    """Listens, and measures."""
    second: AgentInfo

    def __str__(self) -> str:
        """For use in a sentence."""
        return f"the link between {self.first.agent} and {self.second.agent}"


def pairs_to_measure(agents: Sequence[AgentInfo]) -> tuple[Pair, ...]:
    """The pairs of nodes whose link no agent has measured, in order of registration."""
    known = {frozenset(link.between) for agent in agents for link in agent.links.links}
    return tuple(
        Pair(first, second)
        for first, second in combinations(agents, 2)
        if frozenset((first.agent, second.agent)) not in known
    )


class LinkSurvey:
    """The link measurements for one job. Every call takes the monotonic time and returns commands for agents."""

    def __init__(self, agents: Sequence[AgentInfo], *, job_id: JobId, run_dir: str, link: AskedLink) -> None:
        """Measure the unknown links among `agents`.

        Args:
            agents: agents with the claimed devices and the known measurements of their links.
            job_id: id of the job.
            run_dir: folder of the run, for the logs of the measuring processes.
            link: the job's key `link`.
        """
        self._job_id = job_id
        self._task = LinkTask(number=0, other=AgentId(""), run_dir=run_dir, link=link)
        self._pairs = pairs_to_measure(agents)
        #: Index of the current pair; -1 before the first.
        self._number = -1
        self._is_over = not self._pairs
        self._is_called = False
        #: Results received for the current pair.
        self._results: list[LinkResult] = []
        self._until = self._pair_until = 0.0
        self._found = MeasuredLinks()
        self._problems: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether the survey is complete."""
        return self._is_over

    @property
    def remark(self) -> str:
        """Links that were not measured and why, as a sentence; empty if none."""
        return "; ".join(self._problems)

    @property
    def awaited(self) -> str:
        """Description of the current wait."""
        pair = self._pairs[max(self._number, 0)]
        where = f"link {self._number + 1} of {len(self._pairs)}"
        return f"agents {pair.first.agent} and {pair.second.agent} to measure the link between their nodes ({where})"

    @property
    def progress(self) -> LinksProgress:
        """Progress of the survey."""
        total = len(self._pairs)
        if self._is_over:
            return LinksProgress(done=total, total=total, remark=self.remark)
        return LinksProgress(done=max(self._number, 0), total=total, awaited=self.awaited, remark=self.remark)

    def begin(self, *, now: float) -> list[SendCommand]:
        """Start with the first pair."""
        self._until = now + SURVEY_SECONDS
        return [] if self._is_over else self._next(now=now)

    def handle(self, report: LinkReport, *, now: float) -> list[SendCommand]:
        """Process a report accepted by `may_report`; those of another pair have no effect."""
        if self._is_over or report.number != self._number:
            return []
        pair = self._pairs[self._number]
        if isinstance(report, LinkAwaited):
            is_new, self._is_called = not self._is_called, True
            return [self._command(pair.second, pair.first, address=report.address)] if is_new else []
        if report.problem:
            return self._skip(report.problem, now=now)
        # Only the measuring end reports a link.
        self._results = [
            result for result in self._results if bool(result.measured.links) != bool(report.measured.links)
        ] + [report]
        return self._both_reported(pair, now=now) if len(self._results) > 1 else []

    def _both_reported(self, pair: Pair, *, now: float) -> list[SendCommand]:
        for result in self._results:
            self._found = merged(self._found, result.measured)
        links = MeasuredLinks(links=tuple(link for result in self._results for link in result.measured.links))
        return [SendCommand(pair.second.agent, KeepLinksCommand(self._job_id, links)), *self._next(now=now)]

    def tick(self, *, now: float) -> list[SendCommand]:
        """Advance the time."""
        if self._is_over or now < self._pair_until:
            return []
        return self._skip(f"there was no result within {PAIR_SECONDS:.0f} s", now=now)

    def may_report(self, agent: AgentId, report: LinkReport) -> bool:
        """Whether `agent` may send this report: about its own end of the current pair only."""
        if report.number >= len(self._pairs):
            return False
        pair = self._pairs[report.number]
        is_first = agent == pair.first.agent
        if isinstance(report, LinkAwaited):
            return is_first and split_address(report.address)[0] == pair.first.host
        if not is_first and agent != pair.second.agent:
            return False
        copies = {copy.node for copy in report.measured.copies} <= {agent}
        wanted = [{pair.first.agent, pair.second.agent}] if is_first and not report.problem else []
        return copies and [set(link.between) for link in report.measured.links] == wanted

    def may_be(self, agent: AgentId, stage: StageKey) -> bool:
        """Whether this is the key of the process that `agent` starts for its end of the current pair."""
        if self._is_over:
            return False
        pair = self._pairs[self._number]
        ends = (pair.first.agent, pair.second.agent)
        return agent in ends and stage == end_key(self._job_id, self._number, is_first=agent == pair.first.agent)

    def with_links(self, agents: Sequence[AgentInfo]) -> tuple[AgentInfo, ...]:
        """The agents, each with the measurements of its links added."""
        return tuple(replace(agent, links=merged(agent.links, self._found.of(agent.agent))) for agent in agents)

    def _next(self, *, now: float) -> list[SendCommand]:
        self._number += 1
        self._results, self._is_called, self._pair_until = [], False, now + PAIR_SECONDS
        left = len(self._pairs) - self._number
        if left and now >= self._until:
            self._problems.append(f"{left} more links were not measured, as that has taken {SURVEY_SECONDS:.0f} s")
        elif left:
            pair = self._pairs[self._number]
            return [self._command(pair.first, pair.second)]
        self._is_over = True
        return []

    def _command(self, agent: AgentInfo, other: AgentInfo, *, address: str = "") -> SendCommand:
        copies = any(device.type != CPU_TYPE for device in agent.devices) and not agent.links.copies
        task = replace(self._task, number=self._number, other=other.agent, address=address, with_copies=copies)
        return SendCommand(agent.agent, MeasureLinkCommand(self._job_id, task))

    def _skip(self, problem: str, *, now: float) -> list[SendCommand]:
        self._problems.append(f"{self._pairs[self._number]} was not measured: {problem}")
        return self._next(now=now)


def is_cluster_survey(job_id: JobId) -> bool:
    """Whether an id used in place of a job's is that of a survey of the cluster."""
    return job_id.startswith(_PREFIX)


class ClusterLinks:
    """The newest survey requested by an operator. Every call takes the monotonic time."""

    def __init__(self) -> None:
        self._job_id = JobId("")
        self._survey: LinkSurvey | None = None

    def survey(
        self, request_id: str, agents: Sequence[AgentInfo], *, fresh: bool, now: float
    ) -> tuple[LinksProgress, list[SendCommand]]:
        """Start a survey, or return its progress: the request id identifies the survey.

        Args:
            request_id: id of the operator's request.
            agents: registered agents, with the measurements of their links.
            fresh: whether to measure known links again.
            now: monotonic seconds.

        Raises:
            ResourceExhausted: another survey is in progress.
        """
        job_id, sent = JobId(f"{_PREFIX}{request_id}"), []
        if self._survey is None or job_id != self._job_id:
            if self._survey is not None and not self._survey.is_over:
                raise ResourceExhausted(f"another survey of links is in progress; wait for {self._survey.awaited}")
            if fresh:
                agents = [replace(agent, links=MeasuredLinks()) for agent in agents]
            self._job_id, self._survey = job_id, LinkSurvey(agents, job_id=job_id, run_dir="", link="auto")
            sent = self._survey.begin(now=now)
        return self._survey.progress, sent

    def handle(self, agent: AgentId, report: LinkReport, *, now: float) -> list[SendCommand] | None:
        """Process a report; None if it was not requested."""
        if self._survey is None or report.job_id != self._job_id or not self._survey.may_report(agent, report):
            return None
        return self._survey.handle(report, now=now)

    def tick(self, *, now: float) -> list[SendCommand]:
        """Advance the time."""
        return [] if self._survey is None else self._survey.tick(now=now)

    def is_under_way(self, job_id: JobId) -> bool:
        """Whether an agent may have a process for this survey."""
        return self._survey is not None and job_id == self._job_id and not self._survey.is_over

    def may_be(self, agent: AgentId, stage: StageKey) -> bool:
        """Whether this is the key of the process that `agent` starts for its end of a link."""
        return self._survey is not None and stage.job_id == self._job_id and self._survey.may_be(agent, stage)
