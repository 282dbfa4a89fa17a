"""Request and reply of a link-measuring process, as sent over its pipe. Without torch.

A link has two ends, one process each: the one with the role `await` listens, reports its address as `{"address":
"HOST:PORT"}`, measures, and replies with the result; the one with the role `call` connects to that address, echoes what
is requested, and reports no link. With TLS each end authenticates as the one named in the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetpipe.values.bounds import Count, Name, Seconds
from hetpipe.values.link_measurement import CopyMeasurement, LinkMeasurement
from hetpipe.values.policies import LinkKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOrder:
    """Request to measure a link."""

    role: Literal["await", "call", "copies"]
    """`copies`: no link, but between host memory and this node's devices."""
    node: Name
    """Where the process is."""
    other: Name = ""
    """Where the other end is; the same for a link within a node."""
    transport: LinkKind = "gloo"
    job_id: Name = "links"
    """For whose plan it is measured; with `number` it names both ends to each other."""
    number: Count = 0
    """Of the measurement, among those for the job."""
    with_copies: bool = False
    """Measure copies to this node's devices, too, after the link."""
    port: Count = 0
    """Where `await` awaits; 0: on any free port."""
    host: Name = "127.0.0.1"
    """Own address, under which the other end reaches this process."""
    address: Name = ""
    """Where the other end awaits this process, for `call`."""
    deadline_seconds: Seconds = 60.0
    """For the other end to come, and again for all messages together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAnswer:
    """Result of a `LinkOrder`."""

    link: LinkMeasurement | None = None
    copies: tuple[CopyMeasurement, ...] = ()
