"""The same search without hetpipe: one process, a plain loop of PyTorch.

python -m examples.architecture_search.twin
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from examples.architecture_search.model import PLACES, active_layers, build
from examples.architecture_search.search import NUM_WAVES, WAVES_EACH, found, sampled
from examples.digits.model import train_data

BATCH_SIZE, MINIBATCHES_PER_WAVE, RATE = 8, 2, 0.01


def trained(seed: int, num_waves: int = NUM_WAVES) -> nn.Sequential:
    """The supernet after training; an update is made of the mean gradient of the minibatches of a wave."""
    torch.manual_seed(seed)
    supernet, data = build(), train_data()
    optimizer = torch.optim.AdamW(supernet.parameters(), lr=RATE)
    architectures = sampled(seed)
    blocks = iter(DataLoader(data, BATCH_SIZE))
    for wave in range(num_waves):
        layers = [supernet.get_submodule(name) for name in active_layers(architectures[wave // WAVES_EACH])]
        weights = [weight for layer in layers for weight in layer.parameters()]
        sums = [torch.zeros_like(weight) for weight in weights]
        for images_BP, labels_B in islice(blocks, MINIBATCHES_PER_WAVE):
            values = images_BP
            for layer in layers:
                values = layer(values)
            gradients = torch.autograd.grad(functional.cross_entropy(values, labels_B), weights)
            for total, gradient in zip(sums, gradients, strict=True):
                total.add_(gradient, alpha=BATCH_SIZE)
        optimizer.zero_grad()  # to None: the optimizer passes over the weights of inactive layers
        for weight, total in zip(weights, sums, strict=True):
            weight.grad = total.div_(BATCH_SIZE * MINIBATCHES_PER_WAVE)
        optimizer.step()
    return supernet


def main(seed: int = 5) -> None:
    """Train, search, and print the architecture."""
    best = found(trained(seed).eval(), seed)
    print(dict(zip(PLACES, best, strict=True)))  # noqa: T201


if __name__ == "__main__":
    main()
