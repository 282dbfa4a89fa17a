"""What the coordinator asks of a shard; the calls themselves are in `rpc.shard_client`."""

from __future__ import annotations

from hetpipe.rpc.shard_client import ShardControl

__all__ = ["ShardControl"]
