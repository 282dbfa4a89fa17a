"""MFU and tokens/s of a plan, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest

from hetpipe.decide.planner.choose import choose_plan, closed_form, with_utilisation
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.scaled_profile import scaled_profile
from hetpipe.values.cluster import Cluster, DeviceType
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile
from tests.decide.planner.job_cases import PAPER_CLUSTER, chain

PEAKS = {"V": 10e12, "R": 8e12, "G": 5e12, "Q": 4e12}
#: Of each layer for a minibatch of 32.
FORWARD, BACKWARD = 64_000_000, 128_000_000

#: Four for each stage.
MILLISECONDS = [3.0, 5.0, 2.0, 4.0] * 2


def cluster(peaks: Mapping[str, float] = PEAKS) -> Cluster:
    """Half of the devices of the paper's: the alternatives of all take ten times as long to judge."""
    types = {
        name: DeviceType(memory_bytes=kind.memory_bytes, peak_flops=peaks.get(name))
        for name, kind in PAPER_CLUSTER.device_types.items()
    }
    nodes = tuple(node.model_copy(update={"devices": node.devices[:2]}) for node in PAPER_CLUSTER.nodes)
    return PAPER_CLUSTER.model_copy(update={"device_types": types, "nodes": nodes})


def counted(*, tokens: int | None = 128) -> Profile:
    bare = chain(MILLISECONDS)
    flops = {"forward_flops": FORWARD, "backward_flops": BACKWARD}
    layers = tuple(layer.model_copy(update=flops) for layer in bare.layers)
    return bare.model_copy(update={"layers": layers, "tokens_per_sample": tokens})


def planned(profile: Profile, cluster: Cluster, *, staleness: int | None = 0) -> PlanDocument:
    options = PlanOptions(allocation="NP", minibatches_per_wave=4, optimizer_slots=1, staleness=staleness)
    return choose_plan(profile, cluster, options, predict=closed_form)


@cache
def usual(staleness: int | None = 0) -> PlanDocument:
    return planned(counted(), cluster(), staleness=staleness)


def test_a_plan_and_its_stages_use_what_their_layers_take_of_their_peaks() -> None:
    plan = usual()
    rate = plan.predicted.samples_per_second
    assert plan.predicted.tokens_per_second == pytest.approx(128 * rate)
    total = 2 * sum(PEAKS.values())
    assert plan.predicted.model_flops_utilisation == pytest.approx(
        rate / 32 * len(MILLISECONDS) * (FORWARD + BACKWARD) / total, abs=1e-6
    )
    assert plan.predicted.model_flops_utilisation_reason is None
    for worker in plan.virtual_workers:
        for stage in worker.stages:
            layers = stage.layers[1] - stage.layers[0]
            flops = rate / 4 / 32 * layers * (FORWARD + BACKWARD)
            assert stage.model_flops_utilisation == pytest.approx(flops / PEAKS[stage.type], abs=1e-6)


@pytest.mark.parametrize("staleness", [0, None])
def test_stages_add_up_to_the_plan(staleness: int | None) -> None:
    plan = usual(staleness)
    stages = [stage for worker in plan.virtual_workers for stage in worker.stages]
    used = sum((stage.model_flops_utilisation or 0.0) * PEAKS[stage.type] for stage in stages)
    whole = plan.predicted.model_flops_utilisation
    assert whole == pytest.approx(used / sum(PEAKS[stage.type] for stage in stages), rel=1e-3)


def test_a_type_without_a_peak_leaves_the_other_stages_theirs_and_is_named() -> None:
    plan = planned(counted(tokens=None), cluster({kind: PEAKS[kind] for kind in "VRG"}))
    assert plan.predicted.tokens_per_second is plan.predicted.model_flops_utilisation is None
    assert plan.predicted.model_flops_utilisation_reason == (
        "no peak is known for Q, not listed in the catalogue of device types; give device_types.Q.peak_flops in the "
        "cluster file"
    )
    for worker in plan.virtual_workers:
        assert all((stage.model_flops_utilisation is None) == (stage.type == "Q") for stage in worker.stages)


def test_a_profile_of_an_earlier_version_says_what_to_do() -> None:
    plan = planned(chain(MILLISECONDS), cluster())
    assert plan.predicted.model_flops_utilisation is None
    assert plan.predicted.model_flops_utilisation_reason == (
        "the profile has no FLOPs of its layers; create it again with this version of `hetpipe profile`"
    )


def test_another_minibatch_size_has_the_same_work_per_sample() -> None:
    small = scaled_profile(counted(), 8)
    assert (small.layers[0].forward_flops, small.layers[0].backward_flops) == (FORWARD // 4, BACKWARD // 4)
    assert scaled_profile(chain([1.0]), 8).layers[0].forward_flops is None
    plan = usual()
    assert with_utilisation(plan, small, cluster()) == plan
