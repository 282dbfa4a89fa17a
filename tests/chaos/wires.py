"""Every partition of the table: which wire is cut, which way, for how long. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.cluster import COORDINATOR, REDIS
from tests.support.network_namespaces import CALLER, Direction


class Damage(StrEnum):
    """What is done to a wire."""

    CUT = "cut"
    """Packets are lost, for longer than a lease."""
    SILENT_PEER = "silent_peer"
    """A connection that is open falls silent: a call under way must fail within the bound of keepalive."""
    RESET = "reset"
    """Connections are reset, in the middle of whatever they carry."""
    LOSSY = "lossy"
    """Every tenth packet is lost."""
    SLOW = "slow"
    """The first one named may send little; the second one is whoever it talks to."""


#: Pairs of roles that have a wire between them, or could: six pairs of the four roles, and two of one role.
PAIRS = (
    (COORDINATOR, "shard-0"),
    (COORDINATOR, "agent-1"),
    (COORDINATOR, REDIS),
    ("shard-0", "agent-1"),
    (REDIS, "shard-1"),
    (REDIS, "agent-0"),
    ("shard-0", "shard-1"),
    ("agent-0", "agent-1"),
)

#: Wires whose connections are reset in the middle of weights, activations, commands and heartbeats.
RESETS = (("shard-1", "agent-0"), ("agent-0", "agent-1"), (COORDINATOR, "agent-1"), ("shard-0", "shard-1"))

#: Wires that carry weights and activations, and lose some of them.
LOSSY = (("shard-1", "agent-0"), ("agent-0", "agent-1"))

#: Who is slow for a while: a server of weights, and a host of stages.
SLOW = ("shard-1", "agent-1")

#: Stands for whoever a slow host talks to.
EVERYBODY = "everybody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One fault of the network."""

    damage: Damage
    first: str
    second: str
    direction: Direction = Direction.BOTH

    @property
    def name(self) -> str:
        """For the table, and to play it again."""
        return f"{self.damage}/{self.first}/{self.second}/{self.direction}"

    @property
    def row(self) -> str:
        """Row of the table."""
        ends = f"{self.first} - {self.second}"
        return ends if self.damage is Damage.CUT else f"{self.damage} {ends}"

    @property
    def column(self) -> str:
        """Column of the table."""
        return self.direction

    @property
    def may_end(self) -> frozenset[str]:
        """Who may end of it, to be started again: a coordinator without its store leads no more."""
        return frozenset({COORDINATOR} if {self.first, self.second} == {COORDINATOR, REDIS} else ())


def all_wires() -> tuple[Wire, ...]:
    """The table."""
    return tuple(_wires())


def _wires() -> Iterator[Wire]:
    for first, second in PAIRS:
        yield from (Wire(damage=Damage.CUT, first=first, second=second, direction=way) for way in Direction)
    yield Wire(damage=Damage.SILENT_PEER, first=CALLER, second=COORDINATOR)
    yield from (Wire(damage=Damage.RESET, first=first, second=second) for first, second in RESETS)
    yield from (Wire(damage=Damage.LOSSY, first=first, second=second) for first, second in LOSSY)
    yield from (Wire(damage=Damage.SLOW, first=host, second=EVERYBODY, direction=Direction.THERE) for host in SLOW)
