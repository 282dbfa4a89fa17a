"""From what a user writes after `--store` to a store."""

from __future__ import annotations

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.coordinator.memory_store import MemoryStore
from hetpipe.coordinator.store import Store
from hetpipe.errors import UserError


def open_store(url: str, *, clock: Clock = SYSTEM_CLOCK) -> Store:
    """The store that `memory`, `redis://HOST:PORT/DB`, `rediss://…` or `unix://PATH` names.

    Raises:
        UserError: it names none.
    """
    if url == "memory":
        return MemoryStore(clock)
    if url.startswith(("redis://", "rediss://", "unix://")):
        # Only who uses Redis pays for its import.
        from hetpipe.coordinator.redis_store import RedisStore

        return RedisStore(url)
    raise UserError(f"--store {url} names no store; write `memory` or `redis://HOST:PORT/DB`")
