"""What enters the layers behind the frozen ones, from a cache: what is kept where, and when it pays. Pure (caching.md).

A *unit* is what the cache has or lacks: a whole minibatch, or one of its samples. A *border* is a layer of the chain;
at it stands what enters that layer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetpipe.job.file import Job

#: Where a unit is kept.
Tier = Literal["memory", "disk"]


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Bytes of a node's cache, used or allowed."""

    memory: int
    disk: int


@dataclass(frozen=True, slots=True)
class CacheFolders:
    """Where a node keeps units of one job, and how many bytes of them."""

    memory: Path
    disk: Path
    allowed: CacheBytes


def tier_for(size: int, used: CacheBytes, allowed: CacheBytes) -> Tier | None:
    """Where `size` further bytes are kept: in memory as long as they fit, then on disk; None: nowhere.

    Nothing is evicted for them: every sample comes back once in each pass over the data, so nothing that is kept is
    worth less than what would replace it.

    >>> room = CacheBytes(memory=100, disk=50)
    >>> [tier_for(40, CacheBytes(used, 0), room) for used in (0, 60, 61)], tier_for(51, CacheBytes(60, 0), room)
    (['memory', 'memory', 'disk'], None)
    """
    if used.memory + size <= allowed.memory:
        return "memory"
    return "disk" if used.disk + size <= allowed.disk else None


@dataclass(frozen=True, slots=True)
class CacheCosts:
    """Measured seconds of one unit."""

    compute: float
    """Of the forward through the layers that reading it saves."""
    read: float
    keep: float


def pays(costs: CacheCosts, passes: int) -> bool:
    """Whether keeping a unit gains more than it costs, if it is read in each of `passes` further passes over the data.

    Where computing takes less than twice as long as reading it does not: the digest of the unit is not measured.

    >>> costs = CacheCosts(compute=0.003, read=0.001, keep=0.004)
    >>> [pays(costs, passes) for passes in (0, 2, 3)]
    [False, False, True]
    >>> pays(CacheCosts(compute=0.003, read=0.002, keep=0.001), passes=100)
    False
    """
    return costs.compute >= 2 * costs.read and passes * (costs.compute - costs.read) > costs.keep


def passes_ahead(epoch: int, epochs: int | None) -> int:
    """Passes over the data that follow pass `epoch` (from 0); where only minibatches bound the run, one at least.

    >>> passes_ahead(0, 3), passes_ahead(2, 3), passes_ahead(7, None)
    (2, 0, 1)
    """
    return 1 if epochs is None else max(epochs - epoch - 1, 0)


def kept_border(stage: int, bounds: Sequence[int], nodes: Sequence[str], frozen_layers: int) -> int | None:
    """The border at which a stage keeps what it has computed; None: it has no frozen layers, or leaves it to another.

    Of the stages of a virtual worker on one node, the last one with frozen layers keeps: what it keeps spares the
    others, too.

    Args:
        stage: the stage.
        bounds: stage k of the virtual worker has the layers [bounds[k], bounds[k + 1]).
        nodes: node of each stage.
        frozen_layers: the leading layers of the chain that are frozen.

    >>> [kept_border(stage, (0, 2, 4, 6), ("a", "a", "a"), frozen_layers=3) for stage in range(3)]
    [None, 3, None]
    >>> [kept_border(stage, (0, 2, 4, 6), ("a", "b", "a"), frozen_layers=4) for stage in range(3)]
    [2, 4, None]
    """
    with_frozen = [k for k, first in enumerate(bounds[:-1]) if first < frozen_layers and nodes[k] == nodes[stage]]
    return min(bounds[stage + 1], frozen_layers) if with_frozen and stage == with_frozen[-1] else None


def readable_borders(kept: Collection[int], entered: int, frozen_layers: int) -> tuple[int, ...]:
    """The borders at which a minibatch that stands at `entered` may be read, those that spare most first.

    >>> readable_borders({2, 4, 6}, entered=2, frozen_layers=5)
    (4,)
    """
    return tuple(sorted((border for border in kept if entered < border <= frozen_layers), reverse=True))


def allowed_bytes(job: Job) -> CacheBytes:
    """The limits of a job's cache on each node."""
    return CacheBytes(job.freeze.cache_memory_bytes, job.freeze.cache_disk_bytes)


def caches_samples(job: Job) -> bool:
    """Whether the units of a job's cache are samples: those that are shuffled come back in other minibatches."""
    return job.data.is_shuffled


def wants_cache(job: Job, nodes: Collection[str]) -> bool:
    """Whether stages of a job look for a cache at all; without one, auto, nothing could be read twice.

    Args:
        job: the job.
        nodes: of all stages. Shuffled samples come back on any of them unless they belong to nodes, and a minibatch is
            read only if its node has all of its samples.
    """
    if job.freeze.cache == "auto":
        comes_back = not caches_samples(job) or job.data.division == "by_node" or len(set(nodes)) == 1
        return job.freezes and job.freeze.mode == "eval" and comes_back
    return job.freeze.cache == "on"
