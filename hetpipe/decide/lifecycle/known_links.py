"""The links that a cluster is planned with, and where each is from: stated, measured, or assumed. Pure.

What the user states in a cluster file holds, all of it. Without one, a pair of nodes that was measured has a link of
its own where it differs from the rest, and a pair that was not has what is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from hetpipe.decide.lifecycle.agents_cluster import ASSUMED_LINKS
from hetpipe.errors import UserError
from hetpipe.values.cluster import LEAST_BANDWIDTH, LONGEST_LATENCY_SECONDS, Cluster, LinkOverride, Links, LinkSpec
from hetpipe.values.link_measurement import CopyMeasurement, LinkMeasurement, MeasuredLinks, is_valid
from hetpipe.values.plan_document import LinkSource, PlanDocument, PlannedLink

#: Most links that are named in a sentence.
_MOST_NAMED = 3

#: Significant digits of a measured figure: more would be noise in a file that people read.
_DIGITS = 3


@dataclass(frozen=True, slots=True)
class LinkOrigin:
    """Where the figures of one link are from."""

    between: tuple[str, str]
    source: LinkSource
    measured_at: float | None = None
    """Seconds since 1970-01-01 UTC."""

    @property
    def words(self) -> str:
        """Which link it is, for people."""
        node, other = self.between
        return f"within {node}" if node == other else f"between {node} and {other}"


@dataclass(frozen=True, slots=True)
class KnownLinks:
    """Links, and where they are from."""

    links: Links
    origins: tuple[LinkOrigin, ...]
    """One for each pair of nodes and for each node."""

    @property
    def sources(self) -> tuple[LinkSource, ...]:
        """Which sources there are, the best first."""
        order: tuple[LinkSource, ...] = ("stated", "measured", "assumed")
        present = {origin.source for origin in self.origins}
        return tuple(source for source in order if source in present)

    def words(self, source: LinkSource) -> str:
        """Which links are of `source`, for people; of many the first ones. Empty if none is."""
        names = [origin.words for origin in self.origins if origin.source == source]
        more = len(names) - _MOST_NAMED
        return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")

    @property
    def sentence(self) -> str:
        """Which links are stated, measured and assumed.

        >>> origins = (LinkOrigin(("a", "a"), "measured", 0.0), LinkOrigin(("a", "b"), "assumed"))
        >>> KnownLinks(ASSUMED_LINKS, origins).sentence
        'links: measured within a; assumed between a and b'
        """
        if self.sources == ("stated",):
            return "links: stated in the cluster file"
        return f"links: {'; '.join(f'{source} {self.words(source)}' for source in self.sources)}"

    def noted_in(self, document: PlanDocument, cluster: Cluster) -> PlanDocument:
        """The plan, made for `cluster` with these links, with those among its nodes and where they are from."""
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
    """Those of a cluster file with these `nodes`."""
    return KnownLinks(links, tuple(LinkOrigin(pair, "stated") for pair in _pairs(nodes)))


def known_links(
    nodes: Sequence[str], measured: MeasuredLinks, *, now: float, assumed: Links = ASSUMED_LINKS
) -> KnownLinks:
    """The links among `nodes` that no file states.

    Where all nodes were measured, `intra_node` is the slowest of them, and so is `inter_node` of all pairs; the others
    are overrides. Of one pair the newest valid measurement counts.

    Args:
        nodes: of the cluster.
        measured: what is known; what is of other nodes, or no longer valid at `now`, does not count.
        now: seconds since 1970-01-01 UTC.
        assumed: the links that were not measured.

    Raises:
        UserError: a link was measured that is too slow for a cluster.
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
    """What several nodes know of their links."""
    found = tuple(measured)
    return MeasuredLinks(
        links=tuple(link for each in found for link in each.links),
        copies=tuple(copy for each in found for copy in each.copies),
    )


def spec_of(measurement: LinkMeasurement, copies: tuple[CopyMeasurement | None, CopyMeasurement | None]) -> LinkSpec:
    """A measured link as a stage meets it: a frame leaves its device, travels, and goes onto the other device.

    The three follow one another, so their times add up. A stage on a CPU copies nothing: copies by memcpy do not count.

    Raises:
        UserError: it is too slow for a cluster.
    """
    legs = [measurement.speed, *(copy.speed for copy in copies if copy is not None and copy.method == "cuda")]
    latency = sum(leg.latency_seconds for leg in legs)
    bandwidth = 1.0 / sum(1.0 / leg.bytes_per_second for leg in legs)
    if bandwidth < LEAST_BANDWIDTH or latency >= LONGEST_LATENCY_SECONDS:
        words = LinkOrigin(measurement.between, "measured").words
        raise UserError(
            f"the link {words} was measured at {bandwidth:.3g} bytes per second and {latency:.3g} s of latency, which "
            "is too slow to train over; mend the network, or leave out one of the nodes"
        )
    return LinkSpec(bandwidth_bytes_per_second=_rounded(bandwidth), latency_seconds=_rounded(latency))


def _pairs(nodes: Sequence[str]) -> list[tuple[str, str]]:
    return [*((node, node) for node in nodes), *combinations(nodes, 2)]


def _newest(measurements: Sequence[LinkMeasurement], now: float) -> dict[frozenset[str], LinkMeasurement]:
    valid = [measurement for measurement in measurements if is_valid(measurement.measured_at, now=now)]
    return {frozenset(found.between): found for found in sorted(valid, key=lambda one: one.measured_at)}


def _slowest_copy(copies: Sequence[CopyMeasurement]) -> CopyMeasurement | None:
    """A cluster file has one link for all devices of a node: that of the slowest."""
    return min(copies, key=lambda copy: copy.speed.bytes_per_second, default=None)


def _common(pairs: Sequence[tuple[str, str]], specs: dict[tuple[str, str], LinkSpec], assumed: LinkSpec) -> LinkSpec:
    """What stands for all pairs that have no link of their own: the slowest if all were measured, else the assumed."""
    if not pairs or any(pair not in specs for pair in pairs):
        return assumed
    return min(
        (specs[pair] for pair in pairs), key=lambda spec: (spec.bandwidth_bytes_per_second, -spec.latency_seconds)
    )


def _rounded(figure: float) -> float:
    return float(f"{figure:.{_DIGITS}g}")
