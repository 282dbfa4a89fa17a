"""A second simulator, written on `simpy` from the design pages alone: it judges `hetpipe.decide.simulator`.

It imports nothing of hetpipe. Rules: `wsp.md` §2 (gate), §3 (switch points), §4 (push, commit, apply, publish) and
`policies.md` (S_i, orders). Every stage, flow and shard is a process.

One instant has three parts, which are simpy's priorities: what ends (1), then the clock shard commits and publishes
(2), then stages decide (3).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import simpy

from tests.decide.simulator.case import Case
from tests.decide.simulator.oracle_formulas import (
    decided,
    ends_filling,
    is_switch,
    most_in_flight,
    picoseconds,
    worth_fetching,
)
from tests.decide.simulator.oracle_network import Flow, Happening, Instants, Network, Process

SETTLE, DECIDE = 2, 3


@dataclass(frozen=True, slots=True)
class OracleRun:
    """What a run came to."""

    happened: list[Happening]
    """Sorted."""
    max_distance: int
    """Most waves that one virtual worker had committed more than another."""
    waited: list[int]
    """Picoseconds that each first stage wanted a clock that was not published."""
    idle: list[list[int]]
    """Picoseconds that each stage had nothing to compute."""


def run_oracle(case: Case) -> OracleRun:
    """Everything that happens in `case`."""
    job = Job(case)
    job.env.run()
    assert job.clock.published == -(-case.of(0).minibatches // case.of(0).n), (
        "the run ended before its last wave was published"
    )
    return OracleRun(
        happened=sorted(job.happened),
        max_distance=job.clock.max_distance,
        waited=[stages[0].lost["waiting"] for stages in job.stages],
        idle=[[stage.lost["idle"] for stage in stages] for stages in job.stages],
    )


class Job:
    """Everything together."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.env = Instants()
        self.happened: list[Happening] = []
        self.network = Network(self.env, case, self.happened)
        self.chosen: list[dict[int, int]] = [{} for _ in case.workers]
        self.clock = ClockShard(self)
        self.stages = [[Stage(self, vw, i) for i in range(len(stages))] for vw, stages in enumerate(case.workers)]
        for stages in self.stages:
            for upper, lower in itertools.pairwise(stages):
                size = case.output_bytes[upper.place.last - 1]
                nodes = upper.place.node, lower.place.node
                upper.down = Flow(self.network, ("activations", upper.vw, upper.i, -1), nodes, size)
                lower.up = Flow(self.network, ("gradients", lower.vw, lower.i, -1), nodes[::-1], size)


class ClockShard:
    """Commits and publishes; the shards add what is committed."""

    def __init__(self, job: Job) -> None:
        self.job, self.env, case = job, job.env, job.case
        self.published = self.max_distance = 0
        self.committed = [0] * len(case.workers)
        self.staged: dict[tuple[int, int], int] = {}
        self.applied = [0] * len(case.shards)
        """Updates added, wave after wave in the order of virtual workers."""
        self.known = [0] * len(case.shards)
        """Of these, those whose exchange is over, so that a clock may be published for them."""
        sizes = [0] * len(case.shards)
        for layer, shard in enumerate(case.shard_of_layer):
            sizes[shard] += case.parameter_bytes[layer]
        self.apply_time = [picoseconds(1000 * size / case.apply_bytes_per_second) for size in sizes]
        self.exchange_time = picoseconds(1000 * case.exchange_seconds)
        self.bells = [self.env.event() for _ in case.shards]
        self.changed = self.env.event()
        self.env.process(self.decide())
        for shard in range(len(case.shards)):
            self.env.process(self.apply(shard))

    def change(self) -> None:
        if not self.changed.triggered:
            self.changed.succeed()

    def report(self, vw: int, wave: int) -> None:
        self.staged[vw, wave] = self.staged.get((vw, wave), 0) + 1
        self.change()

    def decide(self) -> Process:
        num_workers = len(self.committed)
        while True:
            yield self.changed
            self.changed = self.env.event()
            yield self.env.at_priority(SETTLE)
            self.commit()
            while self.updates_there() >= (self.published + 1) * num_workers:
                self.published += 1
                now = self.env.instant
                self.job.happened.append(("publish", -1, -1, -1, self.published, now, now))
                for stages in self.job.stages:
                    for stage in stages:
                        stage.ring()
                        stage.hear()
                self.commit()

    def commit(self) -> None:
        case = self.job.case
        for vw, wave in sorted(self.staged):
            whole = self.staged[vw, wave] == len(case.workers[vw])
            free = case.staleness is None or self.published >= wave - case.staleness
            if wave == self.committed[vw] and whole and free:
                self.committed[vw] += 1
        self.max_distance = max(self.max_distance, max(self.committed) - min(self.committed))
        for shard, bell in enumerate(self.bells):
            while self.apply_time[shard] == 0 and self.has_due(shard):
                self.applied[shard] += 1
                self.known[shard] += 1
            if not bell.triggered:
                bell.succeed()

    def updates_there(self) -> int:
        """Updates that all shards are known to have added; without shards those that are committed, wave after wave."""
        return min(self.known, default=min(self.committed) * len(self.committed))

    def has_due(self, shard: int) -> bool:
        wave, vw = divmod(self.applied[shard], len(self.committed))
        return self.committed[vw] > wave

    def apply(self, shard: int) -> Process:
        while True:
            while self.has_due(shard):
                yield self.env.timeout(self.apply_time[shard])
                self.applied[shard] += 1
                self.env.process(self.exchange(shard))
            self.bells[shard] = self.env.event()
            yield self.bells[shard]

    def exchange(self, shard: int) -> Process:
        if self.exchange_time:
            yield self.env.timeout(self.exchange_time)
        self.known[shard] += 1
        self.change()


class Stage:
    """One stage: looks, computes, sends; pushes and pulls go on beside it."""

    def __init__(self, job: Job, vw: int, i: int) -> None:
        self.job, self.env, self.case, self.vw, self.i = job, job.env, job.case.of(vw), vw, i
        case, self.place, self.k = self.case, job.case.workers[vw][i], len(job.case.workers[vw])
        layers = range(self.place.first, self.place.last)
        forward = sum(picoseconds(case.forward_ms[self.place.kind][x]) for x in layers)
        backward = sum(picoseconds(case.backward_ms[self.place.kind][x]) for x in layers)
        self.times = {"forward": forward, "backward": backward + (forward if self.place.recompute else 0)}
        self.done = {"forward": 0, "backward": 0}
        self.begun = 0
        self.limit = most_in_flight(case, i, self.k)
        self.activations: deque[int] = deque()
        self.gradients: deque[int] = deque()
        self.opened: dict[int, int] = {}
        self.clock = 0
        self.here, self.asked = {0}, {0}
        self.bell = self.env.event()
        self.news = self.env.event()
        self.computes_since: int | None = None
        self.lost = {"waiting": 0, "idle": 0}
        self.reason = "idle"
        self.down: Flow | None = None
        self.up: Flow | None = None
        self.to_push, self.to_pull = simpy.Store(self.env), simpy.Store(self.env)
        self.pushes, self.pulls = [], []
        for shard, node in enumerate(case.shards):
            mine = [x for x in layers if case.shard_of_layer[x] == shard]
            size, pushed = sum(case.parameter_bytes[x] for x in mine), sum(map(case.pushed, mine))
            if size:
                self.pushes.append(Flow(job.network, ("push", vw, i, shard), (self.place.node, node), pushed))
                self.pulls.append(Flow(job.network, ("pull", vw, i, shard), (node, self.place.node), size))
        self.env.process(self.compute())
        self.env.process(self.listen())
        self.env.process(self.exchange(self.pushes, self.to_push, lambda wave: job.clock.report(vw, wave)))
        self.env.process(self.exchange(self.pulls, self.to_pull, self.fetched))

    @property
    def in_flight(self) -> int:
        return self.done["forward"] - self.done["backward"]

    def ring(self) -> None:
        if not self.bell.triggered:
            self.bell.succeed()

    def hear(self) -> None:
        """A clock is published, or weights came."""
        if not self.news.triggered:
            self.news.succeed()

    def receive(self, queue: deque[int]) -> None:
        queue.append(self.env.instant)
        self.ring()

    # -- weights

    def exchange(self, flows: list[Flow], queue: simpy.Store, then: Callable[[int], None]) -> Process:
        while True:
            number = yield queue.get()
            parts = [self.env.event() for _ in flows]
            for flow, part in zip(flows, parts, strict=True):
                flow.send(number, part.succeed)
            if parts:
                yield self.env.all_of(parts)
            then(number)

    def fetched(self, clock: int) -> None:
        self.here.add(clock)
        self.ring()
        self.hear()

    def has(self, clock: int) -> bool:
        """Whether the weights of `clock` are here; asks for them if nobody did."""
        if clock not in self.asked:
            self.asked.add(clock)
            if self.pulls:
                self.to_pull.put(clock)
            else:
                self.here.add(clock)  # no parameters: nothing to wait for
        return clock in self.here

    def fetch_ahead(self) -> None:
        """Ask for the weights of the switch point ahead as soon as they are published, one clock at a time."""
        if self.asked - self.here:
            return
        p = self.begun + 1
        while not is_switch(self.case, p):
            p += 1
        clock = worth_fetching(self.case, p, self.clock, self.job.clock.published)
        if p <= self.case.minibatches and clock is not None:
            self.has(clock)

    # -- deciding

    def may_start(self, p: int) -> bool:
        """First stage: whether minibatch p may enter the pipeline."""
        case, published = self.case, self.job.clock.published
        if self.in_flight >= self.limit or (case.weights == "flush" and (p - 1) % case.n == 0 and self.in_flight):
            return False
        if not is_switch(case, p):
            return True
        chosen = self.job.chosen[self.vw]
        if p not in chosen:
            clock = decided(case, p, self.clock, published)
            if clock is None:
                self.reason = "waiting"
                return False
            chosen[p] = clock
        return self.has(chosen[p])

    def forward_ready(self) -> int | None:
        """Since when the next forward could run; None: it cannot."""
        p = self.done["forward"] + 1
        if p > self.case.minibatches:
            return None
        if self.i == 0:
            return self.opened.setdefault(p, self.env.instant) if self.may_start(p) else None
        if not self.activations or (is_switch(self.case, p) and not self.has(self.job.chosen[self.vw][p])):
            return None
        return self.activations[0]

    def backward_ready(self) -> int | None:
        if self.i == self.k - 1:
            return -1 if self.in_flight else None
        return self.gradients[0] if self.gradients else None

    def choose(self) -> str | None:
        self.reason = "idle"
        self.fetch_ahead()
        forward, backward = self.forward_ready(), self.backward_ready()
        if self.in_flight >= self.limit:
            forward = None
        if self.keeps_order:
            kind = "forward" if self.forward_is_next() else "backward"
            return kind if (forward if kind == "forward" else backward) is not None else None
        if forward is not None and (backward is None or self.case.schedule != "fifo" or forward < backward):
            return "forward"
        return None if backward is None else "backward"

    @property
    def keeps_order(self) -> bool:
        """GPipe, and the policies whose versions the strict 1F1B order defines."""
        return self.case.schedule == "gpipe" or self.case.weights not in {"wave", "flush"}

    def forward_is_next(self) -> bool:
        """Of a fixed order: whether a forward is next, here or not."""
        done = self.done["forward"]
        if self.in_flight == 0:
            return True
        filled = done == ends_filling(self.case, done)
        return not filled and self.in_flight < self.limit

    # -- computing

    def listen(self) -> Process:
        """Fetches ahead in the middle of a computation; between two, `choose` does."""
        while True:
            yield self.news
            self.news = self.env.event()
            yield self.env.at_priority(DECIDE)
            if self.computes_since is not None and self.computes_since < self.env.instant:
                self.fetch_ahead()

    def starts_after(self) -> int:
        """Worker v of V starts v/V of the slowest stage's minibatch late, rounded down."""
        if not self.case.staggered:
            return 0
        slowest = max(sum(stage.times.values()) for stages in self.job.stages for stage in stages)
        return self.vw * slowest // len(self.case.workers)

    def compute(self) -> Process:
        if start := self.starts_after():
            since = self.env.instant
            yield self.env.timeout(start)
            self.lost["idle"] += self.env.instant - since
        while self.done["backward"] < self.case.minibatches:
            self.bell = self.env.event()
            yield self.env.at_priority(DECIDE)
            kind = self.choose()
            if kind is None:
                since = self.env.instant
                yield self.bell
                self.lost[self.reason] += self.env.instant - since
                continue
            p = self.done[kind] + 1
            self.take(kind, p)
            start = self.computes_since = self.env.instant
            yield self.env.timeout(self.times[kind])
            self.computes_since = None
            self.done[kind] = p
            self.job.happened.append((kind, self.vw, self.i, -1, p, start, self.env.instant))
            self.pass_on(kind, p)

    def take(self, kind: str, p: int) -> None:
        if kind == "forward":
            self.begun = p
            if self.i:
                self.activations.popleft()
            if is_switch(self.case, p):
                self.clock = self.job.chosen[self.vw][p]
        elif self.i < self.k - 1:
            self.gradients.popleft()

    def pass_on(self, kind: str, p: int) -> None:
        stages = self.job.stages[self.vw]
        if kind == "forward":
            if self.down is not None:
                lower = stages[self.i + 1]
                self.down.send(p, lambda: lower.receive(lower.activations))
            return
        if self.up is not None:
            upper = stages[self.i - 1]
            self.up.send(p, lambda: upper.receive(upper.gradients))
        if p % self.case.n == 0 or p == self.case.minibatches:
            self.to_push.put((p - 1) // self.case.n)
