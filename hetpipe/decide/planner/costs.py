"""Costs of a stage: time, memory, bytes over the network. Definitions shared by all searches and the simulator.

Times are whole *ticks* (picoseconds), bytes integers: sums are exact in any order, so two searches that find the same
optimum find the same number. Floats are used for display only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from hetpipe.decide.planner.frozen_profile import frozen_profile
from hetpipe.decide.schedule.in_flight import bound_of
from hetpipe.values.cluster import Cluster, LinkSpec
from hetpipe.values.memory import LayerFigures, LayerPolicy, StageFigures, stage_memory
from hetpipe.values.policies import POLICIES, PerStage, Policy, Schedule, WeightPolicy
from hetpipe.values.profile import Profile

TICKS_PER_MS = 10**9

#: Rate at which a shard adds updates, in bytes per second: three passes over memory by one core.
APPLY_BYTES_PER_SECOND = 4e9


def ticks(milliseconds: float) -> int:
    """Milliseconds, rounded to whole ticks."""
    return round(milliseconds * TICKS_PER_MS)


def milliseconds(num_ticks: int) -> float:
    """Ticks in milliseconds, for display."""
    return num_ticks / TICKS_PER_MS


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Memory of a stage besides activations: the parameters that do not depend on the cut."""

    weights: WeightPolicy = "wave"
    minibatches_per_wave: int = 1
    optimizer_slots: int = 0
    """Tensors of parameter size that the optimizer keeps per parameter."""
    reserve_bytes: int = 0
    """Memory used by the framework itself on every device."""
    with_shards: bool = True
    schedule: Schedule = "1f1b"
    """A schedule that the policy supports."""
    accumulate: int = 1
    """Minibatches per update; under `flush` and `double_buffer` it is always N."""
    waits_for_norm: bool = False
    """Whether gradients are clipped by their norm over all stages (`clip: global`)."""

    policy: Policy = field(init=False, repr=False, compare=False)
    """The row of `weights`."""
    _bound: PerStage = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Cache the policy, which is used for every stage of every cut."""
        object.__setattr__(self, "policy", POLICIES[self.weights])
        object.__setattr__(self, "_bound", bound_of(self.weights, self.schedule))

    def copies(self, stage: int, num_stages: int) -> int:
        """Parameter-sized tensors at a stage: weight buffers, 2 for the shards, gradients, optimizer slots."""
        buffers = self.policy.weight_buffers(stage, num_stages, self.minibatches_per_wave)
        shards = 2 if self.with_shards else 0
        return buffers + shards + self.gradients + self.held_for_norm(stage, num_stages) + self.optimizer_slots

    @property
    def gradients(self) -> int:
        """Parameter-sized gradient buffers: 1, or 2 if the average over several minibatches is accumulated."""
        averaged = self.policy.minibatches_per_update(self.minibatches_per_wave, self.accumulate)
        return 1 if averaged == 1 else 2

    def held_for_norm(self, stage: int, num_stages: int) -> int:
        """Parameter-sized tensors that wait for norms over all stages, beyond those needed without clipping.

        A waiting gradient needs no memory of its own: the update made from it is one of the weight buffers. But `wave`
        and `vertical` decay the weights that a minibatch used, so these are kept as well: for every minibatch whose
        backward is done at this stage but not yet at the first, which sends the norm. When the pipeline drains, these
        are all minibatches that were in flight there; one gradient of them is counted already.

        >>> MemoryModel(weights="vertical", minibatches_per_wave=8, waits_for_norm=True).held_for_norm(1, 4)
        3
        """
        if not self.waits_for_norm or stage == 0 or self.policy.decay != "used":
            return 0
        return self.in_flight(0, num_stages) - 1

    def in_flight(self, stage: int, num_stages: int) -> int:
        """Limit on the minibatches in flight (S_i)."""
        return self._bound(stage, num_stages, self.minibatches_per_wave)


@dataclass(frozen=True, slots=True)
class StagePlace:
    """A stage of a pipeline before its layers are chosen: what each of them would cost there."""

    layers: tuple[LayerFigures, ...]
    """All layers of the model, on the device of this stage."""
    weight_bytes: Sequence[int]
    """All copies of the parameters of the layers before each cut."""
    in_flight: int
    """S_i."""
    receives: bool
    """Whether a stage precedes it."""
    memory_bytes: int
    """Memory of its device."""
    reserve_bytes: int
    """What the framework takes of it."""
    host_bytes_per_second: int | None
    """Speed of the link to host memory; None: unknown."""
    arriving_ticks: Sequence[int]
    """Transfer of activations at each cut, from the stage before."""
    returning_ticks: Sequence[int]
    """Transfer of gradients at each cut, from the stage behind."""

    def bytes_of_weights(self, first: int, last: int) -> int:
        """All copies of the parameters of layers [first, last)."""
        return self.weight_bytes[last] - self.weight_bytes[first]

    def figures(self, first: int, last: int) -> StageFigures:
        """The stage with layers [first, last)."""
        return StageFigures(
            self.layers[first:last],
            in_flight=self.in_flight,
            receives=self.receives,
            fixed_bytes=self.bytes_of_weights(first, last) + self.reserve_bytes,
            receive_ticks=self.arriving_ticks[first] + self.returning_ticks[last],
            host_bytes_per_second=self.host_bytes_per_second,
        )


class MemorySpan(Protocol):
    """Consecutive layers [first, last) on a device of a known type, with their memory policies."""

    @property
    def kind(self) -> str: ...  # noqa: D102

    @property
    def first(self) -> int: ...  # noqa: D102

    @property
    def last(self) -> int: ...  # noqa: D102

    @property
    def recompute(self) -> bool: ...  # noqa: D102

    @property
    def memory(self) -> tuple[LayerPolicy, ...]: ...  # noqa: D102

    @property
    def policy_ticks(self) -> int: ...  # noqa: D102


class Costs:
    """A profile on the links of a cluster, prepared for fast sums over consecutive layers [first, last)."""

    def __init__(self, profile: Profile, cluster: Cluster, frozen_layers: int = 0) -> None:
        """Compute prefix sums.

        Args:
            profile: the layers, as if all were trained.
            cluster: the links; its device types must have times in the profile.
            frozen_layers: the first so many layers are frozen.
        """
        #: As given, for what does not depend on how many layers are frozen.
        self.original = profile
        self.frozen_layers = frozen_layers
        self.profile = profile = frozen_profile(profile, frozen_layers)
        self.cluster = cluster
        self.num_layers = len(profile.layers)
        layers = profile.layers
        #: type → Σ ticks of the layers before each cut, num_layers + 1 entries: forward, and forward + backward.
        self.forward = {t: _sums([ticks(x.forward_ms[t]) for x in layers]) for t in profile.device_types}
        self.compute = {
            t: _sums([ticks(x.forward_ms[t]) + ticks(x.backward_ms[t]) for x in layers]) for t in profile.device_types
        }
        self.parameter_bytes = _sums([layer.parameter_bytes for layer in layers])
        #: Σ bytes of the frozen parameters of the layers before each cut, of which a stage has one copy.
        self.constant_bytes = _sums(
            [
                each.parameter_bytes - layer.parameter_bytes
                for each, layer in zip(self.original.layers, layers, strict=True)
            ]
        )
        self.activation_bytes = _sums([layer.activation_bytes for layer in layers])
        #: Bytes entering the layer after each cut: the model's input, then each layer's output.
        self.cut_bytes = [profile.input_bytes, *(layer.output_bytes for layer in layers)]
        #: Bytes of the input that a stage keeps which begins there and recomputes: that of its first trained layer.
        self.kept_input_bytes = [self.cut_bytes[max(cut, frozen_layers)] for cut in range(self.num_layers + 1)]
        #: Bytes returning there: gradients of the values that need one. None for the model's input.
        self.returning_bytes = [0, *(layer.backward_bytes for layer in layers)]
        #: Cuts at which no stage may end, with the reason.
        self.forbidden = {cut: layer.no_cut for cut, layer in enumerate(layers, 1) if layer.no_cut}
        #: Allowed cuts between stages, ascending.
        self.allowed = tuple(cut for cut in range(1, self.num_layers) if cut not in self.forbidden)
        self._transfers: dict[LinkSpec, tuple[list[int], list[int]]] = {}
        self._figures: dict[str, tuple[LayerFigures, ...]] = {}

    def weight_bytes(self, copies: int) -> list[int]:
        """Bytes of `copies` of each parameter of the layers before each cut; a frozen one has a single copy."""
        return [
            copies * parameters + constants
            for parameters, constants in zip(self.parameter_bytes, self.constant_bytes, strict=True)
        ]

    @property
    def max_stages(self) -> int:
        """Maximum number of stages of a virtual worker."""
        return len(self.allowed) + 1

    def arriving(self, link: LinkSpec) -> list[int]:
        """Ticks of the forward transfer at each cut over `link`; entry 0 is not a transfer between stages."""
        return self._both(link)[0]

    def returning(self, link: LinkSpec) -> list[int]:
        """Ticks of the backward transfer at each cut over `link`."""
        return self._both(link)[1]

    def _both(self, link: LinkSpec) -> tuple[list[int], list[int]]:
        found = self._transfers.get(link)
        if found is None:
            found = self._transfers[link] = (
                [ticks(link.transfer_ms(num_bytes)) for num_bytes in self.cut_bytes],
                [ticks(link.transfer_ms(num_bytes)) for num_bytes in self.returning_bytes],
            )
        return found

    def compute_ticks(self, kind: str, first: int, last: int, *, recompute: bool = False) -> int:
        """Forward and backward of layers [first, last) on type `kind`; with `recompute`, a second forward."""
        both = self.compute[kind]
        total = both[last] - both[first]
        if recompute:
            total += self.forward[kind][last] - self.forward[kind][first]
        return total

    def computed_ticks(self, stage: MemorySpan) -> int:
        """Forward and backward of a stage, with what its memory policies add."""
        return self.compute_ticks(stage.kind, stage.first, stage.last, recompute=stage.recompute) + stage.policy_ticks

    def receive_ticks(self, first: int, last: int, before: LinkSpec | None, behind: LinkSpec | None) -> int:
        """Transfers that count towards a stage: activations over `before`, gradients back over `behind`.

        `before` is None on the first stage and `behind` None on the last.
        """
        arriving = self.arriving(before)[first] if before is not None else 0
        returning = self.returning(behind)[last] if behind is not None else 0
        return arriving + returning

    def stage_bytes(
        self, first: int, last: int, *, stage: int, num_stages: int, memory: MemoryModel, recompute: bool = False
    ) -> int:
        """Memory of stage `stage` of `num_stages`, in bytes."""
        parameters = self.parameter_bytes[last] - self.parameter_bytes[first]
        constants = self.constant_bytes[last] - self.constant_bytes[first]
        activations = self.activation_bytes[last] - self.activation_bytes[first]
        num_in_flight = memory.in_flight(stage, num_stages)
        kept = num_in_flight * self.kept_input_bytes[first] + activations if recompute else num_in_flight * activations
        return parameters * memory.copies(stage, num_stages) + constants + kept + memory.reserve_bytes

    def bytes_of(self, stage: MemorySpan, place: tuple[int, int], memory: MemoryModel) -> int:
        """Memory of a stage under its own policies, in bytes; `place`: its index, and the number of stages."""
        if stage.memory:
            figures = self.place(stage.kind, place, memory).figures(stage.first, stage.last)
            return stage_memory(figures, stage.memory).num_bytes
        return self.stage_bytes(
            stage.first, stage.last, stage=place[0], num_stages=place[1], memory=memory, recompute=stage.recompute
        )

    def place(
        self,
        kind: str,
        place: tuple[int, int],
        memory: MemoryModel,
        *,
        links: tuple[LinkSpec | None, LinkSpec | None] = (None, None),
        host_bytes_per_second: float | None = None,
    ) -> StagePlace:
        """A stage for which layers and their memory policies are chosen.

        Args:
            kind: type of its device.
            place: its index, and the number of stages.
            memory: what it has besides activations.
            links: from the stage before and to the stage behind, for the time of transfers; None: it does not count.
            host_bytes_per_second: speed of the link to host memory; None: unknown.
        """
        stage, num_stages = place
        if kind not in self._figures:
            self._figures[kind] = tuple(
                LayerFigures(
                    ticks(layer.forward_ms[kind]),
                    ticks(layer.backward_ms[kind]),
                    layer.activation_bytes,
                    entering if index >= self.frozen_layers else 0,
                )
                for index, (layer, entering) in enumerate(zip(self.profile.layers, self.cut_bytes, strict=False))
            )
        before, behind = links
        zero = [0] * (self.num_layers + 1)
        return StagePlace(
            self._figures[kind],
            self.weight_bytes(memory.copies(stage, num_stages)),
            in_flight=memory.in_flight(stage, num_stages),
            receives=stage > 0,
            memory_bytes=self.memory_bytes[kind],
            reserve_bytes=memory.reserve_bytes,
            host_bytes_per_second=None if host_bytes_per_second is None else max(1, int(host_bytes_per_second)),
            arriving_ticks=zero if before is None else self.arriving(before),
            returning_ticks=zero if behind is None else self.returning(behind),
        )

    @cached_property
    def memory_bytes(self) -> dict[str, int]:
        """Device type → memory in bytes."""
        return {name: kind.memory_bytes for name, kind in self.cluster.device_types.items()}


def minibatches_per_tick(stage_ticks: Sequence[int], memory: MemoryModel) -> float:
    """Closed-form rate of one virtual worker.

    min over i of min(1 / t_i, S_i / Σ_{j ≥ i} t_j); under `flush` N / (Σ t_j + (N − 1)·max t_j).

    Args:
        stage_ticks: t_i, first stage first.
        memory: the policy, its schedule and N.
    """
    if max(stage_ticks) == 0:
        return float("inf")
    if memory.policy.drains:
        n = memory.minibatches_per_wave
        return n / (sum(stage_ticks) + (n - 1) * max(stage_ticks))
    num_stages = len(stage_ticks)
    rates = []
    behind = 0
    for stage in range(num_stages - 1, -1, -1):
        behind += stage_ticks[stage]
        if behind:
            rates.append(memory.in_flight(stage, num_stages) / behind)
    return min(*rates, 1 / max(stage_ticks))


def _sums(values: Sequence[int]) -> list[int]:
    return [0, *accumulate(values)]
