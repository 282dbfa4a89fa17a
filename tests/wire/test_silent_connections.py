"""Connections that never speak are closed, with TLS and without, so that nobody collects them."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import closing

import pytest

from hetpipe.values import addresses
from hetpipe.wire import channel
from hetpipe.wire.server import Server, ServerConfig
from tests.certs.cluster import SHARD, cluster
from tests.wire.echo import echo_server, say, serving

#: What a client of HTTP/2 says first.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

#: Within which the servers of these tests have to hang up: they wait a tenth of the usual.
SECONDS = 5.0


def test_all_that_is_waited_is_below_ten_seconds() -> None:
    assert channel.HANDSHAKE_SECONDS < 10.0
    assert channel.IDLE_CONNECTION_SECONDS <= 8.0
    assert {name for name, _ in channel.silence_options()} == {
        "grpc.server_handshake_timeout_ms",
        "grpc.max_connection_idle_ms",
    }


@pytest.fixture(params=["plaintext", "TLS"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr(channel, "IDLE_CONNECTION_SECONDS", 0.8)
    tls = cluster().tls(SHARD) if request.param == "TLS" else None
    made = Server(ServerConfig(num_threads=2, tls=tls))
    made.start()
    try:
        yield made
    finally:
        made.stop(grace_seconds=0.0)


def hangs_up(connection: socket.socket) -> bool:
    """Whether the other end closes, whatever it says before."""
    connection.settimeout(SECONDS)
    try:
        while connection.recv(4_096):
            """A server says its settings."""
    except TimeoutError:
        return False
    except OSError:
        """It has closed, and how."""
    return True


def connect(server: Server) -> socket.socket:
    host, port = addresses.split_address(server.address)
    return socket.create_connection((host, port))


@pytest.mark.parametrize("words", [b"", b"PRI", b"\x16\x03\x01\x02"], ids=["nothing", "half a preface", "half a hello"])
def test_a_connection_without_a_handshake_is_closed(server: Server, words: bytes) -> None:
    with closing(connect(server)) as connection:
        connection.sendall(words)
        assert hangs_up(connection)


def test_a_connection_without_a_call_is_closed(server: Server) -> None:
    connection = connect(server)
    if server._config.tls is not None:
        folder = server._config.tls.folder
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        connection = context.wrap_socket(connection)
    with closing(connection):
        connection.sendall(PREFACE)
        assert hangs_up(connection)


def test_a_client_that_was_silent_for_long_calls_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "IDLE_CONNECTION_SECONDS", 0.2)
    server = echo_server()
    with serving(server) as caller:
        assert say(caller, "a") == "a"
        with closing(connect(server)) as witness:
            witness.sendall(PREFACE)
            assert hangs_up(witness), "by now the client's own connection is closed, too"
        assert say(caller, "b") == "b"
