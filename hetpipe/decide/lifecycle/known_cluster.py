"""The description of the cluster used for planning. Pure.

Nodes and devices are those of the registered agents, one node each (`cluster_of`), or those of the cluster file in the
job. Each link is stated, measured, or assumed, and its source is recorded (`KnownLinks`): links in a cluster file take
precedence as a whole; without one, a measured pair of nodes has its own link if it differs from the default, and other
pairs have the assumed link. `describe` combines the cluster with the profile of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from hetpipe.decide.lifecycle.inspections import Inspected
from hetpipe.decide.planner.assembly import profile_for, reserve_for
from hetpipe.errors import PlanError, UserError
from hetpipe.job.file import Job
from hetpipe.values.cluster import (
    LEAST_BANDWIDTH,
    LONGEST_LATENCY_SECONDS,
    Cluster,
    DeviceType,
    LinkOverride,
    Links,
    LinkSpec,
    Node,
)
from hetpipe.values.link_measurement import CopyMeasurement, LinkMeasurement, MeasuredLinks, is_valid
from hetpipe.values.measurement import Measurement
from hetpipe.values.plan import ModelReport
from hetpipe.values.plan_document import LinkSource, PlanDocument, PlannedLink
from hetpipe.values.profile import Profile
from hetpipe.values.quantities import bytes_text
from hetpipe.values.run import AgentInfo, type_of

#: Maximum number of links listed in a message.
_MOST_NAMED = 3

#: Significant digits of a measured figure; more would be noise.
_DIGITS = 3

#: Latency of one message between two processes, over any device.
LATENCY_SECONDS = 50e-6

#: Stages of one node exchange tensors through host memory, whatever connects their devices: gloo transfers about this
#: much between two processes of one machine, measured with messages of 1 MiB.
WITHIN_NODE = LinkSpec(bandwidth_bytes_per_second=2e9, latency_seconds=LATENCY_SECONDS)

#: 10 Gbit/s Ethernet: common between machines with GPUs, and easy to override.
BETWEEN_NODES = LinkSpec(bandwidth_bytes_per_second=1.25e9, latency_seconds=LATENCY_SECONDS)

#: Assumed figures of links that are neither stated nor measured.
ASSUMED_LINKS = Links(intra_node=WITHIN_NODE, inter_node=BETWEEN_NODES)


def cluster_of(agents: Sequence[AgentInfo], links: Links = ASSUMED_LINKS) -> Cluster:
    """The cluster of these agents' devices.

    Devices are named by their index among those of their agent, in the given order. The memory of a type is the
    smallest reported for it; agents have already divided their host's memory among CPU devices.

    Args:
        agents: agents with the devices to include, at least one in all.
        links: the links of the cluster.
    """
    memory: dict[str, int] = {}
    for agent in agents:
        for device in agent.devices:
            kind = type_of(device)
            memory[kind] = min(device.memory_bytes, memory.get(kind, device.memory_bytes))
    return Cluster(
        device_types={kind: DeviceType(memory_bytes=num_bytes) for kind, num_bytes in memory.items()},
        nodes=tuple(Node(name=agent.agent, devices=tuple(map(type_of, agent.devices))) for agent in agents),
        links=links,
    )


@dataclass(frozen=True, slots=True)
class LinkOrigin:
    """Source of the figures of one link."""

    between: tuple[str, str]
    source: LinkSource
    measured_at: float | None = None
    """Seconds since 1970-01-01 UTC."""

    @property
    def words(self) -> str:
        """Name of the link in messages."""
        node, other = self.between
        return f"within {node}" if node == other else f"between {node} and {other}"


@dataclass(frozen=True, slots=True)
class KnownLinks:
    """Links with the sources of their figures."""

    links: Links
    origins: tuple[LinkOrigin, ...]
    """One for each pair of nodes and for each node."""

    @property
    def sources(self) -> tuple[LinkSource, ...]:
        """The sources that occur, the most reliable first."""
        order: tuple[LinkSource, ...] = ("stated", "measured", "assumed")
        present = {origin.source for origin in self.origins}
        return tuple(source for source in order if source in present)

    def words(self, source: LinkSource) -> str:
        """Names of the links of `source`, limited to the first ones; empty if there are none."""
        names = [origin.words for origin in self.origins if origin.source == source]
        more = len(names) - _MOST_NAMED
        return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")

    @property
    def sentence(self) -> str:
        """Summary of stated, measured and assumed links.

        >>> origins = (LinkOrigin(("a", "a"), "measured", 0.0), LinkOrigin(("a", "b"), "assumed"))
        >>> KnownLinks(ASSUMED_LINKS, origins).sentence
        'links: measured within a; assumed between a and b'
        """
        if self.sources == ("stated",):
            return "links: stated in the cluster file"
        return f"links: {'; '.join(f'{source} {self.words(source)}' for source in self.sources)}"

    def noted_in(self, document: PlanDocument, cluster: Cluster) -> PlanDocument:
        """The plan, made for `cluster`, extended by the links among its nodes with their sources."""
        stages = (stage for worker in document.virtual_workers for stage in worker.stages)
        nodes = {*(stage.device.rpartition("/")[0] for stage in stages), *document.shards}
        links = tuple(
            _planned_link(origin, cluster.link(*origin.between))
            for origin in self.origins
            if nodes.issuperset(origin.between)
        )
        return document.model_copy(update={"links": links})


def _planned_link(origin: LinkOrigin, spec: LinkSpec) -> PlannedLink:
    return PlannedLink(
        between=origin.between,
        source=origin.source,
        bytes_per_second=spec.effective_bytes_per_second,
        latency_seconds=spec.latency_seconds,
        measured_at=origin.measured_at,
    )


def stated_links(links: Links, nodes: Sequence[str]) -> KnownLinks:
    """The links of a cluster file with these `nodes`."""
    return KnownLinks(links, tuple(LinkOrigin(pair, "stated") for pair in _pairs(nodes)))


def known_links(
    nodes: Sequence[str], measured: MeasuredLinks, *, now: float, assumed: Links = ASSUMED_LINKS
) -> KnownLinks:
    """The links among `nodes` without a cluster file.

    If all nodes were measured, `intra_node` is the slowest of them, and likewise `inter_node` for all pairs; the others
    are overrides. For each pair the newest valid measurement counts.

    Args:
        nodes: nodes of the cluster.
        measured: known measurements; those of other nodes, and those no longer valid at `now`, are ignored.
        now: seconds since 1970-01-01 UTC.
        assumed: the links that were not measured.

    Raises:
        UserError: a measured link is too slow for a cluster.
    """
    found = _newest(measured.links, now)
    copies = {
        node: [copy for copy in measured.copies if copy.node == node and is_valid(copy.measured_at, now=now)]
        for node in nodes
    }
    specs: dict[tuple[str, str], LinkSpec] = {}
    origins = []
    for pair in _pairs(nodes):
        measurement = found.get(frozenset(pair))
        if measurement is None:
            origins.append(LinkOrigin(pair, "assumed"))
            continue
        specs[pair] = spec_of(measurement, (_slowest_copy(copies[pair[0]]), _slowest_copy(copies[pair[1]])))
        origins.append(LinkOrigin(pair, "measured", measurement.measured_at))
    pairs = _pairs(nodes)
    within = _common([pair for pair in pairs if pair[0] == pair[1]], specs, assumed.intra_node)
    between = _common([pair for pair in pairs if pair[0] != pair[1]], specs, assumed.inter_node)
    overrides = tuple(
        LinkOverride(between=pair, **spec.model_dump())
        for pair, spec in specs.items()
        if spec != (within if pair[0] == pair[1] else between)
    )
    return KnownLinks(Links(intra_node=within, inter_node=between, overrides=overrides), tuple(origins))


def together(measured: Iterable[MeasuredLinks]) -> MeasuredLinks:
    """Merge the measurements of several nodes."""
    found = tuple(measured)
    return MeasuredLinks(
        links=tuple(link for each in found for link in each.links),
        copies=tuple(copy for each in found for copy in each.copies),
    )


def spec_of(measurement: LinkMeasurement, copies: tuple[CopyMeasurement | None, CopyMeasurement | None]) -> LinkSpec:
    """Effective link between stages: a frame is copied from its device, transferred, and copied to the other device.

    The three steps are sequential, so their times add up. Stages on CPUs need no copies: those by memcpy do not count.

    Raises:
        UserError: the link is too slow for a cluster.
    """
    legs = [measurement.speed, *(copy.speed for copy in copies if copy is not None and copy.method == "cuda")]
    latency = sum(leg.latency_seconds for leg in legs)
    bandwidth = 1.0 / sum(1.0 / leg.bytes_per_second for leg in legs)
    if bandwidth < LEAST_BANDWIDTH or latency >= LONGEST_LATENCY_SECONDS:
        words = LinkOrigin(measurement.between, "measured").words
        raise UserError(
            f"the link {words} was measured at {bytes_text(bandwidth)}/s and {latency:.3g} s of latency, which "
            "is too slow to train over; repair the network, or leave out one of the nodes"
        )
    return LinkSpec(bandwidth_bytes_per_second=_rounded(bandwidth), latency_seconds=_rounded(latency))


def _pairs(nodes: Sequence[str]) -> list[tuple[str, str]]:
    return [*((node, node) for node in nodes), *combinations(nodes, 2)]


def _newest(measurements: Sequence[LinkMeasurement], now: float) -> dict[frozenset[str], LinkMeasurement]:
    valid = [measurement for measurement in measurements if is_valid(measurement.measured_at, now=now)]
    return {frozenset(found.between): found for found in sorted(valid, key=lambda one: one.measured_at)}


def _slowest_copy(copies: Sequence[CopyMeasurement]) -> CopyMeasurement | None:
    """The slowest copy, because a cluster file has one link for all devices of a node."""
    return min(copies, key=lambda copy: copy.speed.bytes_per_second, default=None)


def _common(pairs: Sequence[tuple[str, str]], specs: dict[tuple[str, str], LinkSpec], assumed: LinkSpec) -> LinkSpec:
    """Default link of all pairs: the slowest if all were measured, else the assumed one."""
    if not pairs or any(pair not in specs for pair in pairs):
        return assumed
    return min(
        (specs[pair] for pair in pairs), key=lambda spec: (spec.bandwidth_bytes_per_second, -spec.latency_seconds)
    )


def _rounded(figure: float) -> float:
    return float(f"{figure:.{_DIGITS}g}")


@dataclass(frozen=True, slots=True)
class PlanningInputs:
    """Inputs of planning."""

    profile: Profile
    cluster: Cluster
    known: KnownLinks
    """Sources of the links of the cluster."""
    reserve_bytes: int = 0
    """Memory used by the framework on every device, if measured and the devices are real."""


def describe(job: Job, inspected: Inspected, agents: Sequence[AgentInfo], *, now: float) -> PlanningInputs:
    """The inputs to plan `job` on the devices of `agents`.

    Args:
        job: the job as submitted.
        inspected: results of the inspection of its model.
        agents: agents with the claimed devices and the measurements of their links.
        now: seconds since 1970-01-01 UTC, at which measurements of links must be valid.

    Raises:
        PlanError: the job's profile does not match, or the measurements are of different models.
        UserError: a type of the cluster was not measured and is not in the catalogue; or a link is too slow.
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
    return PlanningInputs(profile, cluster, known, reserve_bytes=reserve_bytes)


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
    """Check that measurements are of the same code."""
    if [layer.name for layer in measurement.layers] != [layer.name for layer in model.layers]:
        raise PlanError(
            f"the model that was measured on {measurement.device_type} has other layers ({len(measurement.layers)}) "
            f"than the one that was inspected ({len(model.layers)}); have the same code on every node"
        )
