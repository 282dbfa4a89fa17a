"""The partitioner against an oracle that tries everything, against a MILP, and in its words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.decide.planner.costs import Costs, MemoryModel, milliseconds
from hetpipe.decide.planner.cuts import LinkIndex, LinkSet, ReachTables, Recompute
from hetpipe.decide.planner.orders import DeviceMix, MixShape, OrderSearch
from hetpipe.decide.planner.partitioner import Partition, Partitioner, explain, shortage_bytes
from hetpipe.errors import InfeasiblePlan, PlanError
from hetpipe.values.cluster import Cluster, node_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.profile import Profile
from hetpipe.values.quantities import bytes_text
from tests.decide.planner.partition_cases import (
    MIB,
    Case,
    Shape,
    Stage,
    best_of_all,
    random_case,
    stage_bytes,
    stage_ps,
)
from tests.decide.planner.partition_milp import best_ms_by_milp

SMALL = Shape(num_layers=(1, 10), num_devices=(1, 5), num_nodes=(1, 5))
LARGER = Shape(num_layers=(20, 24), num_devices=(6, 7), num_nodes=(2, 3), zeros=False, room=(1.5, 8.0))

#: Larger instances that fit and that HiGHS solves within a few seconds.
MILP_SEEDS = (1, 3, 6, 8, 17, 18, 21, 22, 28, 32, 36, 43, 44, 49, 55, 67, 72, 76, 78, 79, 82, 87)

SEEDS = st.integers(0, 2**32)


def memory_of(case: Case) -> MemoryModel:
    return MemoryModel(
        case.weights,
        case.minibatches_per_wave,
        case.optimizer_slots,
        case.reserve_bytes,
        schedule=case.schedule,
        accumulate=case.accumulate,
    )


def min_max_partition(
    costs: Costs, devices: Sequence[DeviceId], memory: MemoryModel, *, recompute: Recompute = "auto"
) -> Partition:
    """One call by itself; raises `InfeasiblePlan` with the explanation where nothing fits."""
    partitioner = Partitioner(costs, recompute=recompute)
    found = partitioner.find(devices, memory)
    if found is None:
        raise InfeasiblePlan(explain(partitioner, devices, memory))
    return found


def partitioner_of(case: Case) -> Partitioner:
    return Partitioner(Costs(case.profile, case.cluster), recompute=case.recompute)


def check_stages(case: Case, partition: Partition) -> None:
    """Every figure of a partition, by the oracle's definitions."""
    stages = partition.stages
    assert sorted(stage.device for stage in stages) == sorted(case.cluster.devices)
    assert [stage.first for stage in stages] == [0, *(stage.last for stage in stages[:-1])]
    assert stages[-1].last == len(case.profile.layers)
    nodes = [None, *(node_of(stage.device) for stage in stages), None]
    for index, stage in enumerate(stages):
        assert stage.first < stage.last
        assert stage.kind == case.cluster.devices[stage.device]
        node, before, behind = node_of(stage.device), nodes[index], nodes[index + 2]
        same = Stage(index, len(stages), stage.kind, node, before, behind, stage.first, stage.last)
        assert stage.ticks == stage_ps(case, same)
        assert stage.memory_bytes == stage_bytes(case, same, recompute=stage.recompute)
        assert stage.memory_bytes <= case.cluster.device_types[stage.kind].memory_bytes
        if case.recompute == "auto" and stage.recompute:
            assert stage_bytes(case, same, recompute=False) > case.cluster.device_types[stage.kind].memory_bytes


def check_against_everything(case: Case) -> None:
    partitioner = partitioner_of(case)
    devices, memory = list(case.cluster.devices), memory_of(case)
    found, best = partitioner.find(devices, memory), best_of_all(case)
    assert (found and found.bottleneck_ticks) == best
    assert partitioner.fits(devices, memory) == (best is not None)
    if found is not None:
        assert found.gap == 0.0
        check_stages(case, found)


@pytest.mark.matrix
@given(SEEDS)
@settings(max_examples=100)
def test_no_cut_and_no_order_is_better(seed: int) -> None:
    check_against_everything(random_case(seed, SMALL))


@pytest.mark.matrix
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.exhaustive) for block in range(1, 8))])
def test_no_cut_and_no_order_is_better_for_two_thousand_instances(block: int) -> None:
    for seed in range(250 * block, 250 * (block + 1)):
        check_against_everything(random_case(seed, SMALL))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", MILP_SEEDS)
def test_a_mixed_integer_programme_finds_the_same(seed: int) -> None:
    case = random_case(seed, LARGER)
    found = partitioner_of(case).find(list(case.cluster.devices), memory_of(case))
    best_ms = best_ms_by_milp(case)

    assert (found is None) == (best_ms is None)
    if found is not None:
        check_stages(case, found)
        assert milliseconds(found.bottleneck_ticks) == pytest.approx(best_ms, rel=1e-6)


@given(SEEDS)
@settings(max_examples=50)
def test_beyond_max_states_the_bound_and_the_gap_hold(seed: int) -> None:
    case = random_case(seed, SMALL)
    beam = Partitioner(Costs(case.profile, case.cluster), recompute=case.recompute, max_states=0, beam_width=1)
    found, best = beam.find(list(case.cluster.devices), memory_of(case)), best_of_all(case)

    if best is None:
        assert found is None
    if found is not None and best is not None:
        check_stages(case, found)
        assert found.lower_bound_ticks <= best <= found.bottleneck_ticks
        assert found.bottleneck_ticks <= max(1, found.lower_bound_ticks) * (1 + found.gap) + 1


@given(SEEDS, st.integers(1, 8))
@settings(max_examples=50)
def test_types_that_are_counted_together_change_nothing(seed: int, max_codes: int) -> None:
    case = random_case(seed, SMALL)
    costs, memory = Costs(case.profile, case.cluster), memory_of(case)
    tables = ReachTables(costs, case.recompute)
    names = [node.name for node in case.cluster.nodes]
    kinds = tuple(sorted(set(case.cluster.devices.values())))
    shape = MixShape(
        kinds,
        tuple(tuple(node.devices.count(kind) for kind in kinds) for node in case.cluster.nodes),
        tuple(tuple(tables.link(case.cluster.link(a, b)) for b in names) for a in names),
    )
    mix = DeviceMix(shape, max_codes=max_codes)

    found = OrderSearch(mix, tables, memory, costs.num_layers).solve(None, lambda: True).found

    assert (found and found.ticks) == best_of_all(case)


@given(SEEDS, st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_the_answer_depends_on_the_set_of_devices_alone(seed: int, source: random.Random) -> None:
    case = random_case(seed, SMALL)
    partitioner, memory = partitioner_of(case), memory_of(case)
    devices = list(case.cluster.devices)
    for _ in range(3):
        others = source.sample(devices, source.randint(1, len(devices)))
        partitioner.find(others, memory)

    first = partitioner_of(case).find(devices, memory)
    source.shuffle(devices)

    assert partitioner.find(devices, memory) == first
    assert partitioner_of(case).find(devices, memory) == first


def test_alike_devices_share_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    partitioner = Partitioner(Costs(chain([1.0] * 8), FOUR_TYPES))
    first = partitioner.find(ids("v/0", "q/1"), MemoryModel())
    monkeypatch.delattr(OrderSearch, "solve")

    second = partitioner.find(ids("q/3", "v/2"), MemoryModel())

    assert first is not None and second is not None
    assert [stage.device for stage in first.stages] == ["q/1", "v/0"]
    assert [replace(stage, device=DeviceId("")) for stage in first.stages] == [
        replace(stage, device=DeviceId("")) for stage in second.stages
    ]
    assert [stage.device for stage in second.stages] == ["q/3", "v/2"]


# -- cases small enough to see ----------------------------------------------------------------------------------------


def ids(*names: str) -> list[DeviceId]:
    return [DeviceId(name) for name in names]


def chain(forward_ms: list[float], *, output_bytes: int = 0, parameter_bytes: int = 0, **factor: float) -> Profile:
    """Layers whose backward takes twice their forward; types by how many times slower than V they are."""
    slower = {"V": 1.0, "R": 1.0, "G": 1.0, "Q": 1.0} | factor
    layers = tuple(
        {
            "name": f"block{index}",
            "parameter_bytes": parameter_bytes,
            "activation_bytes": MIB,
            "output_bytes": output_bytes,
            "forward_ms": {kind: time * times for kind, times in slower.items()},
            "backward_ms": {kind: 2 * time * times for kind, times in slower.items()},
        }
        for index, time in enumerate(forward_ms)
    )
    return Profile.model_validate(
        {"version": 1, "model": "chain", "batch_size": 8, "input_bytes": MIB, "layers": layers}
    )


def cluster(nodes: dict[str, str], *, memory_bytes: int = 1024 * MIB, network: float = 1e9) -> Cluster:
    """Nodes by the letters of their devices' types; 10 GB/s within a node."""
    return Cluster.model_validate(
        {
            "device_types": {kind: {"memory_bytes": memory_bytes} for kind in "VRGQ"},
            "nodes": tuple({"name": name, "devices": tuple(devices)} for name, devices in nodes.items()),
            "links": {
                "intra_node": {"bandwidth_bytes_per_second": 1e10},
                "inter_node": {"bandwidth_bytes_per_second": network},
            },
        }
    )


FOUR_TYPES = cluster({"v": "VVVV", "r": "RRRR", "g": "GGGG", "q": "QQQQ"})


def test_equal_devices_share_equal_layers() -> None:
    found = min_max_partition(Costs(chain([1.0] * 8), FOUR_TYPES), ids("v/3", "v/2", "v/1", "v/0"), MemoryModel())

    assert [(stage.device, stage.first, stage.last) for stage in found.stages] == [
        ("v/0", 0, 2),
        ("v/1", 2, 4),
        ("v/2", 4, 6),
        ("v/3", 6, 8),
    ]
    assert milliseconds(found.bottleneck_ticks) == 6.0
    assert (found.gap, found.lower_bound_ticks) == (0.0, found.bottleneck_ticks)


def test_slow_devices_get_fewer_layers() -> None:
    """One device of each type, as in ED of the paper: 12 layers, shares in proportion to speed."""
    profile = chain([1.0] * 12, R=1.0, G=2.0, Q=3.0)
    found = min_max_partition(Costs(profile, FOUR_TYPES), ids("q/0", "g/0", "r/0", "v/0"), MemoryModel())

    assert {stage.kind: stage.last - stage.first for stage in found.stages} in (
        {"V": 5, "R": 4, "G": 2, "Q": 1},
        {"V": 4, "R": 5, "G": 2, "Q": 1},
        {"V": 5, "R": 5, "G": 1, "Q": 1},
    )
    assert milliseconds(found.bottleneck_ticks) == 15.0


def test_the_order_keeps_a_node_together_where_the_network_is_slow() -> None:
    """10 MB take 1 ms within a node and 100 ms over the network: one crossing, not three."""
    two = cluster({"a": "VV", "b": "VV"}, network=1e8)
    found = min_max_partition(
        Costs(chain([1.0] * 4, output_bytes=10_000_000), two), ids("a/0", "b/0", "a/1", "b/1"), MemoryModel()
    )

    assert [node_of(stage.device) for stage in found.stages] in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
    assert [milliseconds(stage.receive_ticks) for stage in found.stages] == [1.0, 101.0, 101.0, 1.0]


def test_a_stage_recomputes_only_where_it_would_not_fit_otherwise() -> None:
    small = cluster({"a": "VV"}, memory_bytes=16 * MIB)
    costs = Costs(chain([1.0] * 12), small)
    memory = MemoryModel(minibatches_per_wave=4)

    found = min_max_partition(costs, ids("a/0", "a/1"), memory)

    assert [stage.recompute for stage in found.stages] == [True, False]
    assert [(stage.first, stage.last) for stage in found.stages] == [(0, 5), (5, 12)]
    with pytest.raises(InfeasiblePlan, match="set --recompute auto"):
        min_max_partition(Costs(chain([1.0] * 24), small), ids("a/0", "a/1"), memory, recompute="off")


def test_a_layer_without_time_still_needs_a_device() -> None:
    found = min_max_partition(Costs(chain([0.0, 0.0, 0.0]), FOUR_TYPES), ids("v/0", "q/0", "g/0"), MemoryModel())

    assert (found.bottleneck_ticks, found.gap) == (0, 0.0)
    assert [stage.last for stage in found.stages] == [1, 2, 3]


def test_fronts_are_counted_like_the_state_space_they_span() -> None:
    """Every front that moves can reach, on nodes some of which are alike."""
    link = LinkSet({LinkIndex(0)})
    mix = DeviceMix(MixShape(("V", "R"), ((2, 1), (2, 1), (0, 2)), ((link,) * 3,) * 3))
    waiting = [move.front for move in mix.first_moves()]
    seen = set(waiting)
    while waiting:
        after = {move.front for move in mix.moves(waiting.pop())} - seen
        seen |= after
        waiting += after

    assert len(seen) == mix.num_fronts()


# -- refusals ---------------------------------------------------------------------------------------------------------


def refusal(
    profile: Profile, where: Cluster, devices: list[DeviceId], memory: MemoryModel, recompute: Recompute
) -> str:
    with pytest.raises(InfeasiblePlan) as caught:
        min_max_partition(Costs(profile, where), devices, memory, recompute=recompute)
    return str(caught.value)


def test_a_refusal_says_what_is_missing_where() -> None:
    """Parameters count N + 2 + 1 = 4 times; the one device has 64 MiB for 4·4·8 MiB and 4 activations."""
    one = cluster({"a": "V", "b": "V"}, memory_bytes=64 * MIB)
    said = refusal(chain([1.0] * 4, parameter_bytes=8 * MIB), one, ids("a/0"), MemoryModel(), "off")

    assert said == (
        "no cuts and no order of a/0 fit; at best stage 0 with layers 0 to 3 (block0 to block3) lacks 68 MiB "
        "on a/0 (type V, 64 MiB); give every device 68 MiB more"
    )


def test_a_refusal_names_a_layer_that_fits_nowhere() -> None:
    two = cluster({"a": "VV"}, memory_bytes=64 * MIB)
    profile = chain([1.0, 1.0], parameter_bytes=20 * MIB)

    said = refusal(profile, two, ids("a/0", "a/1"), MemoryModel(), "off")

    assert "lacks 17 MiB" in said
    assert "layer 0 (block0), alone as stage 0," in said or "layer 1 (block1), alone as stage 1," in said


def test_a_refusal_offers_the_nearest_changes_that_help() -> None:
    two = cluster({"a": "VV", "b": "R"}, memory_bytes=64 * MIB)
    profile = chain([1.0] * 2, parameter_bytes=8 * MIB)
    memory = MemoryModel(minibatches_per_wave=5, optimizer_slots=1)

    said = refusal(profile, two, ids("a/0", "a/1"), memory, "auto")

    assert "lower --minibatches-per-wave to 3, " in said
    assert "set --weights flush or give every device" in said
    assert "--optimizer-slots" not in said
    fewer_slots = refusal(profile, two, ids("a/0", "a/1"), MemoryModel(optimizer_slots=6), "auto")
    assert "(--optimizer-slots 3)" in fewer_slots
    longer = chain([1.0] * 3, parameter_bytes=8 * MIB)
    third = refusal(longer, two, ids("a/0", "a/1"), MemoryModel(weights="flush", optimizer_slots=3), "auto")
    assert "add b/0 (type R)" in third
    drained = MemoryModel(weights="flush", minibatches_per_wave=32, schedule="gpipe")
    assert "set --schedule 1f1b" in refusal(profile, two, ids("a/0", "a/1"), drained, "off")
    tight = replace(drained, reserve_bytes=30 * MIB)
    assert "--schedule" not in refusal(profile, two, ids("a/0", "a/1"), tight, "off")


def test_a_refusal_offers_an_n_that_updates_divide() -> None:
    two = cluster({"a": "VV"}, memory_bytes=64 * MIB)
    profile = chain([1.0] * 2, parameter_bytes=8 * MIB)
    memory = MemoryModel(minibatches_per_wave=8, accumulate=2)

    assert "lower --minibatches-per-wave to 2, " in refusal(profile, two, ids("a/0", "a/1"), memory, "auto")


@pytest.mark.matrix
@given(SEEDS)
@settings(max_examples=60)
def test_what_is_said_to_be_missing_is_exactly_enough(seed: int) -> None:
    case = random_case(seed, SMALL)
    devices, memory = list(case.cluster.devices), memory_of(case)
    costs = Costs(case.profile, case.cluster)
    if best_of_all(case) is not None or len(devices) > costs.max_stages:
        return
    with pytest.raises(InfeasiblePlan) as caught:
        min_max_partition(costs, devices, memory, recompute=case.recompute)
    missing = shortage_bytes(partitioner_of(case), devices, memory)

    assert f"give every device {bytes_text(missing, round_up=True)} more" in str(caught.value)
    assert best_of_all(with_more_memory(case, missing)) is not None
    assert best_of_all(with_more_memory(case, missing - 1)) is None


def with_more_memory(case: Case, extra_bytes: int) -> Case:
    types = {
        name: {"memory_bytes": kind.memory_bytes + extra_bytes} for name, kind in case.cluster.device_types.items()
    }
    return replace(case, cluster=Cluster.model_validate(case.cluster.model_dump() | {"device_types": types}))


def test_no_stage_ends_at_a_forbidden_cut_and_too_few_cuts_are_refused_with_reasons_and_fix() -> None:
    layers = [layer.model_dump() for layer in chain([1.0] * 4).layers]
    layers[0]["no_cut"] = layers[2]["no_cut"] = "buffer b is written before it and used after it"
    layers[1]["forbidden"] = ({"before": "x", "upto": "y", "places": 3, "reason": "it is recomputed"},)
    profile = Profile.model_validate(chain([1.0] * 4).model_dump() | {"version": 2, "layers": tuple(layers)})
    found = min_max_partition(Costs(profile, FOUR_TYPES), ids("v/0", "v/1"), MemoryModel())

    assert [stage.last for stage in found.stages] == [2, 4]
    assert refusal(profile, FOUR_TYPES, ids("v/0", "v/1", "v/2"), MemoryModel(), "auto") == (
        "the model can be cut into at most 2 stages, not 3: no cut before block1 and at 1 more place: "
        "buffer b is written before it and used after it; no cut before x … y (3 places): it is recomputed; use at "
        "most 2 devices per virtual worker"
    )


def test_more_devices_than_layers_are_refused() -> None:
    said = refusal(chain([1.0] * 2), FOUR_TYPES, ids("v/0", "v/1", "v/2"), MemoryModel(), "auto")

    assert said == "3 stages cannot share 2 layers; use at most 2 devices per virtual worker"


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (("v/9",), "the cluster has no device v/9; did you mean"),
        (("v/0", "v/0"), "each of them once; got v/0, v/0"),
        ((), "each of them once; got none"),
    ],
)
def test_devices_must_be_there_once(devices: tuple[str, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        min_max_partition(Costs(chain([1.0]), FOUR_TYPES), ids(*devices), MemoryModel())


def test_a_type_without_times_is_refused() -> None:
    bare = chain([1.0]).model_dump()
    for layer in bare["layers"]:
        del layer["forward_ms"]["Q"], layer["backward_ms"]["Q"]
    costs = Costs(Profile.model_validate(bare), FOUR_TYPES)

    with pytest.raises(PlanError, match="the profile has no times for type Q"):
        min_max_partition(costs, ids("q/0"), MemoryModel())
