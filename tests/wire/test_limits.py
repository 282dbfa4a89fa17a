"""What one peer may have of a server, counted; and what happens to those who hold it and send nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.errors import Busy, DeadlineExceeded
from hetpipe.wire import audit
from hetpipe.wire.calls import LeaveRequest
from hetpipe.wire.channel import as_is
from hetpipe.wire.limits import Admission, Limits, Uploads
from hetpipe.wire.patience import stream_while_busy, while_busy
from hetpipe.wire.server import Server
from hetpipe.wire.serving import Context
from tests.polling import wait_until
from tests.support.fake_clock import FakeClock
from tests.wire.echo import SERVICE, echo_server, say, serving

TIGHT = Limits(calls_per_peer=2, streams_per_peer=1, bytes_per_peer=100, bytes_in_total=150)
SECONDS = 10.0


class TestAdmission:
    def test_calls_and_streams_of_one_peer(self) -> None:
        admission = Admission()
        with admission.call("a", TIGHT, is_stream=True):
            with pytest.raises(Busy, match="a has 1 streams in progress, and the limit is 1; retry later"):
                admission.call("a", TIGHT, is_stream=True).__enter__()
            with admission.call("a", TIGHT, is_stream=False):
                with pytest.raises(Busy, match="a has 2 calls in progress"):
                    admission.call("a", TIGHT, is_stream=False).__enter__()
                with admission.call("b", TIGHT, is_stream=True):
                    assert admission.num_peers == 2
        assert admission.num_peers == 0

    def test_a_role_has_no_more_than_its_share_however_many_peers_it_has(self) -> None:
        admission = Admission()
        with admission.call("a", TIGHT, is_stream=True, group=("monitor", 2)):
            with admission.call("b", TIGHT, is_stream=False, group=("monitor", 2)):
                with pytest.raises(Busy, match="c has 2 calls of its role in progress, and the limit is 2"):
                    admission.call("c", TIGHT, is_stream=False, group=("monitor", 2)).__enter__()
                with admission.call("d", TIGHT, is_stream=True, group=("agent", None)):
                    """Others are not kept waiting."""
            with admission.call("c", TIGHT, is_stream=False, group=("monitor", 2)):
                """There is room again."""
        assert admission.num_peers == 0

    def test_bytes_of_one_peer_and_of_all(self) -> None:
        admission = Admission()
        with admission.bytes_in_flight("a", 60, TIGHT):
            with pytest.raises(
                Busy, match="60 bytes from a are in flight, and 50 bytes more would exceed the limit of 100 bytes"
            ):
                admission.bytes_in_flight("a", 50, TIGHT).__enter__()
            with (
                admission.bytes_in_flight("b", 80, TIGHT),
                pytest.raises(Busy, match="140 bytes from all peers together are in flight"),
            ):
                admission.bytes_in_flight("c", 20, TIGHT).__enter__()

    def test_a_large_upload_alone_goes_through(self) -> None:
        with Admission().bytes_in_flight("a", 10**12, TIGHT):
            """Whether it is one of the plan is for the handler to say."""

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 90)), max_size=30))
    def test_the_bounds_hold_and_nothing_stays(self, uploads: list[tuple[str, int]]) -> None:
        admission, under_way = Admission(), {"a": 0, "b": 0, "c": 0}
        with ExitStack() as stack:
            for peer, num_bytes in uploads:
                try:
                    stack.enter_context(admission.bytes_in_flight(peer, num_bytes, TIGHT))
                except Busy:
                    assert under_way[peer] + num_bytes > 100 or sum(under_way.values()) + num_bytes > 150
                else:
                    under_way[peer] += num_bytes
                assert max(under_way.values()) <= 100
                assert sum(under_way.values()) <= 150
        assert admission.num_peers == 0

    def test_an_address_leaves_threads_to_others(self) -> None:
        many, few = Limits().of_address(360), Limits().of_address(8)
        assert (many.calls_per_peer, many.streams_per_peer, many.bytes_per_peer) == (315, 315, None)
        assert few.calls_per_peer == 8


class TestUploads:
    def test_only_who_is_waited_for_is_overdue(self) -> None:
        uploads: Uploads[str] = Uploads(Limits(idle_seconds=30.0))
        uploads.begin("a", now=0.0)
        other = uploads.begin("b", now=0.0)
        other.waits_since = None
        ((who, error),) = uploads.overdue(now=30.0)
        assert who == "a"
        assert str(error) == "nothing was received for 30 s, and the limit is 30 s; call again"
        assert uploads.overdue(now=31.0) == []
        assert uploads.is_overdue("a")
        assert not uploads.is_overdue("b")
        other.waits_since = 40.0
        assert uploads.overdue(now=69.0) == []
        uploads.end("b")
        uploads.end("a")
        assert len(uploads) == 0

    def test_a_trickle_ends_too(self) -> None:
        uploads: Uploads[str] = Uploads(Limits(idle_seconds=30.0, upload_seconds=100.0))
        upload = uploads.begin("a", now=0.0)
        for second in range(0, 100, 10):
            upload.waits_since = float(second)
            assert uploads.overdue(now=float(second)) == []
        ((_, error),) = uploads.overdue(now=100.0)
        assert isinstance(error, DeadlineExceeded)
        assert "at most 100 s" in str(error)
        uploads.end("a")
        assert len(uploads) == 0
        assert not uploads.is_overdue("a")


class TestPatience:
    def test_a_busy_server_is_asked_again(self) -> None:
        clock, answers = FakeClock(auto_advance=True), iter([Busy("a"), Busy("b"), None])

        def work() -> int:
            refusal = next(answers)
            if refusal is not None:
                raise refusal
            return 7

        assert while_busy(work, until=clock.monotonic() + 10.0, clock=clock) == 7

    def test_until_there_is_no_time(self) -> None:
        clock = FakeClock(auto_advance=True)

        def work() -> int:
            raise Busy("still")

        with pytest.raises(Busy, match="still"):
            while_busy(work, until=clock.monotonic() + 1.0, clock=clock)
        assert 0.5 < clock.monotonic() - FakeClock().monotonic() < 1.0

    def test_a_stream_that_has_begun_is_not_begun_again(self) -> None:
        clock, starts = FakeClock(auto_advance=True), []

        def work() -> Iterator[int]:
            starts.append(1)
            if len(starts) == 1:
                raise Busy("not yet")
            yield 1
            raise Busy("in the middle")

        stream = stream_while_busy(work, until=clock.monotonic() + 10.0, clock=clock)
        assert next(stream) == 1
        with pytest.raises(Busy, match="in the middle"):
            next(stream)


@contextmanager
def uploading(server: Server, call: str, *first: bytes) -> Iterator[Any]:
    """An upload that sends `first` and then nothing."""
    go_on = threading.Event()

    def messages() -> Iterator[bytes]:
        yield from first
        go_on.wait(SECONDS)

    with grpc.insecure_channel(server.address) as channel:
        try:
            yield channel.stream_unary(f"/{call}", as_is, as_is).future(messages(), timeout=SECONDS)
        finally:
            go_on.set()


class TestServer:
    def test_a_peer_over_its_calls_is_busy_and_honest_clients_ask_again(self) -> None:
        entered, release = threading.Semaphore(0), threading.Event()

        def hold(request: LeaveRequest, _: Context) -> LeaveRequest:
            entered.release()
            release.wait(SECONDS)
            return request

        answers: list[str] = []
        with serving(echo_server(hold, num_threads=2)) as caller:
            threads = [threading.Thread(target=lambda: answers.append(say(caller))) for _ in range(3)]
            for thread in threads:
                thread.start()
            assert entered.acquire(timeout=SECONDS)
            assert entered.acquire(timeout=SECONDS)
            release.set()
            for thread in threads:
                thread.join()
        assert answers == ["hello"] * 3

    @pytest.mark.parametrize("first", [(), (b"\x0a\x01x",)], ids=["unary, no request", "stream, one message"])
    def test_a_silent_peer_is_cut_off_with_a_sentence(self, first: tuple[bytes, ...]) -> None:
        clock = FakeClock()
        reading = threading.Event()

        def take(messages: Iterator[bytes], _: Context) -> bytes:
            for _message in messages:
                reading.set()
            return b""

        server = echo_server(clock=clock)
        handler = grpc.stream_unary_rpc_method_handler(take, as_is, as_is)
        server.add("test.Take", grpc.method_handlers_generic_handler("test.Take", {"Take": handler}))
        with (
            structlog.testing.capture_logs() as lines,
            serving(server),
            uploading(server, "test.Take/Take" if first else f"{SERVICE}/Say", *first) as call,
        ):
            uploads = server._guard._uploads
            wait_until(lambda: len(uploads) == 1, timeout_seconds=SECONDS, what="the upload")
            if first:
                assert reading.wait(SECONDS)
            clock.advance(29.0)
            server._guard.end_overdue()
            assert not call.done()
            wait_until(lambda: _cut_off(server, clock, call), timeout_seconds=SECONDS, what="the end of the call")
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert call.details().startswith("nothing was received for ")
            wait_until(lambda: server._guard._admission.num_peers == 0, timeout_seconds=SECONDS, what="the thread")
        (refusal,) = (line for line in lines if line["event"] == "call_refused")
        assert (refusal["error"], refusal["call"].count("/")) == ("DeadlineExceeded", 2)


def _cut_off(server: Server, clock: FakeClock, call: Any) -> bool:
    clock.advance(30.0)
    server._guard.end_overdue()
    return bool(call.done())


class TestAudit:
    def test_every_refusal_is_one_line_that_is_short(self) -> None:
        with structlog.testing.capture_logs() as lines:
            audit.Refusals(FakeClock()).note(
                "/s/" + "c" * 9_000, peer="p" * 9_000, identity="", error="Busy", sentence="s" * 9_000, who="p"
            )
        (line,) = lines
        assert line["event"] == "call_refused"
        assert set(line) >= {"call", "peer", "identity", "error", "sentence"}
        assert max(len(str(value)) for value in line.values()) <= audit.MAX_SENTENCE_CHARACTERS

    def test_a_flood_of_refusals_does_not_fill_the_log(self) -> None:
        clock = FakeClock()
        refusals = audit.Refusals(clock)
        with structlog.testing.capture_logs() as lines:
            for second in range(60):
                for number in range(500):
                    who = f"peer {number % 2}"
                    refusals.note("/s/c", peer=who, identity="", error="PermissionDenied", sentence="no", who=who)
                clock.advance(1.0)
                refusals.summarise()
                if second == 5:
                    refusals.note("/s/c", peer="x", identity="x", error="Busy", sentence="no", who="an honest one")
        refused = [line for line in lines if line["event"] == "call_refused"]
        assert len(refused) <= 2 * (audit.LINES_AT_ONCE_PER_PEER + 60 * audit.LINES_PER_SECOND_PER_PEER) + 1
        assert "an honest one" not in {line["peer"] for line in refused}
        assert [line["peer"] for line in refused].count("x") == 1, "whoever floods has no more than its own lines"
        summaries = [line for line in lines if line["event"] == "calls_refused"]
        assert len(summaries) == 6
        assert summaries[1]["number"] == 5_000 - 20
        assert summaries[1]["errors"] == {"PermissionDenied": summaries[1]["number"]}
        assert summaries[1]["most_from"] == {"peer 0": 2_490, "peer 1": 2_490}

    def test_many_peers_fill_it_no_more_than_one(self) -> None:
        clock = FakeClock()
        refusals = audit.Refusals(clock)
        with structlog.testing.capture_logs() as lines:
            for number in range(3_000):
                who = f"peer {number}"
                refusals.note("/s/c", peer=who, identity="", error="PermissionDenied", sentence="no", who=who)
        assert len(lines) == audit.LINES_AT_ONCE
        assert len(refusals._lines_of) <= audit.MAX_PEERS + 1
        clock.advance(3_600.0)
        refusals.summarise()
        assert refusals._lines_of == {}, "who comes and goes leaves nothing behind"

    def test_who_is_refused_all_the_time_is_not_listened_to_for_a_while(self) -> None:
        clock = FakeClock()
        refusals = audit.Refusals(clock)
        for _ in range(audit.REFUSALS_AT_ONCE):
            assert not refusals.is_too_much("monitor m")
            refusals.strain("monitor m")
        assert refusals.is_too_much("monitor m")
        assert not refusals.is_too_much("operator o")
        clock.advance(1.0)
        assert not refusals.is_too_much("monitor m")

    def test_a_call_that_nobody_serves_is_a_line_too(self) -> None:
        server = echo_server()
        with serving(server), structlog.testing.capture_logs() as lines:
            with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/no/Such\x7fCall", as_is, as_is)(b"", timeout=SECONDS)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert [line["error"] for line in lines if line["event"] == "call_refused"] == ["UnknownCall"]
