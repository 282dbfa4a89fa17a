"""Cuts of models whose first layers are frozen: against every other cut, and against PipeTransformer's Algorithm 1."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import pytest

from hetpipe.decide.elastic.replanning import Basis, freeze_cuts
from hetpipe.decide.planner.costs import MemoryModel, ticks
from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.values.freezing import FreezeCut
from hetpipe.values.ids import AgentId, DeviceId, LayerIndex, VirtualWorkerIndex
from hetpipe.values.plan import StagePlan, VirtualWorkerPlan
from hetpipe.values.profile import LayerProfile, Profile

#: The paper's λ: what a frozen layer takes of what it took.
LAMBDA = 1 / 6


def bytes_of_blocks(depth: int, width: int, first: int) -> tuple[float, ...]:
    """Parameters of a transformer in millions: what comes first, then attention and MLP of each block."""
    attention, mlp = 4 * width * width + 6 * width, 8 * width * width + 7 * width
    return tuple(size / 1e6 for size in (first, *[attention, mlp] * depth))


VIT_12 = bytes_of_blocks(12, 768, 3 * 16 * 16 * 768 + 198 * 768)
BERT_24 = bytes_of_blocks(24, 1024, (30522 + 512 + 2) * 1024)


@dataclass(frozen=True)
class Instance:
    """Sublayers that never separate from their skip connection, of which the first ones are frozen."""

    sizes: Sequence[float]
    frozen: int
    num_stages: int

    @property
    def taken(self) -> list[float]:
        """What each sublayer takes of its stage."""
        return [size * (LAMBDA if at < self.frozen else 1.0) for at, size in enumerate(self.sizes)]

    def largest(self, bounds: Sequence[int]) -> float:
        return max(sum(self.taken[first:last]) for first, last in pairwise(bounds))


def algorithm_1(of: Instance) -> tuple[int, ...]:
    """`load_balance` of Algorithm 1, line by line; where each partition ends, over all sublayers.

    Frozen layers are kept in the first partition. Two lines cannot be meant as printed: line 19 has the size of
    partition i, the index of a sublayer, instead of k; and what no partition takes by line 20 is left over: the last
    one takes it here.
    """
    s_pipe, s_frozen = list(of.sizes[of.frozen :]), sum(of.sizes[: of.frozen])
    b_l, b_s = dict.fromkeys(range(of.num_stages), 0), dict.fromkeys(range(of.num_stages), 0.0)
    b_s[0] = s_frozen
    l_assigned, s_total = 0, sum(s_pipe)
    for k in range(of.num_stages):
        left = s_pipe[l_assigned:]
        mean = s_total / (of.num_stages - k)
        average = sum(left) / len(left) if left else 0.0
        var = (sum((size - average) ** 2 for size in left) / len(left) if left else 0.0) / (of.num_stages - k)
        for i in range(l_assigned, len(s_pipe)):
            s_k = s_pipe[i]
            criterion = b_s[k] - (s_frozen * (1.0 - LAMBDA) if k == 0 else 0.0) + s_k
            if criterion >= mean + var:
                break
            b_s[k] += s_k
            b_l[k] += 1
            l_assigned += 1
            s_total -= s_k
    b_l[of.num_stages - 1] += len(s_pipe) - l_assigned
    ends = [of.frozen + sum(b_l[j] for j in range(k + 1)) for k in range(of.num_stages)]
    assert ends[-1] == len(of.sizes)
    return (0, *ends)


def basis(sizes: Sequence[float], num_devices: int) -> Basis:
    """One device type; a layer's forward takes λ of its size in milliseconds, its backward the rest."""
    layers = tuple(
        LayerProfile(
            name=str(at),
            parameter_bytes=max(1, round(4e6 * size)),
            activation_bytes=0,
            output_bytes=0,
            forward_ms={"t": LAMBDA * size},
            backward_ms={"t": (1 - LAMBDA) * size},
        )
        for at, size in enumerate(sizes)
    )
    link = LinkSpec(bandwidth_bytes_per_second=1e9)
    cluster = Cluster(
        device_types={"t": DeviceType(memory_bytes=1 << 44)},
        nodes=(Node(name="n0", devices=("t",) * num_devices),),
        links=Links(intra_node=link, inter_node=link),
    )
    names = {(AgentId("n0"), DeviceId(f"n0/{at}")): DeviceId(f"n0/{at}") for at in range(num_devices)}
    profile = Profile(version=1, model="m", batch_size=1, input_bytes=0, layers=layers)
    return Basis(profile, cluster, names, MemoryModel(minibatches_per_wave=2 * num_devices), is_forecast=True)


def worker(bounds: Sequence[int], vw: int = 0) -> VirtualWorkerPlan:
    stages = tuple(
        StagePlan(AgentId("n0"), DeviceId(f"n0/{at}"), LayerIndex(first), LayerIndex(last))
        for at, (first, last) in enumerate(pairwise(bounds))
    )
    return VirtualWorkerPlan(VirtualWorkerIndex(vw), stages)


def our_cut(of: Instance) -> tuple[int, ...]:
    """Of the only level at which this instance's layers are frozen."""
    first = worker((*range(of.num_stages), len(of.sizes)))
    if not of.frozen:
        return first.bounds
    (cut,) = freeze_cuts(basis(of.sizes, of.num_stages), [first], (0, of.frozen), alike=False)
    return cut.bounds


def instances(seed: int, count: int) -> list[Instance]:
    rng, found = random.Random(seed), []
    for _ in range(count):
        num_stages, num_layers = rng.randint(2, 8), rng.randint(9, 40)
        kind = rng.choice(["equal", "spread", "few"])
        sizes = [
            {"equal": 7.0, "spread": rng.uniform(0.5, 20.0), "few": rng.choice([1.0, 1.0, 30.0])}[kind]
            for _ in range(num_layers)
        ]
        found.append(Instance(sizes, rng.randint(1, num_layers - 1), num_stages))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_no_partition_is_larger_than_the_largest_of_algorithm_1(seed: int) -> None:
    """At as many partitions, of 300 vectors of sizes in all."""
    better = 0
    for of in instances(seed, 60):
        ours, theirs = our_cut(of), algorithm_1(of)
        assert of.largest(ours) <= of.largest(theirs) * (1 + 1e-9)
        better += of.largest(ours) < of.largest(theirs) * 0.999
    assert better > 10


@pytest.mark.parametrize("sizes", [VIT_12, BERT_24], ids=["vit-12", "bert-24"])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_the_tables_of_the_models_of_the_paper(sizes: tuple[float, ...], num_stages: int) -> None:
    for blocks in range(1, len(sizes) // 2 + 1):
        of = Instance(sizes, min(2 * blocks + 1, len(sizes) - 1), num_stages)
        assert of.largest(our_cut(of)) <= of.largest(algorithm_1(of)) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_cut_is_better_and_layers_stay_where_none_is(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([1.0, 2.0, 5.0]) for _ in range(rng.randint(4, 8))]
    num_stages, levels = rng.randint(2, 3), (0, 1, 1, 3)
    first = worker((*range(num_stages), len(sizes)))
    found = freeze_cuts(basis(sizes, num_stages), [first], levels, alike=False)
    assert [cut.frozen for cut in found] == [1, 3], "F of which ties allow no more than 1 is never in force"
    last = first.bounds
    for cut, frozen in zip(found, (1, 3), strict=True):
        of = Instance(sizes, frozen, num_stages)

        def largest(bounds: Sequence[int], of: Instance = of) -> int:
            return max(sum(map(ticks, of.taken[first:last])) for first, last in pairwise(bounds))

        every = ((0, *inner, len(sizes)) for inner in combinations(range(1, len(sizes)), num_stages - 1))
        best = min(map(largest, every))
        assert largest(cut.bounds) == pytest.approx(best, abs=100)
        if largest(last) <= best:
            assert cut.bounds == last
        last = cut.bounds


def test_replicas_are_cut_alike() -> None:
    workers = [worker((0, 1, 6), 0), worker((0, 1, 6), 1)]
    found = freeze_cuts(basis([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2), workers, (0, 3), alike=True)
    assert found == (FreezeCut(1, VirtualWorkerIndex(0), (0, 4, 6)), FreezeCut(1, VirtualWorkerIndex(1), (0, 4, 6)))


def test_layers_that_are_read_from_a_cache_take_no_time() -> None:
    """Of eleven equal layers nine are frozen: the other two are shared where the forward of the nine is read."""
    at = basis((1.0,) * 11, 2)
    cuts = {
        is_cached: freeze_cuts(replace(at, is_cached=is_cached), [worker((0, 5, 11))], (0, 9), alike=False)[0].bounds
        for is_cached in (False, True)
    }
    assert cuts == {False: (0, 9, 11), True: (0, 10, 11)}
