"""Metrics of a parameter-server process: contents and counters of its shard, per job."""

from __future__ import annotations

from collections.abc import Iterator

from hetpipe.observe.readings import Reading
from hetpipe.server.shard.server import ShardServer


def readings(shards: ShardServer, *, silent_seconds: float) -> Iterator[Reading]:
    """All metrics, read at one moment per job; `silent_seconds` is the time since the coordinator last responded."""
    yield Reading("hetpipe_coordinator_silent_seconds", silent_seconds)
    for job in shards.job_shards():
        facts, labels = job.shard.facts(), (job.config.job_id, job.config.shard)
        for name, value in (
            ("pushes_total", facts.counts.pushes),
            ("pushed_bytes_total", facts.counts.pushed_bytes),
            ("duplicate_pushes_total", facts.counts.duplicate_pushes),
            ("pulls_total", facts.counts.pulls),
            ("pulled_bytes_total", facts.counts.pulled_bytes),
            ("followed_records_total", facts.followed_records),
            ("staged_waves", facts.staged_waves),
            ("published_clock", facts.published),
            ("retained_versions", facts.retained_versions),
            ("weight_bytes", facts.weight_bytes),
            ("staged_clock", facts.staged_clock),
            ("committed_clock", facts.committed_clock),
            ("durable_clock", facts.durable_clock),
            ("write_ahead_log_bytes", facts.log_bytes),
        ):
            yield Reading(f"hetpipe_shard_{name}", value, labels)
        if job.config.shard == 0:
            yield Reading("hetpipe_shard_log_records_total", job.clock_shard.num_records, labels)
