"""A stage's calls to a parameter server that send and receive chunks through shared memory, where that is possible.

The rest of a call uses gRPC: authentication, header, reply or error, deadline. Where no memory can be shared (another
host, container or user), the chunks use gRPC as well, and the reason is logged.
"""

from __future__ import annotations

import mmap
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import ClockNotPublished
from hetpipe.observe.log import get_logger
from hetpipe.values.requests import MemoryOffer, Requester
from hetpipe.wire.call import Chunk, Download, ReplyT, RequestT, Streaming, Unary, Upload
from hetpipe.wire.caller import Caller
from hetpipe.wire.calls import PULL, PUSH, SHARE_MEMORY, ShareMemoryRequest
from hetpipe.wire.segment import Lane, SegmentRefused, is_same_user, map_segment

_log = get_logger(__name__)

#: Calls whose chunks may use shared memory; model buffers are small and rare.
SHARED_CALLS = (PUSH.name, PULL.name)

_SOCKET = re.compile(r"hetpipe-[0-9a-f]{32}")
_CONNECT_SECONDS = 5.0
#: Consecutive broken segments after which, as after a refusal, tensors use gRPC for a while.
_MOST_FAILURES = 3
_REST_SECONDS = 60.0


def fetch_segment(offer: MemoryOffer, *, clock: Clock = SYSTEM_CLOCK) -> Lane:
    """Fetch an offered segment.

    Raises:
        SegmentRefused: the server is unreachable from here, or what it passes is not a segment; nothing is mapped.
    """
    if not offer.socket:
        raise SegmentRefused(offer.reason)
    if not _SOCKET.fullmatch(offer.socket):
        raise SegmentRefused(f"{offer.socket!r:.60} is no socket for segments")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _connect(connection, offer.socket)
        return Lane(offer.segment, connection, _received(connection, offer.token), clock=clock)
    except BaseException:
        connection.close()
        raise


def _connect(connection: socket.socket, name: str) -> None:
    connection.settimeout(_CONNECT_SECONDS)
    try:
        connection.connect(f"\0{name}".encode())
    except OSError as error:
        raise SegmentRefused(
            f"its socket cannot be reached from here, as from another host or container ({error})"
        ) from error
    if not is_same_user(connection):
        raise SegmentRefused("the process behind its socket is of another user")


def _received(connection: socket.socket, token: str) -> mmap.mmap:
    try:
        connection.send(token.encode())
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    except OSError as error:
        raise SegmentRefused(f"no segment was passed ({error})") from error
    if not descriptors:
        raise SegmentRefused("no segment was passed: the token was refused")
    try:
        return map_segment(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class SharedMemoryCalls:
    """`Calls` of one stage to one parameter server."""

    def __init__(self, inner: Caller, requester: Requester, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Create it without a segment; the first transfer requests one.

        Args:
            inner: the connection.
            requester: the stage.
            clock: measures waits.
        """
        self._inner = inner
        self._requester = requester
        self._clock = clock
        self._lock = threading.Lock()
        self._lanes: dict[str, Lane] = {}
        self._failures = 0
        #: Reason for the last transfer without shared memory; empty otherwise.
        self.refusal = ""
        self._refused_until = float("-inf")
        self._is_closed = False

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        """Implement `Calls.invoke`."""
        return self._inner.invoke(call, request)

    def stream(self, call: Streaming[RequestT, ReplyT], request: RequestT) -> Iterator[ReplyT]:
        """Implement `Calls.stream`."""
        return self._inner.stream(call, request)

    def upload(self, call: Upload[RequestT, ReplyT], header: RequestT, chunks: Iterable[Chunk]) -> ReplyT:
        """Implement `Calls.upload`."""
        lane = self._taken(call.name)
        if lane is None:
            return self._inner.upload(call, header, chunks)
        try:
            return self._inner.upload(call, header, chunks, through=lane)
        finally:
            self._give_back(lane)

    def download(self, call: Download[RequestT], header: RequestT) -> Iterator[Chunk]:
        """Implement `Calls.download`."""
        lane = self._taken(call.name)
        if lane is None:
            yield from self._inner.download(call, header)
            return
        try:
            yield from self._inner.download(call, header, through=lane)
        finally:
            self._give_back(lane)

    def close(self) -> None:
        """Implement `Calls.close`; the segments are freed."""
        self._is_closed = True
        self._inner.close()  # also ends a pending request for a segment, which holds the lock
        with self._lock:
            lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()

    # -- internals ----------------------------------------------------------------------------------------------------

    def _taken(self, call: str) -> Lane | None:
        """Acquire the lane for a call; None: the call uses gRPC."""
        with self._lock:
            if call not in SHARED_CALLS or self._is_closed or self._clock.monotonic() < self._refused_until:
                return None
            lane = self._lanes.get(call)
            if lane is None or lane.is_closed:
                lane = self._fetched(call)
            if lane is None or not lane.take_turn():
                return None
            lane.number += 1
            return lane

    def _fetched(self, call: str) -> Lane | None:
        if self._failures >= _MOST_FAILURES:
            self._failures = 0
            self._refuse(f"{_MOST_FAILURES} segments broke one after the other")
            return None
        try:
            offer = self._inner.invoke(SHARE_MEMORY, ShareMemoryRequest(self._requester, call))
            lane = fetch_segment(offer, clock=self._clock)
        except ClockNotPublished:
            return None  # not a member yet: its initial weights use gRPC
        except SegmentRefused as error:
            self._refuse(str(error))
            return None
        self._failures += 1  # until a call succeeds
        self.refusal = ""
        self._lanes[call] = lane
        _log.info("transport_chosen", call=call, transport="shared memory", peer=self._inner.peer)
        return lane

    def _give_back(self, lane: Lane) -> None:
        if not lane.is_closed:
            self._failures = 0
        lane.end_turn()

    def _refuse(self, why: str) -> None:
        self._refused_until = self._clock.monotonic() + _REST_SECONDS
        if why != self.refusal:
            _log.info("transport_chosen", transport="grpc", reason=why, peer=self._inner.peer)
        self.refusal = why
