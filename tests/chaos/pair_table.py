"""Every pair of faults: what begins, who is killed while the job gets over it, and how soon. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.cluster import COORDINATOR, REDIS


class Opening(StrEnum):
    """What begins."""

    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT when the lease of whoever has stopped, or the patience with it, has run out, too."""
    WIPE = "wipe"
    """SIGKILL, and Redis has forgotten everything when it starts again."""
    LOSE_DISK = "lose_disk"
    """SIGKILL of a parameter server that comes back without its disk, and of whoever else is named at the same time; it
    has begun when the whole job goes back."""
    DRAIN = "drain"
    """A virtual worker is asked to leave."""
    ADD = "add"
    """One that has left is asked back."""
    MOVE = "move"
    """A stage was slow, and its virtual worker ends to move layers."""


#: The virtual worker that leaves, comes back or moves its layers: that of `cells.VICTIMS`.
WORKER = "vw-1"

#: How long after the beginning the second one is killed. A dead process is up again after about two seconds, and a
#: stage, which imports torch, computes again after four.
GAPS_SECONDS = (0.0, 0.5, 2.0)

#: What begins with whom → who is killed then.
SECONDS: Mapping[tuple[Opening, str], Sequence[str]] = {
    (Opening.KILL, "shard-0"): ("shard-0", "shard-1", COORDINATOR, "agent-1", "stage-0"),
    (Opening.KILL, "shard-1"): ("shard-0", "shard-1", COORDINATOR, "agent-1"),
    (Opening.KILL, COORDINATOR): (COORDINATOR, "shard-0", "shard-1", "agent-1", "stage-1"),
    (Opening.KILL, "agent-1"): ("agent-1", "agent-0", "shard-0", "shard-1", COORDINATOR, REDIS),
    (Opening.KILL, "stage-0"): ("stage-0", "stage-1", "shard-0", "shard-1", COORDINATOR, "agent-0"),
    (Opening.STOP, COORDINATOR): ("shard-0", "agent-1"),
    (Opening.STOP, "shard-0"): ("shard-1", "agent-1", COORDINATOR),
    (Opening.STOP, "shard-1"): ("shard-0", "agent-1"),
    (Opening.STOP, "agent-1"): ("agent-0", "shard-0", COORDINATOR),
    (Opening.STOP, "stage-0"): ("stage-1", "shard-0", COORDINATOR),
    (Opening.WIPE, REDIS): ("shard-0", "agent-1", COORDINATOR),
    (Opening.WIPE, f"{COORDINATOR}+{REDIS}"): ("shard-0", "shard-1", "agent-1", "stage-0"),
    (Opening.LOSE_DISK, "shard-0"): ("shard-0", "shard-1", COORDINATOR, "agent-1", REDIS),
    # The node of both: nobody is left who knows where the job was.
    (Opening.LOSE_DISK, f"shard-0+{COORDINATOR}"): ("shard-0", "shard-1", COORDINATOR, "agent-1", REDIS),
    (Opening.LOSE_DISK, "shard-1"): ("shard-0", "shard-1", COORDINATOR, "agent-1"),
    (Opening.DRAIN, WORKER): ("agent-1", "stage-0", "shard-0", "shard-1", COORDINATOR),
    (Opening.ADD, WORKER): ("agent-1", "stage-0", "stage-1", "shard-0", "shard-1", COORDINATOR),
    (Opening.MOVE, WORKER): ("agent-1", "stage-0", "shard-0", COORDINATOR),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two faults."""

    opening: Opening
    first: str
    """Keys of processes of the cluster with `+` between them, a stage of the last virtual worker, or that one."""
    second: str
    """Key of a process or stage that is killed."""
    gap_seconds: float
    """From what has begun to the second one. Where that is a stage that the first one starts: from its start."""

    @property
    def name(self) -> str:
        """For the table, and to play it again."""
        return f"{self.opening}/{self.first}/kill/{self.second}/{self.gap_seconds:g}s"

    @property
    def row(self) -> str:
        """Row of the table."""
        return f"{self.opening} {self.first}"

    @property
    def column(self) -> str:
        """Column of the table."""
        return f"{self.gap_seconds:g} s"

    @property
    def victims(self) -> tuple[str, ...]:
        """Whoever is hit first."""
        return tuple(self.first.split("+"))

    @property
    def awaits_new_stage(self) -> bool:
        """The second one is a stage that starts because of the first one."""
        has_stages = self.first.startswith("stage-") and self.opening is Opening.KILL
        return self.second.startswith("stage-") and (has_stages or self.opening in {Opening.ADD, Opening.MOVE})


def all_pairs() -> tuple[Pair, ...]:
    """The table."""
    return tuple(_pairs())


def _pairs() -> Iterator[Pair]:
    for (opening, first), seconds in SECONDS.items():
        for second in seconds:
            for gap in GAPS_SECONDS:
                yield Pair(opening=opening, first=first, second=second, gap_seconds=gap)
