"""Links between processes over torch.distributed's gloo, on one TCP connection per direction.

Each cut of a pipeline has two process groups of two ranks, one for forward and one for backward traffic, made directly,
so that nothing of `torch.distributed`'s global state is touched and the user's model may use that freely. The two
stages find each other through a small key-value store that the earlier one serves. Nothing is encrypted.

A wait that times out in gloo breaks its connection, so no caller ever waits in gloo. After a `DeadlineExceeded` a link
remains usable. A power failure of the neighbour's machine, which leaves connections open, results in
`DeadlineExceeded`, the death of its process in `LinkClosed`, within a second or so.

A link has two halves, a sender and a receiver, each on a connection (a 2-rank process group) of its own. Properties of
gloo: data flows only once the receiver has posted a receive; a message may be shorter than the posted buffer; works do
not complete until a thread waits for them; and a wait that times out breaks the connection permanently. Therefore each
half has one background thread that waits without limit, and all other threads wait on conditions with deadlines.
`disconnect` ends such a thread by breaking the connection deliberately in the same way.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import re
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import DeadlineExceeded, MalformedFrame, PeerUnreachable, PortInUse, Unavailable, UserError
from hetpipe.link.cut import Cut
from hetpipe.link.frame_queue import Ends, FrameQueue, LinkClosure, closed_by, describe
from hetpipe.link.policy import Frame, Link, LinkLimits
from hetpipe.link.send_queue import SendQueue
from hetpipe.link.wire import (
    FIRST_MESSAGE_BYTES,
    CloseHeader,
    EncodedFrame,
    FrameHeader,
    TensorHeader,
    as_bytes,
    decode,
    encode,
    encode_close,
)
from hetpipe.values.run import LinkTime

if TYPE_CHECKING:  # torch.distributed has these names, but only this module has their types
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore
else:
    from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore


_TAG_FIRST = 0
_TAG_TENSOR = 1
#: A tag that is never sent.
_TAG_NEVER = 2

#: Timeout of the background threads, which block no caller: callers have deadlines of their own.
_FOREVER = timedelta(days=365)

#: After an error on one connection, how long to wait for a goodbye on the other before treating it as a crash.
_GOODBYE_GRACE_SECONDS = 0.5
_JOIN_SECONDS = 5.0


class PostedMessage(Protocol):
    """A posted message (`torch.distributed.Work`)."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until it is done; raises RuntimeError if the connection breaks."""
        ...


class PairGroup(Protocol):
    """The part of `torch.distributed.ProcessGroupGloo` that links use."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> PostedMessage:
        """Post a message."""
        ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> PostedMessage:
        """Post a buffer."""
        ...


class GlooChannel:
    """One process group of two ranks that carries frames in one direction. Thread-safe."""

    def __init__(self, group: PairGroup, *, rank: int) -> None:
        self._group: PairGroup | None = group
        self._peer_rank = 1 - rank

    def post_send(self, message: torch.Tensor, tag: int) -> PostedMessage:
        """Start sending; `message` must not change until the work is done.

        Raises:
            RuntimeError: the connection is broken.
        """
        return self._open().send([message], self._peer_rank, tag)

    def receive(self, buffer: torch.Tensor, tag: int) -> None:
        """Receive the next message with `tag` into `buffer`, without a timeout.

        Raises:
            RuntimeError: the connection broke.
        """
        self.post_receive(buffer, tag).wait(_FOREVER)

    def post_receive(self, buffer: torch.Tensor, tag: int) -> PostedMessage:
        """Start receiving into `buffer`, which must be at least as long as the message.

        Raises:
            RuntimeError: the connection is broken.
        """
        return self._open().recv([buffer], self._peer_rank, tag)

    def disconnect(self) -> None:
        """Break the connection immediately: all posted operations fail, here and at the other end."""
        with contextlib.suppress(RuntimeError):
            self.post_receive(torch.empty(1, dtype=torch.uint8), _TAG_NEVER).wait(timedelta(milliseconds=1))

    def free(self) -> None:
        """Release the group once no thread uses it any more."""
        self._group = None

    def _open(self) -> PairGroup:
        group = self._group
        if group is None:
            raise RuntimeError("this end is closed")
        return group


class GlooReceiver:
    """A thread that keeps a receive posted while its inbox has room, and puts complete frames there."""

    def __init__(
        self,
        connection: GlooChannel,
        inbox: FrameQueue,
        *,
        ends: Ends,
        limits: LinkLimits,
        when_ended: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._inbox = inbox
        self._ends = ends
        self._limits = limits
        #: Called on the thread after the inbox has ended.
        self._when_ended = when_ended
        self._buffer = bytearray(FIRST_MESSAGE_BYTES)
        self._message = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._thread = threading.Thread(
            target=self._run, name=f"link: {ends.own} receives from {ends.peer}", daemon=True
        )

    def start(self) -> None:
        """Start receiving."""
        self._thread.start()

    def stop(self) -> None:
        """Disconnect and wait for the thread."""
        self._connection.disconnect()
        self._thread.join(_JOIN_SECONDS)
        self._connection.free()

    def _run(self) -> None:
        try:
            while self._inbox.wait_room() and self._inbox.ending is None:
                if not self._receive_one():
                    return
        except MalformedFrame as error:
            sentence = f"{self._ends.peer} violated the format of the link: {error}"
            self._inbox.end(LinkClosure(sentence, orderly=False, violation=True))
            self._connection.disconnect()
        except RuntimeError as error:
            self._inbox.end(went_away(self._ends, error))
        finally:
            self._when_ended()

    def _receive_one(self) -> bool:
        """Receive one frame into the inbox; False if it was the goodbye."""
        self._connection.receive(self._message, _TAG_FIRST)
        header = decode(memoryview(self._buffer), self._limits)
        if isinstance(header, CloseHeader):
            self._inbox.end(closed_by(self._ends.peer, other=self._ends.own))
            return False
        self._inbox.put(header.frame(self._receive_tensors(header)))
        return True

    def _receive_tensors(self, header: FrameHeader) -> tuple[torch.Tensor | None, ...]:
        tensors: list[torch.Tensor | None] = []
        works: list[PostedMessage] = []
        for entry in header.tensors:
            if entry is None:
                tensors.append(None)
                continue
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
            tensors.append(tensor)
            if entry.offset is None:
                works.append(self._connection.post_receive(as_bytes(tensor), _TAG_TENSOR))
            else:
                self._copy_inside(tensor, entry, entry.offset)
        for work in works:
            work.wait(_FOREVER)
        return tuple(tensors)

    def _copy_inside(self, tensor: torch.Tensor, entry: TensorHeader, offset: int) -> None:
        num_bytes = entry.num_bytes
        if num_bytes:
            as_bytes(tensor).copy_(self._message[offset : offset + num_bytes])


class GlooSender:
    """Sends frames in a background thread, which encodes and posts them, waits for completion, and frees their tensors.

    So the stage continues to compute while its last result is encoded, and a send costs it no more than a queue's lock.
    """

    def __init__(
        self,
        connection: GlooChannel,
        inbox: FrameQueue,
        *,
        ends: Ends,
        limits: LinkLimits,
        pace: LinkTime | None,
        clock: Clock,
    ) -> None:
        self._connection = connection
        #: The link's ending is stored in the inbox: one place for both halves.
        self._inbox = inbox
        self._ends = ends
        self._queue = SendQueue(ends=ends, limits=limits, pace=pace, clock=clock)
        self._broken: LinkClosure | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"link: {ends.own} sends to {ends.peer}", daemon=True)

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def send(self, frame: Frame, *, deadline_seconds: float) -> None:
        """Queue `frame` for the background thread."""
        self._raise_if_ended(frame)
        if not self._queue.put(frame, deadline_seconds=deadline_seconds, has_ended=self._ended):
            self._raise_if_ended(frame)

    def wake(self) -> None:
        """Make a blocked `send` check the link's ending."""
        self._queue.wake()

    def say_goodbye(self, timeout_seconds: float) -> bool:
        """Send pending frames and the goodbye; False if that did not succeed in time."""
        return self._queue.say_goodbye(timeout_seconds, has_broken=lambda: self._broken is not None)

    def stop(self) -> None:
        """Disconnect and wait for the thread."""
        with self._queue.changed:
            self._stopped = True
            self._queue.changed.notify_all()
        self._connection.disconnect()
        self._thread.join(_JOIN_SECONDS)
        self._connection.free()

    def _ended(self) -> bool:
        return self._broken is not None or self._inbox.ending is not None

    def _raise_if_ended(self, frame: Frame) -> None:
        self._settle(self._broken)
        ending = self._inbox.ending
        if ending is not None:
            raise ending.error(f" before {self._ends.own} sent {describe(frame)}")

    def _run(self) -> None:
        frames, changed = self._queue.frames, self._queue.changed
        while True:
            with changed:
                changed.wait_for(lambda: frames or self._stopped)
                if not frames:
                    return
                frame = frames[0]
            if frame is not None:
                self._queue.hold_back(frame, lambda: self._stopped)
            broken = self._see_through(frame)
            del frame
            with changed:
                frames.popleft()
                if broken is not None:
                    frames.clear()
                    self._broken = broken
                changed.notify_all()
            if broken is not None:
                self._settle(broken)
                return

    def _see_through(self, frame: Frame | None) -> LinkClosure | None:
        """Send one frame and wait for its completion; returns the ending if that is impossible."""
        outgoing = EncodedFrame(encode_close(), ()) if frame is None else encode(frame)
        try:
            # The first message is written here if a receive is posted (tens of microseconds); large tensors wait for
            # the receiver to post, and gloo's own thread writes them.
            first = torch.frombuffer(bytearray(outgoing.first), dtype=torch.uint8)
            works = [self._connection.post_send(first, _TAG_FIRST)]
            works += [self._connection.post_send(as_bytes(tensor), _TAG_TENSOR) for tensor in outgoing.following]
            for work in works:
                work.wait(_FOREVER)
        except RuntimeError as error:
            return went_away(self._ends, error)
        return None

    def _settle(self, broken: LinkClosure | None) -> None:
        """Prefer a goodbye that is still in transit on the other connection to what looks like a crash on this one."""
        if broken is not None and self._inbox.wait_ending(_GOODBYE_GRACE_SECONDS) is None:
            self._inbox.end(broken)


def went_away(ends: Ends, error: RuntimeError) -> LinkClosure:
    """The ending after a gloo error: a gloo connection cannot be repaired."""
    text = re.sub(r"^\[[^\]]*:\d+\]\s*", "", str(error)).split(". ")[0].split("\n")[0].strip()
    return LinkClosure(f"{ends.peer} disconnected ({text[:200]})", orderly=False)


_RETRY_SECONDS = 0.05


class GlooLink:
    """One end of a link over two gloo connections; see `Link` for the guarantees.

    It has two daemon threads. `close` ends them; a link that is still open when the interpreter exits is closed then.
    """

    def __init__(
        self,
        outgoing: GlooChannel,
        incoming: GlooChannel,
        *,
        ends: Ends,
        limits: LinkLimits,
        pace: LinkTime | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._ends = ends
        self._limits = limits
        self._inbox = FrameQueue(limits.incoming_frames, ends=ends, clock=clock)
        self._sender = GlooSender(outgoing, self._inbox, ends=ends, limits=limits, pace=pace, clock=clock)
        self._receiver = GlooReceiver(incoming, self._inbox, ends=ends, limits=limits, when_ended=self._sender.wake)
        self._closing = threading.Lock()
        self._closed = False
        self._sender.start()
        self._receiver.start()
        # A daemon thread that returns from C++ during the interpreter's shutdown can abort the process.
        atexit.register(self.close)

    @property
    def own(self) -> str:
        """Name of this end."""
        return self._ends.own

    @property
    def peer(self) -> str:
        """Name of the other end."""
        return self._ends.peer

    def send(self, frame: Frame, *, deadline_seconds: float) -> None:
        """Send a frame in the background."""
        self._sender.send(frame, deadline_seconds=deadline_seconds)

    def receive(self, *, timeout_seconds: float, awaiting: str = "a frame") -> Frame:
        """Wait for the next frame."""
        return self._inbox.take(timeout_seconds=timeout_seconds, awaiting=awaiting)

    def try_receive(self) -> Frame | None:
        """The next frame if one has arrived, else None."""
        return self._inbox.try_take()

    def watch(self, callback: Callable[[], None]) -> None:
        """Register the callback for arrivals."""
        self._inbox.watch(callback)

    def close(self) -> None:
        """Say goodbye and close both connections."""
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
    """Serve a rendezvous store on a port of `host`; 0 is any free one.

    It listens on that address alone and lives as long as the returned store; keep it until all processes are connected.

    Returns:
        The store, and its `HOST:PORT` for `connect_rendezvous`.

    Raises:
        PortInUse: the port is in use.
        UserError: `host` is not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} of {host} is in use; choose other ports with --stage-port, or omit it where two virtual "
                "workers share a device"
            ) from error
        raise UserError(f"cannot listen on {host} ({error}); give an address of this machine") from error
    chosen = int(listener.getsockname()[1])
    store = TCPStore(host, chosen, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"[{host}]:{chosen}" if ":" in host else f"{host}:{chosen}"


def connect_rendezvous(address: str, *, deadline_seconds: float = 30.0, clock: Clock = SYSTEM_CLOCK) -> TCPStore:
    """Connect to the store of `serve_rendezvous` at `address` (`HOST:PORT`).

    Raises:
        PeerUnreachable: no process listens there within `deadline_seconds`.
        UserError: `address` is not `HOST:PORT`.
    """
    host, separator, port = address.rpartition(":")
    host = host.strip("[]")
    if not separator or not host or not port.isdecimal():
        raise UserError(f"{address!r} is not an address of the form HOST:PORT")
    began = clock.monotonic()
    # A plain connection first: the store's own retries end with a long native traceback on standard error.
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


class GlooListener:
    """Listening end of a cut at the earlier stage; see `CutListener`."""

    def __init__(self, cut: Cut, *, host: str, port: int = 0) -> None:
        """Serve the rendezvous.

        Args:
            cut: to the next stage.
            host: own address, at which the neighbour reaches this process.
            port: of the rendezvous; the connections themselves use any free ones.

        Raises:
            PortInUse: the port is in use.
            UserError: `host` is not an address of this machine.
        """
        self._cut = cut
        self._host = host
        self.refusal = ""
        self._store: TCPStore | None
        self._store, self.address = serve_rendezvous(host, port)

    def accept(self, *, deadline_seconds: float) -> Link:
        """Wait for the neighbour at the rendezvous."""
        assert self._store is not None, "the listener is closed"
        link = connect_gloo(self._store, self._cut, host=self._host, deadline_seconds=deadline_seconds)
        self.close()
        return link

    def close(self) -> None:
        """Stop serving the rendezvous."""
        self._store = None


def call_gloo(cut: Cut, address: str, *, host: str, deadline_seconds: float) -> Link:
    """Connect to the previous stage at `address`; `host` is this process's own address.

    Raises:
        DeadlineExceeded: it is reachable, but did not respond in time.
        PeerUnreachable: it is unreachable, or disconnected meanwhile.
    """
    store = connect_rendezvous(address, deadline_seconds=deadline_seconds)
    return connect_gloo(store, cut, host=host, deadline_seconds=deadline_seconds)


def connect_gloo(store: Store, cut: Cut, *, host: str, deadline_seconds: float) -> Link:
    """Connect both stages of a cut; each calls this with the same store, which is used for nothing else.

    Args:
        store: the rendezvous; it must live until both are connected.
        cut: from this stage's side.
        host: own address, at which the neighbour reaches this process.
        deadline_seconds: for the neighbour to appear.

    Raises:
        DeadlineExceeded: the neighbour did not appear in time.
        PeerUnreachable: the rendezvous or the neighbour disconnected meanwhile.
        UserError: `host` is not an address of this machine.
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
    # Both sides create the groups in this order, to avoid a deadlock.
    forward, backward = (
        GlooChannel(_group(PrefixStore(way, store), rank, options, cut.ends), rank=rank)
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
