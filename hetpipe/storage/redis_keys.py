"""All of hetpipe's keys in Redis. The braces put them into one slot of a Redis Cluster, as multi-key scripts require.

| key | type | content | lifetime |
|---|---|---|---|
| `{hetpipe}:members` | sorted set | member id → order of registration | forever; stale entries are removed by listing |
| `{hetpipe}:member:ID` | hash | `registration`, `order`, `info` (JSON) | for the lease, in milliseconds |
| `{hetpipe}:orders` | counter | highest order assigned | forever |
| `{hetpipe}:term` | counter | highest term assigned | forever |
| `{hetpipe}:jobs` | sorted set | job id → order of creation | forever; stale entries are removed by listing |
| `{hetpipe}:job:ID` | hash | `version`, `record` (JSON) | forever; `ENDED_JOB_SECONDS` after its end |
| `{hetpipe}:job_orders` | counter | highest order of creation assigned | forever |
| `{hetpipe}:events:ID` | stream | `SEQUENCE-0` → `event` (JSON), the newest `MAX_EVENTS` | as its job |
| `{hetpipe}:leader` | hash | `candidate`, `name`, `fence` | for the lease, in milliseconds |
| `{hetpipe}:fence` | counter | fencing token of the newest lead | forever |
"""

from __future__ import annotations

from hetpipe.values.ids import JobId
from hetpipe.values.members import MemberId

#: Prefix of all keys.
PREFIX = "{hetpipe}:"

MEMBERS = "{hetpipe}:members"
ORDERS = "{hetpipe}:orders"
TERM = "{hetpipe}:term"
JOBS = "{hetpipe}:jobs"
JOB_ORDERS = "{hetpipe}:job_orders"
LEADER = "{hetpipe}:leader"
FENCE = "{hetpipe}:fence"


#: Prefixes of the keys of records, which end in an id.
MEMBER_PREFIX = f"{PREFIX}member:"
JOB_PREFIX = f"{PREFIX}job:"
EVENTS_PREFIX = f"{PREFIX}events:"


def member(member_id: MemberId) -> str:
    """Key of one member's hash."""
    return MEMBER_PREFIX + member_id


def job(job_id: JobId) -> str:
    """Key of one job's hash."""
    return JOB_PREFIX + job_id


def events(job_id: JobId) -> str:
    """Key of one job's event stream."""
    return EVENTS_PREFIX + job_id
