"""Segments between two ends: what is passed, what is refused, and what is left when an end dies."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from fcntl import F_SEAL_GROW, F_SEAL_SEAL
from pathlib import Path
from typing import Any

import pytest

from hetpipe.errors import DeadlineExceeded, PeerUnreachable, ProtocolViolation
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.values.requests import MemoryOffer, Requester
from hetpipe.wire import segment, segment_client, segment_server
from hetpipe.wire.call import Chunk, joined
from hetpipe.wire.segment import (
    IDLE_SECONDS,
    NUM_SLOTS,
    SEALS,
    SEGMENT_BYTES,
    SEGMENT_KEY,
    SLOT_BYTES,
    Lane,
    SegmentBroken,
    SegmentRefused,
    make_segment,
    map_segment,
)
from hetpipe.wire.segment_client import fetch_segment
from hetpipe.wire.segment_server import TOKEN_SECONDS, SegmentKey, SegmentServer
from tests.polling import wait_until
from tests.support.fake_clock import FakeClock
from tests.support.segments import segments_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfds are Linux's")

WHO = Requester(JobId("job"), Term(1), VirtualWorkerIndex(0), Incarnation(0), StageIndex(0))
KEY = SegmentKey(WHO, "Push")
SECONDS = 10.0


class Context:
    """The context of a call over a lane."""

    def __init__(self, *values: str) -> None:
        self._values = values

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple((SEGMENT_KEY, value) for value in self._values)

    def is_active(self) -> bool:
        return True


def context(lane: Lane) -> Any:
    return Context(f"{lane.name}:{lane.number}")


def never() -> bool:
    return False


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server(clock: FakeClock) -> Iterator[SegmentServer]:
    before = segments_of()
    value = SegmentServer(clock=clock, max_segments=3)
    yield value
    value.stop()
    wait_until(lambda: segments_of() == before, timeout_seconds=SECONDS, what="segment freed")


def next_call(lane: Lane) -> None:
    assert lane.take_turn()
    lane.number += 1


def copies(chunks: Iterable[Chunk]) -> list[bytes]:
    """What arrives."""
    return list(map(joined, chunks))


class TestTransfers:
    def test_an_upload_arrives_as_it_was_sent(self, server: SegmentServer) -> None:
        chunks = [bytes([number]) * (100 * number + 1) for number in range(3 * NUM_SLOTS)] + [b"x" * SLOT_BYTES]
        lane = fetch_segment(server.offer(KEY))
        with ThreadPoolExecutor(1) as thread:
            for _ in range(2):
                next_call(lane)
                sent = thread.submit(lane.send, chunks, is_over=never)
                with server.receiving(KEY, (), context(lane)) as received:
                    assert copies(received) == chunks
                assert sent.result(SECONDS)
                lane.end_turn()
        lane.close()

    def test_a_download_arrives_as_it_was_sent(self, server: SegmentServer) -> None:
        chunks = [os.urandom(1000) for _ in range(3 * NUM_SLOTS)]
        with closing(fetch_segment(server.offer(KEY))) as lane, ThreadPoolExecutor(1) as thread:
            next_call(lane)
            sent = thread.submit(lambda: list(server.sending(KEY, iter(chunks), context(lane))))
            assert copies(lane.receive(is_over=never)) == chunks
            assert sent.result(SECONDS) == [], "no chunk is a message as well"
            lane.end_turn()

    def test_a_call_that_names_no_segment_has_its_chunks_in_messages(self, server: SegmentServer) -> None:
        bare: Any = Context()
        with server.receiving(KEY, [b"a", b"b"], bare) as received:
            assert copies(received) == [b"a", b"b"]
        assert list(server.sending(KEY, iter([b"c"]), bare)) == [b"c"]

    def test_a_slot_is_free_when_the_next_chunk_is_requested(self, server: SegmentServer) -> None:
        with closing(fetch_segment(server.offer(KEY))) as lane, ThreadPoolExecutor(1) as thread:
            next_call(lane)
            sent = thread.submit(lane.send, [b"a", b"b"], is_over=never)
            with server.receiving(KEY, (), context(lane)) as received:
                each = iter(received)
                first = next(each)
                assert joined(first) == b"a"
                assert next(each) == b"b"
                with pytest.raises(ValueError, match="released"):
                    joined(first)
                assert list(each) == []
            assert sent.result(SECONDS)
            lane.end_turn()

    def test_a_chunk_that_is_sent_while_the_sender_waits_for_its_next(self, server: SegmentServer) -> None:
        begun, goes_on = threading.Event(), threading.Event()

        def waiting() -> Iterator[bytes]:
            yield b"first"
            begun.set()
            assert goes_on.wait(SECONDS)
            yield b"last"

        with closing(fetch_segment(server.offer(KEY))) as lane, ThreadPoolExecutor(1) as thread:
            next_call(lane)
            sent = thread.submit(lane.send, waiting(), is_over=never)
            with server.receiving(KEY, (), context(lane)) as received:
                each = iter(received)
                assert joined(next(each)) == b"first"
                assert begun.wait(SECONDS)
                assert [lane.send_now(lambda: (b"now", b"!")) for _ in range(NUM_SLOTS)] == [True] * (NUM_SLOTS - 1) + [
                    False
                ]
                assert [joined(next(each)) for _ in range(NUM_SLOTS - 1)] == [b"now!"] * (NUM_SLOTS - 1)
                assert lane.send_now(lambda: (b"later",)), "a slot is free again"
                goes_on.set()
                assert copies(each) == [b"later", b"last"]
            assert sent.result(SECONDS)
            lane.end_turn()

    def test_a_receiver_that_stops_early_ends_the_sender_and_the_next_call_is_whole(
        self, server: SegmentServer
    ) -> None:
        with closing(fetch_segment(server.offer(KEY))) as lane, ThreadPoolExecutor(1) as thread:
            next_call(lane)
            sent = thread.submit(lane.send, [b"old"] * 5 * NUM_SLOTS, is_over=never)
            with server.receiving(KEY, (), context(lane)) as received:
                assert next(iter(received)) == b"old"
            assert not sent.result(SECONDS)
            lane.end_turn()
            next_call(lane)
            again = thread.submit(lane.send, [b"new"] * 5 * NUM_SLOTS, is_over=never)
            with server.receiving(KEY, (), context(lane)) as received:
                assert copies(received) == [b"new"] * 5 * NUM_SLOTS
            assert again.result(SECONDS)
            lane.end_turn()

    def test_any_number_of_small_and_of_refused_calls_leaves_no_message_behind(self, server: SegmentServer) -> None:
        with closing(fetch_segment(server.offer(KEY))) as lane, ThreadPoolExecutor(1) as thread:
            for number in range(600):
                next_call(lane)
                sent = thread.submit(lane.send, [b"chunk"] * 2, is_over=never)
                with server.receiving(KEY, (), context(lane)) as received:
                    if number % 2:
                        assert copies(received) == [b"chunk"] * 2
                assert sent.result(SECONDS) == bool(number % 2)
                lane.end_turn()

    def test_a_sender_that_fails_ends_the_receiver(self, server: SegmentServer) -> None:
        def failing() -> Iterator[bytes]:
            yield b"first"
            raise ProtocolViolation("no second one")

        with closing(fetch_segment(server.offer(KEY))) as lane:
            next_call(lane)
            with pytest.raises(ProtocolViolation, match="no second one"):
                lane.send(failing(), is_over=never)
            with server.receiving(KEY, (), context(lane)) as received:
                assert copies(received) == [b"first"]
            lane.end_turn()

    def test_a_chunk_beyond_a_slot_is_refused(self, server: SegmentServer) -> None:
        too_long = f"does not fit into a slot of {SLOT_BYTES}"
        with closing(fetch_segment(server.offer(KEY))) as lane, pytest.raises(ProtocolViolation, match=too_long):
            lane.send([bytes(SLOT_BYTES + 1)], is_over=never)


class TestBreaks:
    def test_a_call_that_is_over_ends_the_wait(self, server: SegmentServer) -> None:
        with closing(fetch_segment(server.offer(KEY))) as lane, pytest.raises(SegmentBroken, match="the call ended"):
            list(lane.receive(is_over=lambda: True))
        assert lane.is_closed

    def test_an_end_that_does_not_move_is_given_up(self, server: SegmentServer, clock: FakeClock) -> None:
        def later() -> bool:
            clock.advance(IDLE_SECONDS)
            return False

        lane = fetch_segment(server.offer(KEY), clock=clock)
        with pytest.raises(DeadlineExceeded, match="waited 30 s for the other process"):
            list(lane.receive(is_over=later))
        assert lane.is_closed

    def test_a_closed_end_wakes_the_other_and_is_freed(self, server: SegmentServer) -> None:
        lane = fetch_segment(server.offer(KEY))
        assert server.num_open == 1
        lane.close()
        wait_until(lambda: server.num_open == 0, timeout_seconds=SECONDS, what="segment forgotten")
        with pytest.raises(PeerUnreachable, match="no such segment here for Push; request a new one"):
            server.receiving(KEY, (), context(lane)).__enter__()

    def test_closing_during_a_call_frees_it_afterwards(self, server: SegmentServer) -> None:
        lane = fetch_segment(server.offer(KEY))
        next_call(lane)
        lane.close()
        with pytest.raises(SegmentBroken):
            list(lane.receive(is_over=never))
        lane.end_turn()
        assert lane._memory.closed
        assert not lane.take_turn()

    @pytest.mark.parametrize(
        "message",
        [
            b"short",
            segment._MESSAGE.pack(9, 0, 1, 10),
            segment._MESSAGE.pack(1, 0, 7, 10),
            segment._MESSAGE.pack(1, 2, 1, 10),
            segment._MESSAGE.pack(1, 0, 1, SLOT_BYTES + 1),
            segment._MESSAGE.pack(1, 0, 1, 0),
        ],
        ids=["short", "kind", "later call", "other slot", "too long", "empty"],
    )
    def test_what_breaks_the_protocol_closes_the_segment(self, server: SegmentServer, message: bytes) -> None:
        with closing(fetch_segment(server.offer(KEY))) as lane:
            next_call(lane)
            lane.connection.send(message)
            with server.receiving(KEY, (), context(lane)) as received, pytest.raises(SegmentBroken, match="protocol"):
                list(received)
            lane.end_turn()

    def test_the_segment_of_another_stage_or_call_is_not_used(self, server: SegmentServer) -> None:
        with closing(fetch_segment(server.offer(KEY))) as lane:
            lane.number = 1
            for key in (replace(KEY, call="Pull"), SegmentKey(replace(WHO, stage=StageIndex(1)), "Push")):
                with pytest.raises(PeerUnreachable, match="no such segment here"):
                    server.receiving(key, (), context(lane)).__enter__()

    def test_one_call_at_a_time_and_none_twice(self, server: SegmentServer) -> None:
        with closing(fetch_segment(server.offer(KEY))) as lane:
            next_call(lane)
            in_use = pytest.raises(PeerUnreachable, match="is in use; request a new one")
            with server.receiving(KEY, (), context(lane)), in_use:
                server.receiving(KEY, (), context(lane)).__enter__()
            with pytest.raises(ProtocolViolation, match="call 1 of a segment came after call 1"):
                server.receiving(KEY, (), context(lane)).__enter__()
            lane.end_turn()

    @pytest.mark.parametrize("value", ["x", "x:", "x:-1", "x:1234567890123456"])
    def test_what_names_no_segment_is_refused(self, server: SegmentServer, value: str) -> None:
        named: Any = Context(value)
        with pytest.raises(ProtocolViolation, match="hetpipe-segment must be NAME:NUMBER"):
            server.receiving(KEY, (), named).__enter__()


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []

    class Log:
        def warning(self, event: str, *, reason: str) -> None:
            said.append(f"{event}: {reason}")

        def info(self, event: str, **_: object) -> None:
            pass

    monkeypatch.setattr(segment_server, "_log", Log())
    return said


class TestRefusals:
    """A refusal is logged, and nothing is mapped at either end."""

    def refused(self, server: SegmentServer, offer: MemoryOffer, why: str) -> None:
        before, open_before = segments_of(), server.num_open
        with pytest.raises(SegmentRefused, match=why):
            fetch_segment(offer)
        assert segments_of() <= before
        assert server.num_open == open_before

    def test_a_wrong_token(self, server: SegmentServer, refusals: list[str]) -> None:
        self.refused(server, replace(server.offer(KEY), token="0" * 64), "no segment was passed")
        assert refusals == ["segment_refused: the token is unknown, used already, or too old"]

    def test_a_token_used_twice(self, server: SegmentServer, refusals: list[str]) -> None:
        offer = server.offer(KEY)
        with closing(fetch_segment(offer)):
            self.refused(server, offer, "no segment was passed")
        assert refusals == ["segment_refused: the token is unknown, used already, or too old"]

    def test_an_old_token(self, server: SegmentServer, clock: FakeClock, refusals: list[str]) -> None:
        offer = server.offer(KEY)
        clock.advance(TOKEN_SECONDS + 1)
        self.refused(server, offer, "no segment was passed")
        assert len(refusals) == 1

    def test_no_token_at_all(self, server: SegmentServer, refusals: list[str]) -> None:
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as silent:
            silent.connect(f"\0{server.offer(KEY).socket}".encode())
            wait_until(lambda: bool(refusals), timeout_seconds=SECONDS, what="refusal")
        assert server.num_open == 0

    def test_another_user(self, server: SegmentServer, refusals: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(segment_server, "is_same_user", lambda _: False)
        self.refused(server, server.offer(KEY), "no segment was passed")
        assert refusals == [f"segment_refused: a process of user {os.geteuid()}, not of this one"]

    def test_a_server_of_another_user(self, server: SegmentServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(segment_client, "is_same_user", lambda _: False)
        self.refused(server, server.offer(KEY), "the process behind its socket is of another user")

    @pytest.mark.parametrize(
        ("num_bytes", "seals", "why"),
        [
            (SEGMENT_BYTES, SEALS & ~F_SEAL_GROW, "must be sealed against shrinking, growing and further seals"),
            (SEGMENT_BYTES, F_SEAL_SEAL, "must be sealed"),
            (SEGMENT_BYTES - 4096, SEALS, f"a segment has {SEGMENT_BYTES} bytes; {SEGMENT_BYTES - 4096} were passed"),
            (SEGMENT_BYTES * 2, SEALS, "were passed"),
        ],
    )
    def test_a_wrong_size_and_a_missing_seal(
        self, server: SegmentServer, monkeypatch: pytest.MonkeyPatch, num_bytes: int, seals: int, why: str
    ) -> None:
        descriptor = make_segment(num_bytes, seals=seals)
        try:
            with pytest.raises(SegmentRefused, match=why):
                map_segment(descriptor)
        finally:
            os.close(descriptor)

        def passed(connection: socket.socket, data: list[bytes], descriptors: list[int]) -> int:
            bad = make_segment(num_bytes, seals=seals)
            try:
                return send_fds(connection, data, [bad])
            finally:
                os.close(bad)

        send_fds = socket.send_fds
        monkeypatch.setattr("hetpipe.wire.segment_server.socket.send_fds", passed)
        before = segments_of()
        with pytest.raises(SegmentRefused, match=why):
            fetch_segment(server.offer(KEY))
        wait_until(lambda: segments_of() == before, timeout_seconds=SECONDS, what="segment freed")

    def test_a_file_is_no_segment(self, tmp_path: Path) -> None:
        with (tmp_path / "file").open("w+b") as file, pytest.raises(SegmentRefused, match="without seals"):
            map_segment(file.fileno())

    def test_a_socket_elsewhere_and_a_strange_name(self, server: SegmentServer) -> None:
        offer = server.offer(KEY)
        self.refused(server, replace(offer, socket=f"hetpipe-{'0' * 32}"), "as from another host or container")
        self.refused(server, replace(offer, socket="../x"), "'../x' is no socket for segments")

    def test_no_more_than_the_limit(self, server: SegmentServer) -> None:
        stages = [SegmentKey(replace(WHO, stage=StageIndex(stage)), "Push") for stage in range(4)]
        for each in stages[:3]:
            assert server.offer(each).socket
        self.refused(server, server.offer(stages[3]), "shares 3 segments already")
        assert server.offer(stages[0]).socket, "a stage that asks again takes the place of its earlier segment"

    def test_a_server_that_ends(self) -> None:
        ended = SegmentServer()
        ended.stop()
        self.refused(ended, ended.offer(KEY), "cannot share memory")

    def test_a_system_without_memfds(
        self, monkeypatch: pytest.MonkeyPatch, refusals: list[str], clock: FakeClock
    ) -> None:
        def none(*_: object) -> int:
            raise OSError("no memfds")

        class Log:
            def warning(self, event: str, **values: object) -> None:
                refusals.append(f"{event}: {values['reason']}")

        monkeypatch.setattr(segment_server, "_log", Log())
        monkeypatch.setattr(segment_server, "make_segment", none)
        without = SegmentServer(clock=clock)
        assert without.offer(KEY).reason == "this process cannot share memory"
        assert refusals == ["no_shared_memory: no memfds"]
        without.stop()


@contextmanager
def child(work: Callable[[int], object]) -> Iterator[tuple[int, str]]:
    """A forked process that does `work`, which says something to a pipe, and then waits to be killed."""
    heard, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kept = work(say)
            signal.pause()
            del kept
        finally:
            os._exit(1)
    os.close(say)
    try:
        yield pid, os.read(heard, 1000).decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(heard)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


class TestDeaths:
    def test_a_stage_that_is_killed_leaves_nothing(self, server: SegmentServer) -> None:
        before, offer = segments_of(), server.offer(KEY)

        def stage(say: int) -> Lane:
            lane = fetch_segment(offer)
            os.write(say, b"ready")
            return lane

        with child(stage) as (pid, said):
            assert said == "ready"
            assert segments_of(pid) == 2, "its mapping, and the descriptor that Python keeps with it"
            assert server.num_open == 1
            kill(pid)
            wait_until(lambda: server.num_open == 0, timeout_seconds=SECONDS, what="segment forgotten")
        wait_until(lambda: segments_of() == before, timeout_seconds=SECONDS, what="segment freed")
        assert not list(Path("/dev/shm").glob("*hetpipe-segment*"))

    def test_a_server_that_is_killed_leaves_nothing(self) -> None:
        before = segments_of()

        def serve(say: int) -> SegmentServer:
            killed = SegmentServer()
            offered = killed.offer(KEY)
            os.write(say, f"{offered.socket} {offered.token} {offered.segment}".encode())
            return killed

        with child(serve) as (pid, said):
            name, token, found = said.split()
            lane = fetch_segment(MemoryOffer(name, token, found, ""))
            next_call(lane)
            kill(pid)
            with pytest.raises(SegmentBroken):
                list(lane.receive(is_over=never))
            lane.end_turn()
        assert segments_of() == before
        assert name not in Path("/proc/net/unix").read_text()
