"""Cache of link measurements of a machine, in the user's cache folder. Without torch.

Measurements are keyed by the host name they were made on. An agent's node name may differ; it reports its links under
the node name.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetpipe.profiler.cache import MeasurementCache, cache_folder
from hetpipe.profiler.machine import processor_name, versions
from hetpipe.values.link_measurement import LinksFingerprint, MeasuredLinks, merged, still_valid
from hetpipe.values.policies import LinkKind

#: The kind of link between stages of one node, unless a job says otherwise.
WITHIN_NODE_TRANSPORT: LinkKind = "shared_memory"


class LinkCache:
    """Cached link measurements of one machine."""

    def __init__(self, environment: Mapping[str, str], *, machine: str, device_types: Sequence[str]) -> None:
        """Open the cache in the cache folder of `environment`.

        Args:
            environment: determines the folder.
            machine: host name.
            device_types: names reported by its devices, regardless of their number.
        """
        self._machine = machine
        self._files = MeasurementCache(cache_folder(environment, "links"), MeasuredLinks)
        self.key = LinksFingerprint(
            nodes=(machine,),
            transport=WITHIN_NODE_TRANSPORT,
            processor=processor_name(),
            devices=tuple(dict.fromkeys(device_types)),
            versions=versions(),
        ).key

    def find(self, *, now: float) -> MeasuredLinks:
        """Return the cached measurements valid at `now`; empty if there are none."""
        found = self._files.find(self.key)
        return MeasuredLinks() if found is None else still_valid(found, now=now)

    def keep(self, measured: MeasuredLinks) -> None:
        """Replace the cached measurements."""
        self._files.keep(self.key, measured)


class NodeLinks:
    """Known links of an agent's node, internal and to other nodes. Thread-safe."""

    def __init__(self, environment: Mapping[str, str], *, machine: str, node: str, device_types: Sequence[str]) -> None:
        """Open the cache in the cache folder of `environment`.

        Args:
            environment: determines the folder.
            machine: host name.
            node: name of its agent's node.
            device_types: of its devices.
        """
        self._machine = machine
        self._node = node
        self._within = LinkCache(environment, machine=machine, device_types=device_types)
        # A machine may run several agents, and node names are only meaningful within their cluster.
        self._between = LinkCache(environment, machine=f"{machine}/{node}", device_types=device_types)
        self._lock = threading.Lock()

    def find(self, *, now: float) -> MeasuredLinks:
        """Return the valid cached measurements, under the node name."""
        found, own = self._within.find(now=now), (self._machine, self._machine)
        within = MeasuredLinks(
            links=tuple(replace(link, between=(self._node, self._node)) for link in found.links if link.between == own),
            copies=tuple(replace(copy, node=self._node) for copy in found.copies if copy.node == self._machine),
        )
        return merged(self._between.find(now=now).of(self._node), within)

    def keep(self, measured: MeasuredLinks, *, now: float) -> None:
        """Add measurements of the node's links."""
        with self._lock:
            self._between.keep(merged(self._between.find(now=now), measured.of(self._node)))
