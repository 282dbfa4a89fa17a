"""Who a process is: what its certificate says, and what others may expect of it.

An identity is one URI (a SPIFFE ID) in the certificate's subject alternative names:

    spiffe://hetpipe/ROLE/NAME                               every process but stages; signed by the root
    spiffe://stages.hetpipe/JOB/term/T/vw/V/life/L/stage/S   one life of one stage; signed by the coordinator's signer

The two trust domains differ so that a name constraint can bind the coordinator's signer to stages. A server's
certificate also has a DNS name made from its role, and a parameter server's one made from its index as well. Clients
ask for that name and not for the address they dial, so a server may move, and no other process can play it: whoever
knows the index asks for exactly that parameter server.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

from hetpipe.errors import UserError
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex

#: Trust domain of the processes that an operator makes certificates for, and the domain of stages.
DOMAIN = "hetpipe"
STAGE_DOMAIN = "stages.hetpipe"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NAMED = re.compile(rf"spiffe://{DOMAIN}/([a-z-]+)/({_NAME.pattern})")
_STAGE = re.compile(
    rf"spiffe://{re.escape(STAGE_DOMAIN)}/({_NAME.pattern})/term/(\d{{1,16}})/vw/(\d{{1,9}})/life/(\d{{1,16}})"
    r"/stage/(\d{1,9})"
)

#: A parameter server is named by its position among the shards.
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")

#: Of parameter servers, in front of the name in their member id.
_SHARD_PREFIX = "parameter-server-"

#: Hexadecimal digits of a job's digest in the DNS name of its stages.
_JOB_DIGITS = 32


class Role(StrEnum):
    """What a process does; the word in its certificate."""

    COORDINATOR = "coordinator"
    PARAMETER_SERVER = "parameter-server"
    AGENT = "agent"
    STAGE = "stage"
    OPERATOR = "operator"
    """A person or a script: hands jobs in, stops them, looks."""
    MONITOR = "monitor"
    """Looks only."""
    REDIS = "redis"
    """The coordinator's store; calls nothing. Its name is the host by which the coordinator reaches it, because Redis
    clients know servers by that."""


@dataclass(frozen=True, slots=True)
class NamedPeer:
    """One process that an operator made a certificate for: all but stages."""

    role: Role
    name: str
    """Unique in the role: the shard's index, the agent's node, the operator's name."""

    def __post_init__(self) -> None:
        """Refuse what a URI cannot hold.

        Raises:
            UserError: the name has other characters than letters, digits, `.`, `_` and `-`, or over 100 of them; or it
                would give a Redis the DNS name of another process, or a parameter server no index.
        """
        if self.role is Role.STAGE or not _NAME.fullmatch(self.name):
            raise UserError(
                f"{self.name!r} cannot name a process in a certificate; write up to 100 letters, digits, dots, "
                "underscores and dashes, the first one a letter or a digit"
            )
        if self.role is Role.REDIS and self.name.lower().rstrip(".").endswith(f".{DOMAIN}"):
            raise UserError(
                f"no Redis may be named {self.name}: names in .{DOMAIN} are those of hetpipe's own processes"
            )

        if self.role is Role.PARAMETER_SERVER and not _INDEX.fullmatch(self.name):
            raise UserError(f"a parameter server is named by its index, 0, 1, …, and not {self.name!r}")

    @property
    def uri(self) -> str:
        """The URI of its certificate."""
        return f"spiffe://{DOMAIN}/{self.role}/{self.name}"

    @property
    def server_name(self) -> str:
        """The DNS name that it alone proves; coordinators share one, as any of them may come to lead."""
        match self.role:
            case Role.REDIS:
                return self.name
            case Role.PARAMETER_SERVER:
                return f"{self.member_id}.{DOMAIN}"
            case _:
                return server_name(self.role)

    @property
    def server_names(self) -> tuple[str, ...]:
        """The DNS names of its certificate: its own, and that of its role for who does not know the index."""
        return tuple(dict.fromkeys((self.server_name, *(() if self.role is Role.REDIS else (server_name(self.role),)))))

    @property
    def member_id(self) -> str:
        """The id under which it registers with the coordinator."""
        return f"{_SHARD_PREFIX}{self.name}" if self.role is Role.PARAMETER_SERVER else self.name

    def __str__(self) -> str:
        """As people say it."""
        return f"{self.role} {self.name}"


@dataclass(frozen=True, slots=True)
class StagePeer:
    """One life of one stage of one virtual worker of one job: what one has is worth nothing to another."""

    job_id: JobId
    vw: VirtualWorkerIndex
    stage: StageIndex
    incarnation: Incarnation
    term: Term
    """Of the job: after a rewind lives are counted from 0 again."""

    role = Role.STAGE

    @property
    def uri(self) -> str:
        """The URI of its certificate."""
        life = f"term/{self.term}/vw/{self.vw}/life/{self.incarnation}/stage/{self.stage}"
        return f"spiffe://{STAGE_DOMAIN}/{self.job_id}/{life}"

    @property
    def server_name(self) -> str:
        """The DNS name of its certificate. The job is a digest, because a label is short and knows no capitals."""
        digest = hashlib.sha256(self.job_id.encode()).hexdigest()[:_JOB_DIGITS]
        return f"s{self.stage}.l{self.incarnation}.v{self.vw}.t{self.term}.{digest}.{STAGE_DOMAIN}"

    @property
    def server_names(self) -> tuple[str, ...]:
        """The DNS names of its certificate: that one."""
        return (self.server_name,)

    def __str__(self) -> str:
        """As people say it."""
        life = f"life {self.incarnation} in term {self.term}"
        return f"stage {self.stage} of virtual worker {self.vw} of job {self.job_id} ({life})"


Peer = NamedPeer | StagePeer


def server_name(role: Role) -> str:
    """The DNS name that all servers of `role` prove; stages have names of their own."""
    return f"{role}.{DOMAIN}"


def shard_server_name(member_id: str) -> str:
    """The DNS name that the parameter server which registered under `member_id` proves, and no other one.

    >>> shard_server_name("parameter-server-1")
    'parameter-server-1.hetpipe'
    """
    return f"{member_id}.{DOMAIN}"


def identity_from_uri(uri: str) -> Peer | None:
    """The identity behind a URI, or None if it is none of ours."""
    stage = _STAGE.fullmatch(uri)
    if stage is not None:
        job_id, term, vw, life, index = stage.groups()
        found = StagePeer(
            JobId(job_id), VirtualWorkerIndex(int(vw)), StageIndex(int(index)), Incarnation(int(life)), Term(int(term))
        )
        return found if found.uri == uri else None
    named = _NAMED.fullmatch(uri)
    if named is None or named[1] not in set(Role) - {Role.STAGE}:
        return None
    try:
        return NamedPeer(Role(named[1]), named[2])
    except UserError:
        return None
