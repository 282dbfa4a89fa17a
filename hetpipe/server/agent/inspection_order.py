"""What an inspection is asked and what it answers: the values on its pipe. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetpipe.values.measurement import Measurement
from hetpipe.values.plan import ModelReport


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionOrder:
    """Look at this."""

    job: dict[str, Any]
    """The validated job, as `Job.model_dump(mode="json")`."""
    import_path: str
    """Folder that user code is imported from first."""
    with_model: bool
    """Report the model."""
    measure: tuple[str, ...]
    """Device types of this machine that the model is measured on."""
    cache_folder: str
    """Of measurements that were made before."""
    run_folder: str = ""
    """Where the model is written from which stages build theirs; empty: it is not."""


@dataclass(frozen=True, slots=True)
class InspectionAnswer:
    """What was found."""

    model: ModelReport | None
    """None unless it was asked for."""
    measurements: tuple[Measurement, ...] = ()
    """One per device type that was asked for and is here."""
