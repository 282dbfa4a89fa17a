"""Network model: the links of a cluster as shared resources, and those used by each message.

* Between nodes: the sending side of one node's network card and the receiving side of the other's. A card is as fast as
  its node's fastest link; a message on a slower link does not saturate it.
* Between two devices of a node: the upstream and the downstream direction of its PCIe root.
* Between a device and a shard of its own node: the root's upstream direction for a push, downstream for a pull, at the
  speed of the link within the node. The shard is in host memory, so no network card is involved.

A message between nodes crosses PCIe as well; that is faster than the network and not modelled.
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property

from hetpipe.decide.planner.costs import ticks
from hetpipe.decide.simulator.flow import Part
from hetpipe.decide.simulator.resources import SharedResource
from hetpipe.decide.simulator.traffic import FlowSpec, Traffic
from hetpipe.values.cluster import Cluster, LinkSpec


class _Side(Enum):
    """One direction of a shared resource of a node."""

    CARD_OUT = "card out"
    CARD_IN = "card in"
    ROOT_UP = "root up"
    ROOT_DOWN = "root down"


_WITHIN_NODE: dict[Traffic, tuple[_Side, ...]] = {
    Traffic.ACTIVATIONS: (_Side.ROOT_UP, _Side.ROOT_DOWN),
    Traffic.GRADIENTS: (_Side.ROOT_UP, _Side.ROOT_DOWN),
    Traffic.PUSH: (_Side.ROOT_UP,),
    Traffic.PULL: (_Side.ROOT_DOWN,),
}


class Network:
    """Resources of one cluster, and what the parts of flows use of them."""

    def __init__(self, cluster: Cluster, *, contention: bool, local_shards: bool = True) -> None:
        """Start with all resources idle.

        Args:
            cluster: the links.
            contention: whether flows share resources.
            local_shards: whether weights that stay on a node pass no network card.
        """
        self._cluster = cluster
        self._contention = contention
        self._local_shards = local_shards
        self._resources: dict[tuple[str, _Side], SharedResource] = {}
        self._links: dict[tuple[str, str], LinkSpec] = {}

    def part(self, spec: FlowSpec) -> Part:
        """What a message of `spec` takes."""
        is_local = spec.source == spec.target and (self._local_shards or spec.shard is None)
        link = self._link(spec.source, spec.target, is_local=is_local)
        return Part(
            alone_ticks=ticks(link.transfer_ms(spec.num_bytes)),
            latency_ticks=ticks(1000 * link.latency_seconds),
            shares=self._shares(spec, link, is_local=is_local) if self._contention else (),
        )

    def _shares(self, spec: FlowSpec, link: LinkSpec, *, is_local: bool) -> list[tuple[SharedResource, int]]:
        if is_local:
            work = ticks(1000 * spec.num_bytes / link.effective_bytes_per_second)
            return [(self._resource(spec.source, side), work) for side in _WITHIN_NODE[spec.traffic]]
        return [
            (self._resource(node, side), ticks(1000 * spec.num_bytes / self._cards[node]))
            for node, side in ((spec.source, _Side.CARD_OUT), (spec.target, _Side.CARD_IN))
        ]

    def _resource(self, node: str, side: _Side) -> SharedResource:
        return self._resources.setdefault((node, side), SharedResource())

    @cached_property
    def _cards(self) -> dict[str, float]:
        return {node.name: self._cluster.network_card(node.name) for node in self._cluster.nodes}

    def _link(self, source: str, target: str, *, is_local: bool) -> LinkSpec:
        if source == target and not is_local:
            return self._cluster.links.inter_node
        found = self._links.get((source, target))
        if found is None:
            found = self._links[source, target] = self._cluster.link(source, target)
        return found
