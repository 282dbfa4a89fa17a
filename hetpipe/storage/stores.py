"""From what a user writes after `--store` to a store."""

from __future__ import annotations

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import UserError
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.storage.redis_access import RedisAccess, is_redis
from hetpipe.storage.store import FenceSource, Store


def open_store(
    url: str, *, access: RedisAccess | None = None, fence: FenceSource | None = None, clock: Clock = SYSTEM_CLOCK
) -> Store:
    """The store that `memory`, `redis://USER@HOST:PORT/DB`, `rediss://…` or `unix://PATH` names.

    Args:
        url: as a user writes it.
        access: password and certificates, for Redis.
        fence: that of the lead under which everything is written; None: nobody leads there.
        clock: of leases in memory.

    Raises:
        UserError: it names none, or `access` cannot be used.
    """
    if url == "memory":
        if access is not None and access != RedisAccess():
            raise UserError("--store memory needs no password and no certificates; write --store redis://… with them")
        return MemoryStore(clock)
    if is_redis(url):
        # Only who uses Redis pays for its import.
        from hetpipe.storage.redis_store import RedisStore

        return RedisStore(url, access=access, fence=fence)
    raise UserError(f"--store {url} names no store; write `memory` or `redis://HOST:PORT/DB`")
