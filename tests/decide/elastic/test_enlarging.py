"""Another virtual worker for a running job: the devices it takes, its cut, and what becomes of both."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hetpipe.decide.elastic.enlarging import new_worker
from hetpipe.decide.elastic.repartitions import Repartitions
from hetpipe.decide.elastic.replanning import basis_of
from hetpipe.decide.lifecycle.configs import agents_of, with_agents
from hetpipe.decide.lifecycle.exchange import (
    AddRequested,
    Admit,
    AdmitAcknowledged,
    DrainRequested,
    EvictAcknowledged,
    MemberGone,
    NewWorker,
    Prepared,
    Rewind,
    ShardHeartbeat,
    StopRequested,
)
from hetpipe.decide.lifecycle.job_machine import JobMachine
from hetpipe.decide.lifecycle.known_cluster import PlanningInputs, known_links
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.planning import PlannedRun
from hetpipe.decide.planner.partition import plan_job
from hetpipe.errors import UserError
from hetpipe.server.coordinator.worker_requests import WorkerRequests, another
from hetpipe.values.bounds import MAX_STAGES
from hetpipe.values.commands import StartStageCommand
from hetpipe.values.events import JobState, ProgressTable, StopMode, WorkerStatus
from hetpipe.values.ids import Clock, Incarnation, LayerIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.members import MemberId
from hetpipe.values.plan import ModelReport, StagePlan
from hetpipe.values.run import AgentInfo, StageDone, StageEmulation, StageReady
from hetpipe.values.run_document import LifeSeen, RunDescription
from tests.server.coordinator.builders import (
    JOB_ID,
    agent_info,
    agent_member,
    clocks,
    job,
    layer,
    model,
    progress,
    submission,
)
from tests.server.coordinator.fakes import Cluster
from tests.server.coordinator.machine_driver import AGENTS, Driver

NEW_AGENT = agent_info("n2", devices=1)


def planned(num_layers: int = 4, *overrides: str) -> PlannedRun:
    of = job(*overrides)
    report = model(num_layers)
    return PlannedRun(of, plan_job(of, report, AGENTS, Term(1), JOB_ID), model=report)


def taken(run: PlannedRun, *free: AgentInfo) -> list[str]:
    return [stage.device for stage in new_worker(run, run.plan, free).plan.stages]


class TestDevices:
    @pytest.mark.parametrize(
        ("free", "devices"),
        [
            ({"n2": 1}, ["n2/0"]),
            ({"n2": 2}, ["n2/0", "n2/1"]),
            ({"n2": 4}, ["n2/0", "n2/1"]),
            ({"n2": 1, "n3": 3, "n4": 2}, ["n4/0", "n4/1"]),
            ({"n2": 0, "n3": 1, "n4": 1}, ["n3/0", "n4/0"]),
        ],
    )
    def test_as_many_as_the_smallest_has_on_as_few_agents_as_can_be(
        self, free: dict[str, int], devices: list[str]
    ) -> None:
        assert taken(planned(), *(agent_info(name, devices=count) for name, count in free.items())) == devices

    def test_it_may_take_more_where_memory_is_short(self) -> None:
        report = ModelReport(tuple(layer(index, parameters=1_000_000) for index in range(8)), 40, 10)
        of = job()
        run = PlannedRun(of, plan_job(of, report, AGENTS, Term(1), JOB_ID), model=report)

        def small(megabytes: int) -> AgentInfo:
            agent = agent_info("n2", devices=4)
            return replace(agent, devices=tuple(replace(one, memory_bytes=megabytes << 20) for one in agent.devices))

        assert {size: len(taken(run, small(size))) for size in (120, 90, 60)} == {120: 2, 90: 3, 60: 4}
        with pytest.raises(UserError, match="the 4 free devices do not have enough memory for the model"):
            taken(run, small(50))

    def test_none_are_free(self) -> None:
        with pytest.raises(UserError, match=r"for another one; start an agent \(`hetpipe serve agent`\)"):
            taken(planned(), agent_info("n2", devices=0))

    def test_there_are_bounds(self) -> None:
        run = planned(300, "workers.count=1", "workers.stages=2")
        (only,) = run.plan.virtual_workers
        plan = replace(run.plan, virtual_workers=(replace(only, stages=only.stages * (MAX_STAGES // 2)),))
        with pytest.raises(UserError, match=f"has {MAX_STAGES} stages, and at most {MAX_STAGES} are allowed"):
            new_worker(run, plan, [NEW_AGENT])


class TestCut:
    def cut(self, run: PlannedRun, *free: AgentInfo) -> list[int]:
        stages = new_worker(run, run.plan, free).plan.stages
        assert all(here.last_layer == there.first_layer for here, there in pairwise(stages))
        return [stage.last_layer - stage.first_layer for stage in stages]

    def test_as_a_virtual_worker_with_as_many_stages(self) -> None:
        assert self.cut(planned(4, "workers.stages=[[1,3],[2,2]]"), agent_info("n2", devices=2)) == [1, 3]

    def test_else_by_sizes(self) -> None:
        assert self.cut(planned(), NEW_AGENT) == [4]
        run = replace(planned(8, "workers.count=1", "workers.stages=4"), model=None)
        assert self.cut(run, agent_info("n2", devices=3)) == [3, 3, 2]

    def test_where_memory_is_not_known_by_sizes_as_well(self) -> None:
        unknown = tuple(replace(device, memory_bytes=0) for device in agent_info("n2", devices=2).devices)
        run = planned(6, "workers.count=1", "workers.stages=3")

        assert self.cut(run, replace(NEW_AGENT, devices=unknown)) == [3, 3]

    def test_by_a_profile_that_knows_its_type(self) -> None:
        run = planned(4, "workers.stages=[[1,3],[2,2]]")
        basis = basis_of(run, AGENTS)
        layers = tuple(
            replaced.model_copy(update={"forward_ms": {"cpu": 5.0}, "backward_ms": {"cpu": 5.0}})
            for replaced in basis.profile.layers
        )
        profile = basis.profile.model_copy(update={"layers": layers})
        found = replace(
            run, described=PlanningInputs(profile, basis.cluster, known_links(["n0"], MeasuredLinks(), now=0.0))
        )

        assert self.cut(found, agent_info("n2", devices=2)) == [2, 2]

    @pytest.mark.parametrize("kind", ["cpu", "unmeasured"])
    @pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
    def test_never_where_it_is_forbidden(self, kind: str, memory_bytes: int) -> None:
        """By times, by sizes, and where nothing is known of the devices: stages end after layers 0 and 4 only."""
        run = planned(6, "workers.count=1", "workers.stages=[[1,5]]")
        basis = basis_of(run, AGENTS)
        layers = tuple(
            layer.model_copy(update={"no_cut": "" if at in {0, 4, 5} else "a write in place"})
            for at, layer in enumerate(basis.profile.layers)
        )
        profile = basis.profile.model_copy(update={"version": 2, "layers": layers})
        run = replace(run, described=PlanningInputs(profile, basis.cluster, known_links([], MeasuredLinks(), now=0.0)))

        def free(count: int) -> AgentInfo:
            agent = agent_info("n2", devices=count)
            return replace(
                agent, devices=tuple(replace(one, type=kind, memory_bytes=memory_bytes) for one in agent.devices)
            )

        plan = replace(run.plan, virtual_workers=(replace(run.plan.virtual_workers[0], stages=self.three(run)),))
        stages = new_worker(run, plan, [free(3)]).plan.stages
        assert [stage.last_layer for stage in stages] == [1, 5, 6]
        (only,) = new_worker(run, plan, [free(1)]).plan.stages
        assert only.last_layer == 6
        stages = new_worker(run, plan, [free(2)]).plan.stages
        assert [stage.last_layer for stage in stages] in ([1, 6], [5, 6])

    def three(self, run: PlannedRun) -> tuple[StagePlan, ...]:
        first, last = run.plan.virtual_workers[0].stages
        return (first, replace(last, last_layer=LayerIndex(5)), replace(last, first_layer=LayerIndex(5)))


def test_waves_of_the_one_that_is_most_alike() -> None:
    assert new_worker(planned(), planned().plan, [NEW_AGENT]).plan.minibatches_per_wave is None
    run = planned(4, "workers.stages=[[1,3],[4]]", "sync.minibatches_per_wave=[6,2]")
    assert new_worker(run, run.plan, [agent_info("n2", devices=1)]).plan.minibatches_per_wave == 2
    run = planned(4, "workers.stages=[[1,3],[2,2]]", "sync.minibatches_per_wave=[6,4]", "weights=stash")
    assert new_worker(run, run.plan, [agent_info("n2", devices=2)]).plan.minibatches_per_wave == 4


def test_emulated_devices_go_on_being_dealt() -> None:
    emulated = ("cluster.devices=[{slowdown: 2.0}, {slowdown: 3.0}, {slowdown: 4.0}]", "workers.stages=1")
    driver = enlarged(Driver(job(*emulated)).to(JobState.STARTING))
    assert driver.tasks(Admit) == []
    for vw in (0, 1):
        driver.report(vw, 0, StageReady(1))
    begun(enlarged(driver))

    commands = [item.command for item in driver.start_commands]
    assert [c.config.device.slowdown for c in commands if isinstance(c, StartStageCommand)] == [2.0, 3.0, 4.0]


def test_agents_of_two_sets_are_claimed_once() -> None:
    all_of_n1 = agent_info("n1", devices=3)
    both = with_agents(AGENTS, [all_of_n1, NEW_AGENT])

    assert [(agent.agent, len(agent.devices)) for agent in both] == [("n0", 2), ("n1", 3), ("n2", 1)]
    assert with_agents(both, both) == both
    worker = new_worker(planned(), planned().plan, [NEW_AGENT]).plan
    assert agents_of(worker, both) == (NEW_AGENT,)


def enlarged(driver: Driver | None = None) -> Driver:
    driver = driver or Driver().to(JobState.RUNNING)
    run = driver.machine.run
    assert run is not None
    driver.feed(new_worker(run, run.plan, [NEW_AGENT]))
    return driver


def begun(driver: Driver) -> Driver:

    driver.feed(AdmitAcknowledged(Vw(2), Incarnation(1), None))
    driver.report(2, 0, StageReady(7), life=1)
    return driver


class TestMachine:
    def test_it_is_admitted_with_the_plan_that_it_is_part_of(self) -> None:
        driver = enlarged()

        (admit,) = driver.tasks(Admit)
        assert (admit.vw, admit.incarnation, admit.num_stages) == (2, 1, 1)
        assert admit.replan is not None
        assert [len(worker.stages) for worker in admit.replan.plan.virtual_workers] == [2, 2, 1]
        assert admit.replan.agents == (NEW_AGENT,)
        assert driver.machine.agents == (*AGENTS, NEW_AGENT)
        assert begun(driver).worker(2).state is LifeState.READY
        (started,) = [item for item in driver.start_commands if item.agent == "n2"]
        assert isinstance(started.command, StartStageCommand)
        assert started.command.config.plan == admit.replan.plan

    def test_its_progress_is_shown(self) -> None:
        driver = begun(enlarged())
        driver.report(2, 0, progress(samples=8, clock=2), life=1)
        driver.wait(10.0)

        rows = driver.events(ProgressTable)[-1].rows
        assert [len(row.stages) for row in rows] == [2, 2, 1]
        assert rows[2].stages[0].device == "n2/0"

    def test_when_it_dies_it_comes_back_by_the_same_plan(self) -> None:
        driver = begun(enlarged())
        driver.exit(2, 0, -9, life=1)
        driver.wait(0.5)

        driver.feed(EvictAcknowledged(Vw(2), Incarnation(1)))
        driver.wait(3.0)

        again = driver.tasks(Admit)[-1]
        assert (again.vw, again.incarnation, again.replan) == (2, 2, None)

    def test_it_leaves_like_the_others(self) -> None:
        driver = enlarged()
        driver.feed(DrainRequested(Vw(2), "out"))

        driver.feed(EvictAcknowledged(Vw(2), Incarnation(1)))
        driver.wait(6.0)
        assert driver.worker(2).state is LifeState.OUT
        driver.feed(AddRequested(Vw(2)))
        assert driver.tasks(Admit)[-1].incarnation == 2
        assert driver.tasks(Admit)[-1].replan is not None

    @pytest.mark.parametrize("mode", StopMode)
    def test_the_job_stops_meanwhile(self, mode: StopMode) -> None:
        driver = enlarged()
        driver.feed(StopRequested(mode))
        said = len(driver.said)
        begun(driver)

        assert [item for item in driver.said[said:] if getattr(item, "agent", "") == "n2"] == []
        assert ("n2" in driver.stop_commands) == (mode is StopMode.NOW)

    def test_a_job_that_does_not_run_takes_none(self) -> None:
        driver = Driver().to(JobState.STARTING)
        run = driver.machine.run
        assert run is not None
        driver.feed(NewWorker(new_worker(run, run.plan, [NEW_AGENT]).plan, (NEW_AGENT,)))

        assert driver.machine.agents == AGENTS

    def test_a_rewound_job_keeps_it(self) -> None:
        driver = begun(enlarged())
        for _ in range(2):
            driver.feed(ShardHeartbeat(MemberId("ps0"), serves=False, reason="its disk is empty"))
        for vw, stage in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0)):
            driver.exit(vw, stage, -15, life=1 if vw == 2 else 0, ordered=True)
        driver.wait(6.0)
        (rewind,) = driver.tasks(Rewind)
        assert [worker.index for worker in rewind.before.plan.virtual_workers] == [0, 1, 2]
        assert rewind.agents == (*AGENTS, NEW_AGENT)
        started = len(driver.start_commands)
        before = rewind.before
        plan = replace(before.plan, term=Term(2))
        goes_on = submission(driver.job, "/run/rewind-1")
        driver.feed(Prepared(replace(before.run, plan=plan), before.data, before.start, goes_on))

        assert [item.agent for item in driver.start_commands[started:]] == ["n0", "n0", "n1", "n1", "n2"]


def test_whose_devices_are_not_known_is_not_planned_anew() -> None:
    driver = begun(enlarged())
    lives = driver.machine.lives
    assert lives is not None
    basis = basis_of(planned(), AGENTS)
    before = Driver().to(JobState.RUNNING).machine.lives
    assert before is not None
    joined = Repartitions(before, basis, retry_seconds=1.0)
    joined.enlarge(lives.assignment.plan.virtual_workers[2], basis)
    driver.feed(MemberGone(MemberId("n2"), "agent n2 is gone"))
    others = [Repartitions(lives, known, retry_seconds=1.0) for known in (basis, None)]
    for told in (joined, *others):
        assert told.check(lives, seconds_left=1e6, now=1e6) == []


class TestWishes:
    @pytest.fixture
    def cluster(self, tmp_path: Path) -> Cluster:
        return self.started(tmp_path)

    def started(self, folder: Path, *overrides: str) -> Cluster:
        cluster = Cluster(folder / "run").usual()
        cluster.coordinator.submit_job(submission(job(*overrides), str(cluster.run_dir)))
        cluster.train()
        return cluster

    def describe(self, cluster: Cluster, *lives: LifeSeen) -> RunDescription:
        run = cluster.shards.asked("configure")[0][1].run
        kept = cluster.shards.asked("keep_run")
        run = kept[-1][1][2] if kept else run
        said = RunDescription(run.plan.term, run, lives, clocks(4, 4), (), is_over=False)
        cluster.shards.descriptions[JOB_ID] = said
        return said

    def add(self, cluster: Cluster) -> tuple[WorkerStatus, ...]:
        return WorkerRequests(cluster.coordinator).add(None, None)

    def test_it_takes_what_a_new_agent_has(self, cluster: Cluster) -> None:
        self.describe(cluster)
        cluster.join(agent_member("n2", devices=1))
        assert self.add(cluster) == (WorkerStatus(Vw(2), Incarnation(1), 0, LifeState.ADMITTING, ("n2/0",)),)
        with pytest.raises(UserError, match="no device is free for another one"):
            self.add(cluster)
        cluster.train()

        host = cluster.coordinator.host(JOB_ID)
        assert host is not None
        assert [worker.state for worker in host.machine.workers] == ["ready"] * 3
        assert cluster.shards.asked("admit") == [("shards.host:7000", (JOB_ID, 1, 2, 1, 1))]
        ((_, (_, _, run)),) = cluster.shards.asked("keep_run")
        assert [agent.agent for agent in run.agents] == ["n0", "n1", "n2"]
        assert len(run.plan.virtual_workers) == 3
        assert (cluster.run_dir / "plans" / "vw-2-life-1.json").exists()

    def test_another_coordinator_goes_on_with_it(self, cluster: Cluster) -> None:
        self.describe(cluster)
        cluster.join(agent_member("n2", devices=1))
        self.add(cluster)
        cluster.train()
        founders = (LifeSeen(Vw(0), Incarnation(0), 2, "member"), LifeSeen(Vw(1), Incarnation(0), 2, "member"))
        for lives, expected in (
            ((*founders, LifeSeen(Vw(2), Incarnation(1), 1, "member")), LifeState.READY),
            (founders, LifeState.AWAITING),
        ):
            said = self.describe(cluster, *lives)
            machine = JobMachine.adopted(said, stop=None, patience=Patience(), now=0.0)
            assert machine.lives is not None
            assert [worker.state for worker in machine.lives][2] is expected
            assert [agent.agent for agent in machine.agents] == ["n0", "n1", "n2"]

    def test_agents_that_depart_offer_nothing(self, cluster: Cluster) -> None:
        cluster.join(agent_member("n2", devices=1))
        cluster.coordinator.depart(NEW_AGENT.agent, cluster.registrations["n2"])
        with pytest.raises(UserError, match="no device is free"):
            self.add(cluster)

    def test_stages_that_alone_hold_the_weights_get_no_company(self, tmp_path: Path) -> None:
        cluster = self.started(tmp_path, "sync=allreduce", "weights=flush", "parameter_servers.count=1")
        cluster.join(agent_member("n2", devices=1))
        with pytest.raises(UserError, match=r"gets no more virtual workers: under `allreduce` only the stages hold"):
            self.add(cluster)

    def test_the_job_must_run(self) -> None:
        machine = Driver().to(JobState.STARTING).machine
        with pytest.raises(UserError, match="is starting; try again when it runs"):
            another(machine, [NEW_AGENT])

    def test_the_run_must_go_on(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.report(0, 0, StageDone(Clock(6), "end"))
        with pytest.raises(UserError, match="is over, or about to be; no virtual worker can join it any more"):
            another(driver.machine, [NEW_AGENT])

    def test_devices_that_play_others_are_dealt(self) -> None:
        driver = Driver().to(JobState.STARTING)
        played = StageEmulation(forward_seconds=(0.1,), backward_seconds=(0.1,))
        assert driver.machine._training is not None
        lives = driver.machine._training.lives
        lives._assignment = replace(lives.assignment, emulations=((played, played), (played, played)))
        driver.ready()
        with pytest.raises(UserError, match=r"with `cluster.emulate` each device plays one of the file"):
            another(driver.machine, [NEW_AGENT])
