"""One shard with its decision log: what counts, what is refused, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetpipe.errors import (
    ClockFreed,
    ClockNotPublished,
    MalformedChunk,
    NonFiniteUpdate,
    ProtocolViolation,
    SliceMismatch,
    StaleIncarnation,
    StaleTerm,
    WaveOutOfOrder,
)
from hetpipe.server.shard.push_session import PushSession
from hetpipe.values.bounds import MAX_STAGES
from hetpipe.values.ids import Clock, Incarnation, Wave
from hetpipe.values.requests import PullHeader, PushHeader, SliceHeader
from tests.pipeline.witness import Witness
from tests.server.shard.builders import JOB, OneShard, encode, push_header, requester, shard_config, slices_of

SIZES = (5, 20)


def ones(factor: float = 1.0, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.full((size,), factor, dtype=dtype) for size in SIZES]


def small(**options: object) -> OneShard:
    return OneShard(shard_config(slices_of(SIZES), **options)).begin()  # type: ignore[arg-type]


class TestWitness:
    @given(st.randoms(use_true_random=False), st.integers(0, 2))
    @settings(max_examples=15)
    def test_every_committed_wave_counts_once(self, random: object, staleness: int) -> None:
        witness = Witness(num_vws=3, num_waves=4, num_slices=2, copies=3)
        config = shard_config(slices_of([witness.slice_elements] * 2), stages=(1, 1, 1), staleness=staleness)
        one = OneShard(config).begin()
        waiting = [(wave, vw) for wave in range(4) for vw in range(3)]
        while waiting:
            open_now = [e for e in waiting if e[0] == min(w for w, vw in waiting if vw == e[1])]
            wave, vw = random.choice(open_now)  # type: ignore[attr-defined]
            if wave > min(w for w, _ in waiting) + staleness:
                continue
            for _ in range(random.randint(1, 2)):  # type: ignore[attr-defined]  # a resend changes nothing
                one.push(requester(vw), wave, [witness.update(vw, wave, index) for index in range(2)])
            one.report(requester(vw), wave)
            waiting.remove((wave, vw))

        assert witness.faults(one.pull(4)) == []
        assert len(one.history.of("apply")) == 12
        assert one.buffers[0] <= staleness + 1
        assert one.buffers[1] <= 3 * (staleness + 1) + staleness + 3

    def test_two_stages_fill_one_wave(self) -> None:
        witness = Witness(num_vws=2, num_waves=2, num_slices=2)
        one = OneShard(shard_config(slices_of([witness.slice_elements] * 2), stages=(2, 2))).begin()
        for wave in range(2):
            for vw in range(2):
                for stage in (1, 0):
                    one.push(requester(vw, stage), wave, [witness.update(vw, wave, stage)], [stage])
                    one.report(requester(vw, stage), wave)

        assert witness.faults(one.pull(2)) == []

    def test_several_chunks(self) -> None:
        witness = Witness(num_vws=2, num_waves=1, copies=300_000)
        one = OneShard(shard_config(slices_of([witness.slice_elements]))).begin()
        for vw in range(2):
            one.push(requester(vw), 0, [witness.update(vw, 0)])
            one.report(requester(vw), 0)

        assert len(encode([witness.update(0, 0)])) > 1
        cells = torch.unique(one.pull(1)[0])
        assert cells.numel() == 1, "no copy differs from another"
        assert replace(witness, copies=1).faults([cells]) == []


class TestArithmetic:
    @pytest.mark.parametrize("combine", ["sum", "mean"])
    def test_waves_are_added_in_the_order_of_the_virtual_workers(self, combine: str) -> None:
        one = OneShard(shard_config(slices_of(SIZES), stages=(1, 1, 1), combine=combine))
        generator = torch.Generator().manual_seed(5)
        draw = [[torch.randn(size, generator=generator) for size in SIZES] for _ in range(4)]
        one.begin(draw[3])
        for vw in (2, 0, 1):
            one.push(requester(vw), 0, draw[vw])
            one.report(requester(vw), 0)

        for index, found in enumerate(one.pull(1)):
            expected = draw[3][index]
            for vw in range(3):
                update = draw[vw][index]
                expected = expected + (update * (1.0 / 3) if combine == "mean" else update)
            assert torch.equal(found, expected)

    def test_an_empty_wave_adds_nothing(self) -> None:
        one = small()
        one.push(requester(0), 0, ones(3.0))
        one.report(requester(0), 0)
        one.report(requester(1), 0, is_empty=True)
        assert torch.equal(one.pull(1)[1], ones(3.0)[1])
        before = one.buffers[1]
        for vw in range(2):
            one.report(requester(vw), 1, is_empty=True)

        assert torch.equal(one.pull(2)[1], ones(3.0)[1])
        assert one.buffers == (1, before)
        assert [entry["wave"] for entry in one.history.of("apply")] == [0, 0, 1, 1]

    def test_an_empty_shard(self) -> None:
        one = OneShard(shard_config(())).begin()
        for vw in range(2):
            one.push(requester(vw), 0, [])
            one.report(requester(vw), 0)

        assert one.pull(1) == []


class TestResends:
    def test_what_is_staged_is_a_duplicate(self) -> None:
        one = small()
        assert not one.push(requester(), 0, ones())
        buffers = one.buffers
        assert one.push(requester(), 0, ones(9.0))

        assert one.buffers == buffers
        assert len(one.history.of("staged")) == 1

    def test_what_was_applied_is_a_duplicate(self) -> None:
        one = small()
        for vw in range(2):
            one.push(requester(vw), 0, ones())
            one.report(requester(vw), 0)

        assert one.push(requester(), 0, ones(9.0))
        assert one.push(requester(), None, ones(9.0))
        assert torch.equal(one.pull(1)[0], ones(2.0)[0])

    def test_a_resend_takes_over_from_an_unfinished_attempt(self) -> None:
        one = small()
        header = push_header(requester(), 0, one.headers)
        stalled = one.shard.begin_push(header)
        assert isinstance(stalled, PushSession)
        again = one.shard.begin_push(header)
        assert isinstance(again, PushSession)
        (good,), (bad,) = encode(ones(2.0)), encode(ones(7.0))
        again.write(good)
        with pytest.raises(MalformedChunk, match="superseded"):
            stalled.write(bad)  # its bytes come late, and go nowhere
        with pytest.raises(MalformedChunk, match="superseded"):
            stalled.finish()
        assert not one.history.of("staged")
        again.finish()
        one.report(requester(0), 0)
        one.report(requester(1), 0, is_empty=True)

        assert torch.equal(one.pull(1)[1], ones(2.0)[1])
        assert one.buffers[0] == 1

    def test_a_broken_attempt_is_made_good_by_the_next(self) -> None:
        one = small()
        session = one.shard.begin_push(push_header(requester(), 0, one.headers))
        assert isinstance(session, PushSession)
        with pytest.raises(MalformedChunk):
            session.finish()
        assert not one.history.of("staged")
        buffers = one.buffers
        assert not one.push(requester(), 0, ones())

        assert one.buffers == buffers

    def test_another_stage_cannot_stage_the_same_slice(self) -> None:
        one = small(stages=(2, 1))
        one.push(requester(0, 0), 0, ones()[:1], [0])
        buffers = one.buffers
        with pytest.raises(SliceMismatch, match="already staged by another push"):
            one.push(requester(0, 1), 0, ones())

        assert one.buffers == buffers


class TestNonFinite:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_the_wave_is_refused_and_the_shard_lives(self, dtype: torch.dtype, value: float) -> None:
        name = str(dtype).removeprefix("torch.")
        one = OneShard(shard_config(slices_of(SIZES, dtype=name))).begin()
        for index, position in ((0, 0), (0, 4), (1, 7), (1, 19)):
            update = ones(dtype=dtype)
            update[index][position] = value
            with pytest.raises(NonFiniteUpdate, match=rf"wave 0 of stage 0 of virtual worker 0 .*p{index}\["):
                one.push(requester(), 0, update)
        assert not one.history.of("staged")
        assert torch.equal(one.pull(0)[1], torch.zeros(20, dtype=dtype))

        for vw in range(2):
            assert not one.push(requester(vw), 0, ones(dtype=dtype))
            one.report(requester(vw), 0)
        assert torch.equal(one.pull(1)[1], ones(2.0, dtype=dtype)[1])

    def test_initial_weights_too(self) -> None:
        one = OneShard(shard_config(slices_of(SIZES)))
        with pytest.raises(NonFiniteUpdate, match="initial weights of stage 0"):
            one.push(requester(), None, ones(float("nan")))

    def test_integers_are_never_refused(self) -> None:
        one = OneShard(shard_config(slices_of((3,), dtype="int64"))).begin()

        assert not one.push(requester(), 0, [torch.tensor([-1, 2**62, 0x7FF8000000000000])])

    def test_the_bad_element_may_be_in_any_chunk(self) -> None:
        size = 600_000
        one = OneShard(shard_config(slices_of((size,)))).begin()
        for position in (0, 262_143, 262_144, size - 1):
            update = torch.zeros(size)
            update[position] = float("nan")
            with pytest.raises(NonFiniteUpdate):
                one.push(requester(), 0, [update])


class TestPull:
    def test_too_early_and_too_late(self) -> None:
        one = OneShard(shard_config(slices_of(SIZES)))
        with pytest.raises(ClockNotPublished):
            one.pull(0)
        one.begin()
        with pytest.raises(ClockNotPublished, match="clock 1 is not published; the newest is 0"):
            one.pull(1)
        for wave in range(3):
            for vw in range(2):
                one.push(requester(vw), wave, ones())
                one.report(requester(vw), wave)

        with pytest.raises(ClockFreed):
            one.pull(0)
        with pytest.raises(ClockFreed):
            one.pull(-1)
        with pytest.raises(ClockNotPublished):
            one.pull(2**62)
        assert torch.equal(one.pull(3)[0], ones(6.0)[0])
        assert one.buffers[0] <= 2

    def test_a_pull_under_way_keeps_its_version(self) -> None:
        one = small()
        with one.shard.pull(PullHeader(requester(), Clock(0), one.headers)) as chunks:
            for wave in range(3):
                for vw in range(2):
                    one.push(requester(vw), wave, ones())
                    one.report(requester(vw), wave)
            (chunk,) = chunks
        assert not any(chunk[24:])
        with pytest.raises(ClockFreed):
            one.pull(0)

    @pytest.mark.parametrize(
        ("who", "error"),
        [
            (requester(term=2), StaleTerm),
            (requester(job="other"), StaleTerm),
            (requester(incarnation=1), ClockNotPublished),
            (requester(vw=7), ClockNotPublished),
        ],
    )
    def test_who_may_not_ask(self, who: object, error: type[ProtocolViolation]) -> None:
        one = small()
        with pytest.raises(error):
            one.pull(0, who)  # type: ignore[arg-type]


Change = Callable[[PushHeader], PushHeader]


def by(**changes: object) -> Change:
    return lambda header: replace(header, requester=replace(header.requester, **changes))  # type: ignore[arg-type]


def slices(change: Callable[[tuple[SliceHeader, ...]], tuple[SliceHeader, ...]]) -> Change:
    return lambda header: replace(header, slices=change(header.slices))


def wave(number: int) -> Change:
    return lambda header: replace(header, wave=Wave(number))


REFUSED: dict[str, tuple[Change, type[ProtocolViolation]]] = {
    "another job": (by(job_id="other"), StaleTerm),
    "an older term": (by(term=0), StaleTerm),
    "a newer term": (by(term=2), StaleTerm),
    "a later life": (by(incarnation=1), ClockNotPublished),
    "a negative life": (by(incarnation=-1), StaleIncarnation),
    "no member": (by(vw=2), ClockNotPublished),
    "a negative member": (by(vw=-1), ClockNotPublished),
    "a negative wave": (wave(-1), WaveOutOfOrder),
    "very negative": (wave(-(2**62)), WaveOutOfOrder),
    "a wave of the future": (wave(4), WaveOutOfOrder),
    "far in the future": (wave(2**62), WaveOutOfOrder),
    "an unknown name": (slices(lambda s: (replace(s[0], parameter="x"), *s[1:])), SliceMismatch),
    "a very long name": (slices(lambda s: (replace(s[0], parameter="x" * 10_000),)), SliceMismatch),
    "another dtype": (slices(lambda s: (replace(s[0], dtype="float64"), *s[1:])), SliceMismatch),
    "no dtype": (slices(lambda s: (replace(s[0], dtype="pickle"), *s[1:])), SliceMismatch),
    "too long": (slices(lambda s: (replace(s[0], stop=6), *s[1:])), SliceMismatch),
    "a part": (slices(lambda s: (replace(s[0], start=1), *s[1:])), SliceMismatch),
    "negative bounds": (slices(lambda s: (replace(s[0], start=-5, stop=-1), *s[1:])), SliceMismatch),
    "gigantic": (slices(lambda s: (replace(s[0], stop=2**62), *s[1:])), SliceMismatch),
    "twice": (slices(lambda s: (*s, s[0])), SliceMismatch),
}


@pytest.mark.parametrize(("change", "error"), REFUSED.values(), ids=REFUSED)
def test_a_push_is_refused_before_anything_is_allocated(change: Change, error: type[ProtocolViolation]) -> None:
    one = small(staleness=1)
    one.settle()
    before = one.buffers
    assert before == (1, 1)
    with pytest.raises(error) as caught:
        one.shard.begin_push(change(push_header(requester(), 0, one.headers)))

    assert type(caught.value) is error
    assert len(str(caught.value)) < 500
    assert one.buffers == before
    assert not one.push(requester(), 0, ones())


def test_a_wave_that_was_skipped_is_refused_by_the_log() -> None:
    one = small(staleness=2)
    one.push(requester(), 1, ones())
    with pytest.raises(WaveOutOfOrder, match="reports wave 1; it may report wave 0"):
        one.report(requester(), 1)


class TestEviction:
    def evict(self, one: OneShard, vw: int) -> None:
        one.clock.evict(requester(vw).vw, Incarnation(0))
        one.settle()

    def test_what_was_staged_is_dropped_and_what_was_committed_stays(self) -> None:
        one = small(staleness=1)
        one.push(requester(1), 0, ones(2.0))
        one.report(requester(1), 0)
        one.push(requester(1), 1, ones(100.0))
        self.evict(one, 1)
        with pytest.raises(StaleIncarnation):
            one.push(requester(1), 1, ones())
        one.push(requester(0), 0, ones(3.0))
        one.report(requester(0), 0)

        assert torch.equal(one.pull(1)[0], ones(5.0)[0])
        assert one.buffers[0] <= 2

    def test_late_bytes_of_the_evicted_reach_nobody_elses_wave(self) -> None:
        one = small(stages=(1, 2))
        one.push(requester(1, 0), 0, ones()[:1], [0])
        late = one.shard.begin_push(push_header(requester(1, 1), 0, one.headers[1:]))
        assert isinstance(late, PushSession)
        self.evict(one, 1)
        assert one.buffers[0] == 1
        one.push(requester(0), 0, ones(3.0))
        with pytest.raises(MalformedChunk, match="superseded"):
            late.write(encode(ones(100.0)[1:])[0])
        with pytest.raises(MalformedChunk, match="superseded"):
            late.finish()
        one.report(requester(0), 0)

        assert torch.equal(one.pull(1)[1], ones(3.0)[1])
        assert one.history.of("staged")[-1]["vw"] == 0

    def test_an_unfinished_push_of_the_evicted_keeps_no_buffer(self) -> None:
        one = small()
        unfinished = one.shard.begin_push(push_header(requester(1), 0, one.headers))
        assert isinstance(unfinished, PushSession)
        self.evict(one, 1)

        assert one.buffers[0] == 1

    def test_unfinished_initial_weights_of_a_life_that_ended_keep_no_buffer(self) -> None:
        """No record tells of the end of who was no member yet."""
        one = OneShard(shard_config(slices_of(SIZES)))
        unfinished = one.shard.begin_push(push_header(requester(), None, one.headers))
        assert isinstance(unfinished, PushSession)
        later = requester(incarnation=1)
        one.clock.admit(later.vw, later.incarnation, 1)
        for who in (later, requester(1)):
            one.clock.join(who)
        one.push(later, None, ones())
        one.clock.initialized(later)
        one.settle()
        with pytest.raises(MalformedChunk, match="superseded"):
            unfinished.write(encode(ones())[0])

        assert one.buffers[0] == 1

    def test_a_later_life_may_have_more_stages(self) -> None:
        one = small()
        one.clock.evict(requester(1).vw, Incarnation(0))
        one.clock.admit(requester(1).vw, Incarnation(1), 2)
        for stage in range(2):
            one.clock.join(requester(1, stage, incarnation=1))
        one.settle()
        for wave in range(one.clock.snapshot().barrier):
            one.push(requester(0), wave, ones())
            one.report(requester(0), wave)
        barrier = one.clock.snapshot().published
        assert not one.push(requester(1, 1, incarnation=1), barrier, ones()[1:], [1])
        with pytest.raises(ProtocolViolation, match=f"there is no stage {MAX_STAGES}"):
            one.push(requester(1, MAX_STAGES, incarnation=1), barrier, ones()[1:], [1])
        with pytest.raises(ProtocolViolation, match="virtual worker 0 has 1 stages"):
            one.push(requester(0, 1), barrier, ones()[1:], [1])


def test_the_job_in_the_message_is_the_one_served() -> None:
    one = small()
    with pytest.raises(StaleTerm, match=f"this shard serves job {JOB} term 1"):
        one.pull(0, requester(job="other"))
