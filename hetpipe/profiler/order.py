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
    """Folder that user code is imported from first."""
    cache_folder: str
    with_cpu: bool = False
    """Measure the CPU even where there are CUDA devices."""
    types: tuple[str, ...] | None = None
    """Measure these alone of what is here; None: all that is here."""
    fresh: bool = False
    """Do not look for earlier measurements."""
    repeats: int | None = None
    """Samples per layer; None: as many as a stable median needs."""


@dataclass(frozen=True, slots=True)
class ProfileAnswer:
    """Result of a `ProfileOrder`: one measurement per local device type."""

    measurements: tuple[Measurement, ...]
    cached: tuple[str, ...]
    """The device types whose measurements were made before."""
