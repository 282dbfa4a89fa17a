"""The store of a coordinator that may be restarted elsewhere: Redis 6 or newer, one Lua script per atomic operation.

Values are JSON, numbers are Redis's own. A connection that breaks is tried once more at once; every script may safely
run twice. Keys are built in `redis_keys`; each script's header names those it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.retry import Retry

from hetpipe.coordinator import redis_keys as keys
from hetpipe.coordinator.redis_access import RedisAccess, RedisTarget, connection_options, read_password, read_url
from hetpipe.coordinator.redis_records import event_of, job_of, member_of
from hetpipe.coordinator.store import MAX_EVENTS, CandidateId, Fence, FenceSource, JobRecord, Lead, MemberRecord
from hetpipe.errors import NotLeader, StoreUnavailable, UnknownMember, UserError, VersionConflict
from hetpipe.spec.events import JobEvent, NumberedEvent
from hetpipe.spec.ids import JobId, Term
from hetpipe.spec.members import MemberId, MemberInfo, Registration
from hetpipe.spec.wire import from_json, to_json

#: Seconds for a connection and for an answer. Below a heartbeat's deadline, which may wait for it.
_ANSWER_SECONDS = 1.0

#: What a coordinator writes.
_WRITES = (
    "append_event",
    "create_job",
    "forget_expired",
    "next_term",
    "put_member",
    "remove_member",
    "renew_member",
    "replace_job",
)

#: What decides who may.
_LEAD = ("acquire_lead", "release_lead", "renew_lead")

_LEAD_KEYS = (keys.LEADER, keys.FENCE)

#: Begins the answer of `fenced.lua` to a writer that no longer leads.
_NOT_LEADER = "NOTLEADER"


class PasswordFile(redis.CredentialProvider):
    """User and password of new connections. The file is read for each, so a changed password needs no restart."""

    def __init__(self, user: str, path: Path) -> None:
        self._user = user
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """The user, unless it is the default one, and the password as the file says now.

        Raises:
            AuthenticationError: the file cannot be read.
        """
        try:
            password = read_password(self._path)
        except UserError as error:
            raise redis.AuthenticationError(str(error)) from error
        return (self._user, password) if self._user else (password,)


class RedisStore:
    """`Store` in Redis. Leases run by the server's clock."""

    def __init__(self, url: str, *, access: RedisAccess | None = None, fence: FenceSource | None = None) -> None:
        """Connect on first use to `redis://…`, `rediss://…` or `unix://…`.

        Args:
            url: where; with the user's name, without a password.
            access: password and certificates.
            fence: that of the lead under which everything is written; None: nobody leads here.

        Raises:
            UserError: the URL or a file of `access` cannot be used.
        """
        self._target = read_url(url)
        self._redis = _connect(self._target, access or RedisAccess())
        self._fence = fence
        fenced = "" if fence is None else _script("fenced")
        self._scripts: dict[str, Script] = {
            **{name: self._redis.register_script(fenced + _script(name)) for name in _WRITES},
            **{name: self._redis.register_script(_script(name)) for name in _LEAD},
        }

    def acquire_lead(self, candidate: CandidateId, name: str, *, above: Fence, lease_seconds: float) -> Lead:
        """As `Store.acquire_lead`."""
        lease_ms = _milliseconds(lease_seconds)
        answer = self._call("acquire_lead", _LEAD_KEYS, [candidate, name, above, lease_ms])
        holder, holder_name, fence = cast("list[str]", answer)
        return Lead(CandidateId(holder), holder_name, Fence(int(fence)))

    def renew_lead(self, lead: Lead, *, lease_seconds: float) -> None:
        """As `Store.renew_lead`."""
        lease_ms = _milliseconds(lease_seconds)
        holder = self._call("renew_lead", _LEAD_KEYS, [lead.candidate, lead.name, lead.fence, lease_ms])
        if holder:
            raise NotLeader(f"{holder} has the lead")

    def release_lead(self, lead: Lead) -> None:
        """As `Store.release_lead`."""
        self._call("release_lead", _LEAD_KEYS[:1], [lead.candidate, lead.fence])

    def put_member(self, info: MemberInfo, registration: Registration, *, lease_seconds: float) -> MemberRecord:
        """As `Store.put_member`."""
        order = self._run(
            "put_member",
            [keys.MEMBERS, keys.member(info.id), keys.ORDERS],
            [info.id, registration, to_json(MemberInfo, info), _milliseconds(lease_seconds)],
        )
        return MemberRecord(info, registration, int(order))

    def renew_member(self, member_id: MemberId, registration: Registration, *, lease_seconds: float) -> None:
        """As `Store.renew_member`."""
        renewed = self._run("renew_member", [keys.member(member_id)], [registration, _milliseconds(lease_seconds)])
        if not int(renewed):
            raise UnknownMember(f"{member_id} is no member under this registration; register again")

    def remove_member(self, member_id: MemberId, registration: Registration) -> None:
        """As `Store.remove_member`."""
        self._run("remove_member", [keys.MEMBERS, keys.member(member_id)], [member_id, registration])

    def members(self) -> tuple[MemberRecord, ...]:
        """As `Store.members`."""
        records = []
        for member_id, fields in self._indexed(keys.MEMBERS, lambda entry: keys.member(MemberId(entry))):
            if fields:
                records.append(member_of(fields))
            else:
                self._run("forget_expired", [keys.MEMBERS, keys.member(MemberId(member_id))], [member_id])
        return tuple(records)

    def next_term(self, *, above: Term) -> Term:
        """As `Store.next_term`."""
        return Term(int(self._run("next_term", [keys.TERM], [above])))

    def create_job(self, record: JobRecord) -> JobRecord:
        """As `Store.create_job`."""
        kept = self._run(
            "create_job",
            [keys.JOBS, keys.job(record.job_id), keys.JOB_ORDERS],
            [record.job_id, to_json(JobRecord, replace(record, version=1))],
        )
        created: JobRecord = from_json(JobRecord, kept)
        return created

    def replace_job(self, record: JobRecord, *, keep_seconds: float | None = None) -> JobRecord:
        """As `Store.replace_job`."""
        following = replace(record, version=record.version + 1)
        replaced = self._run(
            "replace_job",
            [keys.job(record.job_id), keys.events(record.job_id)],
            [
                record.version,
                to_json(JobRecord, following),
                -1 if keep_seconds is None else _milliseconds(keep_seconds),
            ],
        )
        if not int(replaced):
            raise VersionConflict(f"job {record.job_id} is not at version {record.version}")
        return following

    def job(self, job_id: JobId) -> JobRecord | None:
        """As `Store.job`."""
        with self._guarded():
            text = cast("str | None", self._redis.hget(keys.job(job_id), "record"))
        return None if text is None else from_json(JobRecord, text)

    def jobs(self) -> tuple[JobRecord, ...]:
        """As `Store.jobs`."""
        records: list[JobRecord] = []
        for job_id, fields in self._indexed(keys.JOBS, lambda entry: keys.job(JobId(entry))):
            if fields:
                records.append(job_of(fields))
            else:
                self._run("forget_expired", [keys.JOBS, keys.job(JobId(job_id))], [job_id])
        return tuple(records)

    def append_event(self, job_id: JobId, event: NumberedEvent) -> None:
        """As `Store.append_event`."""
        appended = self._run(
            "append_event",
            [keys.job(job_id), keys.events(job_id)],
            [event.sequence, to_json(JobEvent, event.event), MAX_EVENTS],
        )
        if not int(appended):
            raise VersionConflict(f"job {job_id} is not kept, so its event {event.sequence} cannot be")

    def events(self, job_id: JobId, *, after: int = 0, limit: int = 1_000) -> tuple[NumberedEvent, ...]:
        """As `Store.events`."""
        with self._guarded():
            entries = cast(
                "list[tuple[str, dict[str, str]]]",
                self._redis.xrange(keys.events(job_id), min=f"({after}-0", count=limit),
            )
        return tuple(event_of(entry, fields) for entry, fields in entries)

    def close(self) -> None:
        """As `Store.close`."""
        self._redis.close()

    def _run(self, script: str, script_keys: Sequence[str], arguments: Sequence[str | int]) -> str:
        """Write, as the leader if there is one."""
        if self._fence is not None:
            script_keys, arguments = [*script_keys, keys.FENCE], [*arguments, self._fence()]
        return cast("str", self._call(script, script_keys, arguments))

    def _call(self, script: str, script_keys: Sequence[str], arguments: Sequence[str | int]) -> object:
        with self._guarded():
            return self._scripts[script](keys=list(script_keys), args=list(arguments))

    def _indexed(self, index: str, key_of: Callable[[str], str]) -> list[tuple[str, dict[str, str]]]:
        """The ids of an index in order, each with the fields of its record, none when it has expired."""
        with self._guarded():
            ids = cast("list[str]", self._redis.zrange(index, 0, -1))
            pipeline = self._redis.pipeline(transaction=False)
            for entry in ids:
                pipeline.hgetall(key_of(entry))
            return list(zip(ids, cast("list[dict[str, str]]", pipeline.execute()), strict=True))

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as error:
            if str(error).startswith(_NOT_LEADER):
                raise NotLeader("another coordinator leads now; what this one wrote was refused") from error
            raise StoreUnavailable(_sentence(self._target, error)) from error


def _connect(target: RedisTarget, access: RedisAccess) -> redis.Redis:
    credentials = None if access.password_file is None else PasswordFile(target.user, access.password_file)
    try:
        return redis.Redis.from_url(
            target.url,
            **connection_options(target, access),
            credential_provider=credentials,
            decode_responses=True,
            protocol=2,  # a third version only adds messages that nobody here reads
            socket_timeout=_ANSWER_SECONDS,
            socket_connect_timeout=_ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 1),
        )
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--store {target.url} is no Redis URL: {error}") from error


def _script(name: str) -> str:
    return (resources.files("hetpipe.coordinator") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


def _sentence(target: RedisTarget, error: redis.RedisError) -> str:
    """What became of a command, with the fix where it is known."""
    who = f"user {target.user}" if target.user else "the default user"
    match error:
        case redis.exceptions.NoPermissionError():
            return (
                f"Redis at {target.place} does not let {who} do what the coordinator needs ({error}); give it the line "
                "that `hetpipe render redis-acl` prints"
            )
        case redis.AuthenticationError():
            return (
                f"Redis at {target.place} does not know {who} by this password ({error}); compare "
                "--store-password-file with the password that Redis was given"
            )
        case redis.ConnectionError() if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return (
                f"Redis at {target.place} could not prove who it is ({error}); give --store-ca the authority that "
                "signed its certificate, which must name this host"
            )
    return f"Redis at {target.place} did not take a command of the coordinator: {error}"


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000))
