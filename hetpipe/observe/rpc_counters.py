"""Counters of the calls of this process's gRPC servers, by status; updated in `wire.server`.

One `RPC_COUNTERS` per process, like the log: a process has one role, even with several servers. Counting takes about a
microsecond per call of hundreds.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.observe.metric_names import CALL_BUCKETS
from hetpipe.observe.readings import Distribution, Reading

#: Limit of distinct call names, against peers that send arbitrary names: further ones count as `OTHER`.
MAX_CALLS = 100
OTHER = "other"


class _Code(Protocol):
    @property
    def name(self) -> str: ...


class _Context(Protocol):
    """The used part of gRPC's context of a call."""

    def code(self) -> _Code | None:
        """The status set by the handler; None: not set."""
        ...


@dataclass(slots=True)
class _Call:
    counts: list[int] = field(default_factory=lambda: [0] * (len(CALL_BUCKETS) + 1))
    seconds: float = 0.0
    by_status: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


class RpcCounters:
    """Counters by short name of the call (`Push`). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, _Call] = {}

    def answering(self, method: str, context: _Context, clock: Clock = SYSTEM_CLOCK) -> AbstractContextManager[None]:
        """A context manager around a handler that counts the call as `handled` at any end."""
        return _Answering(self, method, context, clock)

    def handled(self, method: str, *, status: str, seconds: float) -> None:
        """Count an ended call: `method` is gRPC's name (`/SERVICE/CALL`), `status` the name of its gRPC status."""
        with self._lock:
            call = self._call(method)
            call.counts[bisect_left(CALL_BUCKETS, seconds)] += 1
            call.seconds += seconds
            call.by_status[status] += 1

    def refused(self, method: str, *, reason: str) -> None:
        """Count a call rejected with a typed error; `reason` is the name of its class."""
        with self._lock:
            self._call(method).refused[reason] += 1

    def readings(self) -> Iterator[Reading]:
        """A `Source`."""
        with self._lock:
            calls = {
                name: (Distribution(tuple(call.counts), call.seconds), dict(call.by_status), dict(call.refused))
                for name, call in self._calls.items()
            }
        for name, (took, by_status, refused) in calls.items():
            for status, number in by_status.items():
                yield Reading("hetpipe_rpc_handled_total", number, (name, status))
            for reason, number in refused.items():
                yield Reading("hetpipe_rpc_refused_total", number, (name, reason))
            yield Reading("hetpipe_rpc_seconds", took, (name,))

    def _call(self, method: str) -> _Call:
        name = method.rpartition("/")[2]
        known = self._calls.get(name)
        if known is None:
            name = name if len(self._calls) < MAX_CALLS else OTHER
            known = self._calls.setdefault(name, _Call())
        return known


@dataclass(slots=True)
class _Answering(AbstractContextManager[None]):
    """A call that is being answered. No generator: every call of every server passes here."""

    counters: RpcCounters
    method: str
    context: _Context
    clock: Clock
    began: float = 0.0

    def __enter__(self) -> None:
        self.began = self.clock.monotonic()

    def __exit__(self, *_: object) -> None:
        code = self.context.code()
        status = "OK" if code is None else code.name
        self.counters.handled(self.method, status=status, seconds=self.clock.monotonic() - self.began)


#: The counters of this process.
RPC_COUNTERS = RpcCounters()
