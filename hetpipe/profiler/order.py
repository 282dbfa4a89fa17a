"""Request and reply of the profiling process, as sent over its pipe. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetpipe.values.measurement import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOrder:
    """Request to profile a job's model."""

    job: dict[str, Any]
    """The validated job, as `Job.model_dump(mode="json")`."""
    import_path: str
    """First folder from which user code is imported."""
    cache_folder: str
    with_cpu: bool = False
    """Measure the CPU even where there are CUDA devices."""
    types: tuple[str, ...] | None = None
    """Measure only these local types; None: all local types."""
    fresh: bool = False
    """Ignore cached measurements."""
    repeats: int | None = None
    """Samples per layer; None: as many as a stable median needs."""


@dataclass(frozen=True, slots=True)
class ProfileAnswer:
    """Result of a `ProfileOrder`: one measurement per local device type."""

    measurements: tuple[Measurement, ...]
    cached: tuple[str, ...]
    """Device types with cached measurements."""
