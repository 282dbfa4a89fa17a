"""The data division of a segment: assignment of samples to virtual workers (`wsp.md` §5).

At each barrier the samples of the epoch that no committed wave has used are permuted by (seed, epoch, barrier) and
dealt in blocks of `batch_size`, round-robin, to the members in index order. The last block of an epoch may be short.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from hetpipe.values.ids import Clock, VirtualWorkerIndex

#: Sample indices of one minibatch.
Block = tuple[int, ...]


def shuffled(samples: Sequence[int], *, seed: int, epoch: int, barrier: Clock) -> list[int]:
    """Shuffle `samples` for this division; the same on every machine and Python version.

    >>> shuffled(range(5), seed=0, epoch=0, barrier=Clock(0)) == shuffled(range(5), seed=0, epoch=0, barrier=Clock(0))
    True
    """
    order = list(samples)
    random.Random(f"hetpipe/{seed}/{epoch}/{barrier}").shuffle(order)  # noqa: S311 - a shuffle, no secret
    return order


def deal(
    order: Sequence[int], *, batch_size: int, members: Sequence[VirtualWorkerIndex], limit: int | None
) -> dict[VirtualWorkerIndex, tuple[Block, ...]]:
    """Deal blocks to every member, at most `limit` in total (None: no limit).

    >>> deal([4, 1, 3, 0, 2], batch_size=2, members=[0, 1], limit=None)
    {0: ((4, 1), (2,)), 1: ((3, 0),)}
    """
    blocks = [tuple(order[i : i + batch_size]) for i in range(0, len(order), batch_size)]
    if limit is not None:
        blocks = blocks[:limit]
    return {vw: tuple(blocks[index :: len(members)]) for index, vw in enumerate(members)}


def unused(bitmap: bytes, num_samples: int) -> list[int]:
    """The samples whose bit in `bitmap` is 0, in order.

    >>> unused(bytes([0b101]), 4)
    [1, 3]
    """
    return [i for i in range(num_samples) if not bitmap[i >> 3] >> (i & 7) & 1]


def empty_bitmap(num_samples: int) -> bytes:
    """A bitmap with no sample used."""
    return bytes((num_samples + 7) // 8)


def with_used(bitmap: bytes, samples: Sequence[int]) -> bytes:
    """A copy of `bitmap` with `samples` marked as used."""
    marked = bytearray(bitmap)
    for i in samples:
        marked[i >> 3] |= 1 << (i & 7)
    return bytes(marked)


def blocks_of_evaluation(num_samples: int, batch_size: int, *, place: int, num_members: int) -> tuple[Block, ...]:
    """The evaluation minibatches of the member at `place`: blocks in index order, dealt round-robin.

    >>> blocks_of_evaluation(5, 2, place=0, num_members=2)
    ((0, 1), (4,))
    """
    blocks = [tuple(range(i, min(i + batch_size, num_samples))) for i in range(0, num_samples, batch_size)]
    return tuple(blocks[place::num_members])
