"""Where a shard holds what a request names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hetpipe.errors import SliceMismatch
from hetpipe.values.plan import SlicePlan
from hetpipe.values.requests import SliceHeader


@dataclass(frozen=True)
class SliceIndex:
    """The slices of one shard of one job, by name and bounds."""

    slices: tuple[SlicePlan, ...]

    @cached_property
    def _index(self) -> dict[tuple[str, int, int], int]:
        return {(s.parameter.name, s.start, s.stop): i for i, s in enumerate(self.slices)}

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(s.parameter.name for s in self.slices)

    def of(self, headers: tuple[SliceHeader, ...]) -> tuple[int, ...]:
        """The positions of the named slices in this shard.

        Raises:
            SliceMismatch: unknown name, other bounds or dtype, or a slice named twice.
        """
        found: list[int] = []
        for header in headers:
            index = self._index.get((header.parameter, header.start, header.stop))
            if index is None:
                known = "with other bounds" if header.parameter in self._names else "not at all"
                raise SliceMismatch(
                    f"slice {header.parameter!r:.200} [{header.start}, {header.stop}): this shard holds it {known}"
                )
            wanted = self.slices[index].parameter.dtype
            if header.dtype != wanted:
                raise SliceMismatch(f"slice {header.parameter} is {wanted}, not {header.dtype!r:.40}")
            found.append(index)
        if len(set(found)) != len(found):
            raise SliceMismatch("a slice is named twice in one request")
        return tuple(found)
