"""The public history of a run (`wsp.md` §7): the actions of each process, for independent verification.

Every event name and its fields are defined once, as a method of `HistoryWriter`; processes call these, the checker of
`hetpipe.checker` reads the lines. An event is written before anything that depends on it is sent, so a line that lacks
was not done.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import HistoryIncomplete
from hetpipe.observe.down_sampled import Reduction
from hetpipe.observe.line_file import LineFile
from hetpipe.observe.segments import SEGMENT_BYTES, read_lines

#: The type of a field.
Value = int | float | str | Sequence[int] | Sequence[float] | Sequence[str]

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class HistoryWriter(Protocol):
    """Writer of events, in the order in which they happen. Implementations are thread-safe."""

    def write(self, event: str, **fields: Value) -> None:
        """Record one event. Prefer the methods below, which define the names of the fields."""
        ...

    def position(self) -> int:
        """The position of the next event; only for `since`."""
        return 0

    def since(self, position: int) -> Iterator[tuple[str, dict[str, Value]]]:
        """The events from a position on, with their fields: those of the current term, of any process."""
        yield from ()

    def on_alarm(self, listener: Callable[[HistoryIncomplete], None]) -> None:
        """Call `listener` once, when the first event is lost; for histories on a disk."""
        del listener

    def forward(  # noqa: PLR0913 - one for each field of the line
        self,
        *,
        vw: int,
        incarnation: int,
        stage: int,
        p: int,
        clock: int,
        local_through: int,
        version: int = 0,
        frozen: int = 0,
        inactive: Sequence[int] = (),
    ) -> None:
        """A stage begins the forward of minibatch p on w^(`clock`) and own updates through `local_through`.

        `clock` is W*(p), `local_through` is v_i(p) of this stage: where the policy predicts, of the weights that it
        predicts from. `version` is that of its virtual worker's plan, by which its layers are those of this stage;
        `frozen` is F, the number of frozen layers with trainable parameters. `inactive` are the stage's own layers that
        it leaves out; a line without the field leaves out none.
        """
        self.write(
            "forward",
            vw=vw,
            incarnation=incarnation,
            stage=stage,
            p=p,
            clock=clock,
            local_through=local_through,
            version=version,
            frozen=frozen,
            **_inactive(inactive),
        )

    def crossed(  # noqa: PLR0913 - one for each field of the line
        self,
        *,
        vw: int,
        incarnation: int,
        stage: int,
        p: int,
        cache: str,
        read: int,
        computed: Sequence[int],
        kept: bool,
        since: float,
        units: Sequence[str],
    ) -> None:
        """Minibatch p is behind the frozen layers of a stage that uses a cache.

        `cache` names the cache of its node. What enters layer `read` was read from it, unless that is 0. The layers
        `computed` [first, last) were computed, none if these are equal, and what enters layer `last` is `kept` in the
        cache, or not (1, 0). The cache was looked up after `since` (monotonic seconds). `units` are digests of what
        enters the model, as a whole or of each sample; none: no cache is asked for it. Not in a summary.
        """
        self.write(
            "crossed",
            vw=vw,
            incarnation=incarnation,
            stage=stage,
            p=p,
            cache=cache,
            read=read,
            computed=list(computed),
            kept=int(kept),
            since=since,
            units=list(units),
        )

    def backward(  # noqa: PLR0913 - one for each field of the line
        self,
        *,
        vw: int,
        incarnation: int,
        stage: int,
        p: int,
        clock: int,
        local_through: int,
        version: int = 0,
        frozen: int = 0,
        inactive: Sequence[int] = (),
    ) -> None:
        """A stage begins the backward of minibatch p.

        `clock` is W*(p) as in its forward, `local_through` the last own update in the weights that the backward reads:
        as in the forward, or the newest before p where the policy predicts. `version` and `frozen` as in the forward.
        A stage of frozen layers alone has no backwards.
        """
        self.write(
            "backward",
            vw=vw,
            incarnation=incarnation,
            stage=stage,
            p=p,
            clock=clock,
            local_through=local_through,
            version=version,
            frozen=frozen,
            **_inactive(inactive),
        )

    def step(
        self,
        *,
        vw: int,
        incarnation: int,
        stage: int,
        p: int,
        version: int = 0,
        frozen: int = 0,
        inactive: Sequence[int] = (),
    ) -> None:
        """A stage has made an update; p is the last minibatch whose gradient is in it.

        Written once per update, whether the stage has parameters or not: after every minibatch, after every group of
        `gradients.accumulate`, or once per wave, and after the last minibatch before a barrier; but not by a stage of
        frozen layers alone.
        """
        self.write(
            "step",
            vw=vw,
            incarnation=incarnation,
            stage=stage,
            p=p,
            version=version,
            frozen=frozen,
            **_inactive(inactive),
        )

    def skip(
        self,
        *,
        vw: int,
        incarnation: int,
        stage: int,
        p: int,
        scale: int,
        version: int = 0,
        frozen: int = 0,
        inactive: Sequence[int] = (),
    ) -> None:
        """A stage has skipped an update, in place of `step`: a gradient of some stage overflowed at this loss scale."""
        self.write(
            "skip",
            vw=vw,
            incarnation=incarnation,
            stage=stage,
            p=p,
            scale=scale,
            version=version,
            frozen=frozen,
            **_inactive(inactive),
        )

    def wave(  # noqa: PLR0913 - one for each field of the line
        self,
        *,
        vw: int,
        incarnation: int,
        stage: int,
        wave: int,
        first: int,
        last: int,
        first_clock: int,
        last_clock: int,
        version: int = 0,
        frozen: int = 0,
        inactive: Sequence[int] = (),
    ) -> None:
        """A stage has computed a wave of the minibatches `first` to `last`, whose W* are these; in a summary only."""
        self.write(
            "wave",
            vw=vw,
            incarnation=incarnation,
            stage=stage,
            wave=wave,
            first=first,
            last=last,
            first_clock=first_clock,
            last_clock=last_clock,
            version=version,
            frozen=frozen,
            **_inactive(inactive),
        )

    def wave_computed(
        self,
        *,
        vw: int,
        incarnation: int,
        stage: int,
        wave: int,
        p: int,
        version: int = 0,
        frozen: int = 0,
        inactive: Sequence[int] = (),
    ) -> None:
        """A stage has computed a wave, with the last minibatch p. No line, except for `wave` in a summary."""
        del vw, incarnation, stage, wave, p, version, frozen, inactive

    def memory(self, *, vw: int, incarnation: int, stage: int, p: int, policies: Sequence[str]) -> None:
        """From minibatch p on, the first of a wave, the layers of a stage have these memory policies.

        Written by each stage of a virtual worker whose policies the job's script changes, at its first minibatch and
        where the policies or the layers have changed.
        """
        self.write("memory", vw=vw, incarnation=incarnation, stage=stage, p=p, policies=list(policies))

    def staged(self, *, vw: int, incarnation: int, stage: int, wave: int, shard: int, slices: Sequence[int]) -> None:
        """A shard has acknowledged a stage's part of a wave; `slices` are indices into the plan's slices."""
        self.write("staged", vw=vw, incarnation=incarnation, stage=stage, wave=wave, shard=shard, slices=list(slices))

    def commit(self, *, vw: int, incarnation: int, wave: int, samples: int) -> None:
        """The clock shard has committed a wave of `samples` samples."""
        self.write("commit", vw=vw, incarnation=incarnation, wave=wave, samples=samples)

    def apply(self, *, shard: int, vw: int, incarnation: int, wave: int) -> None:
        """A shard has applied a committed wave."""
        self.write("apply", shard=shard, vw=vw, incarnation=incarnation, wave=wave)

    def publish(self, *, clock: int) -> None:
        """The clock shard publishes a clock; written once per clock, before any process sees it."""
        self.write("publish", clock=clock)

    def pull(self, *, shard: int, vw: int, stage: int, clock: int) -> None:
        """A stage has received its slices of a published clock from a shard."""
        self.write("pull", shard=shard, vw=vw, stage=stage, clock=clock)

    def evict(self, *, vw: int, incarnation: int, clock: int) -> None:
        """A virtual worker no longer counts, having committed `clock` waves."""
        self.write("evict", vw=vw, incarnation=incarnation, clock=clock)

    def handover(self, *, vw: int, incarnation: int, clock: int, whole: bool) -> None:
        """All of the state with which a virtual worker left at `clock` is written (1), or never will be (0).

        Written by the clock shard, once for each that leaves, unless its next incarnation comes first.
        """
        self.write("handover", vw=vw, incarnation=incarnation, clock=clock, whole=int(whole))

    def takeover(self, *, vw: int, incarnation: int, stage: int, clock: int, source: int, whole: bool) -> None:
        """A stage that joins at `clock` has the state of the virtual worker `source`, which left there (1).

        Or its own, as that one has not left it (0). Written by each stage that takes over, before it trains.
        """
        self.write(
            "takeover", vw=vw, incarnation=incarnation, stage=stage, clock=clock, source=source, whole=int(whole)
        )

    def join(
        self, *, vw: int, incarnation: int, clock: int, num_stages: int, minibatches_per_wave: int | None = None
    ) -> None:
        """A virtual worker of `num_stages` stages counts from the barrier at `clock` on, given its own N if any."""
        own = {} if minibatches_per_wave is None else {"minibatches_per_wave": minibatches_per_wave}
        self.write("join", vw=vw, incarnation=incarnation, clock=clock, num_stages=num_stages, **own)

    def plan(
        self, *, vw: int, incarnation: int, clock: int, version: int, bounds: Sequence[int], live: bool = False
    ) -> None:
        """From the barrier at `clock` on, stage k of a virtual worker has the layers [bounds[k], bounds[k + 1]).

        Written for each virtual worker that joins there, and where the version has changed, by the clock shard. With
        `live` from wave `clock` on, without a barrier; void if there is one at or below it.
        """
        own = {"live": True} if live else {}
        self.write("plan", vw=vw, incarnation=incarnation, clock=clock, version=version, bounds=list(bounds), **own)

    def waves(self, *, vw: int, clock: int, minibatches_per_wave: int, origin: int) -> None:
        """From the barrier at `clock` on a virtual worker has this N, and `origin` is its last minibatch before.

        Written at every barrier once N has changed.
        """
        self.write("waves", vw=vw, clock=clock, minibatches_per_wave=minibatches_per_wave, origin=origin)

    def freeze(self, *, clock: int, frozen: int, layers: int) -> None:
        """From the barrier at `clock` on, the first `layers` layers of the chain are frozen, F of them trainable.

        `frozen` is F. Written by the clock shard for each segment with frozen layers.
        """
        self.write("freeze", clock=clock, frozen=frozen, layers=layers)

    def activate(self, *, clock: int, inactive: Sequence[int], fresh: Sequence[int] = ()) -> None:
        """From the barrier at `clock` on, these layers of the chain are inactive, and those are built anew.

        Written by the clock shard for each segment of a run whose active layers change, or are not all.
        """
        anew = {"fresh": list(fresh)} if fresh else {}
        self.write("activate", clock=clock, inactive=list(inactive), **anew)

    def fresh(
        self, *, vw: int, incarnation: int, stage: int, clock: int, layers: Sequence[int], digests: Sequence[str]
    ) -> None:
        """A stage has built layers anew at the barrier at `clock`: their indices, and digests of what it has built.

        Written before its first minibatch there. All virtual workers have the same digests.
        """
        who = {"vw": vw, "incarnation": incarnation, "stage": stage}
        self.write("fresh", **who, clock=clock, layers=list(layers), digests=list(digests))

    def norms(self, *, clock: int, vw: int, layers: Sequence[int], squares: Sequence[float]) -> None:
        """The squared norms of a virtual worker's gradients that have decided F at the barrier at `clock`.

        Of each of `layers`, over its last wave that was not empty. Written before `freeze`, by the clock shard.
        """
        self.write("norms", clock=clock, vw=vw, layers=list(layers), squares=list(squares))

    def leave(self, *, vw: int, incarnation: int, clock: int) -> None:
        """A drained virtual worker stops counting at the barrier at `clock`; its waves before it count."""
        self.write("leave", vw=vw, incarnation=incarnation, clock=clock)

    def barrier(self, *, clock: int, reason: str) -> None:
        """A barrier is set at `clock`."""
        self.write("barrier", clock=clock, reason=reason)

    def used(self, *, vw: int, wave: int, epoch: int, indices: Sequence[int]) -> None:
        """The samples of a committed wave, as indices into the data set; written with its `commit`."""
        self.write("used", vw=vw, wave=wave, epoch=epoch, indices=list(indices))


class NullHistory(HistoryWriter):
    """Writes nothing."""

    def write(self, event: str, **fields: Value) -> None:
        """Without effect."""

    def close(self) -> None:
        """Nothing is open."""


class SummaryHistory(HistoryWriter):
    """A stage's history with one line per wave in place of those of its minibatches. For one thread.

    The line `wave` is written when the wave is computed, before it is pushed.
    """

    def __init__(self, history: HistoryWriter) -> None:
        """Write to `history`."""
        self._history = history
        #: Minibatch → W*, of those whose wave is not computed yet.
        self._clocks: dict[int, int] = {}

    def write(self, event: str, **fields: Value) -> None:
        """Implement `HistoryWriter.write`."""
        self._history.write(event, **fields)

    def forward(  # noqa: PLR0913 - one for each field of the line
        self,
        *,
        vw: int,
        incarnation: int,
        stage: int,
        p: int,
        clock: int,
        local_through: int,
        version: int = 0,
        frozen: int = 0,
        inactive: Sequence[int] = (),
    ) -> None:
        """Record the clock."""
        del vw, incarnation, stage, local_through, version, frozen, inactive
        self._clocks[p] = clock

    def crossed(  # noqa: PLR0913 - one for each field of the line
        self,
        *,
        vw: int,
        incarnation: int,
        stage: int,
        p: int,
        cache: str,
        read: int,
        computed: Sequence[int],
        kept: bool,
        since: float,
        units: Sequence[str],
    ) -> None:
        """Not in a summary."""

    def backward(  # noqa: PLR0913 - one for each field of the line
        self,
        *,
        vw: int,
        incarnation: int,
        stage: int,
        p: int,
        clock: int,
        local_through: int,
        version: int = 0,
        frozen: int = 0,
        inactive: Sequence[int] = (),
    ) -> None:
        """Included in the line of its wave."""

    def step(
        self,
        *,
        vw: int,
        incarnation: int,
        stage: int,
        p: int,
        version: int = 0,
        frozen: int = 0,
        inactive: Sequence[int] = (),
    ) -> None:
        """Included in the line of its wave."""

    def skip(
        self,
        *,
        vw: int,
        incarnation: int,
        stage: int,
        p: int,
        scale: int,
        version: int = 0,
        frozen: int = 0,
        inactive: Sequence[int] = (),
    ) -> None:
        """Included in the line of its wave."""

    def wave_computed(
        self,
        *,
        vw: int,
        incarnation: int,
        stage: int,
        wave: int,
        p: int,
        version: int = 0,
        frozen: int = 0,
        inactive: Sequence[int] = (),
    ) -> None:
        """Implement `HistoryWriter.wave_computed`."""
        own = sorted(each for each in self._clocks if each <= p)
        clocks = [self._clocks.pop(each) for each in own]
        self.wave(
            vw=vw,
            incarnation=incarnation,
            stage=stage,
            wave=wave,
            first=own[0],
            last=own[-1],
            first_clock=clocks[0],
            last_clock=clocks[-1],
            version=version,
            frozen=frozen,
            inactive=inactive,
        )


def _inactive(layers: Sequence[int]) -> dict[str, Sequence[int]]:
    """The field of a stage's line about layers that it leaves out; none where all are active."""
    return {"inactive": list(layers)} if layers else {}


def in_detail(history: HistoryWriter, detail: str) -> HistoryWriter:
    """The writer of a stage, with `full` detail or as a `summary`; `off` is a `NullHistory`."""
    return SummaryHistory(history) if detail == "summary" else history


class MemoryHistory(HistoryWriter):
    """Stores events as dictionaries with `event` first, for tests."""

    def __init__(self) -> None:
        self._events: list[dict[str, Value]] = []
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Value) -> None:
        """Store the event."""
        with self._lock:
            self._events.append({"event": event, **fields})

    def position(self) -> int:
        """Implement `HistoryWriter.position`."""
        return len(self._events)

    def since(self, position: int) -> Iterator[tuple[str, dict[str, Value]]]:
        """Implement `HistoryWriter.since`."""
        for entry in self.events[position:]:
            yield str(entry["event"]), {name: value for name, value in entry.items() if name != "event"}

    @property
    def events(self) -> list[dict[str, Value]]:
        """A copy of all events so far, oldest first."""
        with self._lock:
            return list(self._events)

    def of(self, event: str) -> list[dict[str, Value]]:
        """The events of one name."""
        return [entry for entry in self.events if entry["event"] == event]


class History(HistoryWriter):
    """Appends to a file, one unbuffered write per event, so that a killed process leaves whole lines only.

    Files are divided into segments; old ones are compressed. A failing disk ends the history and not the process
    (`LineFile`); the checker then reports it as incomplete.
    Within one `History` the times `t` never fall from line to line. Several processes or `History` objects may append
    to one file.
    """

    def __init__(
        self,
        path: Path,
        *,
        host: str,
        pid: int,
        role: str,
        term: int,
        clock: Clock = SYSTEM_CLOCK,
        segment_bytes: int = SEGMENT_BYTES,
        reduction: Reduction | None = None,
    ) -> None:
        """Open or create `path` and its folder.

        Args:
            path: of its first segment; the others are beside it.
            host: the process's address.
            pid: its id.
            role: its role.
            term: of the plan.
            clock: gives the times.
            segment_bytes: size above which a segment is closed and compressed.
            reduction: of compressed segments, for an index beside them; None: no index.

        Raises:
            OSError: the file cannot be opened, for another reason than a failing disk.
        """
        self._who = _encode({"host": host, "pid": pid, "role": role})[1:-1]
        self._clock = clock
        self._lock = threading.Lock()
        self._file = LineFile(path, segment_bytes=segment_bytes, reduction=reduction)
        self.term = term

    @property
    def term(self) -> int:
        """The term that the next lines carry; assign to it when a new plan takes effect."""
        return self._term

    @term.setter
    def term(self, term: int) -> None:
        with self._lock:
            self._term = term
            self._always = f'{self._who},"term":{term},"event":'

    def write(self, event: str, **fields: Value) -> None:
        """Append one line, unless the disk has failed.

        Raises:
            ValueError: a field is NaN or infinite, or the history is closed.
        """
        rest = "".join(
            # Most fields are plain integers, on the path of every minibatch.
            f',"{name}":{value if type(value) is int else _encode(value)}'
            for name, value in fields.items()
        )
        with self._lock:
            self._file.write(f'{{"t":{self._clock.monotonic():.6f},{self._always}"{event}"{rest}}}\n'.encode())

    @property
    def alarm(self) -> HistoryIncomplete | None:
        """The reason for missing lines; None while complete."""
        return self._file.alarm

    def on_alarm(self, listener: Callable[[HistoryIncomplete], None]) -> None:
        """Implement `HistoryWriter.on_alarm`; called from the writing thread, or now."""
        with self._lock:
            self._file.on_alarm(listener)

    def position(self) -> int:
        """Implement `HistoryWriter.position`."""
        with self._lock:
            return self._file.position

    def since(self, position: int) -> Iterator[tuple[str, dict[str, Value]]]:
        """Implement `HistoryWriter.since`. A line that a full disk cut is skipped."""
        for line in read_lines(self._file.path, position):
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            if fields.pop("term", None) == self._term:
                for name in ("t", "host", "pid", "role"):
                    fields.pop(name, None)
                yield fields.pop("event"), fields

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._file.close()
