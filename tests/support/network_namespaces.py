"""A small network of network namespaces on this machine, whose wires can be cut: for tests of partitions. Needs root.

Every host is a namespace of its own, on a bridge in one more; the caller stays where it is and is a host, too. A cut is
a rule in the sender's namespace that drops what it sends, so that no end is told of anything, as with a cable that was
pulled. Only packets between the two hosts that were named are touched.

    with Network("chaos", ["shard", "agent"]) as network:
        subprocess.Popen([*network["shard"].prefix, "my-server", "--host", network["shard"].address])
        with network.cut("agent", "shard"):
            ...
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from hetpipe.errors import HetpipeError, UserError

#: Begins the name of every namespace that this module makes; the number of the owning process follows.
_PREFIX = "hetpipe"

#: Where `ip netns exec` looks for the files that it shows in place of those in /etc.
_ETC = Path("/etc/netns")

_NAMESPACES = Path("/run/netns")

#: The caller's own place in the network.
CALLER = "caller"

_MOST_HOSTS = 200
_SUBNETS = 250
_COMMAND_SECONDS = 20.0

#: What a host does to what it sends to another one.
_DROP = ("-j", "DROP")
_DROP_SOME = ("-m", "statistic", "--mode", "random", "--probability", "0.1", "-j", "DROP")
_RESET = ("-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")


class Direction(StrEnum):
    """Which packets between two hosts are lost."""

    BOTH = "both"
    THERE = "there"
    """From the first one named to the second."""
    BACK = "back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One namespace."""

    name: str
    address: str
    cable: str
    """The interface to the others."""
    prefix: tuple[str, ...]
    """Goes before the command of what shall run there; empty for the caller."""

    @property
    def host_name(self) -> str:
        """The name under which every host finds it."""
        return f"{self.name}.{_PREFIX}.test"


def why_not_slow() -> str:
    """Why no host can be slowed down here, as half a sentence; empty where one can."""
    try:
        with Network("slow", ["a"]) as network, network.slow("a", kilobits_per_second=1_000):
            return ""
    except HetpipeError as error:
        return f"slow links take the queueing discipline tbf ({error})"


def why_not() -> str:
    """Why there can be no such network here, as half a sentence; empty where there can."""
    if os.geteuid() != 0:
        return "it takes root to make network namespaces"
    missing = [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} is not installed"
    try:
        with Network("probe", ["a", "b"]) as network, network.cut("a", "b"):
            return ""
    except HetpipeError as error:
        return str(error)


class Network:
    """Hosts and the wires between them. Use it in a `with` block, which removes everything; for one thread."""

    def __init__(self, name: str, hosts: Sequence[str]) -> None:
        """Describe it; nothing is made.

        Args:
            name: of letters; told apart from other networks of this process by it.
            hosts: names of letters, digits and dashes, unlike `CALLER`.

        Raises:
            UserError: there are too many hosts, or two have one name.
        """
        if len(hosts) > _MOST_HOSTS or len({*hosts, CALLER}) != len(hosts) + 1:
            raise UserError(f"a network has up to {_MOST_HOSTS} hosts with names of their own, none of them {CALLER!r}")
        self._hub = f"{_PREFIX}-{os.getpid()}-{name}-hub"
        self._subnet = _free_subnet()
        cable = f"hp{os.getpid() % 100_000}{name[:2]}"
        self._stack = ExitStack()
        self._hosts = {CALLER: Host(name=CALLER, address=f"{self._subnet}.254", cable=f"{cable}-0", prefix=())}
        for number, host in enumerate(hosts, start=1):
            namespace = f"{_PREFIX}-{os.getpid()}-{name}-{host}"
            prefix = ("ip", "netns", "exec", namespace)
            address = f"{self._subnet}.{number}"
            self._hosts[host] = Host(name=host, address=address, cable=f"{cable}-{number}", prefix=prefix)

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    @property
    def hosts(self) -> Mapping[str, Host]:
        """By name, the caller among them."""
        return dict(self._hosts)

    def __enter__(self) -> Self:
        """Make it.

        Raises:
            UserError: the kernel does not allow it.
        """
        sweep()
        try:
            self._make_namespace(self._hub)
            self._in(self._hub, "ip", "link", "add", "wire", "type", "bridge")
            self._in(self._hub, "ip", "link", "set", "wire", "up")
            for number, host in enumerate(self._hosts.values()):
                self._connect(host, number)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @contextmanager
    def cut(self, first: str, second: str, direction: Direction = Direction.BOTH) -> Iterator[None]:
        """Lose packets between two hosts for as long as the block lasts, also those of connections that are open."""
        with self._treated(first, second, direction, _DROP):
            yield

    @contextmanager
    def resetting(self, first: str, second: str) -> Iterator[None]:
        """Answer every packet between two hosts with a reset for as long as the block lasts."""
        with self._treated(first, second, Direction.BOTH, _RESET):
            yield

    @contextmanager
    def losing_some(self, first: str, second: str) -> Iterator[None]:
        """Lose every tenth packet between two hosts, by chance, for as long as the block lasts."""
        with self._treated(first, second, Direction.BOTH, _DROP_SOME):
            yield

    @contextmanager
    def slow(self, name: str, *, kilobits_per_second: int) -> Iterator[None]:
        """Let a host send so much at most, to all others together, for as long as the block lasts.

        Raises:
            UserError: the kernel has no queueing discipline `tbf`.
        """
        host = self._hosts[name]
        prefix = (*host.prefix, "tc", "qdisc")
        limit = ("tbf", "rate", f"{kilobits_per_second}kbit", "burst", "16kb", "latency", "400ms")
        _run(*prefix, "add", "dev", host.cable, "root", *limit)
        try:
            yield
        finally:
            _run(*prefix, "del", "dev", host.cable, "root")

    @contextmanager
    def _treated(self, first: str, second: str, direction: Direction, treatment: Sequence[str]) -> Iterator[None]:
        ways = {
            Direction.THERE: [(first, second)],
            Direction.BACK: [(second, first)],
            Direction.BOTH: [(first, second), (second, first)],
        }
        with ExitStack() as rules:
            for sender, receiver in ways[direction]:
                # Before what leaves, and not behind what comes: a reset is then sent to the sender's own socket.
                rule = ("OUTPUT", "-d", self._hosts[receiver].address, *treatment)
                prefix = self._hosts[sender].prefix
                _run(*prefix, "iptables", "-w", "-I", *rule)
                rules.callback(_run, *prefix, "iptables", "-w", "-D", *rule)
            yield

    def _make_namespace(self, namespace: str) -> None:
        _run("ip", "netns", "add", namespace)
        self._stack.callback(_remove, namespace)
        self._in(namespace, "ip", "link", "set", "lo", "up")

    def _connect(self, host: Host, number: int) -> None:
        """A cable from the bridge to `host`."""
        cable = host.cable
        namespace = host.prefix[-1] if host.prefix else ""
        if namespace:
            self._make_namespace(namespace)
            self._write_hosts(namespace)
        far = ("netns", namespace) if namespace else ()
        _run("ip", "link", "add", cable, *far, "type", "veth", "peer", f"w{number}", "netns", self._hub)
        if not namespace:
            self._stack.callback(_run, "ip", "link", "del", cable)
        self._in(self._hub, "ip", "link", "set", f"w{number}", "master", "wire", "up")
        _run(*host.prefix, "ip", "address", "add", f"{host.address}/24", "dev", cable)
        _run(*host.prefix, "ip", "link", "set", cable, "up")

    def _write_hosts(self, namespace: str) -> None:
        folder = _ETC / namespace
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.host_name}" for host in self._hosts.values())]
        (folder / "hosts").write_text("\n".join([*lines, ""]), encoding="utf-8")

    @staticmethod
    def _in(namespace: str, *command: str) -> None:
        _run("ip", "netns", "exec", namespace, *command)


def sweep() -> None:
    """Remove the namespaces of processes that are gone."""
    for path in _NAMESPACES.glob(f"{_PREFIX}-*-*"):
        owner = path.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove(path.name)


def _free_subnet() -> str:
    """Three of the four numbers of addresses that this machine has no interface for."""
    taken = _run("ip", "-oneline", "-4", "address") if shutil.which("ip") else ""
    numbers = [(os.getpid() + offset) % _SUBNETS for offset in range(_SUBNETS)]
    return next((f"10.213.{number}" for number in numbers if f" 10.213.{number}." not in taken), "10.213.0")


def _remove(namespace: str) -> None:
    shutil.rmtree(_ETC / namespace, ignore_errors=True)
    _run("ip", "netns", "del", namespace)


def _run(*command: str) -> str:
    """What the command says.

    Raises:
        UserError: it cannot be run, or fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"`{' '.join(command)}` cannot be run: {error}") from error
    if done.returncode:
        told = done.stderr.strip() or f"exit status {done.returncode}"
        raise UserError(f"`{' '.join(command)}` failed: {told}")
    return done.stdout
