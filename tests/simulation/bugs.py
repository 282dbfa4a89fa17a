"""Bugs that somebody could make, switched on one at a time by tests: does the simulation see them?

Each is a patch of the real machines or of the rule of their shells, named as in the table of `docs/reliability.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from hetpipe.decide.sync import decision_log, shard_state
from hetpipe.decide.sync.decision_log import DecisionLog
from hetpipe.decide.sync.gate import Gate
from hetpipe.decide.sync.records import BarrierRecord, CommitRecord, EvictRecord, InitializeRecord, Record
from hetpipe.decide.sync.segment import EVICT
from hetpipe.decide.sync.shard_state import ShardState
from hetpipe.errors import StaleIncarnation
from hetpipe.values.ids import Clock, Incarnation
from tests.simulation.clock_part import ClockPart
from tests.simulation.disk import Disk
from tests.simulation.network import Weather
from tests.simulation.pusher import Pusher
from tests.simulation.server import Server
from tests.simulation.setting import Setting
from tests.simulation.stage import Stage

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug."""

    what: str
    """In words, with its number in `reliability.md` where it has one."""
    patch: Patch
    seed: int
    """A history that shows it."""
    suits: Callable[[Setting], Setting] = lambda setting: setting
    """Makes a setting one in which it can show, where few are."""


def _no_incarnation(patch: pytest.MonkeyPatch) -> None:
    original = ShardState.follow

    def follow(self: ShardState, record: Record) -> Any:
        if isinstance(record, InitializeRecord | CommitRecord | EvictRecord):
            record = replace(record, incarnation=Incarnation(0))
        return original(self, record)

    patch.setattr(shard_state, "stage_key", lambda h: (h.requester.vw, Incarnation(0), h.wave))
    patch.setattr("tests.simulation.shard_part.stage_key", lambda h: (h.requester.vw, Incarnation(0), h.wave))
    patch.setattr(ShardState, "_check_life", lambda *_: None)
    patch.setattr(ShardState, "follow", follow)


def _staged_only_in_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardState, "restage", lambda *_: True)


def _answered_before_written(patch: pytest.MonkeyPatch) -> None:
    late: dict[int, list[object]] = {}
    crash = Server.crash

    def append(self: Disk[Any, Any], entry: object) -> None:
        self.entries.extend(late.get(id(self), []))
        late[id(self)] = [entry]

    def crash_and_forget(self: Server, *, power: bool = False) -> None:
        late.pop(id(self.shard.disk), None)
        crash(self, power=power)

    def append_push(self: Any, push: object) -> None:
        append(self.disk, push)

    patch.setattr("tests.simulation.shard_part.ShardPart._write_down", append_push)
    patch.setattr(Server, "crash", crash_and_forget)


def _answered_before_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Disk, "append", lambda self, entry: self.entries.append(entry))


def _events_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClockPart, "_write_down", lambda self, event: self.disk.entries.append(event))


def _folder_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The log before a snapshot is deleted, though after a power cut the old snapshot may be back."""
    lose_power = Disk.lose_power
    older: dict[int, object] = {}
    put = Disk.replace

    def put_unsynced(self: Disk[Any, Any], snapshot: object, entries: list[Any]) -> None:
        older[id(self)] = self.snapshot
        put(self, snapshot, entries)

    def lose(self: Disk[Any, Any], chance: Any) -> int:
        if id(self) in older:
            self.snapshot = older.pop(id(self))
        return lose_power(self, chance)

    patch.setattr(Disk, "replace", put_unsynced)
    patch.setattr(Disk, "lose_power", lose)
    patch.setattr("hetpipe.durable.sync_dir", lambda _: None)  # of the real log


def _gate_off_by_one(patch: pytest.MonkeyPatch) -> None:
    original = Gate.required

    def required(self: Gate, p: int) -> Clock:
        staleness = self.sync.staleness
        return original(
            replace(self, sync=replace(self.sync, staleness=None if staleness is None else staleness + 1)), p
        )

    patch.setattr(Gate, "required", required)


def _commit_off_by_one(patch: pytest.MonkeyPatch) -> None:
    original = Gate.may_commit
    patch.setattr(Gate, "may_commit", lambda self, wave, published: original(self, wave - 1, published))


def _dead_in_the_minimum(patch: pytest.MonkeyPatch) -> None:
    original = DecisionLog._evict_member

    def evict_member(self: DecisionLog, vw: Any, member: Any) -> None:
        original(self, vw, member)
        self.members[vw] = member

    patch.setattr(DecisionLog, "_evict_member", evict_member)


def _minimum_of_nothing(patch: pytest.MonkeyPatch) -> None:
    clock = property(lambda self: min(member.committed for member in self.members.values()))
    patch.setattr(DecisionLog, "global_clock", clock)


def _old_term_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardState, "_check_term", lambda *_: None)


def _reported_after_the_first_shard(patch: pytest.MonkeyPatch) -> None:
    original = Pusher._to_shards

    def to_shards(self: Pusher, wave: int | None, part: int, then: Callable[[], None]) -> None:
        original(self, wave, part, lambda: None)
        then()

    patch.setattr(Pusher, "_to_shards", to_shards)


def _published_before_all_shards(patch: pytest.MonkeyPatch) -> None:
    original = DecisionLog.acknowledge

    def acknowledge(self: DecisionLog, shard: Any, num_records: int, durable: int | None = None) -> Any:
        self.acknowledged = [max(count, num_records) for count in self.acknowledged]
        return original(self, shard, num_records, durable)

    patch.setattr(DecisionLog, "acknowledge", acknowledge)


def _clock_begins_again(patch: pytest.MonkeyPatch) -> None:
    original = ClockPart.restart

    def restart(self: ClockPart) -> None:
        self.disk.snapshot = None
        self.disk.entries.clear()
        original(self)

    patch.setattr(ClockPart, "restart", restart)


def _rejoins_below(patch: pytest.MonkeyPatch) -> None:
    original = DecisionLog._cross

    def cross(self: DecisionLog) -> None:
        before = set(self.members)
        original(self)
        for vw in set(self.members) - before:
            self.members[vw].committed = Clock(max(0, self.members[vw].committed - 1))

    patch.setattr(DecisionLog, "_cross", cross)


def _holds_not_written(patch: pytest.MonkeyPatch) -> None:
    original = ClockPart._write_down

    def write_down(self: ClockPart, event: Any) -> None:
        if event[0] != "hold":
            original(self, event)

    patch.setattr(ClockPart, "_write_down", write_down)


def _eviction_takes_back(patch: pytest.MonkeyPatch) -> None:
    original = ShardState._evict

    def evict(self: ShardState, record: EvictRecord) -> Any:
        for key in [key for key in self._committed if key[0] == record.vw]:
            self._committed[key] = True
        return original(self, record)

    patch.setattr(ShardState, "_evict", evict)


def _held_clock_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decision_log, "retained", lambda *_args, published, **_: (published,))


def _old_barrier_drops(patch: pytest.MonkeyPatch) -> None:
    original = ShardState.follow

    def follow(self: ShardState, record: Record) -> Any:
        found = original(self, record)
        if isinstance(record, BarrierRecord):
            found = self._drop([k for k in self.staged if k[2] is not None and k[2] >= record.clock]) + found
        return found

    patch.setattr(ShardState, "follow", follow)


def _report_of_any_segment(patch: pytest.MonkeyPatch) -> None:
    original = DecisionLog.staged

    def staged(self: DecisionLog, *args: Any, segment: Clock) -> Any:
        return original(self, *args, segment=self.segment.start)

    patch.setattr(DecisionLog, "staged", staged)


def _stop_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = DecisionLog._set_barrier

    def set_barrier(self: DecisionLog, reason: str, planned: tuple[str, ...]) -> None:
        if reason == EVICT:
            self.asked = (EVICT,)
            self.most_switched = max((member.last_switch for member in self.members.values()), default=0)
        original(self, reason, planned)

    patch.setattr(DecisionLog, "_set_barrier", set_barrier)


def _next_barrier_for_own(patch: pytest.MonkeyPatch) -> None:
    def end_of_segment(self: Stage) -> int | None:
        barrier = self.log.barrier
        return None if barrier is None or self.segment is None else barrier.clock

    patch.setattr(Stage, "end_of_segment", end_of_segment)


def _dealt_among_survivors(patch: pytest.MonkeyPatch) -> None:
    original = Stage._on_progress

    def on_progress(self: Stage, answer: object) -> None:
        assert self.segment is not None
        whole = self.segment
        left = tuple(m for m in whole.members if m.vw in self.log.members)
        self.segment = replace(whole, members=left)
        original(self, answer)
        self.segment = whole

    patch.setattr(Stage, "_on_progress", on_progress)


def _records_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = DecisionLog._forget

    def forget(self: DecisionLog) -> None:
        durable, self.durable = self.durable, [self.num_records] * len(self.durable)
        original(self)
        self.durable = durable

    patch.setattr(DecisionLog, "_forget", forget)


def _serves_before_it_knows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Server, "_check_ready", lambda _: None)


def _stranger_for_good(patch: pytest.MonkeyPatch) -> None:
    original = ShardState._check_life

    def check_life(self: ShardState, requester: Any) -> None:
        if requester.incarnation > self._lives.get(requester.vw, -1):
            raise StaleIncarnation("nobody knows it")
        original(self, requester)

    patch.setattr(ShardState, "_check_life", check_life)


def _leaver_in_the_minimum(patch: pytest.MonkeyPatch) -> None:
    original = DecisionLog._cross

    def cross(self: DecisionLog) -> None:
        original(self)
        self.members |= self.leavers

    patch.setattr(DecisionLog, "_cross", cross)


def _leaver_not_awaited(patch: pytest.MonkeyPatch) -> None:
    def global_clock(self: DecisionLog) -> Clock:
        staying = [member.committed for vw, member in self.members.items() if vw not in self.leaving]
        return min(staying, default=max(self.slowest, self.published))

    patch.setattr(DecisionLog, "global_clock", property(global_clock))


def _leaver_refused(patch: pytest.MonkeyPatch) -> None:
    def staged_late(self: DecisionLog, vw: Any, wave: Any) -> Any:
        raise StaleIncarnation(f"virtual worker {vw} has left")

    patch.setattr(DecisionLog, "_staged_late", staged_late)


def _as(setting: Setting, job: Mapping[str, object], **changes: Any) -> Setting:
    """A setting of one stage for each virtual worker, with this job and nothing drawn that could be in the way."""
    least = {"workers.count": 2, "sync.minibatches_per_wave": 1, "batch_size": 1, "checkpoint.every_waves": None}
    kept = {key: value for key, value in setting.job.items() if key.startswith("survive.")}
    numbers = {**least, **job}
    count = numbers["workers.count"]
    assert isinstance(count, int)
    numbers |= {"workers.stages": 1, "parameter_servers.count": changes.get("num_shards", 1)}
    values = {"num_shards": 1, "num_agents": count, "num_devices": 1, "weather": Weather(), "often": 0.3, **changes}
    return replace(setting, job={**kept, **numbers}, **values)


def _with_late_copies(setting: Setting) -> Setting:
    """Evictions, which set barriers early and deal samples again, and calls that are repeated long after."""
    job = {"weights": "flush", "sync.D": 0, "epochs": 4}
    weather = Weather(duplication=0.5, slowness=2, lateness=40)
    return _as(setting, job, samples=3, weather=weather, faults={"orphan_stages": 1.0, "kill_stage": 1.0})


def _with_endless_staleness(setting: Setting) -> Setting:
    """D = ∞, a stop and evictions."""
    job = {"workers.count": 3, "weights": "wave", "sync.kind": "asp", "epochs": 2}
    return _as(setting, job, faults={"stop": 1.0, "orphan_stages": 2.0, "kill_stage": 2.0, "pause_stage": 1.0})


def _with_slow_readers(setting: Setting) -> Setting:
    """Clocks that are required, not chosen; a worker that dies and another one far ahead of it."""
    job = {"weights": "flush", "sync.D": 1, "sync.deterministic": True, "epochs": 1}
    faults = {"kill_stage": 1.0, "orphan_stages": 1.0}
    return _as(setting, job, samples=16, weather=Weather(loss=0.1), faults=faults)


def _with_dying_shards(setting: Setting) -> Setting:
    """Shards that restart again and again on a slow network, many waves after their latest snapshot."""
    job = {"weights": "wave", "sync.D": 0, "epochs": 1}
    faults = {"kill_shard": 1.0, "kill_before_answer": 1.0, "cut_shard": 1.0}
    numbers = {"samples": 120, "num_shards": 3, "snapshots": 0.02, "steps": 120, "often": 0.2}
    return _as(setting, job, weather=Weather(slowness=2), faults=faults, **numbers)


def _with_leavers(setting: Setting) -> Setting:
    """Virtual workers that are asked to leave, and answers that are lost."""
    job = {"weights": "wave", "sync.D": 1, "epochs": 2, "workers.count": 3}
    faults = {"drain": 2.0, "add": 2.0}
    return _as(setting, job, samples=12, weather=Weather(loss=0.2, slowness=3), faults=faults, often=0.5)


def _with_many_segments(setting: Setting) -> Setting:
    """A segment for every three waves, on a bad network, and lives that end when it begins."""
    job = {"weights": "wave", "sync.kind": "asp", "epochs": 2, "workers.count": 3, "checkpoint.every_waves": 3}
    faults = {"kill_stage": 2.0, "pause_stage": 1.0, "cut_shard": 2.0}
    weather = Weather(loss=0.1, slowness=10)
    return _as(setting, job, samples=36, weather=weather, faults=faults, often=0.5, bursts=(1, 2))


BUGS: dict[str, Bug] = {
    "no-incarnation": Bug("1: the key of staged waves lacks the incarnation", _no_incarnation, 12),
    "staged-in-memory": Bug("2: staged waves are recorded in memory only", _staged_only_in_memory, 3),
    "answered-before-written": Bug("3: a push is acknowledged before it is logged", _answered_before_written, 3),
    "answered-before-synced": Bug("3: with fsync, acknowledged before it is synced", _answered_before_synced, 6),
    "events-not-synced": Bug("3: the same, of the events of the decision log", _events_not_synced, 6),
    "gate-off-by-one": Bug("4: D off by one in the gate", _gate_off_by_one, 4),
    "commit-off-by-one": Bug("4: D off by one in the commit rule", _commit_off_by_one, 24),
    "dead-in-minimum": Bug("5: an evicted worker stays in the minimum", _dead_in_the_minimum, 0),
    "minimum-of-nothing": Bug("6: the minimum over no members", _minimum_of_nothing, 0),
    "old-term": Bug("7: a request of an old term is accepted", _old_term_taken, 9),
    "folder-not-synced": Bug("8: a snapshot is renamed without fsync of its folder", _folder_not_synced, 6),
    "reported-early": Bug("10: a wave is reported before all shards have it", _reported_after_the_first_shard, 0),
    "published-early": Bug("10: a clock is published before all shards have it", _published_before_all_shards, 0),
    "clock-begins-again": Bug("13: the log restarts at zero in the same term", _clock_begins_again, 3),
    "rejoins-below": Bug("16: a new incarnation starts below the global clock", _rejoins_below, 0),
    "hold-not-written": Bug("granted clocks are not logged", _holds_not_written, 6),
    "eviction-takes-back": Bug("an eviction drops committed waves", _eviction_takes_back, 111),
    "held-clock-freed": Bug("a clock is freed while it is held", _held_clock_freed, 5),
    "old-barrier-drops": Bug("a restarted shard replays an old barrier and drops new pushes", _old_barrier_drops, 18),
    "report-of-any-segment": Bug(
        "a late report counts in the next segment", _report_of_any_segment, 3, _with_late_copies
    ),
    "stop-forgotten": Bug("an eviction discards a pending stop request", _stop_forgotten, 3, _with_endless_staleness),
    "next-barrier": Bug(
        "a stage treats the next segment's barrier as its own", _next_barrier_for_own, 4, _with_slow_readers
    ),
    "dealt-among-survivors": Bug(
        "samples are divided among the survivors only", _dealt_among_survivors, 10, _with_many_segments
    ),
    "records-forgotten": Bug("records that a restarted shard needs are deleted", _records_forgotten, 12),
    "serves-early": Bug(
        "a restarted shard serves before it has caught up", _serves_before_it_knows, 1, _with_dying_shards
    ),
    "leaver-in-minimum": Bug("a worker that has left stays in the minimum", _leaver_in_the_minimum, 9),
    "leaver-not-awaited": Bug("the barrier does not wait for the last wave of a leaver", _leaver_not_awaited, 32),
    "leaver-refused": Bug("a leaver is rejected when it retries a report", _leaver_refused, 5, _with_leavers),
    "stranger-for-good": Bug("a shard rejects a worker that has just joined", _stranger_for_good, 0),
}

#: Bugs that storms detect as well → the seed of a storm that does; the others are rare in storms.
IN_STORMS: dict[str, int] = {
    "answered-before-synced": 13,
    "answered-before-written": 3,
    "clock-begins-again": 3,
    "commit-off-by-one": 12,
    "dead-in-minimum": 3,
    "events-not-synced": 13,
    "eviction-takes-back": 11,
    "folder-not-synced": 16,
    "gate-off-by-one": 1,
    "held-clock-freed": 4,
    "hold-not-written": 8,
    "leaver-in-minimum": 5,
    "leaver-not-awaited": 6,
    "minimum-of-nothing": 0,
    "no-incarnation": 8,
    "old-barrier-drops": 8,
    "old-term": 8,
    "published-early": 1,
    "records-forgotten": 3,
    "rejoins-below": 3,
    "reported-early": 1,
    "serves-early": 234,
    "staged-in-memory": 3,
    "stranger-for-good": 9,
}
