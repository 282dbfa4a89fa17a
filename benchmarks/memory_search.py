"""(s) The search of cuts and memory policies together: its time and gap, and beside it Algorithm 2 of vPipe as printed.

The baseline cuts the model so that the slowest stage is fastest without regard to memory, exactly, and gives each stage
the policies of Algorithm 2. Its plans count where they fit by our definition of memory, of which theirs is a part.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from benchmarks.planner import cluster, profile
from benchmarks.sizes import sized
from benchmarks.vpipe import algorithm_2
from hetpipe.decide.planner.costs import Costs, MemoryModel, StagePlace
from hetpipe.decide.planner.layer_memory import choose_policies, least_bytes
from hetpipe.decide.planner.policy_cuts import cut_with_policies
from hetpipe.values.cluster import node_of
from hetpipe.values.memory import LayerFigures, StageFigures, stage_memory

NUM_LAYERS = sized(500, 40)
NUM_STAGES = sized(16, 4)
NUM_REPEATS = sized(4, 1)
NUM_CHAINS = sized(500, 10)
NUM_HARD = sized(100, 5)
_NUM_HARD_LAYERS = 16
#: Share of the hard stages that another one precedes.
_RECEIVING = 0.7
#: Memory of a device, of what an even share of the layers would keep.
SHARES = (3.0, 1.2, 0.8)
_HOST_BYTES_PER_SECOND = 5e9
_MIB = 1 << 20
_MS = 10**9
_TICKS_PER_SECOND = 10**12


def measure() -> Mapping[str, Any]:
    """Processor seconds and gap of one large search each, the least of some, and beside them those of a plain loop.

    A core that is shared with other work takes longer for both, by how much changes within a second.
    """
    found = {}
    for model in ("convolutions", "transformer", "random"):
        for host in (None, _HOST_BYTES_PER_SECOND):
            for share in SHARES:
                places, allowed = _large(model, host, share)
                seconds = loop = float("inf")
                for _ in range(NUM_REPEATS):
                    loop = min(loop, _loop_seconds())
                    started = time.process_time()
                    plan = cut_with_policies(places, allowed)
                    seconds = min(seconds, time.process_time() - started)
                name = f"{model}, {'without swaps' if host is None else 'with swaps'}, {share:g} of the memory"
                gap = "none found" if plan is None else f"{plan.gap:.1%}"
                found[name] = {"processor seconds": round(seconds, 2), "gap": gap, "a plain loop": round(loop, 3)}
    return found


def _loop_seconds() -> float:
    """Processor seconds of a loop of a million additions."""
    started, total = time.process_time(), 0
    for index in range(1_000_000):
        total += index & 3
    return time.process_time() - started


def _large(model: Any, host: float | None, share: float) -> tuple[list[StagePlace], Sequence[int]]:
    costs = Costs(profile(model, NUM_LAYERS, 0), cluster("one type per node", NUM_STAGES))
    memory, devices = MemoryModel(minibatches_per_wave=NUM_STAGES), list(costs.cluster.devices)
    links = [None, *(costs.cluster.link(node_of(a), node_of(b)) for a, b in pairwise(devices)), None]
    places = [
        costs.place(
            costs.cluster.devices[device],
            (stage, NUM_STAGES),
            memory,
            links=(links[stage], links[stage + 1]),
            host_bytes_per_second=host,
        )
        for stage, device in enumerate(devices)
    ]
    return [replace(place, memory_bytes=int(share * kept(place) / NUM_STAGES)) for place in places], costs.allowed


def kept(place: StagePlace) -> int:
    """Memory of all layers at a place, if everything is kept."""
    return stage_memory(place.figures(0, len(place.layers)), ["keep" for _ in place.layers]).num_bytes


def against_vpipe() -> Mapping[str, Any]:
    """Random chains of 20 layers in 3 stages: whose plans fit, and how much faster ours are where both do.

    Raises:
        AssertionError: a plan of the baseline fits, and is faster than ours.
    """
    ours_fit = theirs_fit = 0
    gains = []
    for seed in range(NUM_CHAINS):
        places = _chain(random.Random(seed), 20, 3)
        ours = cut_with_policies(places, range(1, 20))
        theirs = vpipe_ticks(places)
        ours_fit, theirs_fit = ours_fit + (ours is not None), theirs_fit + (theirs is not None)
        if theirs is not None:
            assert ours is not None, f"chain {seed}"
            assert ours.ticks <= theirs, f"chain {seed}"
            gains.append(theirs / max(1, ours.ticks))
    return {
        "chains": NUM_CHAINS,
        "ours fit": ours_fit,
        "Algorithm 2's fit": theirs_fit,
        "its largest stage time / ours, median": round(statistics.median(gains), 3) if gains else None,
        "largest": round(max(gains), 3) if gains else None,
    }


def of_hard_stages() -> Mapping[str, Any]:
    """Random stages of 16 layers that are hard to choose policies for: how long that takes, and how often it is proven.

    Sizes and times are small whole numbers, in proportion with and without noise, nearly equal, or of different
    magnitudes. Memory is between the least and what everything needs, and the link to host memory about as fast as
    computation, or absent.
    """
    seconds, fastest, best = [], 0, 0
    for seed in range(NUM_HARD):
        source = random.Random(seed)
        stage = _hard(source)
        least, most = least_bytes(stage), stage_memory(stage, ["keep" for _ in stage.layers]).num_bytes
        memory_bytes = int(least + (most - least) * source.uniform(0.02, 0.95))
        started = time.process_time()
        found = choose_policies(stage, memory_bytes)
        seconds.append(time.process_time() - started)
        assert found is not None, f"stage {seed}"
        fastest += not found.gap_ticks
        best += not found.gap_ticks and found.is_least
    ranked = sorted(seconds)
    return {
        "stages": NUM_HARD,
        "none is faster, proven": fastest,
        "and none as fast swaps or recomputes less, proven": best,
        "processor seconds, median": round(ranked[len(ranked) // 2], 3),
        "of 95 %, at most": round(ranked[int(0.95 * (len(ranked) - 1))], 3),
        "largest": round(ranked[-1], 3),
    }


def _hard(source: random.Random) -> StageFigures:
    kind = source.choice(("whole", "proportional", "exactly proportional", "nearly equal", "magnitudes"))
    size = source.randint(1 << 24, 1 << 28)
    layers = []
    for _ in range(_NUM_HARD_LAYERS):
        held = source.randint(1 << 20, 1 << 30)
        if kind == "whole":
            sizes = (source.randint(0, 12) * _MIB, source.randint(0, 12) * _MIB)
            layers.append(LayerFigures(source.randint(0, 20) * _MS, source.randint(0, 30) * _MS, *sizes))
        elif kind == "proportional":
            forward = int(1000 * held * source.uniform(0.9, 1.1))
            layers.append(LayerFigures(forward, 2 * forward, held, source.randint(1 << 18, held)))
        elif kind == "exactly proportional":
            layers.append(LayerFigures(1000 * held, 2000 * held, held, 0))
        elif kind == "nearly equal":
            forward, inputs = _MS + source.randint(0, 10**6), size // source.randint(2, 20)
            layers.append(LayerFigures(forward, 2 * _MS, size + source.randint(0, 1 << 10), inputs))
        else:
            forward, backward = (source.randint(10**8, 10**11) for _ in "fb")
            held, inputs = (int(2 ** source.uniform(low, high)) for low, high in ((20, 31), (18, 29)))
            layers.append(LayerFigures(forward, backward, held, inputs))
    computed = sum(layer.forward_ticks + layer.backward_ticks for layer in layers)
    kept_bytes = sum(layer.activation_bytes for layer in layers)
    share = source.choice((0.2, 0.5, 1.0, 2.0))
    speed = max(1, int(share * 2 * kept_bytes * _TICKS_PER_SECOND / max(1, computed)))
    host = source.choice((None, speed))
    return StageFigures(tuple(layers), source.randint(1, 8), source.random() < _RECEIVING, host_bytes_per_second=host)


def _chain(source: random.Random, num_layers: int, num_stages: int) -> list[StagePlace]:
    layers = tuple(
        LayerFigures(forward * _MS, 2 * forward * _MS, source.randint(1, 12) * _MIB, source.randint(1, 3) * _MIB)
        for forward in (source.randint(1, 12) for _ in range(num_layers))
    )
    weights = [0, *accumulate(3 * source.randint(0, 2) * _MIB for _ in range(num_layers))]
    zero = [0] * (num_layers + 1)
    found = []
    for stage in range(num_stages):
        place = StagePlace(
            layers,
            weights,
            in_flight=num_stages - stage,
            receives=stage > 0,
            memory_bytes=0,
            reserve_bytes=0,
            host_bytes_per_second=source.choice([10**9, 4 * 10**9]),
            arriving_ticks=zero,
            returning_ticks=zero,
        )
        found.append(replace(place, memory_bytes=int(source.uniform(0.8, 2.5) * kept(place) / num_stages)))
    return found


def vpipe_ticks(places: Sequence[StagePlace]) -> int | None:
    """The largest stage time of the baseline; None if one of its stages does not fit."""
    unlimited = [replace(place, memory_bytes=1 << 60) for place in places]
    cut = cut_with_policies(unlimited, range(1, len(places[0].layers)))
    assert cut is not None
    longest = 0
    for place, planned in zip(places, cut.stages, strict=True):
        stage = place.figures(planned.first, planned.last)
        cost = stage_memory(stage, algorithm_2(stage, place.memory_bytes))
        if cost.num_bytes > place.memory_bytes:
            return None
        longest = max(longest, cost.ticks)
    return longest
