"""Emulated devices and links take the times they are told, no matter what the real ones took."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from hetpipe.decide.schedule.policy import Kind
from hetpipe.errors import ClockNotPublished
from hetpipe.pipeline.compute import Emulator
from hetpipe.server.shard.emulated import over
from hetpipe.values.ids import Clock, JobId, StageIndex, Term, VirtualWorkerIndex, Wave
from hetpipe.values.ids import Incarnation as Life
from hetpipe.values.requests import PullHeader, PushHeader, PushReply, Requester, SliceHeader, Watermarks
from hetpipe.values.run import DeviceConfig, LinkTime, StageEmulation
from hetpipe.wire.call import Calls, Chunk
from hetpipe.wire.calls import PULL, PUSH
from tests.support.fake_clock import FakeClock
from tests.support.method_calls import MethodCalls

WHO = Requester(JobId("job"), Term(1), VirtualWorkerIndex(0), Life(0), StageIndex(0))
SLICES = (SliceHeader("a", 0, 500, "float32"), SliceHeader("b", 100, 600, "float64"))  # 2000 + 4000 bytes
PROFILED = StageEmulation(forward_seconds=(1.5, 0.5, 7.0), backward_seconds=(1.0, 2.0, 9.0))


def profiled(clock: FakeClock, device: DeviceConfig | None = None) -> Emulator:
    """Of a stage with the first two layers."""
    emulator = Emulator(device or DeviceConfig("cpu"), clock, seed=0, emulation=PROFILED)
    emulator.cover(0, 2)
    return emulator


def test_a_computation_takes_its_profiled_time() -> None:
    clock = FakeClock(auto_advance=True)
    emulator = profiled(clock)
    clock.advance(0.5)
    emulator.stretch(Kind.FORWARD, 0.0)
    assert clock.monotonic() == 2.0
    emulator.stretch(Kind.BACKWARD, 2.0)
    assert clock.monotonic() == 5.0
    emulator.cover(1, 3)
    emulator.stretch(Kind.FORWARD, 5.0)
    assert clock.monotonic() == 12.5, "of the layers that it has since a move"


def test_what_is_recomputed_takes_another_forward_where_it_is_trained() -> None:
    clock = FakeClock(auto_advance=True)
    emulator = profiled(clock)
    emulator.cover(0, 3, frozen=1, policies=("recompute", "keep", "recompute-new-run"))
    emulator.stretch(Kind.BACKWARD, 0.0)
    assert clock.monotonic() == 2.0 + 9.0 + 7.0


def test_inactive_layers_take_no_time() -> None:
    clock = FakeClock(auto_advance=True)
    emulator = profiled(clock)
    emulator.cover(0, 3, policies=("recompute", "keep", "recompute-new-run"), inactive=(2, 5))
    emulator.stretch(Kind.FORWARD, 0.0)
    assert clock.monotonic() == 2.0
    emulator.stretch(Kind.BACKWARD, 2.0)
    assert clock.monotonic() == 2.0 + 3.0 + 1.5


def test_a_computation_that_was_too_slow_is_not_shortened() -> None:
    clock = FakeClock(auto_advance=True)
    clock.advance(9.0)
    profiled(clock).stretch(Kind.FORWARD, 0.0)
    assert clock.monotonic() == 9.0


def test_a_straggler_stretches_its_profiled_time() -> None:
    clock = FakeClock(auto_advance=True)
    emulator = profiled(clock, DeviceConfig("cpu", slowdown=10.0, jitter=0.5))
    emulator.stretch(Kind.FORWARD, 0.0)
    assert 20.0 <= clock.monotonic() <= 30.0


def test_without_a_profile_a_computation_takes_a_multiple_of_its_own_time() -> None:
    clock = FakeClock(auto_advance=True)
    clock.advance(0.5)
    Emulator(DeviceConfig("cpu", slowdown=4.0), clock, seed=0).stretch(Kind.FORWARD, 0.0)
    assert clock.monotonic() == 2.0


class Shard(MethodCalls):
    """Takes 1 s for everything."""

    def __init__(self, clock: FakeClock, *, is_early: bool = False) -> None:
        self._clock = clock
        self._is_early = is_early
        self.pushed_at: list[float] = []

    def push(self, header: PushHeader, chunks: Iterable[Chunk]) -> PushReply:
        self.pushed_at.append(self._clock.monotonic())
        self._clock.advance(1.0)
        return PushReply(duplicate=False, marks=Watermarks(Clock(1), Clock(0), Clock(0)))

    def pull(self, header: PullHeader) -> Iterator[Chunk]:
        if self._is_early:
            raise ClockNotPublished("not yet")
        self._clock.advance(1.0)
        yield b"chunk"


def test_what_a_shard_is_sent_arrives_late() -> None:
    clock = FakeClock(auto_advance=True)
    shard = Shard(clock)
    emulated = over(shard, LinkTime(latency_seconds=0.5, bytes_per_second=3000.0), clock=clock)
    assert not emulated.upload(PUSH, PushHeader(WHO, Wave(0), SLICES), ()).duplicate
    assert shard.pushed_at == [2.5]


def test_what_a_shard_sends_takes_its_time() -> None:
    clock = FakeClock(auto_advance=True)
    emulated = over(Shard(clock), LinkTime(latency_seconds=0.5, bytes_per_second=3000.0), clock=clock)
    assert list(emulated.download(PULL, PullHeader(WHO, Clock(1), SLICES))) == [b"chunk"]
    assert clock.monotonic() == 2.5


def test_a_refusal_of_a_shard_comes_at_once() -> None:
    clock = FakeClock(auto_advance=True)
    emulated = over(Shard(clock, is_early=True), LinkTime(latency_seconds=0.5, bytes_per_second=3000.0), clock=clock)
    with pytest.raises(ClockNotPublished):
        list(emulated.download(PULL, PullHeader(WHO, Clock(1), SLICES)))
    assert clock.monotonic() == 0.0


def test_a_shard_without_a_link_time_is_itself() -> None:
    shard: Calls = Shard(FakeClock())
    assert over(shard, None) is shard
