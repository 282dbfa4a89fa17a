"""Links between processes over torch.distributed's gloo, on one TCP connection per direction.

Each cut of a pipeline has two process groups of two ranks, one for forward and one for backward traffic, made directly,
so that nothing of `torch.distributed`'s global state is touched and the user's model may do with that as it likes. The
stages of a virtual worker find each other through a small key-value store that its stage 0 serves.

A wait that times out in gloo breaks its connection, so no caller ever waits in gloo: see `gloo_halves`. After a
`DeadlineExceeded` a link is as good as before. A neighbour that loses power without closing its connections shows as
`DeadlineExceeded`, one whose process dies as `LinkClosed`, within a second or so.
"""

from __future__ import annotations

import atexit
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import DeadlineExceeded, PeerUnreachable, Unavailable, UserError
from hetpipe.link.gloo_halves import Connection, GlooReceiver, GlooSender, PairGroup
from hetpipe.link.inbox import Ends, Inbox, closed_by
from hetpipe.link.policy import Frame, Link, LinkLimits
from hetpipe.spec.run import LinkTime

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


def serve_rendezvous(host: str) -> tuple[TCPStore, str]:
    """Serve the store through which the stages of one virtual worker find each other, on any free port of `host`.

    It listens on that address alone and lives as long as the returned store; keep it until every stage is connected.

    Returns:
        The store, and its `HOST:PORT` for `connect_rendezvous`.

    Raises:
        UserError: `host` is no address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=128)
    except OSError as error:
        raise UserError(f"cannot listen on {host} ({error}); give an address of this machine") from error
    port = int(listener.getsockname()[1])
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
                    f"no answer for {elapsed:.1f} s from {address}, where the first stage of this virtual worker "
                    f"should serve the rendezvous ({error})"
                ) from error
        clock.sleep(_RETRY_SECONDS)


def connect_gloo(
    store: Store,
    *,
    vw: int,
    stage: int,
    num_stages: int,
    host: str,
    deadline_seconds: float,
    limits: LinkLimits | None = None,
    paces: tuple[LinkTime | None, LinkTime | None] = (None, None),
) -> tuple[Link | None, Link | None]:
    """Connect `stage` with its neighbours; every stage of the virtual worker calls this with the same `store`.

    Args:
        store: the rendezvous, one per incarnation of a virtual worker.
        vw: index of the virtual worker.
        stage: own index, 0 … num_stages - 1.
        num_stages: K.
        host: own address, under which the neighbours reach this process.
        deadline_seconds: for each neighbour to appear.
        limits: bounds of each link.
        paces: emulated times of what is sent upstream and downstream.

    Returns:
        The links upstream (None for the first stage) and downstream (None for the last).

    Raises:
        DeadlineExceeded: a neighbour did not appear in time.
        PeerUnreachable: the rendezvous or a neighbour went away meanwhile.
    """
    connector = _Connector(
        store,
        vw=vw,
        stage=stage,
        host=host,
        deadline_seconds=deadline_seconds,
        limits=limits or LinkLimits(),
    )
    upstream = connector.link(stage - 1, paces[0]) if stage > 0 else None
    try:
        downstream = connector.link(stage + 1, paces[1]) if stage < num_stages - 1 else None
    except BaseException:
        if upstream is not None:
            upstream.close()
        raise
    return upstream, downstream


class _Connector:
    """Makes the links of one stage. All share one gloo device, that is one thread that moves bytes."""

    def __init__(
        self,
        store: Store,
        *,
        vw: int,
        stage: int,
        host: str,
        deadline_seconds: float,
        limits: LinkLimits,
    ) -> None:
        self._store = store
        self._vw = vw
        self._stage = stage
        self._deadline_seconds = deadline_seconds
        self._limits = limits
        try:
            self._device = ProcessGroupGloo.create_device(hostname=host)
        except RuntimeError as error:
            raise UserError(f"cannot use the address {host} ({error}); give an address of this machine") from error

    def link(self, neighbour: int, pace: LinkTime | None) -> Link:
        """Connect with the stage `neighbour`, which must be calling this too."""
        ends = Ends(own=stage_name(self._vw, self._stage), peer=stage_name(self._vw, neighbour))
        upper = min(self._stage, neighbour)
        rank = self._stage - upper
        # Both sides make the groups in this order, so neither waits for the other in a circle.
        forward, backward = (
            Connection(self._group(f"vw-{self._vw}/cut-{upper}/{way}", rank, ends), rank=rank)
            for way in ("forward", "backward")
        )
        outgoing, incoming = (forward, backward) if rank == 0 else (backward, forward)
        return GlooLink(outgoing, incoming, ends=ends, limits=self._limits, pace=pace)

    def _group(self, name: str, rank: int, ends: Ends) -> PairGroup:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - the stub lacks it
        options._timeout = timedelta(seconds=self._deadline_seconds)  # noqa: SLF001 - so named in Python
        options._devices = [self._device]  # noqa: SLF001
        options._threads = 1  # noqa: SLF001 - they serve collectives only
        began = SYSTEM_CLOCK.monotonic()
        try:
            group = ProcessGroupGloo(PrefixStore(name, self._store), rank, 2, options)
        except RuntimeError as error:
            raise _failed_to_connect(error, ends, SYSTEM_CLOCK.monotonic() - began) from error
        return cast("PairGroup", group)


def _failed_to_connect(error: RuntimeError, ends: Ends, elapsed: float) -> Unavailable:
    text = str(error).split("\n", maxsplit=1)[0][:200]
    if isinstance(error, dist.DistStoreError) or "timed out" in text.lower():
        return DeadlineExceeded(f"{ends.own} waited {elapsed:.1f} s for {ends.peer} to connect ({text})")
    return PeerUnreachable(f"{ends.own} lost contact after waiting {elapsed:.1f} s for {ends.peer} ({text})")


def stage_name(vw: int, stage: int) -> str:
    """`stage 1 of virtual worker 0`, the form that all errors use."""
    return f"stage {stage} of virtual worker {vw}"
