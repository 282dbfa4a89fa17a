"""Logging of refused calls, rate-limited per peer and in total.

The log escapes and truncates peer-supplied text (`observe.log`); here it is truncated further, because a refused peer
may be an attacker that tries to fill the log. Individual lines are written at a rate a person can read; further
refusals are counted and summarized periodically. The calls of a peer that is refused continuously are rejected unread
for a while, which costs less than repeating the reason.
"""

from __future__ import annotations

import threading
from collections import Counter

from hetpipe.clock import Clock
from hetpipe.observe.log import get_logger

_log = get_logger(__name__)

#: Maximum number of characters of the name of a peer, a call or an identity, and of a sentence.
MAX_NAME_CHARACTERS = 200
MAX_SENTENCE_CHARACTERS = 1_000

#: Log lines as a burst and per second: of one peer, and of all together.
LINES_AT_ONCE_PER_PEER = 20
LINES_PER_SECOND_PER_PEER = 1.0
LINES_AT_ONCE = 100
LINES_PER_SECOND = 5.0

#: Refusals of one certificate as a burst and per second, above which its calls are rejected unread.
REFUSALS_AT_ONCE = 100
REFUSALS_PER_SECOND = 10.0

#: Seconds between two summary lines.
SUMMARY_SECONDS = 10.0

#: Maximum number of peers counted individually; the others are counted as one.
MAX_PEERS = 1_000
_OTHERS = "others"

#: Maximum number of peers named in a summary.
_MAX_NAMED = 5


class Allowance:
    """A token bucket with a burst capacity and a refill rate. Not thread-safe; every call takes the monotonic time."""

    def __init__(self, at_once: int, per_second: float, *, now: float) -> None:
        self._at_once = at_once
        self._per_second = per_second
        self._left = float(at_once)
        self._since = now

    def take(self, *, now: float) -> bool:
        """Take a token; False if none is left."""
        has_one = self.has_one(now=now)
        if has_one:
            self._left -= 1.0
        return has_one

    def has_one(self, *, now: float) -> bool:
        """Whether a token is left."""
        self._left = min(float(self._at_once), self._left + max(0.0, now - self._since) * self._per_second)
        self._since = now
        return self._left >= 1.0

    @property
    def is_full(self) -> bool:
        """Whether the bucket has refilled completely."""
        return self._left >= self._at_once


class Refusals:
    """The refusals of one server. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        now = clock.monotonic()
        self._lines = Allowance(LINES_AT_ONCE, LINES_PER_SECOND, now=now)
        self._lines_of: dict[str, Allowance] = {}
        self._patience_with: dict[str, Allowance] = {}
        #: Refusals without a line of their own since the last summary: by error, and by peer.
        self._errors: Counter[str] = Counter()
        self._peers: Counter[str] = Counter()
        self._summary_at = now + SUMMARY_SECONDS

    def note(self, call: str, *, peer: str, identity: str, error: str, sentence: str, who: str) -> None:
        """Record a refused call.

        Args:
            call: its full name, as the peer wrote it.
            peer: the address it came from.
            identity: who the peer's certificate says it is; empty without TLS or for an unknown identity.
            error: class name of the error.
            sentence: the message sent to the peer.
            who: the key under which the peer is counted: its certificate, or its address without the port.
        """
        now = self._clock.monotonic()
        with self._lock:
            own = self._of(self._lines_of, who, LINES_AT_ONCE_PER_PEER, LINES_PER_SECOND_PER_PEER, now=now)
            has_line = own.take(now=now) and self._lines.take(now=now)
            if not has_line:
                self._errors[error] += 1
                self._peers[who if who in self._peers or len(self._peers) < MAX_PEERS else _OTHERS] += 1
        if has_line:
            _log.info(
                "call_refused",
                call=call[:MAX_NAME_CHARACTERS],
                peer=peer[:MAX_NAME_CHARACTERS],
                identity=identity[:MAX_NAME_CHARACTERS],
                error=error,
                sentence=sentence[:MAX_SENTENCE_CHARACTERS],
            )

    def strain(self, who: str) -> None:
        """Record an attempt of a peer that exceeds its rights; see `is_too_much`."""
        now = self._clock.monotonic()
        with self._lock:
            self._of(self._patience_with, who, REFUSALS_AT_ONCE, REFUSALS_PER_SECOND, now=now).take(now=now)

    def is_too_much(self, who: str) -> bool:
        """Whether a peer has made so many such attempts that its calls are rejected unread for now."""
        now = self._clock.monotonic()
        with self._lock:
            known = self._patience_with.get(who)
            return known is not None and not known.has_one(now=now)

    def summarise(self) -> None:
        """Write the summary line if it is due; to be called periodically."""
        now = self._clock.monotonic()
        with self._lock:
            if now < self._summary_at:
                return
            self._summary_at = now + SUMMARY_SECONDS
            errors, self._errors = self._errors, Counter()
            peers, self._peers = self._peers, Counter()
            for known in (self._lines_of, self._patience_with):
                for who in [
                    who for who, allowance in known.items() if allowance.has_one(now=now) and allowance.is_full
                ]:
                    del known[who]
        if errors:
            named = {who[:MAX_NAME_CHARACTERS]: number for who, number in peers.most_common(_MAX_NAMED)}
            _log.warning("calls_refused", number=errors.total(), errors=dict(errors), peers=len(peers), most_from=named)

    @staticmethod
    def _of(known: dict[str, Allowance], who: str, at_once: int, per_second: float, *, now: float) -> Allowance:
        key = who if who in known or len(known) < MAX_PEERS else _OTHERS
        if key not in known:
            known[key] = Allowance(at_once, per_second, now=now)
        return known[key]
