"""The Redis ACL of a coordinator: its keys and its commands only.

    user default off resetpass ~* &* +@all
    user hetpipe on #SHA256 ~{hetpipe}:* resetchannels -@all +evalsha +exists …

The lines are an ACL file of Redis (`aclfile`). They contain a digest of the password, not the password.

The default user is disabled and has no password, so no client can authenticate as it. It keeps all permissions because
Redis replays its append-only file as that user, and checks the permissions of each transaction again at EXEC (observed
with 7.0.15; later versions replay without a user). Every script with two or more writes is such a transaction: if the
default user may not run its commands, the server silently drops it from the replay.
"""

from __future__ import annotations

import hashlib
import re

from hetpipe.errors import UserError
from hetpipe.storage import redis_keys

#: Commands of the store itself, and those that open a connection. AUTH and HELLO need no permission.
_OWN_COMMANDS = frozenset(
    {
        "evalsha",
        "exists",
        "get",
        "hget",
        "hgetall",
        "pttl",
        "scan",
        "script|load",
        "select",
        "wait",
        "xrange",
        "xrevrange",
        "zrange",
    }
)

#: The user as which Redis replays its append-only file; logging in as it is disabled.
_REPLAY_USER = "user default off resetpass ~* &* +@all"

#: Commands used by the scripts; Redis checks them against the permissions of the calling user.
_SCRIPT_COMMANDS = frozenset(
    {
        "del",
        "exists",
        "get",
        "hget",
        "hmget",
        "hset",
        "incr",
        "persist",
        "pexpire",
        "pttl",
        "set",
        "xadd",
        "xrevrange",
        "zadd",
        "zrem",
        "zscore",
    }
)

#: For health checks by the operator of Redis: with the default user off, only a named user gets a reply.
_HEALTH_COMMANDS = frozenset({"ping"})

#: Those that Redis' documentation names for the user of a replica (`masteruser`).
_REPLICATION_COMMANDS = frozenset({"ping", "psync", "replconf"})

COMMANDS = _OWN_COMMANDS | _SCRIPT_COMMANDS | _HEALTH_COMMANDS

_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def acl_lines(user: str, password: str) -> tuple[str, str]:
    """The lines of the ACL file: no anonymous login, and `user` with the coordinator's permissions.

    Raises:
        UserError: `user` is not a valid name.
    """
    if user == "default" or not _USER.fullmatch(user):
        raise UserError(
            f"--user {user!r} is not a valid name for the coordinator's user; use letters, digits, dots, "
            "underscores or dashes, and not `default`, which is the anonymous user"
        )
    return _REPLAY_USER, _line(user, password, f"~{redis_keys.PREFIX}* ", COMMANDS)


def replication_line(user: str, password: str) -> str:
    """The line of the user as which a replica follows the primary: it can copy everything, and do nothing else."""
    return _line(user, password, "", _REPLICATION_COMMANDS)


def _line(user: str, password: str, of_keys: str, commands: frozenset[str]) -> str:
    digest = hashlib.sha256(password.encode()).hexdigest()
    rights = " ".join(f"+{command}" for command in sorted(commands))
    return f"user {user} on #{digest} {of_keys}resetchannels -@all {rights}"
