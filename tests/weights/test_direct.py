"""The versions of a stage whose weights are its own, compared with a twin that keeps everything (`policies.md`)."""

from __future__ import annotations

import itertools
import random

import pytest

from hetpipe.decide.schedule.in_flight import weight_buffers
from hetpipe.errors import NonFiniteUpdate
from hetpipe.values.ids import Clock, Minibatch, Wave
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, WeightPolicy, policies_where
from tests.weights.twins import Case, Stage, draw_tensors, random_case, run_some


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_every_version_is_the_formula(weights: WeightPolicy) -> None:
    for seed in range(25):
        rng = random.Random(seed)
        case = random_case(rng, weights, has_shards=False)
        stage = run_some(rng, case, lag=0)
        assert stage.weights.peak_at_rest <= at_rest(case)


def at_rest(case: Case) -> int:
    """The table of `policies.md`, last column."""
    if POLICIES[case.weights].predicts is not None:
        return 1
    return weight_buffers(stage=case.i, num_stages=case.k, minibatches_per_wave=case.n, weights=case.weights)


def _points() -> list[Case]:
    points = []
    for weights, k in itertools.product(WEIGHT_POLICIES, (1, 2, 3, 4)):
        least = POLICIES[weights].least_minibatches_per_wave(k)
        points += [
            Case(weights=weights, n=n, k=k, i=i, has_shards=False)
            for n in sorted({least, least + 1, 6})
            for i in range(k)
        ]
    return points


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_the_buffers_at_rest_are_those_of_the_table(weights: WeightPolicy) -> None:
    """On every stage of pipelines of every depth, and the store's own account is that of the pool."""
    for case in [case for case in _points() if case.weights == weights]:
        stage = Stage(case)
        stage.begin(0)
        stage.run(5 * case.n, random.Random(0), lag=0, waits=False)
        assert stage.weights.peak_at_rest == stage.peak_at_rest == at_rest(case), case


@pytest.mark.parametrize(
    ("case", "copies"),
    [
        (Case(weights="wave", n=1), 0),
        (Case(weights="wave", n=3), 12),
        (Case(weights="stash", n=3, k=3), 12),
        (Case(weights="stash", n=3, k=3, i=2), 0),
        (Case(weights="vertical", n=3, k=3, i=2), 12),
        (Case(weights="double_buffer", n=3, k=3), 4),
        (Case(weights="flush", n=3, k=3), 0),
        (Case(weights="predict", n=3, k=3), 0),
    ],
    ids=lambda value: f"{value.weights} {value.i}" if isinstance(value, Case) else "",
)
def test_an_update_is_in_place_unless_an_older_version_is_needed(case: Case, copies: int) -> None:
    """All of the 12 updates (4 where a wave makes one), or none: where a segment ends the store does not know."""
    stage = Stage(Case(weights=case.weights, n=case.n, k=case.k, i=case.i, has_shards=False))
    stage.begin(0)
    found = 0
    rng = random.Random(0)
    while stage.updated < 12:
        before = stage.weights.at_barrier
        stage.act(12, rng, lag=0, waits=False)
        found += stage.weights.at_barrier is not before
    assert found == copies


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_a_long_run_needs_no_more_buffers_than_a_short_one(weights: WeightPolicy) -> None:
    peaks = []
    for waves in (6, 40):
        stage = Stage(Case(weights=weights, n=3, k=2, has_shards=False))
        stage.begin(0)
        stage.run(3 * waves, random.Random(1), lag=0, waits=False)
        peaks.append(stage.pool.peak)

    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("weights", policies_where(lambda policy: policy.predicts is not None))
def test_predicted_weights_are_given_back_when_the_action_ends(weights: WeightPolicy) -> None:
    stage = Stage(Case(weights=weights, n=5, k=5, i=2, has_shards=False))
    stage.begin(0)
    stage.run(5, random.Random(0), lag=0, waits=False)
    stage.begin(1)

    for p in (6, 7):
        extra = int(weights == "spectrain" or p > 6)  # the first one of `predict` computes with what is there
        stage.weights.forward(Minibatch(p))
        assert stage.pool.alive == 1 + extra
        stage.weights.forwarded(Minibatch(p))
        assert stage.pool.alive == 1
    stage.weights.backward(Minibatch(6))
    assert stage.pool.alive == 1 + (weights == "spectrain")
    stage.weights.backwarded(Minibatch(6))
    assert stage.pool.alive == 1
    assert stage.weights.peak_at_rest == 1


def test_older_versions_go_at_a_barrier() -> None:
    stage = Stage(Case(weights="vertical", n=4, k=4, has_shards=False))
    stage.begin(0)
    stage.run(5, random.Random(0), lag=0, waits=False)
    stage.begin(2)
    assert stage.pool.alive == 1


def test_a_barrier_that_finds_minibatches_under_way() -> None:
    stage = Stage(Case(n=2, has_shards=False))
    stage.begin(0)
    stage.forward()

    with pytest.raises(AssertionError, match="drained"):
        stage.weights.start(Clock(1), None)


def test_nothing_is_ever_published() -> None:
    stage = Stage(Case(n=2, has_shards=False))
    buffer = stage.pool.take()
    with pytest.raises(AssertionError, match="no other process"):
        stage.weights.start(Clock(0), buffer)
    with pytest.raises(AssertionError):
        stage.weights.switch(Minibatch(2), Clock(1), buffer)


@pytest.mark.parametrize(
    ("n", "bad", "minibatches"), [(1, 1, "minibatch 1"), (3, 2, "one of the minibatches 1 to 3"), (1, 2, "minibatch 2")]
)
def test_what_is_not_finite_is_named(n: int, bad: int, minibatches: str) -> None:
    stage = Stage(Case(weights="flush", n=n, has_shards=False, a=1))
    stage.begin(0)
    for p in range(1, bad):
        step(stage, p)
        if p % n == 0:
            stage.weights.close_wave(Wave(p // n - 1), Minibatch(p))
    step(stage, bad, poison="b")
    last = -(-bad // n) * n
    for p in range(bad + 1, last + 1):
        step(stage, p)
    with pytest.raises(NonFiniteUpdate) as caught:
        stage.weights.close_wave(Wave((bad - 1) // n), Minibatch(last))

    assert str(caught.value) == f"the update of {minibatches} is not finite in parameter b"


def step(stage: Stage, p: int, poison: str | None = None) -> None:
    """NaN equals nothing, so the twin stays out."""
    gradients = draw_tensors(stage.generator)
    if poison is not None:
        gradients[poison].view(-1)[0] = float("nan")
    stage.weights.step(Minibatch(p), dict(gradients))
