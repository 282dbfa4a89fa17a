"""The profile and the cluster that a run is planned by: those that the job names, else what was found. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.decide.lifecycle.agents_cluster import cluster_of
from hetpipe.decide.lifecycle.inspections import Inspected
from hetpipe.decide.lifecycle.known_links import KnownLinks, known_links, stated_links, together
from hetpipe.decide.planner.assembly import profile_for, reserve_for
from hetpipe.errors import PlanError
from hetpipe.job.file import Job
from hetpipe.values.cluster import Cluster
from hetpipe.values.measurement import Measurement
from hetpipe.values.plan import ModelReport
from hetpipe.values.profile import Profile
from hetpipe.values.run import AgentInfo


@dataclass(frozen=True, slots=True)
class Described:
    """What a run is planned by."""

    profile: Profile
    cluster: Cluster
    known: KnownLinks
    """Where the links of the cluster are from, each."""
    reserve_bytes: int = 0
    """What the framework takes of every device, where it was measured and the devices are real."""


def describe(job: Job, inspected: Inspected, agents: Sequence[AgentInfo], *, now: float) -> Described:
    """What `job` is planned by on the devices of `agents`.

    Args:
        job: as it was submitted.
        inspected: what was found of its model.
        agents: with the devices that it claims, and with what was measured of their links.
        now: seconds since 1970-01-01 UTC, for which measurements of links must be valid.

    Raises:
        PlanError: the job's profile is of something else, or the measurements are not all of one model.
        UserError: a type of the cluster was not measured, nor is it in the catalogue; or a link is too slow.
    """
    known = _links(job, agents, now=now)
    cluster = job.cluster.file or cluster_of(agents, known.links)
    profile, reserve_bytes = job.cluster.profile, 0
    if profile is None:
        for measurement in inspected.measurements:
            _check_measured(measurement, inspected.model)
        profile = profile_for(job, inspected.measurements, cluster.devices.values())
        if not job.cluster.emulate:
            reserve_bytes = reserve_for(inspected.measurements, cluster.devices.values())
    else:
        _check_named(profile, job, inspected.model)
    return Described(profile, cluster, known, reserve_bytes=reserve_bytes)


def _links(job: Job, agents: Sequence[AgentInfo], *, now: float) -> KnownLinks:
    if job.cluster.file is not None:
        return stated_links(job.cluster.file.links, [node.name for node in job.cluster.file.nodes])
    return known_links([agent.agent for agent in agents], together(agent.links for agent in agents), now=now)


def _check_named(profile: Profile, job: Job, model: ModelReport) -> None:
    if profile.batch_size != job.batch_size:
        raise PlanError(
            f"cluster.profile is for minibatches of {profile.batch_size} samples, but batch_size is {job.batch_size}; "
            "profile the job again, or leave cluster.profile out"
        )
    if len(profile.layers) != len(model.layers):
        raise PlanError(
            f"cluster.profile has {len(profile.layers)} layers, but the model has {len(model.layers)}; profile the job "
            "again, or leave cluster.profile out"
        )


def _check_measured(measurement: Measurement, model: ModelReport) -> None:
    """Refuse what was measured with other code."""
    if [layer.name for layer in measurement.layers] != [layer.name for layer in model.layers]:
        raise PlanError(
            f"the model that was measured on {measurement.device_type} has other layers ({len(measurement.layers)}) "
            f"than the one that was inspected ({len(model.layers)}); have the same code on every node"
        )
