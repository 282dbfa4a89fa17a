"""`hetpipe cluster`: what a cluster file says, which devices this machine has, what is known of device types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from hetpipe.decide.lifecycle.known_cluster import BETWEEN_NODES, LATENCY_SECONDS, WITHIN_NODE
from hetpipe.decide.lifecycle.known_cluster import cluster_of as cluster_of_agents
from hetpipe.errors import UserError
from hetpipe.report.text import columns, count
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.values.catalogue import CATALOGUE, CatalogueEntry, catalogue_hint
from hetpipe.values.cluster import Cluster, Links, LinkSpec, node_of
from hetpipe.values.document import read_document, to_plain, to_yaml
from hetpipe.values.ids import AgentId, DeviceId
from hetpipe.values.run import AgentDevice, AgentInfo, type_of

_GIB = 1 << 30

_NOT_MEASURED = (
    "# The devices of this machine as a cluster file. Save it, add the other nodes, edit what differs.",
    "# Links are not measured: intra_node is the peak of the slowest link that the catalogue knows for these devices",
    "# (2 GB/s where it knows none), inter_node is 10 Gbit/s Ethernet. Real transfers get an `efficiency` of that.",
    "# `hetpipe profile --links --out FILE` writes this file with what was measured between two processes.",
)


def show(file: Path | None, devices: Sequence[AgentDevice], output: Output) -> ExitStatus:
    """Show the cluster of `file`, or without one `devices`, which are those of this machine."""
    if file is None:
        cluster = cluster_of(devices)
        output.answer(to_plain(cluster), *_NOT_MEASURED, to_yaml(cluster))
    else:
        cluster = read_document(Cluster, file)
        output.answer(to_plain(cluster), *_tables(cluster))
    return ExitStatus.OK


def catalogue(wanted: str, output: Output) -> ExitStatus:
    """Show the types whose names contain `wanted`, whatever its case and punctuation.

    Raises:
        UserError: there are none.
    """
    entries = [entry for entry in CATALOGUE.values() if _letters(wanted) in _letters(entry.name)]
    if not entries:
        raise UserError(f"no type of the catalogue has {wanted!r} in its name; {catalogue_hint(wanted)}")
    output.answer({"types": [_entry_json(entry) for entry in entries]}, *_catalogue_table(entries))
    return ExitStatus.OK


def cluster_of(devices: Sequence[AgentDevice]) -> Cluster:
    """The cluster of one node with these devices; the link is what joins them, whether stages use it or not.

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


def _letters(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


def _entry_json(entry: CatalogueEntry) -> dict[str, Any]:
    values = asdict(entry)
    del values["reported_as"]
    return values


def _catalogue_table(entries: Sequence[CatalogueEntry]) -> list[str]:
    sources = {source: number for number, source in enumerate(dict.fromkeys(entry.source for entry in entries), 1)}
    rows = [["type", "GiB", "fp32", "tf32", "bf16", "fp16", "GB/s", "link", "GB/s each way", "source"]]
    for entry in entries:
        peaks = (
            entry.fp32_flops_per_second,
            entry.tf32_flops_per_second,
            entry.bf16_flops_per_second,
            entry.fp16_flops_per_second,
        )
        rows.append(
            [
                entry.name,
                str(entry.memory_bytes // _GIB),
                *(f"{peak / 1e12:.5g}" if peak is not None else "-" for peak in peaks),
                f"{entry.memory_bytes_per_second / 1e9:.5g}",
                entry.link.name,
                f"{entry.link.bytes_per_second / 1e9:.4g}",
                str(sources[entry.source]),
            ]
        )
    notes = [
        "peaks in TFLOP/s, dense, sums in fp32; -: not in hardware, or no faster than fp32",
        *(f"source {number}: {source}" for source, number in sources.items()),
    ]
    return [*columns(rows), "", *notes]
