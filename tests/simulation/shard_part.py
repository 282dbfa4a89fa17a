"""One shard as far as its promises go: the real `ShardState`, integers for tensors, and a disk.

A push is written down before it is acknowledged. Now and then the oldest clock that may still be pulled becomes a
snapshot, and what came before it is forgotten. A restarted shard begins there, stages again what was staged, and
follows the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.decide.sync.instructions import Apply, Close, Drop, Free, Initialize, Instruction, StageKey, stage_key
from hetpipe.decide.sync.records import Record
from hetpipe.decide.sync.shard_state import Admission, ClosedState, ShardState
from hetpipe.values.requests import PullHeader, PushHeader
from tests.simulation.disk import Disk
from tests.simulation.job import Job
from tests.simulation.promises import Promises, hold

Weights = tuple[int, ...]
"""Of each slice."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A clock with its weights, and the state at that moment."""

    closed: ClosedState
    weights: Weights


Push = tuple[PushHeader, Weights]


class ShardPart:
    """Stages, adds, serves and remembers."""

    def __init__(self, job: Job, index: int, promises: Promises) -> None:
        self._job = job
        self._promises = promises
        self.index = index
        self.disk: Disk[Snapshot, Push] = Disk(fsync=job.fsync)
        self._forget()

    def _forget(self) -> None:
        job = self._job
        self.state = ShardState(
            job_id=job.id,
            term=job.term,
            slices=job.slices[self.index],
            founders=job.members,
            start=job.progress.clock,
            staleness=job.d,
        )
        #: What is staged: key → slice → its part.
        self._staging: dict[StageKey, dict[int, int]] = {}
        self._versions: dict[int, Weights] = {}
        self._building: list[int] | None = None

    # -- calls -------------------------------------------------------------------------------------------------------

    def push(self, header: PushHeader, parts: Weights) -> Admission:
        """Stage a part of a wave; on return it will count if its wave does."""
        verdict, indices = self.state.admit(header)
        if verdict is Admission.ACCEPT:
            self._stage(header, indices, parts)
            self._write_down((header, parts))
        return verdict

    def pull(self, header: PullHeader) -> Weights:
        """Slices of a published clock."""
        self.state.check_request(header.requester)
        indices = self.state.slice_index.of(header.slices)
        self.state.check_pull(header.clock)
        weights = self._versions[header.clock]
        return tuple(weights[index] for index in indices)

    def follow(self, records: Sequence[Record]) -> None:
        """Carry out what the log decided."""
        for record in records:
            if record.index >= self.state.followed:
                self._carry_out(self.state.follow(record))
        self._check_bounds()

    @property
    def durable(self) -> int:
        """Records that it will not ask for again."""
        return 0 if self.disk.snapshot is None else self.disk.snapshot.closed.followed

    # -- crash and restart -------------------------------------------------------------------------------------------

    def take_snapshot(self) -> None:
        """Keep the oldest clock, and what may still be added to it."""
        if not self.state.alive:
            return
        oldest = min(self.state.alive)
        closed = self.state.closed(oldest)
        entries = [push for push in self.disk.entries if push[0].wave is not None and push[0].wave >= oldest]
        self.disk.replace(Snapshot(closed, self._versions[oldest]), entries)

    def restart(self) -> None:
        """Remember."""
        self._forget()
        snapshot = self.disk.snapshot
        if snapshot is not None:
            self.state.restore(snapshot.closed)
            self._versions = {snapshot.closed.built: snapshot.weights}
        for header, parts in self.disk.entries:
            indices = self.state.slice_index.of(header.slices)
            if self.state.restage(header, indices):
                self._staging.setdefault(stage_key(header), {}).update(zip(indices, parts, strict=True))
        self._carry_out(self.state.resume())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _write_down(self, push: Push) -> None:
        self.disk.append(push)

    def _stage(self, header: PushHeader, indices: tuple[int, ...], parts: Weights) -> None:
        self.state.staged_by(header, indices)
        staged = self._staging.setdefault(stage_key(header), {})
        hold(not staged.keys() & set(indices), f"P1: {header} is taken a second time")
        staged.update(zip(indices, parts, strict=True))

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Initialize(clock, key):
                    self._versions[clock] = self._take(key)
                    self._promises.close(self.index, clock, set(self._versions[clock]))
                case Apply(clock, key, is_empty, _):
                    if not is_empty:
                        base = self._building if self._building is not None else self._versions[clock - 1]
                        self._building = [a + b for a, b in zip(base, self._take(key), strict=True)]
                case Close(clock):
                    built = self._versions[clock - 1] if self._building is None else tuple(self._building)
                    self._building = None
                    self._versions[clock] = built
                    self._promises.close(self.index, clock, set(built))
                case Drop(key):
                    del self._staging[key]
                case Free(clock):
                    del self._versions[clock]

    def _take(self, key: StageKey) -> Weights:
        staged = self._staging.pop(key, {})
        count = len(self._job.slices[self.index])
        hold(len(staged) == count, f"P3: {key} counts on shard {self.index} with {len(staged)} of {count} slices")
        return tuple(staged[index] for index in range(count))

    def _check_bounds(self) -> None:
        """Memory that does not grow with the run."""
        d = self._job.d
        if d is None:
            return
        lives = len(self._job.members)
        ahead = d + 3
        hold(len(self._versions) <= 3 * ahead, f"shard {self.index} keeps the clocks {sorted(self._versions)}")
        waves = [key for key in self._staging if key[2] is not None]
        hold(len(waves) <= 2 * ahead * lives, f"shard {self.index} keeps the waves {waves}")
