"""What one shard admits, adds and forgets, case by case; `test_state_machine` tries the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.decide.sync.instructions import Apply, Close, Drop, Free, Initialize, Instruction, StageKey
from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    InitializeRecord,
    PublishRecord,
    Record,
    SegmentMember,
    SegmentRecord,
    TermRecord,
)
from hetpipe.decide.sync.shard_state import MAX_WAVES_AHEAD, Admission, ShardState
from hetpipe.errors import (
    ClockFreed,
    ClockNotPublished,
    SliceMismatch,
    StaleIncarnation,
    StateLost,
    WaveOutOfOrder,
)
from hetpipe.values.ids import Clock, Incarnation, StageIndex, VirtualWorkerIndex, Wave
from hetpipe.values.requests import PushHeader
from tests.decide.sync.scenario import JOB, LIFE, TERM, Scenario, push_header, requester, slice_header

VW = [VirtualWorkerIndex(vw) for vw in range(3)]
SCENARIO = Scenario(
    num_stages=(2, 1, 1),
    num_shards=1,
    n=2,
    d=1,
    deterministic=False,
    num_samples=24,
    batch_size=1,
    epochs=1,
    total_minibatches=None,
    every=None,
)


class Follower:
    """A shard that numbers the records it is given."""

    def __init__(self, scenario: Scenario = SCENARIO) -> None:
        self.scenario = scenario
        self.state = ShardState(
            job_id=JOB,
            term=TERM,
            slices=scenario.slices_of_shard(0),
            founders=scenario.members,
            start=Clock(scenario.start),
            staleness=scenario.d,
        )

    def follow(self, kind: type[Record], *fields: object) -> list[Instruction]:
        """The next record, without its index."""
        return self.state.follow(kind(self.state.followed, *fields))  # type: ignore[arg-type]

    def push(self, vw: int, wave: int | None, stage: int = 0) -> Admission:
        """A whole push of one stage."""
        header = push_header(self.scenario, vw, stage, 0, wave)
        verdict, indices = self.state.admit(header)
        if verdict is Admission.ACCEPT:
            self.state.staged_by(header, indices)
        return verdict

    def stage_wave(self, vw: int, wave: int) -> None:
        """All stages of a worker push."""
        for stage in range(self.scenario.num_stages[vw]):
            assert self.push(vw, wave, stage) is Admission.ACCEPT

    def commit(self, vw: int, wave: int, samples: int = 0) -> list[Instruction]:
        """The log commits a wave."""
        return self.follow(CommitRecord, VW[vw], LIFE, Wave(wave), samples)

    def begin(self) -> Follower:
        """Everyone has joined, w^(0) is published, the barrier is at 9."""
        self.follow(TermRecord, TERM)
        self.push(0, None)
        self.push(0, None, 1)
        initialized = self.follow(InitializeRecord, Clock(0), VW[0], LIFE)
        assert initialized == [Initialize(Clock(0), (VW[0], LIFE, None))]
        assert self.follow(PublishRecord, Clock(0), (Clock(0),)) == []
        self.segment(0, dict.fromkeys(range(len(self.scenario.num_stages)), 0))
        self.follow(BarrierRecord, Clock(9), "end", 0)
        return self

    def segment(self, start: int, lives: dict[int, int], *, joined: tuple[int, ...] | None = None) -> None:
        """A segment of these virtual workers begins."""
        new = lives if joined is None else joined
        members = tuple(SegmentMember(VW[vw], Incarnation(life), 1, joined=vw in new) for vw, life in lives.items())
        assert self.follow(SegmentRecord, Clock(start), (), 0, members) == []


def key(vw: int, wave: int) -> StageKey:
    return VW[vw], LIFE, Wave(wave)


#: Keys of what members stage beside their first waves.
BESIDE: list[StageKey] = [(vw, LIFE, None) for vw in VW]


def added(vw: int, wave: int, *, is_empty: bool = False, fresh: StageKey | None = None) -> Apply:
    return Apply(Clock(wave + 1), key(vw, wave), is_empty=is_empty, num_members=3, fresh=fresh)


def applied(instructions: list[Instruction]) -> list[tuple[int, int | None]]:
    """(vw, wave) of what is added, in order."""
    return [(i.key[0], i.key[2]) for i in instructions if isinstance(i, Apply)]


class TestFrozenLayers:
    """Their slices are not pushed, and no wave lacks them."""

    @staticmethod
    def frozen(layers: int) -> Follower:
        shard = Follower().begin()
        members = tuple(SegmentMember(VW[vw], LIFE, 1, joined=False) for vw in range(3))
        shard.state.follow(SegmentRecord(shard.state.followed, Clock(0), (), 0, members, (), 1, layers))
        return shard

    def test_a_push_of_one_is_refused(self) -> None:
        shard = self.frozen(1)
        owner = next(
            stage for stage in range(2) if 0 in shard.state.slice_index.of(push_header(SCENARIO, 0, stage, 0, 0).slices)
        )
        with pytest.raises(SliceMismatch, match=r"is of layer 0, but the first 1 layers are frozen there"):
            shard.push(0, 0, owner)

    def test_a_wave_is_whole_without_them(self) -> None:
        everything = 1 + max(piece.layer for piece in SCENARIO.slices_of_shard(0))
        shard = self.frozen(everything)
        assert shard.state.idle == frozenset(range(len(SCENARIO.slices_of_shard(0))))
        (apply,) = shard.commit(0, 0, samples=1)
        assert isinstance(apply, Apply)
        assert apply.is_empty
        again = Follower()
        shard.commit(1, 0)
        shard.commit(2, 0)
        again.state.restore(shard.state.closed(Clock(1)))
        assert again.state.idle == shard.state.idle


class TestInactiveLayers:
    """Likewise; any layers may be inactive, and they may be active again."""

    def test_their_slices_are_not_pushed_and_no_wave_lacks_them(self) -> None:
        shard = Follower().begin()
        slices = SCENARIO.slices_of_shard(0)
        off = max(piece.layer for piece in slices)
        members = tuple(SegmentMember(VW[vw], LIFE, 1, joined=False) for vw in range(3))
        shard.state.follow(SegmentRecord(shard.state.followed, Clock(0), (), 0, members, (), inactive=(off,)))
        assert shard.state.idle == frozenset(i for i, piece in enumerate(slices) if piece.layer == off)
        (owner,) = (
            stage
            for stage in range(2)
            if shard.state.idle & set(shard.state.slice_index.of(push_header(SCENARIO, 0, stage, 0, 0).slices))
        )
        with pytest.raises(SliceMismatch, match=rf"is of layer {off}, which is inactive there"):
            shard.push(0, 0, owner)
        shard.state.follow(SegmentRecord(shard.state.followed, Clock(0), (), 0, members))
        assert not shard.state.idle


class TestFreshLayers:
    """Every member stages what it has built beside its first wave, and the first one that counts is added to that."""

    SLICES = SCENARIO.slices_of_shard(0)
    LAYER = SLICES[-1].layer
    NEW = (len(SLICES) - 1,)

    def renewed(self, shard: Follower) -> Follower:
        members = tuple(SegmentMember(VW[vw], LIFE, 1, joined=True) for vw in range(3))
        shard.state.follow(SegmentRecord(shard.state.followed, Clock(0), (), 0, members, (), fresh=(self.LAYER,)))
        return shard

    def header(self, vw: int, wave: int = 0, layer: int = LAYER) -> PushHeader:
        stage = min(layer, SCENARIO.num_stages[vw] - 1)
        own = tuple(slice_header(piece) for piece in self.SLICES if piece.layer == layer)
        return PushHeader(requester(vw, stage), Wave(wave), own, fresh=True)

    def stage(self, shard: Follower, vw: int) -> None:
        verdict, indices = shard.state.admit(self.header(vw))
        assert (verdict, indices) == (Admission.ACCEPT, self.NEW)
        shard.state.staged_by(self.header(vw), indices)

    def test_the_first_wave_that_counts_is_added_to_them_and_the_others_are_dropped(self) -> None:
        shard = self.renewed(Follower().begin())
        for vw in range(3):
            self.stage(shard, vw)
            assert shard.state.admit(self.header(vw))[0] is Admission.DUPLICATE
        assert shard.commit(0, 0) == [added(0, 0, is_empty=True)]
        shard.stage_wave(1, 0)
        (apply,) = shard.commit(1, 0, samples=1)
        assert apply == added(1, 0, fresh=BESIDE[1])
        shard.stage_wave(2, 0)
        last, own, close, unused = shard.commit(2, 0, samples=1)
        assert last == added(2, 0)
        assert [own, close, unused] == [Drop(BESIDE[2]), Close(Clock(1)), Drop(BESIDE[0])]
        shard.stage_wave(1, 1)
        assert shard.commit(1, 1, samples=1) == []
        assert shard.commit(0, 1) == [added(0, 1, is_empty=True), added(1, 1)]

    def test_what_a_member_has_staged_stands_with_its_wave_and_goes_with_it(self) -> None:
        shard = self.renewed(Follower().begin())
        for vw in (1, 2):
            self.stage(shard, vw)
            shard.stage_wave(vw, 0)
        assert shard.commit(1, 0, samples=1) == []
        shard.follow(EvictRecord, VW[1], LIFE, Clock(1))
        assert Drop(BESIDE[2]) in shard.follow(EvictRecord, VW[2], LIFE, Clock(0))
        assert shard.commit(0, 0)[1] == added(1, 0, fresh=BESIDE[1])

    def test_a_wave_without_them_is_lost(self) -> None:
        shard = self.renewed(Follower().begin())
        shard.stage_wave(0, 0)
        with pytest.raises(StateLost, match=r"what is built anew for wave 0 of virtual worker 0 counts, but"):
            shard.commit(0, 0, samples=1)

    def test_other_weights_are_refused(self) -> None:
        shard = self.renewed(Follower().begin())
        for header in (self.header(0, 1), self.header(0, layer=0)):
            with pytest.raises(SliceMismatch, match=r"of layers that are not built anew there"):
                shard.state.admit(header)

    def test_a_stage_may_have_passed_a_barrier_before_the_shard(self) -> None:
        """Then it shall come again, also with a wave of a layer that is not active before."""
        shard = Follower().begin()
        off = tuple(SegmentMember(VW[vw], LIFE, 1, joined=False) for vw in range(3))
        shard.state.follow(SegmentRecord(shard.state.followed, Clock(0), (), 0, off, (), inactive=(self.LAYER,)))
        shard.follow(BarrierRecord, Clock(1), "plan", 0)
        for header in (self.header(0, 1), replace(self.header(0, 1), fresh=False)):
            with pytest.raises(ClockNotPublished, match=r"is behind the barrier at clock 1, which this shard has not"):
                shard.state.admit(header)

    def test_they_are_staged_again_after_a_restart(self) -> None:
        shard = Follower()
        shard.state.restore(Follower().begin().state.closed(Clock(0)))
        self.renewed(shard)
        assert shard.state.restage(self.header(0), self.NEW)
        shard.stage_wave(0, 0)
        (apply,) = shard.commit(0, 0, samples=1)
        assert apply == added(0, 0, fresh=BESIDE[0])
        assert not shard.state.restage(self.header(0), self.NEW), "its wave is committed, and added"


class TestOrder:
    def test_waves_are_added_in_the_order_of_the_workers_whoever_commits_first(self) -> None:
        shard = Follower().begin()
        for vw in range(3):
            shard.stage_wave(vw, 0)
        assert shard.commit(2, 0) == []
        assert applied(shard.commit(0, 0)) == [(0, 0)]
        instructions = shard.commit(1, 0)
        assert applied(instructions) == [(1, 0), (2, 0)]
        assert instructions[-1] == Close(Clock(1))
        assert instructions[0] == Apply(Clock(1), key(1, 0), is_empty=False, num_members=3)

    def test_a_wave_waits_for_the_clock_before_it(self) -> None:
        shard = Follower().begin()
        for vw in range(3):
            shard.stage_wave(vw, 0)
            shard.stage_wave(vw, 1)
        for vw in (2, 1):
            shard.commit(vw, 0)
            assert shard.commit(vw, 1) == []
        assert applied(shard.commit(0, 0)) == [(0, 0), (1, 0), (2, 0)]
        assert applied(shard.commit(0, 1)) == [(0, 1), (1, 1), (2, 1)]
        assert shard.state.built == 2

    def test_an_empty_wave_is_applied_too(self) -> None:
        shard = Follower().begin()
        assert shard.commit(0, 0) == [Apply(Clock(1), key(0, 0), is_empty=True, num_members=3)]

    def test_a_wave_with_a_slice_missing_cannot_have_been_committed(self) -> None:
        shard = Follower().begin()
        shard.push(0, 0, 1)
        with pytest.raises(StateLost, match=r"1 slices of it that this shard .* lost \(0.weight\)"):
            shard.commit(0, 0, 2)

    def test_a_wave_with_samples_and_no_slices_is_not_taken_for_an_empty_one(self) -> None:
        """It would count on the other shards only."""
        shard = Follower().begin()
        with pytest.raises(StateLost, match="slices of it"):
            shard.commit(0, 0, 2)

    def test_a_shard_without_slices_applies_every_wave(self) -> None:
        shard = Follower(replace(SCENARIO, num_shards=3))
        shard.state = ShardState(
            job_id=JOB, term=TERM, slices=(), founders=SCENARIO.members, start=Clock(0), staleness=1
        )
        shard.follow(InitializeRecord, Clock(0), VW[0], LIFE)
        shard.segment(0, {0: 0, 1: 0, 2: 0})
        assert shard.commit(0, 0, 2) == [Apply(Clock(1), key(0, 0), is_empty=True, num_members=3)]


class TestEviction:
    def test_of_the_one_that_is_waited_for_closes_the_clock(self) -> None:
        """In any place: what the others committed is added, in order, and nothing is waited for any more."""
        for gone in range(3):
            shard = Follower().begin()
            others = [vw for vw in range(3) if vw != gone]
            for vw in others:
                shard.stage_wave(vw, 0)
            before = [a for vw in others for a in applied(shard.commit(vw, 0))]
            instructions = shard.follow(EvictRecord, VW[gone], LIFE, Clock(0))
            assert before + applied(instructions) == [(vw, 0) for vw in others]
            assert instructions[-1] == Close(Clock(1))

    def test_committed_waves_stand_and_staged_ones_go(self) -> None:
        shard = Follower().begin()
        for wave in (0, 1, 2):
            shard.stage_wave(1, wave)
        shard.commit(1, 0)
        shard.commit(1, 1)
        assert shard.follow(EvictRecord, VW[1], LIFE, Clock(2)) == [Drop(key(1, 2))]
        found: list[tuple[int, int | None]] = []
        for wave in (0, 1, 2):
            for vw in (0, 2):
                shard.stage_wave(vw, wave)
                found += applied(shard.commit(vw, wave))
        assert found == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (2, 2)]
        with pytest.raises(StaleIncarnation, match="no longer a member"):
            shard.push(1, 2)

    def test_shares_change_at_the_barrier_and_not_before(self) -> None:
        shard = Follower().begin()
        shard.follow(EvictRecord, VW[2], LIFE, Clock(0))
        shard.follow(BarrierRecord, Clock(1), "evict", 0)
        for wave, members in [(0, 3), (1, 2)]:
            for vw in (0, 1):
                shard.stage_wave(vw, wave)
                (apply, *_) = shard.commit(vw, wave)
                assert isinstance(apply, Apply)
                assert apply.num_members == members
            shard.follow(PublishRecord, Clock(wave + 1), (Clock(wave + 1),))
            if wave == 0:
                shard.segment(1, {0: 0, 1: 0}, joined=())

    def test_initial_weights_of_somebody_else_are_forgotten(self) -> None:
        """A second worker sent some, because it took the first one for dead."""
        shard = Follower()
        shard.push(0, None)
        shard.push(0, None, 1)
        shard.push(1, None)
        instructions = shard.follow(InitializeRecord, Clock(0), VW[0], LIFE)
        assert instructions == [Initialize(Clock(0), (VW[0], LIFE, None)), Drop((VW[1], LIFE, None))]
        assert shard.push(1, None) is Admission.DUPLICATE


class TestBarrier:
    def test_it_drops_nothing(self) -> None:
        """Only empty waves lie beyond it. After a restart, old barriers are read again when new waves are staged."""
        shard = Follower().begin()
        for wave in (0, 1, 2):
            shard.stage_wave(1, wave)
        assert shard.follow(BarrierRecord, Clock(1), "stop", 0) == []
        assert list(shard.state.staged) == [key(1, 0), key(1, 1), key(1, 2)]

    def test_with_nobody_left_clocks_are_completed_up_to_it(self) -> None:
        """What the dead have committed stands."""
        shard = Follower().begin()
        for wave in (0, 1):
            shard.stage_wave(1, wave)
            shard.commit(1, wave)
        assert applied(shard.follow(EvictRecord, VW[0], LIFE, Clock(0))) == [(1, 0)]
        for vw in (1, 2):
            assert shard.follow(EvictRecord, VW[vw], LIFE, Clock(0)) == []
        instructions = shard.follow(BarrierRecord, Clock(3), "evict", 0)
        assert instructions == [
            Close(Clock(1)),
            Apply(Clock(2), key(1, 1), is_empty=False, num_members=3),
            Close(Clock(2)),
            Close(Clock(3)),
        ]

    def test_a_barrier_drops_no_initial_weights(self) -> None:
        shard = Follower()
        shard.push(0, None)
        assert shard.follow(BarrierRecord, Clock(1), "stop", 0) == []


class TestSegments:
    def test_a_new_life_may_push_once_the_shard_has_read_of_it(self) -> None:
        shard = Follower().begin()
        shard.follow(EvictRecord, VW[1], LIFE, Clock(0))
        header = push_header(SCENARIO, 1, 0, 0, 1)
        newer = replace(header, requester=replace(header.requester, incarnation=Incarnation(1)))
        with pytest.raises(ClockNotPublished, match="not yet read the record of its join"):
            shard.state.admit(newer)
        for vw in (0, 2):
            shard.stage_wave(vw, 0)
            shard.commit(vw, 0)
        shard.follow(PublishRecord, Clock(1), (Clock(1),))
        shard.segment(1, {0: 0, 1: 1, 2: 0}, joined=(1,))
        assert shard.state.admit(newer)[0] is Admission.ACCEPT
        with pytest.raises(StaleIncarnation, match="in incarnation 1"):
            shard.state.admit(header)
        before = push_header(SCENARIO, 1, 0, 0, 0)
        with pytest.raises(WaveOutOfOrder):
            shard.state.admit(replace(before, requester=newer.requester))
        assert shard.push(0, 0) is Admission.DUPLICATE, "who was there before may repeat what it sent then"

    def test_initial_weights_of_an_older_life_come_too_late(self) -> None:
        shard = Follower()
        header = push_header(SCENARIO, 0, 0, 0, None)
        newer = replace(header, requester=replace(header.requester, incarnation=Incarnation(1)))
        shard.state.staged_by(newer, shard.state.admit(newer)[1])
        with pytest.raises(StaleIncarnation, match="is in incarnation 1"):
            shard.state.admit(header)


class TestRestart:
    def test_it_continues_from_where_a_clock_was_complete(self) -> None:
        """With the log from there on and the pushes that were staged, the same is added in the same order."""
        shard, fresh = Follower().begin(), Follower()
        for vw in range(3):
            for wave in (0, 1):
                shard.stage_wave(vw, wave)
        records: list[Record] = []
        for vw, wave in [(2, 0), (2, 1), (0, 0), (1, 0), (0, 1)]:
            records.append(CommitRecord(shard.state.followed, VW[vw], LIFE, Wave(wave), 1))
            shard.state.follow(records[-1])
        closed = shard.state.closed(Clock(1))
        fresh.state.restore(closed)
        wanted = {
            (vw, wave): fresh.state.restage(*_staged(vw, wave, stage))
            for vw in range(3)
            for wave in (0, 1)
            for stage in range(SCENARIO.num_stages[vw])
        }
        assert {where for where, still in wanted.items() if still} == {(0, 1), (1, 1), (2, 1)}
        found = fresh.state.resume()
        for record in records[closed.followed - records[0].index :]:
            found += fresh.state.follow(record)
        found += fresh.commit(1, 1)
        assert applied(found) == [(0, 1), (1, 1), (2, 1)]
        assert fresh.state.built == 2


def _staged(vw: int, wave: int, stage: int) -> tuple[PushHeader, tuple[int, ...]]:
    header = push_header(SCENARIO, vw, stage, 0, wave)
    return header, Follower().state.slice_index.of(header.slices)


class TestAdmission:
    def test_a_push_may_be_d_plus_two_waves_ahead(self) -> None:
        shard = Follower().begin()
        shard.commit(1, 0)
        assert shard.push(1, 4) is Admission.ACCEPT
        for wave in (5, -1, -(2**63), 2**63 - 1):
            with pytest.raises(WaveOutOfOrder):
                shard.push(1, wave)

    def test_without_a_bound_a_push_far_ahead_shall_come_again(self) -> None:
        shard = Follower(replace(SCENARIO, d=None)).begin()
        assert shard.push(1, MAX_WAVES_AHEAD) is Admission.ACCEPT
        with pytest.raises(ClockNotPublished, match="push it later"):
            shard.push(1, MAX_WAVES_AHEAD + 1)
        shard.commit(1, 0)
        assert shard.push(1, MAX_WAVES_AHEAD + 1) is Admission.ACCEPT
        with pytest.raises(WaveOutOfOrder):
            shard.push(1, -1)

    def test_repetitions(self) -> None:
        shard = Follower().begin()
        assert shard.push(0, 0) is Admission.ACCEPT
        assert shard.push(0, 0) is Admission.DUPLICATE
        assert shard.push(0, 0, 1) is Admission.ACCEPT
        shard.commit(0, 0)
        assert shard.push(0, 0) is Admission.DUPLICATE
        assert shard.push(0, None) is Admission.DUPLICATE, "initial weights count once, too"

    def test_a_slice_has_one_owner_per_wave(self) -> None:
        shard = Follower().begin()
        shard.push(0, 0, 1)
        stolen = push_header(SCENARIO, 1, 0, 0, 0)
        with pytest.raises(SliceMismatch, match=r"slice 1\.weight of wave 0 is already staged"):
            shard.state.admit(PushHeader(requester(0, 0), Wave(0), stolen.slices))
        assert shard.push(1, 0) is Admission.ACCEPT, "another worker's wave is another matter"

    def test_a_stage_index_is_part_of_who_staged_what(self) -> None:
        shard = Follower().begin()
        header = push_header(SCENARIO, 0, 1, 0, 0)
        shard.push(0, 0, 1)
        other = replace(header, requester=replace(header.requester, stage=StageIndex(0)))
        with pytest.raises(SliceMismatch):
            shard.state.admit(other)


class TestPulls:
    def test_only_what_is_published_and_retained(self) -> None:
        shard = Follower().begin()
        for vw in range(3):
            shard.stage_wave(vw, 0)
            shard.commit(vw, 0)
        with pytest.raises(ClockNotPublished, match="the newest is 0"):
            shard.state.check_pull(Clock(1))
        assert shard.follow(PublishRecord, Clock(1), (Clock(0), Clock(1))) == []
        shard.state.check_pull(Clock(0))
        shard.state.check_pull(Clock(1))
        for vw in range(3):
            shard.stage_wave(vw, 1)
            shard.commit(vw, 1)
        assert shard.follow(PublishRecord, Clock(2), (Clock(2),)) == [Free(Clock(0)), Free(Clock(1))]
        with pytest.raises(ClockFreed, match=r"holds \[2\]"):
            shard.state.check_pull(Clock(1))

    def test_the_log_is_followed_without_gaps(self) -> None:
        shard = Follower().begin()
        with pytest.raises(AssertionError, match="after"):
            shard.state.follow(TermRecord(99, TERM))
