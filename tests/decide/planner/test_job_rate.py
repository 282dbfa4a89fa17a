"""The rate of a job and its bytes between nodes, against numbers by hand and byte by byte."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpipe.decide.planner.allocation.node_partition import node_partition
from hetpipe.decide.planner.jobs import JobPlan
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.errors import PlanError
from hetpipe.values.sync import PushCompression
from tests.decide.planner.job_cases import MIB, chain, cluster_of, jobs_for, jobs_of, roomy
from tests.decide.planner.job_oracle import Worker, job_rate, moved_bytes, pipelines, set_partitions
from tests.decide.planner.partition_cases import Shape, random_case

SHAPE = Shape(num_layers=(2, 5), num_devices=(2, 5), num_nodes=(1, 4), zeros=False)


def as_worker(plan: JobPlan, index: int) -> Worker:
    stages = plan.workers[index].stages
    cuts = (0, *(stage.last for stage in stages))
    return Worker(
        tuple(stage.device.split("/")[0] for stage in stages), cuts, plan.workers[index].minibatches_per_tick * 1e12
    )


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.sampled_from([1.0, 10.0, 50.0]), st.booleans(), st.data())
def test_every_byte_counts_once(seed: int, divisor: float, halves_pushes: bool, data: st.DataObject) -> None:  # noqa: FBT001 - drawn
    case = roomy(random_case(seed, SHAPE), network_divisor=divisor)
    groups = data.draw(st.sampled_from([g for g in set_partitions(list(case.cluster.devices)) if g]))
    jobs = jobs_of(case, compress_pushes="bfloat16" if halves_pushes else "none")
    try:
        plan = jobs.best_with(case.minibatches_per_wave, groups)  # type: ignore[arg-type]
    except PlanError:
        plan = None
    assume(plan is not None)
    assert plan is not None
    workers = [as_worker(plan, index) for index in range(len(plan.workers))]
    leaving, reaching = moved_bytes(case, workers, halves_pushes=halves_pushes)

    assert plan.rate.cross_node_bytes_per_minibatch == pytest.approx(sum(leaving.values()))
    assert sum(leaving.values()) == pytest.approx(sum(reaching.values()))
    # The oracle knows no pipelines that `flush` drains: tests/decide/simulator/test_round_trip.py does.
    expected = min(job_rate(case, workers, halves_pushes=halves_pushes), plan.rate.round_trip_samples_per_second)
    assert plan.rate.samples_per_second == pytest.approx(expected)
    for worker, group in zip(workers, groups, strict=True):
        assert any(
            (found.nodes, found.cuts) == (worker.nodes, worker.cuts)
            and found.minibatches_per_second == pytest.approx(worker.minibatches_per_second)
            for found in pipelines(case, group)
        )


@pytest.mark.parametrize(("compress_pushes", "moved"), [("none", 16 * MIB), ("bfloat16", 12 * MIB)])
def test_two_nodes_by_hand(compress_pushes: PushCompression, moved: int) -> None:
    # Each node is a virtual worker of two stages. Layers 0 and 2 lie on n0, layers 1 and 3 on n1, 4 MiB each: per wave
    # each worker pushes 8 or 4 MiB and pulls 8 MiB over the network, so twice that leaves nodes per 2 × 2 minibatches.
    jobs = jobs_for(
        chain([3.0] * 4, {"V": 1.0}, parameters=4 * MIB, output=0, batch_size=10),
        cluster_of(["VV", "VV"], gib={"V": 1}, network=1e9),
        PlanOptions(minibatches_per_wave=2, staleness=None, compress_pushes=compress_pushes),
    )

    rate = node_partition(jobs).rate

    assert rate.compute_samples_per_second == pytest.approx(2 * 10 / 0.006)
    assert rate.cross_node_bytes_per_minibatch == 2 * moved / 4
    assert rate.network_samples_per_second == pytest.approx(10 * 4 * 1e9 / moved)
    assert rate.samples_per_second == rate.network_samples_per_second
    assert rate.network_binds
    assert rate.busiest_node == "n0"


def test_one_node_sends_nothing() -> None:
    rate = node_partition(jobs_for(chain([3.0] * 4, {"V": 1.0}), cluster_of(["VV"], gib={"V": 1}))).rate

    assert (rate.cross_node_bytes_per_minibatch, rate.network_samples_per_second) == (0.0, math.inf)
    assert not rate.network_binds
