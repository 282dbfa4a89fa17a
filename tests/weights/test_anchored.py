"""The versions of one stage, compared with dictionaries that are cloned at every step (`wsp.md` §3)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetpipe.errors import NonFiniteUpdate
from hetpipe.schedule.versions import VersionTable
from hetpipe.spec.ids import Clock, Minibatch, Wave
from hetpipe.spec.job import OptimizerSpec
from hetpipe.weights.anchored import AnchoredWeights
from hetpipe.weights.flat import BufferPool, FlatBuffer, FlatLayout
from hetpipe.weights.optimizer import StageOptimizer
from hetpipe.weights.policy import Version

LAYOUT = FlatLayout([("a", (3,), "float32"), ("b", (2, 2), "float32"), ("c", (), "float64")])
LEARNING_RATE = 0.25

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


@dataclass
class Naive:
    """The formula, word by word. Everything is kept for ever."""

    n: int
    start: int = 0
    clock: int = 0
    published: dict[int, Tensors] = field(default_factory=dict)
    rho_after: dict[int, Tensors] = field(default_factory=dict)
    updates: dict[int, Tensors] = field(default_factory=dict)
    rho: Tensors = field(default_factory=dict)

    def begin(self, clock: int, weights: Tensors) -> None:
        self.start = self.clock = clock
        self.published[clock] = clone(weights)
        self.rho = {name: torch.zeros_like(w) for name, w in weights.items()}

    def weights(self, p: int, clock: int) -> Tensors:
        v = max(p - self.n, self.start * self.n)
        anchor = clone(self.published[clock])
        for wave in range(clock, v // self.n):
            anchor = plus(anchor, self.updates[wave])
        return anchor if v % self.n == 0 else plus(anchor, self.rho_after[v])

    def step(self, p: int, gradients: Tensors) -> None:
        self.rho = {name: rho.add(gradients[name], alpha=-LEARNING_RATE) for name, rho in self.rho.items()}
        self.rho_after[p] = clone(self.rho)

    def close(self, wave: int) -> None:
        self.updates[wave] = self.rho
        self.rho = {name: torch.zeros_like(w) for name, w in self.rho.items()}


class Stage:
    """`AnchoredWeights` and its naive twin, driven in step. Every answer is compared at once, bit for bit."""

    def __init__(self, n: int, seed: int = 0) -> None:
        self.n = n
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = BufferPool(LAYOUT, torch.device("cpu"))
        rho = self.pool.take().zero_()
        self.weights = AnchoredWeights(
            self.pool,
            StageOptimizer(OptimizerSpec(name="SGD", lr=LEARNING_RATE), rho),
            rho,
            VersionTable("wave", 0, 1, n),
        )
        self.naive = Naive(n)
        self.clocks: dict[int, int] = {}
        self.started = self.completed = 0

    def published(self, clock: int) -> FlatBuffer:
        """Some w^(clock)."""
        tensors = draw_tensors(self.generator)
        self.naive.published[clock] = tensors
        buffer = self.pool.take_on_host()
        for name, value in tensors.items():
            buffer.views[name].copy_(value)
        return buffer

    def begin(self, clock: int) -> None:
        """A barrier."""
        buffer = self.published(clock)
        self.weights.start(Clock(clock), self.pool.to_device(buffer))
        self.naive.begin(clock, self.naive.published[clock])
        self.started = self.completed = clock * self.n
        self.compare(self.weights.at_barrier.views, self.naive.published[clock])

    def forward(self, clock: int | None = None) -> None:
        """Start the next minibatch; at a switch point with w^(clock), or with the one in use."""
        p = self.started + 1
        if p % self.n == 0 and p >= (self.naive.start + 1) * self.n:
            wanted = self.naive.clock if clock is None else clock
            if wanted != self.naive.clock:
                self.weights.switch(Minibatch(p), Clock(wanted), self.pool.to_device(self.published(wanted)))
            self.naive.clock = wanted
        self.clocks[p] = self.naive.clock
        self.started = p
        self.check(p, self.weights.forward(Minibatch(p)))
        self.weights.forwarded(Minibatch(p))

    def check(self, p: int, version: Version) -> None:
        """Whether minibatch p's weights are what the formula says."""
        assert all(tensor.requires_grad and tensor.is_leaf for tensor in version.weights.values())
        self.compare(version.weights, self.naive.weights(p, self.clocks[p]))

    @staticmethod
    def compare(found: object, expected: Tensors) -> None:
        assert isinstance(found, dict)
        for name, value in expected.items():
            assert torch.equal(found[name].detach(), value), name

    def backward(self, *, poison: str | None = None, value: float = float("nan"), is_last: bool = False) -> None:
        """Complete the oldest minibatch; closes the wave where one ends."""
        p = self.completed + 1
        self.check(p, self.weights.backward(Minibatch(p)))  # it never changes while it is used
        self.weights.backwarded(Minibatch(p))
        gradients = draw_tensors(self.generator)
        if poison is not None:
            gradients[poison].view(-1)[-1] = value
        self.weights.step(Minibatch(p), dict(gradients))
        self.naive.step(p, gradients)
        self.completed = p
        if p % self.n == 0 or is_last:
            wave = (p - 1) // self.n
            update = self.weights.close_wave(Wave(wave), Minibatch(p))
            self.naive.close(wave)
            self.compare(update.views, self.naive.updates[wave])
            self.pool.release(update)


@given(st.integers(1, 4), st.integers(0, 2), st.data())
@settings(max_examples=40, deadline=None)
def test_every_version_is_the_formula(n: int, lag: int, data: st.DataObject) -> None:
    stage = Stage(n, seed=data.draw(st.integers(0, 1000)))
    clock = 0
    for _ in range(data.draw(st.integers(1, 3), label="segments")):
        stage.begin(clock)
        assert stage.pool.alive == 2, "B and ρ"
        waves = data.draw(st.integers(1, 5), label="waves")
        last = (clock + waves) * n - data.draw(st.integers(0, n - 1), label="missing from the last wave")
        while stage.completed < last:
            in_flight = stage.started - stage.completed
            if stage.started < last and in_flight < n and (not in_flight or data.draw(st.booleans())):
                newest = stage.started // n  # of its own complete waves, for the switch point that may come next
                lowest = max(stage.naive.clock, newest - lag)
                stage.forward(data.draw(st.integers(lowest, max(lowest, newest)), label="clock"))
            else:
                stage.backward(is_last=stage.completed + 1 == last)
        clock += waves
    # B, ρ, n − 1 sums and versions, and the published weights that the next switch takes.
    assert stage.pool.peak <= n + 2
    # The waves since W*, up to the short one before a barrier, and the published weights of the barrier.
    assert stage.pool.host_peak <= lag + 3


def test_a_long_run_needs_no_more_buffers_than_a_short_one() -> None:
    peaks = []
    for waves in (4, 40):
        stage = Stage(3)
        stage.begin(0)
        for p in range(1, 3 * waves + 1):
            while stage.started < min(p + 2, 3 * waves):
                following = stage.started + 1
                stage.forward(max(0, following // 3 - 2))
            stage.backward()
        peaks.append((stage.pool.peak, stage.pool.host_peak))

    assert peaks[0] == peaks[1] == (3 + 2, 2)


def test_host_memory_of_its_own_changes_no_bit() -> None:
    """As beside a GPU: what moves is copied, and updates are added from host memory."""
    stage = Stage(3)
    stage.pool._shares_memory, stage.pool._free_on_host = False, []
    for clock in (0, 4):
        stage.begin(clock)
        for p in range(3 * clock + 1, 3 * clock + 13):
            stage.forward(max(clock, p // 3 - 2))
            stage.backward()

    assert (stage.pool.peak, stage.pool.host_peak) == (3 + 2, 2)


def test_one_clock_in_use_gathers_the_own_waves_in_order() -> None:
    stage = Stage(2)
    stage.begin(0)
    for _ in range(12):
        stage.forward()
        stage.backward()

    assert stage.clocks[12] == 0


def test_a_barrier_that_finds_minibatches_under_way() -> None:
    stage = Stage(2)
    stage.begin(0)
    stage.forward()

    with pytest.raises(AssertionError, match="drained"):
        stage.weights.start(Clock(1), stage.pool.take())


def test_nothing_before_the_first_segment() -> None:
    stage = Stage(2)
    with pytest.raises(AssertionError, match="no segment"):
        stage.weights.forward(Minibatch(1))
    with pytest.raises(AssertionError, match="no segment"):
        _ = stage.weights.at_barrier


class TestBlame:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("name", ["a", "b", "c"])
    @pytest.mark.parametrize(
        ("n", "bad", "ahead"), [(4, 5, 3), (4, 6, 3), (4, 7, 0), (4, 8, 3), (4, 8, 0), (1, 1, 0), (1, 3, 0), (2, 2, 1)]
    )
    def test_minibatch_and_parameter_are_named(self, n: int, bad: int, ahead: int, name: str, value: float) -> None:
        stage = Stage(n)
        stage.begin(0)
        end = -(-bad // n) * n
        with pytest.raises(NonFiniteUpdate) as caught:
            self.run(stage, end, ahead, (bad, name, value))

        assert str(caught.value) == f"the update of minibatch {bad} is not finite in parameter {name}"

    def run(self, stage: Stage, end: int, ahead: int, poison: tuple[int, str, float]) -> None:
        bad, name, value = poison
        while stage.completed < end:
            while stage.started - stage.completed < 1 + ahead:
                self.start_unchecked(stage)
            self.finish_unchecked(stage, name if stage.completed + 1 == bad else None, value)

    @staticmethod
    def start_unchecked(stage: Stage) -> None:
        """NaN equals nothing, so the twin stays out."""
        p = stage.started + 1
        stage.weights.forward(Minibatch(p))
        stage.started = p

    @staticmethod
    def finish_unchecked(stage: Stage, poison: str | None, value: float) -> None:
        p = stage.completed + 1
        gradients = draw_tensors(stage.generator)
        if poison is not None:
            gradients[poison].view(-1)[-1] = value
        stage.weights.step(Minibatch(p), dict(gradients))
        stage.completed = p
        if p % stage.n == 0:
            stage.pool.release(stage.weights.close_wave(Wave((p - 1) // stage.n), Minibatch(p)))

    def test_the_last_minibatch_of_a_short_wave(self) -> None:
        stage = Stage(4)
        stage.begin(0)
        for p in (1, 2, 3):
            stage.forward()
            if p < 3:
                stage.backward()
        with pytest.raises(NonFiniteUpdate, match="minibatch 3 is not finite in parameter b"):
            stage.backward(poison="b", is_last=True)

    def test_the_first_of_several(self) -> None:
        stage = Stage(3)
        stage.begin(0)
        for poison in (None, "c"):
            stage.forward()
            stage.backward(poison=poison)
        stage.forward()
        with pytest.raises(NonFiniteUpdate, match="minibatch 2 is not finite in parameter c"):
            stage.backward(poison="a")
