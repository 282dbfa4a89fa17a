"""Links between processes over one gRPC stream per cut, with TLS where the network is not to be trusted.

The earlier stage serves, the later one connects (`hetpipe.rpc.link_server`, `hetpipe.rpc.link_client`). Both say who
they are and how many frames they have room for; then frames flow both ways as far as there is credit for them, so that
neither side ever stops reading. A neighbour that loses power shows as `LinkClosed` within the time of a keepalive, one
whose process dies at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.link.cut import Cut
from hetpipe.link.grpc_halves import GrpcReceiver, GrpcSender
from hetpipe.link.inbox import Ends, Inbox, closed_by
from hetpipe.link.policy import Frame, Link, LinkLimits
from hetpipe.rpc.link_client import connect_link
from hetpipe.rpc.link_server import LinkServer
from hetpipe.rpc.link_stream import LinkStream
from hetpipe.rpc.tls import Tls
from hetpipe.values.requests import LinkHello
from hetpipe.values.run import LinkTime

#: Links that are not closed.
_open_links: set[GrpcLink] = set()


def _close_open_links() -> None:
    for link in list(_open_links):
        link.close()


# At the end of the main thread, before the thread pools are waited for, which a link's server may be part of: `atexit`
# would be too late.
threading._register_atexit(_close_open_links)  # type: ignore[attr-defined]  # noqa: SLF001 - has no public name


class GrpcLink:
    """One end of a link over a stream; see `Link` for the guarantees.

    `close` ends its thread and those of gRPC; a link that is still open when the main thread ends is closed then.
    """

    def __init__(
        self,
        stream: LinkStream,
        *,
        ends: Ends,
        limits: LinkLimits,
        pace: LinkTime | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Take over `stream`, which was opened with the room of `limits`."""
        self._stream = stream
        self._ends = ends
        self._limits = limits
        self._clock = clock
        self._inbox = Inbox(limits.incoming_frames, ends=ends, clock=clock)
        credit = stream.peer.room
        self._sender = GrpcSender(self._inbox, credit=credit, ends=ends, limits=limits, pace=pace, clock=clock)
        self._receiver = GrpcReceiver(stream, self._inbox, self._sender, ends=ends, limits=limits)
        self._closing = threading.Lock()
        self._closed = False
        stream.send(self._sender.messages())
        self._receiver.start()
        _open_links.add(self)

    @property
    def own(self) -> str:
        """Who holds this end."""
        return self._ends.own

    @property
    def peer(self) -> str:
        """Who holds the other end."""
        return self._ends.peer

    def send(self, frame: Frame, *, deadline_seconds: float) -> None:
        """See `Link.send`."""
        self._sender.send(frame, deadline_seconds=deadline_seconds)

    def receive(self, *, timeout_seconds: float, awaiting: str = "a frame") -> Frame:
        """See `Link.receive`."""
        frame = self._inbox.take(timeout_seconds=timeout_seconds, awaiting=awaiting)
        self._sender.taken()
        return frame

    def try_receive(self) -> Frame | None:
        """See `Link.try_receive`."""
        frame = self._inbox.try_take()
        if frame is not None:
            self._sender.taken()
        return frame

    def watch(self, callback: Callable[[], None]) -> None:
        """See `Link.watch`."""
        self._inbox.watch(callback)

    def close(self) -> None:
        """See `Link.close`."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            began = self._clock.monotonic()
            self._inbox.end(closed_by(self.own, other=self.peer), drop=True)
            if self._sender.say_goodbye(self._limits.close_seconds):
                # The other end answers by ending its stream: then it has everything.
                left = self._limits.close_seconds - (self._clock.monotonic() - began)
                self._receiver.join(max(0.0, left))
            self._sender.stop()
            self._stream.close()
            self._receiver.join(self._limits.close_seconds)
            _open_links.discard(self)


class GrpcDoor:
    """Where the earlier stage of a cut awaits the later one; see `Door`."""

    def __init__(self, cut: Cut, *, host: str, port: int = 0, tls: Tls | None = None) -> None:
        """Listen.

        Args:
            cut: to the next stage.
            host: own address, under which the neighbour reaches this process.
            port: 0 lets the system choose.
            tls: who this stage is; None: plaintext.

        Raises:
            PortInUse: the port is taken.
            UserError: `host` is no address of this machine.
        """
        self._cut = cut
        hello = LinkHello(cut.own, cut.limits.incoming_frames)
        self._server = LinkServer(host, port, hello=hello, neighbour=cut.neighbour, tls=tls)
        self._accepted = False
        self.address = self._server.start()

    def accept(self, *, deadline_seconds: float) -> Link:
        """See `Door.accept`."""
        stream = self._server.accept(deadline_seconds=deadline_seconds)
        self._accepted = True
        return GrpcLink(stream, ends=self._cut.ends, limits=self._cut.limits, pace=self._cut.pace)

    def close(self) -> None:
        """See `Door.close`: from `accept` on, the link owns the server."""
        if not self._accepted:
            self._server.close()


def call_grpc(cut: Cut, address: str, *, tls: Tls | None, deadline_seconds: float) -> Link:
    """Connect with the previous stage, which awaits this one at `address`.

    Raises:
        PeerUnreachable: it is not there.
        HetpipeError: it refused, or is somebody else.
    """
    stream = connect_link(
        address,
        hello=LinkHello(cut.own, cut.limits.incoming_frames),
        neighbour=cut.neighbour,
        tls=tls,
        deadline_seconds=deadline_seconds,
    )
    return GrpcLink(stream, ends=cut.ends, limits=cut.limits, pace=cut.pace)
