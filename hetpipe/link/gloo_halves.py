"""The two halves of a gloo link: a sender and a receiver, each on a connection (a 2-rank process group) of its own.

What one must know of gloo: data flows only once the receiver has posted a receive; a message may be shorter than the
posted buffer; works are not done until somebody waits for them; and a wait that runs into its timeout breaks the
connection for good. Therefore each half has one background thread that waits without limit, and everybody else waits
on conditions with deadlines. `disconnect` ends such a thread by breaking the connection on purpose, that very way.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch

from hetpipe.clock import Clock
from hetpipe.errors import MalformedFrame
from hetpipe.link.inbox import Ending, Ends, Inbox, closed_by, describe
from hetpipe.link.policy import Frame, LinkLimits
from hetpipe.link.send_queue import SendQueue
from hetpipe.link.wire import (
    FIRST_MESSAGE_BYTES,
    CloseHeader,
    FrameHeader,
    Outgoing,
    TensorHeader,
    as_bytes,
    decode,
    encode,
    encode_close,
)
from hetpipe.values.run import LinkTime

_TAG_FIRST = 0
_TAG_TENSOR = 1
#: Nobody ever sends under this tag.
_TAG_NEVER = 2

#: For the background threads alone, which wait on nobody's behalf: a deadline of the caller runs beside them.
_FOREVER = timedelta(days=365)

#: After an error on one connection, how long to look for a good-bye on the other before calling it a crash.
_GOODBYE_GRACE_SECONDS = 0.5
_JOIN_SECONDS = 5.0


class Work(Protocol):
    """A posted message (`torch.distributed.Work`)."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until it is done; raises RuntimeError if the connection breaks."""
        ...


class PairGroup(Protocol):
    """The part of `torch.distributed.ProcessGroupGloo` that links use."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        """Post a message."""
        ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        """Post a buffer."""
        ...


class Connection:
    """One process group of two ranks that carries frames one way. Thread-safe."""

    def __init__(self, group: PairGroup, *, rank: int) -> None:
        self._group: PairGroup | None = group
        self._peer_rank = 1 - rank

    def post_send(self, message: torch.Tensor, tag: int) -> Work:
        """Start sending; `message` must not change until the work is done.

        Raises:
            RuntimeError: the connection is broken.
        """
        return self._open().send([message], self._peer_rank, tag)

    def receive(self, buffer: torch.Tensor, tag: int) -> None:
        """Fill `buffer` with the next message under `tag`, however long that takes.

        Raises:
            RuntimeError: the connection broke.
        """
        self.post_receive(buffer, tag).wait(_FOREVER)

    def post_receive(self, buffer: torch.Tensor, tag: int) -> Work:
        """Start receiving into `buffer`, which must be at least as long as the message.

        Raises:
            RuntimeError: the connection is broken.
        """
        return self._open().recv([buffer], self._peer_rank, tag)

    def disconnect(self) -> None:
        """Break the connection at once: all that is posted on it fails, here and at the other end."""
        with contextlib.suppress(RuntimeError):
            self.post_receive(torch.empty(1, dtype=torch.uint8), _TAG_NEVER).wait(timedelta(milliseconds=1))

    def free(self) -> None:
        """Forget the group, once no thread uses it any more."""
        self._group = None

    def _open(self) -> PairGroup:
        group = self._group
        if group is None:
            raise RuntimeError("this end is closed")
        return group


class GlooReceiver:
    """A thread that always has a receive posted while its inbox has room, and puts whole frames there."""

    def __init__(
        self,
        connection: Connection,
        inbox: Inbox,
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
            sentence = f"{self._ends.peer} broke the format of the link: {error}"
            self._inbox.end(Ending(sentence, orderly=False, violation=True))
            self._connection.disconnect()
        except RuntimeError as error:
            self._inbox.end(went_away(self._ends, error))
        finally:
            self._when_ended()

    def _receive_one(self) -> bool:
        """One frame from the connection to the inbox; False if it was the good-bye."""
        self._connection.receive(self._message, _TAG_FIRST)
        header = decode(memoryview(self._buffer), self._limits)
        if isinstance(header, CloseHeader):
            self._inbox.end(closed_by(self._ends.peer, other=self._ends.own))
            return False
        self._inbox.put(header.frame(self._receive_tensors(header)))
        return True

    def _receive_tensors(self, header: FrameHeader) -> tuple[torch.Tensor | None, ...]:
        tensors: list[torch.Tensor | None] = []
        works: list[Work] = []
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
    """Takes frames from the caller; a background thread encodes and posts them, sees them through, frees their tensors.

    So the stage computes on while its last result is packed, and pays for a send no more than a queue's lock.
    """

    def __init__(
        self,
        connection: Connection,
        inbox: Inbox,
        *,
        ends: Ends,
        limits: LinkLimits,
        pace: LinkTime | None,
        clock: Clock,
    ) -> None:
        self._connection = connection
        #: The link's ending lives in the inbox: one place for both halves.
        self._inbox = inbox
        self._ends = ends
        self._queue = SendQueue(ends=ends, limits=limits, pace=pace, clock=clock)
        self._broken: Ending | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"link: {ends.own} sends to {ends.peer}", daemon=True)

    def start(self) -> None:
        """Start seeing frames through."""
        self._thread.start()

    def send(self, frame: Frame, *, deadline_seconds: float) -> None:
        """See `Link.send`."""
        self._raise_if_ended(frame)
        if not self._queue.put(frame, deadline_seconds=deadline_seconds, has_ended=self._ended):
            self._raise_if_ended(frame)

    def wake(self) -> None:
        """Make a blocked `send` look at the link's ending."""
        self._queue.wake()

    def say_goodbye(self, timeout_seconds: float) -> bool:
        """Send what is under way and the good-bye; False if that did not succeed in time."""
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

    def _see_through(self, frame: Frame | None) -> Ending | None:
        """Send one frame and wait until it is gone; returns why that cannot be."""
        outgoing = Outgoing(encode_close(), ()) if frame is None else encode(frame)
        try:
            # A first message that is awaited is written here and now (tens of microseconds); large tensors wait for
            # the receiver to post, and gloo's own thread writes them.
            works = [self._connection.post_send(outgoing.first, _TAG_FIRST)]
            works += [self._connection.post_send(message, _TAG_TENSOR) for message in outgoing.following]
            for work in works:
                work.wait(_FOREVER)
        except RuntimeError as error:
            return went_away(self._ends, error)
        return None

    def _settle(self, broken: Ending | None) -> None:
        """Let a good-bye that is on its way on the other connection win over what looks like a crash on this one."""
        if broken is not None and self._inbox.wait_ending(_GOODBYE_GRACE_SECONDS) is None:
            self._inbox.end(broken)


def went_away(ends: Ends, error: RuntimeError) -> Ending:
    """The ending after gloo reported an error: no way is known to mend a gloo connection."""
    text = re.sub(r"^\[[^\]]*:\d+\]\s*", "", str(error)).split(". ")[0].split("\n")[0].strip()
    return Ending(f"{ends.peer} went away ({text[:200]})", orderly=False)
