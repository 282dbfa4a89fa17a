"""Which pipelines can these devices form? The partitions of one virtual worker that searches over allocations consider.

With N ≥ K (and no `flush`) the rate of a pipeline is 1 over its largest stage time, so the min-max partition is the
fastest. With fewer minibatches in flight, and under `flush`, the sum of all stage times counts too; and where a network
card holds the job back, so do the bytes that cross. So:

* up to `LISTED` ways to cut and order, all of them are considered: exact, whatever the objective;
* beyond, the min-max partition alone: the fastest with N ≥ K; with less the fastest is at most K/N times as fast,
  under `flush` at most 1 + (K − 1)/N times.

What is considered depends on the virtual worker's devices only, never on the rest of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile

from hetpipe.decide.planner.costs import Costs, MemoryModel
from hetpipe.decide.planner.every_partition import Pipeline, every_partition, num_partitions, pipeline
from hetpipe.decide.planner.partitioner import Partitioner, StageCut
from hetpipe.decide.planner.reach_tables import Recompute
from hetpipe.decide.planner.shapes import Shape, Shapes
from hetpipe.values.ids import DeviceId

#: Most partitions that are looked at one by one.
LISTED = 1_000

#: Virtual workers whose fastest pipeline is kept by name: some N of a large cluster.
_REMEMBERED = 8_192


@dataclass(frozen=True, slots=True)
class _Known:
    """The pipelines of one shape for one N, in the names of the devices that were asked about first."""

    devices: tuple[DeviceId, ...]
    pipelines: tuple[Pipeline, ...]

    def of(self, devices: tuple[DeviceId, ...]) -> tuple[Pipeline, ...]:
        """The same on the devices of another virtual worker of this shape."""
        if devices == self.devices:
            return self.pipelines
        names = dict(zip(self.devices, devices, strict=True))
        return tuple(
            replace(found, stages=tuple(replace(stage, device=names[stage.device]) for stage in found.stages))
            for found in self.pipelines
        )


class Pipelines:
    """Finds pipelines and remembers them by shape."""

    def __init__(
        self, costs: Costs, memory_at: Callable[[int], MemoryModel], recompute: Recompute, partitioner: Partitioner
    ) -> None:
        """Prepare.

        Args:
            costs: the profile on the cluster.
            memory_at: N → what stages keep.
            recompute: whether stages may recompute.
            partitioner: finds min-max partitions, with the same `recompute`.
        """
        self._costs = costs
        self._memory_at = memory_at
        self._recompute: Recompute = recompute
        self._partitioner = partitioner
        self._shapes = Shapes(costs.cluster)
        self._min_max: dict[tuple[Shape, int], _Known] = {}
        self._listed: dict[tuple[Shape, int], _Known] = {}
        self._num: dict[Shape, int] = {}
        #: Every placement asks for the same devices again.
        self._fastest_of = lru_cache(maxsize=_REMEMBERED)(self._fastest)

    def min_max(self, devices: Sequence[DeviceId], minibatches_per_wave: int) -> Pipeline | None:
        """The partition with the smallest largest stage time over all cuts and orders; None if none fits in memory."""
        known, ordered = self._know_min_max(devices, minibatches_per_wave)
        return next(iter(known.of(ordered)), None)

    def fastest(self, devices: Sequence[DeviceId], minibatches_per_wave: int) -> Pipeline | None:
        """The first of `several`."""
        return self._fastest_of(tuple(devices), minibatches_per_wave)

    def rate(self, devices: Sequence[DeviceId], minibatches_per_wave: int) -> float:
        """Minibatches per tick of the fastest; 0 if none fits in memory."""
        known, _ = self._know_fastest(devices, minibatches_per_wave)
        return known.pipelines[0].minibatches_per_tick if known.pipelines else 0.0

    def min_max_rate(self, devices: Sequence[DeviceId], minibatches_per_wave: int) -> float:
        """Minibatches per tick of the min-max partition: at most those of the fastest, and quicker to find."""
        known, _ = self._know_min_max(devices, minibatches_per_wave)
        return known.pipelines[0].minibatches_per_tick if known.pipelines else 0.0

    def several(self, devices: Sequence[DeviceId], minibatches_per_wave: int) -> tuple[Pipeline, ...]:
        """All considered pipelines, fastest first; of equals the one with the smallest largest stage time first."""
        known, ordered = self._know_several(devices, minibatches_per_wave)
        return known.of(ordered)

    def shortest(self, devices: Sequence[DeviceId], minibatches_per_wave: int, rate: float) -> Pipeline:
        """Of `several` with at least `rate` minibatches per tick the first one with the smallest largest stage time.

        Args:
            devices: of a virtual worker that fits in memory.
            minibatches_per_wave: N.
            rate: at most that of the fastest.
        """
        known, ordered = self._know_fastest(devices, minibatches_per_wave)
        enough = takewhile(lambda one: one.minibatches_per_tick >= rate, known.pipelines)
        best = min(enough, key=lambda one: one.bottleneck_ticks)
        return replace(known, pipelines=(best,)).of(ordered)[0]

    def num_several(self, devices: Sequence[DeviceId]) -> int:
        """How many `several` returns at most."""
        return self._num_several(self._shapes.shape_of(devices)[0])

    def fits(self, devices: Sequence[DeviceId], minibatches_per_wave: int) -> bool:
        """Is there any?"""
        return self._partitioner.fits(devices, self._memory_at(minibatches_per_wave))

    def _fastest(self, devices: tuple[DeviceId, ...], minibatches_per_wave: int) -> Pipeline | None:
        known, ordered = self._know_fastest(devices, minibatches_per_wave)
        return next(iter(replace(known, pipelines=known.pipelines[:1]).of(ordered)), None)

    def _know_fastest(
        self, devices: Sequence[DeviceId], minibatches_per_wave: int
    ) -> tuple[_Known, tuple[DeviceId, ...]]:
        full = minibatches_per_wave >= len(devices) and not self._memory_at(minibatches_per_wave).policy.drains
        return (self._know_min_max if full else self._know_several)(devices, minibatches_per_wave)

    def _know_min_max(
        self, devices: Sequence[DeviceId], minibatches_per_wave: int
    ) -> tuple[_Known, tuple[DeviceId, ...]]:
        shape, ordered = self._shapes.shape_of(devices)
        known = self._min_max.get((shape, minibatches_per_wave))
        if known is None:
            known = self._min_max[shape, minibatches_per_wave] = self._find(ordered, minibatches_per_wave)
        return known, ordered

    def _find(self, devices: tuple[DeviceId, ...], minibatches_per_wave: int) -> _Known:
        """A larger N leaves less memory, so the partition for N = 1 is the best for every N with which it fits."""
        memory = self._memory_at(minibatches_per_wave)
        if minibatches_per_wave > 1:
            least, _ = self._know_min_max(devices, 1)
            if not least.pipelines:
                return least
            again = self._with(least.pipelines[0].stages, memory)
            if again is not None:
                return _Known(least.devices, (again,))
        found = self._partitioner.find(devices, memory)
        return _Known(devices, (pipeline(found.stages, memory),) if found is not None else ())

    def _with(self, stages: Sequence[StageCut], memory: MemoryModel) -> Pipeline | None:
        """The same cuts with another N; None if they do not fit."""
        found = []
        for index, stage in enumerate(stages):
            num_bytes = self._costs.stage_bytes(
                stage.first,
                stage.last,
                stage=index,
                num_stages=len(stages),
                memory=memory,
                recompute=stage.recompute,
            )
            if num_bytes > self._costs.memory_bytes[stage.kind]:
                return None
            found.append(replace(stage, memory_bytes=num_bytes))
        return pipeline(found, memory)

    def _know_several(
        self, devices: Sequence[DeviceId], minibatches_per_wave: int
    ) -> tuple[_Known, tuple[DeviceId, ...]]:
        shape, ordered = self._shapes.shape_of(devices)
        if self._num_several(shape) == 1:
            return self._know_min_max(devices, minibatches_per_wave)
        known = self._listed.get((shape, minibatches_per_wave))
        if known is None:
            memory = self._memory_at(minibatches_per_wave)
            found = every_partition(self._costs, ordered, memory, self._recompute)
            in_order = sorted(found, key=lambda one: (-one.minibatches_per_tick, one.bottleneck_ticks))
            known = self._listed[shape, minibatches_per_wave] = _Known(ordered, tuple(in_order))
        return known, ordered

    def _num_several(self, shape: Shape) -> int:
        if shape not in self._num:
            count = num_partitions(shape, self._costs.num_layers)
            self._num[shape] = count if count <= LISTED else 1
        return self._num[shape]
