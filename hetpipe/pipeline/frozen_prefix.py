"""The frozen layers of a stage, which read what enters the layer behind them where it is cached (caching.md).

What a frozen layer computes depends on its input alone, bit for bit: its weights and buffers are constant, and it draws
no random numbers, which is tried once. So the unit of a minibatch, the digest of what enters the model, identifies what
enters every frozen layer, whichever samples these are. A stage whose layers a minibatch has passed already sends it on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.elastic.caching import CacheCosts, kept_border, passes_ahead, pays, readable_borders
from hetpipe.job.freezing import CacheMode
from hetpipe.observe.log import get_logger
from hetpipe.pipeline.chain import Values
from hetpipe.pipeline.frozen_cache import DIGEST_BYTES, FrozenCache, digest_of
from hetpipe.values.quantities import time_text
from hetpipe.values.run import CacheUse

_log = get_logger(__name__)

#: Minibatches on which `auto` measures whether keeping pays.
_TRIALS = 3

#: The unit of a minibatch that no cache knows: layers that it has passed cannot be spared.
NO_UNIT = bytes(DIGEST_BYTES)


class FrozenLayers(Protocol):
    """The frozen layers of a stage, for one minibatch."""

    def run(self, values: Values, first: int, last: int) -> Values:
        """Run the layers [first, last) on `values`."""
        ...

    def is_repeatable(self, values: Values, first: int, last: int) -> bool:
        """Whether they compute the same each time, and change nothing; `values` stay as they are."""
        ...

    def seconds_of(self, first: int, last: int, taken: float) -> float:
        """Seconds on the emulated device of a forward through them that took `taken` seconds."""
        ...


@dataclass(frozen=True, slots=True)
class AtBorder:
    """A minibatch at a border of the chain."""

    values: Values
    """What enters layer `border`."""
    border: int
    unit: bytes
    """Digest of what enters the model, or `NO_UNIT`."""
    seconds: float = 0.0
    """That the stages before have computed for it since it was last read."""

    def note(self) -> Tensor:
        """What the next stage must know besides the values, as the last tensor of the frame."""
        halves = [int.from_bytes(half, "little", signed=True) for half in (self.unit[:8], self.unit[8:])]
        return torch.tensor([self.border, round(self.seconds * 1e9), *halves])

    @staticmethod
    def of(values: Values) -> AtBorder:
        """The minibatch of a frame's tensors, the last of which is the note."""
        border, nanoseconds, *halves = map(int, values[-1].tolist())
        unit = b"".join(half.to_bytes(DIGEST_BYTES // 2, "little", signed=True) for half in halves)
        return AtBorder(values[:-1], border, unit, nanoseconds / 1e9)


@dataclass(frozen=True, slots=True)
class Crossed:
    """How a minibatch crossed the frozen layers of a stage."""

    arrived: AtBorder
    """Behind them."""
    read_at: int | None
    """The border at which it was read; None: it was not."""
    computed: tuple[int, int]
    """The frozen layers [first, last) that the stage computed; equal if none."""
    kept: bool
    """Whether what it computed is kept."""


class FrozenPrefix:
    """The frozen layers of one stage that uses a cache, in one segment after the other."""

    def __init__(
        self,
        cache: FrozenCache,
        mode: CacheMode,
        nodes: tuple[str, ...],
        stage: int,
        epochs: int | None,
        clock: TimeSource,
    ) -> None:
        """Use `cache`.

        Args:
            cache: of this stage's node.
            mode: `on`, or `auto`: as long as it pays.
            nodes: node of each stage of the virtual worker.
            stage: this one.
            epochs: passes over the data of the run; None: minibatches bound it.
            clock: for measurements.
        """
        self.cache = cache
        self._use = CacheUse(0, 0, 0, 0)
        self._mode = mode
        self._nodes = nodes
        self._stage = stage
        self._epochs = epochs
        self._clock = clock
        self._bounds: tuple[int, ...] = ()
        self._frozen_layers = 0
        self._passes_ahead = 0
        #: The border at which it keeps units; None: another stage does, or it does not pay.
        self._keeps_at: int | None = None
        #: `auto`: what the first minibatches cost.
        self._measured: list[CacheCosts] = []
        #: Whether its frozen layers compute the same each time; None: not tried yet.
        self._is_repeatable: bool | None = None

    def begin(self, bounds: tuple[int, ...], frozen_layers: int, epoch: int) -> None:
        """Begin a segment in pass `epoch` over the data (from 0), with this cut of the virtual worker."""
        is_new = (bounds, frozen_layers, epoch) != (self._bounds, self._frozen_layers, self._epochs_begun())
        self._bounds, self._frozen_layers = bounds, frozen_layers
        self._passes_ahead = passes_ahead(epoch, self._epochs)
        if is_new:
            self._keeps_at = kept_border(self._stage, bounds, self._nodes, frozen_layers)
            self._measured = []
            self._is_repeatable = None

    def _epochs_begun(self) -> int | None:
        return None if self._epochs is None else self._epochs - self._passes_ahead - 1

    @property
    def use(self) -> CacheUse | None:
        """The stage's use of the cache so far; None if it has had no frozen layers."""
        used = self.cache.used
        return replace(self._use, kept_bytes=used.memory + used.disk) if self._bounds else None

    @property
    def is_used(self) -> bool:
        """Whether this stage has frozen layers."""
        return self._frozen_layers > 0 and self._bounds[self._stage] < self._frozen_layers

    @property
    def sends_note(self) -> bool:
        """Whether the next stage has frozen layers."""
        return self._bounds[self._stage + 1] < self._frozen_layers

    @staticmethod
    def entered(inputs: Values) -> AtBorder:
        """A minibatch that enters the model."""
        return AtBorder(inputs, 0, digest_of(inputs))

    def cross(self, arrived: AtBorder, layers: FrozenLayers) -> Crossed:
        """Read a minibatch, or compute the frozen layers of this stage."""
        upto = min(self._bounds[self._stage + 1], self._frozen_layers)
        read = self._read(arrived)
        found = read or arrived
        if found.border >= upto:
            return Crossed(found, None if read is None else read.border, (upto, upto), kept=False)
        if self._is_repeatable is None:
            self._is_repeatable = layers.is_repeatable(found.values, found.border, upto)
            if not self._is_repeatable:
                _log.warning(
                    "frozen_layers_not_cached",
                    layers=list(range(found.border, upto)),
                    reason="they draw random numbers or write buffers, also in evaluation mode",
                    consequence="they compute in each pass over the data, and so do frozen layers behind them",
                )
        started = self._clock.monotonic()
        values = layers.run(found.values, found.border, upto)
        taken = layers.seconds_of(found.border, upto, self._clock.monotonic() - started)
        unit = found.unit if self._is_repeatable else NO_UNIT
        behind = AtBorder(values, upto, unit, found.seconds + taken)
        kept = self._keep(behind, found.border if read is not None else None)
        self._use = replace(self._use, computed=self._use.computed + 1)
        return Crossed(behind, None if read is None else read.border, (found.border, upto), kept=kept)

    def _read(self, arrived: AtBorder) -> AtBorder | None:
        if arrived.unit == NO_UNIT:
            return None
        for border in readable_borders(self.cache.borders(), arrived.border, self._frozen_layers):
            values = self.cache.read(border, arrived.unit)
            if values is not None:
                num_bytes = sum(value.nbytes for value in values)
                self._use = replace(self._use, reads=self._use.reads + 1, read_bytes=self._use.read_bytes + num_bytes)
                return AtBorder(values, border, arrived.unit)
        return None

    def _keep(self, behind: AtBorder, replaced: int | None) -> bool:
        """Keep a minibatch, in place of the border at which it was read, if that pays."""
        if self._keeps_at is None or behind.unit == NO_UNIT:
            return False
        values = tuple(value.detach().cpu().contiguous() for value in behind.values)
        if self._mode == "auto" and len(self._measured) < _TRIALS:
            if not self._passes_ahead or not self._may_keep(replace(behind, values=values)):
                self._keeps_at = None
                return False
            if len(self._measured) < _TRIALS:
                return False
        if not self.cache.keep(behind.border, behind.unit, values):
            return False
        if replaced is not None:
            self.cache.drop(replaced, behind.unit)
        return True

    def _may_keep(self, behind: AtBorder) -> bool:
        """Measure one more minibatch, which is kept and dropped again; False if keeping does not pay, after the last.

        A computation that others delay looks slow, so the fastest one counts, and the median of what a cache costs.
        """
        unit = os.urandom(DIGEST_BYTES)  # its own may be kept by another virtual worker, and must not be dropped
        started = self._clock.monotonic()
        is_kept = self.cache.keep(behind.border, unit, behind.values)
        kept_at = self._clock.monotonic()
        read = self.cache.read(behind.border, unit) if is_kept else None
        if read is None:
            return False
        for value in read:  # a mapping alone reads nothing
            value.clone()
        self._measured.append(CacheCosts(behind.seconds, self._clock.monotonic() - kept_at, kept_at - started))
        self.cache.drop(behind.border, unit)
        if len(self._measured) < _TRIALS:
            return True
        costs = CacheCosts(
            min(each.compute for each in self._measured),
            median(each.read for each in self._measured),
            median(each.keep for each in self._measured),
        )
        found = pays(costs, self._passes_ahead)
        _log.info(
            "frozen_cache_measured",
            border=behind.border,
            compute=time_text(costs.compute * 1000),
            read=time_text(costs.read * 1000),
            keep=time_text(costs.keep * 1000),
            passes_ahead=self._passes_ahead,
            keeps=found,
        )
        return found
