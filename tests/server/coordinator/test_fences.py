"""The number of a lead: above what members have seen, and heard by them with every lease."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from hetpipe.errors import NotLeader, ProtocolViolation, StaleTerm
from hetpipe.server.coordinator.control_numbers import Fences
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.servicer import CoordinatorServicer
from hetpipe.server.member_session import Hooks, MemberSession
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.values.bounds import MAX_COUNT
from hetpipe.values.counters import EVENTS_PER_LEAD, FENCES, MAX_REPORTED_AHEAD
from hetpipe.values.ids import JobId
from hetpipe.values.members import MemberId, MemberInfo, MemberRole
from hetpipe.wire.coordinator_client import CoordinatorClient
from hetpipe.wire.fencing import FenceGuard
from hetpipe.wire.server import Server, ServerConfig
from tests.server.coordinator.builders import agent_member, shard_member
from tests.server.coordinator.fakes import FakeShards
from tests.support.fake_clock import FakeClock


class Lead:
    """The lead of one coordinator; whoever has lost it can raise_fence nobody."""

    outage = ""

    def __init__(self, fence: int) -> None:
        self.fence = fence
        self.is_lost = False

    def raise_fence(self, fence: int) -> None:
        if self.is_lost:
            raise NotLeader("another coordinator leads")
        self.fence = fence + 1


class TestMeeting:
    def test_a_member_that_has_seen_a_later_one_costs_a_number(self) -> None:
        lead = Lead(2)
        Fences(lead).meet(replace(shard_member(0), highest_fence=7))
        assert lead.fence == 8

    @pytest.mark.parametrize("highest", [0, 1])
    def test_one_that_has_seen_less_costs_none(self, highest: int) -> None:
        lead = Lead(2)
        Fences(lead).meet(replace(shard_member(0), highest_fence=highest))
        assert lead.fence == 2

    def test_the_own_number_is_no_others_once_they_have_met(self) -> None:
        lead = Lead(2)
        fences, member = Fences(lead), replace(agent_member(), highest_fence=2)
        fences.meet(member)
        assert lead.fence == 3, "an earlier coordinator had the same number, from a store that was wiped since"
        fences.meet(replace(member, highest_fence=3))
        assert lead.fence == 3

    def test_a_worker_that_is_only_listed_says_nothing(self) -> None:
        lead = Lead(2)
        Fences(lead).meet(MemberInfo(MemberRole.WORKER, MemberId("w"), "h", 1, highest_fence=9))
        assert lead.fence == 2

    @pytest.mark.parametrize("fence", [MAX_REPORTED_AHEAD + 3, FENCES.largest_reported + 1, MAX_COUNT - 1])
    def test_a_report_out_of_range_is_refused(self, fence: int) -> None:
        lead = Lead(2)
        with pytest.raises(ProtocolViolation, match=f"reports a fence of {fence}; this coordinator's is 2"):
            Fences(lead).meet(replace(shard_member(0), highest_fence=fence))
        assert lead.fence == 2

    def test_reports_add_up_to_no_more_than_one(self) -> None:
        lead = Lead(2)
        fences = Fences(lead)
        fences.meet(replace(shard_member(0), highest_fence=MAX_REPORTED_AHEAD))
        fences.meet(replace(shard_member(1), highest_fence=MAX_REPORTED_AHEAD + 2))
        assert lead.fence == MAX_REPORTED_AHEAD + 3
        with pytest.raises(ProtocolViolation):
            fences.meet(replace(shard_member(2), highest_fence=MAX_REPORTED_AHEAD + 4))

    def test_newcomers_that_have_seen_the_own_number_cost_no_more_either(self) -> None:
        lead = Lead(2)
        fences = Fences(lead)
        fences.meet(replace(shard_member(0), highest_fence=MAX_REPORTED_AHEAD))
        for index in range(1, 9):
            fences.meet(replace(shard_member(index), highest_fence=lead.fence))
        assert lead.fence == MAX_REPORTED_AHEAD + 2

    def test_in_the_reserve_the_store_alone_gives_numbers(self) -> None:
        lead = Lead(FENCES.largest_reported + 5)
        Fences(lead).meet(replace(shard_member(0), highest_fence=FENCES.largest_reported + 4))
        with pytest.raises(ProtocolViolation):
            Fences(lead).meet(replace(shard_member(0), highest_fence=FENCES.largest_reported + 6))

    def test_every_event_of_every_lead_has_a_number_that_can_be(self) -> None:
        assert (FENCES.limit - 1) * EVENTS_PER_LEAD < MAX_COUNT
        assert FENCES.largest_reported + MAX_REPORTED_AHEAD < FENCES.limit

    def test_many_members_are_not_all_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hetpipe.server.coordinator.control_numbers._MAX_MET", 2)
        fences = Fences(Lead(2))
        for index in range(5):
            fences.meet(shard_member(index))
        assert len(fences._met) <= 2


class Process:
    """A coordinator behind a real server, and a member of it."""

    def __init__(self, fence: int) -> None:
        self.lead = Lead(fence)
        clock = FakeClock()
        self.coordinator = Coordinator(MemoryStore(), FakeShards().tools, clock=clock, election=self.lead)
        self.server = Server(ServerConfig(num_threads=4))
        CoordinatorServicer(self.coordinator, host="here").add_to(self.server)
        self.client = CoordinatorClient(self.server.start())
        self.fences = FenceGuard()
        self.ended: list[JobId] = []
        hooks = Hooks(jobs=lambda: (JobId("ended"),), on_ended_jobs=self.ended.extend)
        self.clock = FakeClock()
        self.membership = MemberSession(self.client, shard_member(0), hooks=hooks, fences=self.fences, clock=self.clock)

    def close(self) -> None:
        self.membership.abandon()
        self.client.close()
        self.server.stop(grace_seconds=0.0)
        self.coordinator.close()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    with closing(Process(fence=4)) as value:
        monkeypatch.setattr(value.coordinator, "_may_have_processes", lambda _job_id, _teller: False)
        yield value


class TestMembership:
    def test_a_number_that_no_lead_can_have_is_not_heard(self, process: Process) -> None:
        process.membership._register()
        process.lead.fence = FENCES.limit
        process.membership.beat()
        assert (process.fences.highest, process.ended) == (4, [])

    def test_leases_and_renewals_carry_the_number(self, process: Process) -> None:
        assert process.membership._register().fence == 4
        assert process.membership.is_led
        process.lead.fence = 6
        process.membership.beat()
        assert process.fences.highest == 6

    def test_a_renewal_by_one_that_leads_no_more_is_no_answer(self, process: Process) -> None:
        registration = process.membership._register().registration
        process.fences.check(9)
        process.lead.is_lost = True
        process.clock.advance(3.0)
        with capture_logs() as logs:
            process.membership.beat()

        assert [entry["event"] for entry in logs if entry.get("member")] == [
            "coordinator_leads_no_more",
            "later_lead_reported",
            "not_registered",
        ]
        assert (process.ended, process.membership.silent_seconds) == ([], 3.0)
        assert not process.membership.is_led
        assert process.membership.lease.registration == registration

    def test_one_whose_number_was_lost_takes_a_higher_one(self, process: Process) -> None:
        process.membership._register()
        process.fences.check(9)
        process.membership.beat()
        assert (process.lead.fence, process.membership.lease.fence, process.membership.is_led) == (10, 10, True)
        process.membership.beat()
        assert process.ended == ["ended"]

    def test_a_lease_of_one_that_leads_no_more_is_none(self, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process.lead, "raise_fence", lambda _: None)
        process.fences.check(9)
        with pytest.raises(StaleTerm, match="its fence is 4, and a coordinator with fence 9 has acted since"):
            process.membership.start()
        assert not process.membership.is_led
