"""The data division of a segment: assignment of samples to virtual workers (`wsp.md` §5).

At each barrier the samples of the epoch that no committed wave has used are permuted by (seed, epoch, barrier) and
dealt in blocks of `batch_size`, round-robin, to the members in index order. The last block of an epoch may be short.
A job with an order of its own (`data.sampler`, `data.shuffle: false`) has them dealt in that order instead.
Members whose waves have different numbers of minibatches get blocks in proportion to these (`wsp.md` §10). Where
samples belong to nodes, each block has samples of the node of its member.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from itertools import cycle, islice

from hetpipe.values.ids import Clock, VirtualWorkerIndex

#: In place of an epoch, for an order that is the same in all of them.
_ALL_EPOCHS = -1

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


def in_order(samples: Sequence[int], order: Sequence[int]) -> list[int]:
    """Sort `samples`, which are all in `order`, by their positions there.

    >>> in_order([1, 2, 4], [4, 3, 1, 0, 2])
    [4, 1, 2]
    """
    wanted = set(samples)
    return [sample for sample in order if sample in wanted]


def turns(per_wave: Mapping[VirtualWorkerIndex, int]) -> Iterator[VirtualWorkerIndex]:
    """The members in the order in which they get blocks, without end: N_v turns of member v in each wave.

    It is the order in which the minibatches of a wave complete if all waves take equally long: block j of N_v after
    j / N_v of the wave, of several at once in index order. With equal N_v that is round-robin.

    Args:
        per_wave: member → N_v, in index order.

    >>> from itertools import islice
    >>> list(islice(turns({0: 4, 1: 1}), 6)), list(islice(turns({0: 2, 1: 2}), 5))
    ([0, 0, 0, 0, 1, 0], [0, 1, 0, 1, 0])
    """
    common = math.lcm(*per_wave.values())

    def completions(vw: VirtualWorkerIndex, num: int) -> Iterator[tuple[int, VirtualWorkerIndex]]:
        return ((j * (common // num), vw) for j in range(1, num + 1))

    return cycle(vw for _, vw in merge(*(completions(vw, num) for vw, num in per_wave.items())))


def shares(minibatches: int, per_wave: Sequence[int]) -> tuple[int, ...]:
    """Number of minibatches of each member if they compute `minibatches` on average, dealt as by `turns`.

    >>> shares(5, (2, 2)), shares(10, (4, 1)), shares(3, (4, 1))
    ((5, 5), (16, 4), (5, 1))
    """
    whole, rest = divmod(minibatches * len(per_wave), sum(per_wave))
    last = Counter(islice(turns({VirtualWorkerIndex(vw): num for vw, num in enumerate(per_wave)}), rest))
    return tuple(whole * num + last[VirtualWorkerIndex(vw)] for vw, num in enumerate(per_wave))


def at_home(
    order: Sequence[int],
    *,
    batch_size: int,
    per_wave: Mapping[VirtualWorkerIndex, int],
    homes: Sequence[int],
    seed: int,
    num_samples: int,
) -> list[int]:
    """Reorder samples so that each block that `deal` makes of them has samples of its member's node.

    In an order that is the same in all epochs, each node in turn gets as many samples as its members are dealt. So a
    sample is on the same node in each epoch that is dealt alike. The samples of a node keep their order.

    Args:
        order: sample indices in the order in which they would be dealt.
        batch_size: samples per block.
        per_wave: N_v of each member, in index order.
        homes: number of the node of each virtual worker; others are together on one more.
        seed: of the job.
        num_samples: of the data set.

    >>> blocks = {"batch_size": 2, "per_wave": {0: 1, 1: 1}, "homes": (0, 1), "seed": 0, "num_samples": 8}
    >>> one, other = at_home(range(8), **blocks), at_home(range(7, -1, -1), **blocks)
    >>> one, [sorted(dealt[:2] + dealt[4:6]) for dealt in (one, other)]
    ([1, 2, 0, 3, 5, 6, 4, 7], [[1, 2, 5, 6], [1, 2, 5, 6]])
    """
    sizes = [min(batch_size, len(order) - first) for first in range(0, len(order), batch_size)]
    places = [homes[vw] if vw < len(homes) else len(homes) for vw in islice(turns(per_wave), len(sizes))]
    wanted = Counter[int]()
    for home, size in zip(places, sizes, strict=True):
        wanted[home] += size
    left = set(order)
    same = shuffled(range(num_samples), seed=seed, epoch=_ALL_EPOCHS, barrier=Clock(0))
    owners = dict(zip((sample for sample in same if sample in left), sorted(wanted.elements()), strict=True))
    queues = {home: iter([sample for sample in order if owners[sample] == home]) for home in wanted}
    return [sample for home, size in zip(places, sizes, strict=True) for sample in islice(queues[home], size)]


def mean_minibatches(waves: int, per_wave: Sequence[int]) -> int:
    """The smallest mean number of minibatches of a member with which all members complete `waves` waves.

    >>> mean_minibatches(3, (2, 2)), mean_minibatches(3, (4, 1))
    (6, 8)
    """
    return -(-waves * sum(per_wave) // len(per_wave))


def deal(
    order: Sequence[int],
    *,
    batch_size: int,
    members: Sequence[VirtualWorkerIndex],
    limit: int | None,
    per_wave: Mapping[VirtualWorkerIndex, int] | None = None,
) -> dict[VirtualWorkerIndex, tuple[Block, ...]]:
    """Deal blocks to every member, at most `limit` in total (None: no limit).

    Args:
        order: sample indices in the order in which they are dealt.
        batch_size: samples per block.
        members: in index order.
        limit: most blocks of all members together.
        per_wave: N_v of each member; None: the same for all.

    >>> deal([4, 1, 3, 0, 2], batch_size=2, members=[0, 1], limit=None)
    {0: ((4, 1), (2,)), 1: ((3, 0),)}
    >>> deal(range(7), batch_size=1, members=[0, 1], limit=None, per_wave={0: 3, 1: 1})
    {0: ((0,), (1,), (2,), (4,), (5,), (6,)), 1: ((3,),)}
    """
    blocks = [tuple(order[i : i + batch_size]) for i in range(0, len(order), batch_size)]
    if limit is not None:
        blocks = blocks[:limit]
    if per_wave is None:
        return {vw: tuple(blocks[index :: len(members)]) for index, vw in enumerate(members)}
    dealt: dict[VirtualWorkerIndex, list[Block]] = {vw: [] for vw in members}
    for block, vw in zip(blocks, turns({vw: per_wave[vw] for vw in members}), strict=False):
        dealt[vw].append(block)
    return {vw: tuple(own) for vw, own in dealt.items()}


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
