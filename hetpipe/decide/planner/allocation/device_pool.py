"""Devices that are still free, and how to take some of certain types from as few nodes as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetpipe.values.cluster import Cluster, node_of
from hetpipe.values.ids import DeviceId

#: How many devices of each type, in the order of `DevicePool.kinds`.
Counts = tuple[int, ...]


class DevicePool:
    """Free devices by node. Nodes with the same free devices and ordinary links are looked at once."""

    def __init__(self, cluster: Cluster, devices: Iterable[DeviceId]) -> None:
        """These devices are free.

        Args:
            cluster: all devices.
            devices: at least one, in the order of the cluster.
        """
        types = cluster.devices
        self._special = {name for override in cluster.links.overrides for name in override.between}
        self._rank = {node.name: rank for rank, node in enumerate(cluster.nodes)}
        self.kinds: Sequence[str] = sorted(set(types.values()))
        self._free: dict[str, list[list[DeviceId]]] = {}
        for device in reversed(list(devices)):
            on_node = self._free.setdefault(node_of(device), [[] for _ in self.kinds])
            on_node[self.kinds.index(types[device])].append(device)
        #: (name of a node with links of its own, else empty; free devices) → the nodes of which that is true, by rank.
        self._alike: dict[tuple[str, Counts], list[str]] = {}
        for node in sorted(self._free, key=self._rank.__getitem__, reverse=True):
            self._alike.setdefault(self._state(node), []).append(node)
        self.counts: Counts = tuple(
            sum(len(on[index]) for on in self._free.values()) for index in range(len(self.kinds))
        )

    def find(self, wanted: Counts, *, most_nodes: int | None = None) -> tuple[DeviceId, ...] | None:
        """Free devices of the wanted types, from few nodes.

        Each time the node that gives most is used, and of those that give as much the one that keeps least.

        Args:
            wanted: of each type.
            most_nodes: no more than so many nodes.

        Returns:
            None if there are too few. The devices stay free.
        """
        if any(count > free for count, free in zip(wanted, self.counts, strict=True)):
            return None
        left = list(wanted)
        touched: dict[tuple[str, Counts], int] = {}
        found: list[DeviceId] = []
        num_nodes = 0
        while any(left):
            if num_nodes == most_nodes:
                return None
            state = max(
                (state for state, nodes in self._alike.items() if touched.get(state, 0) < len(nodes)),
                key=lambda state: (
                    sum(map(min, left, state[1])),
                    -sum(state[1]),
                    -self._rank[self._alike[state][-1 - touched.get(state, 0)]],
                ),
            )
            node = self._alike[state][-1 - touched.get(state, 0)]
            touched[state] = touched.get(state, 0) + 1
            num_nodes += 1
            for index, free in enumerate(self._free[node]):
                taken = min(left[index], len(free))
                found += free[len(free) - taken :][::-1]
                left[index] -= taken
        return tuple(found)

    def take(self, devices: Iterable[DeviceId]) -> None:
        """These devices, which `find` has just named, are free no more."""
        by_node: dict[str, set[DeviceId]] = {}
        for device in devices:
            by_node.setdefault(node_of(device), set()).add(device)
        for node, gone in by_node.items():
            state = self._state(node)
            self._alike[state].remove(node)
            if not self._alike[state]:
                del self._alike[state]
            self._free[node] = [[device for device in free if device not in gone] for free in self._free[node]]
            alike = self._alike.setdefault(self._state(node), [])
            alike.append(node)
            alike.sort(key=self._rank.__getitem__, reverse=True)
        self.counts = self._count()

    def _count(self) -> Counts:
        return tuple(sum(map(len, free)) for free in zip(*self._free.values(), strict=True))

    def _state(self, node: str) -> tuple[str, Counts]:
        return node if node in self._special else "", tuple(map(len, self._free[node]))
