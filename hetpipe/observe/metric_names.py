"""Every metric of hetpipe's processes: name, kind, unit, labels, and the processes that expose it.

The only list: `observe.prometheus` rejects other metrics, and docs/observability.md, the Grafana dashboard and the
alerts are compared with it. Units are base units; a counter ends in `_total`. The library adds metrics of the process
itself (`process_*`: CPU time, memory, open files).

These metrics monitor a cluster while it runs: current values, scraped and stored by Prometheus. The permanent records
of a run are in its folder: `observe.metrics` writes every wave's loss, `observe.history` every decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["counter", "gauge", "histogram"]

#: The processes that have an endpoint.
Role = Literal["coordinator", "parameter_server", "agent", "stage"]
ROLES: tuple[Role, ...] = get_args(Role)

#: Upper bounds of the buckets of call durations, in seconds; the last bucket is unbounded.
CALL_BUCKETS = (0.001, 0.01, 0.1, 1.0, 10.0)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric and all its series."""

    name: str
    kind: Kind
    unit: str
    """Base unit, or the counted objects."""
    help: str
    labels: tuple[str, ...]
    """In the order of the values."""
    roles: tuple[Role, ...]
    """Roles of the processes that expose it."""


_JOB = ("job",)
_WORKER = ("job", "vw")
_STAGE = ("job", "vw", "stage")
_SHARD = ("job", "shard")
_SERVERS: tuple[Role, ...] = ("coordinator", "parameter_server")
_MEMBERS: tuple[Role, ...] = ("parameter_server", "agent")


def _of_all() -> tuple[Family, ...]:
    return (Family("hetpipe_info", "gauge", "1", "Always 1; labels describe the process.", ("role", "version"), ROLES),)


def _of_servers() -> tuple[Family, ...]:
    handled = "Calls handled by this process, by gRPC status."
    refused = "Calls rejected by this process, by the class of the error; `ClockNotPublished` is not a failure."
    seconds = "Duration of a call, including the whole duration of a stream."
    return (
        Family("hetpipe_rpc_handled_total", "counter", "calls", handled, ("call", "status"), _SERVERS),
        Family("hetpipe_rpc_refused_total", "counter", "calls", refused, ("call", "reason"), _SERVERS),
        Family("hetpipe_rpc_seconds", "histogram", "seconds", seconds, ("call",), _SERVERS),
    )


def _of_coordinator() -> tuple[Family, ...]:
    def gauge(name: str, unit: str, text: str, *labels: str) -> Family:
        return Family(f"hetpipe_{name}", "gauge", unit, text, labels, ("coordinator",))

    def counter(name: str, unit: str, text: str, *labels: str) -> Family:
        return Family(f"hetpipe_{name}_total", "counter", unit, text, labels, ("coordinator",))

    return (
        gauge("members", "members", "Live members.", "role"),
        gauge("lease_seconds", "seconds", "Duration of a lease after a heartbeat."),
        gauge("lease_seconds_left", "seconds", "Remaining time of the lease that expires first, by role.", "role"),
        counter("leases_expired", "leases", "Leases that expired without a heartbeat.", "role"),
        gauge("jobs", "jobs", "Jobs known to this coordinator.", "state"),
        counter("job_events", "events", "Events of a job.", *_JOB, "event"),
        gauge(
            "job_conditions",
            "processes",
            "Processes with an active condition of this kind, 0 if none; until the job ends.",
            *_JOB,
            "condition",
        ),
        gauge("store_unreachable", "1", "1 while Redis is unreachable from this coordinator, else 0."),
        gauge("job_running_seconds", "seconds", "Time since training began; only while a job trains.", *_JOB),
        gauge("job_term", "term", "Version of plan and membership; increases when a job is planned again.", *_JOB),
        gauge("job_global_clock", "waves", "Minimum of the local clocks.", *_JOB),
        gauge("job_published_clock", "waves", "Newest clock whose weights are complete on all shards.", *_JOB),
        gauge("job_barrier_clock", "waves", "Clock of the next barrier.", *_JOB),
        gauge("job_clock_distance", "waves", "Fastest local clock minus slowest.", *_JOB),
        gauge("job_clock_distance_bound", "waves", "Maximum allowed clock distance, D + 1; absent under `asp`.", *_JOB),
        gauge(
            "job_tokens_per_second",
            "tokens/second",
            "Average over the last ten seconds; only for data of tokens.",
            *_JOB,
        ),
        gauge(
            "job_model_flops_utilisation_ratio",
            "1",
            "Model FLOP/s as a share of the peak of all devices in use (MFU); absent where either is unknown.",
            *_JOB,
        ),
        gauge("job_epoch", "epochs", "Current pass over the training data, from 1.", *_JOB),
        counter("job_minibatches", "minibatches", "Committed minibatches, including those before a resume.", *_JOB),
        counter("job_samples", "samples", "Committed samples, including those before a resume.", *_JOB),
        gauge("job_frozen_layers", "layers", "Leading layers of the model that are frozen.", *_JOB),
        gauge("vw_clock", "waves", "Local clock: waves that the virtual worker has committed.", *_WORKER),
        gauge("vw_clock_distance", "waves", "Waves ahead of the slowest virtual worker.", *_WORKER),
        gauge("vw_samples_per_second", "samples/second", "Average over the last ten seconds.", *_WORKER),
        gauge("vw_loss", "1", "Mean loss over the samples of the latest finished wave, if finite.", *_WORKER),
        gauge(
            "vw_loss_by_name",
            "1",
            "Mean of one of several losses (job key `loss`) in the latest finished wave.",
            *_WORKER,
            "name",
        ),
        gauge("vw_memory_bytes", "bytes", "Peak memory of weights and activations on its devices.", *_WORKER),
        gauge("vw_waiting_ratio", "1", "Share of time in which its first stage waited for a clock.", *_WORKER),
    )


def _of_members() -> tuple[Family, ...]:
    text = "Time since the last reply of the coordinator."
    return (Family("hetpipe_coordinator_silent_seconds", "gauge", "seconds", text, (), _MEMBERS),)


def _of_parameter_server() -> tuple[Family, ...]:
    def gauge(name: str, unit: str, text: str) -> Family:
        return Family(f"hetpipe_shard_{name}", "gauge", unit, text, _SHARD, ("parameter_server",))

    def counter(name: str, unit: str, text: str) -> Family:
        return Family(f"hetpipe_shard_{name}_total", "counter", unit, text, _SHARD, ("parameter_server",))

    return (
        counter("pushes", "pushes", "Pushes that were staged."),
        counter("pushed_bytes", "bytes", "Bytes of updates and initial weights received."),
        counter("duplicate_pushes", "pushes", "Repeated pushes that were staged already, without effect."),
        counter("pulls", "pulls", "Pulls started."),
        counter("pulled_bytes", "bytes", "Bytes requested by them."),
        counter("followed_records", "records", "Records of the decision log executed."),
        counter("log_records", "records", "Records in the decision log; only at the clock shard."),
        gauge("staged_waves", "waves", "Waves, or initial weights, staged and not applied yet."),
        gauge("published_clock", "waves", "Newest published clock seen by this shard."),
        gauge("retained_versions", "versions", "Published clocks whose weights are kept."),
        gauge("weight_bytes", "bytes", "Buffers in use: weights, staged updates, weights under construction."),
        gauge("staged_clock", "waves", "Waves below it are completely staged here or committed, for every member."),
        gauge("committed_clock", "waves", "Waves below it are committed, for every member."),
        gauge("durable_clock", "waves", "Waves below it survive a restart, for every member."),
        gauge(
            "write_ahead_log_bytes",
            "bytes",
            "Size of the write-ahead log of pushes, from which a restarted shard recovers.",
        ),
    )


def _of_agent() -> tuple[Family, ...]:
    def family(name: str, kind: Kind, unit: str, text: str, *labels: str) -> Family:
        return Family(f"hetpipe_{name}", kind, unit, text, labels, ("agent",))

    return (
        family("devices", "gauge", "devices", "Devices offered to jobs.", "type"),
        family("children", "gauge", "processes", "Running processes: `stage`, `inspection` or `link`.", "kind"),
        family("children_started_total", "counter", "processes", "Processes started.", "kind"),
        family(
            "children_exited_total",
            "counter",
            "processes",
            "Processes that exited: `ok`, `error` (non-zero status) or `signal`.",
            "kind",
            "outcome",
        ),
        family(
            "stage_restarts_total",
            "counter",
            "processes",
            "Stages started for a later incarnation of their virtual worker.",
        ),
    )


def _of_stage() -> tuple[Family, ...]:
    def gauge(name: str, unit: str, text: str) -> Family:
        return Family(f"hetpipe_stage_{name}", "gauge", unit, text, _STAGE, ("stage",))

    def counter(name: str, unit: str, text: str) -> Family:
        return Family(f"hetpipe_stage_{name}_total", "counter", unit, text, _STAGE, ("stage",))

    return (
        counter("minibatches", "minibatches", "Minibatches whose backward pass ran on this stage."),
        counter("samples", "samples", "Samples whose loss was computed; last stage only."),
        counter("waves", "waves", "Waves completed by this stage, including those before a resume: its clock."),
        gauge("published_clock", "waves", "Newest published clock seen by this stage."),
        gauge("loss", "1", "Mean loss over the samples of the latest finished wave; last stage only. May be NaN."),
        gauge("learning_rate", "1", "Learning rate of the next update; only on stages with parameters."),
        gauge(
            "gradient_norm", "1", "Norm of the latest gradient used in an update, before clipping; only with clipping."
        ),
        gauge("loss_scale", "1", "Scale of the loss after the latest update; only with `precision: fp16`."),
        counter(
            "skipped_updates",
            "updates",
            "Updates skipped because a gradient overflowed, the same on all stages of a virtual worker; only with "
            "`precision: fp16`.",
        ),
        counter(
            "compute_seconds",
            "seconds",
            "Computing time of completed minibatches and updates, including emulation.",
        ),
        counter("waiting_seconds", "seconds", "Time without work because the required clock was not published (gate)."),
        counter("idle_seconds", "seconds", "Time without work for any other reason."),
        counter("pushed_bytes", "bytes", "Updates sent to shards."),
        counter("pulled_bytes", "bytes", "Weights received from shards."),
        counter("cache_reads", "minibatches", "Minibatches read from the cache behind frozen layers by this stage."),
        counter(
            "cache_computed", "minibatches", "Minibatches of which this stage computed frozen layers, with a cache."
        ),
        counter("cache_read_bytes", "bytes", "Bytes read from the cache behind frozen layers."),
        gauge("cache_bytes", "bytes", "Bytes of that cache on the node, those of all its stages."),
        gauge("weight_bytes", "bytes", "Peak memory of weight buffers on the device."),
        gauge("activation_bytes", "bytes", "Peak memory of tensors saved by forward passes for backward passes."),
    )


#: By name, in the order of the documentation.
FAMILIES: Mapping[str, Family] = {
    family.name: family
    for group in (
        _of_all(),
        _of_servers(),
        _of_coordinator(),
        _of_members(),
        _of_parameter_server(),
        _of_agent(),
        _of_stage(),
    )
    for family in group
}


def families_of(role: Role) -> tuple[Family, ...]:
    """The metrics of a process of that role."""
    return tuple(family for family in FAMILIES.values() if role in family.roles)
