"""The kinds of links by name: functions to accept the next stage and to connect to the previous one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from hetpipe.link.cut import Cut, CutListener
from hetpipe.link.gloo import GlooListener, call_gloo
from hetpipe.link.policy import Link
from hetpipe.link.stream_link import StreamListener, call_stream
from hetpipe.values.policies import LinkKind
from hetpipe.wire.tls import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkNetwork:
    """Network settings of a stage."""

    host: str
    """Own address, at which the neighbour reaches this process."""
    port: int = 0
    """Port on which it accepts the next stage; 0 lets the system choose."""
    tls: Tls | None = None
    """Own certificates, for encrypted links; None: plaintext."""


def listen(kind: LinkKind, cut: Cut, footing: LinkNetwork) -> CutListener:
    """Open the port for the next stage.

    Raises:
        PortInUse: the port is in use.
        UserError: the host is not an address of this machine.
    """
    match kind:
        case "gloo":
            return GlooListener(cut, host=footing.host, port=footing.port)
        case "grpc" | "shared_memory":
            offers = kind == "shared_memory"
            return StreamListener(cut, host=footing.host, port=footing.port, tls=footing.tls, offers_memory=offers)
        case _:
            assert_never(kind)


def call(
    kind: LinkKind,
    cut: Cut,
    address: str,
    footing: LinkNetwork,
    *,
    deadline_seconds: float,
    may_fall_back: bool = True,
) -> Link:
    """Connect to the previous stage at `address`.

    Args:
        kind: as at its listener.
        cut: to it.
        address: of its listener.
        footing: this stage's.
        deadline_seconds: for it to answer.
        may_fall_back: gRPC may take the place of memory that cannot be shared.

    Raises:
        HetpipeError: it is unreachable, refuses, or is another process.
    """
    match kind:
        case "gloo":
            return call_gloo(cut, address, host=footing.host, deadline_seconds=deadline_seconds)
        case "grpc" | "shared_memory":
            return call_stream(
                cut, address, tls=footing.tls, deadline_seconds=deadline_seconds, needs_memory=not may_fall_back
            )
        case _:
            assert_never(kind)
