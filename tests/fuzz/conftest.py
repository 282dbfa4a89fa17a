"""`make fuzz` runs this folder with the profile `fuzz`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

#: Mutations per example: a run is one mutation, decoded once.
MUTATIONS_PER_EXAMPLE = 100

settings.register_profile(
    "fuzz",
    max_examples=1_000,
    database=None,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
)
