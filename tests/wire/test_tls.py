"""Certificates on the wire: rotation without a lost call, servers that prove their role, faults told in words."""

from __future__ import annotations

import gc
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetpipe.certs.authority import Authority, facts_of, key_to_pem, new_key
from hetpipe.certs.files import CA_FILE, CERT_FILE, KEY_FILE
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import PeerUnreachable, ProtocolViolation, Unauthenticated, UserError
from hetpipe.values.addresses import split_address
from hetpipe.values.identity import NamedPeer, Role, server_name
from hetpipe.wire import connection
from hetpipe.wire.caller import Caller
from hetpipe.wire.calls import LeaveRequest
from hetpipe.wire.channel import open_channel
from hetpipe.wire.connection import Target
from hetpipe.wire.listening import is_loopback
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.serving import Context
from hetpipe.wire.tls import CHECK_SECONDS, Tls
from hetpipe.wire.tls_diagnosis import diagnose
from tests.certs.cluster import COORDINATOR, OPERATOR, SHARD, cluster, write
from tests.support.fake_clock import FakeClock
from tests.wire.echo import SERVICE, echo_server, repeat, say

#: The test's service is for operators.
ACCESS = {f"/{SERVICE}/{call}": {Role.OPERATOR: lambda _request: None} for call in ("Say", "Repeat")}


def copied(tls: Tls, folder: Path) -> Path:
    """A folder of its own with the same certificates."""
    shutil.copytree(tls.folder, folder)
    return folder


def reissue(folder: Path, peer: NamedPeer, *, root: Authority | None = None) -> bytes:
    """New certificates in a folder; the certificate."""
    root, key = root or cluster().authority(), new_key()
    certificate = root.issue(peer, key.public_key(), days=1)
    write(folder, root, certificate, key_to_pem(key))
    return certificate


@pytest.fixture
def server() -> Iterator[Server]:
    made = echo_server(tls=cluster().tls(COORDINATOR), access=ACCESS)
    made.start()
    try:
        yield made
    finally:
        made.stop(grace_seconds=0.0)


def caller(server: Server, tls: Tls | None, *, role: Role = Role.COORDINATOR) -> Caller:
    target = Target(address=server.address, role=role, tls=tls, server_name=server_name(role))
    return Caller(target)


class TestFolder:
    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"cannot read .*ca\.pem .*hetpipe certs issue"):
            Tls(tmp_path)

    def test_a_key_of_another_certificate_is_refused(self, tmp_path: Path) -> None:
        folder = copied(cluster().tls(OPERATOR), tmp_path / "own")
        (folder / KEY_FILE).write_bytes(key_to_pem(new_key()))
        with pytest.raises(UserError, match="must belong together"):
            Tls(folder)

    def test_nobody_is_asked_for_the_password_of_a_key(self, tmp_path: Path) -> None:
        folder = copied(cluster().tls(OPERATOR), tmp_path / "own")
        key = serialization.load_pem_private_key((folder / KEY_FILE).read_bytes(), None)
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        (folder / KEY_FILE).write_bytes(key.private_bytes(encoding, form, BestAvailableEncryption(b"secret")))
        with pytest.raises(UserError, match="cannot be used"):
            Tls(folder)

    def test_a_change_is_seen_after_a_second_and_only_when_it_is_whole(self, tmp_path: Path) -> None:
        clock = FakeClock()
        folder = copied(cluster().tls(OPERATOR), tmp_path / "own")
        tls = Tls(folder, clock=clock)
        first = tls.material
        key = new_key()
        (folder / KEY_FILE).write_bytes(key_to_pem(key))
        clock.advance(CHECK_SECONDS)
        assert tls.material is first
        (folder / CERT_FILE).write_bytes(cluster().authority().issue(OPERATOR, key.public_key(), days=1))
        assert tls.material is first
        clock.advance(CHECK_SECONDS)
        assert tls.material.version == first.version + 1
        assert tls.material.key == key_to_pem(key)
        (folder / CA_FILE).unlink()
        clock.advance(CHECK_SECONDS)
        assert tls.material.version == first.version + 1


class TestCalls:
    def test_both_ends_prove_themselves(self, server: Server) -> None:
        with closing(caller(server, cluster().tls(OPERATOR))) as calls:
            assert say(calls) == "hello"
            assert list(repeat(calls)) == ["hello"] * 3

    def test_another_role_cannot_play_the_server(self, server: Server) -> None:
        with (
            closing(caller(server, cluster().tls(OPERATOR), role=Role.PARAMETER_SERVER)) as calls,
            pytest.raises(Unauthenticated, match=r"is not that of parameter-server\.hetpipe"),
        ):
            say(calls)

    def test_nothing_is_said_without_tls(self, server: Server) -> None:
        with closing(caller(server, None)) as calls, pytest.raises(PeerUnreachable, match="give --tls DIR here, too"):
            say(calls)

    def test_a_server_without_tls_is_told_apart(self) -> None:
        plain = echo_server()
        plain.start()
        try:
            with (
                closing(caller(plain, cluster().tls(OPERATOR))) as calls,
                pytest.raises(Unauthenticated, match="does not use TLS; is it started with --insecure"),
            ):
                say(calls)
        finally:
            plain.stop(grace_seconds=0.0)

    def test_a_server_that_is_gone_is_gone(self, server: Server) -> None:
        server.stop(grace_seconds=0.0)
        with closing(caller(server, cluster().tls(OPERATOR))) as calls, pytest.raises(PeerUnreachable):
            say(calls)

    def test_a_server_that_comes_back_is_found_within_a_second(self, server: Server) -> None:
        with closing(caller(server, cluster().tls(OPERATOR))) as calls:
            assert say(calls) == "hello"
            server.stop(grace_seconds=0.0)
            for _ in range(5):
                with pytest.raises(PeerUnreachable):
                    say(calls)
            port = split_address(server.address)[1]
            successor = echo_server(tls=cluster().tls(COORDINATOR), access=ACCESS, port=port)
            successor.start()
            began = SYSTEM_CLOCK.monotonic()
            answers = 0
            while not answers and SYSTEM_CLOCK.monotonic() - began < 5.0:
                with suppress(PeerUnreachable):
                    answers += say(calls) == "hello"
            assert SYSTEM_CLOCK.monotonic() - began < 1.0
            successor.stop(grace_seconds=0.0)

    def test_a_server_that_ends_while_it_is_asked_is_gone(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.stop(grace_seconds=0.0)
        said = iter(["it does not use TLS", ""])
        monkeypatch.setattr(connection, "diagnose", lambda *_args, **_keywords: next(said))
        with closing(caller(server, cluster().tls(OPERATOR))) as calls, pytest.raises(PeerUnreachable):
            say(calls)

    # Python's own `wrap_socket` leaves the socket to the collector if the peer is gone before it has looked at it.
    @pytest.mark.filterwarnings("ignore:Exception ignored in. <ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
    def test_a_server_that_is_killed_with_several_calls_waiting_is_gone(self) -> None:
        """It hangs up on whoever waits in the queues of its sockets, as often as there are sockets."""
        with closing(socket.create_server(("127.0.0.1", 0))) as listening:

            def hang_up() -> None:
                with suppress(OSError):
                    while True:
                        accepted, _ = listening.accept()
                        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        accepted.close()

            thread = threading.Thread(target=hang_up)
            thread.start()
            name = server_name(Role.COORDINATOR)
            try:
                port = listening.getsockname()[1]
                for _ in range(3):
                    assert not diagnose("127.0.0.1", port, material=cluster().tls(OPERATOR).material, server_name=name)
            finally:
                listening.shutdown(socket.SHUT_RDWR)
                thread.join()
                gc.collect()

    def test_an_expired_certificate_is_named(self, server: Server) -> None:
        old = cluster().issued_by(cluster().authority(), OPERATOR, days=-0.001)
        host, port = split_address(server.address)
        said = diagnose(host, port, material=old.material, server_name=server_name(Role.COORDINATOR))
        assert said == "this process's certificate has expired; make a new one with `hetpipe certs issue`"

    def test_no_key_is_written_to_find_out(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
        host, port = split_address(server.address)
        stranger = cluster().issued_by(Authority.new_root(), OPERATOR).material
        said = diagnose(host, port, material=stranger, server_name=server_name(Role.COORDINATOR))
        assert "signed by another authority" in said

    def test_a_stranger_and_nobody_are_told_apart(self, server: Server) -> None:
        host, port = split_address(server.address)
        name = server_name(Role.COORDINATOR)
        stranger = cluster().issued_by(Authority.new_root(), OPERATOR).material
        assert "signed by another authority" in diagnose(host, port, material=stranger, server_name=name)
        nobody = replace(stranger, cert=b"", key=b"")
        assert "it requires a certificate" in diagnose(host, port, material=nobody, server_name=name)
        assert not diagnose(host, port, material=cluster().tls(OPERATOR).material, server_name=name)


class TestRotation:
    def test_a_client_changes_between_calls_and_loses_none(self, tmp_path: Path) -> None:
        clock = FakeClock()
        seen: list[object] = []
        going_on = threading.Event()

        def slowly(request: LeaveRequest, context: Context) -> Iterator[LeaveRequest]:
            seen.append(context.peer())
            yield request
            going_on.wait(10.0)
            yield request

        def told(request: LeaveRequest, context: Context) -> LeaveRequest:
            seen.append(context.peer())
            return request

        server = echo_server(told, slowly, tls=cluster().tls(COORDINATOR), access=ACCESS)
        server.start()
        folder = copied(cluster().tls(OPERATOR), tmp_path / "own")
        calls = caller(server, Tls(folder, clock=clock))
        try:
            under_way = repeat(calls)
            assert next(under_way) == "hello"
            reissue(folder, OPERATOR)
            assert say(calls) == "hello"
            assert seen[1] == seen[0], "nobody has looked yet"
            clock.advance(CHECK_SECONDS)
            assert say(calls) == "hello"
            assert seen[2] != seen[0], "a new connection, with the new certificate"
            going_on.set()
            assert list(under_way) == ["hello"]
        finally:
            calls.close()
            server.stop(grace_seconds=0.0)

    def test_a_server_changes_for_who_connects_next(self, tmp_path: Path) -> None:
        clock = FakeClock()
        folder = copied(cluster().tls(COORDINATOR), tmp_path / "own")
        server = echo_server(tls=Tls(folder, clock=clock), access=ACCESS)
        server.start()
        try:
            with closing(caller(server, cluster().tls(OPERATOR))) as early:
                assert say(early) == "hello"
                reissue(folder, SHARD)
                clock.advance(CHECK_SECONDS)
                assert say(early) == "hello"
                with closing(caller(server, cluster().tls(OPERATOR), role=Role.PARAMETER_SERVER)) as late:
                    assert say(late) == "hello"
        finally:
            server.stop(grace_seconds=0.0)

    def test_another_authority_takes_over(self, tmp_path: Path) -> None:
        """With both in `ca.pem` for a while, everybody can change when they like."""
        clock = FakeClock()
        old, new = cluster().authority(), Authority.new_root()
        folder = copied(cluster().tls(COORDINATOR), tmp_path / "own")
        server = echo_server(tls=Tls(folder, clock=clock), access=ACCESS)
        server.start()
        try:
            (folder / CA_FILE).write_bytes(old.certificate_pem + new.certificate_pem)
            clock.advance(CHECK_SECONDS)
            of_new = tmp_path / "new"
            reissue(of_new, OPERATOR, root=new)
            (of_new / CA_FILE).write_bytes(old.certificate_pem + new.certificate_pem)
            for tls in (cluster().tls(OPERATOR), Tls(of_new)):
                with closing(caller(server, tls)) as calls:
                    assert say(calls) == "hello"
        finally:
            server.stop(grace_seconds=0.0)


class TestListening:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "203.0.113.7", "no-such-host.invalid"])
    def test_no_port_is_open_to_others_without_tls(self, host: str) -> None:
        assert not is_loopback(host)
        with pytest.raises(UserError, match="needs TLS: give --tls DIR"):
            Server(ServerConfig(host=host)).start()

    @pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
    def test_loopback_is_this_machine_alone(self, host: str) -> None:
        assert is_loopback(host)

    def test_probes_need_no_certificate_and_reach_nothing_else(self) -> None:
        server = echo_server(tls=cluster().tls(COORDINATOR), access=ACCESS, health_port=0)
        server.start()
        try:
            with closing(open_channel(server.health_address)) as channel:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            target = Target(address=server.health_address, role="x")
            with (
                closing(Caller(target)) as calls,
                pytest.raises(ProtocolViolation, match="does not implement Say"),
            ):
                say(calls)
        finally:
            server.stop(grace_seconds=0.0)


def test_what_a_certificate_says() -> None:
    facts = facts_of(cluster().tls(SHARD).material.cert)
    assert (facts.peer, str(facts.peer)) == (SHARD, "parameter-server 0")
