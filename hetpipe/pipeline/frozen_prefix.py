"""The frozen layers of a stage, which read what enters the layer behind them where it is cached (caching.md).

What a frozen layer computes depends on its input alone, bit for bit: its weights and buffers are constant, and it draws
no random numbers, which is tried once. So the unit of a minibatch, the digest of what enters the model, identifies what
enters every frozen layer, whichever samples these are. Where samples are shuffled, each of them is a unit; that its
bits depend neither on the other samples nor on its place among them is tried, too. A stage whose layers a minibatch has
passed already sends it on.
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
from hetpipe.pipeline.frozen_cache import DIGEST_BYTES, FrozenCache, digest_of, digests_of_samples
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.quantities import time_text
from hetpipe.values.run import CacheUse

_log = get_logger(__name__)

#: Minibatches on which `auto` measures whether keeping pays.
_TRIALS = 3


class FrozenLayers(Protocol):
    """The frozen layers of a stage, for one minibatch."""

    def run(self, values: Values, first: int, last: int) -> Values:
        """Run the layers [first, last) on `values`."""
        ...

    def is_repeatable(self, values: Values, first: int, last: int) -> bool:
        """Whether they compute the same each time, and change nothing; `values` stay as they are."""
        ...

    def rows_of_samples(self, values: Values, first: int, last: int, num_samples: int) -> tuple[bool, ...] | None:
        """For each value behind them, whether it has a row per sample; None: a row depends on more than its sample."""
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
    units: tuple[bytes, ...]
    """Digest of what enters the model, as a whole or of each sample; none if layers that it has passed cannot be
    spared, so that no cache is asked.
    """
    seconds: float = 0.0
    """That the stages before have computed for it since it was last read."""
    is_read: bool = False
    """Whether one of them has read it."""

    def note(self) -> Tensor:
        """What the next stage must know besides the values, as the last tensor of the frame."""
        halves = [int.from_bytes(unit[at : at + 8], "little", signed=True) for unit in self.units for at in (0, 8)]
        return torch.tensor([self.border, round(self.seconds * 1e9), self.is_read, *halves])

    @staticmethod
    def of(values: Values) -> AtBorder:
        """The minibatch of a frame's tensors, the last of which is the note."""
        border, nanoseconds, is_read, *halves = values[-1].tolist()
        content = b"".join(half.to_bytes(8, "little", signed=True) for half in halves)
        units = tuple(content[at : at + DIGEST_BYTES] for at in range(0, len(content), DIGEST_BYTES))
        return AtBorder(values[:-1], border, units, nanoseconds / 1e9, bool(is_read))


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


@dataclass(slots=True)
class _Pass:
    """Minibatches that have crossed a stage in one pass over the data: all, read by it or another, and kept by it."""

    crossed: int = 0
    read: int = 0
    kept: int = 0


class FrozenPrefix:
    """The frozen layers of one stage that uses a cache, in one segment after the other."""

    def __init__(
        self,
        cache: FrozenCache,
        mode: CacheMode,
        vw: VirtualWorkerIndex,
        nodes: tuple[str, ...],
        stage: int,
        epochs: int | None,
        clock: TimeSource,
        *,
        of_samples: bool,
    ) -> None:
        """Use `cache`.

        Args:
            cache: of this stage's node.
            mode: `on`, or `auto`: as long as it pays.
            vw: its virtual worker.
            nodes: node of each stage of that.
            stage: this one.
            epochs: passes over the data of the run; None: minibatches bound it.
            clock: for measurements.
            of_samples: whether units are samples, instead of minibatches.
        """
        self.cache = cache
        self._use = CacheUse(0, 0, 0, 0)
        self._mode = mode
        self._vw = vw
        self._nodes = nodes
        self._stage = stage
        self._epochs = epochs
        self._clock = clock
        self._of_samples = of_samples
        self._bounds: tuple[int, ...] = ()
        self._frozen_layers = 0
        self._epoch: int | None = None
        self._passes_ahead = 0
        #: The border at which it keeps units; None: another stage does, or it does not pay.
        self._keeps_at: int | None = None
        #: `auto`: what the first minibatches cost.
        self._measured: list[CacheCosts] = []
        #: Border and number of units → for each value behind the frozen layers from there on, whether it has a row for
        #: each of them; None: these layers cannot be spared.
        self._tried: dict[tuple[int, int], tuple[bool, ...] | None] = {}
        self._pass = _Pass()
        self._has_kept = False
        #: Why nothing more is kept with this cut and these frozen layers; empty if there may be no room at most.
        self._stopped = ""
        #: Whether the virtual worker asks for no unit, as it does not pay with this cut and these frozen layers.
        self._is_declined = False
        #: Whether a whole pass over the data has read nothing of what was kept before.
        self._is_useless = False

    def begin(self, bounds: tuple[int, ...], frozen_layers: int, epoch: int) -> None:
        """Begin a segment in pass `epoch` over the data (from 0), with this cut of the virtual worker."""
        is_other = (bounds, frozen_layers) != (self._bounds, self._frozen_layers)
        is_next = epoch != self._epoch
        self._bounds, self._frozen_layers, self._epoch = bounds, frozen_layers, epoch
        self._passes_ahead = passes_ahead(epoch, self._epochs)
        if is_other:
            self._tried = {}
            self._is_declined = False
            self._measured = []
            self._stopped = ""
        if is_next:
            self._end_pass()
        if is_other or is_next:
            self._keeps_at = kept_border(self._stage, bounds, self._nodes, frozen_layers)
            if len(self._measured) == _TRIALS and (self._is_useless or not pays(self._costs, self._passes_ahead)):
                self._keeps_at = None

    def _end_pass(self) -> None:
        if self._has_kept and self._pass.crossed and not self._pass.read and not self._is_useless:
            self._is_useless = True
            reason = (
                "no minibatch of the last pass over the data was in the cache, although earlier ones were kept: "
                "the data change from pass to pass, or the samples of a minibatch are kept by several nodes"
            )
            if self._mode == "auto":
                self._stopped = reason
            _log.warning(
                "frozen_cache_never_read",
                reason=reason,
                consequence="frozen layers compute in each pass"
                + (", and nothing more is kept" if self._mode == "auto" else ""),
                fix="set freeze.cache: off, or augment the data behind the frozen layers",
            )
        self._has_kept |= self._pass.kept > 0
        self._pass = _Pass()

    @property
    def use(self) -> CacheUse | None:
        """The stage's use of the cache so far; None if it has had no frozen layers."""
        used = self.cache.used
        stopped = self._stopped or self.cache.refused
        return replace(self._use, kept_bytes=used.memory + used.disk, stopped=stopped) if self._bounds else None

    @property
    def is_used(self) -> bool:
        """Whether this stage has frozen layers."""
        return self._frozen_layers > 0 and self._bounds[self._stage] < self._frozen_layers

    @property
    def sends_note(self) -> bool:
        """Whether the next stage has frozen layers."""
        return self._bounds[self._stage + 1] < self._frozen_layers

    def enter(self, tensors: tuple[Tensor | None, ...]) -> AtBorder | None:
        """The minibatch that enters this stage; None: no cache is asked for it, and all layers compute as without one.

        Args:
            tensors: what enters the model, or those of a frame, the last of which is the note, or None for no note.
        """
        values = tuple(tensor for tensor in tensors if tensor is not None)
        arrived: AtBorder | None = None
        if not self._stage:
            arrived = self._entered(values)
        elif tensors[-1] is not None:
            arrived = AtBorder.of(values)
        if arrived is None:
            self._use = replace(self._use, computed=self._use.computed + 1)
        return arrived

    def _entered(self, inputs: Values) -> AtBorder | None:
        """A minibatch that enters the model; None: no cache is asked for it."""
        if not self._is_declined and self._mode == "auto":
            self._is_declined = self.cache.is_declined(self._key)
        if self._is_declined:
            return None
        units = (digests_of_samples(inputs) or ()) if self._of_samples else (digest_of(inputs),)
        return AtBorder(inputs, 0, units)

    @property
    def _key(self) -> str:
        return f"{self._vw}-{self._frozen_layers}-{'-'.join(map(str, self._bounds))}"

    def cross(self, arrived: AtBorder, layers: FrozenLayers) -> Crossed:
        """Read a minibatch, or compute the frozen layers of this stage."""
        upto = min(self._bounds[self._stage + 1], self._frozen_layers)
        read = self._read(arrived)
        found = read or arrived
        self._pass.crossed += 1
        self._pass.read += found.is_read
        if found.border >= upto:
            return Crossed(found, None if read is None else read.border, (upto, upto), kept=False)
        by_sample = self._try(found, layers, upto)
        started = self._clock.monotonic()
        values = layers.run(found.values, found.border, upto)
        taken = layers.seconds_of(found.border, upto, self._clock.monotonic() - started)
        units = () if by_sample is None else found.units
        behind = AtBorder(values, upto, units, found.seconds + taken, found.is_read)
        kept = by_sample is not None and self._keep(behind, by_sample)
        self._use = replace(self._use, computed=self._use.computed + 1)
        return Crossed(behind, None if read is None else read.border, (found.border, upto), kept=kept)

    def _try(self, found: AtBorder, layers: FrozenLayers, upto: int) -> tuple[bool, ...] | None:
        """For each value behind the layers up to `upto`, whether it is by sample; None: nobody can spare them."""
        if not found.units:
            return None
        key = found.border, len(found.units)
        if key not in self._tried:
            by_sample: tuple[bool, ...] | None = ()
            reason = fix = None
            if not layers.is_repeatable(found.values, found.border, upto):
                by_sample = None
                reason = "they draw random numbers or write buffers, also in evaluation mode"
            elif self._of_samples:
                by_sample = layers.rows_of_samples(found.values, found.border, upto, len(found.units))
                reason = "what they compute of a sample depends on the others of its minibatch, or on its place there"
                fix = "have a data.sampler shuffle whole minibatches"
            if by_sample is None:
                self._stopped = f"layers {found.border} to {upto - 1}: {reason}"
                _log.warning(
                    "frozen_layers_not_cached",
                    layers=list(range(found.border, upto)),
                    reason=reason,
                    consequence="they compute in each pass over the data, and so do frozen layers behind them",
                    **({} if fix is None else {"fix": fix}),
                )
            self._tried[key] = by_sample
        return self._tried[key]

    def _read(self, arrived: AtBorder) -> AtBorder | None:
        if not arrived.units:
            return None
        for border in readable_borders(self.cache.borders(), arrived.border, self._frozen_layers):
            values = self._load(border, arrived.units)
            if values is not None:
                num_bytes = sum(value.nbytes for value in values)
                self._use = replace(self._use, reads=self._use.reads + 1, read_bytes=self._use.read_bytes + num_bytes)
                return AtBorder(values, border, arrived.units, is_read=True)
        return None

    def _load(self, border: int, units: tuple[bytes, ...]) -> Values | None:
        return self.cache.read_samples(border, units) if self._of_samples else self.cache.read(border, units[0])

    def _store(self, behind: AtBorder, by_sample: tuple[bool, ...]) -> bool:
        if self._of_samples:
            return self.cache.keep_samples(behind.border, behind.units, behind.values, by_sample)
        return self.cache.keep(behind.border, behind.units[0], behind.values)

    def _keep(self, behind: AtBorder, by_sample: tuple[bool, ...]) -> bool:
        """Keep a minibatch, in place of what spares less of it, if that pays."""
        if self._keeps_at is None:
            return False
        behind = replace(behind, values=tuple(value.detach().cpu().contiguous() for value in behind.values))
        if self._mode == "auto" and len(self._measured) < _TRIALS:
            is_kept = self._keep_trial(behind, by_sample)
        else:
            is_kept = self._store(behind, by_sample)
            if not is_kept and self._of_samples and self._mode == "auto":
                self._keeps_at = None  # few minibatches have none of the samples that are missing
        if is_kept:
            self._pass.kept += 1
            for border in self.cache.borders():
                if border < behind.border:
                    self.cache.drop(border, behind.units)
        return is_kept

    def _keep_trial(self, behind: AtBorder, by_sample: tuple[bool, ...]) -> bool:
        """`auto`: measure the cache with one of the first minibatches, after which none is kept if that does not pay.

        Samples are kept with that: one that is missing would spoil the minibatch that has it in the next pass. A whole
        minibatch is kept under another name until then, as its own may be kept by another virtual worker.
        """
        if not self._passes_ahead or self._is_useless:
            self._keeps_at = None
            self._stopped = self._stopped or "no pass over the data follows"
            return False
        trial = behind if self._of_samples else replace(behind, units=(os.urandom(DIGEST_BYTES),))
        costs = self._costs_of(trial, by_sample)
        if costs is not None:
            self._measured.append(costs)
        if not self._of_samples:
            self.cache.drop(trial.border, trial.units)
        is_last = len(self._measured) == _TRIALS
        if costs is None or (is_last and not self._pays(behind.border)):
            self._keeps_at = None
            # In later passes it pays even less. Stages on other nodes may still find that theirs does.
            if costs is not None and len(set(self._nodes)) == 1:
                self.cache.decline(self._key)
            return self._of_samples and costs is not None
        return self._of_samples or (is_last and self._store(behind, by_sample))

    def _costs_of(self, behind: AtBorder, by_sample: tuple[bool, ...]) -> CacheCosts | None:
        """Keep a minibatch, and read it; None if there is no room for it."""
        started = self._clock.monotonic()
        is_kept = self._store(behind, by_sample)
        kept_at = self._clock.monotonic()
        read = self._load(behind.border, behind.units) if is_kept else None
        if read is None:
            return None
        if not self._of_samples:
            for value in read:  # a mapping alone reads nothing
                value.clone()
        return CacheCosts(behind.seconds, self._clock.monotonic() - kept_at, kept_at - started)

    @property
    def _costs(self) -> CacheCosts:
        """What the first minibatches have cost.

        A computation that others delay looks slow, so the fastest one counts, and the median of what a cache costs.
        """
        return CacheCosts(
            min(each.compute for each in self._measured),
            median(each.read for each in self._measured),
            median(each.keep for each in self._measured),
        )

    def _pays(self, border: int) -> bool:
        """Whether what has been measured pays."""
        costs = self._costs
        found = pays(costs, self._passes_ahead)
        compute, read, keep = (time_text(seconds * 1000) for seconds in (costs.compute, costs.read, costs.keep))
        _log.info(
            "frozen_cache_measured",
            border=border,
            compute=compute,
            read=read,
            keep=keep,
            passes_ahead=self._passes_ahead,
            keeps=found,
        )
        if not found:
            self._stopped = (
                f"it would not pay: a minibatch takes {compute} to compute, {read} to read and {keep} to keep, "
                f"passes over the data ahead: {self._passes_ahead}"
            )
        return found
