"""A stage's pushes, one wave after the other: to every shard, then the report. What `server.shard.client` does."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError, StaleIncarnation, StaleTerm, Unavailable, WaveOutOfOrder
from hetpipe.values.ids import Clock, Wave
from hetpipe.values.requests import Blocks
from tests.simulation.job import push_header, requester

if TYPE_CHECKING:
    from tests.simulation.stage import Stage


@dataclass(frozen=True, slots=True)
class _Wave:
    wave: int
    segment: int
    blocks: Blocks | None
    is_empty: bool


class Pusher:
    """The queue of one stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._queue: deque[_Wave] = deque()
        self._is_busy = False

    def push_initial_weights(self) -> None:
        """Stage w_0, which is zero, and report it."""
        who = self._stage.requester
        self._to_shards(
            None,
            0,
            lambda: self._stage.ask(
                0,
                "initialized",
                lambda: self._stage.decide("initialized", who.vw, who.incarnation, who.stage),
                lambda _: None,
            ),
        )

    def push(self, wave: int, segment: int, blocks: Blocks | None, *, is_empty: bool) -> None:
        """Push a wave after all earlier ones, and report it."""
        self._queue.append(_Wave(wave, segment, blocks, is_empty))
        self._go_on()

    def push_in_term(self, term: int) -> None:
        """Push the wave that comes next as if it were another term; with other bytes."""
        stage = self._stage
        wave = self._queue[0].wave if self._queue else stage.next_wave
        who = requester(stage.job.id, stage.vw, stage.incarnation, stage.index, term)
        part = stage.world.promises.witness(stage.vw, -1, wave)
        for shard in stage.job.slices:
            slices = stage.headers(shard)
            header, server = push_header(who, wave, slices), stage.world.servers[shard]
            with contextlib.suppress(StaleTerm, StaleIncarnation, Unavailable):
                if slices and server.is_reachable:
                    server.push(header, (part,) * len(slices))

    def _go_on(self) -> None:
        if self._is_busy or not self._queue:
            return
        self._is_busy = True
        wave, stage = self._queue[0], self._stage
        if wave.is_empty:
            self._report()
        else:
            part = stage.world.promises.witness(stage.vw, stage.incarnation, wave.wave)
            self._to_shards(wave.wave, part, self._report)

    def _to_shards(self, wave: int | None, part: int, then: Callable[[], None]) -> None:
        stage = self._stage
        headers = {shard: stage.headers(shard) for shard in stage.job.slices}
        wanted = {shard for shard, slices in headers.items() if slices}

        def staged(shard: int) -> None:
            wanted.discard(shard)
            if not wanted:
                then()

        for shard in sorted(wanted):
            self._push(shard, wave, part, staged)

    def _push(self, shard: int, wave: int | None, part: int, staged: Callable[[int], None]) -> None:
        stage = self._stage
        slices = stage.headers(shard)
        header, server = push_header(stage.requester, wave, slices), stage.world.servers[shard]
        parts = (part,) * len(slices)
        stage.ask(shard, f"push {wave}", lambda: server.push(header, parts), lambda _: staged(shard))

    def _report(self) -> None:
        stage, wave = self._stage, self._queue[0]
        who = stage.requester
        stage.ask(
            0,
            f"staged {wave.wave}",
            lambda: stage.decide(
                "staged",
                who.vw,
                who.incarnation,
                Wave(wave.wave),
                who.stage,
                wave.blocks,
                segment=Clock(wave.segment),
            ),
            lambda _: self._reported(),
            self._refused,
        )

    def _reported(self) -> None:
        self._queue.popleft()
        self._is_busy = False
        self._go_on()

    def _refused(self, error: HetpipeError) -> None:
        if isinstance(error, WaveOutOfOrder) and self._queue[0].is_empty:
            self._reported()  # only an empty wave can be beyond a barrier that was set after it was sent
        else:
            self._stage.refused(f"staged {self._queue[0].wave}", error)
