"""What was measured of the links of a machine, in the user's cache folder. Without torch.

Measurements lie under the name of the machine that they were made on. An agent may call its node otherwise: what it
tells of its links has the name of the node.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetpipe.profiler.cache import MeasurementCache, cache_folder
from hetpipe.profiler.machine import processor_name, versions
from hetpipe.values.link_measurement import LinksFingerprint, MeasuredLinks, merged, still_valid
from hetpipe.values.policies import LinkKind

#: What stages of one node use, unless a job says `link: grpc`.
WITHIN_NODE_TRANSPORT: LinkKind = "gloo"


class LinkCache:
    """The measurements of one machine."""

    def __init__(self, environment: Mapping[str, str], *, machine: str, device_types: Sequence[str]) -> None:
        """Look in the cache folder of `environment`.

        Args:
            environment: names the folder.
            machine: what the machine calls itself.
            device_types: of its devices, as these call themselves; how many there are of each does not matter.
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
        """What was measured before and is still valid at `now`; nothing if there is none."""
        found = self._files.find(self.key)
        return MeasuredLinks() if found is None else still_valid(found, now=now)

    def keep(self, measured: MeasuredLinks) -> None:
        """Store what was measured, instead of what was there."""
        self._files.keep(self.key, measured)


class NodeLinks:
    """What an agent knows of the links of its node: within it, and to other nodes. Thread-safe."""

    def __init__(self, environment: Mapping[str, str], *, machine: str, node: str, device_types: Sequence[str]) -> None:
        """Look in the cache folder of `environment`.

        Args:
            environment: names the folder.
            machine: what the machine calls itself.
            node: what its agent calls it.
            device_types: of its devices.
        """
        self._machine = machine
        self._node = node
        self._within = LinkCache(environment, machine=machine, device_types=device_types)
        # A machine may have several agents, and the names of nodes mean something in their cluster alone.
        self._between = LinkCache(environment, machine=f"{machine}/{node}", device_types=device_types)
        self._lock = threading.Lock()

    def find(self, *, now: float) -> MeasuredLinks:
        """What was measured before and is valid still, under the name of the node."""
        found, own = self._within.find(now=now), (self._machine, self._machine)
        within = MeasuredLinks(
            links=tuple(replace(link, between=(self._node, self._node)) for link in found.links if link.between == own),
            copies=tuple(replace(copy, node=self._node) for copy in found.copies if copy.node == self._machine),
        )
        return merged(self._between.find(now=now).of(self._node), within)

    def keep(self, measured: MeasuredLinks, *, now: float) -> None:
        """Remember more of the links of the node."""
        with self._lock:
            self._between.keep(merged(self._between.find(now=now), measured.of(self._node)))
