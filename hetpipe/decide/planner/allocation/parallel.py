"""parallel: PipeDream-2BW's planner (§4, appendix A). Equal devices as w equal pipelines of d stages.

Every width w, depth d, minibatch of b samples and choice of recomputation is rated by the paper's closed forms, which
treat a model as a sequence of equal blocks. The number of minibatches per wave makes up the global batch B: N = B /
(w·b), at least d (§3.1). The best configuration that also fits by our own, stricter, memory definition is planned with
the actual layers.

Choices that the paper leaves open:

* Times and activations of other minibatch sizes than the profile's are scaled in proportion. Among equally fast
  configurations the b nearest to the profile's is chosen, since that one was measured; then the fewest devices.
* |A_input| is the mean over the cuts; a stage exchanges two of them with its neighbours, forward and backward.
* c_extra follows from the profile: a second forward, relative to forward and backward.
* Replicas of a stage share a server as far as possible, so a pipeline is within one server only if all pipelines are.
* Execution without pipelining is omitted: hetpipe always pipelines. With d = 1 the two are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.jobs import JobPlan, Jobs, partitioner_for
from hetpipe.decide.planner.scaled_profile import scaled_profile
from hetpipe.errors import InfeasiblePlan, PlanError
from hetpipe.values.cluster import LinkSpec
from hetpipe.values.policies import WeightPolicy
from hetpipe.values.quantities import bytes_text

#: The paper's own policy, the only one for which its closed forms hold.
PLANNED_POLICY: WeightPolicy = "double_buffer"


@dataclass(frozen=True, slots=True)
class Blocks:
    """A model in terms of the closed forms, for one minibatch of `batch_size` samples on one type of device."""

    batch_size: int
    forward_ms: float
    backward_ms: float
    parameter_bytes: int
    """|W|"""
    activation_bytes: int
    """|A_total|"""
    boundary_bytes: float
    """|A_input|: input of a stage."""
    returning_bytes: float
    """Gradients sent to the previous stage; |A_input| in the paper."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Equal devices in servers."""

    devices_per_server: int
    within: LinkSpec
    """B_high"""
    between: LinkSpec
    """B_low"""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One point of the search space."""

    width: int
    """w: pipelines."""
    depth: int
    """d: stages per pipeline."""
    batch_size: int
    """b: samples per minibatch."""
    minibatches_per_wave: int
    """m(b): minibatches of a pipeline between two exchanges of gradients."""
    recompute: bool


def minibatch_ms(blocks: Blocks, servers: Servers, chosen: Configuration) -> float:
    """T of A.1.1, with pipelining: every pipeline completes a minibatch in this time.

    max(c_extra·T_comp + T_comm between stages, T_comm between replicas / m(b)), equal for all stages.
    """
    scale = chosen.batch_size / blocks.batch_size
    passes = (2 if chosen.recompute else 1) * blocks.forward_ms + blocks.backward_ms
    compute_ms = scale * passes / chosen.depth
    between_stages_ms = 0.0
    if chosen.depth > 1:
        one_server = chosen.width * chosen.depth <= servers.devices_per_server
        link = servers.within if one_server else servers.between
        between_stages_ms = (
            1000 * 2 * scale * (blocks.boundary_bytes + blocks.returning_bytes) / link.effective_bytes_per_second
        )
    link = servers.within if chosen.width < servers.devices_per_server else servers.between
    exchanged_bytes = 2 * (chosen.width - 1) / chosen.width * blocks.parameter_bytes / chosen.depth
    between_replicas_ms = 1000 * exchanged_bytes / link.effective_bytes_per_second
    return max(compute_ms + between_stages_ms, between_replicas_ms / chosen.minibatches_per_wave)


def samples_per_second(blocks: Blocks, servers: Servers, chosen: Configuration) -> float:
    """THROUGHPUT(.): w pipelines, b samples each per minibatch time."""
    return 1000 * chosen.width * chosen.batch_size / minibatch_ms(blocks, servers, chosen)


def device_bytes(blocks: Blocks, chosen: Configuration) -> float:
    """MEMORY(.) of A.1.2: two weight versions, activations of d minibatches (of one if recomputed), and d inputs."""
    scale, depth = chosen.batch_size / blocks.batch_size, chosen.depth
    kept = 1 if chosen.recompute else depth
    return (
        2 * blocks.parameter_bytes / depth
        + kept * scale * blocks.activation_bytes / depth
        + depth * scale * blocks.boundary_bytes
    )


def configurations(num_devices: int, max_stages: int, max_batch: int) -> Iterator[Configuration]:
    """Every (w, d, b, recompute) whose minibatches make up exactly the global batch, at least d per pipeline."""
    for width in range(1, num_devices + 1):
        for depth in range(1, min(num_devices // width, max_stages) + 1):
            for batch_size in range(1, max_batch // (width * depth) + 1):
                if max_batch % (width * batch_size) == 0:
                    for recompute in (False, True):
                        waves = max_batch // (width * batch_size)
                        yield Configuration(width, depth, batch_size, waves, recompute)


def parallel(jobs: Jobs) -> JobPlan:
    """The best configuration as a plan; its batch size may differ from the profile's.

    Raises:
        PlanError: the devices are not equal, an option is missing or conflicts, or nothing fits.
    """
    blocks, servers, memory_bytes = _described(jobs)
    options, profile = jobs.options, jobs.costs.profile
    assert options.max_batch is not None
    found = [
        chosen
        for chosen in configurations(len(jobs.devices), jobs.costs.max_stages, options.max_batch)
        if options.recompute in ("auto", _switch(chosen))
        and (jobs.most_workers is None or chosen.width <= jobs.most_workers)
        and options.minibatches_per_wave in (None, chosen.minibatches_per_wave)
        and device_bytes(blocks, chosen) <= memory_bytes - options.reserve_bytes
    ]
    found.sort(
        key=lambda one: (
            -samples_per_second(blocks, servers, one),
            abs(one.batch_size - profile.batch_size),
            one.width * one.depth,
            one.recompute,
            one.batch_size,
        )
    )
    for chosen in found:
        plan = _plan(jobs, chosen)
        if plan is not None:
            return plan
    raise InfeasiblePlan(
        f"no width, depth and minibatch size with a global batch of {options.max_batch} fits "
        f"{bytes_text(memory_bytes)} per device; allow a smaller --max-batch, more devices, or --recompute auto"
    )


def _described(jobs: Jobs) -> tuple[Blocks, Servers, int]:
    costs, options, cluster = jobs.costs, jobs.options, jobs.costs.cluster
    kinds = sorted(set(jobs.devices.values()))
    if len(kinds) > 1:
        raise PlanError(
            f"the allocation parallel is for equal devices, and the cluster has {', '.join(kinds)}; use --allocation "
            "auto, or a cluster file with one type"
        )
    if options.max_batch is None:
        raise PlanError("the allocation parallel needs the largest global batch that still trains well: --max-batch")
    if options.weights != PLANNED_POLICY:
        raise PlanError(
            f"the allocation parallel plans for the weight policy {PLANNED_POLICY}, not {options.weights}; add "
            f"--weights {PLANNED_POLICY}"
        )
    kind, layers = kinds[0], costs.profile.layers
    forward = [costs.cut_bytes[cut] for cut in costs.allowed] or [0]
    backward = [costs.returning_bytes[cut] for cut in costs.allowed] or [0]
    blocks = Blocks(
        batch_size=costs.profile.batch_size,
        forward_ms=sum(layer.forward_ms[kind] for layer in layers),
        backward_ms=sum(layer.backward_ms[kind] for layer in layers),
        parameter_bytes=costs.parameter_bytes[-1],
        activation_bytes=costs.activation_bytes[-1],
        boundary_bytes=sum(forward) / len(forward),
        returning_bytes=sum(backward) / len(backward),
    )
    per_server = min(len(node.devices) for node in cluster.nodes if node.devices)
    return blocks, Servers(per_server, cluster.links.intra_node, cluster.links.inter_node), costs.memory_bytes[kind]


def _switch(chosen: Configuration) -> Literal["on", "off"]:
    return "on" if chosen.recompute else "off"


def _plan(jobs: Jobs, chosen: Configuration) -> JobPlan | None:
    """The configuration with the actual layers; None if it does not fit by our definition of memory."""
    scaled_to = scaled_profile(jobs.costs.original, chosen.batch_size)
    costs = Costs(scaled_to, jobs.costs.cluster, jobs.costs.frozen_layers)
    options = replace(jobs.options, recompute=_switch(chosen), minibatches_per_wave=chosen.minibatches_per_wave)
    devices = list(jobs.devices)
    groups = [devices[first : chosen.width * chosen.depth : chosen.width] for first in range(chosen.width)]
    scaled = Jobs(costs, options, partitioner_for(costs, options))
    return scaled.best_with(chosen.minibatches_per_wave, groups)
