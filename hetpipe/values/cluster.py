"""The cluster: its devices and the links between them; a public file format (`docs/files.md`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isclose
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from hetpipe.values.catalogue import CATALOGUE, catalogue_hint, memory_text, type_of_device_name
from hetpipe.values.document import Document, Section, entries, mapping
from hetpipe.values.ids import DeviceId
from hetpipe.values.problems import Problem, shown
from hetpipe.values.suggest import did_you_mean

_MIB = 1 << 20
_GIB = 1 << 30

#: Plausibility bounds: a figure beyond them was given in another unit, as no device has less memory and no link is as
#: slow.
_LEAST_MEMORY_BYTES = _MIB
LEAST_BANDWIDTH = 1e5
_LEAST_PEAK_FLOPS = 1e8
LONGEST_LATENCY_SECONDS = 1.0

#: Below this value a figure is read as given in the larger of two possible units.
_THOUSAND = 1024
_HUNDRED_PERCENT = 100.0
_MOST_TERAFLOPS = 2500.0

#: Data sheets state the peak with 2:4 sparsity, too, which is twice the dense peak.
_SPARSE_FACTOR = 2.0


def _in_bytes(memory: int) -> int:
    if memory < _LEAST_MEMORY_BYTES:
        unit, factor = ("GiB", _GIB) if memory < _THOUSAND else ("MiB", _MIB)
        raise ValueError(f"is {memory} bytes; for {memory} {unit} write {memory * factor}")
    return memory


def _in_bytes_per_second(bandwidth: float) -> float:
    if bandwidth < LEAST_BANDWIDTH:
        prefix, factor = ("giga", 1e9) if bandwidth < _THOUSAND else ("mega", 1e6)
        raise ValueError(
            f"is {bandwidth:g} bytes per second; for {prefix}bytes write {bandwidth * factor:.6g}, for "
            f"{prefix}bits {bandwidth * factor / 8:.6g}"
        )
    return bandwidth


def _in_seconds(latency: float) -> float:
    if latency >= LONGEST_LATENCY_SECONDS:
        raise ValueError(
            f"is {latency:g} seconds; for microseconds write {latency / 1e6:.6g}, for milliseconds {latency / 1e3:.6g}"
        )
    return latency


def _a_share(efficiency: float) -> float:
    if efficiency > 1.0:
        percent = f"; for {efficiency:g} % write {efficiency / 100:.6g}"
        raise ValueError(
            f"is {efficiency:g}, but a share is at most 1{percent if efficiency <= _HUNDRED_PERCENT else ''}"
        )
    return efficiency


def _in_flops(peak: float) -> float:
    if peak < _LEAST_PEAK_FLOPS:
        prefix, factor = ("tera", 1e12) if peak < _MOST_TERAFLOPS else ("giga", 1e9)
        raise ValueError(f"is {peak:g} operations per second; for {prefix}FLOP/s write {peak * factor:.6g}")
    return peak


def _without_default(schema: dict[str, Any]) -> None:
    """The default comes from the catalogue; null is a placeholder for it."""
    del schema["default"]


class DeviceType(Section):
    """A device type."""

    memory_bytes: Annotated[int, Field(ge=1), AfterValidator(_in_bytes)] = Field(
        default=None, validate_default=True, json_schema_extra=_without_default
    )
    """Memory of one device; defaults to the catalogue's value for the type."""
    peak_flops: Annotated[float, Field(gt=0), AfterValidator(_in_flops)] | None = None
    """Peak floating-point operations per second of one device in the format the model computes in, without sparsity; a
    multiply-add counts as two. The basis of utilisation (MFU). Null: the catalogue's value for the dtype of the model's
    parameters; for a type that is not in the catalogue no MFU is reported.
    """


class LinkSpec(Section):
    """A link, the same in both directions."""

    bandwidth_bytes_per_second: Annotated[float, Field(gt=0), AfterValidator(_in_bytes_per_second)]
    """In each direction."""
    latency_seconds: Annotated[float, Field(ge=0), AfterValidator(_in_seconds)] = 0.0
    """From the first byte sent to the first byte received."""
    efficiency: Annotated[float, Field(gt=0), AfterValidator(_a_share)] = 1.0
    """The fraction of the bandwidth that transfers achieve."""

    @property
    def effective_bytes_per_second(self) -> float:
        """Bandwidth times efficiency."""
        return self.bandwidth_bytes_per_second * self.efficiency

    def transfer_ms(self, num_bytes: int) -> float:
        """Milliseconds to transfer `num_bytes`: 1000·(latency + bytes / (bandwidth·efficiency))."""
        return 1000.0 * (self.latency_seconds + num_bytes / self.effective_bytes_per_second)


class LinkOverride(LinkSpec):
    """The link between two given nodes, or within one node named twice."""

    between: tuple[str, str]
    """Two node names."""


class Links(Section):
    """All links of a cluster."""

    intra_node: LinkSpec
    """Between two devices of one node (its PCIe root or NVLink)."""
    inter_node: LinkSpec
    """Between two nodes (their network cards)."""
    overrides: tuple[LinkOverride, ...] = ()
    """Links that differ from these two."""


class Node(Section):
    """One machine."""

    name: str
    """Prefix of the names of its devices."""
    devices: tuple[str, ...]
    """The type of each device; the device at position i is called `NAME/i`."""

    @field_validator("name")
    @classmethod
    def _usable(cls, name: str) -> str:
        if not name or "/" in name or name != name.strip():
            raise ValueError(f"begins device names, so it has no slash and no blanks around it, unlike {shown(name)}")
        return name


class Cluster(Document):
    """Nodes, their devices and the links between them."""

    version: Literal[1] = 1
    """Of the format."""
    device_types: dict[str, DeviceType]
    """Device types by name."""
    nodes: tuple[Node, ...]
    """The nodes."""
    links: Links
    """The links between devices."""

    @field_validator("device_types", mode="before")
    @classmethod
    def _from_catalogue(cls, types: object) -> object:
        """Fill in the catalogue's memory for types that give none."""
        if not isinstance(types, Mapping):
            return types
        return {name: _with_memory(name, given) for name, given in types.items()}

    @classmethod
    def contradictions(cls, value: Mapping[str, Any]) -> Iterator[Problem]:
        """Unknown types and nodes, duplicate names and links, memory that contradicts the catalogue."""
        types = value.get("device_types")
        nodes = [mapping(node) for node in entries(value.get("nodes"))]
        for name, given in mapping(types).items():
            yield from _memory_problems(name, given)
            yield from _peak_problems(name, given)
        yield from _node_problems(nodes)
        if isinstance(types, Mapping):
            yield from _type_problems(nodes, types)
        yield from _override_problems(value, {str(node.get("name")) for node in nodes})

    @property
    def devices(self) -> dict[DeviceId, str]:
        """Device name → type, in the order of the file."""
        return {
            DeviceId(f"{node.name}/{index}"): kind for node in self.nodes for index, kind in enumerate(node.devices)
        }

    def link(self, node: str, other: str) -> LinkSpec:
        """The link between two nodes, or within one (`node == other`)."""
        pair = {node, other}
        for override in self.links.overrides:
            if set(override.between) == pair:
                return override
        return self.links.intra_node if node == other else self.links.inter_node

    def network_card(self, node: str) -> float:
        """Bytes per second, in each direction, from `node` to all others together: its fastest link to another node."""
        others = [other.name for other in self.nodes if other.name != node]
        speeds = [self.link(node, other).effective_bytes_per_second for other in others]
        return max(speeds, default=self.links.inter_node.effective_bytes_per_second)


def node_of(device: DeviceId) -> str:
    """`n0/3` → `n0`."""
    return device.rpartition("/")[0]


def _with_memory(name: object, given: object) -> object:
    known = type_of_device_name(str(name))
    fields = {} if given is None else given
    if known is None or not isinstance(fields, Mapping):
        return fields
    return {"memory_bytes": CATALOGUE[known].memory_bytes, **fields}


def _memory_problems(name: str, given: object) -> Iterator[Problem]:
    path = ("device_types", name, "memory_bytes")
    known = type_of_device_name(name)
    memory = mapping(given).get("memory_bytes")
    if known is None:
        if (given is None or isinstance(given, Mapping)) and "memory_bytes" not in mapping(given):
            yield Problem(path, f"is missing, and {name} is not in the catalogue ({catalogue_hint(name)}); add it")
        return
    true = CATALOGUE[known].memory_bytes
    if memory == true // _GIB * 10**9:
        yield Problem(path, f"is {memory}, counting in GB; the catalogue has {memory_text(true)}")


def _peak_problems(name: str, given: object) -> Iterator[Problem]:
    known = type_of_device_name(name)
    peak = mapping(given).get("peak_flops")
    if known is None or not isinstance(peak, int | float):
        return
    dense = max(CATALOGUE[known].peak_flops(dtype) for dtype in ("float32", "bfloat16", "float16"))
    if isclose(peak, _SPARSE_FACTOR * dense, rel_tol=0.01):
        yield Problem(
            ("device_types", name, "peak_flops"),
            f"is {peak:g}, which includes sparsity: the catalogue's dense peak is {dense:g}; write {dense:g}, "
            "or the peak of the format that the model computes in",
        )


def _node_problems(nodes: list[Mapping[str, Any]]) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index, name in enumerate(node.get("name") for node in nodes):
        if isinstance(name, str) and first.setdefault(name, index) != index:
            yield Problem(("nodes", index, "name"), f"is {shown(name)}, as that of nodes[{first[name]}]; rename one")
    if not any(node.get("devices") for node in nodes):
        yield Problem(("nodes",), "have no devices; give at least one")


def _type_problems(nodes: list[Mapping[str, Any]], types: Mapping[str, Any]) -> Iterator[Problem]:
    for index, node in enumerate(nodes):
        for position, kind in enumerate(entries(node.get("devices"))):
            if isinstance(kind, str) and kind not in types:
                yield Problem(
                    ("nodes", index, "devices", position),
                    f"is of type {shown(kind)}, which is not in device_types; {did_you_mean(kind, types)}",
                )


def _override_problems(cluster: Mapping[str, Any], nodes: set[str]) -> Iterator[Problem]:
    seen: dict[frozenset[str], int] = {}
    for index, override in enumerate(entries(mapping(cluster.get("links")).get("overrides"))):
        path = ("links", "overrides", index, "between")
        match mapping(override).get("between"):
            case (str(node), str(other)):
                first = seen.setdefault(frozenset((node, other)), index)
            case _:
                continue
        for position, name in enumerate((node, other)):
            if name not in nodes:
                yield Problem((*path, position), f"is {shown(name)}, which is not a node; {did_you_mean(name, nodes)}")
        if first != index:
            yield Problem(path, f"duplicates the link of overrides[{first}]; remove one")
