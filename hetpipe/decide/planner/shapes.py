"""When are two sets of devices the same to a planner? When their shapes are.

A shape says which types stand together on a node, and nothing of which node it is, unless a link of that node has
figures of its own. Every search works on shapes and puts device names back at the end, so that a thousand devices of
four types cost little more than sixteen.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetpipe.values.cluster import Cluster, node_of
from hetpipe.values.ids import DeviceId

#: Per node, in canonical order: its name where its links are special (else empty), and the types used on it, sorted.
Shape = tuple[tuple[str, tuple[str, ...]], ...]


class Shapes:
    """Finds shapes in one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        """Prepare.

        Args:
            cluster: the devices and links.
        """
        self._special = {name for override in cluster.links.overrides for name in override.between}
        self._types = cluster.devices
        self._rank = {device: rank for rank, device in enumerate(self._types)}
        self._node_rank = {node.name: rank for rank, node in enumerate(cluster.nodes)}

    def shape_of(self, devices: Iterable[DeviceId]) -> tuple[Shape, tuple[DeviceId, ...]]:
        """The shape, and the devices in its order: node by node, in each by type, otherwise as the cluster has them."""
        by_node: dict[str, list[DeviceId]] = {}
        for device in devices:
            by_node.setdefault(node_of(device), []).append(device)
        groups = []
        for node, members in by_node.items():
            members.sort(key=lambda device: (self._types[device], self._rank[device]))
            name = node if node in self._special else ""
            kinds = tuple(self._types[device] for device in members)
            groups.append(((name, kinds), self._node_rank[node], members))
        groups.sort(key=lambda group: group[:2])
        return tuple(shape for shape, _, _ in groups), tuple(device for _, _, members in groups for device in members)
