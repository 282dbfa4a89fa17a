"""The links of a whole cluster, measured for an operator and not for a job. Pure; one survey at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetpipe.decide.lifecycle.exchange import SendCommand
from hetpipe.decide.lifecycle.link_survey import LinkNews, LinkSurvey
from hetpipe.errors import ResourceExhausted
from hetpipe.values.commands import StageKey
from hetpipe.values.ids import AgentId, JobId
from hetpipe.values.link_measurement import LinksProgress, MeasuredLinks
from hetpipe.values.run import AgentInfo

#: Begins what agents take for the id of a job; those of jobs end with a dash and twelve digits.
_PREFIX = "links."


def is_cluster_survey(job_id: JobId) -> bool:
    """Whether what an agent takes for a job is, or was, a survey of the cluster."""
    return job_id.startswith(_PREFIX)


class ClusterLinks:
    """The newest survey that an operator has asked for. Every call gives the monotonic time."""

    def __init__(self) -> None:
        self._job_id = JobId("")
        self._survey: LinkSurvey | None = None

    def ask(
        self, request_id: str, agents: Sequence[AgentInfo], *, fresh: bool, now: float
    ) -> tuple[LinksProgress, list[SendCommand]]:
        """Begin a survey, or tell how far it is: the same request id means the same survey.

        Args:
            request_id: of the operator's wish.
            agents: who is registered, with what is known of their links.
            fresh: measure also what is known.
            now: monotonic seconds.

        Raises:
            ResourceExhausted: somebody else's survey is under way.
        """
        job_id, sent = JobId(f"{_PREFIX}{request_id}"), []
        if self._survey is None or job_id != self._job_id:
            if self._survey is not None and not self._survey.is_over:
                raise ResourceExhausted(f"links are measured for somebody else; wait for {self._survey.awaited}")
            if fresh:
                agents = [replace(agent, links=MeasuredLinks()) for agent in agents]
            self._job_id, self._survey = job_id, LinkSurvey(agents, job_id=job_id, run_dir="", link="auto")
            sent = self._survey.begin(now=now)
        return self._survey.progress, sent

    def handle(self, agent: AgentId, news: LinkNews, *, now: float) -> list[SendCommand] | None:
        """Take in what an agent tells; None if it was not asked for that."""
        if self._survey is None or news.job_id != self._job_id or not self._survey.may_tell(agent, news):
            return None
        return self._survey.handle(news, now=now)

    def tick(self, *, now: float) -> list[SendCommand]:
        """Time has passed."""
        return [] if self._survey is None else self._survey.tick(now=now)

    def is_under_way(self, job_id: JobId) -> bool:
        """Whether it is this survey for which an agent may have a process."""
        return self._survey is not None and job_id == self._job_id and not self._survey.is_over

    def may_be(self, agent: AgentId, stage: StageKey) -> bool:
        """Whether the process that `agent` starts for its end of a link is to be called that."""
        return self._survey is not None and stage.job_id == self._job_id and self._survey.may_be(agent, stage)
