"""What the decision log decides, case by case; `test_state_machine` tries the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.decide.sync.decision_log import FROM_NEWEST_SEGMENT, DecisionLog, LogState
from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    HandoverRecord,
    InitializeRecord,
    NewCut,
    PlanRecord,
    PrepareRecord,
    PublishRecord,
    SegmentMember,
    SegmentRecord,
    TermRecord,
)
from hetpipe.errors import ClockNotPublished, ProtocolViolation, StaleIncarnation, WaveOutOfOrder
from hetpipe.values import wire
from hetpipe.values.activation import Activation
from hetpipe.values.freezing import FreezeChange, FreezeCut, Freezing, FrozenSince
from hetpipe.values.ids import Clock, Incarnation, Minibatch, ShardIndex, StageIndex, Wave
from hetpipe.values.policies import WeightPolicy
from hetpipe.values.sync import (
    DecidedMove,
    MemberChange,
    PlanChange,
    PlanMove,
    PlanVersion,
    Progress,
    WaveChange,
    WaveNumbers,
)
from tests.decide.sync.logs import SCENARIO, VW, acknowledge, begun, commit, started
from tests.decide.sync.scenario import LIFE, TERM


def founder(vw: int, num_stages: int) -> SegmentMember:
    """A member of the first segment."""
    return SegmentMember(VW[vw], LIFE, num_stages, joined=True)


class TestDecisionLog:
    def test_the_first_records(self) -> None:
        log = started()
        assert log.records == [
            TermRecord(0, TERM),
            InitializeRecord(1, Clock(0), VW[0], LIFE),
            PublishRecord(2, Clock(0), (Clock(0),)),
            SegmentRecord(3, Clock(0), (), 0, (founder(0, 2), founder(1, 1))),
            BarrierRecord(4, Clock(6), "epoch+end", 0),
        ]

    def test_who_may_join(self) -> None:
        log = DecisionLog(SCENARIO.log_config())
        assert not log.join(VW[0], LIFE, StageIndex(1))
        assert not log.join(VW[0], LIFE, StageIndex(1))
        assert log.present(VW[0]) == (1,)
        with pytest.raises(ProtocolViolation, match="2 stages"):
            log.join(VW[0], LIFE, StageIndex(2))
        with pytest.raises(StaleIncarnation, match="no such virtual worker"):
            log.join(VW[2], LIFE, StageIndex(0))
        with pytest.raises(StaleIncarnation, match="the newest is 0"):
            log.join(VW[0], Incarnation(1), StageIndex(0))

    def test_nothing_is_published_before_all_have_joined(self) -> None:
        log = DecisionLog(SCENARIO.log_config())
        for stage in (0, 1):
            log.join(VW[0], LIFE, StageIndex(stage))
            log.initialized(VW[0], LIFE, StageIndex(stage))
        acknowledge(log)
        assert log.published == -1
        assert log.join(VW[1], LIFE, StageIndex(0))[0] == PublishRecord(2, Clock(0), (Clock(0),))

    def test_the_first_whole_set_of_initial_weights_counts(self) -> None:
        log = DecisionLog(SCENARIO.log_config())
        log.initialized(VW[0], LIFE, StageIndex(0))
        assert log.initialized(VW[1], LIFE, StageIndex(0)) == [InitializeRecord(1, Clock(0), VW[1], LIFE)]
        assert not log.initialized(VW[0], LIFE, StageIndex(1))

    def test_nothing_is_staged_before_the_initial_weights_are_published(self) -> None:
        log = DecisionLog(SCENARIO.log_config())
        with pytest.raises(WaveOutOfOrder):
            log.staged(VW[0], LIFE, Wave(0), StageIndex(0), (), segment=log.segment.start)

    def test_distance_d_plus_one_blocks_and_d_proceeds(self) -> None:
        log = started()
        for wave in range(3):
            commit(log, 1, wave)
        assert log.members[VW[1]].committed == 2, "wave 2 waits until clock 1 is published"
        assert log.max_distance == 2
        commit(log, 0, 0)
        acknowledge(log)
        assert log.published == 1
        assert log.members[VW[1]].committed == 3

    def test_a_wave_counts_when_all_stages_have_reported_and_shards_have_applied_it(self) -> None:
        log = started(replace(SCENARIO, num_shards=2))
        commit(log, 1, 0)
        assert not log.staged(VW[0], LIFE, Wave(0), StageIndex(1), None, segment=log.segment.start)
        assert not log.awaits_shards
        committed = log.staged(VW[0], LIFE, Wave(0), StageIndex(0), ((3, 4), (5,)), segment=log.segment.start)
        assert committed == [CommitRecord(log.num_records - 1, VW[0], LIFE, Wave(0), 3)]
        assert isinstance(committed[0], CommitRecord)
        assert log.take_used(committed[0]) == (0, (3, 4, 5))
        assert log.awaits_shards
        assert not log.acknowledge(ShardIndex(0), log.num_records)
        assert not log.acknowledge(ShardIndex(1), log.num_records - 1), "not the record of the last commit"
        published = log.acknowledge(ShardIndex(1), log.num_records)
        assert published == [PublishRecord(log.num_records - 1, Clock(1), (Clock(1),))]

    def test_questions_at_switch_points(self) -> None:
        log = started()
        with pytest.raises(WaveOutOfOrder):
            log.hold(VW[0], LIFE, -1)
        assert log.hold(VW[0], LIFE, 2) == 0
        with pytest.raises(ClockNotPublished, match="minibatch 8 needs clock 2, but the newest published is 0"):
            log.hold(VW[0], LIFE, 4)
        with pytest.raises(WaveOutOfOrder):
            log.hold(VW[0], LIFE, 1)
        for wave in range(2):
            commit(log, 0, wave)
            commit(log, 1, wave)
            acknowledge(log)
        assert log.hold(VW[0], LIFE, 2) == 0, "the same question gets the same answer"
        assert log.hold(VW[0], LIFE, 3) == 2
        assert log.hold(VW[1], LIFE, 2) == 1, "no clock that holds updates minibatch 4 must not see"

    def test_who_is_waited_for(self) -> None:
        log = DecisionLog(SCENARIO.log_config())
        assert log.pending_publish_reason() == "the stages of virtual workers 0, 1"
        log.join(VW[1], LIFE, StageIndex(0))
        for stage in (0, 1):
            log.join(VW[0], LIFE, StageIndex(stage))
        assert log.pending_publish_reason() == "the initial weights"
        log = started()
        commit(log, 0, 0)
        assert log.pending_publish_reason() == "virtual worker 1 to commit wave 0"
        commit(log, 1, 0)
        assert log.pending_publish_reason() == "parameter servers [0] to apply wave 0"

    def test_the_snapshot(self) -> None:
        log = started()
        log.staged(VW[1], LIFE, Wave(0), StageIndex(0), ((1, 2),), segment=log.segment.start)
        found = log.snapshot()
        assert (found.term, found.published, found.global_clock, found.local) == (TERM, 0, 0, {0: 0, 1: 1})
        assert (found.minibatches, found.samples, found.barrier, found.barrier_reason) == (1, 2, 6, "epoch+end")
        assert found.max_distance == 1

    def test_a_stop_ends_the_run_where_it_is_set(self) -> None:
        log = started()
        (barrier,) = log.request_barrier("stop")
        assert barrier == BarrierRecord(log.num_records - 1, Clock(3), "stop", 0)
        for wave in range(3):
            commit(log, 0, wave)
            commit(log, 1, wave)
            acknowledge(log)
        assert log.finished
        assert log.published == 3
        with pytest.raises(WaveOutOfOrder):
            log.staged(VW[0], LIFE, Wave(3), StageIndex(0), (), segment=log.segment.start)
        assert not log.request_barrier("stop")

    def test_a_barrier_drops_the_empty_waves_at_or_beyond_it(self) -> None:
        log = started()
        for wave in range(6):
            log.staged(VW[0], LIFE, Wave(wave), StageIndex(1), None, segment=log.segment.start)
        log.request_barrier("stop")
        assert log.segment.end == 3
        assert sorted(log.members[VW[0]].reports) == [0, 1, 2]
        with pytest.raises(WaveOutOfOrder, match="it may report wave 3, below the barrier at 3"):
            log.staged(VW[0], LIFE, Wave(3), StageIndex(1), None, segment=log.segment.start)

    def test_under_asp_a_barrier_is_beyond_what_needs_no_question(self) -> None:
        """Minibatches up to (start + 2)·N − 1 start without one, later ones up to the next switch point after it."""
        log = started(replace(SCENARIO, d=None))
        assert log.request_barrier("stop") == [BarrierRecord(log.num_records - 1, Clock(2), "stop", 0)]
        log = started(replace(SCENARIO, d=None))
        log.hold(VW[1], LIFE, 3)
        assert log.request_barrier("stop") == [BarrierRecord(log.num_records - 1, Clock(4), "stop", 0)]

    def test_under_asp_a_barrier_is_not_below_what_an_evicted_worker_committed(self) -> None:
        log = started(replace(SCENARIO, d=None))
        for wave in range(4):
            commit(log, 1, wave)
        log.evict(VW[1], LIFE)
        assert log.segment.end == 4
        log.request_barrier("stop")
        assert (log.segment.end, log.segment.reason) == (4, "evict+stop")

    def test_an_eviction_keeps_the_end_of_the_epoch_only_if_the_work_is_done(self) -> None:
        """12 blocks each, 6 waves: all committed, or one missing."""
        scenario = replace(SCENARIO, d=4)
        for committed, reason in [(6, "epoch+end+evict"), (5, "evict")]:
            log = started(scenario)
            for wave in range(committed):
                commit(log, 1, wave)
                if wave < 3:
                    commit(log, 0, wave)
                    acknowledge(log)
            log.evict(VW[1], LIFE)
            assert (log.segment.end, log.segment.reason) == (6, reason)

    def test_an_evicted_workers_part_is_waited_for_until_shards_know_that_it_will_not_come(self) -> None:
        log = started()
        commit(log, 0, 0)
        log.acknowledge(ShardIndex(0), log.num_records)
        log.evict(VW[1], LIFE)
        assert log.published == 0
        log.acknowledge(ShardIndex(0), log.num_records - 2)
        assert log.published == 0
        log.acknowledge(ShardIndex(0), log.num_records)
        assert log.published == 1

    def test_with_nobody_left_nothing_is_decided(self) -> None:
        log = started()
        log.evict(VW[0], LIFE)
        log.evict(VW[1], LIFE)
        acknowledge(log)
        assert log.global_clock == log.published == 0
        assert not log.finished
        assert log.pending_publish_reason() == "any virtual worker to rejoin"
        log.validate_state()

    def test_a_barrier_that_was_asked_for_is_not_forgotten_when_it_is_set_anew(self) -> None:
        log = started(replace(SCENARIO, d=None, num_samples=1000))
        log.hold(VW[0], LIFE, 10)
        log.request_barrier("stop")
        log.evict(VW[0], LIFE)
        assert (log.segment.end, log.segment.reason) == (11, "stop+evict")
        log.evict(VW[1], LIFE)
        assert (log.segment.end, log.segment.reason) == (1, "stop+evict")

    def test_a_late_copy_of_a_report_does_not_count_in_the_next_segment(self) -> None:
        """The barrier has dropped the empty wave that it is of."""
        log = started(replace(SCENARIO, weights="flush"))
        began = log.segment.start
        log.request_barrier("checkpoint")
        end = log.segment.end
        for wave in range(end):
            commit(log, 0, wave)
            commit(log, 1, wave)
            acknowledge(log)
        assert log.segment.start == end
        with pytest.raises(WaveOutOfOrder, match="of the segment that began at 0"):
            log.staged(VW[1], LIFE, Wave(end), StageIndex(0), (), segment=began)


class TestDraining:
    def test_who_is_drained_leaves_at_the_next_barrier(self) -> None:
        log = started()
        (barrier,) = log.drain(VW[1], LIFE)
        assert isinstance(barrier, BarrierRecord)
        assert (barrier.clock, barrier.reason) == (3, "drain")
        assert not log.drain(VW[1], LIFE), "again"
        for wave in range(3):
            commit(log, 0, wave)
            commit(log, 1, wave)
            acknowledge(log)
        newest = log.records_from(-1)[0]
        assert isinstance(newest, SegmentRecord)
        assert newest.members == (SegmentMember(VW[0], LIFE, 2, joined=False),)
        assert newest.left == (SegmentMember(VW[1], LIFE, 1, joined=False),)
        log.check_stage(VW[1], LIFE, StageIndex(0))
        assert not log.staged(VW[1], LIFE, Wave(2), StageIndex(0), (), segment=Clock(0)), (
            "said before, and not answered"
        )
        with pytest.raises(WaveOutOfOrder, match="virtual worker 1 left at clock 3, but reports wave 3"):
            log.staged(VW[1], LIFE, Wave(3), StageIndex(0), (), segment=Clock(0))
        assert log.evict(VW[1], LIFE) == [HandoverRecord(log.num_records - 1, VW[1], LIFE, Clock(3), whole=False)]
        assert not log.evict(VW[1], LIFE), "its process has ended"
        with pytest.raises(StaleIncarnation):
            log.check_stage(VW[1], LIFE, StageIndex(0))
        assert log.segment.end > 3, "the other goes on"

    @pytest.mark.parametrize("case", ["whole", "not written", "written in part", "could not", "comes back"])
    def test_what_a_leaver_hands_over_is_decided_once(self, case: str) -> None:
        log = started()
        log.drain(VW[0], LIFE)
        first, second = StageIndex(0), StageIndex(1)
        assert not log.state_written(VW[0], LIFE, first, Clock(0), whole=True), "it has not left"
        for wave in range(3):
            commit(log, 0, wave)
            commit(log, 1, wave)
            acknowledge(log)
        record, before = HandoverRecord(log.num_records, VW[0], LIFE, Clock(3), whole=case == "whole"), log.num_records
        assert not log.state_written(VW[0], LIFE, first, Clock(2), whole=True), "of another barrier"
        assert not log.state_written(VW[1], LIFE, first, Clock(3), whole=True), "of one that goes on"
        with pytest.raises(ProtocolViolation, match="there is no stage 2"):
            log.state_written(VW[0], LIFE, StageIndex(2), Clock(3), whole=True)
        if case in ("whole", "written in part"):
            assert not log.state_written(VW[0], LIFE, first, Clock(3), whole=True)
            assert not log.state_written(VW[0], LIFE, first, Clock(3), whole=True), "again"
        if case == "whole":
            assert log.state_written(VW[0], LIFE, second, Clock(3), whole=True) == [record]
        if case == "could not":
            assert log.state_written(VW[0], LIFE, second, Clock(3), whole=False) == [record]
            assert not log.state_written(VW[0], LIFE, first, Clock(3), whole=False)
        restored = DecisionLog.restore(log.config, log.state())
        for each in (log, restored):
            if case == "comes back":
                each.admit(VW[0], Incarnation(1), 2)
            else:
                each.evict(VW[0], LIFE)
            assert not each.state_written(VW[0], LIFE, second, Clock(3), whole=True)
            assert each.records_from(before) == [record]

    def test_who_left_may_be_at_work_until_its_end_is_known(self) -> None:
        """Also behind the next barrier, and though it is asked to leave once more."""
        log = started()
        log.drain(VW[1], LIFE)
        for wave in range(3):
            commit(log, 0, wave)
            commit(log, 1, wave)
            acknowledge(log)
        log.request_barrier("checkpoint")
        while log.segment.start == 3:
            commit(log, 0, log.members[VW[0]].committed)
            acknowledge(log)
        assert not log.drain(VW[1], LIFE)
        log.check_stage(VW[1], LIFE, StageIndex(0))
        newest = log.records_from(-1)[0]
        assert isinstance(newest, SegmentRecord)
        assert not newest.left
        log.admit(VW[1], Incarnation(1), 1)
        with pytest.raises(StaleIncarnation):
            log.check_stage(VW[1], LIFE, StageIndex(0))

    def test_a_newcomer_is_let_go_at_once(self) -> None:
        log = started()
        log.admit(VW[2], Incarnation(0), 1)
        assert not log.drain(VW[2], Incarnation(0))
        assert not log.newcomers

    def test_all_may_leave_and_others_come_instead(self) -> None:
        """So the model is cut anew: everybody leaves with its state, and comes back with other stages."""
        log = started()
        for vw in (0, 1):
            log.drain(VW[vw], LIFE)
        for wave in range(log.segment.end):
            commit(log, 0, wave)
            commit(log, 1, wave)
            acknowledge(log)
        assert not log.members
        start = log.segment.start
        assert log.global_clock == start
        for vw, stages in ((0, 1), (1, 2)):
            log.admit(VW[vw], Incarnation(1), stages)
            for stage in range(stages):
                log.join(VW[vw], Incarnation(1), StageIndex(stage))
        acknowledge(log)
        log.validate_state()
        assert list(log.members) + list(log.newcomers) == [0, 1]
        assert log.segment.start == start + 1

    def test_nobody_leaves_at_the_end(self) -> None:
        log = started()
        log.drain(VW[1], LIFE)
        log.request_barrier("stop")
        while not log.finished:
            for vw in (0, 1):
                commit(log, vw, log.members[VW[vw]].committed)
            acknowledge(log)
        assert list(log.members) == [0, 1]
        assert not log.drain(VW[1], LIFE)


class TestForgetting:
    def test_records_before_the_last_but_one_segment_go(self) -> None:
        log = started(replace(SCENARIO, every=2))
        for wave in range(4):
            commit(log, 0, wave)
            commit(log, 1, wave)
            acknowledge(log)
        first = log.records[0]
        assert isinstance(first, SegmentRecord)
        assert (first.start, log.first) == (2, first.index)
        with pytest.raises(ProtocolViolation, match=f"holds records {first.index} to"):
            log.records_from(0)
        with pytest.raises(ProtocolViolation, match="is not available"):
            log.records_from(log.num_records + 1, jumps=True)
        assert log.records_from(0, jumps=True) == log.records_from(-1)
        log.validate_state()

    def test_what_a_shard_may_ask_for_again_stays(self) -> None:
        log = started(replace(SCENARIO, every=2))
        for wave in range(4):
            commit(log, 0, wave)
            commit(log, 1, wave)
            while log.acknowledged[0] < log.num_records:
                log.acknowledge(ShardIndex(0), log.num_records, 0)
        assert log.first == 5, "all of those at the start, which said that it kept them"
        with pytest.raises(ProtocolViolation, match="of them durable"):
            log.acknowledge(ShardIndex(0), 3, 4)

    def test_a_restored_log_decides_as_the_first_one_would(self) -> None:
        log = started(replace(SCENARIO, every=2))
        commit(log, 1, 0)
        text = wire.to_json(LogState, log.state())
        other = DecisionLog.restore(log.config, wire.from_json(LogState, text))
        assert other.state() == log.state()
        for each in (log, other):
            commit(each, 0, 0)
            acknowledge(each)
        assert other.state() == log.state()


class TestPolicies:
    """`flush` and `double_buffer`: clocks change where a wave begins (`wsp.md` §2)."""

    @pytest.mark.parametrize(
        ("weights", "first", "newest"), [("wave", (2, 1), 2), ("flush", (1, 1), 3), ("double_buffer", (2, 1), 2)]
    )
    def test_questions_at_switch_points(self, weights: WeightPolicy, first: tuple[int, int], newest: int) -> None:
        """With N = 2, D = 1: which clock number 3, minibatch 6 or 7, is given when all have committed 3 waves."""
        log = started(replace(SCENARIO, weights=weights))
        number, _ = first
        assert log.hold(VW[0], LIFE, number) == 0
        for wave in range(3):
            commit(log, 0, wave)
            commit(log, 1, wave)
            acknowledge(log)
        assert log.hold(VW[0], LIFE, number) == 0, "the same question gets the same answer"
        assert log.hold(VW[1], LIFE, number) == first[1]
        assert log.hold(VW[0], LIFE, 3) == newest

    @pytest.mark.parametrize(("weights", "number", "p"), [("flush", 2, 5), ("double_buffer", 3, 7)])
    def test_a_question_that_comes_too_early(self, weights: WeightPolicy, number: int, p: int) -> None:
        log = started(replace(SCENARIO, weights=weights))
        with pytest.raises(ClockNotPublished, match=f"minibatch {p} needs clock 1, but the newest published is 0"):
            log.hold(VW[0], LIFE, number)
        with pytest.raises(WaveOutOfOrder):
            log.hold(VW[0], LIFE, -1)

    @pytest.mark.parametrize(("weights", "end"), [("wave", 3), ("flush", 2), ("double_buffer", 3)])
    def test_a_stop_is_set_beyond_what_may_have_begun(self, weights: WeightPolicy, end: int) -> None:
        log = started(replace(SCENARIO, weights=weights))
        log.request_barrier("stop")
        assert (log.segment.end, log.segment.reason) == (end, "stop")

    @pytest.mark.parametrize(("weights", "end"), [("wave", 4), ("flush", 4), ("double_buffer", 4)])
    def test_without_a_bound_a_stop_is_set_beyond_the_latest_question(self, weights: WeightPolicy, end: int) -> None:
        log = started(replace(SCENARIO, weights=weights, d=None))
        log.hold(VW[0], LIFE, 3)
        log.request_barrier("stop")
        assert log.segment.end == end

    @pytest.mark.parametrize(("weights", "number"), [("wave", 3), ("flush", 2), ("double_buffer", 2)])
    def test_who_has_not_heard_of_a_barrier_is_not_answered(self, weights: WeightPolicy, number: int) -> None:
        """In the segment it believes in, a clock is asked for there; in the present one, no clock is chosen there."""
        log = started(replace(SCENARIO, weights=weights, d=0))
        log.evict(VW[1], LIFE)
        acknowledge(log)
        for wave in range(log.segment.end):
            commit(log, 0, wave)
            acknowledge(log)
        number += log.segment.start - 2
        with pytest.raises(ClockNotPublished, match=f"starts with the clock of the barrier at {log.segment.start}"):
            log.hold(VW[0], LIFE, number)
        assert log.members[VW[0]].last_switch == log.segment.start, "nothing was noted down"

    @pytest.mark.parametrize("weights", ["wave", "flush", "double_buffer"])
    @pytest.mark.parametrize("staleness", [0, 1, None])
    def test_whoever_goes_before_the_first_publish_stops_nobody(
        self, weights: WeightPolicy, staleness: int | None
    ) -> None:
        log = DecisionLog(replace(SCENARIO, weights=weights, d=staleness).log_config())
        log.evict(VW[1], LIFE)
        for stage in (0, 1):
            log.join(VW[0], LIFE, StageIndex(stage))
            log.initialized(VW[0], LIFE, StageIndex(stage))
        acknowledge(log)
        assert (log.published, list(log.members)) == (0, [0])
        for wave in range(log.segment.end):
            commit(log, 0, wave)
            acknowledge(log)
        assert log.finished

    @pytest.mark.parametrize(("weights", "kept"), [("wave", [2, 3]), ("flush", [2, 3]), ("double_buffer", [1, 2, 3])])
    def test_a_deterministic_run_keeps_what_a_wave_may_still_begin_with(
        self, weights: WeightPolicy, kept: list[int]
    ) -> None:
        """D = 1: wave 3, which everybody may be in, needs clock 2 under `flush`, and 1 under `double_buffer`."""
        log = started(replace(SCENARIO, weights=weights, deterministic=True))
        for wave in range(3):
            commit(log, 0, wave)
            commit(log, 1, wave)
            acknowledge(log)
        assert log.published == 3
        assert list(log.retained) == kept

    @pytest.mark.parametrize("staleness", [0, 1, None])
    @pytest.mark.parametrize("weights", ["wave", "flush", "double_buffer"])
    def test_what_the_next_question_is_answered_with_is_kept(
        self, weights: WeightPolicy, staleness: int | None
    ) -> None:
        """Also if everything that was begun is published when it is asked: `double_buffer` lacks the last wave."""
        log = started(replace(SCENARIO, weights=weights, d=staleness, num_samples=1000))
        for wave in range(5):
            commit(log, 0, wave)
            commit(log, 1, wave)
            acknowledge(log)
            assert log.published == wave + 1
            if wave + 1 < 2:
                continue  # nobody asks: no clock of this segment is old enough
            kept = log.retained
            number = wave + 1 if weights != "wave" else wave + 2
            clock = log.hold(VW[0], LIFE, number)
            assert log.hold(VW[1], LIFE, number) == clock
            assert clock in kept
            assert clock == log.published - (weights == "double_buffer")


CUT = (0, 2, 5)


def commit_all(log: DecisionLog) -> None:
    """Every member commits one more wave, which is published."""
    for vw, member in list(log.members.items()):
        commit(log, vw, member.committed)
    acknowledge(log)


def planned(*changes: PlanChange, freezing: Freezing | None = None) -> DecisionLog:
    """A log that has started, whose first virtual worker has a known cut and changes of it ahead."""
    first = PlanVersion.following(None, CUT)
    membership = replace(SCENARIO.log_config().membership, plans={VW[0]: first})
    config = replace(SCENARIO.log_config(), membership=membership, plan_changes=changes, freezing=freezing)
    return begun(DecisionLog(config))


def rejoined(log: DecisionLog, life: int, bounds: tuple[int, ...]) -> SegmentMember:
    """Virtual worker 0 is lost, and joins at the next barrier in a new life; its entry in the segment there."""
    incarnation = Incarnation(life)
    log.evict(VW[0], Incarnation(life - 1))
    log.admit(VW[0], incarnation, len(bounds) - 1, bounds=bounds)
    for stage in range(len(bounds) - 1):
        log.join(VW[0], incarnation, StageIndex(stage))
    while VW[0] not in log.members:
        commit(log, 1, log.members[VW[1]].committed)
        acknowledge(log)
    segment = log.newest_segment
    assert segment is not None
    return segment.members[0]


class TestPlanVersions:
    def test_a_run_begins_with_version_0(self) -> None:
        log = planned()
        segment = log.newest_segment
        assert segment is not None
        assert segment.members[0] == replace(founder(0, 2), version=0, bounds=CUT)
        assert segment.members[1] == founder(1, 1), "the cut of the other is not known"
        assert log.progress.plans == {VW[0]: PlanVersion(0, CUT, CUT)}

    def test_the_same_cut_is_the_same_version(self) -> None:
        log = planned()
        assert rejoined(log, 1, CUT) == SegmentMember(VW[0], Incarnation(1), 2, joined=True, version=0, bounds=CUT)

    def test_another_cut_is_the_next_version_and_versions_only_grow(self) -> None:
        log = planned()
        moved = rejoined(log, 1, (0, 1, 3, 5))
        assert (moved.version, moved.bounds, moved.moved) == (1, (0, 1, 3, 5), True)
        assert log.progress.plans == {VW[0]: PlanVersion(1, (0, 1, 3, 5), (0, 1, 3, 5))}
        back = rejoined(log, 2, CUT)
        assert (back.version, back.bounds, back.moved) == (2, CUT, True)
        kept = rejoined(log, 3, CUT)
        assert (kept.version, kept.moved) == (2, False)

    def test_the_state_has_the_versions(self) -> None:
        log = planned()
        rejoined(log, 1, (0, 4, 5))
        kept: LogState = wire.from_json(LogState, wire.to_json(LogState, log.state()))
        again = DecisionLog.restore(log.config, kept)
        assert rejoined(again, 2, (0, 3, 5)) == rejoined(log, 2, (0, 3, 5))
        assert again.plans[VW[0]].version == 2

    def test_as_many_stages_as_the_cut_has(self) -> None:
        log = planned()
        with pytest.raises(
            ProtocolViolation,
            match="virtual worker 0 is admitted with 2 stages, but version 1 of its plan has 3",
        ):
            log.admit(VW[0], Incarnation(1), 2, bounds=(0, 1, 3, 5))
        assert log.plans[VW[0]].version == 0, "nothing has changed"

    def test_a_resumed_run_goes_on_with_what_moved_since_its_plan(self) -> None:
        moved = PlanVersion(3, (0, 4, 5), CUT)
        assert PlanVersion.following(moved, CUT) == moved
        assert PlanVersion.following(moved, (0, 1, 5)) == PlanVersion(4, (0, 1, 5), (0, 1, 5))
        assert moved.layer_counts == (4, 1)

    def test_a_change_decided_beforehand_has_a_barrier_and_the_next_version(self) -> None:
        log = planned(PlanChange(Clock(2), VW[0], (0, 1, 5)), PlanChange(Clock(4), VW[0], (0, 4, 5)))
        assert (log.segment.end, log.segment.reasons) == (2, ("plan",))
        for _ in range(2):
            commit_all(log)
        segment = log.newest_segment
        assert segment is not None
        assert (segment.start, segment.reasons) == (2, ("plan",))
        first, second = segment.members
        assert (first.version, first.bounds, first.moved, first.joined) == (1, (0, 1, 5), True, False)
        assert not second.moved
        assert log.progress.plans == {VW[0]: PlanVersion(1, (0, 1, 5), CUT)}
        assert (log.segment.end, log.segment.reasons) == (4, ("plan",))

    def test_a_live_change_sets_no_barrier_and_is_announced_before_that_of_its_segment(self) -> None:
        log = planned(
            PlanChange(Clock(2), VW[0], (0, 1, 5), live=True), PlanChange(Clock(4), VW[0], (0, 2, 5), live=True)
        )
        assert "plan" not in log.segment.reasons
        announced = [record for record in log.records if isinstance(record, PlanRecord)]
        assert [(record.clock, record.version, record.bounds) for record in announced] == [
            (2, 1, (0, 1, 5)),
            (4, 2, (0, 2, 5)),
        ]
        barrier = next(record for record in log.records if isinstance(record, BarrierRecord))
        assert all(record.index < barrier.index for record in announced)
        while not log.finished:
            commit_all(log)
        assert log.plans[VW[0]] == PlanVersion(2, (0, 2, 5), CUT)
        assert not log.moved, "there is nothing left to move at the barrier"

    @pytest.mark.parametrize("clock", [5, 7])
    def test_a_barrier_at_or_below_a_live_change_makes_its_announcement_void(self, clock: int) -> None:
        """It is made at that barrier, or announced again."""
        log = planned(PlanChange(Clock(clock), VW[0], (0, 1, 5), live=True))
        log.segment = replace(log.segment, end=Clock(9), reasons=("epoch",))
        commit_all(log)
        log.request_barrier("checkpoint")
        at = log.segment.end
        while log.published < at:
            commit_all(log)
        segment = log.newest_segment
        assert segment is not None and segment.start == at
        (member, _) = segment.members
        assert (member.version, member.moved) == ((1, True) if clock <= at else (0, False))

    def test_a_barrier_before_it_does_not_make_it(self) -> None:
        log = planned(PlanChange(Clock(5), VW[0], (0, 1, 5)))
        log.request_barrier("checkpoint")
        while log.published < 5:
            commit_all(log)
        assert [s.start for s in log.records if isinstance(s, SegmentRecord)][-1] == 5
        assert log.plans[VW[0]] == PlanVersion(1, (0, 1, 5), CUT)

    def test_it_is_made_for_one_that_is_away_and_which_rejoins_with_it(self) -> None:
        log = planned(PlanChange(Clock(2), VW[0], (0, 1, 5)))
        log.evict(VW[0], LIFE)
        while log.published < 3:
            commit(log, 1, log.members[VW[1]].committed)
            acknowledge(log)
        joined = rejoined(log, 1, CUT)
        assert (joined.version, joined.bounds, joined.moved) == (1, (0, 1, 5), True)

    def test_a_run_that_begins_there_has_it_already(self) -> None:
        change = PlanChange(Clock(0), VW[0], (0, 1, 5))
        log = planned(change)
        assert log.plans[VW[0]] == PlanVersion(0, CUT, CUT)

    def test_nothing_moves_where_the_run_ends(self) -> None:
        log = planned(PlanChange(Clock(4), VW[0], (0, 1, 5)))
        log.request_barrier("stop")
        end = log.segment.end
        while log.published < end:
            commit_all(log)
        assert log.finished
        assert log.plans[VW[0]].version == (1 if end > 4 else 0)


def freezing(
    *changes: FreezeChange, start: int = 0, alpha: str | None = None, every_waves: int | None = None
) -> DecisionLog:
    """A log that has started: six layers, of which the second and the fifth have no parameters."""
    config = SCENARIO.log_config()
    return begun(
        DecisionLog(
            replace(
                config,
                freezing=Freezing((0, 2, 3, 5), changes, alpha=alpha, every_waves=every_waves),
                progress=replace(config.progress, frozen=start),
            )
        )
    )


def frozen(log: DecisionLog) -> tuple[int, int]:
    """F, and the frozen layers, by the newest segment and the progress."""
    segment = log.newest_segment
    assert segment is not None
    assert segment.frozen == log.progress.frozen
    return segment.frozen, segment.frozen_layers


class TestFreshLayers:
    def renewing(self, *activations: Activation, fresh: tuple[int, ...] = ()) -> DecisionLog:
        config = SCENARIO.log_config()
        progress = replace(config.progress, fresh=fresh)
        return begun(DecisionLog(replace(config, activations=activations, progress=progress)))

    @staticmethod
    def renewed(log: DecisionLog) -> tuple[int, ...]:
        """By the newest segment and the progress."""
        segment = log.newest_segment
        assert segment is not None
        assert segment.fresh == log.progress.fresh
        return segment.fresh

    @staticmethod
    def train(log: DecisionLog) -> None:
        """One wave, of the first virtual worker alone."""
        wave = log.published
        commit(log, 0, wave, ((2 * wave,), (2 * wave + 1,)))
        commit(log, 1, wave)
        acknowledge(log)

    def test_at_a_clock_and_in_the_progress_of_that_barrier_alone(self) -> None:
        log = self.renewing(Activation(Clock(1), (2,), (0, 1)), Activation(Clock(2), ()))
        found = [self.renewed(log)]
        for _ in range(2):
            self.train(log)
            found.append(self.renewed(log))
        assert found == [(), (0, 1), ()]

    def test_those_of_the_checkpoint_at_the_start_and_none_where_the_run_ends(self) -> None:
        log = self.renewing(fresh=(1,))
        assert self.renewed(log) == (1,)
        while not log.finished:
            self.train(log)
        assert self.renewed(log) == ()

    def test_they_are_due_again_where_nobody_has_trained_with_them(self) -> None:
        """All are lost in the segment, and come back at the next barrier."""
        log = self.renewing(Activation(Clock(1), (), (0, 1)))
        self.train(log)
        assert self.renewed(log) == (0, 1)
        for vw in range(2):
            log.evict(VW[vw], LIFE)
        log.admit(VW[0], Incarnation(1), SCENARIO.num_stages[0])
        for stage in range(SCENARIO.num_stages[0]):
            log.join(VW[0], Incarnation(1), StageIndex(stage))
        acknowledge(log)
        assert log.newest_segment is not None
        assert (log.newest_segment.start, self.renewed(log)) == (2, (0, 1))


class TestFrozenLayers:
    def test_from_the_start_and_at_a_clock(self) -> None:
        log = freezing(FreezeChange(1, epoch=0), FreezeChange(3, clock=Clock(2)))
        assert frozen(log) == (1, 2)
        assert (log.segment.end, log.segment.reasons) == (2, ("plan",))
        commit_all(log)
        assert frozen(log) == (1, 2)
        commit_all(log)
        assert frozen(log) == (3, 5)
        assert log.snapshot().frozen == (FrozenSince(Clock(0), 1, 2), FrozenSince(Clock(2), 3, 5))

    def test_where_an_epoch_ends_and_not_before(self) -> None:
        log = freezing(FreezeChange(2, epoch=1))
        log.request_barrier("checkpoint")
        while log.progress.epoch == 0 and not log.finished:
            assert frozen(log) == (0, 0)
            commit_all(log)
        assert frozen(log) == ((0, 0) if log.finished else (2, 3))

    def test_a_run_begins_with_those_of_its_checkpoint_and_f_never_falls(self) -> None:
        assert frozen(freezing(start=2)) == (2, 3)
        assert freezing(start=2).snapshot().frozen == (FrozenSince(Clock(0), 2, 3),)
        assert frozen(freezing(FreezeChange(1, epoch=0), start=2)) == (2, 3)

    def test_norms_of_the_segment_that_ends_decide_and_no_older_ones(self) -> None:
        """At clock 2 those of both; at 4 a virtual worker without minibatches since then has none."""
        log = freezing(alpha="1/2", every_waves=2)
        for wave in range(4):
            for stage in (0, 1):
                blocks = None if stage else ((2 * wave,), (2 * wave + 1,))
                squares = {0: 9.0, 2: 9.0} if stage == 0 else {3: 1.0, 5: 9.0}
                told = squares if wave % 2 else {}
                log.staged(VW[0], LIFE, Wave(wave), StageIndex(stage), blocks, segment=log.segment.start, squares=told)
            own = ((22,), (23,)) if wave == 1 else ()
            squares = {0: 0.0, 2: 0.0, 3: 100.0, 5: 100.0} if own else {}
            log.staged(VW[1], LIFE, Wave(wave), StageIndex(0), own, segment=log.segment.start, squares=squares)
            acknowledge(log)
            if wave == 1:
                assert frozen(log) == (0, 0), "18, 9, 101, 109"
                assert log.deciding.keys() == {VW[0], VW[1]}
        assert frozen(log) == (2, 3), "9, 9, 1, 9"
        assert log.deciding == {VW[0]: {0: 9.0, 2: 9.0, 3: 1.0, 5: 9.0}}

    def test_ties_lower_it(self) -> None:
        tied = Freezing((0, 2, 2, 5), (FreezeChange(2, epoch=0),))
        assert tied.frozen_at(0, after=Clock(0), upto=Clock(0), epoch=0) == 1

    def test_the_state_has_them(self) -> None:
        log = freezing(FreezeChange(1, epoch=0))
        kept: LogState = wire.from_json(LogState, wire.to_json(LogState, log.state()))
        restored = DecisionLog.restore(log.config, kept)
        assert frozen(restored) == (1, 2)
        assert restored.snapshot() == log.snapshot()

    def test_layers_move_where_f_becomes_that_of_a_cut(self) -> None:
        """Not at the start, for which the plan is made; not to another number of stages; the last decision counts."""
        cuts = tuple(FreezeCut(frozen, VW[0], bounds) for frozen, bounds in ((1, (0, 2, 5)), (2, (0, 4, 5))))
        changes = (FreezeChange(1, epoch=0), FreezeChange(2, clock=Clock(2)))
        cuts = (*cuts, FreezeCut(2, VW[0], (0, 1, 2, 5)), FreezeCut(2, VW[1], (0, 5)))
        log = planned(freezing=Freezing((0, 2, 3, 4), changes, cuts=cuts))
        assert log.plans[VW[0]].version == 0
        log.move(VW[0], PlanMove(LIFE, (0, 1, 5), "operator", "an operator asked for it"))
        while log.progress.clock < 2:
            commit_all(log)
        assert frozen(log) == (2, 3)
        decided = log.decided[VW[0]]
        assert (log.plans[VW[0]].bounds, decided.clock, decided.move.by) == ((0, 4, 5), 2, "freeze")
        assert VW[1] not in log.plans, "how it is cut is not known"
        segment = log.newest_segment
        assert segment is not None
        assert [member.moved for member in segment.members] == [True, False]

    def test_nothing_freezes_where_the_run_ends(self) -> None:
        log = freezing(FreezeChange(1, clock=Clock(4)))
        log.request_barrier("stop")
        end = log.segment.end
        while log.published < end:
            commit_all(log)
        assert log.finished
        assert end <= 4
        assert frozen(log) == (0, 0)


class TestMoves:
    TO = (0, 1, 5)

    def move(self, life: int = 0, bounds: tuple[int, ...] = TO) -> PlanMove:
        return PlanMove(Incarnation(life), bounds, "straggler", "stage 1 is slow", 0.5)

    def test_one_has_a_barrier_of_its_own_and_the_next_version(self) -> None:
        log = planned()
        log.move(VW[0], self.move())
        assert log.segment.reasons == ("plan",)
        end = log.segment.end
        assert not log.move(VW[0], self.move()), "asked for again, nothing changes"
        while log.published < end:
            assert log.plans[VW[0]].version == 0
            commit_all(log)
        segment = log.newest_segment
        assert segment is not None
        assert (segment.start, segment.reasons, segment.has_moves) == (end, ("plan",), True)
        assert (segment.members[0].version, segment.members[0].bounds, segment.members[0].moved) == (1, self.TO, True)
        assert log.decided == {VW[0]: DecidedMove(end, 1, self.move())}
        assert log.snapshot().plans == {VW[0]: PlanVersion(1, self.TO, CUT)}
        assert not log.move(VW[0], self.move()), "its layers are there already"
        assert log.segment.reasons != ("plan",)

    def test_stages_read_the_cut_with_the_barrier(self) -> None:
        """So that they are built while they wait for it; also if the barrier was set for something else before."""
        log = planned()
        (barrier,) = (record for record in log.move(VW[0], self.move()) if isinstance(record, BarrierRecord))
        assert (barrier.clock, barrier.cuts) == (log.segment.end, (NewCut(VW[0], self.TO),))
        assert (barrier.cut_of(VW[0]), barrier.cut_of(VW[1])) == (self.TO, ())
        (again,) = log.move(VW[0], self.move(bounds=(0, 3, 5)))
        assert isinstance(again, BarrierRecord)
        assert (again.clock, again.cut_of(VW[0])) == (barrier.clock, (0, 3, 5))
        drained = [record for record in log.drain(VW[1], LIFE) if isinstance(record, BarrierRecord)]
        assert [record.cut_of(VW[0]) for record in drained] == [(0, 3, 5)]
        while log.plans[VW[0]].version == 0:
            commit_all(log)
        following = [record for record in log.records_from(FROM_NEWEST_SEGMENT) if isinstance(record, BarrierRecord)]
        assert [record.cuts for record in following] == [()]

    def test_a_restarted_clock_shard_still_makes_it(self) -> None:
        log = planned()
        log.move(VW[0], self.move())
        kept: LogState = wire.from_json(LogState, wire.to_json(LogState, log.state()))
        again = DecisionLog.restore(log.config, kept)
        while again.published < log.segment.end:
            commit_all(again)
        assert again.plans[VW[0]] == PlanVersion(1, self.TO, CUT)

    @pytest.mark.parametrize("leaves", [False, True])
    def test_it_is_dropped_with_its_incarnation(self, *, leaves: bool) -> None:
        log = planned()
        log.move(VW[0], self.move())
        if leaves:
            log.drain(VW[0], LIFE)
            while VW[0] in log.members:
                commit_all(log)
            log.admit(VW[0], Incarnation(1), 2, bounds=CUT)
            assert log.plans[VW[0]].version == 0
        else:
            joined = rejoined(log, 1, CUT)
            assert (joined.version, joined.bounds) == (0, CUT)
        assert not log.moves
        assert not log.decided

    def test_one_that_dies_behind_the_barrier_comes_back_with_its_new_cut(self) -> None:
        log = planned()
        log.move(VW[0], self.move())
        while log.plans[VW[0]].version == 0:
            commit_all(log)
        joined = rejoined(log, 1, CUT)
        assert (joined.version, joined.bounds, joined.moved) == (1, self.TO, False)

    def test_what_is_refused(self) -> None:
        log = planned()
        for bounds in [(0, 5), (0, 2, 4), (1, 2, 5), (0, 0, 5), (0, 1, 2, 5)]:
            with pytest.raises(
                ProtocolViolation, match=r"virtual worker 0 cannot be cut at .*: its stages have \[2, 3"
            ):
                log.move(VW[0], self.move(bounds=bounds))
        with pytest.raises(ProtocolViolation, match="its stages have unknown layers"):
            log.move(VW[1], self.move(bounds=(0, 5)))
        with pytest.raises(StaleIncarnation):
            log.move(VW[0], self.move(life=1))
        scripted = planned(PlanChange(Clock(4), VW[0], self.TO))
        with pytest.raises(ProtocolViolation, match="the script of the job decides how virtual worker 0 is cut"):
            scripted.move(VW[0], self.move())
        log.admit(VW[0], Incarnation(1), 2, bounds=CUT)
        with pytest.raises(WaveOutOfOrder):
            log.move(VW[0], self.move(life=1))

    def live(self, bounds: tuple[int, ...] = TO) -> PlanMove:
        return replace(self.move(bounds=bounds), live=True)

    def prepare(self, log: DecisionLog, *, can: bool = True) -> None:
        """Both stages answer the newest record that asks for it."""
        index = next(record.index for record in reversed(log.records) if isinstance(record, PrepareRecord))
        for stage in range(2):
            log.prepared(VW[0], LIFE, StageIndex(stage), index, can=can)

    def test_one_that_is_prepared_begins_with_the_first_wave_that_has_not_started(self) -> None:
        log = planned()
        reasons = log.segment.reasons
        (asked,) = log.move(VW[0], self.live())
        assert asked == PrepareRecord(asked.index, VW[0], LIFE, self.TO)
        assert not log.move(VW[0], self.live()), "asked for again, nothing changes"
        assert not log.prepared(VW[0], LIFE, StageIndex(0), asked.index, can=True)
        assert not log.prepared(VW[0], LIFE, StageIndex(0), asked.index, can=True), "one stage is not two"
        (fixed,) = log.prepared(VW[0], LIFE, StageIndex(1), asked.index, can=True)
        assert fixed == PlanRecord(fixed.index, VW[0], LIFE, log._unplanned_clock(), 1, self.TO)
        assert log.segment.reasons == reasons, "no barrier is set"
        with pytest.raises(ProtocolViolation, match=rf"are about to move at minibatch {fixed.clock * SCENARIO.n + 1}"):
            log.move(VW[0], self.live((0, 4, 5)))
        while log.members[VW[0]].committed <= fixed.clock:
            assert log.snapshot().plans[VW[0]].version == 0
            commit_all(log)
        first = Minibatch(fixed.clock * SCENARIO.n + 1)
        assert log.decided == {VW[0]: DecidedMove(fixed.clock, 1, self.live(), first)}
        assert log.snapshot().plans == {VW[0]: PlanVersion(1, self.TO, CUT)}
        assert not log.move(VW[0], self.live()), "its layers are there already"
        log.request_barrier("checkpoint")
        while log.progress.clock == 0:
            commit_all(log)
        segment = log.newest_segment
        assert segment is not None
        assert (segment.members[0].version, segment.members[0].moved) == (1, False)
        assert log.plans[VW[0]] == PlanVersion(1, self.TO, CUT)

    def test_one_that_cannot_be_prepared_has_a_barrier(self) -> None:
        log = planned()
        log.move(VW[0], self.live())
        self.prepare(log, can=False)
        assert log.segment.reasons == ("plan",)
        end = log.segment.end
        while log.published < end:
            commit_all(log)
        assert log.decided == {VW[0]: DecidedMove(end, 1, self.live())}

    @pytest.mark.parametrize("is_prepared", [False, True])
    def test_a_barrier_that_comes_first_makes_it(self, *, is_prepared: bool) -> None:
        log = planned()
        log.move(VW[0], self.live())
        if is_prepared:
            self.prepare(log)
        log.request_barrier("checkpoint")
        while log.progress.clock == 0:
            commit_all(log)
        segment = log.newest_segment
        assert segment is not None
        assert (segment.members[0].version, segment.members[0].moved) == (1, True)
        assert log.decided == {VW[0]: DecidedMove(segment.start, 1, self.live())}
        if not is_prepared:
            self.prepare(log)
            assert log.fixed == {}, "it is out of date"

    @pytest.mark.parametrize("begins", [False, True])
    def test_one_that_is_prepared_is_dropped_with_its_incarnation_unless_it_has_begun(self, *, begins: bool) -> None:
        log = planned()
        log.move(VW[0], self.live())
        self.prepare(log)
        (fixed,) = log.fixed[VW[0]]
        while begins and log.members[VW[0]].committed <= fixed.clock:
            commit_all(log)
        joined = rejoined(log, 1, CUT)
        assert (joined.version, joined.bounds) == ((1, self.TO) if begins else (0, CUT))

    def test_the_end_of_the_run_comes_first(self) -> None:
        log = planned()
        log.move(VW[0], self.move())
        log.request_barrier("stop")
        while not log.finished:
            commit_all(log)
        assert log.plans[VW[0]].version == 0
        assert not log.move(VW[0], self.move())


def resized(*changes: WaveChange, start: Progress | None = None) -> DecisionLog:
    """A log that has started, with changes of N ahead."""
    config = replace(SCENARIO.log_config(), wave_changes=changes)
    return begun(DecisionLog(config if start is None else replace(config, progress=start)))


class TestWaves:
    """N changes at barriers, and minibatches are numbered on (`wsp.md` §11)."""

    def test_nothing_is_counted_until_it_changes(self) -> None:
        log = resized()
        assert log.newest_segment is not None
        assert [member.origin for member in log.newest_segment.members] == [None, None]
        assert log.progress.waves == {}

    def test_a_change_has_a_barrier_and_numbers_go_on(self) -> None:
        n = SCENARIO.log_config().sync.minibatches_per_wave
        log = resized(WaveChange(Clock(2), (3, 1)), WaveChange(Clock(4), (2,)))
        assert (log.segment.end, log.segment.reasons) == (2, ("plan",))
        found = {}
        while log.published < 4:
            commit_all(log)
            segment = log.newest_segment
            assert segment is not None
            found[int(segment.start)] = [(m.minibatches_per_wave, m.origin) for m in segment.members]
        assert found[2] == [(3, 2 * n), (1, 2 * n)]
        assert found[4] == [(2, 2 * n + 2 * 3), (2, 2 * n + 2 * 1)]
        assert log.progress.waves[VW[1]] == WaveNumbers(2, 2 * n + 2)

    def test_one_that_is_away_is_counted_all_the_same(self) -> None:
        n = SCENARIO.log_config().sync.minibatches_per_wave
        log = resized(WaveChange(Clock(2), (3,)))
        log.evict(VW[0], LIFE)
        while log.published < 3:
            commit(log, 1, log.members[VW[1]].committed)
            acknowledge(log)
        log.admit(VW[0], Incarnation(1), SCENARIO.num_stages[0], n)
        for stage in range(SCENARIO.num_stages[0]):
            log.join(VW[0], Incarnation(1), StageIndex(stage))
        while VW[0] not in log.members:
            commit(log, 1, log.members[VW[1]].committed)
            acknowledge(log)
        segment = log.newest_segment
        assert segment is not None
        first = segment.members[0]
        assert (first.joined, first.minibatches_per_wave) == (True, 3)
        assert first.origin == 2 * n + (segment.start - 2) * 3

    def test_a_restarted_clock_shard_goes_on_counting(self) -> None:
        log = resized(WaveChange(Clock(1), (3,)))
        commit_all(log)
        again = DecisionLog.restore(log.config, log.state())
        assert again.waves == log.waves != {}


class TestMembers:
    """Virtual workers leave and come back where the script says (`plan-versions.md` §7)."""

    def log(self, *changes: MemberChange) -> DecisionLog:
        return begun(DecisionLog(replace(SCENARIO.log_config(), member_changes=changes)))

    def on_others(self, log: DecisionLog, upto: int) -> None:
        for _ in range(4 * upto):
            if log.published < upto and log.members[VW[1]].committed < upto:
                commit(log, 1, log.members[VW[1]].committed)
            acknowledge(log)

    def ready(self, log: DecisionLog, life: int) -> None:
        log.admit(VW[0], Incarnation(life), SCENARIO.num_stages[0])
        for stage in range(SCENARIO.num_stages[0]):
            log.join(VW[0], Incarnation(life), StageIndex(stage))

    def test_one_leaves_at_a_barrier_with_a_checkpoint(self) -> None:
        log = self.log(MemberChange(Clock(2), VW[0], joins=False))
        assert (log.segment.end, log.segment.reasons) == (2, ("drain", "plan"))
        for _ in range(2):
            commit_all(log)
        segment = log.newest_segment
        assert segment is not None
        assert ([m.vw for m in segment.members], [m.vw for m in segment.left]) == ([1], [0])

    def test_one_that_is_ready_waits_for_its_barrier(self) -> None:
        """No barrier is set for it before."""
        log = self.log(MemberChange(Clock(2), VW[0], joins=False), MemberChange(Clock(4), VW[0], joins=True))
        for _ in range(2):
            commit_all(log)
        self.ready(log, 1)
        assert (log.segment.end, log.segment.reasons) == (4, ("plan",))
        self.on_others(log, 3)
        assert list(log.members) == [VW[1]]
        self.on_others(log, 4)
        assert list(log.members) == [VW[0], VW[1]]
        assert log.members[VW[0]].incarnation == 1

    def test_the_barrier_waits_for_it(self) -> None:
        log = self.log(MemberChange(Clock(2), VW[0], joins=False), MemberChange(Clock(4), VW[0], joins=True))
        for _ in range(2):
            commit_all(log)
        self.on_others(log, 4)
        assert log.published == 3
        assert log.pending_publish_reason() == "the stages of virtual worker 0, which the script adds at clock 4"
        self.ready(log, 1)
        acknowledge(log)
        assert log.published == 4
        assert list(log.members) == [VW[0], VW[1]]

    def test_one_that_is_away_where_it_is_dropped_joins_nowhere_else(self) -> None:
        log = self.log(MemberChange(Clock(3), VW[0], joins=False))
        log.evict(VW[0], LIFE)
        self.on_others(log, 3)
        self.ready(log, 1)
        assert "join" not in log.segment.reasons
        assert list(log.members) == [VW[1]]

    def test_who_stops_the_run_waits_for_nobody(self) -> None:
        log = self.log(MemberChange(Clock(2), VW[0], joins=False), MemberChange(Clock(4), VW[0], joins=True))
        for _ in range(2):
            commit_all(log)
        self.on_others(log, 4)
        log.request_barrier("stop")
        acknowledge(log)
        assert (log.published, log.finished) == (4, True)

    def test_one_that_waits_for_a_later_clock_does_not_let_clocks_pass_when_nobody_trains(self) -> None:
        log = self.log(MemberChange(Clock(4), VW[1], joins=True))
        assert list(log.members) == [VW[0]]
        log.evict(VW[0], LIFE)
        acknowledge(log)
        assert (log.published, list(log.members)) == (0, [])
        assert log.pending_publish_reason() == "any virtual worker to rejoin"
        self.ready(log, 1)
        acknowledge(log)
        assert (log.published, list(log.members)) == (1, [VW[0]])
        for wave in (1, 2, 3):
            commit(log, 0, wave)
            acknowledge(log)
        assert (log.published, list(log.members)) == (4, [VW[0], VW[1]])

    def test_it_takes_over_where_nobody_trains_at_its_own_clock(self) -> None:
        log = self.log(MemberChange(Clock(1), VW[1], joins=True))
        log.evict(VW[0], LIFE)
        acknowledge(log)
        assert (log.published, list(log.members)) == (1, [VW[1]])

    def test_a_run_that_is_stopped_when_nobody_trains_waits_for_nobody(self) -> None:
        log = self.log(MemberChange(Clock(4), VW[1], joins=True))
        log.evict(VW[0], LIFE)
        log.request_barrier("stop")
        acknowledge(log)
        assert (log.published, log.finished) == (1, True)
