"""Wires between namespaces: whole, cut either way, reset, and gone afterwards."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetpipe.errors import UserError
from tests.support.network_namespaces import CALLER, Direction, Network, why_not, why_not_slow

pytestmark = pytest.mark.processes

REASON = why_not()
needs_namespaces = pytest.mark.skipif(
    bool(REASON), reason=f"NOT TESTED: networks of namespaces, with them partitions, because {REASON}"
)

#: Answers what it hears on its first connections; a client that connects, says something, and waits for the echo.
SERVER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    connection.settimeout(0.3)
    try:
        connection.sendall(connection.recv(9))
    except OSError:
        pass
"""
CLIENT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 7000), timeout=0.3) as connection:
        connection.sendall(b"hello")
        print("heard" if connection.recv(9) == b"hello" else "closed")
except ConnectionRefusedError:
    print("reset")
except TimeoutError:
    print("silence")
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network("test", ["left", "right"]) as network:
        server = subprocess.Popen(
            [*network["right"].prefix, sys.executable, "-c", SERVER, network["right"].address],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield network
        server.kill()
        server.communicate()


def call(network: Network, who: str, whom: str) -> str:
    """What becomes of a call from one host to a server."""
    command = [*network[who].prefix, sys.executable, "-c", CLIENT, whom]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


@needs_namespaces
def test_hosts_reach_each_other_by_name_and_the_caller_reaches_them(network: Network) -> None:
    assert call(network, "left", network["right"].host_name) == "heard"
    assert call(network, CALLER, network["right"].address) == "heard"


@needs_namespaces
@pytest.mark.parametrize("direction", Direction)
def test_a_cut_wire_loses_everything_and_heals(network: Network, direction: Direction) -> None:
    with network.cut("left", "right", direction):
        assert call(network, "left", network["right"].address) == "silence"
        assert call(network, CALLER, network["right"].address) == "heard"
    assert call(network, "left", network["right"].address) == "heard"


@needs_namespaces
def test_an_open_connection_falls_silent_one_way(network: Network) -> None:
    with socket.create_connection((network["right"].address, 7000), timeout=0.2) as connection:
        with network.cut(CALLER, "right", Direction.BACK):
            connection.sendall(b"hello")
            with pytest.raises(TimeoutError):
                connection.recv(9)
        connection.settimeout(5.0)
        assert connection.recv(9) == b"hello", "what was lost is sent again when the wire is whole"


@needs_namespaces
def test_a_connection_is_reset(network: Network) -> None:
    with network.resetting("left", "right"):
        assert call(network, "left", network["right"].address) == "reset"


@needs_namespaces
def test_a_lossy_wire_and_a_slow_host_still_get_through(network: Network) -> None:
    with network.losing_some("left", "right"):
        assert call(network, CALLER, network["right"].address) == "heard"
    if not why_not_slow():
        with network.slow("left", kilobits_per_second=100):
            assert call(network, "left", network["right"].address) == "heard"


@needs_namespaces
def test_nothing_is_left_behind() -> None:
    with Network("gone", ["only"]) as network:
        namespace = network["only"].prefix[-1]
        assert (Path("/run/netns") / namespace).exists()
    assert not (Path("/run/netns") / namespace).exists()
    assert not (Path("/etc/netns") / namespace).exists()


def test_hosts_have_names_of_their_own() -> None:
    with pytest.raises(UserError, match="names of their own"):
        Network("bad", ["a", "a"])
    with pytest.raises(UserError, match="none of them 'caller'"):
        Network("bad", ["a", CALLER])
