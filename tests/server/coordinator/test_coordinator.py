"""The coordinator as a whole, without a network: members, jobs, bad input, commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from hetpipe.decide.lifecycle.planning import PLANNER, options_of
from hetpipe.errors import (
    JobError,
    MemberReplaced,
    ProtocolViolation,
    UnknownJob,
    UnknownMember,
)
from hetpipe.job.file import Job
from hetpipe.server.coordinator.job_hosts import MAX_ENDED_JOBS
from hetpipe.values.commands import InspectCommand, KeyedStageReport, StartStageCommand
from hetpipe.values.document import read_document
from hetpipe.values.events import (
    JobEnded,
    JobState,
    QueuePlace,
    StopMode,
    Submission,
)
from hetpipe.values.fit import read_fitting
from hetpipe.values.ids import AgentId, Clock, JobId
from hetpipe.values.members import MemberId, Registration
from hetpipe.values.plan import Plan
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.run import StageReady
from hetpipe.values.sync import Progress
from hetpipe.values.wire import revive
from tests.server.coordinator.builders import JOB_ID, agent_member, clocks, job, model, shard_member
from tests.server.coordinator.fakes import Cluster, failure, state, submit

T = TypeVar("T")


def place(cluster: Cluster, job_id: JobId) -> QueuePlace | None:
    host = cluster.coordinator.host(job_id)
    assert host is not None
    return host.machine.queue_place


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "run").usual()


class TestMembers:
    def test_members_are_listed_in_order_with_the_rest_of_their_lease(self, cluster: Cluster) -> None:
        cluster.clock.advance(2.0)

        members = cluster.coordinator.members()

        assert [member.info.id for member in members] == ["n0", "n1", "ps0", "ps1"]
        assert {member.lease_seconds_left for member in members} == {3.0}

    def test_a_silent_member_is_out_after_its_lease(self, cluster: Cluster) -> None:
        cluster.wait(4.5, silent=("n1",))
        assert len(cluster.coordinator.members()) == 4
        cluster.wait(0.5, silent=("n1",))
        assert [member.info.id for member in cluster.coordinator.members()] == ["n0", "ps0", "ps1"]
        with pytest.raises(UnknownMember):
            cluster.beat("n1")
        with pytest.raises(UnknownMember):
            cluster.take("n1")

    def test_an_older_registration_is_refused_everywhere(self, cluster: Cluster) -> None:
        old = cluster.registrations["n0"]
        cluster.join(agent_member("n0", devices=2, pid=101))
        cluster.registrations["n0"] = old

        for call in (lambda: cluster.beat("n0"), lambda: cluster.take("n0"), lambda: cluster.tell("n0")):
            with pytest.raises(MemberReplaced, match=r"agent n0 \(pid 101 on n0.host\) has registered as n0"):
                call()
        cluster.coordinator.leave(agent_member().id, old)
        assert len(cluster.coordinator.members()) == 4

    def test_a_process_that_registered_twice_uses_the_newer_registration(self, cluster: Cluster) -> None:
        old = cluster.registrations["n0"]
        cluster.join(agent_member("n0", devices=2))
        cluster.beat("n0")
        cluster.registrations["n0"] = old

        with pytest.raises(UnknownMember, match="newer registration"):
            cluster.beat("n0")

    def test_a_member_of_another_role_takes_no_name_that_is_in_use(self, cluster: Cluster) -> None:
        with pytest.raises(ProtocolViolation, match=r"agent n0 .* already has the id n0; give each process"):
            cluster.coordinator.register(replace(shard_member(7), id=MemberId("n0")))
        cluster.beat("n0")

    def test_a_member_that_leaves_is_out_at_once(self, cluster: Cluster) -> None:
        cluster.coordinator.leave(agent_member().id, cluster.registrations["n0"])
        cluster.coordinator.leave(agent_member().id, cluster.registrations["n0"])

        assert [member.info.id for member in cluster.coordinator.members()] == ["n1", "ps0", "ps1"]

    def test_a_heartbeat_names_the_jobs_that_have_ended(self, cluster: Cluster) -> None:
        job_id = submit(cluster)

        cluster.train()
        cluster.coordinator.stop_job(job_id, StopMode.NOW)
        cluster.train()
        cluster.wait(6.0)

        assert cluster.beat("n0", jobs=(job_id,)).ended_jobs == (job_id,)

    def test_a_job_of_which_nobody_knows_more_has_ended_after_a_while(self, cluster: Cluster) -> None:
        unknown = JobId("unknown")
        assert cluster.beat("n0", jobs=(unknown,)).ended_jobs == ()
        cluster.wait(59.0)
        assert cluster.beat("n0", jobs=(unknown,)).ended_jobs == ()
        cluster.wait(1.0)
        assert cluster.beat("n0", jobs=(unknown,)).ended_jobs == (unknown,)


class TestJobs:
    def test_a_job_runs_to_its_end(self, cluster: Cluster) -> None:
        job_id = submit(cluster)
        assert state(cluster) is JobState.INSPECTING
        cluster.train()
        assert state(cluster) is JobState.RUNNING
        cluster.finish(job_id)

        assert state(cluster) is JobState.FINISHED
        host = cluster.coordinator.host(job_id)
        assert host is not None
        ended = host.events[-1].event
        assert isinstance(ended, JobEnded)
        assert ended.result is not None
        assert ended.result["samples"] == 80

    def test_a_job_without_stages_is_measured_and_planned(self, cluster: Cluster) -> None:
        submit(cluster, "workers=null")
        cluster.train()

        assert state(cluster) is JobState.RUNNING
        profile, described = read_fitting(cluster.run_dir / "profile.json", cluster.run_dir / "cluster.yaml")
        assert profile.device_types == ("cpu",)
        assert list(described.devices) == ["n0/0", "n0/1", "n1/0", "n1/1"]
        links = "# links: measured between n0 and n1; assumed within n0, within n1\n"
        assert links in (cluster.run_dir / "cluster.yaml").read_text()
        again = PLANNER(profile, described, options_of(job("workers=null")))
        foreseen = read_document(PlanDocument, cluster.run_dir / "forecast.json")
        assert again == foreseen.model_copy(update={"run": None, "links": ()})
        assert {link.between: link.source for link in foreseen.links}["n0", "n1"] == "measured"
        assert foreseen.run is not None
        # One epoch and another of 40 samples each on a few virtual workers: filling and draining take their part.
        assert foreseen.run.samples_per_second == pytest.approx(80 / foreseen.run.seconds)
        assert foreseen.run.samples_per_second < foreseen.predicted.samples_per_second
        run = Job.model_validate(json.loads((cluster.run_dir / "job.json").read_text()))
        assert run.num_workers == len(again.virtual_workers)

    def test_shards_are_configured_clock_shard_first_and_released(self, cluster: Cluster) -> None:
        job_id = submit(cluster)
        cluster.train()
        cluster.finish(job_id)

        configured = cluster.shards.asked("configure")
        assert [(address, config.shard, config.term) for address, config in configured] == [
            ("shards.host:7000", 0, 1),
            ("shards.host:7001", 1, 1),
        ]
        assert [address for address, _ in cluster.shards.asked("release")] == ["shards.host:7000", "shards.host:7001"]

    def test_plan_and_facts_are_written(self, cluster: Cluster) -> None:
        submit(cluster)
        cluster.train()

        plan: Plan = revive(Plan, json.loads((cluster.run_dir / "plan.json").read_text()))
        facts = json.loads((cluster.run_dir / "facts.json").read_text())
        assert plan.job_id == JOB_ID
        assert facts == {
            "num_samples": 40,
            "homes": [],
            "eval_samples": 10,
            "start": {
                "clock": 0,
                "epoch": 0,
                "used": [],
                "minibatches": 0,
                "samples": 0,
                "frozen": 0,
                "waves": {},
                "lineup": 0,
                "inactive": [],
                "fresh": [],
            },
            "layers": [layer.name for layer in model().layers],
        }
        assert sorted(path.name for path in cluster.run_dir.iterdir()) == ["facts.json", "plan.json"]

    def test_terms_grow_and_are_above_all_that_shards_have_seen(self, cluster: Cluster) -> None:
        job_id = submit(cluster)
        cluster.train()
        cluster.finish(job_id)
        cluster.join(shard_member(0, term=41))
        submit(cluster, request_id="another-request")
        cluster.train()

        assert [config.term for _, config in cluster.shards.asked("configure")] == [1, 1, 42, 42]

    def test_a_resent_submission_is_the_same_job(self, cluster: Cluster) -> None:
        assert submit(cluster) == submit(cluster) == JOB_ID
        assert len(cluster.take("n0")) == 1

    def test_a_job_that_cannot_be_read_is_refused_with_all_mistakes(self, cluster: Cluster) -> None:
        broken = Submission("0123456789", json.dumps({"epochs": 0, "batch_size": 0}), "/run", "/code")

        with pytest.raises(JobError) as caught:
            cluster.coordinator.submit_job(broken)
        assert len(caught.value.problems) >= 4
        with pytest.raises(JobError, match="not JSON"):
            cluster.coordinator.submit_job(replace(broken, job_json="{"))
        with pytest.raises(ProtocolViolation, match="request id"):
            cluster.coordinator.submit_job(replace(broken, request_id="../../etc", job_json="{}"))

    def test_the_newest_job_is_meant_when_none_is_named(self, cluster: Cluster) -> None:
        with pytest.raises(UnknownJob, match="no job was submitted yet"):
            cluster.coordinator.record(None)
        submit(cluster)
        second = submit(cluster, request_id="another-request")

        assert cluster.coordinator.record(None).job_id == second
        with pytest.raises(UnknownJob, match="nonsense"):
            cluster.coordinator.stop_job(JobId("nonsense"), StopMode.NOW)

    def test_devices_are_used_by_one_job_at_a_time(self, cluster: Cluster) -> None:
        first = submit(cluster)
        second = submit(cluster, request_id="another-request")
        cluster.train()
        assert (state(cluster, first), state(cluster, second)) == (JobState.RUNNING, JobState.PENDING)
        cluster.finish(first)
        cluster.coordinator.tick()
        cluster.train()
        assert state(cluster, second) is JobState.RUNNING

    def test_a_job_that_finds_no_devices_is_pending_for_as_long_as_it_takes(self, cluster: Cluster) -> None:
        first = submit(cluster)
        second = submit(cluster, request_id="another-request")
        third = submit(cluster, request_id="the-third-request")
        cluster.train()
        cluster.wait(50.0)

        assert [state(cluster, job_id) for job_id in (second, third)] == [JobState.PENDING] * 2
        needs = f"needs 4 devices, one per stage, and 0 of 4 are free (job {first} holds 4)"
        assert place(cluster, second) == QueuePlace(1, needs)
        assert place(cluster, third) == QueuePlace(2, f"{needs}; job {second} goes first")

        assert cluster.coordinator.stop_job(second, StopMode.CHECKPOINT) is JobState.STOPPING
        cluster.executor.run_all()
        cluster.coordinator.tick()
        assert (state(cluster, second), place(cluster, third)) == (JobState.STOPPED, QueuePlace(1, needs))

    def test_a_higher_priority_goes_first_and_interrupts_nobody(self, cluster: Cluster) -> None:
        first = submit(cluster)
        second = submit(cluster, request_id="another-request")
        urgent = submit(cluster, "priority=1", request_id="the-third-request")
        cluster.train()
        cluster.wait(50.0)
        needs = f"needs 4 devices, one per stage, and 0 of 4 are free (job {first} holds 4)"
        assert place(cluster, urgent) == QueuePlace(1, needs, 1)
        assert place(cluster, second) == QueuePlace(2, f"{needs}; job {urgent} goes first")
        cluster.finish(first)
        cluster.coordinator.tick()
        cluster.train()
        assert [state(cluster, job_id) for job_id in (second, urgent)] == [JobState.PENDING, JobState.RUNNING]

    def test_nobody_overtakes_who_could_have_what_there_is(self, cluster: Cluster) -> None:
        small = submit(cluster, "workers.count=1", "workers.stages=1")
        cluster.train()
        large = submit(cluster, request_id="another-request")
        later = submit(cluster, "workers.count=1", "workers.stages=1", request_id="the-third-request")
        cluster.wait(60.0)
        assert [state(cluster, job_id) for job_id in (small, large, later)] == ["running", "pending", "pending"]
        assert place(cluster, later) == QueuePlace(2, f"job {large} goes first"), "there is room for it"

    def test_who_wants_more_than_there_is_holds_nobody_up_and_says_so(self, cluster: Cluster) -> None:
        huge = submit(cluster, "workers.count=9")
        later = submit(cluster, request_id="another-request")
        cluster.wait(60.0)
        cluster.train()
        assert (state(cluster, huge), state(cluster, later)) == (JobState.PENDING, JobState.RUNNING)
        assert place(cluster, huge) == QueuePlace(
            1,
            "needs 18 devices, one per stage, more than the 2 registered agents have (4): start more agents, "
            "or stop this job",
        )

    def test_while_members_are_on_their_way_nobody_overtakes(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path)
        first = submit(cluster)
        later = submit(cluster, "workers.count=1", "workers.stages=1", request_id="another-request")
        for info in (agent_member("n0", devices=2), shard_member(0), shard_member(1)):
            cluster.join(info)
        cluster.wait(1.0)
        assert place(cluster, later) == QueuePlace(2, f"job {first} goes first")
        cluster.join(agent_member("n1", devices=2))
        cluster.train()
        assert (state(cluster, first), state(cluster, later)) == (JobState.RUNNING, JobState.PENDING)

    def test_a_job_waits_for_late_members(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path)
        submit(cluster)
        cluster.wait(10.0)
        assert state(cluster) is JobState.PENDING
        cluster.usual()
        cluster.train()
        assert state(cluster) is JobState.RUNNING

    def test_shards_serve_in_the_order_of_their_index(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path)
        for info in (shard_member(1), shard_member(0), agent_member("n0", devices=4)):
            cluster.join(info)
        submit(cluster)
        cluster.train()

        assert [address for address, _ in cluster.shards.asked("configure")] == ["shards.host:7000", "shards.host:7001"]

    def test_only_so_many_ended_jobs_stay_in_memory(self, cluster: Cluster) -> None:
        for number in range(MAX_ENDED_JOBS + 2):
            submit(cluster, request_id=f"request-{number:08d}")
            cluster.coordinator.stop_job(None, StopMode.NOW)
            cluster.executor.run_all()
        cluster.coordinator.tick()
        cluster.executor.run_all()

        first = cluster.store.jobs()[0]
        assert cluster.coordinator.host(first.job_id) is None
        assert cluster.coordinator.record(first.job_id).state is JobState.STOPPED
        assert isinstance(cluster.coordinator.kept_events(first.job_id, after=0)[-1].event, JobEnded)


class TestRestore:
    def test_a_job_goes_on_where_a_checkpoint_was(self, cluster: Cluster) -> None:
        start = Progress(Clock(4), 1, bytes([0b101, 0, 0, 0, 0]), minibatches=8, samples=32)
        cluster.shards.progress["/old/checkpoint"] = start
        submit(cluster, restore="/old/checkpoint")
        stages = []
        while obeyed := cluster.obey():
            stages += [command for command in obeyed if isinstance(command, StartStageCommand)]

        assert {config.progress for _, config in cluster.shards.asked("configure")} == {start}
        assert {command.config.restore for command in stages} == {"/old/checkpoint"}
        facts = json.loads((cluster.run_dir / "facts.json").read_text())
        assert facts["start"] == {
            "clock": 4,
            "epoch": 1,
            "used": [0, 2],
            "minibatches": 8,
            "samples": 32,
            "frozen": 0,
            "waves": {},
            "lineup": 0,
            "inactive": [],
            "fresh": [],
        }

    def test_a_checkpoint_that_is_none_fails_the_job(self, cluster: Cluster) -> None:
        submit(cluster, restore="/old/nothing")
        cluster.train()

        assert state(cluster) is JobState.FAILED
        assert failure(cluster) == "/old/nothing: there is no checkpoint"


class TestBadInput:
    def test_a_plan_that_cannot_be_fails_the_job(self, cluster: Cluster) -> None:
        submit(cluster)
        cluster.obey(num_layers=1)

        assert "2 stages cannot share 1 layers; set workers.stages to at most 1" in failure(cluster)

    def test_a_batch_larger_than_the_data_fails_the_job(self, cluster: Cluster) -> None:
        submit(cluster, "batch_size=64")
        cluster.obey()

        assert failure(cluster) == "batch_size: is 64, but data.train has 40 samples; use at most that many"

    def test_a_run_folder_that_cannot_be_written_fails_the_job(self, cluster: Cluster) -> None:
        cluster.run_dir.write_text("a file, no folder")
        submit(cluster)
        cluster.obey()

        assert f"cannot write to the run's folder {cluster.run_dir}" in failure(cluster)

    def test_a_mistake_of_our_own_is_no_secret_but_no_traceback(self, cluster: Cluster) -> None:
        def broken(_: str) -> None:
            raise ZeroDivisionError

        object.__setattr__(cluster.coordinator._tools, "open_shard", broken)
        submit(cluster)
        cluster.obey()

        assert failure(cluster) == f"the coordinator failed to prepare job {JOB_ID} (internal error, see its log)"


class TestStops:
    def test_with_a_checkpoint_the_clock_shard_sets_a_barrier(self, cluster: Cluster) -> None:
        job_id = submit(cluster)
        cluster.train()
        assert cluster.coordinator.stop_job(None, StopMode.CHECKPOINT) is JobState.STOPPING
        cluster.executor.run_all()
        assert cluster.shards.asked("request_barrier") == [("shards.host:7000", (JOB_ID, 1, "stop"))]
        cluster.finish(job_id, "stop")

        assert state(cluster) is JobState.STOPPED
        assert cluster.coordinator.stop_job(job_id, StopMode.NOW) is JobState.STOPPED


class TestClocks:
    def test_the_clock_shard_alone_tells_them(self, cluster: Cluster) -> None:
        job_id = submit(cluster)
        cluster.train()
        host = cluster.coordinator.host(job_id)
        assert host is not None
        cluster.beat("ps1", clocks={job_id: clocks(9, 9)})
        assert host.machine.clocks is None
        cluster.beat("ps0", clocks={job_id: clocks(3, 2)})
        assert host.machine.clocks == clocks(3, 2)


class TestCommands:
    def test_a_command_stays_until_it_was_carried_out(self, cluster: Cluster) -> None:
        submit(cluster)
        registration: Registration = cluster.registrations["n0"]
        agent = AgentId("n0")
        first = cluster.coordinator.commands(agent, registration, after=0)
        again = cluster.coordinator.commands(agent, registration, after=0)
        assert first == again
        assert isinstance(first[0].command, InspectCommand)
        cluster.beat("n0", last_command=1)
        assert cluster.coordinator.commands(agent, registration, after=0) == ()

    def test_the_same_process_gets_what_it_has_not_carried_out_under_a_new_registration(self, cluster: Cluster) -> None:
        submit(cluster)
        (first,) = cluster.take("n0")
        cluster.join(agent_member("n0", devices=2))

        assert cluster.take("n0") == [first]
        cluster.beat("n0", last_command=1)
        cluster.join(agent_member("n0", devices=2))
        assert cluster.take("n0") == []

    def test_another_process_of_its_name_does_not(self, cluster: Cluster) -> None:
        submit(cluster)
        cluster.join(agent_member("n0", devices=2, pid=101))

        assert cluster.take("n0") == []

    def test_a_stage_that_reports_ready_twice_is_ready(self, cluster: Cluster) -> None:
        submit(cluster)
        cluster.train()
        key = cluster.stages("n0", JOB_ID)[0]
        cluster.tell("n0", KeyedStageReport(key, StageReady(pid=1)))

        assert state(cluster) is JobState.RUNNING
