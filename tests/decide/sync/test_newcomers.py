"""Lives that come while a run goes on: what the decision log decides."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hetpipe.decide.sync.decision_log import DecisionLog, LogState
from hetpipe.decide.sync.records import (
    InitializeRecord,
    SegmentMember,
    SegmentRecord,
)
from hetpipe.decide.sync.segment import plan_segment
from hetpipe.errors import ClockNotPublished, ProtocolViolation, StaleIncarnation, WaveOutOfOrder
from hetpipe.values import wire
from hetpipe.values.ids import Clock, Incarnation, StageIndex, VirtualWorkerIndex, Wave
from tests.decide.sync.logs import SCENARIO, VW, acknowledge, commit, started
from tests.decide.sync.scenario import LIFE


class TestNewcomers:
    def test_a_new_life_joins_at_the_barrier_that_it_asks_for(self) -> None:
        log = started()
        log.evict(VW[1], LIFE)
        assert not log.admit(VW[1], Incarnation(1), 1)
        assert not log.admit(VW[1], Incarnation(1), 1), "again"
        acknowledge(log)
        log.join(VW[1], Incarnation(1), StageIndex(0))
        assert log.segment.reason == "evict+join"
        with pytest.raises(WaveOutOfOrder, match="from the next barrier on"):
            log.staged(VW[1], Incarnation(1), Wave(0), StageIndex(0), (), segment=Clock(0))
        end = log.segment.end
        for wave in range(end):
            commit(log, 0, wave)
            acknowledge(log)
        newest = log.records_from(-1)[0]
        assert newest == SegmentRecord(
            newest.index,
            end,
            ("evict", "join"),
            0,
            (
                SegmentMember(VW[0], LIFE, 2, joined=False),
                SegmentMember(VW[1], Incarnation(1), 1, joined=True),
            ),
        )
        assert log.members[VW[1]].committed == end

    def test_who_is_not_ready_is_not_waited_for(self) -> None:
        log = started()
        log.evict(VW[0], LIFE)
        log.admit(VW[0], Incarnation(1), 2)
        for stage in (0, 1):
            assert not log.join(VW[0], Incarnation(1), StageIndex(stage), ready=False)
        assert log.present(VW[0]) == (0, 1)
        assert log.segment.reason == "evict"
        assert not log.join(VW[0], Incarnation(1), StageIndex(0))
        assert log.join(VW[0], Incarnation(1), StageIndex(1))
        assert log.segment.reason == "evict+join"

    def test_lives_only_go_up(self) -> None:
        log = started()
        log.admit(VW[1], Incarnation(2), 1)
        assert VW[1] not in log.members, "a newer life means that the older one is over"
        with pytest.raises(StaleIncarnation, match="the newest is 2"):
            log.admit(VW[1], Incarnation(1), 1)
        with pytest.raises(StaleIncarnation, match="had no incarnation 3"):
            log.evict(VW[1], Incarnation(3))
        assert not log.evict(VW[1], LIFE), "over already"
        assert not log.evict(VW[1], Incarnation(2))
        assert not log.admit(VW[1], Incarnation(2), 1), "a late copy brings nobody back"
        assert not log.newcomers
        with pytest.raises(ProtocolViolation, match="cannot have 0 stages"):
            log.admit(VW[1], Incarnation(3), 0)

    def test_when_all_are_gone_whoever_comes_first_goes_on(self) -> None:
        log = started()
        commit(log, 1, 0)
        commit(log, 1, 1)
        log.evict(VW[0], LIFE)
        log.evict(VW[1], LIFE)
        assert (log.segment.end, log.segment.reason) == (2, "evict"), "what was committed stands"
        acknowledge(log)
        assert log.published == 0, "nobody is there to go on"
        log.admit(VW[0], Incarnation(1), 2)
        for stage in (0, 1):
            log.join(VW[0], Incarnation(1), StageIndex(stage))
        acknowledge(log)
        assert (log.published, log.segment.start, list(log.members)) == (2, 2, [0])
        log.validate_state()

    def test_the_start_does_not_wait_for_a_second_life(self) -> None:
        log = DecisionLog(SCENARIO.log_config())
        assert not log.evict(VW[1], LIFE)
        log.admit(VW[1], Incarnation(1), 1)
        for stage in (0, 1):
            log.join(VW[0], LIFE, StageIndex(stage))
            log.initialized(VW[0], LIFE, StageIndex(stage))
        acknowledge(log)
        assert (log.published, list(log.members)) == (0, [0])
        log.join(VW[1], Incarnation(1), StageIndex(0))
        assert "join" in log.segment.reasons

    def test_a_second_life_may_make_the_initial_weights(self) -> None:
        log = DecisionLog(replace(SCENARIO, num_stages=(1,)).log_config())
        log.evict(VW[0], LIFE)
        log.admit(VW[0], Incarnation(1), 1)
        log.join(VW[0], Incarnation(1), StageIndex(0))
        records = log.initialized(VW[0], Incarnation(1), StageIndex(0))
        assert records == [InitializeRecord(1, Clock(0), VW[0], Incarnation(1))]
        acknowledge(log)
        assert log.published == 0

    def test_nobody_joins_at_the_end_unless_nobody_else_is_there(self) -> None:
        for gone in (False, True):
            log = started(replace(SCENARIO, num_stages=(1, 1)))
            log.admit(VW[1], Incarnation(1), 1)
            log.request_barrier("stop")
            log.join(VW[1], Incarnation(1), StageIndex(0))
            if gone:
                log.evict(VW[0], LIFE)
            while not log.finished:
                if not gone:
                    commit(log, 0, log.members[VW[0]].committed)
                acknowledge(log)
            assert list(log.members) == ([1] if gone else [0])

    def test_a_barrier_that_is_asked_for_before_the_start_is_set_at_the_start(self) -> None:
        log = DecisionLog(SCENARIO.log_config())
        assert not log.request_barrier("stop")
        assert not log.request_barrier("stop")
        for vw, stages in ((0, 2), (1, 1)):
            for stage in range(stages):
                log.join(VW[vw], LIFE, StageIndex(stage))
                log.initialized(VW[vw], LIFE, StageIndex(stage))
        acknowledge(log)
        assert (log.segment.end, log.segment.reason) == (3, "stop")

    def test_a_run_that_is_over_ends_where_it_starts(self) -> None:
        scenario = replace(SCENARIO, used=tuple(range(24)), total_minibatches=24, epochs=None, start=3)
        log = started(scenario)
        assert log.finished
        newest = log.records_from(-1)[0]
        assert isinstance(newest, SegmentRecord)
        assert newest.reasons == ("end",)


class TestWavesOfTheirOwn:
    """Virtual workers with their own N_v (`wsp.md` §10)."""

    UNEQUAL = replace(
        SCENARIO.log_config(),
        membership=replace(SCENARIO.log_config().membership, minibatches_per_wave={VW[0]: 3, VW[1]: 1}),
    )

    def begun(self) -> DecisionLog:
        log = DecisionLog(self.UNEQUAL)
        for vw, member in self.UNEQUAL.membership.num_stages.items():
            for stage in map(StageIndex, range(member)):
                log.join(vw, LIFE, stage)
                if vw == 0:
                    log.initialized(vw, LIFE, stage)
        acknowledge(log)
        return log

    def test_the_segment_tells_them_and_is_as_long_as_its_waves(self) -> None:
        log = self.begun()
        record = log.newest_segment
        assert record is not None
        assert record.per_wave(default=9) == {0: 3, 1: 1}
        assert [member.minibatches_per_wave for member in record.members] == [3, 1]
        assert log.segment == plan_segment(
            log.progress, self.UNEQUAL.data, minibatches_in_wave=4, checkpoint_every_waves=None
        )

    def test_a_later_life_keeps_its_number(self) -> None:
        log = self.begun()
        log.evict(VW[1], LIFE)
        with pytest.raises(ProtocolViolation, match="virtual worker 1 has 1 minibatches per wave, not 2"):
            log.admit(VW[1], Incarnation(1), 1, 2)
        log.admit(VW[1], Incarnation(1), 1)
        assert log.per_wave == {0: 3, 1: 1}

    def test_a_newcomer_brings_its_own_or_has_that_of_the_job(self) -> None:
        log, new = self.begun(), VirtualWorkerIndex(7)
        with pytest.raises(ProtocolViolation, match="a wave has at least 1 minibatches per wave, not 0"):
            log.admit(new, LIFE, 1, 0)
        log.admit(new, LIFE, 1, 5)
        log.admit(VirtualWorkerIndex(8), LIFE, 1)
        assert log.per_wave == {0: 3, 1: 1, 7: 5, 8: self.UNEQUAL.sync.minibatches_per_wave}
        restored = DecisionLog.restore(self.UNEQUAL, log.state())
        assert restored.per_wave == log.per_wave

    def test_where_all_have_one_number_nobody_brings_another(self) -> None:
        log, n = started(), SCENARIO.sync.minibatches_per_wave
        with pytest.raises(ProtocolViolation, match=f"has {n} minibatches per wave, not {n + 1}"):
            log.admit(VirtualWorkerIndex(7), LIFE, 1, n + 1)
        log.admit(VirtualWorkerIndex(7), LIFE, 1, n)
        assert not log.per_wave

    def test_a_clock_is_asked_for_by_switch_point(self) -> None:
        """Switch point 1 is p = 3 of one worker and p = 1 of the other: neither has a choice of clock there."""
        log = self.begun()
        for vw, p in ((0, 3), (1, 1)):
            with pytest.raises(ClockNotPublished, match=f"minibatch {p} starts with the clock of the barrier"):
                log.hold(VW[vw], LIFE, 1)

    def test_a_state_of_an_earlier_version_has_one_number_for_all(self) -> None:
        document = json.loads(wire.to_json(LogState, started().state()))
        del document["per_wave"]
        restored: LogState = wire.from_json(LogState, json.dumps(document).encode())
        assert restored.per_wave == {}
