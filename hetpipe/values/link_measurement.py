"""What was measured of links: between two processes, and between host memory and a device.

Both follow the same law as a link of a cluster file: b bytes take the latency plus b over the bytes per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Literal

from pydantic import Field

from hetpipe.values import wire
from hetpipe.values.bounds import MAX_COUNT, MAX_LISTED, Count, Name, Seconds
from hetpipe.values.policies import LinkKind

#: Changes when measurements of older versions must not be used any more.
_METHOD = 1

#: How long a measurement is used: networks are rebuilt, and neighbours move in, without telling anybody.
VALID_SECONDS = 7 * 24 * 3600.0

#: How a copy was made: to and from a CUDA device, or, where host memory is the device's memory, from there to there.
CopyMethod = Literal["cuda", "memcpy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpeed:
    """The law of a transfer, fitted to two sizes. Of two directions the slower one: links are the same both ways."""

    latency_seconds: Seconds
    """Half the median round trip of `small_bytes` there and back."""
    bytes_per_second: Annotated[float, Field(gt=0.0, lt=MAX_COUNT)]
    """`large_bytes` over the median of what they took beyond a small round trip."""
    small_bytes: Count
    large_bytes: Count
    repeats: Count
    """Samples of each median, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """The link between processes of two nodes, or of one node named twice, under the frames that stages exchange."""

    between: tuple[Name, Name]
    transport: LinkKind
    speed: TransferSpeed
    measured_at: Seconds
    """Seconds since 1970-01-01 UTC."""
    versions: tuple[Name, ...]
    """Of hetpipe and torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyMeasurement:
    """Copies between host memory and the devices of one type on a node, in memory that is not page-locked."""

    node: Name
    device_type: Name
    method: CopyMethod
    speed: TransferSpeed
    measured_at: Seconds
    """Seconds since 1970-01-01 UTC."""
    versions: tuple[Name, ...]
    """Of hetpipe and torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """Everything that is known of the links of some nodes; what lies in the cache."""

    links: Annotated[tuple[LinkMeasurement, ...], Field(max_length=MAX_LISTED)] = ()
    copies: Annotated[tuple[CopyMeasurement, ...], Field(max_length=MAX_LISTED)] = ()

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self.links or self.copies)

    def of(self, node: str) -> MeasuredLinks:
        """The part that is of links that `node` is an end of, and of its own devices."""
        return MeasuredLinks(
            links=tuple(link for link in self.links if node in link.between),
            copies=tuple(copy for copy in self.copies if copy.node == node),
        )

    def is_of(self, node: str) -> bool:
        """Whether all of it is of links that `node` is an end of, and of its own devices."""
        return self.of(node) == self


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksProgress:
    """How far the measurement of a cluster's links is."""

    done: int
    """Links that were measured or skipped."""
    total: int
    """Links that nobody knew when it began."""
    awaited: str = ""
    """Who is waited for, and for what; empty once it is over."""
    remark: str = ""
    """Which links were not measured and why; empty if none."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to measure."""
        return not self.awaited


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksFingerprint:
    """Measurements with equal fingerprints may stand for each other, as long as they are valid."""

    nodes: tuple[Name, ...]
    """Measured together; the order means nothing."""
    transport: LinkKind
    processor: Name
    """What computes checksums and copies: the model of the CPU."""
    devices: tuple[Name, ...]
    """What the devices call themselves."""
    versions: tuple[Name, ...]
    """Of hetpipe and torch."""
    method: int = _METHOD

    @property
    def key(self) -> str:
        """A name for a file."""
        ordered = [sorted(self.nodes), self.transport, self.processor, sorted(self.devices), self.versions, self.method]
        return sha256(wire.to_json(list, ordered).encode()).hexdigest()[:32]


def is_valid(measured_at: float, *, now: float) -> bool:
    """Whether a measurement of then may still be used; one of the future may not, for some clock was wrong.

    >>> is_valid(0.0, now=VALID_SECONDS), is_valid(0.0, now=VALID_SECONDS + 1), is_valid(2.0, now=1.0)
    (True, False, False)
    """
    return 0.0 <= now - measured_at <= VALID_SECONDS


def still_valid(measured: MeasuredLinks, *, now: float) -> MeasuredLinks:
    """What may be used of it at `now`, in seconds since 1970-01-01 UTC."""
    return MeasuredLinks(
        links=tuple(link for link in measured.links if is_valid(link.measured_at, now=now)),
        copies=tuple(copy for copy in measured.copies if is_valid(copy.measured_at, now=now)),
    )


def merged(known: MeasuredLinks, newer: MeasuredLinks) -> MeasuredLinks:
    """Both; of one link, or of copies to devices of one type, the newer measurement counts."""
    pairs = {frozenset(link.between) for link in newer.links}
    devices = {(copy.node, copy.device_type) for copy in newer.copies}
    links = tuple(link for link in known.links if frozenset(link.between) not in pairs)
    copies = tuple(copy for copy in known.copies if (copy.node, copy.device_type) not in devices)
    return MeasuredLinks(links=(*links, *newer.links), copies=(*copies, *newer.copies))
