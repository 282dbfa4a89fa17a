"""The threads of a server, and that the installed gRPC is as `hetpipe.wire.reading_ahead` takes it to be."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import structlog

from hetpipe.wire import threads
from hetpipe.wire.channel import as_is
from hetpipe.wire.codec import to_bytes
from hetpipe.wire.reading_ahead import Arrived, behaviour_of
from hetpipe.wire.threads import ServerThreads, reads_ahead
from tests.polling import wait_until
from tests.support.fake_clock import FakeClock
from tests.wire.echo import SERVICE, echo_server, say, serving, text_of
from tests.wire.test_limits import uploading

SECONDS = 20.0
SAY = f"{SERVICE}/Say"

#: A failure names it: what changed is most likely gRPC.
VERSION = f"gRPC {grpc.__version__}; see hetpipe/wire/reading_ahead.py"


class TestPool:
    def test_as_many_tasks_run_at_a_time_as_there_are_threads(self) -> None:
        pool, together = ServerThreads(8, FakeClock()), threading.Barrier(9)
        for _ in range(8):
            pool.submit(together.wait, SECONDS)
        together.wait(SECONDS)
        pool.shutdown()

    def test_a_task_beyond_them_waits_for_one(self) -> None:
        pool, hold, over = ServerThreads(2, FakeClock()), threading.Event(), threading.Event()
        for _ in range(2):
            pool.submit(hold.wait, SECONDS)
        pool.submit(over.set)
        assert not over.is_set()
        hold.set()
        assert over.wait(SECONDS)
        pool.shutdown()

    def test_one_after_another_they_take_one_thread(self) -> None:
        pool, ran, found = ServerThreads(8, FakeClock()), threading.Semaphore(0), set[int]()

        def run() -> None:
            found.add(threading.get_ident())

        for _ in range(50):
            pool.submit(run).add_done_callback(lambda _: ran.release())
            assert ran.acquire(timeout=SECONDS)
            wait_until(lambda: len(pool._idle) == 1, timeout_seconds=SECONDS, what="the thread to sleep")
        assert len(found) == 1
        pool.shutdown()

    def test_a_task_that_fails_ends_and_its_thread_goes_on(self) -> None:
        pool, ended, after = ServerThreads(1, FakeClock()), threading.Event(), threading.Event()

        def fail() -> None:
            raise ValueError("of a test")

        with structlog.testing.capture_logs() as lines:
            pool.submit(fail).add_done_callback(lambda _: ended.set())
            pool.submit(after.set)
            assert ended.wait(SECONDS)
            assert after.wait(SECONDS)
        assert [line["event"] for line in lines] == ["task_failed"]
        pool.shutdown()

    def test_who_asks_after_the_end_is_called_at_once(self) -> None:
        pool, over = ServerThreads(1, FakeClock()), threading.Event()
        ended = pool.submit(over.set)
        assert over.wait(SECONDS)
        wait_until(lambda: ended._over, timeout_seconds=SECONDS, what="the end")
        calls = list[Any]()
        ended.add_done_callback(calls.append)
        assert calls == [ended]
        pool.shutdown()


class _Watched(ServerThreads):
    """Notes what gRPC asks for."""

    def __init__(self) -> None:
        super().__init__(4, FakeClock())
        self.behaviours = list[Any]()

    def submit(self, *task: Any) -> threads.Ended:
        self.behaviours.append(behaviour_of(task))
        return super().submit(*task)


def test_the_request_of_a_call_is_there_before_its_handler_runs() -> None:
    pool, given = _Watched(), list[object]()

    @reads_ahead
    def answer(requests: Any, _: grpc.ServicerContext) -> bytes:
        given.append(type(requests))
        return b"".join(requests)

    server = grpc.server(pool)  # type: ignore[arg-type]
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Answer", {"Answer": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/test.Answer/Answer", as_is, as_is)
        assert [call(data, timeout=SECONDS) for data in (b"hello", b"")] == [b"hello", b""], VERSION
    server.stop(None).wait(SECONDS)
    assert pool.behaviours == [answer, answer], VERSION
    assert given == [Arrived, Arrived], VERSION
    pool.shutdown()


class TestServer:
    def test_who_sends_nothing_holds_no_thread(self) -> None:
        server = echo_server(num_threads=1)
        with serving(server) as caller, uploading(server, SAY) as _kept:  # one that is dropped ends
            wait_until(lambda: server._threads.num_reading == 1, timeout_seconds=SECONDS, what="the silent call")
            assert say(caller) == "hello"  # in gRPC's own way: no more than one is read ahead for one thread

    def test_who_goes_away_before_the_request_is_not_answered_and_leaves_nothing(self) -> None:
        server = echo_server()
        with structlog.testing.capture_logs() as lines, serving(server) as caller:
            with uploading(server, SAY) as call:
                wait_until(lambda: server._threads.num_reading == 1, timeout_seconds=SECONDS, what="the silent call")
                call.cancel()
                wait_until(lambda: server._threads.num_reading == 0, timeout_seconds=SECONDS, what="its end")
            assert say(caller) == "hello"
        assert [line["event"] for line in lines if line["event"].startswith("call_")] == ["call_broke_off"]

    def test_who_ends_without_a_request_is_told(self) -> None:
        with serving(echo_server()) as caller, grpc.insecure_channel(caller._connection.target.address) as channel:
            call: Any = channel.stream_unary(f"/{SAY}", as_is, as_is).future(iter(()), timeout=SECONDS)
            assert call.exception(timeout=SECONDS).details() == "the call ended before its request"

    def test_requests_beyond_what_may_wait_are_left_with_their_peers(self) -> None:
        server = echo_server(num_threads=3)
        server._threads._ready_bytes = threads.MAX_WAITING_BYTES
        with serving(server) as caller, uploading(server, SAY) as _kept:  # one that is dropped ends
            uploads = server._guard._uploads
            wait_until(lambda: len(uploads) == 1, timeout_seconds=SECONDS, what="the silent call")
            assert server._threads.num_reading == 0
            assert say(caller) == "hello"

    def test_a_request_is_as_it_was_sent(self) -> None:
        request = text_of("x" * 100_000)
        with serving(echo_server()) as caller, grpc.insecure_channel(caller._connection.target.address) as channel:
            call = channel.unary_unary(f"/{SAY}", as_is, as_is)
            assert call(to_bytes(request), timeout=SECONDS) == to_bytes(request)
