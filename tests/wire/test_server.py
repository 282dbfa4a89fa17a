"""Servers and channels, over real sockets."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import (
    DeadlineExceeded,
    HetpipeError,
    JobError,
    PeerUnreachable,
    PortInUse,
    ProtocolViolation,
    ResourceExhausted,
    StaleTerm,
    UserError,
)
from hetpipe.observe.log import configure_logging
from hetpipe.observe.rpc_counters import RpcCounters
from hetpipe.values.addresses import join_address, split_address
from hetpipe.wire import channel as channel_module
from hetpipe.wire import guard as guard_module
from hetpipe.wire.caller import Caller
from hetpipe.wire.calls import LeaveRequest
from hetpipe.wire.channel import message_options, open_channel
from hetpipe.wire.connection import Target
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.threads import POOL_THREADS
from tests.polling import wait_until
from tests.wire.echo import SAY, SERVICE, echo_server, repeat, say, serving, text_of

Context = grpc.ServicerContext


class Relay:
    """A port that leads to another one, until it falls silent: connections stay, and nothing comes through."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.is_silent = threading.Event()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if not self.is_silent.is_set():
                    sink.sendall(data)


class TestCalls:
    def test_a_call_and_a_stream(self) -> None:
        with serving(echo_server()) as caller:
            assert say(caller) == "hello"
            assert list(repeat(caller)) == ["hello"] * 3

    def test_typed_errors_arrive_as_themselves(self) -> None:
        def refuse(request: LeaveRequest, _: Context) -> LeaveRequest:
            raise JobError(["epochs: must be positive", "seed: no number"])

        def break_off(request: LeaveRequest, _: Context) -> Iterator[LeaveRequest]:
            yield request
            raise StaleTerm("term 1 is older than 2")

        with serving(echo_server(refuse, break_off)) as caller:
            with pytest.raises(JobError) as caught:
                say(caller)
            assert caught.value.problems == ("epochs: must be positive", "seed: no number")
            stream = repeat(caller)
            assert next(stream) == "hello"
            with pytest.raises(StaleTerm, match="term 1 is older than 2"):
                next(stream)

    def test_calls_are_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(request: LeaveRequest, _: Context) -> LeaveRequest:
            raise StaleTerm("term 1 is older than 2")

        counters = RpcCounters()
        monkeypatch.setattr(guard_module, "RPC_COUNTERS", counters)
        with serving(echo_server(refuse)) as caller:
            with pytest.raises(StaleTerm):
                say(caller)
            list(repeat(caller))
        counted = {(reading.name.removeprefix("hetpipe_rpc_"), *reading.labels) for reading in counters.readings()}
        assert counted == {
            ("handled_total", "Say", "FAILED_PRECONDITION"),
            ("refused_total", "Say", "StaleTerm"),
            ("seconds", "Say"),
            ("handled_total", "Repeat", "OK"),
            ("seconds", "Repeat"),
        }

    def test_the_longest_error_fits(self) -> None:
        def refuse(request: LeaveRequest, _: Context) -> LeaveRequest:
            raise JobError([f"größe{index}: unbekannt" for index in range(5_000)])

        with serving(echo_server(refuse)) as caller, pytest.raises(JobError) as caught:
            say(caller)
        assert len(caught.value.problems) > 10

    def test_an_unexpected_error_keeps_its_secret(self, capfd: pytest.CaptureFixture[str]) -> None:
        configure_logging(None, role="test")

        def break_down(request: LeaveRequest, _: Context) -> LeaveRequest:
            raise ZeroDivisionError("the secret")

        with serving(echo_server(break_down)) as caller:
            with pytest.raises(HetpipeError, match="internal error, see log") as caught:
                say(caller)
            assert type(caught.value) is HetpipeError
            assert "secret" not in str(caught.value)
        output = "".join(capfd.readouterr())
        assert "ZeroDivisionError" in output

    def test_a_late_answer_is_a_deadline_that_names_everything(self) -> None:
        release = threading.Event()

        def dawdle(request: LeaveRequest, _: Context) -> LeaveRequest:
            release.wait(10.0)
            return request

        server = echo_server(dawdle)
        with serving(server) as caller:
            with pytest.raises(DeadlineExceeded) as caught:
                say(caller, deadline_seconds=0.1)
            release.set()
        assert f"echo at {server.address} did not answer in time: Say waited 0." in str(caught.value)
        assert str(caught.value).endswith(" s for an answer")

    def test_nobody_there_is_unreachable_at_once(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            caller = Caller(Target(address=f"127.0.0.1:{taken.getsockname()[1]}", role="echo"))
            with pytest.raises(PeerUnreachable, match=r"echo at 127.0.0.1:"):
                say(caller)
            caller.close()

    def test_a_closed_connection_is_typed_too(self) -> None:
        caller = Caller(Target(address="127.0.0.1:1", role="echo"))
        caller.close()
        with pytest.raises(PeerUnreachable, match="closed on this side"):
            say(caller)
        with pytest.raises(PeerUnreachable, match="closed on this side"):
            list(repeat(caller))

    def test_a_call_the_server_does_not_know(self) -> None:
        unknown = replace(SAY, name="Sing")
        with serving(echo_server()) as caller, pytest.raises(ProtocolViolation, match="does not implement Sing"):
            caller.invoke(unknown, text_of(""))

    def test_leaving_a_stream_cancels_it(self) -> None:
        ended = threading.Event()

        def endless(request: LeaveRequest, context: Context) -> Iterator[LeaveRequest]:
            assert context.add_callback(ended.set)
            while not ended.is_set():
                yield request

        with serving(echo_server(repeat=endless)) as caller:
            stream = repeat(caller)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
            assert ended.wait(5.0)


class TestLimits:
    def test_a_message_over_the_limit_is_refused_and_the_server_lives(self) -> None:
        with serving(echo_server(max_message_bytes=1_000)) as caller:
            with pytest.raises(ResourceExhausted, match="echo at"):
                say(caller, "x" * 2_000)
            assert say(caller) == "hello"

    def test_no_limit_is_no_limit_we_take(self) -> None:
        with pytest.raises(UserError, match="-1"):
            message_options(-1)

    def test_calls_over_the_limit_wait_until_there_is_room(self) -> None:
        entered, release = threading.Semaphore(0), threading.Event()

        def hold(request: LeaveRequest, _: Context) -> LeaveRequest:
            entered.release()
            release.wait(10.0)
            return request

        with serving(echo_server(hold, num_threads=2, max_concurrent_calls=2)) as caller:
            threads = [threading.Thread(target=say, args=(caller,)) for _ in range(2)]
            for thread in threads:
                thread.start()
                assert entered.acquire(timeout=5.0)
            with ThreadPoolExecutor(1) as pool:
                late = pool.submit(say, caller)
                assert wait([late], timeout=0.05).not_done
                release.set()
                assert late.result(5.0) == "hello"
            for thread in threads:
                thread.join()


class TestAddresses:
    def test_a_taken_port_is_named_with_the_fix(self) -> None:
        first = echo_server()
        with serving(first):
            port = split_address(first.address)[1]
            second = Server(ServerConfig(port=port))
            with pytest.raises(PortInUse) as caught:
                second.start()
            second.stop()
        assert str(caught.value) == f"address 127.0.0.1:{port} is in use; choose another with --port"

    @pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
    def test_a_host_that_is_not_ours_is_the_users_error(self, host: str) -> None:
        server = Server(ServerConfig(host=host, port=0, insecure=True))
        with pytest.raises(UserError, match=f"cannot listen on {host}:0"):
            server.start()
        server.stop()

    @pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:0", "host:65536", "host:²"])
    def test_what_is_no_address_is_refused(self, text: str) -> None:
        with pytest.raises(UserError, match="HOST:PORT"):
            open_channel(text)

    @pytest.mark.parametrize(("text", "parts"), [("h:1", ("h", 1)), ("[::1]:7300", ("::1", 7300))])
    def test_addresses_come_apart_and_together(self, text: str, parts: tuple[str, int]) -> None:
        assert split_address(text) == parts
        assert join_address(*parts) == text


class TestLife:
    def test_health_is_served_for_the_server_and_each_service(self) -> None:
        server = echo_server()
        with serving(server):
            channel = open_channel(server.address)
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", SERVICE):
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=5.0)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
            channel.close()

    def test_who_stands_by_answers_probes_and_nothing_else(self) -> None:
        server = Server(ServerConfig(health_port=0))
        server.stand_by()
        probes = server.health_address
        with grpc.insecure_channel(probes) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=5.0)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert server.address == ""
            server.start()
            answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=5.0)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert server.health_address == probes
        server.stop()

    def test_who_stood_by_may_end_without_ever_serving(self) -> None:
        server = Server(ServerConfig(health_port=0))
        server.stand_by()
        server.stop()

    def test_reflection_is_served_on_request(self) -> None:
        from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

        server = echo_server(reflection=True)
        with serving(server):
            channel = open_channel(server.address)
            services = ProtoReflectionDescriptorDatabase(channel).get_services()
            channel.close()
        assert set(services) >= {SERVICE, "grpc.health.v1.Health"}

    def test_reflection_that_is_not_installed_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "grpc_reflection.v1alpha", None)
        server = echo_server(reflection=True)
        with pytest.raises(UserError, match=r"hetpipe\[reflection\]"):
            server.start()
        server.stop()

    def test_stop_lets_a_call_finish(self) -> None:
        entered, release = threading.Event(), threading.Event()

        def hold(request: LeaveRequest, _: Context) -> LeaveRequest:
            entered.set()
            release.wait(10.0)
            return request

        server = echo_server(hold)
        caller = Caller(Target(address=server.start(), role="echo"))
        answers: list[str] = []
        call = threading.Thread(target=lambda: answers.append(say(caller)))
        call.start()
        assert entered.wait(5.0)
        server.on_stop(release.set)
        server.stop(grace_seconds=5.0)
        call.join()
        assert answers == ["hello"]
        caller.close()

    def test_stop_ends_the_threads(self) -> None:
        before = set(threading.enumerate())
        server = echo_server(health_port=0)
        with serving(server) as caller:
            for _ in range(5):
                say(caller)
            pools = [t for t in set(threading.enumerate()) - before if t.name.startswith(POOL_THREADS)]
            assert pools
            for thread in pools:
                comm = Path(f"/proc/self/task/{thread.native_id}/comm")
                assert not comm.exists() or comm.read_text().strip() == POOL_THREADS
        wait_until(lambda: not any(thread.is_alive() for thread in pools), timeout_seconds=5.0, what="threads")

    @pytest.mark.matrix  # it takes as long as it is about
    def test_a_peer_that_falls_silent_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("KEEPALIVE_SECONDS", "KEEPALIVE_TIMEOUT_SECONDS"):
            monkeypatch.setattr(channel_module, name, 1)
        server = echo_server()
        with Relay(split_address(server.start())[1]) as relay:
            caller = Caller(Target(address=f"127.0.0.1:{relay.port}", role="echo"))
            assert say(caller) == "hello"
            relay.is_silent.set()
            began = SYSTEM_CLOCK.monotonic()
            with pytest.raises(PeerUnreachable):
                say(caller, deadline_seconds=20.0)
            assert SYSTEM_CLOCK.monotonic() - began < 3.0
            caller.close()
        server.stop(grace_seconds=0.0)

    def test_a_restarted_server_is_found_again(self) -> None:
        server = echo_server()
        address = server.start()
        caller = Caller(Target(address=address, role="echo"))
        assert say(caller) == "hello"
        server.stop(grace_seconds=0.0)
        with pytest.raises(PeerUnreachable):
            say(caller)
        successor = echo_server(port=split_address(address)[1])
        successor.start()
        attempts = 0
        while True:
            try:
                assert say(caller) == "hello"
                break
            except PeerUnreachable:
                attempts += 1
                assert attempts < 100_000
        successor.stop()
        caller.close()
