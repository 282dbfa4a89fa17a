"""Conditions that endanger a running job: a closed set of kinds of lost safety.

The process that detects a condition raises and clears it. Reports and heartbeats carry the newest state of every
condition of a process to the coordinator, which keeps them per job (`decide.lifecycle.conditions`) and notifies
followers.
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
    """A checkpoint that was due could not be completed: a resume or a rewind loses everything since the one before."""
    HISTORY_INCOMPLETE = "history_incomplete"
    """A history or log file of the run has missing lines from here on: the run cannot be verified completely."""
    DISK_NEARLY_FULL = "disk_nearly_full"
    """The disk of the run's folder, or of a parameter server's state, is nearly full."""
    DURABILITY_LOST = "durability_lost"
    """A parameter server keeps staged waves in memory only (level `applied`): its death costs a rewind."""
    STORE_UNREACHABLE = "store_unreachable"
    """Redis does not respond: the coordinator keeps running jobs and starts no new ones."""

    @property
    def is_permanent(self) -> bool:
        """Whether it holds until the end of the run, even after its process has ended: missing lines stay missing."""
        return self is ConditionKind.HISTORY_INCOMPLETE


@dataclass(frozen=True, slots=True)
class Condition:
    """The newest state of one condition of one process, or of a disk or store shared by several processes."""

    kind: ConditionKind
    who: Name
    """Its subject, for messages: `parameter server 0`, `stage 1 of virtual worker 0`, `the disk of /runs on n0`."""
    sentence: Sentence = ""
    """The first cause since it was last clear, with the path and the fix; empty if it has never held."""
    since: WallSeconds = 0.0
    """When it was last raised."""
    cleared: WallSeconds | None = None
    """When it was cleared; None while it holds."""
    clearance: Sentence = ""
    """What has recovered; empty while it holds."""
    times: Count = 0
    """How often it was raised."""

    @property
    def holds(self) -> bool:
        """Whether it currently holds."""
        return self.cleared is None


#: Kinds that cost computed results when another fault occurs.
_COSTLY = frozenset({ConditionKind.CHECKPOINT_GIVEN_UP, ConditionKind.DISK_NEARLY_FULL, ConditionKind.DURABILITY_LOST})

#: Kinds caused by a disk.
_OF_DISKS = _COSTLY | {ConditionKind.HISTORY_INCOMPLETE}

#: Error class names of `hetpipe.errors`, and the kinds that they may be a consequence of.
_CONSEQUENCES = {
    "CheckpointNotWritten": _COSTLY,
    "CheckpointError": _COSTLY,
    "DurabilityLost": _COSTLY,
    "HistoryIncomplete": _OF_DISKS,
    "StateLost": _COSTLY,
    "StoreUnavailable": frozenset({ConditionKind.STORE_UNREACHABLE}),
}

#: The system's messages for a disk that is full, over quota, or broken.
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
_DISK_TEXTS = tuple(os.strerror(number) for number in sorted(DISK_ERRORS))

#: Introduces the first cause in the final message of a run.
FIRST_CAUSE = "first cause: "


def first_cause(conditions: Sequence[Condition]) -> Condition | None:
    """The condition, among those that hold, that was raised first."""
    return min((one for one in conditions if one.holds), key=lambda one: one.since, default=None)


def consequence(sentence: str, error: str, conditions: Sequence[Condition]) -> str:
    """The final message of a failed run; if the failure followed from lost safety, it ends with the first cause.

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
    # A truncated history stays truncated: the condition may date from an earlier time at which the disk was full.
    cause = first_cause([one for one in possible if not one.kind.is_permanent]) or first_cause(possible)
    if cause is None or FIRST_CAUSE in sentence:
        return sentence
    return f"{sentence}; {FIRST_CAUSE}{cause.sentence}"
