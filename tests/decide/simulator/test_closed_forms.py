"""Where a formula says how fast a job is, the simulator says the same."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.decide.planner.costs import MemoryModel, minibatches_per_tick, ticks
from hetpipe.decide.planner.shard_bytes import PlacedParameters
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.plan import SimulatedPlan
from hetpipe.decide.simulator.result import ActivityKind
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.decide.simulator.traffic import cross_node_bytes_per_minibatch
from hetpipe.errors import PlanError
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, Schedule, WeightPolicy
from tests.decide.simulator.case import random_case
from tests.decide.simulator.jobs import plan_of
from tests.decide.simulator.regular import BATCH, Regular
from tests.pairwise import all_pairs

FREE = SimulationOptions(staleness=None, minibatches=200)

_MOVES = {ActivityKind.ACTIVATIONS, ActivityKind.GRADIENTS, ActivityKind.PUSH, ActivityKind.PULL}


#: What can be run, `flush` under each of its schedules.
PAIRS: list[tuple[WeightPolicy, Schedule]] = [(w, s) for w in WEIGHT_POLICIES for s in POLICIES[w].schedules]

#: Those whose pipeline never drains.
RUNNING_ON: list[WeightPolicy] = [weights for weights in WEIGHT_POLICIES if weights != "flush"]


def _rate(
    forward_ms: list[float], backward_ms: list[float], n: int, weights: WeightPolicy, schedule: Schedule
) -> float:
    """Samples per second by the planner's closed form."""
    stage_ticks = [ticks(f) + ticks(b) for f, b in zip(forward_ms, backward_ms, strict=True)]
    memory = MemoryModel(weights=weights, schedule=schedule, minibatches_per_wave=n)
    return BATCH * 1e12 * minibatches_per_tick(stage_ticks, memory)


def test_one_device_computes_all_the_time() -> None:
    result = Regular(forward_ms=[2], backward_ms=[3]).run(FREE)
    assert result.samples_per_second == pytest.approx(BATCH / 0.005)
    assert result.utilisation == {"n0/0": pytest.approx(1.0)}
    assert result.waiting_seconds == (0.0,)
    assert result.idle_seconds == (0.0,)


@pytest.mark.parametrize(
    ("num_stages", "n", "weights", "schedule"),
    all_pairs([(num_stages, n, *pair) for num_stages in (1, 2, 3, 4) for n in (1, 2, 3, 4, 7) for pair in PAIRS]),
)
def test_equal_stages(num_stages: int, n: int, weights: WeightPolicy, schedule: Schedule) -> None:
    """Nothing is lost to the strict order; `flush` loses its bubble, (K − 1) of N + K − 1, in every order."""
    forward, backward = [2.0] * num_stages, [4.0] * num_stages
    options = SimulationOptions(staleness=None, minibatches=30 * n, weights=weights, schedule=schedule)
    job = Regular(forward_ms=forward, backward_ms=backward, n=n)
    if n < POLICIES[weights].least_minibatches_per_wave(num_stages):
        with pytest.raises(PlanError, match=f"at least {num_stages}"):
            job.run(options)
        return
    rate = _rate(forward, backward, n, weights, schedule)
    assert job.run(options).samples_per_second == pytest.approx(rate, rel=1e-9)


#: Times are rounded to whole ticks; the shortest has 10⁸ of them.
ROUNDED = 1e-8
TIMES = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 20)), min_size=1, max_size=4)


@given(times=TIMES, n=st.integers(1, 8), weights=st.sampled_from(RUNNING_ON))
@settings(max_examples=60)
def test_never_faster_than_the_closed_form(times: list[tuple[float, float]], n: int, weights: WeightPolicy) -> None:
    """`flush` may be: its formula lets nobody compute while the slowest stage waits for those behind it."""
    n = max(n, POLICIES[weights].least_minibatches_per_wave(len(times)))
    forward, backward = [f for f, _ in times], [b for _, b in times]
    options = SimulationOptions(staleness=None, minibatches=24 * n, weights=weights)
    result = Regular(forward_ms=forward, backward_ms=backward, n=n).run(options)
    bound = _rate(forward, backward, n, weights, "1f1b")
    assert result.samples_per_second <= bound * (1 + 1e-9)
    if n == 1:
        assert result.samples_per_second == pytest.approx(bound, rel=ROUNDED)


@given(times=TIMES, n=st.integers(1, 6))
@settings(max_examples=40)
def test_gpipe_is_two_flow_shops(times: list[tuple[float, float]], n: int) -> None:
    """N equal minibatches through machines of times f take Σ f + (N − 1)·max f; then the same backwards."""
    forward, backward = [f for f, _ in times], [b for _, b in times]
    options = SimulationOptions(staleness=None, minibatches=10 * n, weights="flush", schedule="gpipe")
    wave_ms = sum(forward) + sum(backward) + (n - 1) * (max(forward) + max(backward))
    result = Regular(forward_ms=forward, backward_ms=backward, n=n).run(options)
    assert result.samples_per_second == pytest.approx(BATCH * 1000 * n / wave_ms, rel=ROUNDED)


def test_a_short_last_wave_of_gpipe_goes_back_too() -> None:
    options = SimulationOptions(staleness=None, minibatches=5, weights="flush", schedule="gpipe")
    result = Regular(forward_ms=[1, 1], backward_ms=[2, 2], n=3).run(options)
    first = [a for a in result.activities if a.stage == 0 and a.kind in {ActivityKind.FORWARD, ActivityKind.BACKWARD}]
    assert [f"{a.kind.value[0].upper()}{a.number}" for a in first] == [
        *("F1", "F2", "F3", "B1", "B2", "B3"),
        *("F4", "F5", "B4", "B5"),
    ]


@pytest.mark.parametrize(("weights", "schedule"), PAIRS)
def test_without_shards_nothing_is_waited_for(weights: WeightPolicy, schedule: Schedule) -> None:
    """D, and what is deterministic, are about virtual workers, of which there is one."""
    job = Regular(forward_ms=[1, 2, 1], backward_ms=[2, 3, 1], n=3, parameter_bytes=1 << 20)
    plan = SimulatedPlan(job.plan.workers, job.plan.minibatches_per_wave, PlacedParameters((), (), 3))
    bounded, unbounded = (
        simulate(plan, job.costs, SimulationOptions(staleness=d, minibatches=60, weights=weights, schedule=schedule))
        for d in (0, None)
    )
    assert bounded == unbounded
    assert bounded.waiting_seconds == (0.0,)
    assert bounded.cross_node_bytes_per_minibatch == 0.0
    with_shards = job.run(SimulationOptions(staleness=0, minibatches=60, weights=weights, schedule=schedule))
    assert with_shards.seconds > bounded.seconds


def test_bounded_staleness_holds_everyone_to_the_slowest() -> None:
    job = Regular(forward_ms=[1, 1], backward_ms=[2, 2], num_workers=3, n=2, factors={1: 2.0})
    result = job.run(SimulationOptions(staleness=1, minibatches=400))
    assert result.samples_per_second == pytest.approx(3 * BATCH / 0.006, rel=1e-3)
    unbounded = job.run(SimulationOptions(staleness=None, minibatches=400))
    assert unbounded.samples_per_second == pytest.approx(BATCH * (2 / 0.003 + 1 / 0.006), rel=1e-3)


def test_waiting_falls_with_staleness_and_the_bound_holds() -> None:
    job = Regular(
        forward_ms=[1, 2], backward_ms=[2, 3], num_workers=3, n=2, parameter_bytes=100_000, shards=("n0", "n1")
    )
    waiting = []
    for staleness in (0, 1, 2, 4, 8, None):
        result = job.run(SimulationOptions(staleness=staleness, minibatches=120, jitter_cv=0.5, seed=3))
        waiting.append(sum(result.waiting_seconds))
        bound = math.inf if staleness is None else staleness + 1
        assert result.max_clock_distance <= bound
        assert max(result.clock_distance_histogram) <= bound
        assert sum(result.clock_distance_histogram.values()) == 3 * 120
    assert waiting == sorted(waiting, reverse=True)
    assert waiting[0] > waiting[-1] == 0.0


def test_a_straggler_slows_its_virtual_worker() -> None:
    job = Regular(forward_ms=[1, 1], backward_ms=[2, 2], n=2)
    slow = SimulationOptions(staleness=None, minibatches=100, stragglers={DeviceId("n0/1"): 3.0})
    assert job.run(slow).samples_per_second == pytest.approx(BATCH / 0.009, rel=1e-3)


def test_jitter_keeps_the_mean_and_is_the_same_for_the_same_seed() -> None:
    job = Regular(forward_ms=[1], backward_ms=[2])
    runs = [job.run(SimulationOptions(staleness=None, minibatches=4000, jitter_cv=0.3, seed=s)) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0].samples_per_second == pytest.approx(BATCH / 0.003, rel=0.02)


def test_a_slow_link_is_the_bottleneck() -> None:
    """10 ms there and 10 ms back through one PCIe root, which contention makes one resource."""
    job = Regular(forward_ms=[1, 1], backward_ms=[1, 1], n=4, output_bytes=100_000, bandwidth=1e7)
    alone = job.run(SimulationOptions(staleness=None, minibatches=200, contention=False))
    shared = job.run(SimulationOptions(staleness=None, minibatches=200))
    assert shared.samples_per_second == pytest.approx(BATCH / 0.020, rel=0.01)
    assert alone.samples_per_second > 1.4 * shared.samples_per_second


#: Cases of `pull: required` in which later stages fetch a clock ahead that the first stage does not choose: it chose
#: before the newest usable clock was published, and they met the switch point later.
FETCHED_IN_VAIN = (233, 288, 546)


@pytest.mark.parametrize("seed", FETCHED_IN_VAIN)
def test_a_later_stage_pulls_ahead_what_the_first_does_not_choose(seed: int) -> None:
    case = random_case(seed)
    result = simulate(*plan_of(case), with_activities=True)
    waves = -(-case.minibatches // case.n)
    moved = {(one.vw, one.stage, one.number) for one in result.activities if one.kind is ActivityKind.PULL}
    pulls = [[round(per_wave * waves) for per_wave in stages] for stages in result.pulls_per_wave]
    assert any(max(stages) > stages[0] for stages in pulls)
    for vw, stages in enumerate(pulls):
        for stage, times in enumerate(stages):
            found = sum(one[:2] == (vw, stage) for one in moved)
            assert found in {0, times}, "a stage without parameters moves nothing"


@given(seed=st.integers(0, 10_000))
@settings(max_examples=60)
def test_bytes_between_nodes(seed: int) -> None:
    """What the definition says is what crosses, once every wave is pushed, and pulled unless it need not be."""
    case = random_case(seed)
    plan, costs, options = plan_of(case)
    result = simulate(plan, costs, options, with_activities=True)
    crossed = dict.fromkeys(_MOVES, 0)
    on_shard, whole = case.shard_of_layer, 0
    for activity in result.activities:
        if activity.kind not in _MOVES:
            continue
        assert activity.vw is not None
        assert activity.stage is not None
        stages = case.workers[activity.vw]
        stage = stages[activity.stage]
        if activity.shard is not None:
            other, layers = case.shards[activity.shard], range(stage.first, stage.last)
            of_layer = case.pushed if activity.kind is ActivityKind.PUSH else case.parameter_bytes.__getitem__
            size = sum(of_layer(x) for x in layers if on_shard[x] == activity.shard)
            whole += (activity.kind is ActivityKind.PUSH and other != stage.node) * sum(
                case.parameter_bytes[x] for x in layers if on_shard[x] == activity.shard
            )
        else:
            step = 1 if activity.kind is ActivityKind.ACTIVATIONS else -1
            upper = stages[min(activity.stage, activity.stage + step)]
            other, size = stages[activity.stage + step].node, case.output_bytes[upper.last - 1]
        crossed[activity.kind] += size * (other != stage.node)
    assert node_of(plan.workers[0][0].device) == case.workers[0][0].node
    minibatches, waves = case.minibatches, -(-case.minibatches // case.n)
    num_workers = len(case.workers)
    expected = (crossed[ActivityKind.ACTIVATIONS] + crossed[ActivityKind.GRADIENTS]) / (minibatches * num_workers)
    pushed, pulled = crossed[ActivityKind.PUSH], crossed[ActivityKind.PULL]
    if case.pull == "every_wave":
        pulled = whole  # a pull moves what a whole push moves; the last clocks are pulled by nobody
        assert result.cross_node_bytes_per_minibatch == cross_node_bytes_per_minibatch(plan, costs)
    expected += (pushed + pulled) / (waves * case.n * num_workers)
    assert result.cross_node_bytes_per_minibatch == pytest.approx(expected, abs=len(case.nodes))
