"""Plans of jobs whose stages alone hold the weights: one virtual worker, nothing placed, two tensors less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpipe.decide.planner.allocation.auto import auto
from hetpipe.decide.planner.allocation.exhaustive import every_grouping
from hetpipe.decide.planner.allocation.explicit import explicit
from hetpipe.decide.planner.allocation.parallel import parallel
from hetpipe.decide.planner.choose import choose_plan, closed_form
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.errors import PlanError
from hetpipe.values.document import document_of, to_plain
from hetpipe.values.ids import DeviceId
from hetpipe.values.plan_document import PlanDocument
from tests.decide.planner.job_cases import PAPER_CLUSTER, chain, cluster_of, jobs_for, jobs_of
from tests.decide.planner.partition_cases import Shape, random_case

ALONE = PlanOptions(with_shards=False)


@settings(max_examples=12)
@given(st.integers(0, 10**9))
def test_auto_finds_the_best_group(seed: int) -> None:
    shape = Shape(num_layers=(2, 5), num_devices=(1, 4), num_nodes=(1, 3), zeros=False)
    case = random_case(seed, shape)
    options = replace(jobs_of(case, any_n=True).options, with_shards=False)
    jobs = jobs_for(case.profile, case.cluster, options)
    rates = []
    for groups in every_grouping(jobs.devices):
        if len(groups) == 1:
            try:
                rates.append(jobs.best(groups).rate.samples_per_second)
            except PlanError:
                continue
    assume(rates)

    found = auto(jobs)

    assert len(found.workers) == 1
    assert found.rate.samples_per_second == pytest.approx(max(rates), rel=1e-9)
    assert found.placed.pieces == ()


def test_a_large_cluster_has_a_pipeline_of_its_own() -> None:
    jobs = jobs_for(chain([3.0] * 40, {"V": 1.0}), cluster_of(["VVVV"] * 6), ALONE)

    assert [len(worker.stages) for worker in auto(jobs).workers] == [16]


@pytest.mark.parametrize("most", [1, 2])
def test_groupings_of_so_many_groups(most: int) -> None:
    devices = cluster_of(["VQ", "VVQ"]).devices
    limited = list(every_grouping(devices, most))

    assert limited == [groups for groups in every_grouping(devices) if len(groups) <= most]
    assert max(len(groups) for groups in limited) == most


def test_several_virtual_workers_are_refused() -> None:
    two = tuple((DeviceId(f"n{node}/0"),) for node in (0, 1))
    jobs = jobs_for(chain([1.0] * 4), PAPER_CLUSTER, replace(ALONE, allocation="explicit", workers=two))

    with pytest.raises(
        PlanError, match="without parameter servers a job has one virtual worker, and this allocation has 2"
    ):
        explicit(jobs)


def test_parallel_has_one_pipeline() -> None:
    options = PlanOptions(allocation="parallel", weights="double_buffer", max_batch=64, with_shards=False)
    plan = parallel(jobs_for(chain([30.0] * 4, {"V": 1.0}, batch_size=8), cluster_of(["VVVV"]), options))

    assert len(plan.workers) == 1


def test_the_document() -> None:
    plan = choose_plan(chain([3.0] * 4, {"V": 1.0}), cluster_of(["V", "V"]), ALONE, predict=closed_form)

    assert (plan.has_shards, plan.shards, plan.placement) == (False, (), {})
    assert document_of(PlanDocument, to_plain(plan), what="plan") == plan
    (np,) = [one for one in plan.alternatives if one.name == "NP"]
    assert "a job has one virtual worker, and this allocation has 2" in np.reason


def test_two_tensors_less() -> None:
    profile, cluster = chain([3.0] * 2, {"V": 1.0}), cluster_of(["VV"])
    options = PlanOptions(allocation="NP", minibatches_per_wave=2)
    with_shards = choose_plan(profile, cluster, options, predict=closed_form).virtual_workers[0]
    without = choose_plan(profile, cluster, replace(options, with_shards=False), predict=closed_form).virtual_workers[0]

    for more, less in zip(with_shards.stages, without.stages, strict=True):
        assert more.layers == less.layers
        parameters = sum(layer.parameter_bytes for layer in profile.layers[slice(*more.layers)])
        assert more.memory_bytes - less.memory_bytes == 2 * parameters
