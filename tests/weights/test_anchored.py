"""The versions of one stage under parameter servers, compared with a twin that keeps everything (`wsp.md` §3)."""

from __future__ import annotations

import random

import pytest

from hetpipe.decide.schedule.in_flight import weight_buffers
from hetpipe.errors import NonFiniteUpdate
from hetpipe.values.ids import Clock, Minibatch, Wave
from hetpipe.values.policies import WEIGHT_POLICIES, WeightPolicy
from tests.weights.twins import Case, Stage, draw_tensors, random_case, run_some


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_every_version_is_the_formula(weights: WeightPolicy) -> None:
    for seed in range(25):
        rng = random.Random(seed)
        case = random_case(rng, weights, has_shards=True)
        lag = rng.randint(0, 2)
        assert_bounds(run_some(rng, case, lag=lag), lag)


def assert_bounds(stage: Stage, lag: int) -> None:
    """Of buffers, by `policies.md`: anchor and running sum are the two more."""
    case = stage.case
    bound = weight_buffers(stage=case.i, num_stages=case.k, minibatches_per_wave=case.n, weights=case.weights) + 2
    assert stage.peak_at_rest == stage.weights.peak_at_rest <= bound
    # Where several minibatches share a version, an action copies the anchor beside those at rest.
    assert stage.pool.peak <= bound + (case.a > 1)
    # The own waves since the clock in use, and the one that `double_buffer` may still need for what decays.
    assert stage.host_peak_at_rest <= max(2, lag + 1) + (case.weights == "double_buffer")


@pytest.mark.parametrize("has_shards", [True, False])
@pytest.mark.parametrize("weights", ["wave", "vertical", "flush", "double_buffer"])
def test_weights_beyond_a_wave_are_lent_at_any_time_and_nothing_changes(
    weights: WeightPolicy, *, has_shards: bool
) -> None:
    """Before the last forwards of the wave, too, on the clock that these will use, or the next wave."""
    early = 0
    for seed in range(12):
        rng = random.Random(seed)
        case = random_case(rng, weights, has_shards=has_shards)
        stage = Stage(case, seed)
        stage.begin(0)
        while stage.updated < 6 * case.n:
            stage.act(6 * case.n, rng, lag=1, waits=seed % 2 == 0)
            lent = stage.lend_all(rng, 1) if stage.started else 0
            early += lent * (stage.started % case.n > 0)
    assert early > 0 or weights == "flush", "weights are lent only after the last forward"


def test_a_version_may_be_used_before_and_after_a_switch() -> None:
    """Minibatches 5 and 6 see the update of 1 and 2; from 6 on with other published weights, while 4 is newest."""
    case = Case(weights="vertical", n=6, k=3, i=2, a=2)
    for seed in range(20):
        stage = Stage(case, seed)
        stage.begin(1)
        stage.run(24, random.Random(seed), lag=1, waits=False)
        assert_bounds(stage, 1)


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_a_long_run_needs_no_more_buffers_than_a_short_one(weights: WeightPolicy) -> None:
    peaks = []
    for waves in (6, 40):
        stage = Stage(Case(weights=weights, n=3, k=2))
        stage.begin(0)
        stage.run(3 * waves, random.Random(1), lag=0, waits=False)
        peaks.append((stage.pool.peak, stage.pool.host_peak))

    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_host_memory_of_its_own_changes_no_bit(weights: WeightPolicy) -> None:
    """As beside a GPU: what moves is copied, and updates are added from host memory."""
    stage = Stage(Case(weights=weights, n=3, k=3, i=1))
    stage.pool._shares_memory, stage.pool._free_on_host = False, []
    for clock in (0, 4):
        stage.begin(clock)
        stage.run(3 * (clock + 4), random.Random(2), lag=1, waits=False)

    assert_bounds(stage, 1)


@pytest.mark.parametrize("weights", ["predict", "spectrain"])
def test_predicted_weights_are_given_back_when_the_action_ends(weights: WeightPolicy) -> None:
    stage = Stage(Case(weights=weights, n=3, k=3))
    stage.begin(0)
    stage.run(6, random.Random(0), lag=0, waits=False)
    stage.begin(2)

    for p, extra in ((7, 0), (8, 1), (9, 1)):  # the first one computes with what is there
        stage.weights.forward(Minibatch(p))
        assert stage.pool.alive == 2 + extra
        stage.weights.forwarded(Minibatch(p))
        assert stage.pool.alive == 2


def test_one_clock_in_use_gathers_the_own_waves_in_order() -> None:
    stage = Stage(Case(n=2))
    stage.begin(0)
    for p in range(1, 13):
        stage.forward()
        assert stage.clocks[p] == 0
        stage.backward()
        stage.update()


def test_a_barrier_that_finds_minibatches_under_way() -> None:
    stage = Stage(Case(n=2))
    stage.begin(0)
    stage.forward()

    with pytest.raises(AssertionError, match="drained"):
        stage.weights.start(Clock(1), stage.pool.take())


def test_nothing_before_the_first_segment() -> None:
    stage = Stage(Case(n=2))
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
        stage = Stage(Case(n=n))
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
        if p % stage.case.n == 0:
            update = stage.weights.close_wave(Wave((p - 1) // stage.case.n), Minibatch(p))
            assert update is not None
            stage.pool.release(update)

    def test_the_last_minibatch_of_a_short_wave(self) -> None:
        stage = Stage(Case(n=4))
        stage.begin(0)
        for p in (1, 2, 3):
            stage.forward()
            stage.backward()
            if p < 3:
                stage.update()
        with pytest.raises(NonFiniteUpdate, match="minibatch 3 is not finite in parameter b"):
            stage.update(poison="b", last=3)

    def test_the_first_of_several(self) -> None:
        stage = Stage(Case(n=3))
        stage.begin(0)
        for poison in (None, "c"):
            stage.forward()
            stage.backward()
            stage.update(poison=poison)
        stage.forward()
        stage.backward()
        with pytest.raises(NonFiniteUpdate, match="minibatch 2 is not finite in parameter c"):
            stage.update(poison="a")
