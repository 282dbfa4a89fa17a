"""Assignment of logged values to series, each of which has every step at most once. Pure.

A step is the number of committed minibatches, over all virtual workers, since the start of the training. After a
rewind, or a resume from an older checkpoint, steps repeat. Those values belong to a series of their own,
`repeated-1/NAME`, until the original series goes on beyond its last step: so no series has a step twice, and what was
trained twice is visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Series:
    """The series of a run so far."""

    repetitions: int = 0
    """Rewinds and resumes so far."""
    last: dict[str, int] = field(default_factory=dict)
    """Name → its last step."""

    def repeat(self) -> None:
        """Count a repetition: training continues from an earlier step, or in another logging process."""
        self.repetitions += 1

    def admit(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """The values to log at `step`, by the name of their series; values of a step that a series has are omitted.

        >>> series = Series()
        >>> series.admit(8, {"train/loss": 2.0}), series.admit(8, {"train/loss": 2.0})
        ({'train/loss': 2.0}, {})
        >>> series.repeat()
        >>> series.admit(8, {"train/loss": 2.1}), series.admit(16, {"train/loss": 1.9})
        ({'repeated-1/train/loss': 2.1}, {'train/loss': 1.9})
        """
        admitted = {}
        for name, value in values.items():
            if self._is_new(name, step):
                admitted[name] = value
            elif self.repetitions and self._is_new(repeated := f"repeated-{self.repetitions}/{name}", step):
                admitted[repeated] = value
        return admitted

    def _is_new(self, name: str, step: int) -> bool:
        if step <= self.last.get(name, -1):
            return False
        self.last[name] = step
        return True

    def to_object(self) -> dict[str, Any]:
        """The state as JSON data."""
        return {"repetitions": self.repetitions, "last": self.last}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Series:
        """Restore the state from `to_object`."""
        last = {str(name): int(step) for name, step in values.get("last", {}).items()}
        return cls(int(values.get("repetitions", 0)), last)
