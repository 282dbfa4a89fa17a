"""Request and answer of an inspection: the values on its pipe. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetpipe.values.measurement import Measurement
from hetpipe.values.plan import ModelReport


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionOrder:
    """Request for an inspection."""

    job: dict[str, Any]
    """The validated job, as `Job.model_dump(mode="json")`."""
    import_path: str
    """First folder from which user code is imported."""
    with_model: bool
    """Report the model."""
    measure: tuple[str, ...]
    """Device types of this machine on which the model is measured."""
    cache_folder: str
    """Folder of cached measurements."""
    run_folder: str = ""
    """The folder to which the model is written for its stages; empty: it is not written."""


@dataclass(frozen=True, slots=True)
class InspectionAnswer:
    """The result of an inspection."""

    model: ModelReport | None
    """None unless requested."""
    measurements: tuple[Measurement, ...] = ()
    """One per requested device type of this machine."""
