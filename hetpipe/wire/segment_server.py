"""The server's end of segments: passes them over a Unix socket in exchange for single-use tokens.

A stage asks a parameter server for a segment by a call (`calls.SHARE_MEMORY`), and gets those of a link with its
neighbour's hello; both are authorized like every call. An offer names an abstract Unix socket and a token. A
process of the same user that presents the token receives the descriptor of a sealed memfd made for it. See
docs/semantics/shared-memory.md.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from inspect import GEN_CREATED, getgeneratorstate

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import PeerUnreachable, ProtocolViolation
from hetpipe.observe.log import get_logger
from hetpipe.values.requests import MemoryOffer, Requester
from hetpipe.wire.call import Chunk
from hetpipe.wire.segment import SEGMENT_BYTES, SEGMENT_KEY, Lane, is_same_user, make_segment, map_segment, peer_user
from hetpipe.wire.serving import Context

_log = get_logger(__name__)

#: Limit of open and offered segments of one server: 1 GiB. Further stages use gRPC.
MAX_SEGMENTS = (1 << 30) // SEGMENT_BYTES
#: Validity of a token.
TOKEN_SECONDS = 30.0
TOKEN_BYTES = 32
#: Timeout for the token of a connected process.
_SHOW_SECONDS = 0.5
_BACKLOG = 64
_MAX_DIGITS = 15


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """Purpose of a segment: its stage, and the call whose chunks it carries, or the direction of a link."""

    requester: Requester
    call: str


@dataclass(frozen=True, slots=True)
class _Offered:
    key: SegmentKey
    segment: str
    until: float


class SegmentServer:
    """Offers segments, and keeps this end of those that were fetched. Thread-safe."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK, max_segments: int = MAX_SEGMENTS) -> None:
        """Listen from the first offer on.

        Args:
            clock: for the validity of tokens.
            max_segments: open and offered ones.
        """
        self._clock = clock
        self._max_segments = max_segments
        self._lock = threading.Lock()
        self._name = ""
        self._listener: socket.socket | None = None
        self._thread: threading.Thread
        self._wake: socket.socket
        self._wake_read: socket.socket
        #: Whether the system does not support segments, or this server is stopping.
        self._is_unable = not sys.platform.startswith("linux")
        #: By token.
        self._offered: dict[str, _Offered] = {}
        #: By the segment's name.
        self._open: dict[str, tuple[SegmentKey, Lane]] = {}
        self._is_stopping = False

    @property
    def num_open(self) -> int:
        """Segments that are mapped here."""
        with self._lock:
            return len(self._open)

    def stop(self) -> None:
        """Close all segments and the socket; further offers are refused."""
        with self._lock:
            self._is_stopping = True
            lanes = [lane for _, lane in self._open.values()]
            self._open, self._offered = {}, {}
            listener, self._listener = self._listener, None
        for lane in lanes:
            lane.close()
        if listener is not None:
            self._wake.send(b"s")
            self._thread.join(timeout=5.0)
            for each in (listener, self._wake, self._wake_read):
                each.close()

    def offer(self, key: SegmentKey) -> MemoryOffer:
        """Offer a segment to a stage; its earlier one for the same call is freed."""
        with self._lock:
            if self._listener is None and not self._is_stopping and not self._is_unable:
                self._listen()
            if self._listener is None:
                return MemoryOffer("", "", "", "this process cannot share memory")
        now = self._clock.monotonic()
        with self._lock:
            self._offered = {t: each for t, each in self._offered.items() if each.until > now and each.key != key}
            old = [name for name, (whose, _) in self._open.items() if whose == key]
            lanes = [self._open.pop(name)[1] for name in old]
            is_full = len(self._offered) + len(self._open) >= self._max_segments
            token, segment = secrets.token_hex(TOKEN_BYTES), secrets.token_hex(16)
            if not is_full:
                self._offered[token] = _Offered(key, segment, now + TOKEN_SECONDS)
        for lane in lanes:
            lane.close()
        if is_full:
            return MemoryOffer("", "", "", f"this process shares {self._max_segments} segments already")
        return MemoryOffer(self._name, token, segment, "")

    def take(self, segment: str) -> Lane | None:
        """Transfer this end of a segment to the caller; None: it was not fetched, or is closed."""
        with self._lock:
            _, lane = self._open.pop(segment, (None, None))
        return lane

    @contextmanager
    def receiving(self, key: SegmentKey, messages: Iterable[Chunk], context: Context) -> Iterator[Iterable[Chunk]]:
        """The chunks of an upload: from the segment that the call names, else its own messages.

        Raises:
            PeerUnreachable: the segment is unknown, another stage's, or in use; the stage requests another one.
            ProtocolViolation: the metadata does not name a segment.
        """
        named = _named(context)
        if named is None:
            yield messages
            return
        with (
            self._using(*named, key) as lane,
            closing(lane.receive(is_over=lambda: not context.is_active())) as chunks,
        ):
            yield chunks
            if getgeneratorstate(chunks) == GEN_CREATED:  # not requested: the push was staged before
                lane.refuse()

    def sending(self, key: SegmentKey, chunks: Iterator[Chunk], context: Context) -> Iterator[Chunk]:
        """The messages of a download: its chunks, or none where they go through the segment that the call names.

        Raises:
            PeerUnreachable, ProtocolViolation: as `receiving`.
        """
        named = _named(context)
        if named is None:
            yield from chunks
            return
        with closing(_generator(chunks)) as each, self._using(*named, key) as lane:
            lane.send(each, is_over=lambda: not context.is_active())

    @contextmanager
    def _using(self, segment: str, number: int, key: SegmentKey) -> Iterator[Lane]:
        with self._lock:
            whose, lane = self._open.get(segment, (None, None))
        if lane is None or whose != key:
            raise PeerUnreachable(f"{key.requester} has no such segment here for {key.call}; request a new one")
        if not lane.take_turn():
            raise PeerUnreachable(f"the segment of {key.requester} for {key.call} is in use; request a new one")
        try:
            if number <= lane.number:
                raise ProtocolViolation(f"call {number} of a segment came after call {lane.number}")
            lane.number = number
            yield lane
        finally:
            lane.end_turn()

    def _listen(self) -> None:
        """Open the socket, with the lock held, if the system supports segments."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"hetpipe-{secrets.token_hex(16)}"
        try:
            listener.bind(f"\0{name}".encode())
            listener.listen(_BACKLOG)
            os.close(make_segment())
        except OSError as error:
            listener.close()
            self._is_unable = True
            _log.warning("no_shared_memory", reason=str(error), consequence="tensors go through gRPC")
            return
        listener.settimeout(_SHOW_SECONDS)
        self._listener, self._name = listener, name
        self._wake_read, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="segments", daemon=True)
        self._thread.start()

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _serve(self, listener: socket.socket) -> None:
        while True:
            with self._lock:
                if self._is_stopping:
                    return
                lanes = {lane.connection.fileno(): (name, lane) for name, (_, lane) in self._open.items()}
            poll = select.poll()
            poll.register(listener, select.POLLIN)
            poll.register(self._wake_read, select.POLLIN)
            for descriptor in lanes:
                if descriptor >= 0:
                    poll.register(descriptor, 0)  # hang-ups only: messages are for the calls
            for descriptor, _ in poll.poll():
                if descriptor == listener.fileno():
                    self._admit(listener)
                elif descriptor in lanes:
                    self._forget(*lanes[descriptor])
            self._forget_closed()

    def _forget(self, name: str, lane: Lane) -> None:
        """Drop the segment of a process that has ended."""
        with self._lock:
            self._open.pop(name, None)
        lane.close()

    def _forget_closed(self) -> None:
        with self._lock:
            self._open = {name: each for name, each in self._open.items() if not each[1].is_closed}

    def _admit(self, listener: socket.socket) -> None:
        """Pass a segment to a process that presents a valid token; refuse and log all others."""
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        try:
            if not is_same_user(connection):
                self._refuse(connection, f"a process of user {peer_user(connection)}, not of this one")
                return
            connection.settimeout(_SHOW_SECONDS)
            token = connection.recv(4 * TOKEN_BYTES).decode("ascii", errors="replace")
            with self._lock:
                offered = self._offered.pop(token, None)
            if offered is None or offered.until < self._clock.monotonic():
                self._refuse(connection, "the token is unknown, used already, or too old")
                return
            self._pass(connection, offered)
        except OSError as error:
            self._refuse(connection, str(error))

    def _pass(self, connection: socket.socket, offered: _Offered) -> None:
        descriptor = make_segment()
        try:
            lane = Lane(offered.segment, connection, map_segment(descriptor), clock=self._clock)
            with self._lock:
                self._open[offered.segment] = (offered.key, lane)
                is_stopping = self._is_stopping
            if is_stopping:
                self._forget(offered.segment, lane)
                return
            try:
                socket.send_fds(connection, [b"s"], [descriptor])
            except OSError:
                self._forget(offered.segment, lane)
                raise
        finally:
            os.close(descriptor)
        _log.info("segment_open", requester=str(offered.key.requester), call=offered.key.call)

    def _refuse(self, connection: socket.socket, why: str) -> None:
        _log.warning("segment_refused", reason=why)
        with suppress(OSError):
            connection.close()


def _named(context: Context) -> tuple[str, int] | None:
    """The segment that a call names, and the number of the call; None: it names none."""
    for key, value in context.invocation_metadata():
        if key == SEGMENT_KEY:
            name, _, number = str(value).partition(":")
            if not (number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS):
                raise ProtocolViolation(f"{SEGMENT_KEY} must be NAME:NUMBER, not {str(value)!r:.40}")
            return name, int(number)
    return None


def _generator(chunks: Iterator[Chunk]) -> Generator[Chunk, None, None]:
    """Wrap an iterable in a generator whose `close` closes it."""
    yield from chunks
