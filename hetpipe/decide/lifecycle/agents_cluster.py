"""The cluster that the registered agents make: one node each. Pure.

How fast they reach each other is not measured; it is assumed, and said to be.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.values.catalogue import type_of_device_name
from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.values.run import AgentDevice, AgentInfo

#: Of one message between two processes, through whatever device.
LATENCY_SECONDS = 50e-6

#: Stages of one node exchange tensors through host memory, whatever joins their devices: gloo moves about this much
#: between two processes of one machine, measured with messages of 1 MiB.
WITHIN_NODE = LinkSpec(bandwidth_bytes_per_second=2e9, latency_seconds=LATENCY_SECONDS)

#: 10 Gbit/s Ethernet: common between machines with GPUs, and where it is wrong it is easy to say so.
BETWEEN_NODES = LinkSpec(bandwidth_bytes_per_second=1.25e9, latency_seconds=LATENCY_SECONDS)

#: What is assumed of links that nobody has described.
ASSUMED_LINKS = Links(intra_node=WITHIN_NODE, inter_node=BETWEEN_NODES)


def type_of(device: AgentDevice) -> str:
    """The device's type: the catalogue's name where it has one, else what the device calls itself."""
    return type_of_device_name(device.type, device.memory_bytes) or device.type


def cluster_of(agents: Sequence[AgentInfo], links: Links = ASSUMED_LINKS) -> Cluster:
    """The cluster of these agents' devices.

    Devices are named by their place among those of their agent, in the order given. A type has the memory that the
    smallest device of it reports; an agent has divided its host's memory among its CPU devices already.

    Args:
        agents: with the devices that count, at least one in all.
        links: how fast they reach each other.
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
