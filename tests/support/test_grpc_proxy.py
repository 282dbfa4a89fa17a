"""The proxy passes calls of every kind on untouched, and does each fault it is asked for, and no other."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from hetpipe.errors import Unauthenticated
from hetpipe.values.identity import Role, server_name
from hetpipe.wire.caller import Caller
from hetpipe.wire.channel import as_is, open_channel
from hetpipe.wire.connection import Target
from tests.certs.cluster import OPERATOR, SHARD, cluster, stage_peer
from tests.polling import wait_until
from tests.support.call_faults import UNHARMED, Deed, Fate, Faults, Flip, fate_of
from tests.support.grpc_proxy import GrpcProxy, ProxyTls
from tests.wire.echo import SERVICE, echo_server, say

SECONDS = 5.0
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Service:
    """All four kinds of calls on bytes; remembers what it was asked."""

    def __init__(self) -> None:
        #: Requests that arrived whole, in order of arrival.
        self.heard: list[tuple[bytes, ...]] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self._lock = threading.Lock()

    def _hear(self, context: grpc.ServicerContext, *messages: bytes) -> None:
        with self._lock:
            self.heard.append(messages)
            self.metadata.append(dict(context.invocation_metadata() or ()))
        context.set_trailing_metadata((("behind-bin", b"\x00\xff"),))
        if messages == (b"refuse",):
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "too far: ü")

    def one_one(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        context.send_initial_metadata((("before", "b"),))
        self._hear(context, request)
        return request.upper()

    def one_many(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self._hear(context, request)
        yield from (b"%d%s" % (number, request) for number in range(3))

    def many_one(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        messages = tuple(requests)
        self._hear(context, *messages)
        return b"+".join(messages)

    def many_many(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            yield request.upper()
        self._hear(context, b"whole")

    def handler(self) -> Any:
        return grpc.method_handlers_generic_handler(
            "t.T",
            {
                "OneOne": grpc.unary_unary_rpc_method_handler(self.one_one),
                "OneMany": grpc.unary_stream_rpc_method_handler(self.one_many),
                "ManyOne": grpc.stream_unary_rpc_method_handler(self.many_one),
                "ManyMany": grpc.stream_stream_rpc_method_handler(self.many_many),
            },
        )


class Case:
    """A service behind a proxy, and a client of it."""

    def __init__(self, proxy: GrpcProxy, service: Service, channel: grpc.Channel) -> None:
        self.proxy = proxy
        self.service = service
        self._channel = channel

    def one_one(self, request: bytes, **options: Any) -> bytes:
        call = self._channel.unary_unary("/t.T/OneOne", as_is, as_is)
        answer: bytes = call(request, timeout=SECONDS, **options)
        return answer

    def one_many(self, request: bytes) -> Iterator[bytes]:
        yield from self._channel.unary_stream("/t.T/OneMany", as_is, as_is)(request, timeout=SECONDS)

    def many_one(self, *requests: bytes) -> bytes:
        call = self._channel.stream_unary("/t.T/ManyOne", as_is, as_is)
        answer: bytes = call(iter(requests), timeout=SECONDS)
        return answer

    def many_many(self, *requests: bytes) -> list[bytes]:
        return list(self._channel.stream_stream("/t.T/ManyMany", as_is, as_is)(iter(requests), timeout=SECONDS))

    def with_call(self, request: bytes, **options: Any) -> Any:
        return self._channel.unary_unary("/t.T/OneOne", as_is, as_is).with_call(request, timeout=SECONDS, **options)

    def fails(self, what: Callable[..., Iterable[object]], *arguments: Any) -> str:
        """The words of a broken connection."""
        with pytest.raises(grpc.RpcError) as caught:
            list(what(*arguments))
        error: Any = caught.value
        assert error.code() is UNAVAILABLE
        details: str = error.details()
        return details

    def did(self, **counts: int) -> bool:
        return self.proxy.deeds == Counter({Deed[name]: count for name, count in counts.items()})


@contextmanager
def case(*rules: Faults, seed: int = 0) -> Iterator[Case]:
    service = Service()
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((service.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with GrpcProxy(f"127.0.0.1:{port}", rules, seed=seed) as proxy, open_channel(proxy.address) as channel:
        yield Case(proxy, service, channel)
    server.stop(0.0).wait()


class TestPassingOn:
    def test_every_kind_of_call(self) -> None:
        with case() as calls:
            assert calls.one_one(b"a") == b"A"
            assert list(calls.one_many(b"b")) == [b"0b", b"1b", b"2b"]
            assert calls.many_one(b"c", b"", b"d") == b"c++d"
            assert calls.many_many(b"e", b"f") == [b"E", b"F"]
            assert calls.service.heard == [(b"a",), (b"b",), (b"c", b"", b"d"), (b"whole",)]
            assert calls.proxy.done == ()

    def test_metadata_and_status(self) -> None:
        with case() as calls:
            _, call = calls.with_call(b"a", metadata=(("key", "value"), ("raw-bin", b"\x01")))
            (heard,) = calls.service.metadata
            assert (heard["key"], heard["raw-bin"]) == ("value", b"\x01")
            assert ("before", "b") in tuple(call.initial_metadata())
            assert tuple(call.trailing_metadata()) == (("behind-bin", b"\x00\xff"),)
            with pytest.raises(grpc.RpcError) as caught:
                calls.with_call(b"refuse")
            error: Any = caught.value
            assert (error.code(), error.details()) == (grpc.StatusCode.OUT_OF_RANGE, "too far: ü")
            assert tuple(error.trailing_metadata()) == (("behind-bin", b"\x00\xff"),)

    def test_a_client_that_gives_up_leaves_nothing_behind(self) -> None:
        with case() as calls:
            stream = calls.one_many(b"a")
            assert next(stream) == b"0a"
            stream.close()  # type: ignore[attr-defined]
            wait_until(lambda: not calls.proxy._wire._calls, timeout_seconds=SECONDS, what="end of the call")


ALWAYS = 1.0


class TestFaults:
    def test_a_dropped_request_was_never_seen(self) -> None:
        with case(Faults(drop_request=ALWAYS)) as calls:
            assert "the request is dropped" in calls.fails(calls.one_one, b"a")
            assert calls.service.heard == []
            assert calls.did(REQUEST_DROPPED=1)

    def test_a_dropped_reply_comes_after_the_work(self) -> None:
        with case(Faults(drop_reply=ALWAYS)) as calls:
            for call in (calls.one_one, calls.one_many, calls.many_one, calls.many_many):
                assert "the reply is dropped" in calls.fails(call, b"a")
            assert calls.service.heard == [(b"a",), (b"a",), (b"a",), (b"whole",)]
            assert calls.did(REPLY_DROPPED=4)

    def test_an_error_is_a_reply_too(self) -> None:
        with case(Faults(drop_reply=ALWAYS)) as calls:
            calls.fails(calls.one_one, b"refuse")
            assert calls.service.heard == [(b"refuse",)]

    def test_a_repeated_request_has_the_second_answer(self) -> None:
        with case(Faults(repeat=ALWAYS)) as calls:
            assert calls.many_one(b"a", b"b") == b"a+b"
            assert list(calls.one_many(b"c")) == [b"0c", b"1c", b"2c"]
            assert calls.service.heard == [(b"a", b"b")] * 2 + [(b"c",)] * 2
            assert calls.did(REPEATED=2)

    def test_a_late_repetition_comes_after_the_answer(self) -> None:
        with case(Faults(repeat_late=ALWAYS, longest_delay_seconds=0.1)) as calls:
            assert calls.many_one(b"a", b"b") == b"a+b"
            assert calls.service.heard == [(b"a", b"b")]
            calls.proxy.settle()
            assert calls.service.heard == [(b"a", b"b")] * 2
            assert calls.did(REPEATED_LATE=1)

    def test_a_request_broken_off_never_arrives_whole(self) -> None:
        with case(Faults(break_request=ALWAYS)) as calls:
            assert "the request is broken off" in calls.fails(calls.many_one, *[b"a"] * 5)
            # A handler of gRPC may take a stream that was cancelled for one that has ended.
            assert all(len(heard) < 5 for heard in calls.service.heard)
            assert calls.one_one(b"a") == b"A", "one message is nothing to be broken off in the middle"
            assert calls.did(REQUEST_BROKEN=1)

    def test_a_reply_broken_off_has_a_beginning(self) -> None:
        with case(Faults(break_reply=ALWAYS)) as calls:
            got: list[bytes] = []
            with pytest.raises(grpc.RpcError):
                got.extend(calls.one_many(b"a"))
            assert got == [b"0a", b"1a", b"2a"][: len(got)]
            assert got
            assert calls.did(REPLY_BROKEN=1)

    def test_one_bit_is_flipped(self) -> None:
        with case(Faults(method="/t.T/Many*", flip_request=ALWAYS), Faults(flip_reply=ALWAYS)) as calls:
            sent = (b"a" * 9, b"b" * 9, b"c" * 9, b"d" * 9)
            calls.many_one(*sent)
            (heard,) = calls.service.heard
            assert heard[0] == sent[0], "a header is left alone"
            assert bits_between(b"".join(sent), b"".join(heard)) == 1
            assert bits_between(b"".join(calls.one_many(b"x")), b"0x1x2x") == 1
            assert calls.did(REQUEST_FLIPPED=1, REPLY_FLIPPED=1)

    def test_a_call_held_back_is_overtaken(self) -> None:
        with case(Faults(hold_back=0.5), seed=7) as calls, ThreadPoolExecutor(8) as threads:
            words = [b"%d" % number for number in range(20)]
            assert sorted(threads.map(calls.one_one, words)) == sorted(words)
            assert calls.proxy.deeds[Deed.HELD_BACK] > 0

    def test_a_delay_takes_its_time(self) -> None:
        slept: list[float] = []

        class Time:
            def sleep(self, seconds: float) -> None:
                slept.append(seconds)

        with case(Faults(delay=ALWAYS, longest_delay_seconds=30.0)) as calls:
            calls.proxy._wire.clock = Time()  # type: ignore[assignment]
            assert calls.one_one(b"a") == b"A"
            assert 0.0 < slept[0] < 30.0
            assert calls.did(DELAYED=1)

    def test_cut_and_healed(self) -> None:
        with case() as calls:
            calls.proxy.cut()
            assert "the connection is cut" in calls.fails(calls.one_one, b"a")
            calls.proxy.cut(replies_only=True)
            assert "the connection is cut" in calls.fails(calls.one_one, b"b")
            calls.proxy.heal()
            assert calls.one_one(b"c") == b"C"
            assert calls.service.heard == [(b"b",), (b"c",)]
            assert calls.did(CUT=2)

    def test_a_cut_ends_calls_under_way(self) -> None:
        with case() as calls:
            going_on = threading.Event()

            def requests() -> Iterator[bytes]:
                yield b"a"
                going_on.wait(SECONDS)

            stream: Any = calls._channel.stream_stream("/t.T/ManyMany", as_is, as_is)(requests(), timeout=SECONDS)
            assert next(stream) == b"A"
            calls.proxy.cut()
            assert "the connection is cut" in calls.fails(list, stream)
            going_on.set()


def bits_between(one: bytes, other: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


class TestChance:
    RULE = Faults(
        delay=0.3,
        hold_back=0.3,
        drop_request=0.3,
        drop_reply=0.3,
        repeat=0.3,
        repeat_late=0.3,
        break_request=0.3,
        break_reply=0.3,
        flip_request=0.3,
        flip_reply=0.3,
    )

    def test_fates_follow_from_seed_method_and_number(self) -> None:
        def fates(seed: int, method: str = "/a/B") -> list[Fate]:
            return [fate_of([self.RULE], method, seed=seed, number=number) for number in range(50)]

        assert fates(1) == fates(1)
        assert fates(1) != fates(2)
        assert fates(1) != fates(1, "/a/C")

    def test_one_chance_changed_leaves_the_others(self) -> None:
        more = replace(self.RULE, drop_reply=1.0)
        for number in range(50):
            one, other = (fate_of([rule], "/a/B", seed=3, number=number) for rule in (self.RULE, more))
            assert replace(one, drop_reply=True) == other

    def test_the_first_rule_that_matches_counts(self) -> None:
        rules = [Faults(method="*/Push", drop_reply=ALWAYS), Faults(method="/a.*", drop_request=ALWAYS)]
        assert fate_of(rules, "/a.B/Push", seed=0, number=0).drop_reply
        assert fate_of(rules, "/a.B/Pull", seed=0, number=0).drop_request
        assert fate_of(rules, "/c.B/Pull", seed=0, number=0) == UNHARMED

    def test_chances_are_kept(self) -> None:
        fates = [fate_of([self.RULE], "/a/B", seed=0, number=number) for number in range(2000)]
        for name in ("drop_request", "drop_reply", "repeat", "hold_back"):
            assert 0.25 < sum(getattr(fate, name) for fate in fates) / 2000 < 0.35

    @pytest.mark.parametrize("place", [0.0, 0.5, 0.999999])
    def test_a_flip_is_one_bit(self, place: float) -> None:
        message = bytes(range(17))
        assert bits_between(Flip(0, place).apply(message), message) == 1


class TestTls:
    def test_it_is_the_server_to_the_client_and_the_client_to_the_server(self) -> None:
        certificates = cluster()
        # Only a stage may call, and the client is none.
        server = echo_server(tls=certificates.tls(SHARD), access={f"/{SERVICE}/Say": {Role.STAGE: lambda _: None}})
        name = server_name(Role.PARAMETER_SERVER)
        tls = ProxyTls(server=certificates.tls(SHARD), client=certificates.tls(stage_peer()), server_name=name)
        target = Target(address="", role="server", tls=certificates.tls(OPERATOR), server_name=name)
        with GrpcProxy(server.start(), tls=tls) as proxy:
            right = Caller(replace(target, address=proxy.address))
            assert say(right, "hello") == "hello"
            stranger = server_name(Role.COORDINATOR)
            wrong = Caller(replace(target, address=proxy.address, server_name=stranger))
            with pytest.raises(Unauthenticated, match="certificate"):
                say(wrong, "hello")
            for caller in (right, wrong):
                caller.close()
        server.stop(grace_seconds=0.0)
