"""Minibatch sizes that fit, and what they cost."""

from __future__ import annotations

from dataclasses import replace

from hetpipe.decide.planner.batch_sizes import batch_sizes
from hetpipe.decide.planner.choose import choose_plan, closed_form
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.scaled_profile import scaled_profile
from hetpipe.errors import InfeasiblePlan
from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.values.ids import DeviceId
from hetpipe.values.profile import LayerProfile, Profile

MIB = 1 << 20
_LINK = LinkSpec(bandwidth_bytes_per_second=1e10, latency_seconds=0.0, efficiency=1.0)
CLUSTER = Cluster(
    device_types={"big": DeviceType(memory_bytes=96 * MIB), "small": DeviceType(memory_bytes=48 * MIB)},
    nodes=(Node(name="a", devices=("big",)), Node(name="b", devices=("small",))),
    links=Links(intra_node=_LINK, inter_node=_LINK),
)
PROFILE = Profile(
    version=2,
    model="chain",
    batch_size=2,
    input_bytes=MIB // 4,
    layers=tuple(
        LayerProfile(
            name=f"layer{index}",
            parameter_bytes=MIB,
            activation_bytes=2 * MIB,
            output_bytes=MIB // 4,
            forward_ms={"big": 1.0, "small": 2.0},
            backward_ms={"big": 2.0, "small": 4.0},
        )
        for index in range(8)
    ),
)
KEEP = PlanOptions(
    allocation="explicit",
    workers=((DeviceId("a/0"), DeviceId("b/0")),),
    minibatches_per_wave=2,
    recompute="off",
    placement="balanced",
)
CHOSEN = replace(KEEP, recompute="auto", chooses_policies=True, host_bytes_per_second=1e9)


def largest(options: PlanOptions) -> int:
    return max(row.batch_size for row in batch_sizes(PROFILE, CLUSTER, options) if row.samples_per_second is not None)


def test_chosen_policies_fit_larger_minibatches_and_say_what_they_cost() -> None:
    assert largest(KEEP) < largest(replace(CHOSEN, host_bytes_per_second=None))
    rows = batch_sizes(PROFILE, CLUSTER, CHOSEN)
    assert [row.batch_size for row in rows] == sorted({row.batch_size for row in rows})
    fitting = [row for row in rows if row.samples_per_second is not None]
    assert len(fitting) < len(rows)
    assert tuple(fitting) == rows[: len(fitting)], "what is larger needs more memory"
    assert (fitting[0].swapped_bytes, fitting[0].recomputed_ms) == (0, 0.0)
    assert fitting[-1].swapped_bytes + fitting[-1].recomputed_ms > 0
    assert all(row.fullest is not None and row.fullest <= 1 for row in fitting)
    assert all("give every device " in row.reason for row in rows[len(fitting) :])


def test_a_size_that_fits_is_what_a_plan_runs() -> None:
    for row in batch_sizes(PROFILE, CLUSTER, CHOSEN):
        profile = scaled_profile(PROFILE, row.batch_size)
        try:
            plan = choose_plan(profile, CLUSTER, CHOSEN, predict=closed_form)
        except InfeasiblePlan:
            assert row.samples_per_second is None
            continue
        assert plan.predicted.samples_per_second == row.samples_per_second
        for stage in plan.virtual_workers[0].stages:
            assert len(stage.memory) == stage.layers[1] - stage.layers[0]
            assert stage.memory_bytes <= CLUSTER.device_types[stage.type].memory_bytes


def test_a_profile_that_does_not_fit_is_made_smaller() -> None:
    rows = batch_sizes(scaled_profile(PROFILE, 1024), CLUSTER, CHOSEN)
    assert rows[-1].batch_size == 1024
    assert rows[-1].samples_per_second is None
    assert rows[0].samples_per_second is not None
