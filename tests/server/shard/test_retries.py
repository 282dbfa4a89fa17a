"""Transports that wait for a parameter server that is away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from structlog.testing import capture_logs

from hetpipe.decide.sync.records import TermRecord
from hetpipe.errors import (
    BuffersMissing,
    Busy,
    ClockNotPublished,
    DeadlineExceeded,
    HetpipeError,
    PeerUnreachable,
    StaleIncarnation,
    StaleTerm,
    UnknownJob,
)
from hetpipe.observe.timeline import NullTimeline
from hetpipe.pipeline.synchroniser import SyncListener
from hetpipe.server.shard.chunks import ChunkReceiver, Chunks, RunMap
from hetpipe.server.shard.client import ShardClient
from hetpipe.server.shard.retries import RetryingCalls, RetryPolicy, RetryState
from hetpipe.values.ids import Clock, Term
from hetpipe.values.requests import PullHeader, PushReply, SliceHeader, Watermarks
from hetpipe.values.run import StageReport, StageWaiting
from hetpipe.weights.flat import BufferPool, FlatBuffer, FlatLayout
from hetpipe.wire import calls
from hetpipe.wire.call import Call, Chunk, Download, Streaming, Unary, Upload
from hetpipe.wire.calls import FollowLogRequest, LogRecords
from tests.server.shard.builders import headers_of, push_header, requester, slices_of
from tests.support.fake_clock import FakeClock
from tests.support.method_calls import MethodCalls

GONE = PeerUnreachable("parameter server 1 at h:1 cannot be reached")
PUSH = push_header(requester(), 0, headers_of(slices_of([4])))
PULL = PullHeader(requester(), Clock(1), PUSH.slices)


class Case:
    """Patience with a parameter server, and what it says."""

    def __init__(self, *, seconds: float = 600.0, auto_advance: bool = True) -> None:
        self.clock = FakeClock(auto_advance=auto_advance)
        self.told: list[StageReport] = []
        waits = RetryPolicy(
            who="stage 0 of virtual worker 1",
            report=self.told.append,
            seconds=seconds,
            clock=self.clock,
            chance=lambda: 0.0,
        )
        self.endurance = RetryState("parameter server 1 at h:1", waits)

    def call(self, *answers: HetpipeError | int) -> int:
        """A call with one answer after the other."""
        left = iter(answers)

        def attempt() -> int:
            answer = next(left)
            if isinstance(answer, HetpipeError):
                raise answer
            return answer

        return self.endurance.call(attempt)


@pytest.mark.parametrize("error", [GONE, DeadlineExceeded("it did not answer"), Busy("ask again soon")])
def test_a_call_is_repeated_until_there_is_an_answer(error: HetpipeError) -> None:
    assert Case().call(error, error, error, 7) == 7


@pytest.mark.parametrize("answer", [StaleIncarnation("an earlier life"), StaleTerm("over"), UnknownJob("which?")])
def test_an_answer_is_not_asked_for_again(answer: HetpipeError) -> None:
    with pytest.raises(type(answer)):
        Case().call(GONE, answer, 7)


def test_rests_grow_to_half_a_second() -> None:
    case = Case()
    began: list[float] = []

    def attempt() -> None:
        began.append(case.clock.monotonic())
        if len(began) < 8:
            raise GONE

    case.endurance.call(attempt)
    rests = [round(after - before, 6) for before, after in pairwise(began)]
    assert rests == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5, 0.5]


def test_patience_ends() -> None:
    case = Case(seconds=60.0)
    with pytest.raises(
        PeerUnreachable, match=r"^stage 0 of virtual worker 1 waited 60 s for parameter server 1 at h:1: parameter serv"
    ):
        case.call(*[GONE] * 1_000)
    assert 60.0 <= case.clock.monotonic() < 61.0


def test_an_outage_is_told_once_in_the_log_and_every_five_seconds_to_whoever_watches() -> None:
    case = Case()
    with capture_logs() as logs:
        case.call(*[GONE] * 30, 7)
        case.call(7)
    assert [line["event"] for line in logs] == ["parameter_server_away", "parameter_server_back"]
    assert logs[1]["away_seconds"] == pytest.approx(case.clock.monotonic())
    sentences = [report.sentence for report in case.told if isinstance(report, StageWaiting)]
    where = "parameter server 1 at h:1, which is unreachable"
    assert sentences == [f"stage 0 of virtual worker 1 has waited {seconds} s for {where}" for seconds in (5, 10)]


def test_one_that_is_busy_is_not_away() -> None:
    case = Case()
    with capture_logs() as logs:
        case.call(*[Busy("ask again soon")] * 15, 7)
    assert logs == []
    (told,) = case.told
    assert isinstance(told, StageWaiting)
    assert told.sentence.endswith("for parameter server 1 at h:1, which is busy")


def test_closing_ends_a_wait_at_once() -> None:
    case = Case(auto_advance=False)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            case.call(*[GONE] * 9)
        except PeerUnreachable as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert case.clock.wait_sleepers(1)
    case.endurance.close()
    case.clock.advance(0.05)
    thread.join(timeout=10.0)
    assert raised == [GONE]


REPLY = PushReply(duplicate=False, marks=Watermarks(Clock(3), Clock(2), Clock(3)))


class BreakingShard(MethodCalls):
    """`Calls` that break a number of times, after one chunk."""

    def __init__(self, breaks: int) -> None:
        self.breaks = breaks
        self.pushed: list[list[Chunk]] = []
        self.chunks: Callable[[], Iterable[Chunk]] = lambda: [b"a", b"b", b"c"]
        self.closed = False

    def push(self, header: object, chunks: Iterable[Chunk]) -> PushReply:
        for count, _chunk in enumerate(chunks):
            self._break(count)
        self.pushed.append(list(chunks))
        return REPLY

    def pull(self, header: object) -> Iterator[Chunk]:
        for count, chunk in enumerate(self.chunks()):
            self._break(count)
            yield chunk

    def _break(self, count: int) -> None:
        if count == 1 and self.breaks:
            self.breaks -= 1
            raise GONE

    def close(self) -> None:
        self.closed = True


def test_a_push_that_breaks_is_sent_again_from_its_beginning() -> None:
    layout = FlatLayout([("p0", (300_000,), "float32")])
    header = SliceHeader("p0", 0, 300_000, "float32")
    sent = Chunks(FlatBuffer(layout, torch.device("cpu")), RunMap([header], [0]))
    broken = BreakingShard(breaks=2)
    with closing(RetryingCalls(broken, Case().endurance)) as shard:
        assert shard.upload(calls.PUSH, PUSH, sent) == REPLY
    assert broken.pushed == [list(sent)]
    assert broken.closed


def test_a_pull_that_breaks_begins_anew_and_so_does_its_receiver() -> None:
    layout = FlatLayout([("p0", (300_000,), "float32")])
    header = SliceHeader("p0", 0, 300_000, "float32")
    runs = RunMap([header], [0])
    source, target = FlatBuffer(layout, torch.device("cpu")), FlatBuffer(layout, torch.device("cpu"))
    source.views["p0"].copy_(torch.arange(300_000))
    broken = BreakingShard(breaks=3)
    broken.chunks = lambda: Chunks(source, runs)
    receiver = ChunkReceiver(target, runs, restarts=True)
    for chunk in RetryingCalls(broken, Case().endurance).download(calls.PULL, PULL):
        receiver.write(chunk)
    receiver.finish()
    assert torch.equal(source.data, target.data)


class BreakingClock:
    """`Calls` whose log breaks after each batch; all other calls fail once."""

    def __init__(self) -> None:
        self.records = [TermRecord(index, Term(1)) for index in range(4)]
        self.followed: list[int] = []
        self.called: list[str] = []

    def stream(self, call: object, request: Any) -> Any:
        self.followed.append(request.start)
        if request.start == len(self.records):
            return
        # -1: from the latest segment on, which is told by the index of the first record.
        first = 2 if request.start < 0 else request.start
        yield LogRecords(tuple(self.records[first : first + 1]))
        raise GONE

    def invoke(self, call: Call, _: object) -> Any:
        self.called.append(call.name)
        if self.called.count(call.name) == 1:
            raise GONE
        return call.name

    def upload(self, call: Call, header: object, _: Iterable[Chunk]) -> Any:
        return self.invoke(call, header)

    def download(self, call: Call, header: object) -> Any:
        self.invoke(call, header)
        return iter([b"chunk"])

    def close(self) -> None: ...


@pytest.mark.parametrize(("start", "followed"), [(0, [0, 1, 2, 3, 4]), (-1, [-1, 3, 4])])
def test_a_log_is_followed_on_from_where_it_broke(start: int, followed: list[int]) -> None:
    broken = BreakingClock()
    clock = RetryingCalls(broken, Case().endurance)
    request = FollowLogRequest(requester().job_id, Term(1), start)
    told = [record.index for found in clock.stream(calls.FOLLOW_LOG, request) for record in found.records]
    assert told == [index for index in range(4) if index >= followed[1] - 1]
    assert broken.followed == followed


@pytest.mark.parametrize(
    "call", [call for call in calls.CALLS if not isinstance(call, Streaming)], ids=lambda c: c.name
)
def test_every_call_that_may_be_repeated_is_and_no_other(call: Call) -> None:
    broken = BreakingClock()
    retrying = RetryingCalls(broken, Case().endurance)

    def make() -> object:
        match call:
            case Upload():
                return retrying.upload(call, None, [b"chunk"])
            case Download():
                return list(retrying.download(call, None))
            case Unary():
                return retrying.invoke(call, None)
        raise AssertionError(call.name)

    if call.is_repeatable:
        assert make() == ([b"chunk"] if isinstance(call, Download) else call.name)
        assert broken.called == [call.name, call.name]
    else:
        with pytest.raises(PeerUnreachable):
            make()
        assert broken.called == [call.name]


class ForgetfulClock(MethodCalls):
    """A clock shard that waits for others' buffers for a while, then is started again without what it had."""

    def __init__(self) -> None:
        self.pushed: list[list[Chunk]] = []
        self.asked = 0

    def push_buffers(self, header: object, chunks: Iterable[Chunk]) -> None:
        self.pushed.append(list(chunks))

    def pull_buffers(self, header: object) -> Iterator[Chunk]:
        self.asked += 1
        if self.asked == 100:
            raise BuffersMissing("buffer b of virtual worker 0 is missing here at clock 3")
        if self.asked < 200:
            raise ClockNotPublished("buffer b of virtual workers [1] at clock 3")
        yield from self.pushed[-1]


def test_buffers_are_sent_again_only_to_who_lost_them() -> None:
    clock_shard, clock = ForgetfulClock(), FakeClock(auto_advance=True)
    pool = BufferPool(FlatLayout([]), torch.device("cpu"))
    client = ShardClient(
        requester(),
        (),
        pool,
        shards=(),
        clock_shard=clock_shard,
        listener=cast(SyncListener, None),
        clock=clock,
        timeline=NullTimeline(),
    )
    mine = FlatBuffer(FlatLayout([("b", (3,), "float32")]), torch.device("cpu"))
    mine.views["b"].copy_(torch.tensor([1.0, 2.0, 3.0]))
    result = client.exchange_buffers(Clock(3), mine, deadline_seconds=60.0)
    client.close()
    assert torch.equal(result.data, mine.data)
    assert len(clock_shard.pushed) == 2


def test_patience_is_for_each_outage_of_a_stream() -> None:
    case = Case(seconds=10.0)
    breaks = iter(range(60))

    def begin() -> Iterator[int]:
        yield next(breaks, -1)
        if next(breaks, None) is not None:
            raise GONE

    assert len(list(case.endurance.stream(begin))) == 31
