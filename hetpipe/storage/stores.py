"""Opens the store given by `--store`."""

from __future__ import annotations

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import UserError
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.storage.redis_access import RedisAccess, is_redis
from hetpipe.storage.store import FenceSource, Store


def open_store(
    url: str,
    *,
    access: RedisAccess | None = None,
    fence: FenceSource | None = None,
    replicas: int = 0,
    clock: Clock = SYSTEM_CLOCK,
) -> Store:
    """Open the store given by `memory`, `redis://USER@HOST:PORT/DB`, `rediss://…` or `unix://PATH`.

    Args:
        url: as given by the user.
        access: password and certificates, for Redis.
        fence: the fence of the lead that all writes require; None: no lead.
        replicas: number of replicas of Redis that must have a write before it counts.
        clock: of leases in memory.

    Raises:
        UserError: it is not such a URL, or `access` cannot be used.
    """
    if url == "memory":
        if replicas:
            raise UserError("--store memory has no replicas; leave --store-replicas out, or use --store redis://…")
        if access is not None and access != RedisAccess():
            raise UserError("--store memory takes no password and no certificates; use --store redis://… with them")
        return MemoryStore(clock)
    if is_redis(url):
        # Only users of Redis pay for its import.
        from hetpipe.storage.redis_store import RedisStore

        return RedisStore(url, access=access, fence=fence, replicas=replicas)
    raise UserError(f"--store {url} is not a store; write `memory` or `redis://HOST:PORT/DB`")
