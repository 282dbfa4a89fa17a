"""Who leads: the table, its decisions, candidates over one store, and over a real Redis."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest

from hetpipe.decide.lifecycle.leadership import (
    TABLE,
    Event,
    Leadership,
    LeadershipState,
    LeadGranted,
    LeadRefused,
    LeadStep,
    NoAnswer,
    ShutdownRequested,
    TimePassed,
)
from hetpipe.errors import InvalidTransition, NotLeader, StoreUnavailable
from hetpipe.server.coordinator.candidate import Candidate
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.storage.redis_store import RedisStore
from hetpipe.storage.store import CandidateId, Fence, Lead, LeadStore
from hetpipe.values.ids import Term
from tests.storage.redis_server import Server, needs_redis
from tests.support.fake_clock import FakeClock

LEASE = 5.0


def leading(asked: float = 0.0) -> Leadership:
    leadership = Leadership(LEASE)
    assert leadership.take(LeadGranted(asked), now=asked).standing is LeadershipState.LEADING
    return leadership


class TestDecisions:
    def test_a_lease_counts_from_before_the_question(self) -> None:
        leadership = Leadership(LEASE)
        decision = leadership.take(LeadGranted(requested=10.0), now=12.0)
        assert (decision.standing, decision.left_seconds) == (LeadershipState.LEADING, 2.5)
        assert leadership.take(TimePassed(), now=14.4).standing is LeadershipState.LEADING
        decision = leadership.take(TimePassed(), now=14.5)
        assert decision.standing is LeadershipState.HOLDING
        assert decision.reason == "the store has not renewed its lead for 4.5 s (it has not answered since)"

    def test_a_renewal_counts_from_before_it_was_asked_for(self) -> None:
        leadership = leading()
        assert leadership.take(LeadGranted(requested=1.0), now=3.0).left_seconds == 2.5
        assert leadership.take(LeadGranted(requested=0.5), now=3.0).left_seconds == 2.5  # an answer that was overtaken

    def test_a_grant_that_comes_too_late_is_none(self) -> None:
        decision = Leadership(LEASE).take(LeadGranted(requested=0.0), now=4.5)
        assert (decision.standing, decision.reason) == (
            LeadershipState.STANDING_BY,
            "the store granted the lead too late",
        )
        assert leading().take(LeadGranted(requested=0.0), now=4.5).standing is LeadershipState.HOLDING

    def test_a_store_that_is_silent_for_longer_than_the_lease_is_waited_for(self) -> None:
        leadership = leading()
        assert leadership.take(NoAnswer("Redis is away"), now=4.4).standing is LeadershipState.LEADING
        decision = leadership.take(TimePassed(), now=4.6)
        assert decision.standing is LeadershipState.HOLDING
        assert "Redis is away" in decision.reason
        assert leadership.take(NoAnswer("still"), now=60.0).standing is LeadershipState.HOLDING
        assert leadership.take(LeadGranted(requested=61.0), now=61.1).standing is LeadershipState.LEADING

    def test_who_holds_ends_when_another_one_leads(self) -> None:
        leadership = leading()
        leadership.take(TimePassed(), now=5.0)
        assert leadership.take(LeadRefused("b has the lead"), now=6.0).standing is LeadershipState.STEPPED_DOWN

    def test_another_leader_costs_the_lead_at_once(self) -> None:
        decision = leading().take(LeadRefused("b has the lead"), now=0.1)
        assert (decision.standing, decision.reason) == (LeadershipState.STEPPED_DOWN, "b has the lead")

    def test_who_stepped_down_never_leads_again(self) -> None:
        leadership = leading()
        leadership.take(ShutdownRequested(), now=0.1)
        for event in (
            LeadGranted(0.2),
            LeadRefused("b has the lead"),
            NoAnswer("away"),
            TimePassed(),
            ShutdownRequested(),
        ):
            assert leadership.take(event, now=0.3).standing is LeadershipState.STEPPED_DOWN

    def test_every_event_has_a_step_in_every_standing(self) -> None:
        events: tuple[Event, ...] = (
            LeadGranted(0.0),
            LeadRefused("b"),
            NoAnswer("away"),
            TimePassed(),
            ShutdownRequested(),
        )
        for standing, event, now in product(LeadershipState, events, (0.0, 100.0)):
            leadership = leading()
            leadership.standing = standing
            leadership.take(event, now=now)

    def test_a_step_that_is_not_in_the_table_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Leadership, "_step_of", lambda *_: (LeadStep.RAN_OUT, ""))
        with pytest.raises(InvalidTransition, match="standing_by cannot take ran_out"):
            Leadership(LEASE).take(TimePassed(), now=0.0)

    def test_nothing_leads_back(self) -> None:
        assert set(TABLE) == set(LeadershipState)
        assert set(TABLE[LeadershipState.STEPPED_DOWN].values()) == {LeadershipState.STEPPED_DOWN}


@dataclass
class Coordinators:
    """Candidates on one store; each owns a view of it that can be slow, silent, or dead."""

    clock: FakeClock = field(default_factory=FakeClock)
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.clock)

    def candidate(self, name: str, store: LeadStore | None = None) -> Candidate:
        return Candidate(store or self.store, name, clock=self.clock, on_lost=self.lost.append, lease_seconds=LEASE)


def standing(candidate: Candidate) -> LeadershipState:
    candidate.check_lease()
    return candidate._leadership.standing


class TestCandidates:
    def test_the_second_leads_once_the_first_has_ended(self) -> None:
        both = Coordinators()
        first, second = both.candidate("a"), both.candidate("b")
        assert first.run_for(threading.Event())
        fence = first.fence
        assert second.request_lead().reason == "a has the lead"
        first.end()

        assert second.request_lead().standing is LeadershipState.LEADING
        assert second.fence > fence
        assert both.lost == []
        second.end()

    def test_who_is_told_to_end_while_standing_by_never_leads(self) -> None:
        both = Coordinators()
        first, second = both.candidate("a"), both.candidate("b")
        first.request_lead()
        give_up = threading.Event()
        give_up.set()

        assert not second.run_for(give_up)
        second.end()
        assert first.request_lead().standing is LeadershipState.LEADING
        first.end()

    def test_a_store_that_is_away_at_the_start_is_an_error_and_later_it_is_not(self) -> None:
        both = Coordinators()
        store = Slow(both.store, lambda: None)
        store.away = True
        candidate = both.candidate("a", store)
        with pytest.raises(StoreUnavailable):
            candidate.run_for(threading.Event())
        assert candidate.request_lead().reason == "it is away"
        store.away = False
        assert candidate.request_lead().standing is LeadershipState.LEADING
        candidate.end()

    def test_whoever_has_seen_a_later_one_is_outbid(self) -> None:
        """The store has forgotten how high the number was; the members have not."""
        both = Coordinators()
        leader, second = both.candidate("a"), both.candidate("b")
        assert leader.run_for(threading.Event())
        leader.raise_fence(0)
        assert leader.fence == 1, "it is above that already"
        leader.raise_fence(7)
        assert leader.fence == 8
        assert leader.request_lead().standing is LeadershipState.LEADING
        assert second.request_lead().reason == "a has the lead"
        assert both.lost == []
        leader.end()

    def test_who_leads_no_more_outbids_nobody(self) -> None:
        both = Coordinators()
        first, second = both.candidate("a"), both.candidate("b")
        first.request_lead()
        both.clock.advance(6.0)
        assert second.request_lead().standing is LeadershipState.LEADING
        with pytest.raises(NotLeader, match="b has the lead"):
            first.raise_fence(7)
        assert first.request_lead().standing is LeadershipState.STEPPED_DOWN
        first.end()
        assert second.request_lead().standing is LeadershipState.LEADING
        second.end()

    def test_the_loss_is_told_once(self) -> None:
        both = Coordinators()
        first, second = both.candidate("a"), both.candidate("b")
        first.request_lead()
        both.clock.advance(6.0)
        assert second.request_lead().standing is LeadershipState.LEADING
        first.request_lead()
        first.check_lease()
        assert both.lost == ["a has lost the lead: b has the lead"]
        first.end()
        assert second.request_lead().standing is LeadershipState.LEADING
        second.end()
        assert len(both.lost) == 1

    def test_a_question_without_an_answer_does_not_hide_the_end_of_the_lease(self) -> None:
        both = Coordinators()
        during: list[LeadershipState] = []

        def pause() -> None:
            both.clock.advance(4.6)
            during.append(standing(candidate))

        store = Slow(both.store, pause)
        candidate = both.candidate("a", store)
        store.pauses = False
        candidate.request_lead()
        store.pauses = True
        candidate.request_lead()
        assert during[:1] == [LeadershipState.HOLDING]
        assert both.lost == []

    def test_a_lead_that_was_granted_too_late_is_asked_for_again(self) -> None:
        both = Coordinators()
        store = Slow(both.store, lambda: both.clock.advance(4.7))
        candidate, rival = both.candidate("a", store), both.candidate("b")
        assert candidate.request_lead().standing is LeadershipState.STANDING_BY
        assert candidate.request_lead().standing is LeadershipState.STANDING_BY
        both.clock.advance(6.0)
        assert rival.request_lead().standing is LeadershipState.LEADING
        store.pauses = False
        assert candidate.request_lead().reason == "b has the lead"
        rival.end()
        assert candidate.request_lead().standing is LeadershipState.LEADING


class Slow:
    """A store whose calls take time before and after they have their effect, or get no answer."""

    def __init__(self, behind: LeadStore, pause: Callable[[], object]) -> None:
        self._behind = behind
        self._pause = pause
        self.pauses = True
        self.away = False

    def acquire_lead(self, candidate: CandidateId, name: str, *, above: Fence, lease_seconds: float) -> Lead:
        self._before()
        lead = self._behind.acquire_lead(candidate, name, above=above, lease_seconds=lease_seconds)
        self._after()
        return lead

    def renew_lead(self, lead: Lead, *, lease_seconds: float) -> None:
        self._before()
        self._behind.renew_lead(lead, lease_seconds=lease_seconds)
        self._after()

    def _before(self) -> None:
        if self.away:
            raise StoreUnavailable("it is away")
        if self.pauses:
            self._pause()

    def _after(self) -> None:
        if self.pauses:
            self._pause()
        if self.away:
            raise StoreUnavailable("it is away")

    def release_lead(self, lead: Lead) -> None:
        self._behind.release_lead(lead)

    def close(self) -> None:
        self._behind.close()


class Election:
    """Three coordinators whose calls take any time and get lost; one that lost its lead is started again."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.everybody = Coordinators()
        self.stores = [Slow(self.everybody.store, lambda: self._pause(0.5)) for _ in range(3)]
        self.candidates = [self._start(index) for index in range(3)]
        self.busy: set[int] = set()
        self.led: set[int] = set()
        self.fences: list[int] = []

    def _start(self, index: int) -> Candidate:
        return self.everybody.candidate(f"c{index}", self.stores[index])

    def _pause(self, most: float) -> None:
        """Time goes by, and the others go on."""
        for _ in range(self.random.randrange(1 + int(most * 10 * self.random.choice((0, 0, 1, 8))))):
            self.step()

    def step(self) -> None:
        self.everybody.clock.advance(0.1)
        leaders = [index for index, one in enumerate(self.candidates) if standing(one) is LeadershipState.LEADING]
        assert len(leaders) <= 1
        self.led |= set(leaders)
        self.fences += [lead.fence for index in leaders if (lead := self.candidates[index]._lead) is not None]
        index = self.random.randrange(3)
        if index in self.busy or len(self.busy) > 1:
            return
        if standing(self.candidates[index]) is LeadershipState.STEPPED_DOWN:
            self.candidates[index] = self._start(index)
        self.stores[index].away = self.random.random() < 0.2
        self.busy.add(index)
        self.candidates[index].request_lead()
        self.busy.discard(index)


@pytest.mark.parametrize("seed", range(2))
def test_never_two_act_at_once(seed: int) -> None:
    election = Election(seed)
    for _ in range(400):
        election.step()

    assert election.fences == sorted(election.fences)
    assert len(election.led) > 1


@needs_redis
class TestOverRedis:
    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[Server]:
        server = Server(tmp_path)
        yield server
        server.stop()

    def test_one_of_two_acts(self, server: Server) -> None:
        lost: list[str] = []
        clock = FakeClock()
        first, second = (
            Candidate(RedisStore(server.url), name, clock=clock, on_lost=lost.append) for name in ("first", "second")
        )
        assert first.run_for(threading.Event())
        own = RedisStore(server.url, fence=lambda: first.fence)
        assert own.next_term(above=Term(0)) == 1
        assert second.request_lead().reason == "first has the lead"

        first.end()
        assert second.run_for(threading.Event())

        with pytest.raises(NotLeader):
            own.next_term(above=Term(0))
        own.close()
        third = Candidate(RedisStore(server.url), "third", clock=clock, on_lost=lost.append)
        server.advance(6.0)
        assert third.request_lead().standing is LeadershipState.LEADING
        assert lost == []
        second.request_lead()
        assert lost == ["second has lost the lead: third has the lead"]
        second.end()
        assert third.request_lead().standing is LeadershipState.LEADING
        third.end()
