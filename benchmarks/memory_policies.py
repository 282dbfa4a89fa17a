"""What memory policies cost: a stage's forwards and backwards under each, beside the same stage without any.

`direct` runs the layers as a stage would that knows nothing of policies. Contenders take turns within each round, in
another order each time, and are compared by the processor time of the round, as other work may share the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from benchmarks.sizes import sized
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.pipeline.chain import Layer, Values, chain_of, run_layers
from hetpipe.pipeline.compute import StageCompute
from hetpipe.pipeline.host_link import host_link
from hetpipe.pipeline.layer_memory import LayerMemory, LayersRun, Seed
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex
from hetpipe.values.memory import LayerPolicy

PAIRS = sized(20, 1)
NUM_LAYERS = 8
WIDTH = sized(256, 8)
SAMPLES = sized(64, 4)
#: Per round and contender.
MINIBATCHES = sized(40, 2)
#: Between forward and backward, at most.
IN_FLIGHT = 3

CONTENDERS: Mapping[str, LayerPolicy | None] = {
    "direct": None,
    "keep": "keep",
    "recompute": "recompute",
    "swap": "swap",
}


class _Direct(LayerMemory):
    """Without policies."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__(layers)
        self._all = layers

    def run(self, weights: Mapping[str, Tensor], values: Values, seed: Seed, *, first: int = 0) -> LayersRun:
        """See `LayerMemory.run`."""
        del first
        return LayersRun(run_layers(self._all, weights, values, seed), {}, None)


class _Stage:
    def __init__(self, policy: LayerPolicy | None) -> None:
        model = nn.Sequential(
            nn.Identity(), *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS))
        )
        layers, device = chain_of(model)[1:], torch.device("cpu")
        link = host_link(device, SYSTEM_CLOCK) if policy == "swap" else None
        memory = _Direct(layers) if policy is None else LayerMemory(layers, [policy] * NUM_LAYERS, link)
        self._compute = StageCompute(layers, vw=VirtualWorkerIndex(0), seed=0, device=device, loss=None, memory=memory)
        self._weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        self._input, self._ones = torch.randn(SAMPLES, WIDTH), torch.ones(SAMPLES, WIDTH)
        self._p = 0

    def seconds(self) -> float:
        """Processor seconds of a round."""
        started = time.process_time()
        first = self._p + 1
        for p in range(first, first + MINIBATCHES + IN_FLIGHT):
            if p < first + MINIBATCHES:
                self._compute.forward(Minibatch(p), self._weights, (self._input,))
            if p >= first + IN_FLIGHT:
                self._compute.backward(Minibatch(p - IN_FLIGHT), self._weights, [self._ones])
        self._p = first + MINIBATCHES - 1
        return time.process_time() - started


def measure() -> dict[str, list[float]]:
    """Contender → its seconds in each round."""
    stages = {name: _Stage(policy) for name, policy in CONTENDERS.items()}
    found: dict[str, list[float]] = {name: [] for name in stages}
    for stage in stages.values():
        stage.seconds()
    for number in range(PAIRS):
        names = list(stages)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(stages[name].seconds())
    return found


def ratios(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians of the ratios within each round."""
    pairs = [("keep", "direct"), ("recompute", "keep"), ("swap", "keep")]
    return {
        f"{one} / {other}": statistics.median(a / b for a, b in zip(found[one], found[other], strict=True))
        for one, other in pairs
    }
