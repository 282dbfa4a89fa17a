"""Measurements of links: between two processes, and between host memory and a device.

Both follow the model of a cluster file's links: b bytes take the latency plus b over the bytes per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Literal

from pydantic import Field

from hetpipe.values import wire
from hetpipe.values.bounds import MAX_COUNT, MAX_LISTED, Count, Name, Seconds
from hetpipe.values.policies import LinkKind

#: Incremented when measurements of older versions must not be used any more.
_METHOD = 1

#: How long a measurement is valid: networks are reconfigured and gain traffic without notice.
VALID_SECONDS = 7 * 24 * 3600.0

#: How a copy was made: to and from a CUDA device or, where host memory is the device's memory, within it.
CopyMethod = Literal["cuda", "memcpy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpeed:
    """Transfer-time model fitted to two sizes. The slower of the two directions counts, as links are symmetric."""

    latency_seconds: Seconds
    """Half the median round-trip time of `small_bytes`."""
    bytes_per_second: Annotated[float, Field(gt=0.0, lt=MAX_COUNT)]
    """`large_bytes` over their median time in excess of a small round trip."""
    small_bytes: Count
    large_bytes: Count
    repeats: Count
    """Minimum number of samples per median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """The link between processes of two nodes, or within one named twice, measured with frames as stages send them."""

    between: tuple[Name, Name]
    transport: LinkKind
    speed: TransferSpeed
    measured_at: Seconds
    """Seconds since 1970-01-01 UTC."""
    versions: tuple[Name, ...]
    """Versions of hetpipe and torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyMeasurement:
    """Copies between host memory and the devices of one type on a node, in pageable memory."""

    node: Name
    device_type: Name
    method: CopyMethod
    speed: TransferSpeed
    measured_at: Seconds
    """Seconds since 1970-01-01 UTC."""
    versions: tuple[Name, ...]
    """Versions of hetpipe and torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """All known measurements of the links of some nodes; the content of the cache."""

    links: Annotated[tuple[LinkMeasurement, ...], Field(max_length=MAX_LISTED)] = ()
    copies: Annotated[tuple[CopyMeasurement, ...], Field(max_length=MAX_LISTED)] = ()

    def __bool__(self) -> bool:
        """Whether there are any measurements."""
        return bool(self.links or self.copies)

    def of(self, node: str) -> MeasuredLinks:
        """The measurements of links that end at `node`, and of its own devices."""
        return MeasuredLinks(
            links=tuple(link for link in self.links if node in link.between),
            copies=tuple(copy for copy in self.copies if copy.node == node),
        )

    def is_of(self, node: str) -> bool:
        """Whether all measurements are of links that end at `node`, or of its own devices."""
        return self.of(node) == self


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksProgress:
    """Progress of measuring a cluster's links."""

    done: int
    """Links that were measured or skipped."""
    total: int
    """Links without a measurement at the start."""
    awaited: str = ""
    """The process being waited for, and why; empty at the end."""
    remark: str = ""
    """Links that were not measured, with the reasons; empty if none."""

    @property
    def is_over(self) -> bool:
        """Whether the measurement is complete."""
        return not self.awaited


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksFingerprint:
    """Cache key: measurements with equal fingerprints are interchangeable while they are valid."""

    nodes: tuple[Name, ...]
    """Nodes measured together, in any order."""
    transport: LinkKind
    processor: Name
    """The CPU model, which computes checksums and copies."""
    devices: tuple[Name, ...]
    """Names reported by the devices."""
    versions: tuple[Name, ...]
    """Versions of hetpipe and torch."""
    method: int = _METHOD

    @property
    def key(self) -> str:
        """A file name."""
        ordered = [sorted(self.nodes), self.transport, self.processor, sorted(self.devices), self.versions, self.method]
        return sha256(wire.to_json(list, ordered).encode()).hexdigest()[:32]


def is_valid(measured_at: float, *, now: float) -> bool:
    """Whether a measurement made at `measured_at` may still be used; one from the future may not, as a clock was wrong.

    >>> is_valid(0.0, now=VALID_SECONDS), is_valid(0.0, now=VALID_SECONDS + 1), is_valid(2.0, now=1.0)
    (True, False, False)
    """
    return 0.0 <= now - measured_at <= VALID_SECONDS


def still_valid(measured: MeasuredLinks, *, now: float) -> MeasuredLinks:
    """The measurements that are valid at `now`, in seconds since 1970-01-01 UTC."""
    return MeasuredLinks(
        links=tuple(link for link in measured.links if is_valid(link.measured_at, now=now)),
        copies=tuple(copy for copy in measured.copies if is_valid(copy.measured_at, now=now)),
    )


def merged(known: MeasuredLinks, newer: MeasuredLinks) -> MeasuredLinks:
    """Merge two sets; for the same link, or copies to devices of the same type, the newer measurement is kept."""
    pairs = {frozenset(link.between) for link in newer.links}
    devices = {(copy.node, copy.device_type) for copy in newer.copies}
    links = tuple(link for link in known.links if frozenset(link.between) not in pairs)
    copies = tuple(copy for copy in known.copies if (copy.node, copy.device_type) not in devices)
    return MeasuredLinks(links=(*links, *newer.links), copies=(*copies, *newer.copies))
