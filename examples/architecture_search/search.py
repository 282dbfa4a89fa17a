"""Search for an architecture: train all candidates with weights that they share, then let the better ones evolve.

While the supernet trains, another architecture is active every four waves, drawn at random (single-path one-shot
training); each weight is trained in whichever architectures have it. Then candidates are compared on data that training
never sees, with the weights as they are: of each generation the better half stays, and each of them has a child that
differs at one place. All draws come from one seed.

    python -m examples.architecture_search.search
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import hetpipe
from examples.architecture_search.model import CHOICES, PLACES, Architecture, active_layers, build
from examples.digits.model import eval_data
from hetpipe.runs.run import Run

JOB = Path(__file__).with_name("job.yaml")

#: Waves for which an architecture is active, and their number in the job.
WAVES_EACH, NUM_WAVES = 4, 88

POPULATION, GENERATIONS = 12, 6


def sampled(seed: int) -> list[Architecture]:
    """The architectures that are active one after the other while the supernet trains."""
    draws = random.Random(seed)  # noqa: S311 - no secret
    return [_drawn(draws) for _ in range(NUM_WAVES // WAVES_EACH)]


def section(architectures: list[Architecture]) -> dict[str, Any]:
    """The section `elastic` of the job in which these are active in turn."""
    first, *later = architectures
    lines = (
        {"at": {"clock": WAVES_EACH * number}, "do": "activate", "active": active_layers(architecture)}
        for number, architecture in enumerate(later, start=1)
    )
    return {"active": active_layers(first), "script": list(lines)}


def found(supernet: nn.Sequential, seed: int) -> Architecture:
    """The best architecture of the last generation, by the loss on the evaluation data with the supernet's weights."""
    draws, data = random.Random(seed + 1), eval_data()  # noqa: S311 - no secret
    known: dict[Architecture, float] = {}

    def loss(architecture: Architecture) -> float:
        if architecture not in known:
            known[architecture] = _loss(supernet, architecture, data)
        return known[architecture]

    return _evolved(draws, loss)


def _evolved(draws: random.Random, loss: Callable[[Architecture], float]) -> Architecture:
    population = [_drawn(draws) for _ in range(POPULATION)]
    for _ in range(GENERATIONS):
        # The names settle ties, so that the result does not depend on the order.
        parents = sorted(dict.fromkeys(population), key=lambda each: (loss(each), each))[: POPULATION // 2]
        population = [*parents, *(_mutated(draws, parent) for parent in parents)]
    return min(population, key=lambda each: (loss(each), each))


def _drawn(draws: random.Random) -> Architecture:
    return tuple(draws.choice(CHOICES) for _ in PLACES)


def _mutated(draws: random.Random, parent: Architecture) -> Architecture:
    place = draws.randrange(len(PLACES))
    return (*parent[:place], draws.choice(CHOICES), *parent[place + 1 :])


@torch.no_grad()
def _loss(supernet: nn.Sequential, architecture: Architecture, data: TensorDataset) -> float:
    images_BP, labels_B = data.tensors
    values = images_BP
    for name in active_layers(architecture):
        values = supernet.get_submodule(name)(values)
    return float(functional.cross_entropy(values, labels_B))


def main(seed: int = 5) -> None:
    """Train the supernet with hetpipe, search, and print the architecture."""
    result = hetpipe.train(JOB, seed=seed, elastic=section(sampled(seed)))
    supernet = build()
    Run(result.run_dir).load_into(supernet)
    best = found(supernet.eval(), seed)
    print(dict(zip(PLACES, best, strict=True)), f"loss {_loss(supernet, best, eval_data()):.4f}")  # noqa: T201


if __name__ == "__main__":
    main()
