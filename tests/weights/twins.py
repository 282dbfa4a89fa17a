"""A version store without a stage around it, driven in step with a twin that clones everything at every step.

The twin writes `policies.md` and `wsp.md` §3 down once more, with dictionaries of tensors, and keeps all for ever.
Every answer of the store is compared with it at once, bit for bit. Names: p is a minibatch, K stages, i this one, N
minibatches make a wave, A make an update.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.job.file import OptimizerSpec
from hetpipe.values.ids import Clock, Minibatch, Wave
from hetpipe.values.policies import POLICIES, WeightPolicy
from hetpipe.weights.anchored import AnchoredWeights
from hetpipe.weights.direct import DirectWeights
from hetpipe.weights.flat import BufferPool, FlatBuffer, FlatLayout
from hetpipe.weights.optimizer import StageOptimizer
from hetpipe.weights.policy import StageWeights, Version

LAYOUT = FlatLayout([("a", (3,), "float32"), ("b", (2, 2), "float32"), ("c", (), "float64")])
LEARNING_RATE, MOMENTUM, DECAY = 0.25, 0.5, 0.125

Tensors = dict[str, Tensor]


def draw_tensors(generator: torch.Generator) -> Tensors:
    return {
        slot.name: torch.randn(slot.shape, generator=generator, dtype=torch.float64).to(getattr(torch, slot.dtype))
        for slot in LAYOUT.slots
    }


def clone(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def plus(left: Tensors, right: Tensors) -> Tensors:
    return {name: left[name] + right[name] for name in left}


def assert_equal(found: Mapping[str, Tensor], expected: Tensors, what: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].detach(), value), f"{what}, parameter {name}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One stage under one policy."""

    weights: WeightPolicy = "wave"
    n: int
    k: int = 1
    i: int = 0
    a: int = 1
    has_shards: bool = True

    @property
    def per_update(self) -> int:
        return self.n if self.weights in ("flush", "double_buffer") else self.a

    @property
    def is_predicting(self) -> bool:
        return self.weights in ("predict", "spectrain")

    @property
    def is_strict(self) -> bool:
        """Whether the policy is defined by the strict 1F1B order."""
        return self.weights not in ("wave", "flush")

    @property
    def may_wait(self) -> bool:
        """Whether an update may wait for the norm over all stages while the pipeline goes on."""
        return self.weights in ("wave", "vertical", "flush", "double_buffer")

    @property
    def limit(self) -> int:
        """Minibatches in flight; with GPipe's order for `flush`, which has most."""
        return self.k - self.i if self.is_strict else self.n

    def through(self, p: int) -> int:
        """The last own update that the forward of p sees, were there neither barriers nor accumulation."""
        match self.weights:
            case "wave":
                return p - self.n
            case "vertical":
                return p - self.k
            case "flush":
                return (p - 1) // self.n * self.n
            case "double_buffer":
                return ((p - 1) // self.n - 1) * self.n
            case _:
                return p - (self.k - self.i)


@dataclass
class Twin:
    """The formulas, word by word."""

    case: Case
    start: int = 0
    clock: int = 0
    #: The last minibatch whose update is made.
    newest: int = 0
    velocity: Tensors = field(default_factory=dict)
    #: With shards: clock → w^(clock), q → ρ after it, wave → ũ.
    published: dict[int, Tensors] = field(default_factory=dict)
    sums: dict[int, Tensors] = field(default_factory=dict)
    updates: dict[int, Tensors] = field(default_factory=dict)
    rho: Tensors = field(default_factory=dict)
    #: Without: q → the weights after it.
    after: dict[int, Tensors] = field(default_factory=dict)

    def begin(self, clock: int, weights: Tensors) -> None:
        self.start = self.clock = clock
        self.newest = clock * self.case.n
        self.published[clock] = self.after[self.newest] = clone(weights)
        self.rho = {name: torch.zeros_like(w) for name, w in weights.items()}

    def seen_by(self, p: int) -> int:
        """v(p)."""
        return max(self.case.through(p) // self.case.per_update * self.case.per_update, self.start * self.case.n)

    def weights(self, v: int, clock: int) -> Tensors:
        if not self.case.has_shards:
            return self.after[v]
        anchor = clone(self.published[clock])
        for wave in range(clock, v // self.case.n):
            anchor = plus(anchor, self.updates[wave])
        return anchor if v % self.case.n == 0 else plus(anchor, self.sums[v])

    def forward(self, p: int, clock: int) -> Tensors:
        v = self.seen_by(p)
        if not self.case.is_predicting:
            return self.weights(v, clock)
        assert v == self.newest, "the strict order"
        last = max((p - 1) // self.case.a * self.case.a, self.start * self.case.n)  # what its backward sees
        return self.ahead(self.weights(v, clock), (last - v) // self.case.a + self.further)

    def backward(self, p: int, clock: int) -> Tensors:
        """`clock`: the one in use for a prediction, else the one that the forward used."""
        if not self.case.is_predicting:
            return self.forward(p, clock)
        return self.ahead(self.weights(self.newest, self.clock), self.further)

    @property
    def further(self) -> int:
        return self.case.i // 2 if self.case.weights == "spectrain" else 0

    def ahead(self, weights: Tensors, steps: int) -> Tensors:
        if not self.velocity or not steps:
            return weights
        return {name: w.add(self.velocity[name], alpha=-(LEARNING_RATE * steps)) for name, w in weights.items()}

    def decayed_from(self, p: int, clock: int) -> Tensors:
        """The weights whose decay is part of the update after p, whose own clock is `clock`."""
        match self.case.weights:
            case "wave" | "vertical":
                return self.weights(self.seen_by(p), clock)
            case "flush" | "double_buffer":
                return self.weights(self.newest, clock)
            case _:
                return self.weights(self.newest, self.clock)

    def step(self, p: int, clock: int, gradients: Tensors) -> None:
        decaying = self.decayed_from(p, clock)
        seen = {name: g.add(decaying[name], alpha=DECAY) for name, g in gradients.items()}
        self.velocity = {
            name: self.velocity[name].mul(MOMENTUM).add(g) if self.velocity else g.clone() for name, g in seen.items()
        }
        target = self.rho if self.case.has_shards else self.after[self.newest]
        moved = {name: w.add(self.velocity[name], alpha=-LEARNING_RATE) for name, w in target.items()}
        if self.case.has_shards:
            self.rho = self.sums[p] = moved
        self.after[p] = moved
        self.newest = p

    def close(self, wave: int) -> None:
        self.updates[wave] = self.rho
        self.rho = {name: torch.zeros_like(w) for name, w in self.rho.items()}


class Stage:
    """A version store and its twin. Methods are the actions of a stage, in any order that a schedule allows."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = BufferPool(LAYOUT, torch.device("cpu"))
        self.twin = Twin(case)
        self.weights: StageWeights = self.store()
        #: p → its clock, while it is between its forward and its update.
        self.clocks: dict[int, int] = {}
        self.started = self.completed = self.updated = 0
        #: Buffers between two actions, at most at once so far: on the device, and in host memory.
        self.peak_at_rest = self.host_peak_at_rest = 0

    def store(self) -> StageWeights:
        case = self.case
        target = self.pool.take().zero_()
        spec = OptimizerSpec.model_validate(
            {"name": "SGD", "lr": LEARNING_RATE, "momentum": MOMENTUM, "weight_decay": DECAY}
        )
        optimizer = StageOptimizer(spec, target, predicts=case.is_predicting)
        table = VersionTable(case.weights, case.i, case.k, case.n, case.a)
        if case.has_shards:
            return AnchoredWeights(self.pool, optimizer, target, table)
        first = draw_tensors(self.generator)
        self.twin.after[0] = first
        for name, value in first.items():
            target.views[name].copy_(value)
        return DirectWeights(self.pool, optimizer, target, table)

    def published(self, clock: int) -> FlatBuffer:
        """Some w^(clock)."""
        tensors = draw_tensors(self.generator)
        self.twin.published[clock] = tensors
        buffer = self.pool.take_on_host()
        for name, value in tensors.items():
            buffer.views[name].copy_(value)
        return buffer

    def begin(self, clock: int) -> None:
        """A barrier."""
        if self.case.has_shards:
            self.weights.start(Clock(clock), self.pool.to_device(self.published(clock)))
            weights = self.twin.published[clock]
        else:
            self.weights.start(Clock(clock), None)
            weights = self.twin.after[self.twin.newest]
        self.twin.begin(clock, weights)
        self.started = self.completed = self.updated = clock * self.case.n
        assert_equal(self.weights.at_barrier.views, weights, f"the barrier at {clock}")
        assert self.pool.alive == (2 if self.case.has_shards else 1), "nothing is held but what is newest"

    def is_switch(self, p: int) -> bool:
        n = self.case.n
        at = 1 % n if self.case.weights in ("flush", "double_buffer") else 0
        return self.case.has_shards and p % n == at and self.newest_usable(p) > self.twin.start

    def newest_usable(self, p: int) -> int:
        """The newest published clock without an update that p must not see."""
        n, start = self.case.n, self.twin.start
        if self.case.weights in ("flush", "double_buffer"):
            return max(start, self.case.through(p) // n)
        return max(start, (p - n) // n)

    def forward(self, clock: int | None = None) -> None:
        """Start the next minibatch; at a switch point with w^(clock), or with the one in use."""
        p = self.started + 1
        if clock is not None and clock != self.twin.clock and self.is_switch(p):
            self.weights.switch(Minibatch(p), Clock(clock), self.pool.to_device(self.published(clock)))
            self.twin.clock = clock
        self.clocks[p] = self.twin.clock
        self.started = p
        version = self.weights.forward(Minibatch(p))
        assert version.through == self.twin.seen_by(p)
        self.check(version, self.twin.forward(p, self.clocks[p]), f"forward of {p}")
        self.weights.forwarded(Minibatch(p))
        self.rest()

    @staticmethod
    def check(version: Version, expected: Tensors, what: str) -> None:
        assert all(tensor.requires_grad and tensor.is_leaf for tensor in version.weights.values())
        assert_equal(version.weights, expected, what)

    def backward(self) -> None:
        """Complete the oldest minibatch."""
        p = self.completed + 1
        version = self.weights.backward(Minibatch(p))
        assert version.through == (self.twin.newest if self.case.is_predicting else self.twin.seen_by(p))
        self.check(version, self.twin.backward(p, self.clocks[p]), f"backward of {p}")
        self.weights.backwarded(Minibatch(p))
        self.completed = p
        self.rest()

    def update(self, *, last: int | None = None, poison: str | None = None, value: float = float("nan")) -> None:
        """Make the oldest update; closes the wave where one ends. `last`: of the segment."""
        p = self.next_update(last)
        assert self.completed >= p, "its gradients are there"
        gradients = draw_tensors(self.generator)
        if poison is not None:
            gradients[poison].view(-1)[-1] = value
        self.weights.step(Minibatch(p), dict(gradients))
        self.twin.step(p, self.clocks[p], gradients)
        self.updated = p
        for done in [q for q in self.clocks if q <= p]:
            del self.clocks[done]
        self.rest()
        if p % self.case.n == 0 or p == last:
            self.close((p - 1) // self.case.n, p)

    def close(self, wave: int, p: int) -> None:
        update = self.weights.close_wave(Wave(wave), Minibatch(p))
        self.twin.close(wave)
        if update is None:
            assert not self.case.has_shards
            return
        assert_equal(update.views, self.twin.updates[wave], f"wave {wave}")
        self.pool.release(update)
        self.rest()

    def next_update(self, last: int | None) -> int:
        """The last minibatch of the oldest update that is not made."""
        following = (self.updated // self.case.per_update + 1) * self.case.per_update
        return following if last is None else min(following, last)

    def rest(self) -> None:
        self.peak_at_rest = max(self.peak_at_rest, self.pool.alive)
        self.host_peak_at_rest = max(self.host_peak_at_rest, self.pool.host_alive)

    def lend_all(self, rng: random.Random, lag: int) -> int:
        """Lend what can be lent beyond the wave that the last started minibatch is in; returns how many weights."""
        last, n = -(-self.started // self.case.n) * self.case.n, self.case.n
        clock, lent = self.twin.clock, 0
        if self.started < last and self.is_switch(last):
            clock = self.pick(last, rng, lag)
        for p in range(last + 1, last + n + 1):
            if self.is_switch(p) and p == last + 1:
                clock = max(clock, self.pick(p, rng, lag))
            if not last > self.twin.seen_by(p) <= self.updated:
                break
            published = None
            if clock != self.twin.clock:
                published = self.published(clock)
            found = self.weights.lend(Minibatch(p), Clock(clock), published)
            assert_equal(found, self.twin.weights(self.twin.seen_by(p), clock), f"weights of {p} that are lent")
            if published is not None:
                self.pool.release(published)
            lent += 1
        return lent

    # -- a segment ---------------------------------------------------------------------------------------------------

    def run(self, last: int, rng: random.Random, *, lag: int, waits: bool) -> None:
        """Compute up to minibatch `last`, where the segment ends, in some order that the schedule allows.

        Args:
            last: its number.
            rng: decides what is not decided.
            lag: how many clocks behind the newest usable one a published clock may be (D).
            waits: updates wait for a norm as long as they can.
        """
        while self.updated < last:
            self.act(last, rng, lag=lag, waits=waits)

    def act(self, last: int, rng: random.Random, *, lag: int, waits: bool) -> None:
        """The next action of a segment."""
        may_update = self.completed >= self.next_update(last)
        if may_update and not (waits and self.case.may_wait and rng.random() < 0.7):
            self.update(last=last)
        elif self.may_start(last) and (self.case.is_strict or self.completed == self.started or rng.random() < 0.6):
            self.forward(self.pick(self.started + 1, rng, lag))
        elif self.completed < self.started and not self.is_due(last):
            self.backward()
        else:
            self.update(last=last)

    def is_due(self, last: int) -> bool:
        """Whether the strict order wants a forward now, even if it has to wait."""
        return self.case.is_strict and self.started < last and self.started - self.completed < self.case.limit

    def may_start(self, last: int) -> bool:
        p = self.started + 1
        return p <= last and self.started - self.completed < self.case.limit and self.updated >= self.twin.seen_by(p)

    def pick(self, p: int, rng: random.Random, lag: int) -> int:
        """A clock for minibatch `p`: usable, no older than the one in use, and within the bound."""
        newest = self.newest_usable(p)
        lowest = max(self.twin.clock, newest - lag)
        return rng.randint(lowest, max(lowest, newest))


def random_case(rng: random.Random, weights: WeightPolicy, *, has_shards: bool) -> Case:
    """A small stage under one policy."""
    k = rng.randint(1, 4)
    least = POLICIES[weights].least_minibatches_per_wave(k)
    n = rng.randint(least, least + 3)
    a = 1 if weights in ("flush", "double_buffer") else rng.choice([a for a in range(1, n + 1) if n % a == 0])
    return Case(weights=weights, n=n, k=k, i=rng.randrange(k), a=a, has_shards=has_shards)


def run_some(rng: random.Random, case: Case, *, lag: int) -> Stage:
    """Some segments, most of which end in the middle of a wave; at a barrier in the end."""
    stage = Stage(case, seed=rng.randrange(1000))
    clock = 0
    waits = rng.random() < 0.5
    for _ in range(rng.randint(1, 3)):
        stage.begin(clock)
        waves = rng.randint(1, 6)
        stage.run((clock + waves) * case.n - rng.randrange(case.n), rng, lag=lag, waits=waits)
        clock += waves
    stage.begin(clock)
    return stage
