"""The best job over every allocation, order, cut and N, by trying everything. Imports no planner code.

Written from the issue's definitions, on top of the partition oracle; every byte is moved one by one, both directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations, product

import pytest

from hetpipe.decide.planner.jobs import JobPlan
from hetpipe.values.cluster import Cluster
from tests.decide.planner.partition_cases import PS_PER_MS, Case, Stage, in_flight, link_between, stage_ps

#: Policies that are defined from N = K on.
FULL = ("stash", "vertical", "double_buffer", "predict", "spectrain")


@dataclass(frozen=True, slots=True)
class Worker:
    """A pipeline: node and layers of each stage, and its closed-form rate."""

    nodes: tuple[str, ...]
    cuts: tuple[int, ...]
    minibatches_per_second: float


def set_partitions(items: Sequence[str]) -> Iterator[list[list[str]]]:
    """Every way to form groups, some items left out."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for groups in set_partitions(rest):
        yield groups
        for index in range(len(groups)):
            yield [*groups[:index], [first, *groups[index]], *groups[index + 1 :]]
        yield [[first], *groups]


def closed_form(case: Case, times_ps: Sequence[int]) -> float:
    """The issue's pipeline rate, minibatches per second."""
    times = [time / PS_PER_MS / 1000 for time in times_ps]
    n, k = case.minibatches_per_wave, len(times)
    if not any(times):
        return float("inf")
    if case.weights == "flush":
        return n / (sum(times) + (n - 1) * max(times))
    rates = [1 / time for time in times if time]
    rates += [in_flight(case, k, i) / sum(times[i:]) for i in range(k) if sum(times[i:])]
    return min(rates)


def pipelines(case: Case, devices: Sequence[str]) -> list[Worker]:
    """Every pipeline of exactly these devices that fits."""
    types = case.cluster.devices
    places = [(device.split("/")[0], types[device]) for device in devices]  # type: ignore[index]
    num_layers, found = len(case.profile.layers), []
    for order in set(permutations(places)):
        nodes = [None, *(node for node, _ in order), None]
        for cut in combinations(range(1, num_layers), len(order) - 1):
            cuts = (0, *cut, num_layers)
            times = [
                stage_ps(case, Stage(i, len(order), order[i][1], order[i][0], nodes[i], nodes[i + 2], first, last))
                for i, (first, last) in enumerate(pairwise(cuts))
            ]
            if None not in times:
                rate = closed_form(case, [time for time in times if time is not None])
                found.append(Worker(tuple(node for node, _ in order), cuts, rate))
    return found


def network_card(cluster: Cluster, node: str) -> float:
    """The fastest link to another node."""
    others = [other.name for other in cluster.nodes if other.name != node]
    links = [link_between(cluster, node, other) for other in others] or [cluster.links.inter_node]
    return max(link.bandwidth_bytes_per_second * link.efficiency for link in links)


def moved_bytes(
    case: Case, workers: Sequence[Worker], *, halves_pushes: bool = False
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that leave and that reach each node per minibatch of the job, layers round-robin on the used nodes."""
    layers, n = case.profile.layers, case.minibatches_per_wave
    used = [node.name for node in case.cluster.nodes if any(node.name in worker.nodes for worker in workers)]
    holding = [index for index, layer in enumerate(layers) if layer.parameter_bytes]
    shard = {layer: used[position % len(used)] for position, layer in enumerate(holding)}
    leaving, reaching = dict.fromkeys(used, 0.0), dict.fromkeys(used, 0.0)

    def move(num_bytes: float, source: str, target: str) -> None:
        if source != target:
            leaving[source] += num_bytes
            reaching[target] += num_bytes

    for worker in workers:
        share = 1 / len(workers)
        for index, node in enumerate(worker.nodes):
            for layer in range(worker.cuts[index], worker.cuts[index + 1]):
                if layer in shard:
                    size = layers[layer].parameter_bytes
                    move(share * (math.ceil(size / 2) if halves_pushes else size) / n, node, shard[layer])
                    move(share * size / n, shard[layer], node)
            if index + 1 < len(worker.nodes):
                last = layers[worker.cuts[index + 1] - 1]
                move(share * last.output_bytes, node, worker.nodes[index + 1])
                move(share * last.backward_bytes, worker.nodes[index + 1], node)
    return leaving, reaching


def job_rate(case: Case, workers: Sequence[Worker], *, halves_pushes: bool = False) -> float:
    """The issue's job rate, samples per second."""
    compute = len(workers) * min(worker.minibatches_per_second for worker in workers)
    network = [
        network_card(case.cluster, node) / num_bytes
        for direction in moved_bytes(case, workers, halves_pushes=halves_pushes)
        for node, num_bytes in direction.items()
        if num_bytes
    ]
    return case.profile.batch_size * min(compute, *network, float("inf"))


def choices(case: Case, num_stages: Sequence[int]) -> Sequence[int]:
    """N from the least that the policy allows to 4K of the shortest virtual worker."""
    least, most = max(num_stages) if case.weights in FULL else 1, max(4 * min(num_stages), case.accumulate)
    return [n for n in range(least, most + 1) if n % case.accumulate == 0]


def best_job(case: Case, *, groupings: Sequence[Sequence[Sequence[str]]], any_n: bool) -> float:
    """The highest job rate over these groupings, every order, cut and N (or the case's); 0 if nothing fits."""
    best = 0.0
    for groups in filter(None, groupings):
        sizes = [len(group) for group in groups]
        for n in choices(case, sizes) if any_n else [case.minibatches_per_wave]:
            if case.weights in FULL and n < max(sizes):
                continue
            with_n = replace(case, minibatches_per_wave=n)
            for workers in product(*(pipelines(with_n, group) for group in groups)):
                best = max(best, job_rate(with_n, workers))
    return best


def check_best(plan: JobPlan, best: float) -> None:
    """The search is exact up to round trips, by which it judges what it has found, but does not look for more.

    The oracle knows none. Also where the plan's own does not bind, that of what the oracle finds better may.
    """
    if plan.rate.round_trip_samples_per_second < math.inf:
        assert 0.5 * best <= plan.rate.samples_per_second <= best * (1 + 1e-9)
    else:
        assert plan.rate.samples_per_second == pytest.approx(best)
