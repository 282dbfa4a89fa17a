"""Retries with exponential backoff while a parameter server is unavailable.

`RetryingCalls` wraps the calls of a stage. A call that fails because its server is unavailable or busy is retried with
exponential backoff, until a deadline; other errors are not retried, nor are calls that are not idempotent
(`wire.calls`). A disconnect during a pull restarts it: the next chunk is the first one again. A log is followed from
the position reached.

The start and the end of each outage are logged once, and every wait is reported to followers of the run every
five seconds.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.clock import Clock as TimeSource
from hetpipe.errors import Busy, HetpipeError, PeerUnreachable, Unavailable
from hetpipe.observe.log import get_logger
from hetpipe.pipeline.waiting import REPORT_AFTER_SECONDS
from hetpipe.values.run import StageReport, StageWaiting
from hetpipe.wire.call import Calls, Chunk, Download, ReplyT, RequestT, Streaming, Unary, Upload

_log = get_logger(__name__)

T = TypeVar("T")

#: First and longest pause before a retry; jitter reduces it by up to half.
_FIRST_REST_SECONDS = 0.05
_LONGEST_REST_SECONDS = 0.5

#: Longest sleep without a check for the close of the transport.
_LOOK_UP_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Retry policy of one stage's calls to parameter servers."""

    who: str
    """The stage, as the beginning of a sentence."""
    report: Callable[[StageReport], None]
    """Receives reports of waits; called from any thread."""
    seconds: float
    """Deadline: how long a call is retried after its first failure."""
    clock: TimeSource = SYSTEM_CLOCK
    # Not the functions of `random`: user code draws from these, under seeds.
    chance: Callable[[], float] = random.SystemRandom().random
    """Jitter of the backoff, so that clients do not retry at once; from [0, 1)."""


class RetryState:
    """Retry state of one stage for one parameter server. Thread-safe; its `Calls` may share it."""

    def __init__(self, peer: str, policy: RetryPolicy) -> None:
        """Start without an outage.

        Args:
            peer: the parameter server, as part of a sentence.
            policy: the retry policy.
        """
        self._peer = peer
        self._policy = policy
        self._lock = threading.Lock()
        self._closed = False
        #: Start of the outage, in monotonic seconds; None without one.
        self._away_since: float | None = None
        #: Time of the last report of a wait.
        self._reported_at = float("-inf")

    def close(self) -> None:
        """End every wait at once; each raises the error it was retrying."""
        self._closed = True

    def call(self, attempt: Callable[[], T]) -> T:
        """Result of `attempt`, retried until it succeeds.

        Raises:
            PeerUnreachable: the deadline passed.
            HetpipeError: an error that is not retried.
        """
        wait = _Wait(self)
        while True:
            try:
                answer = attempt()
            except (Unavailable, Busy) as error:
                wait.out(error)
            except HetpipeError:
                self._on_answer()
                raise
            else:
                self._on_answer()
                return answer

    def stream(self, begin: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Items of the streams of `begin`, which is called again after each disconnect, until one ends.

        Raises:
            PeerUnreachable, HetpipeError: as `call`.
        """
        wait = _Wait(self)
        while True:
            try:
                for item in begin():
                    wait.is_over()
                    self._on_answer()
                    yield item
            except (Unavailable, Busy) as error:
                wait.out(error)
            except HetpipeError:
                self._on_answer()
                raise
            else:
                self._on_answer()
                return

    # -- for `_Wait` --------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> RetryPolicy:
        """The retry policy."""
        return self._policy

    def check(self, error: HetpipeError, waited: float) -> None:
        """Check that the deadline is not reached after `waited` seconds.

        Raises:
            HetpipeError: `error`, if the transport is closed; PeerUnreachable after the deadline.
        """
        if self._closed:
            raise error
        if waited >= self._policy.seconds:
            raise PeerUnreachable(f"{self._policy.who} waited {waited:.0f} s for {self._peer}: {error}") from error

    def report(self, error: HetpipeError, waited: float) -> None:
        """Report a waiting call, at most once per interval."""
        now = self._policy.clock.monotonic()
        is_busy = isinstance(error, Busy)
        with self._lock:
            begins = self._away_since is None and not is_busy
            if begins:
                self._away_since = now
            speaks = waited >= REPORT_AFTER_SECONDS and now - self._reported_at >= REPORT_AFTER_SECONDS
            if speaks:
                self._reported_at = now
        if begins:
            _log.warning("parameter_server_away", peer=self._peer, reason=str(error))
        if speaks:
            state = "is busy" if is_busy else "is unreachable"
            sentence = f"{self._policy.who} has waited {waited:.0f} s for {self._peer}, which {state}"
            self._policy.report(StageWaiting(sentence, waited))

    def sleep(self, seconds: float) -> None:
        """Sleep, but not beyond the close of the transport."""
        while seconds > 0.0 and not self._closed:
            step = min(seconds, _LOOK_UP_SECONDS)
            self._policy.clock.sleep(step)
            seconds -= step

    def _on_answer(self) -> None:
        """Record a response of the server."""
        if self._away_since is None:
            return
        with self._lock:
            since, self._away_since = self._away_since, None
        if since is not None:
            seconds = self._policy.clock.monotonic() - since
            _log.info("parameter_server_back", peer=self._peer, away_seconds=round(seconds, 3))


class _Wait:
    """Wait state of one call."""

    def __init__(self, state: RetryState) -> None:
        self._state = state
        #: Time of the first failure since the last success, in monotonic seconds; None without one.
        self._since: float | None = None
        self._rest = _FIRST_REST_SECONDS

    def out(self, error: HetpipeError) -> None:
        """Wait after a failure; returns when the next attempt is due.

        Raises:
            HetpipeError: no further attempt will be made.
        """
        policy = self._state.policy
        now = policy.clock.monotonic()
        self._since = now if self._since is None else self._since
        waited = now - self._since
        self._state.check(error, waited)
        self._state.report(error, waited)
        self._state.sleep(self._rest * (1.0 - 0.5 * policy.chance()))
        self._state.check(error, waited)
        self._rest = min(2.0 * self._rest, _LONGEST_REST_SECONDS)

    def is_over(self) -> None:
        """Record a success."""
        self._since = None
        self._rest = _FIRST_REST_SECONDS


class RetryingCalls:
    """`Calls` that retry idempotent calls while their server is unavailable."""

    def __init__(self, inner: Calls, state: RetryState) -> None:
        self._inner = inner
        self._state = state

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        """Implement `Calls.invoke`."""
        if not call.is_repeatable:
            return self._inner.invoke(call, request)
        return self._state.call(lambda: self._inner.invoke(call, request))

    def stream(self, call: Streaming[RequestT, ReplyT], request: RequestT) -> Iterator[ReplyT]:
        """Implement `Calls.stream`; after a break it resumes at the position reached."""
        resume = call.resume
        newest = request

        def begin() -> Iterator[ReplyT]:
            return self._inner.stream(call, newest)

        for reply in self._state.stream(begin):
            if resume is not None:
                newest = resume(newest, reply)
            yield reply

    def upload(self, call: Upload[RequestT, ReplyT], header: RequestT, chunks: Iterable[Chunk]) -> ReplyT:
        """Implement `Calls.upload`."""
        if not call.is_repeatable:
            return self._inner.upload(call, header, chunks)
        return self._state.call(lambda: self._inner.upload(call, header, chunks))

    def download(self, call: Download[RequestT], header: RequestT) -> Iterator[Chunk]:
        """Implement `Calls.download`; after a disconnect the chunks start over."""
        return self._state.stream(lambda: self._inner.download(call, header))

    def close(self) -> None:
        """Close the connection; calls that wait for a retry end at once."""
        self._state.close()
        self._inner.close()
