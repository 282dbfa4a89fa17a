"""The kinds of links by name: how the earlier stage of a cut awaits the later one, and how that one comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from hetpipe.link.cut import Cut, Door
from hetpipe.link.gloo import GlooDoor, call_gloo
from hetpipe.link.grpc_link import GrpcDoor, call_grpc
from hetpipe.link.policy import Link
from hetpipe.values.policies import LinkKind
from hetpipe.wire.tls import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class Footing:
    """Where a stage stands in the network."""

    host: str
    """Own address, under which the neighbour reaches this process."""
    port: int = 0
    """On which it awaits the next stage; 0 lets the system choose."""
    tls: Tls | None = None
    """Who it is, for links that encrypt; None: plaintext."""


def open_door(kind: LinkKind, cut: Cut, footing: Footing) -> Door:
    """Await the next stage.

    Raises:
        PortInUse: the port is taken.
        UserError: the host is no address of this machine.
    """
    match kind:
        case "gloo":
            return GlooDoor(cut, host=footing.host, port=footing.port)
        case "grpc":
            return GrpcDoor(cut, host=footing.host, port=footing.port, tls=footing.tls)
        case _:
            assert_never(kind)


def call(kind: LinkKind, cut: Cut, address: str, footing: Footing, *, deadline_seconds: float) -> Link:
    """Connect with the previous stage, which awaits this one at `address`.

    Raises:
        HetpipeError: it is not there, refuses, or is somebody else.
    """
    match kind:
        case "gloo":
            return call_gloo(cut, address, host=footing.host, deadline_seconds=deadline_seconds)
        case "grpc":
            return call_grpc(cut, address, tls=footing.tls, deadline_seconds=deadline_seconds)
        case _:
            assert_never(kind)
