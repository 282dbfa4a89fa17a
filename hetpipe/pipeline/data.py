"""Which tensors a minibatch is: the data contract (`wsp.md` §5).

The first stage reads inputs and the last one targets, each from the data set itself; nothing but activations travels.
Random augmentation draws from generators seeded by (seed, virtual worker, minibatch), so both read the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from hetpipe.errors import CallableError
from hetpipe.pipeline.callables import MapDataset
from hetpipe.pipeline.seeds import evaluation_fetch_seed, fetch_seed, seed_generators
from hetpipe.spec.ids import Minibatch, VirtualWorkerIndex


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one minibatch."""

    inputs: tuple[Tensor, ...]
    target: Any
    num_samples: int


def read_batch(dataset: MapDataset, indices: Sequence[int]) -> Batch:
    """Read and collate samples, in order.

    Raises:
        CallableError: a sample is no (input, target) pair.
    """
    samples = [dataset[index] for index in indices]
    if not all(isinstance(sample, tuple | list) and len(sample) == len(("input", "target")) for sample in samples):
        raise CallableError(f"a sample must be a pair (input, target), not {samples[0]!r:.80}")
    inputs, target = default_collate(samples)
    values = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    return Batch(values, target, len(indices))


def read_minibatch(
    dataset: MapDataset, indices: Sequence[int], *, seed: int, vw: VirtualWorkerIndex, p: Minibatch
) -> Batch:
    """The tensors of minibatch `p` of `vw`, read under its own seed."""
    seed_generators(fetch_seed(seed, vw, p))
    return read_batch(dataset, indices)


def read_evaluation_minibatch(
    dataset: MapDataset, indices: Sequence[int], *, seed: int, vw: VirtualWorkerIndex, number: int
) -> Batch:
    """The tensors of evaluation minibatch `number` (from 1) of `vw`, read under its own seed."""
    seed_generators(evaluation_fetch_seed(seed, vw, number))
    return read_batch(dataset, indices)
