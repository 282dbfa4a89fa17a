"""Which links are measured before a job is planned, in which order, and what becomes of those that fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.decide.lifecycle.exchange import SendCommand
from hetpipe.decide.lifecycle.link_survey import PAIR_SECONDS, SURVEY_SECONDS, LinkReport, LinkSurvey, pairs_to_measure
from hetpipe.errors import PermissionDenied, ResourceExhausted
from hetpipe.values.commands import (
    AgentReport,
    InspectionResult,
    KeepLinksCommand,
    LinkAwaited,
    LinkResult,
    MeasureLinkCommand,
    end_key,
)
from hetpipe.values.events import JobState, StateChanged
from hetpipe.values.ids import AgentId
from hetpipe.values.link_measurement import LinksProgress, MeasuredLinks
from hetpipe.values.members import MemberId
from hetpipe.values.run import AgentInfo
from tests.decide.lifecycle.test_known_links import copies, link
from tests.server.coordinator.builders import JOB_ID, agent_info
from tests.server.coordinator.fakes import Cluster, events, state, submit

AGENTS = tuple(agent_info(name, devices=1) for name in ("n0", "n1", "n2"))
N0, N1, N2 = (agent.agent for agent in AGENTS)


def found(a: str, b: str) -> MeasuredLinks:
    return MeasuredLinks(links=(link(a, b, 3e8),))


def knowing(agent: AgentInfo, *measured: MeasuredLinks) -> AgentInfo:
    return replace(agent, links=MeasuredLinks(links=tuple(one for each in measured for one in each.links)))


def survey(*agents: AgentInfo) -> LinkSurvey:
    return LinkSurvey(agents or AGENTS, job_id=JOB_ID, run_dir="/run", link="auto")


def asked(sent: list[SendCommand]) -> list[tuple[str, str, str]]:
    return [
        (one.agent, one.command.task.other, one.command.task.address)
        for one in sent
        if isinstance(one.command, MeasureLinkCommand)
    ]


def told(number: int, measured: MeasuredLinks | None = None, problem: str = "") -> LinkResult:
    return LinkResult(JOB_ID, number, measured or MeasuredLinks(), problem)


def awaited(number: int, host: str = "n0.host") -> LinkAwaited:
    return LinkAwaited(JOB_ID, number, f"{host}:7000")


def test_pairs_that_nobody_knows_are_measured_in_order_of_registration() -> None:
    agents = (AGENTS[0], knowing(AGENTS[1], found("n2", "n1"), found("n1", "n1")), AGENTS[2])
    assert [(pair.first.agent, pair.second.agent) for pair in pairs_to_measure(agents)] == [(N0, N1), (N0, N2)]
    assert pairs_to_measure(AGENTS[:1]) == ()
    alone = survey(AGENTS[0])
    assert (alone.begin(now=0.0), alone.is_over) == ([], True)


def test_one_awaits_one_calls_and_both_know_before_the_next_pair() -> None:
    of = survey()
    assert asked(of.begin(now=0.0)) == [("n0", "n1", "")]
    assert asked(of.handle(awaited(0), now=1.0)) == [("n1", "n0", "n0.host:7000")]
    assert of.handle(awaited(0), now=1.0) == [], "told again"
    assert of.handle(told(0, found("n0", "n1")), now=2.0) == []
    kept, following = of.handle(told(0), now=2.0)
    assert kept == SendCommand(N1, KeepLinksCommand(JOB_ID, found("n0", "n1")))
    assert asked([following]) == [("n0", "n2", "")]
    assert "agents n0 and n2 to measure the link between their nodes (link 2 of 3)" in of.awaited
    assert [agent.links.links for agent in of.with_links(AGENTS)] == [(link("n0", "n1", 3e8),)] * 2 + [()]
    assert of.handle(told(0), now=3.0) == [], "of an earlier pair"


def test_a_pair_that_fails_is_skipped_with_a_sentence() -> None:
    of = survey()
    of.begin(now=0.0)
    assert asked(of.handle(told(0, problem="nobody came"), now=1.0)) == [("n0", "n2", "")]
    assert of.tick(now=PAIR_SECONDS) == []
    assert asked(of.tick(now=1.0 + PAIR_SECONDS)) == [("n1", "n2", "")]
    of.handle(told(2, problem="port 5 is taken"), now=90.0)
    assert of.is_over
    assert of.remark == (
        "the link between n0 and n1 was not measured: nobody came; the link between n0 and n2 was not measured: "
        "there was no result within 60 s; the link between n1 and n2 was not measured: port 5 is taken"
    )
    assert of.with_links(AGENTS) == AGENTS


def test_many_links_do_not_keep_a_job_waiting_for_ever() -> None:
    of = survey()
    of.begin(now=0.0)
    assert of.handle(told(0, problem="x"), now=SURVEY_SECONDS) == []
    assert of.is_over
    assert of.remark.endswith("2 more links were not measured, as that has taken 180 s")


def test_each_agent_tells_of_its_own_end_and_nothing_beyond() -> None:
    of = survey()
    of.begin(now=0.0)
    allowed: list[tuple[AgentId, LinkReport]] = [
        (N0, awaited(0)),
        (N0, told(0, found("n1", "n0"))),
        (N0, told(0, problem="x")),
        (N1, told(0)),
        (N1, told(0, MeasuredLinks(copies=(copies("n1", 1e9),)))),
    ]
    refused: list[tuple[AgentId, LinkReport]] = [
        (N1, awaited(0)),
        (N0, awaited(0, "elsewhere")),
        (N0, awaited(9)),
        (N0, told(0)),
        (N0, told(0, found("n0", "n2"))),
        (N0, told(0, replace(found("n0", "n1"), copies=(copies("n1", 1e9),)))),
        (N1, told(0, found("n0", "n1"))),
        (N2, told(0)),
        (N2, told(0, problem="x")),
    ]
    assert [of.may_report(agent, report) for agent, report in allowed] == [True] * len(allowed)
    assert [of.may_report(agent, report) for agent, report in refused] == [False] * len(refused)


def test_only_the_ends_of_the_pair_that_is_measured_are_certified() -> None:
    of = survey()
    of.begin(now=0.0)
    first, second = (end_key(JOB_ID, 0, is_first=is_first) for is_first in (True, False))
    assert of.may_be(N0, first) and of.may_be(N1, second)
    assert not of.may_be(N1, first) and not of.may_be(N2, second)
    assert not of.may_be(N0, end_key(JOB_ID, 1, is_first=True)), "of a later pair"


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "run").usual()


def until_links(cluster: Cluster) -> None:
    submit(cluster, "workers=null")
    cluster.executor.run_all()
    cluster.obey()


def test_the_report_of_an_agent_that_was_not_asked_is_refused_and_kept_nowhere(cluster: Cluster) -> None:
    until_links(cluster)
    for agent, report in (
        ("n1", LinkAwaited(JOB_ID, 0, "n1.host:1")),
        ("n1", LinkResult(JOB_ID, 0, found("n0", "n1"))),
        ("n0", LinkResult(JOB_ID, 0, found("n0", "n0"))),
    ):
        with pytest.raises(PermissionDenied, match=r"a measured link .* not on its node"):
            cluster.tell(agent, report)
    assert not any(member.info.links for member in cluster.coordinator.members())


def test_the_next_job_plans_with_what_was_measured_and_measures_nothing(cluster: Cluster) -> None:
    submit(cluster, "workers=null")
    cluster.train()
    known = {member.info.id: member.info.links for member in cluster.coordinator.members()}
    assert len(known[MemberId("n0")].links) == len(known[MemberId("n1")].links) == 1
    cluster.finish(JOB_ID)
    second = submit(cluster, "workers=null", request_id="fedcba9876543210")
    commands = []
    while obeyed := cluster.obey():
        commands += obeyed
    assert state(cluster, second) is JobState.RUNNING
    assert not [command for command in commands if isinstance(command, MeasureLinkCommand)]


def test_a_job_is_planned_with_assumed_links_when_nobody_measures(cluster: Cluster) -> None:
    until_links(cluster)
    cluster.take("n0"), cluster.take("n1")
    cluster.wait(PAIR_SECONDS + 1.0)
    cluster.train()
    assert state(cluster) is JobState.RUNNING
    remarks = [event.remark for event in events(cluster, StateChanged)]
    assert "the link between n0 and n1 was not measured: there was no result within 60 s" in " ".join(remarks)
    assert "links: assumed within n0, within n1, between n0 and n1" in remarks


class TestCluster:
    """An operator has the links of the cluster measured, without a job."""

    def ask(self, cluster: Cluster, request_id: str = "request-0", *, fresh: bool = False) -> LinksProgress:
        return cluster.coordinator.measure_links(request_id, fresh=fresh)

    def test_the_same_request_is_the_same_survey_until_all_is_measured(self, cluster: Cluster) -> None:
        first = self.ask(cluster)
        assert (first.done, first.total, first.is_over) == (0, 1, False)
        assert "agents n0 and n1 to measure the link" in first.awaited
        assert self.ask(cluster) == first
        cluster.train()
        assert self.ask(cluster) == LinksProgress(done=1, total=1)
        assert len(cluster.coordinator.members()[0].info.links.links) == 1
        assert self.ask(cluster, "request-1") == LinksProgress(done=0, total=0), "nothing is left to measure"
        assert self.ask(cluster, "request-2", fresh=True).total == 1

    def test_one_survey_at_a_time(self, cluster: Cluster) -> None:
        self.ask(cluster)
        with pytest.raises(ResourceExhausted, match="survey of links is in progress; wait for agents n0 and n1"):
            self.ask(cluster, "request-1")
        cluster.wait(PAIR_SECONDS + 1.0)
        assert "there was no result within 60 s" in self.ask(cluster).remark
        assert not self.ask(cluster, "request-1").is_over

    def test_agents_end_what_they_measure_for_nobody(self, cluster: Cluster) -> None:
        self.ask(cluster)
        [command] = cluster.take("n0")
        assert isinstance(command, MeasureLinkCommand)
        assert cluster.beat("n0", jobs=(command.job_id,)).ended_jobs == ()
        cluster.wait(PAIR_SECONDS + 1.0)
        assert cluster.beat("n0", jobs=(command.job_id,)).ended_jobs == (command.job_id,)

    def test_nobody_but_the_agents_asked_reports(self, cluster: Cluster) -> None:
        self.ask(cluster)
        [command] = cluster.take("n0")
        assert isinstance(command, MeasureLinkCommand)
        told: tuple[tuple[str, AgentReport], ...] = (
            ("n1", LinkAwaited(command.job_id, 0, "n1.host:1")),
            ("n1", LinkResult(command.job_id, 0, found("n0", "n1"))),
            ("n0", InspectionResult(command.job_id, None)),
        )
        for agent, report in told:
            with pytest.raises(PermissionDenied):
                cluster.tell(agent, report)
        assert not any(member.info.links for member in cluster.coordinator.members())
