"""What every store guarantees. A subclass gives the fixture `store`, and `advance`, which lets its time pass."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from hetpipe.errors import NotLeader, StoreDamaged, UnknownMember, VersionConflict
from hetpipe.storage import memory_store, redis_store
from hetpipe.storage.store import CandidateId, Fence, JobRecord, Lead, MemberRecord, Store
from hetpipe.values.counters import FENCES, TERMS
from hetpipe.values.events import JobEnded, JobEvent, JobState, NumberedEvent, StateChanged, Waiting
from hetpipe.values.ids import JobId, Term
from hetpipe.values.members import MemberId, Registration
from tests.server.coordinator.builders import agent_member, shard_member

Advance = Callable[[float], None]

FIRST, SECOND = Registration("first"), Registration("second")


def record(name: str = "digits") -> JobRecord:
    return JobRecord(
        job_id=JobId(name), name=name, state=JobState.SUBMITTED, run_dir=f"/runs/{name}", submitted_wall=1_700_000_000.5
    )


def acquire(store: Store, candidate: str, *, above: int = 0) -> Lead:
    return store.acquire_lead(CandidateId(candidate), f"coordinator {candidate}", above=Fence(above), lease_seconds=5.0)


def numbered(sequence: int) -> NumberedEvent:
    return NumberedEvent(sequence, Waiting(f"wait {sequence}", 5.0))


@dataclass(frozen=True, slots=True)
class Kept:
    """Everything that a store keeps."""

    members: tuple[MemberRecord, ...]
    term: Term
    jobs: tuple[JobRecord, ...]
    events: dict[JobId, tuple[NumberedEvent, ...]]
    lead: Lead


def fill(store: Store) -> None:
    """Let a store keep something of every kind, by every call that writes."""
    store.release_lead(acquire(store, "a", above=40))
    lead = store.acquire_lead(CandidateId("b"), "coordinator b", above=Fence(0), lease_seconds=600.0)
    store.renew_lead(lead, lease_seconds=600.0)
    for info in (agent_member("n1"), shard_member(0, term=7), agent_member("n0"), agent_member("gone")):
        store.put_member(info, FIRST, lease_seconds=600.0)
    store.renew_member(MemberId("n1"), FIRST, lease_seconds=600.0)
    store.put_member(agent_member("n0", pid=9), SECOND, lease_seconds=600.0)
    store.remove_member(MemberId("gone"), FIRST)
    store.next_term(above=Term(7))
    for second, name in enumerate(("waits", "runs", "ended")):
        submitted = store.create_job(replace(record(name), submitted_wall=1_700_000_000.0 + second))
        store.append_event(submitted.job_id, numbered(1))
        if name != "waits":
            running = store.replace_job(submitted.at(JobState.RUNNING, failure=""))
            store.append_event(running.job_id, numbered(2))
        if name == "ended":
            store.append_event(running.job_id, NumberedEvent(3, JobEnded(JobState.FINISHED)))
            store.replace_job(running.at(JobState.FINISHED, failure=""), keep_seconds=600.0)
            store.append_event(running.job_id, numbered(4))


def kept_by(store: Store) -> Kept:
    """What a store keeps; another candidate hears who leads."""
    jobs = store.jobs()
    events = {job.job_id: store.events(job.job_id) for job in jobs}
    return Kept(store.members(), store.term(), jobs, events, acquire(store, "curious"))


class DurableStoreContract:
    """Inherited by the tests of stores that outlive their server's process, besides the other contract.

    A subclass gives the fixtures `store` and `restart`, which ends that process, by SIGKILL or not, and begins another.
    """

    @pytest.mark.parametrize("kill", [False, True], ids=["shutdown", "kill"])
    def test_a_restart_loses_nothing(
        self,
        store: Store,
        restart: Callable[[bool], None],
        kill: bool,  # noqa: FBT001 - a parameter
    ) -> None:
        fill(store)
        before = kept_by(store)
        assert (len(before.members), before.term, len(before.jobs), before.lead.fence) == (3, 8, 3, 42)
        assert [len(events) for events in before.events.values()] == [1, 2, 4]

        restart(kill)

        assert kept_by(store) == before
        assert not store.repair()
        # The counters behind it are there, too.
        assert store.put_member(agent_member("n2"), FIRST, lease_seconds=5.0).order > before.members[-1].order
        assert store.next_term(above=Term(0)) == 9
        store.create_job(record("next"))
        assert [job.name for job in store.jobs()] == ["waits", "runs", "ended", "next"]
        store.release_lead(before.lead)
        assert acquire(store, "c").fence == 43


class StoreContract:
    """Inherited by the test class of every implementation."""

    # -- members

    def test_members_come_back_as_they_were_in_order_of_registration(self, store: Store) -> None:
        for info in (shard_member(1, term=7), agent_member("n1"), agent_member("n0")):
            store.put_member(info, FIRST, lease_seconds=5.0)

        members = store.members()

        assert [member.info for member in members] == [shard_member(1, term=7), agent_member("n1"), agent_member("n0")]
        assert [member.order for member in members] == sorted(member.order for member in members)
        assert {member.registration for member in members} == {FIRST}

    def test_a_lease_runs_out(self, store: Store, advance: Advance) -> None:
        store.put_member(agent_member(), FIRST, lease_seconds=5.0)
        advance(4.9)
        assert len(store.members()) == 1
        advance(0.2)
        assert store.members() == ()
        assert store.members() == ()

    def test_a_renewal_counts_from_now(self, store: Store, advance: Advance) -> None:
        store.put_member(agent_member(), FIRST, lease_seconds=5.0)
        advance(4.0)
        store.renew_member(MemberId("n0"), FIRST, lease_seconds=5.0)
        advance(4.0)
        assert len(store.members()) == 1
        advance(1.1)
        assert store.members() == ()

    def test_a_renewal_needs_a_live_member_and_its_newest_registration(self, store: Store, advance: Advance) -> None:
        with pytest.raises(UnknownMember):
            store.renew_member(MemberId("n0"), FIRST, lease_seconds=5.0)
        store.put_member(agent_member(), FIRST, lease_seconds=5.0)
        store.put_member(agent_member(), SECOND, lease_seconds=5.0)
        with pytest.raises(UnknownMember):
            store.renew_member(MemberId("n0"), FIRST, lease_seconds=5.0)
        advance(5.1)
        with pytest.raises(UnknownMember):
            store.renew_member(MemberId("n0"), SECOND, lease_seconds=5.0)

    def test_a_live_member_keeps_its_order_when_it_registers_again(self, store: Store, advance: Advance) -> None:
        first = store.put_member(agent_member("n0"), FIRST, lease_seconds=5.0)
        store.put_member(agent_member("n1"), FIRST, lease_seconds=50.0)

        again = store.put_member(agent_member("n0", pid=9), SECOND, lease_seconds=5.0)

        assert again.order == first.order
        assert [member.info.pid for member in store.members()] == [9, 100]
        advance(5.1)
        late = store.put_member(agent_member("n0"), FIRST, lease_seconds=5.0)
        assert late.order > first.order
        assert [member.info.id for member in store.members()] == ["n1", "n0"]

    def test_removal_needs_the_registration_and_may_be_repeated(self, store: Store) -> None:
        store.put_member(agent_member(), SECOND, lease_seconds=5.0)
        store.remove_member(MemberId("n0"), FIRST)
        assert len(store.members()) == 1
        store.remove_member(MemberId("n0"), SECOND)
        store.remove_member(MemberId("n0"), SECOND)
        assert store.members() == ()

    # -- the lead

    def test_the_first_candidate_leads_and_others_hear_of_it(self, store: Store) -> None:
        lead = acquire(store, "a")
        assert lead == Lead(CandidateId("a"), "coordinator a", Fence(1))
        assert acquire(store, "b") == lead
        assert acquire(store, "a") == lead

    def test_a_lead_runs_out_unless_it_is_renewed(self, store: Store, advance: Advance) -> None:
        first = acquire(store, "a")
        advance(4.0)
        store.renew_lead(first, lease_seconds=5.0)
        advance(4.0)
        assert acquire(store, "b") == first
        advance(1.1)
        second = acquire(store, "b")
        assert (second.candidate, second.fence) == ("b", 2)
        with pytest.raises(NotLeader, match="coordinator b has the lead"):
            store.renew_lead(first, lease_seconds=5.0)

    def test_the_leader_renews_by_asking_again(self, store: Store, advance: Advance) -> None:
        lead = acquire(store, "a")
        advance(4.0)
        assert acquire(store, "a") == lead
        advance(4.0)
        assert acquire(store, "b") == lead

    def test_a_lead_that_ran_out_comes_back_if_nobody_has_led_since(self, store: Store, advance: Advance) -> None:
        first = acquire(store, "a")
        advance(6.0)
        store.renew_lead(first, lease_seconds=5.0)
        assert acquire(store, "b") == first
        advance(6.0)
        store.release_lead(acquire(store, "b"))
        with pytest.raises(NotLeader):
            store.renew_lead(first, lease_seconds=5.0)

    def test_a_released_lead_is_free_at_once(self, store: Store) -> None:
        first = acquire(store, "a")
        store.release_lead(first)
        store.release_lead(first)
        second = acquire(store, "b")
        store.release_lead(first)
        assert acquire(store, "a") == second

    def test_fences_only_grow(self, store: Store) -> None:
        fences = []
        for above in (0, 41, 7):
            lead = acquire(store, "a", above=above)
            store.release_lead(lead)
            fences.append(lead.fence)
        assert fences == [1, 42, 43]

    def test_one_of_many_candidates_leads(self, store: Store) -> None:
        with ThreadPoolExecutor(8) as pool:
            leads = set(pool.map(lambda number: acquire(store, f"c{number}"), range(16)))

        assert len(leads) == 1

    # -- terms

    def test_terms_only_grow(self, store: Store) -> None:
        assert [store.next_term(above=Term(0)) for _ in range(3)] == [1, 2, 3]
        assert store.next_term(above=Term(41)) == 42
        assert store.next_term(above=Term(7)) == 43

    def test_the_highest_term_is_known(self, store: Store) -> None:
        assert store.term() == 0
        store.next_term(above=Term(41))
        assert store.term() == 42

    def test_counters_stop_before_their_limits(self, store: Store) -> None:
        with pytest.raises(StoreDamaged, match="no term is left"):
            store.next_term(above=Term(TERMS.limit - 1))
        assert store.next_term(above=Term(TERMS.limit - 2)) == TERMS.limit - 1
        with pytest.raises(StoreDamaged, match="no fence is left"):
            acquire(store, "a", above=FENCES.limit - 1)
        assert acquire(store, "a", above=FENCES.limit - 2).fence == FENCES.limit - 1

    def test_no_term_is_given_twice(self, store: Store) -> None:
        with ThreadPoolExecutor(8) as pool:
            terms = list(pool.map(lambda _: store.next_term(above=Term(0)), range(80)))

        assert sorted(terms) == list(range(1, 81))

    # -- jobs

    def test_a_job_comes_back_as_it_was(self, store: Store) -> None:
        assert store.job(JobId("digits")) is None
        created = store.create_job(record())
        assert created == record()
        assert store.job(JobId("digits")) == created

    def test_creating_a_job_again_changes_nothing(self, store: Store) -> None:
        store.create_job(record())
        kept = store.replace_job(record().at(JobState.RUNNING, failure=""))

        assert store.create_job(record()) == kept

    def test_jobs_come_in_order_of_creation(self, store: Store) -> None:
        for name in ("b", "a", "c"):
            store.create_job(record(name))

        assert [job.name for job in store.jobs()] == ["b", "a", "c"]

    def test_replacing_needs_the_version(self, store: Store) -> None:
        with pytest.raises(VersionConflict):
            store.replace_job(record())
        first = store.create_job(record())
        second = store.replace_job(first.at(JobState.INSPECTING, failure=""))
        assert second.version == 2
        assert store.job(first.job_id) == second
        with pytest.raises(VersionConflict):
            store.replace_job(first.at(JobState.FAILED, failure="it broke"))
        with pytest.raises(VersionConflict):
            store.replace_job(replace(second, version=9))
        assert store.job(first.job_id) == second

    def test_the_same_replacement_again_has_the_same_answer(self, store: Store) -> None:
        first = store.create_job(record()).at(JobState.FAILED, failure="it broke")

        assert store.replace_job(first) == store.replace_job(first)

    def test_one_of_many_writers_wins(self, store: Store) -> None:
        first = store.create_job(record())

        def write(writer: int) -> int:
            try:
                store.replace_job(first.at(JobState.FAILED, failure=f"writer {writer}"))
            except VersionConflict:
                return 0
            return 1

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(write, range(16))) == 1

    def test_an_ended_job_is_forgotten_after_its_time_with_its_events(self, store: Store, advance: Advance) -> None:
        created = store.create_job(record())
        store.create_job(record("other"))
        store.append_event(created.job_id, numbered(1))
        ended = store.replace_job(created.at(JobState.FINISHED, failure=""), keep_seconds=60.0)
        store.append_event(created.job_id, numbered(2))
        advance(59.0)
        assert store.jobs() == (ended, record("other"))
        advance(1.5)
        assert store.job(created.job_id) is None
        assert store.events(created.job_id) == ()
        assert store.jobs() == (record("other"),)

    # -- events

    def test_events_come_back_in_order(self, store: Store) -> None:
        kinds: list[JobEvent] = [
            StateChanged(JobState.RUNNING),
            Waiting("a waits for b", 5.0),
            JobEnded(JobState.FINISHED, result={"loss": {"last": 0.5}}),
        ]
        store.create_job(record())
        for sequence, event in enumerate(kinds, start=1):
            store.append_event(JobId("digits"), NumberedEvent(sequence, event))

        assert [event.event for event in store.events(JobId("digits"))] == kinds
        assert [event.sequence for event in store.events(JobId("digits"), after=1)] == [2, 3]
        assert [event.sequence for event in store.events(JobId("digits"), after=1, limit=1)] == [2]
        assert store.events(JobId("digits"), after=3) == ()

    def test_event_numbers_grow_and_repeats_have_no_effect(self, store: Store) -> None:
        store.create_job(record())
        store.append_event(JobId("digits"), numbered(1))
        store.append_event(JobId("digits"), NumberedEvent(1, Waiting("another", 1.0)))
        store.append_event(JobId("digits"), numbered(1_000_000_001))
        store.append_event(JobId("digits"), numbered(2))

        assert store.events(JobId("digits")) == (numbered(1), numbered(1_000_000_001))
        assert store.events(JobId("digits"), after=1) == (numbered(1_000_000_001),)

    def test_events_need_their_job(self, store: Store) -> None:
        with pytest.raises(VersionConflict):
            store.append_event(JobId("digits"), numbered(1))
        assert store.events(JobId("digits")) == ()

    def test_the_number_of_events_is_bounded(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        most = 300  # in place of 10,000: an event is a request
        for module in (memory_store, redis_store):
            monkeypatch.setattr(module, "MAX_EVENTS", most)
        store.create_job(record())
        for sequence in range(1, most + 3):
            store.append_event(JobId("digits"), numbered(sequence))

        assert [event.sequence for event in store.events(JobId("digits"), limit=2)] == [3, 4]
        assert store.events(JobId("digits"), after=most + 1) == (numbered(most + 2),)
