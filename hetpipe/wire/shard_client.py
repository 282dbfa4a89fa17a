"""The client of a parameter-server shard."""

from __future__ import annotations

from collections.abc import Callable

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.values.identity import Role, server_name, shard_server_name
from hetpipe.values.ids import ShardIndex
from hetpipe.wire.caller import Caller
from hetpipe.wire.connection import Target
from hetpipe.wire.tls import Tls


def connect_shard(
    address: str,
    shard: ShardIndex | None = None,
    *,
    member_id: str = "",
    tls: Tls | None = None,
    clock: Clock = SYSTEM_CLOCK,
    fence: Callable[[], int] | None = None,
) -> Caller:
    """The client of one shard; connects on first use.

    Args:
        address: `HOST:PORT`.
        shard: its index, for error messages.
        member_id: of the shard, which it must prove with TLS; empty: any parameter server is accepted.
        tls: this process's certificates; None: plaintext.
        clock: measures the duration of calls.
        fence: the fence of the coordinator's lead, for a coordinator.

    Raises:
        UserError: the address is malformed.
    """
    role = "parameter server" if shard is None else f"parameter server {shard}{' (clock shard)' if shard == 0 else ''}"
    name = shard_server_name(member_id) if member_id else server_name(Role.PARAMETER_SERVER)
    return Caller(Target(address=address, role=role, tls=tls, server_name=name), clock=clock, fence=fence)
