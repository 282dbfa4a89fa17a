"""Metrics of a stage process, from its newest progress report (about once per second)."""

from __future__ import annotations

from collections.abc import Iterator

from hetpipe.observe.readings import Reading
from hetpipe.pipeline.setup import StageIdentity
from hetpipe.values.ids import JobId
from hetpipe.values.run import StageProgress, StageReport


class StageReadings:
    """The newest progress of one stage. `heard` is for the stage's thread, `readings` for any."""

    def __init__(self, job_id: JobId, identity: StageIdentity) -> None:
        self._labels = (job_id, identity.vw, identity.stage)
        self._is_last = identity.is_last
        self._newest: StageProgress | None = None

    def observe(self, report: StageReport) -> None:
        """Update by the stage's report."""
        if isinstance(report, StageProgress):
            self._newest = report

    def readings(self) -> Iterator[Reading]:
        """A `Source`; empty before the first progress."""
        newest = self._newest
        if newest is None:
            return
        values: dict[str, float | None] = {
            "minibatches_total": newest.minibatches,
            # Before the first wave it is 0 even after a resume, and would then jump.
            "waves_total": newest.clock or None,
            "published_clock": newest.published,
            "learning_rate": newest.learning_rate,
            "gradient_norm": newest.gradient_norm,
            "loss_scale": newest.loss_scale,
            "skipped_updates_total": None if newest.loss_scale is None else newest.skipped_updates,
            "compute_seconds_total": newest.compute_seconds,
            "waiting_seconds_total": newest.waiting_seconds,
            "idle_seconds_total": newest.idle_seconds,
            "pushed_bytes_total": newest.pushed_bytes,
            "pulled_bytes_total": newest.pulled_bytes,
            "weight_bytes": newest.weight_bytes,
            "activation_bytes": newest.activation_bytes,
        }
        if newest.cache is not None:
            values |= {
                "cache_reads_total": newest.cache.reads,
                "cache_computed_total": newest.cache.computed,
                "cache_read_bytes_total": newest.cache.read_bytes,
                "cache_bytes": newest.cache.kept_bytes,
            }
        if self._is_last:
            values |= {"samples_total": newest.samples, "loss": newest.loss}
        for name, value in values.items():
            if value is not None:
                yield Reading(f"hetpipe_stage_{name}", value, self._labels)
