"""What a model costs whose first layers are frozen: by definition, in plans, and in the simulator."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from hetpipe.decide.planner.choose import choose_plan, closed_form
from hetpipe.decide.planner.costs import Costs, MemoryModel, ticks
from hetpipe.decide.planner.cuts import NO_LINK, ReachTables, least_cuts
from hetpipe.decide.planner.frozen_profile import cached_profile, frozen_profile
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.simulator.documents import costs_of, frozen_plan, simulated_plan
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.decide.simulator.traffic import Traffic, flows_of
from hetpipe.values.profile import AliveValue, LayerProfile, Profile
from tests.decide.planner.job_cases import PAPER_CLUSTER, chain, cluster_of

MEMORY = MemoryModel(minibatches_per_wave=4, optimizer_slots=1)


def layer(name: str, *alive: AliveValue) -> LayerProfile:
    return LayerProfile(
        name=name,
        parameter_bytes=100,
        activation_bytes=10,
        output_bytes=sum(value.num_bytes for value in alive),
        gradient_bytes=sum(value.num_bytes for value in alive if value.has_gradient),
        alive=alive,
        forward_ms={"V": 1.0},
        backward_ms={"V": 2.0},
        forward_flops=7,
        backward_flops=14,
    )


def test_a_frozen_layer_has_a_forward_and_one_copy_of_its_weights() -> None:
    values = [AliveValue(name=f"{at}:out", num_bytes=4, has_gradient=True) for at in range(3)]
    skip = AliveValue(name="0:out", num_bytes=4, has_gradient=True)
    layers = (layer("a", values[0]), layer("b", values[1], skip), layer("c", values[2], skip), layer("d"))
    profile = Profile(version=2, model="m", batch_size=1, input_bytes=8, layers=layers)
    found = frozen_profile(profile, 2)
    assert [each.parameter_bytes for each in found.layers] == [0, 0, 100, 100]
    assert [each.activation_bytes for each in found.layers] == [0, 0, 10, 10]
    assert [each.forward_ms["V"] for each in found.layers] == [1.0] * 4
    assert [each.backward_ms["V"] for each in found.layers] == [0.0, 0.0, 2.0, 2.0]
    assert [each.backward_flops for each in found.layers] == [0, 0, 14, 14]
    assert [each.output_bytes for each in found.layers] == [4, 8, 8, 0], "all values go forward"
    assert [each.backward_bytes for each in found.layers] == [0, 0, 4, 0], "of the last cut, the skip is a constant"
    assert frozen_profile(profile, 0) is profile
    read = frozen_profile(cached_profile(profile, 2), 2)
    assert [each.forward_ms["V"] for each in read.layers] == [0.0, 0.0, 1.0, 1.0]
    assert [each.output_bytes for each in read.layers] == [4, 8, 8, 0], "what is read goes forward"

    costs = Costs(profile, cluster_of(["V"]), 2)
    assert costs.compute_ticks("V", 0, 4) == ticks(4.0 + 2 * 2.0)
    copies = MEMORY.copies(0, 2)
    assert costs.stage_bytes(0, 2, stage=0, num_stages=2, memory=MEMORY) == 200
    assert costs.stage_bytes(1, 3, stage=0, num_stages=2, memory=MEMORY) == 100 + copies * 100 + 4 * 10
    recomputing = costs.stage_bytes(1, 3, stage=0, num_stages=2, memory=MEMORY, recompute=True)
    assert recomputing == 100 + copies * 100 + 4 * 8 + 10, "the input of the first trained layer is kept"
    place = costs.place("V", (1, 2), MEMORY)
    assert place.figures(0, 2).fixed_bytes == 200
    assert place.figures(2, 4).fixed_bytes == MEMORY.copies(1, 2) * 200


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_with_frozen_layers_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    num_layers, num_stages = rng.randint(3, 8), rng.randint(2, 3)
    profile = chain([rng.choice([1.0, 2.0, 5.0, 9.0]) for _ in range(num_layers)])
    frozen = rng.randint(0, num_layers - 1)
    costs = Costs(profile, cluster_of(["V" * num_stages]), frozen)
    link = costs.cluster.link("n0", "n0")

    def largest(cuts: tuple[int, ...]) -> int:
        """By the definition of each figure, from the profile as measured."""
        found = []
        for index, (first, last) in enumerate(pairwise((0, *cuts, num_layers))):
            compute = sum(
                ticks(profile.layers[at].forward_ms["V"])
                + (ticks(profile.layers[at].backward_ms["V"]) if at >= frozen else 0)
                for at in range(first, last)
            )
            if index:
                compute += ticks(link.transfer_ms(profile.layers[first - 1].output_bytes))
            if last < num_layers and last > frozen:
                compute += ticks(link.transfer_ms(profile.layers[last - 1].output_bytes))
            found.append(compute)
        return max(found)

    tables = ReachTables(costs, "off")
    links = [NO_LINK, *[tables.link(link)] * (num_stages - 1), NO_LINK]
    reaches = [
        tables.reach("V", tables.load("V", index, num_stages, MEMORY), links[index], links[index + 1])
        for index in range(num_stages)
    ]
    found = least_cuts(reaches, num_layers, 0, 10**12)
    assert found is not None
    best = min(map(largest, combinations(range(1, num_layers), num_stages - 1)))
    assert found.ticks == best == largest(found.cuts[:-1])


def test_a_plan_for_frozen_layers_is_faster_and_moves_less() -> None:
    profile = chain([3.0, 5.0, 2.0, 4.0] * 4)
    options = PlanOptions(allocation="HD", minibatches_per_wave=4, optimizer_slots=1, staleness=None)
    whole = choose_plan(profile, PAPER_CLUSTER, options, predict=closed_form)
    plan = choose_plan(profile, PAPER_CLUSTER, replace(options, frozen_layers=8), predict=closed_form)
    assert (whole.frozen_layers, plan.frozen_layers) == (0, 8)
    assert plan.predicted.samples_per_second > 1.4 * whole.predicted.samples_per_second
    assert plan.placement == whole.placement, "shards hold frozen parameters as well"
    bounds = [[stage.layers for stage in worker.stages] for worker in plan.virtual_workers]
    assert bounds != [[stage.layers for stage in worker.stages] for worker in whole.virtual_workers]
    costs = costs_of(plan, profile, PAPER_CLUSTER)
    for spec in flows_of(simulated_plan(plan, costs), costs):
        first, last = bounds[spec.vw][spec.stage]
        if spec.traffic in (Traffic.PUSH, Traffic.PULL):
            assert last > 8, "a stage whose layers are all frozen moves no weights"
        if spec.traffic is Traffic.GRADIENTS:
            assert (spec.num_bytes == 0) == (first <= 8)


def test_the_simulator_has_no_backward_of_frozen_layers() -> None:
    """One device: 3 ms forward and 6 ms backward per layer; with 2 of 4 frozen 24 ms instead of 36."""
    profile = chain([9.0] * 4)
    options = PlanOptions(minibatches_per_wave=1, with_shards=False)
    plan = choose_plan(profile, cluster_of(["V"]), options, predict=closed_form)
    how = SimulationOptions(staleness=0, minibatches=20)
    speed = profile.layers[0].forward_ms["V"] / 3.0
    for frozen, milliseconds in ((0, 36.0), (2, 24.0), (3, 18.0)):
        simulated, costs = frozen_plan(plan, profile, cluster_of(["V"]), frozen)
        result = simulate(simulated, costs, how)
        assert result.samples_per_second == pytest.approx(32 * 1000 / (milliseconds * speed))
