"""Failpoints: named places at which a test makes a process die, stop, hang or fail. Disabled unless explicitly allowed.

`reach("push.after_stage")` marks a place of the table `POINTS`. It does nothing, in some tens of nanoseconds, until
`arm` is called. The environment variable `HETPIPE_FAILPOINTS` then defines the actions, as entries separated by
commas:

    NAME=ACTION[@HIT][;FILTER=VALUE]...     push.after_stage=kill@3;role=parameter_server;index=1

A process counts its visits to each place and acts at visit HIT (default: the first). Filters select processes: `role`,
`index` (shard), `node` (agent), `vw`, `stage` and `incarnation` (stage). Counts restart with the process;
`HETPIPE_FAILPOINTS_ONCE` names an existing folder in which an entry creates a marker file before it acts, so that it
acts once across restarts and a test can see which process was hit.

The variable alone is not sufficient: a service also needs `--allow-failpoints`, and refuses to start without it rather
than run with unwanted faults. Stages inherit both from their agent.

There is no action "duplicate": `drop` after the reply, at the sender, causes a resend of what has already arrived.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Generic, TypeVar

from hetpipe.errors import InjectedFault, PeerUnreachable, UserError

T = TypeVar("T")

#: Environment variable with the entries.
VARIABLE = "HETPIPE_FAILPOINTS"

#: Environment variable with the folder of the marker files.
ONCE_VARIABLE = "HETPIPE_FAILPOINTS_ONCE"

#: Option of services without which a set `VARIABLE` is an error.
OPTION = "--allow-failpoints"

#: The keys by which processes are selected.
FILTERS = ("role", "index", "node", "vw", "stage", "incarnation")


@dataclass(frozen=True, slots=True)
class Point:
    """A failpoint: the state when it is reached, and the roles that reach it."""

    meaning: str
    roles: tuple[str, ...]


_STAGE = ("stage",)
_SHARD = ("parameter_server",)
_EITHER_END = ("stage", "parameter_server")
_COORDINATOR = ("coordinator",)

#: All failpoints (`reliability.md`, section 2).
POINTS: Mapping[str, Point] = {
    "push.before_send": Point("a stage is about to send its part of a wave to a shard", _STAGE),
    "push.mid_stream": Point("the first chunk is sent (stage) or written (shard), the end is not", _EITHER_END),
    "push.after_last_chunk": Point("all chunks are sent (stage) or written (shard), nothing is staged", _EITHER_END),
    "push.after_stage": Point("the push is staged, its sender has no reply", _SHARD),
    "push.after_durable": Point("the push is in the write-ahead log, its sender has no reply", _SHARD),
    "push.after_apply": Point("a committed update is added, but not in the history", _SHARD),
    "push.after_reply": Point("the reply is sent (shard), or received but not processed (stage)", _EITHER_END),
    "pull.before_gate": Point("the first stage is about to choose the clock of a switch point", _STAGE),
    "pull.while_gated": Point("the first stage waits for a clock to be published", _STAGE),
    "pull.mid_stream": Point("the first chunk is sent (shard) or written (stage), the end is not", _EITHER_END),
    "pull.after_last_chunk": Point("all chunks are sent (shard) or written (stage), none is used", _EITHER_END),
    "commit.before_propose": Point("a wave is staged on all shards, its stage has not reported it", _STAGE),
    "commit.after_some_shards": Point("this shard has executed a commit, others possibly not", _SHARD),
    "commit.before_publish": Point("the publication of a clock is decided, but not recorded", _SHARD),
    "commit.after_publish": Point("a clock is published and in the history, not announced", _SHARD),
    "membership.lease_granted_not_recorded": Point("a member has its lease, but is not in the store", _COORDINATOR),
    "membership.recorded_not_published": Point("a member is in the store, not announced to jobs", _COORDINATOR),
    "membership.published_not_seen": Point(
        "a member is announced to jobs, the answer is not sent (coordinator) or not used (member)",
        ("coordinator", "parameter_server", "agent"),
    ),
    "membership.evict_decided_not_published": Point(
        "an eviction is decided, but not sent to the clock shard", _COORDINATOR
    ),
    "repartition.plan_computed": Point("a new plan is computed, the clock shard is not asked for it", _COORDINATOR),
    "repartition.requested": Point("the clock shard is asked for a new plan, its answer is not used", _COORDINATOR),
    "repartition.to_prepare": Point("a stage has read that it is to prepare a move, and has built nothing", _STAGE),
    "repartition.prepared": Point("a stage has reported that it is prepared, its layers stay as they are", _STAGE),
    "repartition.before_record": Point("the record that changes a plan is decided, but not persistent", _SHARD),
    "repartition.recorded": Point("the record that changes a plan is persistent, and not announced", _SHARD),
    "repartition.record_read": Point("a stage has read that its layers change, and has sent none", _STAGE),
    "repartition.layers_half_moved": Point("a stage has sent and received its layers, and is not rebuilt", _STAGE),
    "repartition.stage_built": Point("a stage has its new layers, and has computed nothing with them", _STAGE),
    "freezing.before_record": Point("a barrier behind which more layers are frozen is not persistent", _SHARD),
    "freezing.recorded": Point(
        "a barrier behind which more layers are frozen is persistent, and not announced", _SHARD
    ),
    "takeover.before_ready": Point("a stage that is to join is about to report that it is ready", _STAGE),
    "takeover.record_read": Point("a stage has read that it joins and takes over, and has no state", _STAGE),
    "takeover.state_written": Point("a stage that leaves has written its state, and has not reported it", _STAGE),
    "takeover.before_record": Point("what one that leaves hands over is decided, but not persistent", _SHARD),
    "takeover.recorded": Point("what one that leaves hands over is persistent, and not announced", _SHARD),
    "takeover.loaded": Point("a stage has loaded the state it takes over, and has computed nothing", _STAGE),
    "replacement.published": Point("the plan for fewer devices is on disk, not in force", _COORDINATOR),
    "replacement.not_kept": Point("the next incarnation is due, the clock shard does not have its plan", _COORDINATOR),
    "replacement.kept": Point("the clock shard has the new plan, no incarnation on it is admitted", _COORDINATOR),
    "replacement.admitted": Point("an incarnation of the new plan is admitted, no stage runs", _COORDINATOR),
    "replacement.not_settled": Point("the new plan's stages run, it is still only proposed", _COORDINATOR),
    "snapshot.temp_open": Point("the file of a snapshot is open under another name", _SHARD),
    "snapshot.half_written": Point("a snapshot is partly written", _SHARD),
    "snapshot.before_fsync": Point("a snapshot is written, possibly not on disk", _SHARD),
    "snapshot.before_rename": Point("a snapshot is on disk under another name", _SHARD),
    "snapshot.before_directory_fsync": Point("a snapshot is renamed, possibly not on disk", _SHARD),
    "snapshot.manifest_on_some_shards": Point("some shards have their part of a snapshot, others not", _SHARD),
    "snapshot.old_deleted": Point("the files that a newer snapshot replaces are deleted", _SHARD),
}


class Action(StrEnum):
    """The action at a failpoint."""

    KILL = "kill"
    """SIGKILL to this process."""
    STOP = "stop"
    """SIGSTOP to this process; the test sends SIGCONT."""
    HANG = "hang"
    """Block this thread; others continue, including heartbeats."""
    ERROR = "error"
    """Raise `InjectedFault`."""
    DROP = "drop"
    """Raise `PeerUnreachable`: the operation is complete, but its caller gets no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmedPoint:
    """A failpoint with its action: one entry of the environment variable."""

    name: str
    action: Action
    hit: int
    """The visit at which it acts, from 1."""
    filters: Mapping[str, str]
    mark: str
    """Name of its marker file."""

    def concerns(self, who: Mapping[str, str]) -> bool:
        """Whether it applies to this process."""
        return all(who.get(key) == value for key, value in self.filters.items())


def parse(text: str) -> tuple[ArmedPoint, ...]:
    """Parse the environment variable.

    Raises:
        UserError: it is malformed; the message names the entry and the reason.
    """
    return tuple(_parse_entry(position, entry.strip()) for position, entry in enumerate(text.split(",")))


def _parse_entry(position: int, entry: str) -> ArmedPoint:
    what, *filters = entry.split(";")
    name, _, deed = what.partition("=")
    action, at, hit = deed.partition("@")
    if name not in POINTS:
        raise _unreadable(entry, f"there is no failpoint {name!r}; they are {', '.join(POINTS)}")
    if action not in {*Action}:
        raise _unreadable(entry, f"{action!r} is not an action; they are {', '.join(Action)}")
    if at and not (hit.isascii() and hit.isdigit() and int(hit) > 0):
        raise _unreadable(entry, f"{hit!r} is not the number of a visit; write one from 1")
    chosen = {key: value for key, _, value in (each.partition("=") for each in filters)}
    for key, value in chosen.items():
        if key not in FILTERS or not value:
            raise _unreadable(entry, f"{key}={value} selects no process; write one of {', '.join(FILTERS)} and a value")
    return ArmedPoint(
        name=name, action=Action(action), hit=int(hit) if at else 1, filters=chosen, mark=f"{position}-{name}"
    )


def _unreadable(entry: str, why: str) -> UserError:
    return UserError(f"{VARIABLE} has a malformed entry {entry!r}: {why}")


class _Armed:
    """The armed failpoints of this process, and the number of visits to each failpoint. Thread-safe."""

    def __init__(self, armed_points: Iterable[ArmedPoint], who: Mapping[str, str], once: Path | None) -> None:
        self._armed_points = tuple(armed_points)
        self._who = who
        self._once = once
        self._lock = threading.Lock()
        self._hits: Counter[str] = Counter()

    def reach(self, name: str) -> None:
        with self._lock:
            self._hits[name] += 1
            hit = self._hits[name]
        for armed in self._armed_points:
            if armed.name == name and armed.hit == hit and self._is_first(armed):
                _act(armed)

    def _is_first(self, armed: ArmedPoint) -> bool:
        """Create the marker file; returns whether it was absent. Without a folder, every process is the first."""
        if self._once is None:
            return True
        try:
            descriptor = os.open(self._once / armed.mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        record = {"pid": os.getpid(), "point": armed.name, "action": armed.action, "hit": armed.hit, "who": self._who}
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(record) + "\n")
        return True


def _act(armed: ArmedPoint) -> None:
    match armed.action:
        case Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Action.STOP:
            # To this thread, which then does not continue before the process is stopped.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case Action.HANG:
            threading.Event().wait()
        case Action.ERROR:
            raise InjectedFault(f"failpoint {armed.name} raised this error, by {VARIABLE}")
        case Action.DROP:
            raise PeerUnreachable(f"failpoint {armed.name} dropped the reply, by {VARIABLE}")


_armed: _Armed | None = None


def reach(name: str) -> None:
    """Visit the failpoint `name` of `POINTS`.

    Raises:
        InjectedFault, PeerUnreachable: injected by a test.
    """
    if _armed is not None:
        _armed.reach(name)


@dataclass(frozen=True, slots=True)
class _Passing(Generic[T]):
    """Chunks with failpoints after the first and the last one, on each iteration."""

    operation: str
    chunks: Iterable[T]

    def __iter__(self) -> Iterator[T]:
        for position, chunk in enumerate(self.chunks):
            yield chunk
            if position == 0:
                reach(f"{self.operation}.mid_stream")
        reach(f"{self.operation}.after_last_chunk")


def passing(operation: str, chunks: Iterable[T]) -> Iterable[T]:
    """`chunks`, with `OPERATION.mid_stream` after the first one and `OPERATION.after_last_chunk` after the last."""
    return chunks if _armed is None else _Passing(operation, chunks)


def arm(environment: Mapping[str, str], *, is_allowed: bool, **who: str | int | None) -> None:
    """Activate the failpoints of the environment in this process. Call once, at its start.

    Args:
        environment: environment of the process.
        is_allowed: whether failpoints are enabled for this process.
        who: this process, by the names in `FILTERS`; None for names that do not apply.

    Raises:
        UserError: failpoints are set and not enabled, or the variables are malformed.
    """
    global _armed  # noqa: PLW0603 - one process, one switch: what is off must cost nothing
    text = environment.get(VARIABLE, "")
    if not text:
        return
    if not is_allowed:
        raise UserError(
            f"{VARIABLE} is set, which makes processes fail on purpose; unset it, or give {OPTION} if that is intended"
        )
    named = environment.get(ONCE_VARIABLE, "")
    once = Path(named) if named else None
    if once is not None and not once.is_dir():
        raise UserError(f"{ONCE_VARIABLE} names {once}, which is not a folder; create it first")
    known = {name: str(value) for name, value in who.items() if value is not None}
    armed_points = [armed for armed in parse(text) if armed.concerns(known)]
    _armed = _Armed(armed_points, known, once) if armed_points else None


def disarm() -> None:
    """Deactivate all failpoints; for tests."""
    global _armed  # noqa: PLW0603 - see `arm`
    _armed = None
