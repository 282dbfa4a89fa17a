"""Every cell of the table: which role is hit at which failpoint, how, and who provokes it. Pure.

The table is made from `failpoints.POINTS`, so a new failpoint is a new row without a word here. A role of the table of
points may stand for several processes that do different things there: the clock shard and the other shards, the first
stage and the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from hetpipe.failpoints import POINTS


class Deed(StrEnum):
    """What is done to the victim."""

    KILL = "kill"
    """SIGKILL at the failpoint."""
    PAUSE = "pause"
    """SIGSTOP at the failpoint, SIGCONT when its lease and the patience with it have run out."""
    WIPE = "wipe"
    """SIGKILL, and Redis has forgotten everything when it starts again; at no failpoint."""
    LOSE_DISK = "lose_disk"
    """SIGKILL of a parameter server, whose disk is empty when it starts again, so that the whole job goes back to a
    checkpoint; at no failpoint."""
    RESTART = "restart"
    """SIGTERM, as a supervisor or an eviction sends it, and a new start; in storms."""
    FLUSH = "flush"
    """FLUSHALL: Redis lives on and has forgotten everything; in storms."""
    FILL_DISK = "fill_disk"
    """No room on a disk for a while, then room again; in storms."""


class Provocation(StrEnum):
    """What makes the victim come to the failpoint, where training alone does not."""

    NONE = "none"
    MEMBER_RETURNS = "member_returns"
    """A parameter server dies, and registers again."""
    VICTIM_REGISTERS = "victim_registers"
    """The victim dies, is started again and registers."""
    WORKER_DIES = "worker_dies"
    """A stage of the last virtual worker dies."""
    WORKER_SLOWS = "worker_slows"
    """A stage of the last virtual worker becomes slow, so that layers are moved away from it."""
    OTHERS_REST = "others_rest"
    """The first virtual worker stands still for a moment, so that the last one has to wait for a clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One fault."""

    point: str
    """A name of `failpoints.POINTS`, or `any` for wherever the victim is."""
    victim: str
    """Key of a process of the cluster, `stage-0` or `stage-1` for a stage of the last virtual worker, `fork-server` for
    that of its agent, or several keys with `+` between them."""
    deed: Deed
    provocation: Provocation = Provocation.NONE

    @property
    def name(self) -> str:
        """For the table, and to run it again."""
        return f"{self.point}/{self.victim}/{self.deed}"

    @property
    def row(self) -> str:
        """Row of the table: push, pull, commit, membership, repartition, replacement, snapshot, any."""
        return self.point.partition(".")[0]

    @property
    def column(self) -> str:
        """Column of the table."""
        return self.deed


#: Who of a small cluster plays a role of the table of points.
VICTIMS = {
    "stage": ("stage-0", "stage-1"),
    "parameter_server": ("shard-0", "shard-1"),
    "coordinator": ("coordinator",),
    "agent": ("agent-1",),
}

#: Points that not every process of a role comes to: the clock shard decides, the first stage asks for clocks.
ONLY = {
    "pull.before_gate": {"stage": ("stage-0",)},
    "pull.while_gated": {"stage": ("stage-0",)},
    "commit.before_publish": {"parameter_server": ("shard-0",)},
    "commit.after_publish": {"parameter_server": ("shard-0",)},
    "repartition.before_record": {"parameter_server": ("shard-0",)},
    "repartition.recorded": {"parameter_server": ("shard-0",)},
    "snapshot.manifest_on_some_shards": {"parameter_server": ("shard-0",)},
    # Here the manifest is written in two halves and older checkpoints are deleted; the other shards do both with
    # snapshots of a full write-ahead log alone, which a small job does not fill.
    "snapshot.half_written": {"parameter_server": ("shard-0",)},
    "snapshot.old_deleted": {"parameter_server": ("shard-0",)},
}

#: How a point is come to, by point and role of the victim.
PROVOKED = {
    ("pull.while_gated", "stage"): Provocation.OTHERS_REST,
    ("membership.lease_granted_not_recorded", "coordinator"): Provocation.MEMBER_RETURNS,
    ("membership.recorded_not_published", "coordinator"): Provocation.MEMBER_RETURNS,
    ("membership.published_not_seen", "coordinator"): Provocation.MEMBER_RETURNS,
    ("membership.published_not_seen", "parameter_server"): Provocation.VICTIM_REGISTERS,
    ("membership.published_not_seen", "agent"): Provocation.VICTIM_REGISTERS,
    ("membership.evict_decided_not_published", "coordinator"): Provocation.WORKER_DIES,
    **{
        (name, role): Provocation.WORKER_SLOWS
        for name, point in POINTS.items()
        if name.partition(".")[0] == "repartition"
        for role in point.roles
    },
}

#: Faults at no point: every role wherever it happens to be, and several at once.
ANYWHERE = (
    "coordinator",
    "redis",
    "shard-0",
    "shard-1",
    "agent-0",
    "agent-1",
    "stage-0",
    "stage-1",
    "shard-0+shard-1",
    "coordinator+redis",
)

#: What an agent forks its stages from, alone and with one of these, which is then started by the next one.
FORK_SERVERS = ("fork-server", "fork-server+stage-0")

#: Whom a Redis that forgets everything is tried with.
WIPED = ("redis", "coordinator+redis")

#: Whose disk is lost.
WITHOUT_DISK = ("shard-0", "shard-1")

#: What is done at failpoints.
AT_POINTS = (Deed.KILL, Deed.PAUSE)

#: Points nobody can be brought to, and why. A whole group by its name alone.
UNREACHED: dict[str, str] = {
    "replacement": "all devices of a virtual worker of this cluster are one agent's: none continues without it",
    "freezing": "python -m tests.chaos.transformations does that, to jobs of their own: layers freeze once in a job",
    "takeover": "python -m tests.chaos.takeovers does that, to jobs of their own: one takes over once in a job",
}


def all_cells() -> tuple[Cell, ...]:
    """The table, in the order of `POINTS`, what is at no point last."""
    return (*_at_points(), *_anywhere())


def skips() -> dict[str, str]:
    """What of points × victims × deeds is not in the table, and why."""
    return {f"{name}/{victim}/{deed}": reason for name, victim, reason in _left_out() for deed in AT_POINTS}


def _at_points() -> Iterator[Cell]:
    for name, point in POINTS.items():
        if _unreached(name):
            continue
        for role in point.roles:
            for victim in ONLY.get(name, {}).get(role, VICTIMS[role]):
                for deed in AT_POINTS:
                    provocation = PROVOKED.get((name, role), Provocation.NONE)
                    yield Cell(point=name, victim=victim, deed=deed, provocation=provocation)


def _anywhere() -> Iterator[Cell]:
    for victim in ANYWHERE:
        yield from (Cell(point="any", victim=victim, deed=deed) for deed in AT_POINTS)
    yield from (Cell(point="any", victim=victim, deed=Deed.KILL) for victim in FORK_SERVERS)
    yield from (Cell(point="any", victim=victim, deed=Deed.WIPE) for victim in WIPED)
    yield from (Cell(point="any", victim=victim, deed=Deed.LOSE_DISK) for victim in WITHOUT_DISK)


def _left_out() -> Iterator[tuple[str, str, str]]:
    """(point, victim, reason)."""
    for name, point in POINTS.items():
        if reason := _unreached(name):
            yield from ((name, victim, reason) for role in point.roles for victim in VICTIMS[role])
            continue
        for role, able in ONLY.get(name, {}).items():
            reason = f"only {' and '.join(able)} comes there"
            yield from ((name, victim, reason) for victim in VICTIMS[role] if victim not in able)


def _unreached(name: str) -> str:
    return UNREACHED.get(name) or UNREACHED.get(name.partition(".")[0], "")
