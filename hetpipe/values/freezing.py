"""Frozen layers of a run: values shared by job, clock shard, shards and stages (docs/semantics/freezing.md).

F counts frozen layers with trainable parameters. Which layers of the chain these are follows from the model; a plan
lists it for every F, so that no other process needs the model for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Annotated, Literal

from hetpipe.values.bounds import COUNT, Count
from hetpipe.values.ids import Clock, VirtualWorkerIndex

#: The training flags of frozen layers: those of evaluation, or those of training.
FreezeMode = Literal["eval", "train"]

#: What a device must not have more of after pipelines are compressed.
CompressMeasure = Literal["memory", "parameters"]


@dataclass(frozen=True, slots=True)
class FreezeChange:
    """Layers that are frozen from a barrier on, decided before the run."""

    frozen: int
    """F."""
    clock: Clock | None = None
    """The barrier at which it takes effect; None: the one that ends pass `epoch` over the data."""
    epoch: int | None = None
    """Completed passes over the data."""


@dataclass(frozen=True, slots=True)
class FrozenSince:
    """Frozen layers from a barrier on."""

    clock: Annotated[Clock, COUNT]
    frozen: Count
    """F."""
    layers: Count
    """The leading layers of the chain that are frozen with F."""

    def __str__(self) -> str:
        """`layers 0-7 (4 with parameters) from clock 9 on`."""
        return f"{self.layers_text} from clock {self.clock} on"

    @property
    def layers_text(self) -> str:
        """`layers 0-7 (4 with parameters)`."""
        which = "layer 0" if self.layers == 1 else f"layers 0-{self.layers - 1}"
        return f"{which} ({self.frozen} with parameters)"


@dataclass(frozen=True, slots=True)
class FreezeCut:
    """How a virtual worker is cut while so many layers are frozen."""

    frozen: int
    """F, of those that ties allow."""
    vw: VirtualWorkerIndex
    bounds: tuple[int, ...]
    """Stage k has the layers [bounds[k], bounds[k + 1])."""


@dataclass(frozen=True, slots=True)
class LineupWorker:
    """A virtual worker of a lineup."""

    vw: VirtualWorkerIndex
    devices: tuple[int, ...]
    """The device of each stage: a number counts those of the job's virtual workers, stage by stage, from 0 on."""


@dataclass(frozen=True, slots=True)
class FreezeLineup:
    """The virtual workers that train while so many layers are frozen, where pipelines are compressed."""

    frozen: int
    """The smallest F that it is for; it is in force up to that of the next."""
    workers: tuple[LineupWorker, ...]
    """In index order."""
    minibatches_per_wave: int
    """N of each of them."""

    @property
    def members(self) -> tuple[VirtualWorkerIndex, ...]:
        """Their indices, in order."""
        return tuple(worker.vw for worker in self.workers)


def outgrown(lineups: Sequence[FreezeLineup], frozen: int) -> tuple[VirtualWorkerIndex, ...]:
    """The virtual workers that train no more, nor later, where those for F train.

    >>> first, second = (FreezeLineup(f, (LineupWorker(VirtualWorkerIndex(f), (0,)),), 1) for f in (0, 2))
    >>> outgrown([first, second], 1), outgrown([first, second], 2)
    ((), (0,))
    """
    due = [lineup for lineup in lineups if lineup.frozen <= frozen]
    left = {vw for lineup in (*due[-1:], *(each for each in lineups if each.frozen > frozen)) for vw in lineup.members}
    return tuple(sorted({vw for lineup in due for vw in lineup.members} - left))


def lineup_for(lineups: Sequence[FreezeLineup], frozen: int) -> FreezeLineup | None:
    """The one for F; None: there is none, and all virtual workers train."""
    due = [lineup for lineup in lineups if lineup.frozen <= frozen]
    return due[-1] if due else next(iter(lineups), None)


def joining(lineups: Sequence[FreezeLineup], before: int, after: int) -> tuple[VirtualWorkerIndex, ...]:
    """The virtual workers that join where those for F = `after` replace those for F = `before`."""
    old, new = lineup_for(lineups, before), lineup_for(lineups, after)
    return () if old is None or new is None else tuple(vw for vw in new.members if vw not in old.members)


@dataclass(frozen=True, slots=True)
class Freezing:
    """The rule by which the layers of a run freeze."""

    levels: tuple[int, ...]
    """levels[F]: the leading layers of the chain that are frozen with F, 0 ≤ F < L; levels[0] = 0. Where ties forbid F
    it is the entry of the next lower one that they allow.
    """
    changes: tuple[FreezeChange, ...] = ()
    """Decided before the run, in order of time."""
    alpha: str | None = None
    """α, a fraction between 0 and 1, where the norms of gradients decide; None: they do not."""
    every_waves: int | None = None
    """They decide at each barrier whose clock is a multiple of it; None: at the ends of passes over the data."""
    cuts: tuple[FreezeCut, ...] = ()
    """The cuts of virtual workers from the barrier on at which F becomes that of the cut; without one layers stay."""
    lineups: tuple[FreezeLineup, ...] = ()
    """Who trains with which F, in order of F; the first one begins. Empty: the same virtual workers all the time."""

    def lineup(self, frozen: int) -> FreezeLineup | None:
        """The lineup for F; None: all virtual workers train."""
        return lineup_for(self.lineups, frozen)

    def allowed(self, frozen: int) -> int:
        """The largest F up to `frozen` that ties allow.

        >>> Freezing((0, 2, 2, 5)).allowed(2)
        1
        """
        return self.levels.index(self.levels[frozen])

    def frozen_at(self, frozen: int, *, after: Clock, upto: Clock, epoch: int) -> int:
        """F from the barrier at `upto` on.

        Args:
            frozen: F before it.
            after: clock of the barrier before.
            upto: its clock.
            epoch: passes over the data completed there.
        """
        due = [
            change.frozen
            for change in self.changes
            if (after < change.clock <= upto if change.clock is not None else (change.epoch or 0) <= epoch)
        ]
        return max([frozen, *map(self.allowed, due)])

    def decides_at(self, clock: Clock, reasons: Collection[str]) -> bool:
        """Whether the norms of gradients decide at a barrier."""
        if self.alpha is None:
            return False
        return "epoch" in reasons if self.every_waves is None else clock % self.every_waves == 0

    def decided(self, frozen: int, squares: Sequence[Mapping[int, float]]) -> int:
        """F by the norms of gradients (freezing.md §2).

        Args:
            frozen: F before.
            squares: of each member in index order, layer → the squared norm of its gradients.

        >>> Freezing((0, 1, 2, 3), alpha="1/2").decided(0, [{0: 4.0, 1: 1.0, 2: 0.5, 3: 9.0}])
        2
        >>> Freezing((0, 1, 2, 3), alpha="1/2").decided(2, [{2: 1.0, 3: 0.5}])
        3
        """
        assert self.alpha is not None, "norms decide"
        totals: dict[int, float] = {}
        for own in squares:
            for layer, square in own.items():
                totals[layer] = totals.get(layer, 0.0) + square
        trained = sorted(layer for layer in totals if layer >= self.levels[frozen])
        left = len(self.levels) - frozen
        if len(trained) < left:  # no minibatch of this segment has told its gradients
            return frozen
        least = min(range(left), key=lambda number: totals[trained[number]])
        return self.allowed(max(frozen, min(self.bound(frozen), frozen + least)))

    def bound(self, frozen: int) -> int:
        """The largest F, before ties lower it, that norms can decide where F is `frozen`.

        >>> from itertools import accumulate
        >>> twelve = Freezing(tuple(range(12)), alpha="1/3")
        >>> list(accumulate(range(5), lambda frozen, _: twelve.bound(frozen), initial=0))
        [0, 4, 6, 8, 9, 10]
        """
        assert self.alpha is not None, "norms decide"
        return floor(frozen + Fraction(self.alpha) * (len(self.levels) - frozen))

    def foretold(self, frozen: int, *, after: Clock, upto: Clock, epoch: int, reasons: Collection[str]) -> int:
        """F from the barrier at `upto` on, as `frozen_at` and `decides_at`, if norms decide the most that they can.

        Where a run begins, `after` is below 0, there are no norms.
        """
        found = self.frozen_at(frozen, after=after, upto=upto, epoch=epoch)
        return self.allowed(self.bound(found)) if after >= 0 and self.decides_at(upto, reasons) else found

    @property
    def clocks(self) -> tuple[Clock, ...]:
        """The clocks at which barriers are set for it."""
        return tuple(change.clock for change in self.changes if change.clock is not None)
