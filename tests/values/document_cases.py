"""Good files for the tests of documents, as plain data, and what a bad one is refused with."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest

from hetpipe.errors import DocumentError
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import Document, parse_document
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile

GIB = 1 << 30


def _layer(name: str, scale: float) -> dict[str, Any]:
    return {
        "name": name,
        "parameter_bytes": 4096,
        "activation_bytes": 2048,
        "output_bytes": 1024,
        "forward_ms": {"V": 1.0 * scale, "Q": 2.5 * scale},
        "backward_ms": {"V": 2.0 * scale, "Q": 5 * scale},
    }


PROFILE: dict[str, Any] = {
    "version": 1,
    "model": "model:build",
    "batch_size": 16,
    "input_bytes": 512,
    "layers": [_layer("a", 1.0), _layer("b", 0.5), _layer("c", 3.0), _layer("d", 1.5)],
    "estimated": ["Q"],
}

CLUSTER: dict[str, Any] = {
    "version": 1,
    "device_types": {"V": {"memory_bytes": 12 * GIB}, "Q": {"memory_bytes": 8 * GIB}, "RTX_3090": {}},
    "nodes": [{"name": "n0", "devices": ["V", "V"]}, {"name": "n1", "devices": ["Q", "V"]}],
    "links": {
        "intra_node": {"bandwidth_bytes_per_second": 15.75e9, "latency_seconds": 1e-5, "efficiency": 0.8},
        "inter_node": {"bandwidth_bytes_per_second": 1.25e9, "latency_seconds": 5e-5},
        "overrides": [
            {"between": ["n0", "n1"], "bandwidth_bytes_per_second": 7e9},
            {"between": ["n1", "n1"], "bandwidth_bytes_per_second": 3e9},
        ],
    },
}


def _stage(device: str, kind: str, first: int, last: int) -> dict[str, Any]:
    return {
        "device": device,
        "type": kind,
        "layers": [first, last],
        "time_ms": 4.5,
        "memory_bytes": 40_960,
        "receive_ms": 0.5,
        "recompute": False,
        "memory": [],
        "in_flight": 2,
        "model_flops_utilisation": 0.4,
    }


PLAN: dict[str, Any] = {
    "version": 1,
    "model": "model:build",
    "batch_size": 16,
    "allocation": "ED",
    "weights": "wave",
    "schedule": "fifo",
    "staleness": None,
    "pull": "every_wave",
    "compress_pushes": "none",
    "frozen_layers": 0,
    "virtual_workers": [
        {
            "stages": [_stage("n0/0", "V", 0, 3), _stage("n1/0", "Q", 3, 4)],
            "bottleneck_ms": 4.5,
            "samples_per_second": 3000.0,
        },
        {"stages": [_stage("n0/1", "V", 0, 4)], "bottleneck_ms": 4.5, "samples_per_second": 2000.0},
    ],
    "minibatches_per_wave": 2,
    "max_minibatches_per_wave": [8, 4],
    "searched_minibatches_per_wave": 4,
    "has_shards": True,
    "shards": ["n0", "n1"],
    "placement": {"a.weight": 1, "b.weight": [[0, 0, 100], [1, 100, 4096]]},
    "placement_policy": "",
    "idle_devices": ["n1/1"],
    "predicted": {
        "samples_per_second": 4000.0,
        "cross_node_bytes_per_minibatch": 2048.0,
        "tokens_per_second": None,
        "model_flops_utilisation": 0.4,
        "model_flops_utilisation_reason": None,
    },
    "run": {"samples_per_second": 80.0, "seconds": 2.5},
    "host_memory": [
        {
            "node": "n0",
            "peak_bytes": 30,
            "training_bytes": 30,
            "inspection_bytes": 20,
            "processes": [{"name": "stage 0 of virtual worker 0", "bytes": 30}],
        }
    ],
    "links": [
        {
            "between": ["n0", "n1"],
            "source": "measured",
            "bytes_per_second": 1e9,
            "latency_seconds": 5e-5,
            "measured_at": 1.7e9,
        }
    ],
    "alternatives": [{"name": "NP", "samples_per_second": None, "reason": "n0: layer c misses 20 bytes"}],
    "active_phases": [{"clock": 4, "inactive": [1], "samples_per_second": 12.5, "cuts": [[1, 2], [3]]}],
    "borders": [
        {
            "virtual_worker": 0,
            "stage": 0,
            "cut": 1,
            "before": "b",
            "forward_bytes": 1024,
            "backward_bytes": 512,
            "tie_bytes": 0,
            "forward_ms": 0.1,
            "backward_ms": 0.05,
            "alive": [{"name": "a:0", "num_bytes": 512, "has_gradient": True}],
            "alternatives": [
                {
                    "cut": 2,
                    "before": "c",
                    "forward_bytes": 8,
                    "backward_bytes": 8,
                    "bottleneck_ms": None,
                    "reason": "forbidden",
                }
            ],
        }
    ],
    "forbidden": [{"before": "c", "upto": "c", "places": 1, "reason": "it is recomputed"}],
}

GOOD: tuple[tuple[type[Document], dict[str, Any]], ...] = (
    (Profile, PROFILE),
    (Cluster, CLUSTER),
    (PlanDocument, PLAN),
)

#: Stands for a value that is taken away.
ABSENT = object()


def changed(good: dict[str, Any], changes: dict[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """A copy of `good` with the value at each path replaced, added or taken away."""
    made = copy.deepcopy(good)
    for path, value in changes.items():
        inner: Any = made
        for part in path[:-1]:
            inner = inner[part]
        if value is ABSENT:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
    return made


def problems(kind: type[Document], value: object) -> list[str]:
    """What the file with this content is refused with."""
    with pytest.raises(DocumentError) as caught:
        parse_document(kind, value if isinstance(value, str) else json.dumps(value), what="file")
    assert caught.value.what == "file"
    return list(caught.value.problems)


def paths(found: Sequence[str]) -> list[str]:
    """The paths of problems."""
    return [problem.split(": ", 1)[0] for problem in found]
