"""The network check: what must be open is, what must not be is not, and nothing is taken for granted."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

import pytest

from hetpipe.deploy import network_check
from hetpipe.deploy.network_check import Rules, SystemNetwork, check
from hetpipe.errors import UserError
from tests.support.fake_clock import FakeClock


class FakeNetwork:
    """Names, and the ports that are open; more of both with every look."""

    def __init__(
        self, names: Mapping[str, tuple[str, ...]], open_ports: set[tuple[str, int]], *, after: int = 0
    ) -> None:
        self._names = names
        self._open = open_ports
        self._looks_left = after

    def hosts(self, name: str) -> tuple[str, ...]:
        self._looks_left -= 1
        return () if self._looks_left >= 0 else self._names.get(name, ())

    def opens(self, host: str, port: int) -> bool:
        return (host, port) in self._open


NAMES = {"coordinator": ("10.0.0.1",), "redis": ("10.0.0.2",), "shards": ("10.0.0.3", "10.0.0.4")}
RULES = Rules(allowed=("coordinator:7400",), forbidden=("redis:6379", "shards:7410"), wait_seconds=10)


def run(rules: Rules, network: FakeNetwork) -> tuple[bool, list[str]]:
    said: list[str] = []
    passed = check(rules, network, clock=FakeClock(auto_advance=True), say=said.append)
    return passed, said


def test_all_as_it_must_be() -> None:
    passed, said = run(RULES, FakeNetwork(NAMES, {("10.0.0.1", 7400)}))
    assert passed
    assert said == [
        "coordinator:7400: open, as required",
        "redis:6379: closed, as required",
        "shards:7410: closed, as required",
    ]


def test_one_forbidden_connection_of_many_addresses_is_enough() -> None:
    passed, said = run(RULES, FakeNetwork(NAMES, {("10.0.0.1", 7400), ("10.0.0.4", 7410)}))
    assert not passed
    assert "shards:7410: OPEN at 10.0.0.4, but forbidden" in said
    assert said[-1].startswith("the rules of this network are not enforced")


def test_it_waits_for_what_is_not_there_yet() -> None:
    assert run(RULES, FakeNetwork(NAMES, {("10.0.0.1", 7400)}, after=2))[0]


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ({**NAMES, "coordinator": ()}, "coordinator:7400 could not be reached within 10 s"),
        ({**NAMES, "redis": ()}, "the name redis could not be resolved within 10 s"),
    ],
)
def test_without_the_other_side_nothing_is_proven(names: Mapping[str, tuple[str, ...]], missing: str) -> None:
    passed, said = run(RULES, FakeNetwork(names, {("10.0.0.1", 7400)}))
    assert not passed
    assert said == [f"{missing}, so the check is inconclusive"]


def test_a_malformed_address() -> None:
    with pytest.raises(UserError, match="'redis' is not an address"):
        run(Rules(allowed=("redis",)), FakeNetwork(NAMES, set()))


class TestProgram:
    @pytest.fixture
    def listening(self) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield f"127.0.0.1:{server.getsockname()[1]}"

    @pytest.fixture
    def closed(self) -> str:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return f"127.0.0.1:{server.getsockname()[1]}"

    def test_real_connections(self, listening: str, closed: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert network_check.main([f"--allowed={listening}", f"--forbidden={closed}"]) == 0
        assert network_check.main([f"--allowed={listening}", f"--forbidden={listening}"]) == 1
        assert network_check.main([f"--allowed={closed}"]) == 1
        assert "could not be reached within 0 s" in capsys.readouterr().out

    def test_a_wrong_address_is_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert network_check.main(["--allowed=nowhere"]) == 2
        assert "'nowhere' is not an address" in capsys.readouterr().err

    def test_an_unknown_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unknown(*_: object, **__: object) -> None:
            raise socket.gaierror

        monkeypatch.setattr(socket, "getaddrinfo", unknown)
        assert SystemNetwork().hosts("no-such-name") == ()
