"""`python -m hetpipe.deploy.network_check`: checks that the network allows exactly the required connections.

Network policies have no effect without a plugin that enforces them, and their absence causes no error. This check opens
connections: the allowed ones must succeed, the forbidden ones must fail. No data is sent.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import UserError
from hetpipe.values.addresses import join_address, split_address

#: Pause between two attempts, and the timeout of one connection.
_PAUSE_SECONDS = 2.0
_CONNECT_SECONDS = 3.0


class Network(Protocol):
    """The interface of a network for the check."""

    def hosts(self, name: str) -> tuple[str, ...]:
        """The IP addresses of a name; none if it is unknown."""
        ...

    def opens(self, host: str, port: int) -> bool:
        """Whether a connection to an IP address succeeds."""
        ...


class SystemNetwork:
    """The network of this machine."""

    def hosts(self, name: str) -> tuple[str, ...]:
        """As `Network.hosts`."""
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except socket.gaierror:
            return ()
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))

    def opens(self, host: str, port: int) -> bool:
        """As `Network.opens`."""
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except OSError:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The connections to check. Addresses are `HOST:PORT`; all IP addresses of a name are checked."""

    allowed: tuple[str, ...]
    forbidden: tuple[str, ...] = ()
    wait_seconds: float = 0.0
    """Timeout for the allowed connections to succeed and the forbidden names to be resolved."""


def check(rules: Rules, network: Network, *, clock: Clock, say: Callable[[str], None]) -> bool:
    """Check every connection and print the results; True if all are as required.

    Raises:
        UserError: an address is malformed.
    """
    allowed, forbidden = ([split_address(address) for address in side] for side in (rules.allowed, rules.forbidden))
    deadline = clock.monotonic() + rules.wait_seconds
    while missing := _missing(allowed, forbidden, network):
        if clock.monotonic() >= deadline:
            say(f"{missing} within {rules.wait_seconds:g} s, so the check is inconclusive")
            return False
        clock.sleep(_PAUSE_SECONDS)
    for address in rules.allowed:
        say(f"{address}: open, as required")
    open_ones = {
        join_address(name, port): [host for host in network.hosts(name) if network.opens(host, port)]
        for name, port in forbidden
    }
    for address, hosts in open_ones.items():
        say(f"{address}: OPEN at {', '.join(hosts)}, but forbidden" if hosts else f"{address}: closed, as required")
    if any(open_ones.values()):
        say("the rules of this network are not enforced; use a network plugin that enforces them")
        return False
    return True


def _missing(allowed: Sequence[tuple[str, int]], forbidden: Sequence[tuple[str, int]], network: Network) -> str:
    for name, port in allowed:
        if not any(network.opens(host, port) for host in network.hosts(name)):
            return f"{join_address(name, port)} could not be reached"
    for name, _ in forbidden:
        if not network.hosts(name):
            return f"the name {name} could not be resolved"
    return ""


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one check; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hetpipe.deploy.network_check",
        description="Fail if an allowed connection does not succeed, or a forbidden one does.",
    )
    parser.add_argument(
        "--allowed",
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="a connection that must succeed; repeatable",
    )
    parser.add_argument(
        "--forbidden", action="append", default=[], metavar="HOST:PORT", help="a connection that must fail; repeatable"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="S",
        help="timeout for the allowed connections, in seconds (%(default)g)",
    )
    options = parser.parse_args(arguments)
    rules = Rules(allowed=tuple(options.allowed), forbidden=tuple(options.forbidden), wait_seconds=options.wait)
    try:
        passed = check(rules, SystemNetwork(), clock=SYSTEM_CLOCK, say=_say)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
