"""Cuts where other layers become active: against every other cut of the layers, of which inactive ones take nothing."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

from hetpipe.decide.elastic.replanning import activation_cuts
from hetpipe.decide.planner.active_profile import active_profile
from hetpipe.decide.planner.costs import Costs
from hetpipe.values.activation import Activation
from hetpipe.values.ids import Clock
from hetpipe.values.profile import LayerProfile, Profile
from tests.decide.elastic.test_freeze_cuts import basis, worker


def test_no_cut_has_a_faster_slowest_stage() -> None:
    """After each of several changes of active layers, of 20 random models."""
    rng = random.Random(3)
    num_moved = 0
    for _ in range(20):
        num_layers, num_stages = rng.randint(5, 9), rng.randint(2, 3)
        sizes = [rng.choice([1.0, 2.0, 5.0, 30.0]) for _ in range(num_layers)]
        changes = [
            Activation(Clock(clock), tuple(sorted(rng.sample(range(num_layers), rng.randint(0, num_layers - 2)))))
            for clock in (0, 3, 5, 9)
        ]
        first = worker((*range(num_stages), num_layers))
        found = {
            cut.clock: cut.bounds for cut in activation_cuts(basis(sizes, num_stages), [first], changes, alike=False)
        }
        assert set(found) <= {3, 5, 9}, "the plan's own cut is that of the start"
        bounds = first.bounds
        for change in changes[1:]:
            bounds = found.get(change.clock, bounds)
            taken = [0.0 if layer in change.inactive else size for layer, size in enumerate(sizes)]
            every = ((0, *inner, num_layers) for inner in combinations(range(1, num_layers), num_stages - 1))
            least, own = (
                min(max(sum(taken[a:b]) for a, b in pairwise(cut)) for cut in some) for some in (every, [bounds])
            )
            assert own <= least * (1 + 1e-9)
        num_moved += len(found)
    assert num_moved > 10


def test_what_crosses_a_cut_behind_an_inactive_layer_is_what_crosses_it_before() -> None:
    layers = tuple(
        LayerProfile(
            name=str(at),
            parameter_bytes=10,
            activation_bytes=5,
            output_bytes=100 * (at + 1),
            forward_ms={"t": 1.0},
            backward_ms={"t": 2.0},
        )
        for at in range(4)
    )
    profile = Profile(version=1, model="m", batch_size=1, input_bytes=7, layers=layers)
    found = active_profile(profile, (0, 2))
    assert [layer.output_bytes for layer in found.layers] == [7, 200, 200, 400]
    assert [layer.backward_bytes for layer in found.layers] == [0, 200, 200, 400]
    assert [layer.forward_ms["t"] + layer.backward_ms["t"] for layer in found.layers] == [0.0, 3.0, 0.0, 3.0]
    costs = Costs(found, basis([1.0], 1).cluster)
    assert (costs.parameter_bytes[-1], costs.activation_bytes[-1]) == (40, 10), "parameters stay on their stage"
    assert active_profile(profile, ()) is profile
