"""(s) Plans of cuts and memory policies, run: real stages on four emulated devices, beside the forecast of the optimum.

Memory is at shares between the least with which stages that recompute everything fit, and with which stages that keep
everything do. A run with `memory: auto` is compared with the time of the slowest stage under the best cuts and
policies: its proven lower bound by a search with ten times the effort of a plan. Runs that recompute everything, and
that keep everything where it fits, are beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.memory_layers import MODELS, NUM_DEVICES, Model, cluster, profile
from benchmarks.partitions import evenest, of_whole_stages
from benchmarks.protocol import train
from benchmarks.sizes import sized
from hetpipe.decide.planner.costs import TICKS_PER_MS, Costs, MemoryModel, StagePlace
from hetpipe.decide.planner.policy_cuts import MAX_CHOICES, cut_with_policies
from hetpipe.values.cluster import Cluster
from hetpipe.values.profile import Profile

SHARES = sized((0.4, 0.6, 0.8), (0.6,))
MINIBATCHES = sized(80, 32)
#: At either end of a run; they do not count.
_MARGIN = sized(16, 4)
_MINIBATCHES_PER_WAVE = 4


def measure() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and figures of each model, in ms per minibatch."""
    for model in sized(MODELS, MODELS[:1]):
        yield model.name, _of_model(model)


def _of_model(model: Model) -> Mapping[str, Any]:
    whole = {keeps: of_whole_stages(_places(model, 0), keeps=keeps) for keeps in (False, True)}
    least, most = (int(evenest([memory for memory, _ in whole[keeps]])) for keeps in (False, True))
    found: dict[str, Any] = {
        "MiB to recompute, and to keep everything": (round(least / 2**20, 2), round(most / 2**20, 2)),
        "recompute all at 60 %, measured": round(_measured(model, _at(0.6, least, most), "recompute"), 1),
        "keep all at 400 %, measured": round(_measured(model, _at(4.0, least, most), "keep"), 1),
    }
    for share in SHARES:
        memory = _at(share, least, most)
        plan = cut_with_policies(_places(model, memory), range(1, len(model.blocks)), max_choices=10 * MAX_CHOICES)
        assert plan is not None, "recomputing everything fits"
        optimum, measured = plan.lower_bound_ticks / TICKS_PER_MS, _measured(model, memory, "auto")
        found[f"{share:.0%}"] = {
            "forecast of the optimum": round(optimum, 1),
            "the best plan that is known": round(plan.ticks / TICKS_PER_MS, 1),
            "measured": round(measured, 1),
            "of the optimum's rate": round(optimum / measured, 3),
        }
    return found


def _at(share: float, least: int, most: int) -> int:
    return int(least + share * (most - least)) + 1


def _measured(model: Model, memory_bytes: int, memory: str) -> float:
    """Milliseconds per minibatch of a run: the median over its waves, as other work may hold up some of them."""
    run_dir, _, _ = train(_job(model, memory_bytes, memory))
    lines = map(json.loads, (run_dir / "history" / "vw-0-stage-0.jsonl").read_text().splitlines())
    ends = [line["t"] for line in lines if line["event"] == "step"][_MARGIN:-_MARGIN:_MINIBATCHES_PER_WAVE]
    return float(1000 * median(later - end for end, later in pairwise(ends)) / _MINIBATCHES_PER_WAVE)


def _job(model: Model, memory_bytes: int, memory: str) -> dict[str, Any]:
    return {
        "name": "memory-runs",
        "model": f"benchmarks.memory_layers:{model.name}",
        "loss": "torch.nn.functional:mse_loss",
        "data": {"train": f"benchmarks.memory_layers:{model.name}_data"},
        "batch_size": 1,
        "minibatches": MINIBATCHES,
        "optimizer": {"name": "SGD", "lr": 1e-6},
        "memory": memory,
        "workers": {"stages": "auto", "allocation": "NP"},
        "sync": {"kind": "none", "minibatches_per_wave": _MINIBATCHES_PER_WAVE},
        "cluster": {
            "file": cluster(model, memory_bytes),
            "profile": profile(model),
            "emulate": True,
            "emulate_links": True,
            "host_bytes_per_second": model.host_bytes_per_second(),
        },
    }


def _places(model: Model, memory_bytes: int) -> list[StagePlace]:
    costs = Costs(
        Profile.model_validate_json(json.dumps(profile(model))),
        Cluster.model_validate_json(json.dumps(cluster(model, 1 << 30))),
    )
    memory = MemoryModel(minibatches_per_wave=_MINIBATCHES_PER_WAVE, with_shards=False)
    link, last = costs.cluster.links.intra_node, NUM_DEVICES - 1
    places = (
        costs.place(
            "gpu",
            (stage, NUM_DEVICES),
            memory,
            links=(link if stage else None, link if stage < last else None),
            host_bytes_per_second=model.host_bytes_per_second(),
        )
        for stage in range(NUM_DEVICES)
    )
    return [replace(place, memory_bytes=memory_bytes) for place in places]
