"""`hetpipe cluster show`: the contents of a cluster file, or the devices of this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.options import Json
from hetpipe.decide.lifecycle.known_cluster import BETWEEN_NODES, LATENCY_SECONDS, WITHIN_NODE
from hetpipe.decide.lifecycle.known_cluster import cluster_of as cluster_of_agents
from hetpipe.report.text import columns, count
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.server.agent.devices import discover_devices
from hetpipe.values.catalogue import CATALOGUE
from hetpipe.values.cluster import Cluster, Links, LinkSpec, node_of
from hetpipe.values.document import read_document, to_plain, to_yaml
from hetpipe.values.ids import AgentId, DeviceId
from hetpipe.values.run import AgentDevice, AgentInfo, type_of

_GIB = 1 << 30

_NOT_MEASURED = (
    "# The devices of this machine as a cluster file. Save it, add the other nodes, edit the differences.",
    "# Links are not measured: intra_node is the peak of the slowest link in the catalogue for these devices",
    "# (2 GB/s if it has none), inter_node is 10 Gbit/s Ethernet. Set `efficiency` to the share that transfers reach.",
    "# `hetpipe profile --links --out FILE` writes this file with links measured between two processes.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the nodes, devices and links of a cluster file. Without FILE, print the devices of this machine as one."""

    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Cluster file.  [default: this machine, as a file to save and edit]"),
    ] = None
    as_json: Json = False


def run(options: Options, output: Output, _shell: Shell) -> ExitStatus:
    """Show the cluster of a file, or without one the devices of this machine."""
    if options.file is None:
        cluster = cluster_of(discover_devices(socket.gethostname()))
        output.answer(to_plain(cluster), *_NOT_MEASURED, to_yaml(cluster))
    else:
        cluster = read_document(Cluster, options.file)
        output.answer(to_plain(cluster), *_tables(cluster))
    return ExitStatus.OK


def cluster_of(devices: Sequence[AgentDevice]) -> Cluster:
    """The cluster of one node with these devices; the link connects them, whether stages use it or not.

    Args:
        devices: all of one node, in the order of their indices.
    """
    node = AgentId(node_of(DeviceId(devices[0].device)))
    links = Links(intra_node=_slowest_link(map(type_of, devices)), inter_node=BETWEEN_NODES)
    return cluster_of_agents([AgentInfo(node, host="", pid=0, devices=tuple(devices))], links)


def _slowest_link(kinds: Iterable[str]) -> LinkSpec:
    peaks = [
        CATALOGUE[kind].link.bytes_per_second if kind in CATALOGUE else WITHIN_NODE.bandwidth_bytes_per_second
        for kind in kinds
    ]
    return LinkSpec(bandwidth_bytes_per_second=float(f"{min(peaks):.4g}"), latency_seconds=LATENCY_SECONDS)


def _tables(cluster: Cluster) -> list[str]:
    devices = [["node", "devices", "type", "GiB each"]]
    for node in cluster.nodes:
        for kind, alike in groupby(enumerate(node.devices), key=lambda entry: entry[1]):
            indices = [index for index, _ in alike]
            names = f"{node.name}/{indices[0]}" + (f" … {indices[-1]}" if len(indices) > 1 else "")
            memory = cluster.device_types[kind].memory_bytes / _GIB
            devices.append([node.name, names, kind, f"{memory:.1f}"])
    links = [["link", "GB/s", "efficiency", "latency µs"], *(_link_row(*row) for row in _links(cluster.links))]
    total = f"{count(len(cluster.devices), 'device')} of {count(len(cluster.device_types), 'type')} on "
    return [*columns(devices), "", *columns(links), "", total + count(len(cluster.nodes), "node")]


def _links(links: Links) -> Iterator[tuple[str, LinkSpec]]:
    yield "within a node", links.intra_node
    yield "between nodes", links.inter_node
    for override in links.overrides:
        node, other = override.between
        yield (f"within {node}" if node == other else f"{node} - {other}"), override


def _link_row(name: str, link: LinkSpec) -> list[str]:
    bandwidth = f"{link.bandwidth_bytes_per_second / 1e9:.4g}"
    return [name, bandwidth, f"{link.efficiency:.3g}", f"{link.latency_seconds * 1e6:.4g}"]
