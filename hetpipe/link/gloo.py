"""Links between processes over torch.distributed's gloo, on one TCP connection per direction.

Each cut of a pipeline has two process groups of two ranks, one for forward and one for backward traffic, made directly,
so that nothing of `torch.distributed`'s global state is touched and the user's model may do with that as it likes. The
two stages find each other through a small key-value store that the earlier one serves. Nothing is encrypted.

A wait that times out in gloo breaks its connection, so no caller ever waits in gloo: see `gloo_halves`. After a
`DeadlineExceeded` a link is as good as before. A neighbour that loses power without closing its connections shows as
`DeadlineExceeded`, one whose process dies as `LinkClosed`, within a second or so.
"""

from __future__ import annotations

import atexit
import errno
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import DeadlineExceeded, PeerUnreachable, PortInUse, Unavailable, UserError
from hetpipe.link.cut import Cut
from hetpipe.link.gloo_halves import Connection, GlooReceiver, GlooSender, PairGroup
from hetpipe.link.inbox import Ends, Inbox, closed_by
from hetpipe.link.policy import Frame, Link, LinkLimits
from hetpipe.values.run import LinkTime

if TYPE_CHECKING:  # torch.distributed has these names, but only this module has their types
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore
else:
    from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

_RETRY_SECONDS = 0.05


class GlooLink:
    """One end of a link over two gloo connections; see `Link` for the guarantees.

    Two daemon threads belong to it. `close` ends them; a link that is still open when the interpreter exits is closed
    then.
    """

    def __init__(
        self,
        outgoing: Connection,
        incoming: Connection,
        *,
        ends: Ends,
        limits: LinkLimits,
        pace: LinkTime | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._ends = ends
        self._limits = limits
        self._inbox = Inbox(limits.incoming_frames, ends=ends, clock=clock)
        self._sender = GlooSender(outgoing, self._inbox, ends=ends, limits=limits, pace=pace, clock=clock)
        self._receiver = GlooReceiver(incoming, self._inbox, ends=ends, limits=limits, when_ended=self._sender.wake)
        self._closing = threading.Lock()
        self._closed = False
        self._sender.start()
        self._receiver.start()
        # A daemon thread that comes out of C++ while the interpreter shuts down can abort the process.
        atexit.register(self.close)

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
        return self._inbox.take(timeout_seconds=timeout_seconds, awaiting=awaiting)

    def try_receive(self) -> Frame | None:
        """See `Link.try_receive`."""
        return self._inbox.try_take()

    def watch(self, callback: Callable[[], None]) -> None:
        """See `Link.watch`."""
        self._inbox.watch(callback)

    def close(self) -> None:
        """See `Link.close`."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._inbox.end(closed_by(self.own, other=self.peer), drop=True)
            self._sender.wake()
            self._sender.say_goodbye(self._limits.close_seconds)
            self._sender.stop()
            self._receiver.stop()
            atexit.unregister(self.close)


def serve_rendezvous(host: str, port: int = 0) -> tuple[TCPStore, str]:
    """Serve a store through which processes find each other, on a port of `host`; 0 is any free one.

    It listens on that address alone and lives as long as the returned store; keep it until all are connected.

    Returns:
        The store, and its `HOST:PORT` for `connect_rendezvous`.

    Raises:
        PortInUse: the port is taken.
        UserError: `host` is no address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} of {host} is taken; choose others with --stage-port") from error
        raise UserError(f"cannot listen on {host} ({error}); give an address of this machine") from error
    chosen = int(listener.getsockname()[1])
    store = TCPStore(host, chosen, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"[{host}]:{chosen}" if ":" in host else f"{host}:{chosen}"


def connect_rendezvous(address: str, *, deadline_seconds: float = 30.0, clock: Clock = SYSTEM_CLOCK) -> TCPStore:
    """The store that `serve_rendezvous` serves at `address` (`HOST:PORT`).

    Raises:
        PeerUnreachable: nobody listens there within `deadline_seconds`.
        UserError: `address` is not `HOST:PORT`.
    """
    host, separator, port = address.rpartition(":")
    host = host.strip("[]")
    if not separator or not host or not port.isdecimal():
        raise UserError(f"{address!r} is not an address of the form HOST:PORT")
    began = clock.monotonic()
    # A plain connection first: the store's own retries end in a long native traceback on standard error.
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=deadline_seconds).close()
            timeout = timedelta(seconds=deadline_seconds)
            return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        except (OSError, RuntimeError) as error:
            elapsed = clock.monotonic() - began
            if elapsed + _RETRY_SECONDS >= deadline_seconds:
                raise PeerUnreachable(
                    f"no answer for {elapsed:.1f} s from {address}, where another stage should serve the rendezvous "
                    f"({error})"
                ) from error
        clock.sleep(_RETRY_SECONDS)


class GlooDoor:
    """Where the earlier stage of a cut awaits the later one; see `Door`."""

    def __init__(self, cut: Cut, *, host: str, port: int = 0) -> None:
        """Serve the rendezvous.

        Args:
            cut: to the next stage.
            host: own address, under which the neighbour reaches this process.
            port: of the rendezvous; the connections themselves take any free ones.

        Raises:
            PortInUse: the port is taken.
            UserError: `host` is no address of this machine.
        """
        self._cut = cut
        self._host = host
        self._store: TCPStore | None
        self._store, self.address = serve_rendezvous(host, port)

    def accept(self, *, deadline_seconds: float) -> Link:
        """See `Door.accept`."""
        assert self._store is not None, "the door is closed"
        link = connect_gloo(self._store, self._cut, host=self._host, deadline_seconds=deadline_seconds)
        self.close()
        return link

    def close(self) -> None:
        """See `Door.close`."""
        self._store = None


def call_gloo(cut: Cut, address: str, *, host: str, deadline_seconds: float) -> Link:
    """Connect with the previous stage, which awaits this one at `address`; `host` is this process's own.

    Raises:
        DeadlineExceeded: it is there, but did not take part in time.
        PeerUnreachable: it is not there, or went away meanwhile.
    """
    store = connect_rendezvous(address, deadline_seconds=deadline_seconds)
    return connect_gloo(store, cut, host=host, deadline_seconds=deadline_seconds)


def connect_gloo(store: Store, cut: Cut, *, host: str, deadline_seconds: float) -> Link:
    """Connect both stages of a cut; each calls this with the same store, which serves nothing else.

    Args:
        store: the rendezvous; it must live until both are connected.
        cut: as this stage sees it.
        host: own address, under which the neighbour reaches this process.
        deadline_seconds: for the neighbour to appear.

    Raises:
        DeadlineExceeded: the neighbour did not appear in time.
        PeerUnreachable: the rendezvous or the neighbour went away meanwhile.
        UserError: `host` is no address of this machine.
    """
    try:
        device = ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        raise UserError(f"cannot use the address {host} ({error}); give an address of this machine") from error
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - the stub lacks it
    options._timeout = timedelta(seconds=deadline_seconds)  # noqa: SLF001 - so named in Python
    options._devices = [device]  # noqa: SLF001
    options._threads = 1  # noqa: SLF001 - they serve collectives only
    rank = 0 if cut.own.stage < cut.neighbour.stage else 1
    # Both sides make the groups in this order, so neither waits for the other in a circle.
    forward, backward = (
        Connection(_group(PrefixStore(way, store), rank, options, cut.ends), rank=rank)
        for way in ("forward", "backward")
    )
    outgoing, incoming = (forward, backward) if rank == 0 else (backward, forward)
    return GlooLink(outgoing, incoming, ends=cut.ends, limits=cut.limits, pace=cut.pace)


def _group(store: Store, rank: int, options: Any, ends: Ends) -> PairGroup:
    began = SYSTEM_CLOCK.monotonic()
    try:
        group = ProcessGroupGloo(store, rank, 2, options)
    except RuntimeError as error:
        raise _failed_to_connect(error, ends, SYSTEM_CLOCK.monotonic() - began) from error
    return cast("PairGroup", group)


def _failed_to_connect(error: RuntimeError, ends: Ends, elapsed: float) -> Unavailable:
    text = str(error).split("\n", maxsplit=1)[0][:200]
    if isinstance(error, dist.DistStoreError) or "timed out" in text.lower():
        return DeadlineExceeded(f"{ends.own} waited {elapsed:.1f} s for {ends.peer} to connect ({text})")
    return PeerUnreachable(f"{ends.own} lost contact after waiting {elapsed:.1f} s for {ends.peer} ({text})")
