"""An agent stays away: a virtual worker that has devices of others goes on without it."""

from __future__ import annotations

from pathlib import Path

from hetpipe.decide.lifecycle.exchange import (
    Admit,
    AdmitAcknowledged,
    AgentDeparts,
    DrainAcknowledged,
    EvictAcknowledged,
    MemberGone,
    MemberRegistered,
    Replan,
    Replanned,
)
from hetpipe.server.coordinator.replan_tasks import ReplanTasks
from hetpipe.values.commands import StartStageCommand
from hetpipe.values.events import ProgressTable, ReplanJudged, WorkerReplanned
from hetpipe.values.ids import AgentId, Clock, Incarnation
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from hetpipe.values.members import MemberId
from hetpipe.values.run import StageDone, StageReady
from tests.server.coordinator.builders import JOB_ID, agent_member, job
from tests.server.coordinator.machine_driver import Driver


class Alone(Driver):
    """A virtual worker of four stages on two agents, one of which goes."""

    def __init__(self, folder: Path, *overrides: str, on_notice: bool = False) -> None:
        super().__init__(job("workers.count=1", "workers.stages=4", *overrides))
        self.replans = ReplanTasks(JOB_ID)
        self.folder = folder
        self.see_cluster()
        self.inspect()
        self.prepare()
        for stage in range(4):
            self.report(0, stage, StageReady(pid=1000 + stage))
        if on_notice:
            self.leave()
            return
        self.feed(MemberGone(MemberId("n1"), "agent n1 stopped answering"))
        for stage in (0, 1):
            self.exit(0, stage, -9, ordered=True)
        self.feed(EvictAcknowledged(Vw(0), Incarnation(0)))

    def leave(self) -> None:
        """The agent says that it will go, and the virtual worker leaves at a barrier before."""
        self.feed(AgentDeparts(AgentId("n1")))
        self.feed(DrainAcknowledged(Vw(0), Incarnation(0)))
        for stage in range(4):
            self.report(0, stage, StageDone(Clock(40), "drain"))
            self.exit(0, stage, 0)
        self.feed(MemberGone(MemberId("n1"), "agent n1 left"))
        self.wait(0.25)

    def admit(self) -> Admit:
        """Admission with what is left, once the agent has stayed away for too long."""
        self.wait(65.0)
        self.answer()
        self.wait(0.5)
        return self.tasks(Admit)[-1]

    def answer(self) -> Replanned:
        answer = self.replans.replan(self.tasks(Replan)[-1], str(self.folder), wall=1.0)
        self.feed(answer)
        return answer

    def come_back(self, life: int, *, stages: int) -> list[tuple[str, int, int]]:
        """The next life begins; what its stages compute, and where."""
        before = len(self.start_commands)
        self.feed(AdmitAcknowledged(Vw(0), Incarnation(life), None))
        told = []
        for item in self.start_commands[before:]:
            assert isinstance(item.command, StartStageCommand)
            planned = item.command.config.plan.stage(Vw(0), item.command.config.stage)
            told.append((str(item.agent), int(planned.first_layer), int(planned.last_layer)))
        for stage in range(stages):
            self.report(0, stage, StageReady(pid=2000 + stage), life=life)
        return told


def test_it_goes_on_with_the_devices_that_are_left(tmp_path: Path) -> None:
    run = Alone(tmp_path)
    run.wait(55.0)
    assert run.tasks(Replan) == []
    run.wait(10.0)
    assert run.tasks(Replan)[-1].gone == {"n1"}
    run.answer()
    run.wait(0.5)
    admit = run.tasks(Admit)[-1]
    assert admit.num_stages == 2
    assert admit.replan is not None

    assert run.come_back(1, stages=2) == [("n0", 0, 2), ("n0", 2, 4)]
    assert run.worker(0).state is LifeState.READY
    assert run.events(WorkerReplanned) == [WorkerReplanned(Vw(0), Incarnation(1), (1, 1, 1, 1), (2, 2), None)]
    assert [life.key.stage for life in run.machine.stages] == [0, 1]
    run.wait(200.0)
    assert run.machine.ended is None
    assert len(run.events(ProgressTable)[-1].rows[0].stages) == 2


def test_one_whose_agents_are_all_gone_waits(tmp_path: Path) -> None:
    run = Alone(tmp_path)
    run.feed(MemberGone(MemberId("n0"), "agent n0 stopped answering"))
    run.wait(110.0)

    assert run.tasks(Replan) == []


def test_one_that_does_not_get_ready_with_fewer_waits_for_the_agent(tmp_path: Path) -> None:
    run = Alone(tmp_path)
    run.wait(65.0)
    run.answer()
    run.wait(0.5)
    run.come_back(1, stages=0)
    for stage in (0, 1):
        run.exit(0, stage, -9, life=1)
    run.feed(EvictAcknowledged(Vw(0), Incarnation(1)))
    run.wait(100.0)

    assert run.events(ReplanJudged)[0].gained is None
    assert len(run.tasks(Replan)) == 1
    assert len(run.tasks(Admit)) == 1


def test_an_agent_that_comes_back_in_time_is_used(tmp_path: Path) -> None:
    run = Alone(tmp_path)
    run.wait(65.0)
    run.feed(MemberRegistered(agent_member("n1", devices=2)))
    run.answer()

    assert run.tasks(Admit)[-1].replan is None
    assert [at[0] for at in run.come_back(1, stages=4)] == ["n0", "n0", "n1", "n1"]
