"""How much of a server one peer may have at a time, counted where every call passes (`rpc.guard`).

A call of a sync server holds a thread from its first byte to its last, also while it waits for its peer to send. So a
peer that opens calls and sends nothing would, without a limit, have all threads in the end. `Admission` counts running
calls per peer, and the bytes that peers have announced; what goes beyond a limit is `Busy`, which clients of hetpipe
take as "ask again soon", so that a limit slows an honest run down and never ends it. `Uploads` knows which calls wait
for their peer, and for how long.

A peer is its certificate. Without TLS it is an address, and a whole run on one machine comes from one: then 200 stages
and 64 shards are one peer, which may have all but an eighth of the threads (`Limits.of_address`), and all of the bytes.
With TLS a stage has at most about eight calls at a shard at a time: one that follows the log, a push, a pull, and some
short ones; an agent has three at the coordinator; a shard or the coordinator a few per job. 64 is room for all of that.

Roles share the threads, too (`SHARES`): however many peers of a role there are, they leave room for whoever a job needs
more than them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Generic, TypeVar

from hetpipe.errors import Busy, DeadlineExceeded
from hetpipe.values.identity import Role

KeyT = TypeVar("KeyT")

#: Of the threads of a server with at least this many, peers without a certificate leave one in `_RESERVE` to others.
_MIN_SHARED_THREADS = 16
_RESERVE = 8


#: Of the threads of a server, what all peers of a role may have together; the others may have all.
SHARES: Mapping[Role, Fraction] = {
    Role.MONITOR: Fraction(1, 8),
    Role.OPERATOR: Fraction(1, 4),
    Role.STAGE: Fraction(7, 8),
}


def room_of(role: Role, num_threads: int) -> int | None:
    """Running calls that all peers of a role may have on a server with `num_threads`; None: as many as there are.

    >>> room_of(Role.MONITOR, 192), room_of(Role.AGENT, 192), room_of(Role.MONITOR, 4)
    (24, None, None)
    """
    share = SHARES.get(role)
    return None if share is None or num_threads < _MIN_SHARED_THREADS else int(share * num_threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one peer may have of a server at a time. `None`: as much as there is."""

    calls_per_peer: int | None = 64
    """Running calls, streams included."""
    streams_per_peer: int | None = 32
    """Running calls whose requests or answers are a stream."""
    bytes_per_peer: int | None = 2 << 30
    """Announced bytes of the uploads under way. A peer with nothing under way may announce more: a slice may be large,
    and whether it is one of the plan is for the handler to say."""
    bytes_in_total: int | None = 16 << 30
    """The same over all peers, with the same exception."""
    idle_seconds: float = 30.0
    """Longest wait for the next message of an upload, or for a request that was begun."""
    upload_seconds: float = 3_600.0
    """Longest upload; as long as the longest deadline of hetpipe's own."""

    def of_address(self, num_threads: int) -> Limits:
        """The same for a peer that is known by its address only, on a server with `num_threads`.

        >>> Limits().of_address(360).calls_per_peer
        315
        """
        reserve = num_threads // _RESERVE if num_threads >= _MIN_SHARED_THREADS else 0
        shared = num_threads - reserve
        return replace(self, calls_per_peer=shared, streams_per_peer=shared, bytes_per_peer=None)


class Admission:
    """Counts what runs. Thread-safe; never blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._groups: Counter[str] = Counter()

    @contextmanager
    def call(
        self, peer: str, limits: Limits, *, is_stream: bool, group: tuple[str, int | None] = ("", None)
    ) -> Iterator[None]:
        """Count a call while it runs; `group` is the peer's role, with the calls that it may have.

        Raises:
            Busy: `peer`, or its role, has as many as it may.
        """
        role, room = group
        counted = [
            (self._calls, peer, limits.calls_per_peer, "calls"),
            (self._groups, role, room, "calls of its role"),
            (self._streams, peer, limits.streams_per_peer, "streams"),
        ][: 3 if is_stream else 2]
        with self._lock:
            for counter, key, limit, what in counted:
                if limit is not None and counter[key] >= limit:
                    raise Busy(f"{peer} has {counter[key]} {what} under way, and may have {limit}; ask again soon")
            for counter, key, _, _ in counted:
                counter[key] += 1
        try:
            yield
        finally:
            with self._lock:
                for counter, key, _, _ in counted:
                    _subtract(counter, key, 1)

    @contextmanager
    def bytes_in_flight(self, peer: str, num_bytes: int, limits: Limits) -> Iterator[None]:
        """Count announced bytes while they are on their way.

        Raises:
            Busy: there are too many already, of this peer or of all.
        """
        with self._lock:
            mine, everyone = self._bytes[peer], self._bytes.total()
            for whose, under_way, limit in (
                (peer, mine, limits.bytes_per_peer),
                ("every peer together", everyone, limits.bytes_in_total),
            ):
                if limit is not None and under_way and under_way + num_bytes > limit:
                    raise Busy(
                        f"{whose} has {under_way} bytes under way, and with {num_bytes} more would have over {limit}; "
                        "ask again soon"
                    )
            self._bytes[peer] += num_bytes
        try:
            yield
        finally:
            with self._lock:
                _subtract(self._bytes, peer, num_bytes)

    @property
    def num_peers(self) -> int:
        """Peers with something under way."""
        with self._lock:
            return len(self._calls.keys() | self._bytes.keys())


def _subtract(counter: Counter[str], peer: str, number: int) -> None:
    counter[peer] -= number
    if not counter[peer]:
        del counter[peer]  # so that peers that come and go leave nothing behind


@dataclass(slots=True)
class _Upload:
    began: float
    waits_since: float | None = None
    is_overdue: bool = False


class Uploads(Generic[KeyT]):
    """The calls whose peer has more to send, and since when it is waited for. Thread-safe; the time is an argument."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._uploads: dict[KeyT, _Upload] = {}

    def __len__(self) -> int:
        """Uploads under way."""
        with self._lock:
            return len(self._uploads)

    def begin(self, key: KeyT, *, now: float) -> None:
        """An upload begins."""
        with self._lock:
            self._uploads[key] = _Upload(now)

    def wait(self, key: KeyT, *, now: float) -> None:
        """Its next message is waited for from now on."""
        with self._lock:
            if key in self._uploads:
                self._uploads[key].waits_since = now

    def arrived(self, key: KeyT) -> None:
        """The message is there."""
        with self._lock:
            if key in self._uploads:
                self._uploads[key].waits_since = None

    def end(self, key: KeyT) -> None:
        """There is no more to come, or no more is wanted."""
        with self._lock:
            self._uploads.pop(key, None)

    def overdue(self, *, now: float) -> list[tuple[KeyT, DeadlineExceeded]]:
        """The uploads that have taken too long, each with the sentence to end it with. They are told once."""
        found: list[tuple[KeyT, DeadlineExceeded]] = []
        with self._lock:
            for key, upload in self._uploads.items():
                sentence = "" if upload.is_overdue else self._reproach(upload, now)
                if sentence:
                    upload.is_overdue = True
                    found.append((key, DeadlineExceeded(sentence)))
        return found

    def is_overdue(self, key: KeyT) -> bool:
        """Whether it has been told to be, and has not ended since."""
        with self._lock:
            return key in self._uploads and self._uploads[key].is_overdue

    def _reproach(self, upload: _Upload, now: float) -> str:
        limits = self._limits
        waited = 0.0 if upload.waits_since is None else now - upload.waits_since
        if waited >= limits.idle_seconds:
            return f"nothing was sent for {waited:.0f} s, where {limits.idle_seconds:g} s are waited; call again"
        if now - upload.began >= limits.upload_seconds:
            return f"an upload takes at most {limits.upload_seconds:g} s; send it again, in smaller parts"
        return ""
