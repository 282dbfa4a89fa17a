"""Memory policies of layers, and what a stage costs under them; `memory-policy.md` §1 and §2. Pure.

Between the forward and the backward of a minibatch a layer keeps the tensors that its backward needs, moves them to
host memory (`swap`), or drops and recomputes them. Consecutive recomputed layers form a *run*: only the run's input is
kept. Times are whole ticks and bytes integers, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from operator import itemgetter
from typing import Literal

from hetpipe.errors import PlanError
from hetpipe.values.suggest import join_names

LayerPolicy = Literal["keep", "recompute", "recompute-new-run", "swap"]

#: `memory` of a job: one policy for all layers, patterns of their names in order, or `auto`: chosen with the plan.
MemoryChoice = LayerPolicy | Literal["auto"] | Mapping[str, LayerPolicy]

#: Minibatches whose swapped tensors are on the device at once: the one at hand, and the one that is being moved.
RESIDENT = 2

#: Layers named by the refusal of a pattern.
_MOST_NAMED = 40

_TICKS_PER_SECOND = 10**12


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """One layer of a stage, for one minibatch."""

    forward_ticks: int
    backward_ticks: int
    activation_bytes: int
    """a: kept from forward to backward under `keep`; a tensor that two layers save counts at the first of them."""
    input_bytes: int
    """in: what enters the layer."""


@dataclass(frozen=True, slots=True)
class StageFigures:
    """A stage, without the policies of its layers."""

    layers: tuple[LayerFigures, ...]
    in_flight: int
    """S: minibatches between forward and backward, at most."""
    receives: bool
    """Whether a stage precedes it, whose output it keeps as its own input."""
    fixed_bytes: int = 0
    """Parameters times their copies, and the reserve."""
    receive_ticks: int = 0
    """Transfers from neighbouring stages that count towards this one."""
    host_bytes_per_second: int | None = None
    """P: speed of the link to host memory; None: unknown, its time does not count and no choice swaps."""

    @property
    def resident(self) -> int:
        """Minibatches whose swapped tensors are on the device at once, at most."""
        return min(self.in_flight, RESIDENT)

    @property
    def num_held(self) -> int:
        """Minibatches of which a layer that is not recomputed is on the device, at least."""
        return self.in_flight if self.host_bytes_per_second is None else self.resident

    @property
    def compute_ticks(self) -> int:
        """Forward and backward, without recomputation."""
        return sum(layer.forward_ticks + layer.backward_ticks for layer in self.layers)

    def swap_ticks(self, swapped_bytes: int) -> int:
        """Time to move `swapped_bytes` to host memory and back, rounded up."""
        if self.host_bytes_per_second is None:
            return 0
        return -(-2 * swapped_bytes * _TICKS_PER_SECOND // self.host_bytes_per_second)

    def ticks(self, computed_ticks: int, swapped_bytes: int) -> int:
        """Time per minibatch: swaps overlap with all that is computed, and only what exceeds it counts."""
        return max(computed_ticks, self.swap_ticks(swapped_bytes)) + self.receive_ticks


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Cost of a stage under the policies of its layers."""

    num_bytes: int
    """Peak memory of the device."""
    ticks: int
    """Time per minibatch."""
    swapped_bytes: int
    """Moved to host memory, and back, per minibatch."""
    recomputed_ticks: int
    """Second forwards, per minibatch."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of preference among policies that fit: time, then swapped bytes, then recomputed time."""
        return self.ticks, self.swapped_bytes, self.recomputed_ticks


def runs_of(policies: Sequence[LayerPolicy]) -> Iterator[tuple[int, int]]:
    """Recomputed runs [first, last) in order.

    >>> list(runs_of(["recompute", "recompute", "keep", "recompute", "recompute-new-run"]))
    [(0, 2), (3, 4), (4, 5)]
    """
    first: int | None = None
    for index, policy in enumerate((*policies, None)):
        if first is not None and policy != "recompute":
            yield first, index
            first = None
        if first is None and policy in ("recompute", "recompute-new-run"):
            first = index


def stage_memory(stage: StageFigures, policies: Sequence[LayerPolicy]) -> StageMemory:
    """Cost of `stage` under one policy per layer.

    A tensor that crosses a layer boundary counts at the layer before it. If that layer is recomputed, it counts at the
    layer behind it: as the input of a run, or of a layer that keeps or swaps it. While a run is recomputed, the layers
    behind it no longer hold what its minibatch had there.
    """
    kept = stage.layers[0].input_bytes if stage.receives and _is_held(policies[0]) else 0
    swapped = run = excess = computed = recomputed = 0
    was_held = True
    for layer, policy in zip(stage.layers, policies, strict=True):
        computed += layer.forward_ticks + layer.backward_ticks
        held = layer.activation_bytes if was_held else layer.activation_bytes + layer.input_bytes
        if policy == "keep":
            kept += held
            excess -= held
            was_held = True
        elif policy == "swap":
            swapped += held
            excess -= held
            was_held = True
        else:
            if was_held or policy == "recompute-new-run":
                kept += layer.input_bytes
                excess -= layer.input_bytes
                run = 0
            run += layer.activation_bytes
            if run > excess:  # noqa: PLR1730 - `max` takes longer, and this is the inner loop of searches
                excess = run
            recomputed += layer.forward_ticks
            was_held = False
    num_bytes = stage.fixed_bytes + stage.in_flight * kept + stage.resident * swapped + max(0, excess)
    return StageMemory(num_bytes, stage.ticks(computed + recomputed, swapped), swapped, recomputed)


def canonical(policies: Sequence[LayerPolicy]) -> tuple[LayerPolicy, ...]:
    """The same policies with `recompute-new-run` only where it follows a recomputed layer.

    >>> canonical(["recompute-new-run", "recompute-new-run", "swap"])
    ('recompute', 'recompute-new-run', 'swap')
    """
    befores: Sequence[LayerPolicy] = ("keep", *policies)
    return tuple(
        "recompute" if policy == "recompute-new-run" and _is_held(before) else policy
        for before, policy in zip(befores, policies, strict=False)
    )


def policies_of(memory: MemoryChoice, names: Sequence[str]) -> tuple[LayerPolicy, ...]:
    """The policy of each layer of a model by its name: that of the first pattern that matches, else `keep`.

    Under `auto` this is `keep`, where no plan has chosen others.

    >>> policies_of({"h.1": "keep", "h.*": "recompute"}, ["wte", "h.0", "h.1"])
    ('keep', 'recompute', 'keep')
    """
    if memory == "auto":
        return tuple("keep" for _ in names)
    if isinstance(memory, str):
        return tuple(memory for _ in names)
    patterns = memory.items()
    return tuple(next((policy for each, policy in patterns if fnmatchcase(name, each)), "keep") for name in names)


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Another policy of some layers of a virtual worker from a moment on, decided before the run (§5)."""

    layers: tuple[int | str, ...]
    """Indices, names, or patterns of names."""
    policy: LayerPolicy
    clock: int | None = None
    """The barrier from which on it is in effect; None: no barrier."""
    minibatch: int | None = None
    """The first of a wave, from which on it is in effect; None: a barrier."""

    def is_due(self, p: int, wave: int) -> bool:
        """Whether it is in effect for minibatch `p`, of this wave."""
        return (self.clock is not None and self.clock <= wave) or (self.minibatch is not None and self.minibatch <= p)


def concerns(layer: int | str, index: int, name: str) -> bool:
    """Whether an entry of `MemoryChange.layers` means the layer with this index and name."""
    return layer == index if isinstance(layer, int) else fnmatchcase(name, layer)


def changed_policies(
    policies: Sequence[LayerPolicy],
    layers: Sequence[tuple[int, str]],
    changes: Sequence[MemoryChange],
    *,
    p: int,
    wave: int,
) -> tuple[LayerPolicy, ...]:
    """The policies of a stage's layers for minibatch `p`: those of the newest change about each, else `policies`.

    Args:
        policies: without changes.
        layers: (index, name) of each.
        changes: in order of time.
        p: the minibatch.
        wave: its wave.

    >>> changes = [MemoryChange((0,), "swap", clock=1), MemoryChange(("h.*",), "recompute", minibatch=9)]
    >>> layers = [(0, "h.0"), (1, "h.1"), (2, "head")]
    >>> [changed_policies(["keep"] * 3, layers, changes, p=p, wave=(p - 1) // 4) for p in (5, 9)]
    [('swap', 'keep', 'keep'), ('recompute', 'recompute', 'keep')]
    """
    due = [change for change in changes if change.is_due(p, wave)]
    return tuple(
        next(
            (change.policy for change in reversed(due) if any(concerns(layer, index, name) for layer in change.layers)),
            policy,
        )
        for policy, (index, name) in zip(policies, layers, strict=True)
    )


def policies_text(policies: Sequence[LayerPolicy], first: int = 0) -> str:
    """The policies of layers `first`, `first` + 1, … for people; empty if all are kept.

    >>> policies_text(["swap", "swap", "keep", "recompute", "recompute-new-run"], 3)
    'layers 3–4 swap, 5 keep, 6 recompute, 7 recompute-new-run'
    >>> policies_text(["recompute"])
    'layer 0 recompute'
    >>> policies_text(["keep", "keep"])
    ''
    """
    if set(policies) <= {"keep"}:
        return ""
    groups = [
        (policy, [index for index, _ in each]) for policy, each in groupby(enumerate(policies, first), itemgetter(1))
    ]
    spans = (f"{each[0]}–{each[-1]}" if len(each) > 1 else f"{each[0]}" for _, each in groups)
    return ("layers " if len(policies) > 1 else "layer ") + ", ".join(
        f"{span} {policy}" for span, (policy, _) in zip(spans, groups, strict=True)
    )


def check_patterns(memory: MemoryChoice, names: Sequence[str]) -> None:
    """Check that each pattern matches a layer.

    Raises:
        PlanError: one matches none, or only those of earlier patterns.
    """
    if isinstance(memory, str):
        return
    left = list(dict.fromkeys(names))
    for pattern in memory:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            more = f", and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
            layers = ", ".join(left[:_MOST_NAMED]) if more else join_names(left, "and")
            raise PlanError(f"memory: `{pattern}` matches no layer; those without a policy are {layers}{more}")
        if not set(matching) & set(left):
            raise PlanError(
                f"memory: `{pattern}` only matches layers that patterns before it match "
                f"({join_names(list(dict.fromkeys(matching)), 'and')}), and the first one decides; put it first, or "
                "remove it"
            )
        left = [name for name in left if name not in matching]


def _is_held(policy: str) -> bool:
    return policy in ("keep", "swap")
