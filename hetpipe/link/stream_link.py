"""Links between processes over one stream per cut: through gRPC, with TLS where the network is not trusted, or memory.

The earlier stage serves, the later one connects (`hetpipe.wire.link_server`, `hetpipe.wire.link_client`). Both announce
their identity and buffer size in frames; where they share memory, the stream goes on there. Frames flow in both
directions within the granted credit, so that neither side ever stops reading. A power failure of the neighbour's
machine results in `LinkClosed` within the keepalive time, the death of its process immediately.

A link has two halves: a writer and a thread that reads the stream. The writer is an iterator that the stream consumes
on a thread of its own, one message after the other. Frames wait for credit there, and no other thread waits for the
neighbour. A small frame before which none waits is written by the stage itself if the stream can take it at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import HetpipeError, MalformedFrame
from hetpipe.link.credit import Window
from hetpipe.link.cut import Cut
from hetpipe.link.frame_queue import Ends, FrameQueue, LinkClosure, closed_by, describe
from hetpipe.link.policy import Frame, Link, LinkLimits
from hetpipe.link.send_queue import SendQueue
from hetpipe.link.stream import Assembler, Credit, credit_message, message_of, messages_of
from hetpipe.link.wire import CloseHeader, EncodedFrame, encode, encode_close
from hetpipe.values.requests import LinkHello
from hetpipe.values.run import LinkTime
from hetpipe.wire.link_client import connect_link
from hetpipe.wire.link_server import LinkServer
from hetpipe.wire.link_stream import LinkStream
from hetpipe.wire.segment import Parts
from hetpipe.wire.tls import Tls

#: Size up to which the stage copies a frame itself: about as long as it takes another thread to wake up and do it.
_MOST_BYTES_NOW = 256 * 1024


class StreamSender:
    """Queues frames and yields their messages to the stream, within the granted credit."""

    def __init__(
        self,
        inbox: FrameQueue,
        *,
        send_now: Callable[[Callable[[], Parts]], bool],
        credit: int,
        ends: Ends,
        limits: LinkLimits,
        pace: LinkTime | None,
        clock: Clock,
    ) -> None:
        """Start with the other end's buffer as credit; `send_now` as of `LinkStream`."""
        #: The link's ending is stored in the inbox: one place for both halves.
        self._inbox = inbox
        self._ends = ends
        self._queue = SendQueue(ends=ends, limits=limits, pace=pace, clock=clock)
        self._changed = self._queue.changed
        self._frames = self._queue.frames
        self._send_now = send_now
        self._is_paced = pace is not None
        #: Whether the stream waits for the next message, so that the stage may write one.
        self._is_idle = False
        #: Credit: frames that the other end can buffer.
        self._credit = credit
        #: Credit accounting of this end's buffer.
        self._window = Window(limits.incoming_frames)
        self._stopped = False
        self._peer_ended = False

    # -- the stage -----------------------------------------------------------------------------------------------------

    def send(self, frame: Frame, *, deadline_seconds: float) -> None:
        """Write `frame`, or queue it for the stream."""
        if not self._queue.put(
            frame, deadline_seconds=deadline_seconds, has_ended=self._has_ended, send_now=self._sent_now
        ):
            self._raise_if_ended(frame)

    def taken(self) -> None:
        """Record that the stage has taken a frame from the inbox."""
        with self._changed:
            self._window.take()
            if self._window.is_due and not self._has_granted_now():
                self._changed.notify_all()

    def say_goodbye(self, timeout_seconds: float) -> bool:
        """Send pending frames and the goodbye; False if that did not succeed in time."""
        return self._queue.say_goodbye(timeout_seconds, has_broken=lambda: self._peer_ended)

    def stop(self) -> None:
        """End the stream's iterator at its current position."""
        with self._changed:
            self._stopped = True
            self._frames.clear()
            self._changed.notify_all()

    # -- the receiving half --------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Record the arrival of a frame.

        Raises:
            MalformedFrame: there was no credit for it.
        """
        with self._changed:
            self._window.arrive()
            if self._window.is_due:
                self._changed.notify_all()

    def credited(self, frames: int) -> None:
        """Add credit granted by the other end."""
        with self._changed:
            self._credit += frames
            self._changed.notify_all()

    def peer_ended(self) -> None:
        """Record that the other end sends nothing more."""
        with self._changed:
            self._peer_ended = True
            self._changed.notify_all()

    # -- the stream ----------------------------------------------------------------------------------------------------

    def messages(self) -> Iterator[Parts]:
        """All outgoing messages; ends after the goodbye, when the other end has ended its stream."""
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.wait_for(self._has_work)
                self._is_idle = False
                if self._is_over():
                    return
                granted = self._window.grant() if self._window.is_due else 0
                frame = None if granted else self._frames[0]
            if granted:
                yield (credit_message(granted),)
                continue
            yield from self._messages_of(frame)
            last = frame is None
            del frame
            with self._changed:
                if self._frames:
                    self._frames.popleft()
                self._changed.notify_all()
                if last:
                    self._changed.wait_for(self._is_over)

    def _messages_of(self, frame: Frame | None) -> Iterator[Parts]:
        if frame is None:
            return messages_of(EncodedFrame(encode_close(), ()))
        with self._changed:
            self._credit -= 1
        self._queue.hold_back(frame, self._is_over)
        return messages_of(encode(frame))

    def _sent_now(self, frame: Frame) -> bool:
        """Write a small frame to the idle stream. With the lock held, so the stream stays idle."""
        num_bytes = sum(tensor.nbytes for tensor in frame.tensors if tensor is not None)
        if not self._is_idle or not self._credit or self._is_paced or num_bytes > _MOST_BYTES_NOW:
            return False
        is_sent = self._send_now(lambda: message_of(frame))
        self._credit -= int(is_sent)
        return is_sent

    def _has_granted_now(self) -> bool:
        """Write the credit to be sent to the idle stream, as `_sent_now` writes a frame."""
        if not self._is_idle or self._frames or self._is_over():
            return False
        return self._send_now(lambda: (credit_message(self._window.grant()),))

    def _has_work(self) -> bool:
        may_send = bool(self._frames) and (self._credit > 0 or self._frames[0] is None)
        return may_send or self._window.is_due or self._is_over()

    def _is_over(self) -> bool:
        return self._stopped or self._peer_ended

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _has_ended(self) -> bool:
        return self._inbox.ending is not None

    def _raise_if_ended(self, frame: Frame) -> None:
        ending = self._inbox.ending
        if ending is not None:
            raise ending.error(f" before {self._ends.own} sent {describe(frame)}")


class StreamReceiver:
    """A thread that reads the stream and puts complete frames into the inbox, within the granted credit."""

    def __init__(
        self,
        stream: LinkStream,
        inbox: FrameQueue,
        sender: StreamSender,
        *,
        ends: Ends,
        limits: LinkLimits,
    ) -> None:
        self._stream = stream
        self._inbox = inbox
        self._sender = sender
        self._ends = ends
        self._assembler = Assembler(limits, admit=sender.admit)
        self._thread = threading.Thread(
            target=self._run, name=f"link: {ends.own} receives from {ends.peer}", daemon=True
        )

    def start(self) -> None:
        """Start receiving."""
        self._thread.start()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the stream."""
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            ending = self._receive()
        except MalformedFrame as error:
            ending = LinkClosure(
                f"{self._ends.peer} violated the format of the link: {error}", orderly=False, violation=True
            )
            self._inbox.end(ending)
            self._stream.cancel()
        except HetpipeError as error:
            ending = LinkClosure(f"{self._ends.peer} disconnected ({error})", orderly=False)
        except RuntimeError as error:  # torch's out-of-memory error, among others
            ending = LinkClosure(f"{self._ends.own} cannot receive from {self._ends.peer} ({error})", orderly=False)
            self._stream.cancel()
        self._inbox.end(ending)
        self._sender.peer_ended()

    def _receive(self) -> LinkClosure:
        """Transfer the stream to the inbox; returns the ending."""
        with closing(self._stream.receive(self._assembler.feed)) as everything:
            for received in everything:
                if isinstance(received, Frame):
                    self._inbox.put(received)
                elif isinstance(received, Credit):
                    self._sender.credited(received.frames)
                elif isinstance(received, CloseHeader):
                    return closed_by(self._ends.peer, other=self._ends.own)
        return LinkClosure(f"{self._ends.peer} disconnected (its stream ended without a goodbye)", orderly=False)


#: Open links.
_open_links: set[StreamLink] = set()


def _close_open_links() -> None:
    for link in list(_open_links):
        link.close()


# At the end of the main thread, before the interpreter waits for thread pools, to which a link's server may belong:
# `atexit` would be too late.
threading._register_atexit(_close_open_links)  # type: ignore[attr-defined]  # noqa: SLF001 - has no public name


class StreamLink:
    """One end of a link over a stream; see `Link` for the guarantees.

    `close` ends its thread and those of the stream; a link that is still open when the main thread ends is closed then.
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
        """Take ownership of `stream`, which was opened with the buffer size of `limits`."""
        self._stream = stream
        self._ends = ends
        self._limits = limits
        self._clock = clock
        self._inbox = FrameQueue(limits.incoming_frames, ends=ends, clock=clock)
        credit = stream.peer.room
        self._sender = StreamSender(
            self._inbox, send_now=stream.send_now, credit=credit, ends=ends, limits=limits, pace=pace, clock=clock
        )
        self._receiver = StreamReceiver(stream, self._inbox, self._sender, ends=ends, limits=limits)
        self._closing = threading.Lock()
        self._closed = False
        stream.send(self._sender.messages())
        self._receiver.start()
        _open_links.add(self)

    @property
    def own(self) -> str:
        """Name of this end."""
        return self._ends.own

    @property
    def peer(self) -> str:
        """Name of the other end."""
        return self._ends.peer

    def send(self, frame: Frame, *, deadline_seconds: float) -> None:
        """Send a frame within the granted credit."""
        self._sender.send(frame, deadline_seconds=deadline_seconds)

    def receive(self, *, timeout_seconds: float, awaiting: str = "a frame") -> Frame:
        """Wait for the next frame."""
        frame = self._inbox.take(timeout_seconds=timeout_seconds, awaiting=awaiting)
        self._sender.taken()
        return frame

    def try_receive(self) -> Frame | None:
        """The next frame if one has arrived, else None."""
        frame = self._inbox.try_take()
        if frame is not None:
            self._sender.taken()
        return frame

    def watch(self, callback: Callable[[], None]) -> None:
        """Register the callback for arrivals."""
        self._inbox.watch(callback)

    def close(self) -> None:
        """Say goodbye and close the stream."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            began = self._clock.monotonic()
            self._inbox.end(closed_by(self.own, other=self.peer), drop=True)
            if self._sender.say_goodbye(self._limits.close_seconds):
                # The other end ends its stream in reply: it has received everything.
                left = self._limits.close_seconds - (self._clock.monotonic() - began)
                self._receiver.join(max(0.0, left))
            self._sender.stop()
            self._stream.close()
            self._receiver.join(self._limits.close_seconds)
            _open_links.discard(self)


class StreamListener:
    """Listening end of a cut at the earlier stage; see `CutListener`."""

    def __init__(
        self, cut: Cut, *, host: str, port: int = 0, tls: Tls | None = None, offers_memory: bool = False
    ) -> None:
        """Open the port.

        Args:
            cut: to the next stage.
            host: own address, at which the neighbour reaches this process.
            port: 0 lets the system choose.
            tls: this stage's certificates; None: plaintext.
            offers_memory: frames may go through shared memory, if the neighbour can share it.

        Raises:
            PortInUse: the port is in use.
            UserError: `host` is not an address of this machine.
        """
        self._cut = cut
        hello = LinkHello(cut.own, cut.limits.incoming_frames)
        self._server = LinkServer(
            host, port, hello=hello, neighbour=cut.neighbour, tls=tls, offers_memory=offers_memory
        )
        self._accepted = False
        self.refusal = ""
        self.address = self._server.start()

    def accept(self, *, deadline_seconds: float) -> Link:
        """Wait for the neighbour's stream."""
        stream = self._server.accept(deadline_seconds=deadline_seconds)
        self._accepted = True
        self.refusal = stream.refusal
        return StreamLink(stream, ends=self._cut.ends, limits=self._cut.limits, pace=self._cut.pace)

    def close(self) -> None:
        """Free the port; after `accept`, the link owns the server."""
        if not self._accepted:
            self._server.close()


def call_stream(
    cut: Cut, address: str, *, tls: Tls | None, deadline_seconds: float, needs_memory: bool = False
) -> Link:
    """Connect to the previous stage at `address`, over memory if it offers some that can be shared.

    Raises:
        PeerUnreachable: it is unreachable.
        UserError: memory cannot be shared, and the link `needs_memory`.
        HetpipeError: it refused, or is another process.
    """
    stream = connect_link(
        address,
        hello=LinkHello(cut.own, cut.limits.incoming_frames),
        neighbour=cut.neighbour,
        tls=tls,
        deadline_seconds=deadline_seconds,
        needs_memory=needs_memory,
    )
    return StreamLink(stream, ends=cut.ends, limits=cut.limits, pace=cut.pace)
