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
    """`copies`: measure copies between host memory and this node's devices instead of a link."""
    node: Name
    """Node of the process."""
    other: Name = ""
    """Node of the other end; the same for a link within a node."""
    transport: LinkKind = "gloo"
    job_id: Name = "links"
    """Job for which it is measured; with `number` it identifies both ends."""
    number: Count = 0
    """Number of the measurement among those for the job."""
    with_copies: bool = False
    """Measure copies to this node's devices, too, after the link."""
    port: Count = 0
    """Listening port of the role `await`; 0: any free port."""
    host: Name = "127.0.0.1"
    """Address at which the other end reaches this process."""
    address: Name = ""
    """Address of the other end, for the role `call`."""
    deadline_seconds: Seconds = 60.0
    """Timeout for the connection of the other end, and likewise for all messages together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAnswer:
    """Result of a `LinkOrder`."""

    link: LinkMeasurement | None = None
    copies: tuple[CopyMeasurement, ...] = ()
