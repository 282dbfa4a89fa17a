"""What endangers a run while it goes on: lost safety, as a closed set of conditions.

The process that notices one raises it, and says when it is over. Reports and heartbeats carry the newest state of every
condition of a process to the coordinator, which keeps them per job (`decide.lifecycle.conditions`) and tells followers.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from hetpipe.values.bounds import MAX_COUNT, Count, Name, Sentence

#: Seconds since 1970.
WallSeconds = Annotated[float, Field(ge=0.0, lt=MAX_COUNT)]


class ConditionKind(StrEnum):
    """The kinds of lost safety."""

    CHECKPOINT_GIVEN_UP = "checkpoint_given_up"
    """A checkpoint that was due could not be completed: a resume or a rewind loses what came after the one before."""
    HISTORY_INCOMPLETE = "history_incomplete"
    """A file by which a process tells of the run lacks lines from here on: nobody can check all of the run."""
    DISK_NEARLY_FULL = "disk_nearly_full"
    """The disk of the run's folder, or of a parameter server's state, has little room left."""
    DURABILITY_LOST = "durability_lost"
    """A parameter server keeps what is staged in memory only (level `applied`): its death costs a rewind."""
    STORE_UNREACHABLE = "store_unreachable"
    """Redis does not answer: the coordinator keeps what runs and begins nothing."""

    @property
    def is_permanent(self) -> bool:
        """Whether it holds to the end of the run, whatever becomes of the process: a line that lacks stays away."""
        return self is ConditionKind.HISTORY_INCOMPLETE


@dataclass(frozen=True, slots=True)
class Condition:
    """The newest state of one condition of one process, or of a disk or store that several processes look at."""

    kind: ConditionKind
    who: Name
    """Whose it is, for people: `parameter server 0`, `stage 1 of virtual worker 0`, `the disk of /runs on n0`."""
    sentence: Sentence = ""
    """The first cause since it was last clear, the path, and the fix; empty if it has never held."""
    since: WallSeconds = 0.0
    """When it was raised last."""
    cleared: WallSeconds | None = None
    """When it was over; None while it holds."""
    clearance: Sentence = ""
    """What is well again; empty while it holds."""
    times: Count = 0
    """How often it was raised."""

    @property
    def holds(self) -> bool:
        """Whether it is current."""
        return self.cleared is None


#: Kinds that cost what a run has computed, when something else goes wrong.
_COSTLY = frozenset({ConditionKind.CHECKPOINT_GIVEN_UP, ConditionKind.DISK_NEARLY_FULL, ConditionKind.DURABILITY_LOST})

#: Kinds that a disk causes.
_OF_DISKS = _COSTLY | {ConditionKind.HISTORY_INCOMPLETE}

#: Errors, by their names in `hetpipe.errors`, and the kinds that they follow from.
_CONSEQUENCES = {
    "CheckpointNotWritten": _COSTLY,
    "CheckpointError": _COSTLY,
    "DurabilityLost": _COSTLY,
    "HistoryIncomplete": _OF_DISKS,
    "StateLost": _COSTLY,
    "StoreUnavailable": frozenset({ConditionKind.STORE_UNREACHABLE}),
}

#: What the system says of a disk that is full, over its quota, or broken.
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
_DISK_TEXTS = tuple(os.strerror(number) for number in sorted(DISK_ERRORS))

#: Stands before the first cause in the last words of a run.
FIRST_CAUSE = "first cause: "


def first_cause(conditions: Sequence[Condition]) -> Condition | None:
    """The current condition that was raised first."""
    return min((one for one in conditions if one.holds), key=lambda one: one.since, default=None)


def consequence(sentence: str, error: str, conditions: Sequence[Condition]) -> str:
    """The last words of a run that failed: where that followed from lost safety, they end with the first cause.

    Args:
        sentence: why it failed.
        error: class name in `hetpipe.errors`, or of a Python exception.
        conditions: those of the run, at its end.

    >>> full = Condition(ConditionKind.DISK_NEARLY_FULL, "the disk of /runs", "the disk of /runs is nearly full", 1.0)
    >>> consequence("the checkpoint at clock 9 was given up", "CheckpointNotWritten", [full])
    'the checkpoint at clock 9 was given up; first cause: the disk of /runs is nearly full'
    >>> consequence("stage 0 was killed by SIGKILL", "JobFailed", [full])
    'stage 0 was killed by SIGKILL'
    """
    kinds = _CONSEQUENCES.get(error, frozenset())
    if any(text in sentence for text in _DISK_TEXTS):
        kinds |= _OF_DISKS
    possible = [one for one in conditions if one.kind in kinds]
    # A history that was cut stays so: it may be of an earlier time at which the disk was full.
    cause = first_cause([one for one in possible if not one.kind.is_permanent]) or first_cause(possible)
    if cause is None or FIRST_CAUSE in sentence:
        return sentence
    return f"{sentence}; {FIRST_CAUSE}{cause.sentence}"
