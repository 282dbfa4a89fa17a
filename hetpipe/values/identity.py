"""Identities of processes, as stated in certificates and required by peers.

An identity is one URI (a SPIFFE ID) in the certificate's subject alternative names:

    spiffe://hetpipe/ROLE/NAME                               every process but stages; signed by the root
    spiffe://stages.hetpipe/JOB/term/T/vw/V/life/L/stage/S   one life of one stage; signed by the coordinator's signer

The two trust domains differ so that a name constraint can bind the coordinator's signer to stages. A server's
certificate also has a DNS name made from its role, and a parameter server's one made from its index as well. Clients
verify that name instead of the address they dial, so a server may move, and no other process can impersonate it;
clients that know the index verify the name of exactly that parameter server.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

from hetpipe.errors import UserError
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex

#: Trust domain of processes whose certificates are made by an operator, and that of stages.
DOMAIN = "hetpipe"
STAGE_DOMAIN = "stages.hetpipe"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NAMED = re.compile(rf"spiffe://{DOMAIN}/([a-z-]+)/({_NAME.pattern})")
_STAGE = re.compile(
    rf"spiffe://{re.escape(STAGE_DOMAIN)}/({_NAME.pattern})/term/(\d{{1,16}})/vw/(\d{{1,9}})/life/(\d{{1,16}})"
    r"/stage/(\d{1,9})"
)

#: A parameter server is named by its index among the shards.
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")

#: Prefix of the member id of parameter servers.
_SHARD_PREFIX = "parameter-server-"

#: Hexadecimal digits of a job's digest in the DNS name of its stages.
_JOB_DIGITS = 32


class Role(StrEnum):
    """The role of a process, as named in its certificate."""

    COORDINATOR = "coordinator"
    PARAMETER_SERVER = "parameter-server"
    AGENT = "agent"
    STAGE = "stage"
    OPERATOR = "operator"
    """A person or a script: submits and stops jobs, reads status."""
    MONITOR = "monitor"
    """Read-only access."""
    REDIS = "redis"
    """The coordinator's store; makes no calls. Its name is the host under which the coordinator reaches it, because
    Redis clients verify host names.
    """


@dataclass(frozen=True, slots=True)
class NamedPeer:
    """A process with a certificate made by an operator: every process but stages."""

    role: Role
    name: str
    """Unique within the role: the shard's index, the agent's node, the operator's name."""

    def __post_init__(self) -> None:
        """Validate the name.

        Raises:
            UserError: the name has characters other than letters, digits, `.`, `_` and `-`, or more than 100; or it
                would give a Redis server the DNS name of another process; or that of a parameter server is not an
                index.
        """
        if self.role is Role.STAGE or not _NAME.fullmatch(self.name):
            raise UserError(
                f"{self.name!r} is not a valid name in a certificate; use up to 100 letters, digits, dots, "
                "underscores and dashes, beginning with a letter or a digit"
            )
        if self.role is Role.REDIS and self.name.lower().rstrip(".").endswith(f".{DOMAIN}"):
            raise UserError(
                f"{self.name} is not a valid name for Redis: names in .{DOMAIN} are reserved for hetpipe's own "
                "processes"
            )

        if self.role is Role.PARAMETER_SERVER and not _INDEX.fullmatch(self.name):
            raise UserError(f"a parameter server is named by its index, 0, 1, …, not {self.name!r}")

    @property
    def uri(self) -> str:
        """The URI in its certificate."""
        return f"spiffe://{DOMAIN}/{self.role}/{self.name}"

    @property
    def server_name(self) -> str:
        """The DNS name that only this process can prove; coordinators share one, as any of them may become leader."""
        match self.role:
            case Role.REDIS:
                return self.name
            case Role.PARAMETER_SERVER:
                return f"{self.member_id}.{DOMAIN}"
            case _:
                return server_name(self.role)

    @property
    def server_names(self) -> tuple[str, ...]:
        """The DNS names in its certificate: its own, and that of its role for clients that do not know the index."""
        return tuple(dict.fromkeys((self.server_name, *(() if self.role is Role.REDIS else (server_name(self.role),)))))

    @property
    def member_id(self) -> str:
        """The id under which it registers with the coordinator."""
        return f"{_SHARD_PREFIX}{self.name}" if self.role is Role.PARAMETER_SERVER else self.name

    def __str__(self) -> str:
        """The identity for messages."""
        return f"{self.role} {self.name}"


@dataclass(frozen=True, slots=True)
class StagePeer:
    """One incarnation of one stage of one virtual worker of one job; its certificate is valid for no other."""

    job_id: JobId
    vw: VirtualWorkerIndex
    stage: StageIndex
    incarnation: Incarnation
    term: Term
    """Term of the job: after a rewind incarnations are numbered from 0 again."""

    role = Role.STAGE

    @property
    def uri(self) -> str:
        """The URI in its certificate."""
        life = f"term/{self.term}/vw/{self.vw}/life/{self.incarnation}/stage/{self.stage}"
        return f"spiffe://{STAGE_DOMAIN}/{self.job_id}/{life}"

    @property
    def server_name(self) -> str:
        """The DNS name in its certificate. The job is a digest, because DNS labels are short and case-insensitive."""
        digest = hashlib.sha256(self.job_id.encode()).hexdigest()[:_JOB_DIGITS]
        return f"s{self.stage}.l{self.incarnation}.v{self.vw}.t{self.term}.{digest}.{STAGE_DOMAIN}"

    @property
    def server_names(self) -> tuple[str, ...]:
        """The DNS names in its certificate: its server name only."""
        return (self.server_name,)

    def __str__(self) -> str:
        """The identity for messages."""
        life = f"life {self.incarnation} in term {self.term}"
        return f"stage {self.stage} of virtual worker {self.vw} of job {self.job_id} ({life})"


Peer = NamedPeer | StagePeer


def server_name(role: Role) -> str:
    """The DNS name that all servers of `role` prove; stages have names of their own."""
    return f"{role}.{DOMAIN}"


def shard_server_name(member_id: str) -> str:
    """The DNS name that only the parameter server registered as `member_id` can prove.

    >>> shard_server_name("parameter-server-1")
    'parameter-server-1.hetpipe'
    """
    return f"{member_id}.{DOMAIN}"


def identity_from_uri(uri: str) -> Peer | None:
    """Parse the URI of an identity; None if it is not one of hetpipe's."""
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
