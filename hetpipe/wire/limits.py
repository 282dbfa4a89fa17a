"""Limits on the share of a server that one peer may use, counted for every call (`wire.guard`).

A call of a sync server occupies a thread from its first byte to its last, including the time its peer takes to send.
Without a limit, a peer that opens calls and sends nothing would eventually occupy all threads. `Admission` counts
running calls per peer and the bytes that peers have announced; calls beyond a limit fail with `Busy`, on which
hetpipe's clients back off and retry, so a limit slows an honest run down and never ends it. `Uploads` tracks which
calls wait for data from their peer, and for how long.

A peer is identified by its certificate. Without TLS it is identified by its address, and a whole run on one machine
shares one: then all stages and shards are one peer, which may use all but an eighth of the threads
(`Limits.of_address`), and all of the bytes. With TLS a stage has at most about eight concurrent calls at a shard: a
push, a pull, and some short ones; an agent has three at the coordinator; a shard or the coordinator a few per job. 64
covers all of these. Calls that wait without a thread (`wire.feeds`) are counted apart.

Roles share the threads, too (`SHARES`): however many peers a role has, they leave capacity for roles that a job depends
on more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Generic, TypeVar

from hetpipe.errors import Busy, DeadlineExceeded
from hetpipe.values.identity import Role
from hetpipe.values.quantities import bytes_text

KeyT = TypeVar("KeyT")

#: On a server with at least this many threads, peers without a certificate leave one in `_RESERVE` free.
_MIN_SHARED_THREADS = 16
_RESERVE = 8


#: Maximum share of a server's threads per role; roles not listed may use all.
SHARES: Mapping[Role, Fraction] = {
    Role.MONITOR: Fraction(1, 8),
    Role.OPERATOR: Fraction(1, 4),
    Role.STAGE: Fraction(7, 8),
}


def room_of(role: Role, num_threads: int) -> int | None:
    """Maximum number of running calls of all peers of a role on a server with `num_threads`; None: unlimited.

    >>> room_of(Role.MONITOR, 192), room_of(Role.AGENT, 192), room_of(Role.MONITOR, 4)
    (24, None, None)
    """
    share = SHARES.get(role)
    return None if share is None or num_threads < _MIN_SHARED_THREADS else int(share * num_threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one peer at one server. `None`: unlimited."""

    calls_per_peer: int | None = 64
    """Running calls, including streams."""
    streams_per_peer: int | None = 32
    """Running calls with a stream of requests or replies."""
    bytes_per_peer: int | None = 2 << 30
    """Announced bytes of uploads in progress. A peer without any may announce more: a slice may be large, and the
    handler checks whether it belongs to the plan.
    """
    bytes_in_total: int | None = 16 << 30
    """The same over all peers, with the same exception."""
    idle_seconds: float = 30.0
    """Maximum wait for the next message of an upload, or for the rest of a request."""
    upload_seconds: float = 3_600.0
    """Maximum duration of an upload; equals hetpipe's longest client deadline."""

    def of_address(self, num_threads: int) -> Limits:
        """The limits of a peer identified by its address only, on a server with `num_threads`.

        >>> Limits().of_address(96).calls_per_peer
        84
        """
        reserve = num_threads // _RESERVE if num_threads >= _MIN_SHARED_THREADS else 0
        shared = num_threads - reserve
        return replace(self, calls_per_peer=shared, streams_per_peer=shared, bytes_per_peer=None)


class Admission:
    """Counters of running calls and announced bytes. Thread-safe; never blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, int] = {}
        self._streams: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._groups: dict[str, int] = {}

    def call(
        self, peer: str, limits: Limits, *, is_stream: bool, group: tuple[str, int | None] = ("", None)
    ) -> AbstractContextManager[None]:
        """Count a call while it runs; `group` is the peer's role with its limit.

        Raises:
            Busy: on entry, if `peer` or its role has reached its limit.
        """
        role, room = group
        counters = [(self._calls, peer, limits.calls_per_peer, "calls")]
        if room is not None:
            counters.append((self._groups, role, room, "calls of its role"))
        if is_stream:
            counters.append((self._streams, peer, limits.streams_per_peer, "streams"))
        return _Counted(self._lock, peer, counters)

    @contextmanager
    def bytes_in_flight(self, peer: str, num_bytes: int, limits: Limits) -> Iterator[None]:
        """Count announced bytes while they are in flight.

        Raises:
            Busy: the limit of this peer or of all peers is exceeded.
        """
        with self._lock:
            mine, everyone = self._bytes.get(peer, 0), sum(self._bytes.values())
            for whose, under_way, limit in (
                (peer, mine, limits.bytes_per_peer),
                ("all peers together", everyone, limits.bytes_in_total),
            ):
                if limit is not None and under_way and under_way + num_bytes > limit:
                    raise Busy(
                        f"{bytes_text(under_way)} from {whose} are in flight, and {bytes_text(num_bytes)} more would "
                        f"exceed the limit of {bytes_text(limit)}; retry later"
                    )
            self._bytes[peer] = mine + num_bytes
        try:
            yield
        finally:
            with self._lock:
                _subtract(self._bytes, peer, num_bytes)

    @property
    def num_peers(self) -> int:
        """Number of peers with calls or bytes in flight."""
        with self._lock:
            return len(self._calls.keys() | self._bytes.keys())


@dataclass(slots=True)
class _Counted(AbstractContextManager[None]):
    """A call that is counted. No generator: every call of every server passes here."""

    lock: threading.Lock
    peer: str
    counters: list[tuple[dict[str, int], str, int | None, str]]
    """Each with the key of the call, its limit, and what is limited."""

    def __enter__(self) -> None:
        with self.lock:
            for counter, key, limit, what in self.counters:
                running = counter.get(key, 0)
                if limit is not None and running >= limit:
                    raise Busy(f"{self.peer} has {running} {what} in progress, and the limit is {limit}; retry later")
            for counter, key, *_ in self.counters:
                counter[key] = counter.get(key, 0) + 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            for counter, key, *_ in self.counters:
                _subtract(counter, key, 1)


def _subtract(counter: dict[str, int], key: str, number: int) -> None:
    left = counter.get(key, 0) - number
    if left:
        counter[key] = left
    else:
        counter.pop(key, None)  # so that short-lived peers leave no entries behind


@dataclass(slots=True)
class Upload:
    """An upload of which the peer has more to send; used by the thread that reads it."""

    began: float
    waits_since: float | None
    """When the thread began to wait for the next message; None: it has one."""
    is_overdue: bool = False


class Uploads(Generic[KeyT]):
    """Uploads whose peer has more to send, with the time since when. The time is an argument.

    Thread-safe without a lock, as each method is one atomic operation on a dict, or works on a copy.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._uploads: dict[KeyT, Upload] = {}

    def __len__(self) -> int:
        """Number of uploads in progress."""
        return len(self._uploads)

    def begin(self, key: KeyT, *, now: float) -> Upload:
        """Start tracking an upload, whose first message is waited for."""
        upload = self._uploads[key] = Upload(now, now)
        return upload

    def end(self, key: KeyT) -> None:
        """Stop tracking an upload that is complete or no longer wanted."""
        self._uploads.pop(key, None)

    def overdue(self, *, now: float) -> list[tuple[KeyT, DeadlineExceeded]]:
        """Uploads that have timed out, each with the message to end it with. Each is returned once."""
        found: list[tuple[KeyT, DeadlineExceeded]] = []
        for key, upload in self._uploads.copy().items():
            sentence = "" if upload.is_overdue else self._reproach(upload, now)
            if sentence:
                upload.is_overdue = True
                found.append((key, DeadlineExceeded(sentence)))
        return found

    def is_overdue(self, key: KeyT) -> bool:
        """Whether an upload was returned by `overdue` and has not ended since."""
        upload = self._uploads.get(key)
        return upload is not None and upload.is_overdue

    def _reproach(self, upload: Upload, now: float) -> str:
        limits, since = self._limits, upload.waits_since
        waited = 0.0 if since is None else now - since
        if waited >= limits.idle_seconds:
            return f"nothing was received for {waited:.0f} s, and the limit is {limits.idle_seconds:g} s; call again"
        if now - upload.began >= limits.upload_seconds:
            return f"an upload may take at most {limits.upload_seconds:g} s; resend it in smaller parts"
        return ""
