"""The weights of one virtual worker between two barriers, in the reference executor: two ways to do the arithmetic.

Both give the weights of a clock W* plus own updates through some minibatch, and both have a target that an optimizer
steps in place. *Anchored* is for weights that live in shards (`wsp.md` §3), *direct* for weights that live in stages
alone. Without rounding errors they would be one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from hetpipe.values.ids import Clock
from tests.reference.policies import Version
from tests.reference.values import ReferenceState, Tensors


def added(left: Tensors, right: Tensors) -> Tensors:
    """`left` + `right`, for the names of `left`."""
    return {name: tensor + right[name] for name, tensor in left.items()}


def _copied(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class LocalWeights(Protocol):
    """The question. `keep` follows each update, `close_wave` each wave.

    Attributes:
        target: parameter name → what the optimizer steps in place.
    """

    target: Mapping[str, Tensor]

    def at(self, version: Version, published: Mapping[Clock, Tensors]) -> Tensors:
        """The weights of `version`, without its prediction; w^(W*) is in `published`."""
        ...

    def keep(self, through: int) -> None:
        """Remember the weights through minibatch `through`, whose update was just made."""
        ...

    def close_wave(self, wave: int) -> Tensors | None:
        """End wave `wave`, short ones too; returns what the virtual worker has to tell the others about it."""
        ...

    def forget(self, oldest: Version) -> None:
        """Nothing older than `oldest` will be asked for, in clocks and in own updates."""
        ...


class AnchoredWeights:
    """w = B + ρ_v, where B = ((w^(W*) + ũ_{W*}) + …) over own complete waves up to v; B alone where v ends a wave."""

    def __init__(self, state: ReferenceState, minibatches_per_wave: int) -> None:
        """Start with ρ = 0."""
        self.target: Mapping[str, Tensor] = {name: torch.zeros_like(w) for name, w in state.weights.items()}
        self._n = minibatches_per_wave
        self._stepped = False
        #: q → ρ as it stood after minibatch q, for v inside a wave.
        self._sums: dict[int, Tensors] = {}
        #: c → ũ of its own complete wave c.
        self._waves: dict[int, Tensors] = {}

    def at(self, version: Version, published: Mapping[Clock, Tensors]) -> Tensors:
        """See `LocalWeights`."""
        weights = published[version.clock]
        for wave in range(version.clock, version.through // self._n):
            weights = added(weights, self._waves[wave])
        return added(weights, self._sums[version.through]) if version.through % self._n else weights

    def keep(self, through: int) -> None:
        """See `LocalWeights`."""
        self._stepped = True
        self._sums[through] = _copied(self.target)

    def close_wave(self, wave: int) -> Tensors | None:
        """ũ = ρ, or None if the wave made no update; then ρ ← 0."""
        if not self._stepped:
            return None
        self._waves[wave] = _copied(self.target)
        for running in self.target.values():
            running.zero_()
        self._stepped = False
        return self._waves[wave]

    def forget(self, oldest: Version) -> None:
        """See `LocalWeights`."""
        self._sums = {q: running for q, running in self._sums.items() if q >= oldest.through}
        self._waves = {wave: update for wave, update in self._waves.items() if wave >= oldest.clock}


class DirectWeights:
    """The newest weights are the target; older ones are copies."""

    def __init__(self, state: ReferenceState, minibatches_per_wave: int) -> None:
        """Start with the weights of `state`."""
        self.target: Mapping[str, Tensor] = _copied(state.weights)
        #: q → the weights as they stood after minibatch q.
        self._versions: dict[int, Tensors] = {state.clock * minibatches_per_wave: state.weights}

    def at(self, version: Version, published: Mapping[Clock, Tensors]) -> Tensors:
        """See `LocalWeights`."""
        return self._versions[version.through]

    def keep(self, through: int) -> None:
        """See `LocalWeights`."""
        self._versions[through] = _copied(self.target)

    def close_wave(self, wave: int) -> Tensors:
        """The newest weights."""
        return _copied(self.target)

    def forget(self, oldest: Version) -> None:
        """See `LocalWeights`."""
        self._versions = {q: weights for q, weights in self._versions.items() if q >= oldest.through}
