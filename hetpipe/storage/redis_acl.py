"""The Redis user that a coordinator needs: its keys, its commands, nothing else.

    user default off resetpass ~* &* +@all
    user hetpipe on #SHA256 ~{hetpipe}:* resetchannels -@all +evalsha +exists …

The lines are an ACL file of Redis (`aclfile`). They hold a digest of the password, not the password.

The default user is disabled and has no password, so no client can authenticate as it. It keeps every right because
Redis replays its append-only file as that user, and checks the rights of each transaction again at EXEC (seen with
7.0.15; later versions replay without a user). Every script with two or more writes is such a transaction: if the
default user may not run its commands, the server drops it from the replay and goes on.
"""

from __future__ import annotations

import hashlib
import re

from hetpipe.errors import UserError
from hetpipe.storage import redis_keys

#: What the store says itself, and what a connection begins with. AUTH and HELLO need no right.
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
        "xrange",
        "xrevrange",
        "zrange",
    }
)

#: As whom Redis replays its append-only file; nobody can log in as it.
_REPLAY_USER = "user default off resetpass ~* &* +@all"

#: As whom Redis replays its append-only file; nobody can log in as it.
_REPLAY_USER = "user default off resetpass ~* &* +@all"

#: What the scripts say; Redis checks it with the rights of who runs them.
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

#: For the health checks of who runs Redis: with the default user off, only a known user gets an answer.
_HEALTH_COMMANDS = frozenset({"ping"})

COMMANDS = _OWN_COMMANDS | _SCRIPT_COMMANDS | _HEALTH_COMMANDS

_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def acl_lines(user: str, password: str) -> tuple[str, str]:
    """The ACL file: no login without a name, and `user` with what the coordinator needs.

    Raises:
        UserError: no user can have this name.
    """
    if user == "default" or not _USER.fullmatch(user):
        raise UserError(
            f"--user {user!r} cannot be the coordinator's; write letters, digits, dots, underscores or dashes, and not "
            "`default`, which is everybody without a name"
        )
    digest = hashlib.sha256(password.encode()).hexdigest()
    rights = " ".join(f"+{command}" for command in sorted(COMMANDS))
    return _REPLAY_USER, f"user {user} on #{digest} ~{redis_keys.PREFIX}* resetchannels -@all {rights}"
