"""Host memory of the nodes of a plan, by hand; benchmarks compare it with real runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.decide.planner import host_memory as made_of
from hetpipe.decide.planner.choose import choose_plan, closed_form
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.values.ids import DeviceId
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import AliveValue, LayerProfile, ParameterProfile, Profile

MIB = 1 << 20
LINK = LinkSpec(bandwidth_bytes_per_second=1e9)
OPTIONS = PlanOptions(allocation="explicit", minibatches_per_wave=4, optimizer_slots=2)


def profile(*, batch_size: int = 8, names_parameters: bool = True) -> Profile:
    """Four layers of 10 MiB each, of which the largest parameter has 6; 2 MiB of activations, 1 MiB at each cut."""
    sizes = (6 * MIB, 4 * MIB)
    layers = tuple(
        LayerProfile(
            name=str(index),
            parameter_bytes=10 * MIB,
            activation_bytes=2 * MIB,
            output_bytes=MIB,
            forward_ms={"cpu": 1.0, "V": 1.0},
            backward_ms={"cpu": 2.0, "V": 2.0},
            parameters=tuple(
                ParameterProfile(name=f"{index}.{place}", shape=(size // 4,), dtype="float32")
                for place, size in enumerate(sizes)
                if names_parameters
            ),
        )
        for index in range(4)
    )
    return Profile(version=1, model="", batch_size=batch_size, input_bytes=MIB, layers=layers)


def cluster(*nodes: tuple[str, int]) -> Cluster:
    """Nodes by the type and the number of their devices."""
    types = {kind for kind, _ in nodes}
    return Cluster(
        device_types={kind: DeviceType(memory_bytes=1 << 36) for kind in sorted(types)},
        nodes=tuple(Node(name=f"n{i}", devices=(kind,) * count) for i, (kind, count) in enumerate(nodes)),
        links=Links(intra_node=LINK, inter_node=LINK),
    )


def planned(where: Cluster, *workers: tuple[str, ...], options: PlanOptions = OPTIONS) -> PlanDocument:
    groups = tuple(tuple(DeviceId(name) for name in worker) for worker in workers)
    return choose_plan(profile(), where, replace(options, workers=groups), predict=closed_form)


def sizes(document: PlanDocument) -> dict[str, float]:
    """MiB by process, over all nodes."""
    return {one.name: one.bytes / MIB for node in document.host_memory for one in node.processes}


def test_a_stage_on_cpu_devices() -> None:
    """N = 4 weight buffers, 2 for shards, 1 gradient, 2 slots; 2 on the host; 2 temporaries of 6 MiB; frames."""
    found = sizes(planned(cluster(("cpu", 2)), ("n0/0", "n0/1")))
    base = made_of.STAGE_BASE_BYTES / MIB
    copies, in_flight = 4 + 2 + 1 + 2 + 2, (4, 1)
    sent, received = 2 * (1 + 1), in_flight[0] * 1 + 2 * 1
    assert found["stage 0 of virtual worker 0"] == base + copies * 20 + in_flight[0] * 4 + (2 + 2 * 6) + sent
    assert found["stage 1 of virtual worker 0"] == base + copies * 20 + in_flight[1] * 4 + (2 + 2 * 6) + received


def test_a_tied_weight_at_a_border_has_gradients_of_its_own() -> None:
    """3 MiB of the bytes at each cut are a tie."""
    untied = profile()
    tie = AliveValue(name="parameter:tied", num_bytes=3 * MIB, has_gradient=True)
    layers = tuple(
        layer.model_copy(update={"output_bytes": 3 * MIB, "gradient_bytes": 3 * MIB, "alive": (tie,)})
        for layer in untied.layers[:-1]
    )
    tied = untied.model_copy(update={"version": 2, "layers": (*layers, untied.layers[-1])})
    workers = ((DeviceId("n0/0"), DeviceId("n0/1")),)
    options = replace(OPTIONS, workers=workers)
    before, found = (
        sizes(choose_plan(each, cluster(("cpu", 2)), options, predict=closed_form)) for each in (untied, tied)
    )
    assert found["stage 0 of virtual worker 0"] - before["stage 0 of virtual worker 0"] == 2 * 2 * 2 + 2 * 3
    assert found["stage 1 of virtual worker 0"] - before["stage 1 of virtual worker 0"] == (4 + 2) * 2 + 2 * 3


def test_a_stage_on_a_gpu_takes_what_is_on_its_way_to_and_from_the_shards() -> None:
    found = sizes(planned(cluster(("V", 2)), ("n0/0", "n0/1")))
    base = made_of.STAGE_BASE_BYTES / MIB
    assert found["stage 0 of virtual worker 0"] == base + 2 * 20 + 4
    further = sizes(planned(cluster(("V", 2)), ("n0/0", "n0/1"), options=replace(OPTIONS, staleness=3)))
    assert further["stage 0 of virtual worker 0"] == base + 5 * 20 + 4


def test_a_shard_has_versions_and_a_wave_of_each_virtual_worker() -> None:
    base, stream = made_of.SHARD_BASE_BYTES / MIB, made_of.STREAM_BYTES / MIB
    one = sizes(planned(cluster(("cpu", 2)), ("n0/0", "n0/1")))
    assert one["parameter server 0"] == base + (2 + 1) * 40 + 2 * stream
    two = sizes(planned(cluster(("cpu", 4)), ("n0/0", "n0/1"), ("n0/2", "n0/3")))
    assert two["parameter server 0"] == base + (2 + 2) * 40 + 4 * stream
    late = sizes(planned(cluster(("cpu", 2)), ("n0/0", "n0/1"), options=replace(OPTIONS, staleness=2)))
    assert late["parameter server 0"] == base + (4 + 1) * 40 + 2 * stream


def test_without_shards_nothing_is_on_its_way() -> None:
    options = replace(OPTIONS, with_shards=False)
    found = sizes(planned(cluster(("V", 2)), ("n0/0", "n0/1"), options=options))
    assert found["stage 1 of virtual worker 0"] == made_of.STAGE_BASE_BYTES / MIB + 4 + 2
    assert not any("parameter server" in name for name in found)


def test_the_parts_of_a_node_add_up_and_other_nodes_have_no_coordinator() -> None:
    document = planned(cluster(("cpu", 1), ("cpu", 1), ("cpu", 1)), ("n0/0", "n2/0"))
    assert [node.node for node in document.host_memory] == ["n0", "n2"], "an idle node takes nothing of a run"
    for node in document.host_memory:
        assert node.training_bytes == sum(one.bytes for one in node.processes)
        assert node.peak_bytes == max(node.training_bytes, node.inspection_bytes)
        assert "coordinator" not in {one.name for one in node.processes}
    (alone,) = planned(cluster(("cpu", 2)), ("n0/0", "n0/1")).host_memory
    assert "coordinator" in {one.name for one in alone.processes}


def test_an_inspection_of_few_samples_can_be_the_peak_of_a_node() -> None:
    """Five sets of 40 MiB, and half the activations of two minibatches, as 4 of 8 samples are proven."""
    (node,) = planned(cluster(("V", 2)), ("n0/0", "n0/1")).host_memory
    services = sum(one.bytes for one in node.processes if "stage" not in one.name and "server 0" not in one.name)
    expected = made_of.INSPECTION_BASE_BYTES + (5 * 40 + 2 * 4 + 2 + 2 * 6) * MIB
    assert node.inspection_bytes == services + made_of.SHARD_BASE_BYTES + expected


@pytest.mark.parametrize(("slots", "temporaries"), [(0, 1), (1, 1), (2, 2)])
def test_temporaries_of_a_step(slots: int, temporaries: int) -> None:
    options = replace(OPTIONS, optimizer_slots=slots)
    found = sizes(planned(cluster(("cpu", 1)), ("n0/0",), options=options))
    copies = 4 + 2 + 1 + slots + 2
    expected = made_of.STAGE_BASE_BYTES / MIB + copies * 40 + 8 + 2 + temporaries * 6
    assert found["stage 0 of virtual worker 0"] == expected
