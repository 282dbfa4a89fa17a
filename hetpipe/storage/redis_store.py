"""A store for coordinators on several machines: Redis 6.2 or newer, one Lua script per atomic operation.

Values are JSON, numbers use Redis's own representation. After a connection error the operation is retried once
immediately; every script is safe to run twice. Keys are built in `redis_keys`; each script's header names those it
uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.retry import Retry

from hetpipe.errors import (
    NotLeader,
    ProtocolViolation,
    StoreDamaged,
    StoreUnavailable,
    UnknownMember,
    UserError,
    VersionConflict,
)
from hetpipe.storage import redis_keys as keys
from hetpipe.storage.redis_access import RedisAccess, RedisTarget, connection_options, read_password, read_url
from hetpipe.storage.redis_records import event_of, job_of, member_of, sequence_of
from hetpipe.storage.store import (
    ENDED_JOB_SECONDS,
    MAX_EVENTS,
    CandidateId,
    Fence,
    FenceSource,
    JobRecord,
    Lead,
    MemberRecord,
    Repairs,
)
from hetpipe.values.counters import EVENTS_PER_LEAD, FENCES, TERMS
from hetpipe.values.events import JobEvent, NumberedEvent
from hetpipe.values.ids import JobId, Term
from hetpipe.values.members import MemberId, MemberInfo, Registration
from hetpipe.values.wire import from_json, to_json

Id = TypeVar("Id", JobId, MemberId)
Record = TypeVar("Record", JobRecord, MemberRecord)

#: Timeouts in seconds of connecting and of a reply. Below the deadline of a heartbeat, which may wait for both.
_ANSWER_SECONDS = 1.0

#: Timeout in seconds of replicas, below that of a reply.
_REPLICA_SECONDS = 0.8

#: Namespace of stored data.
_WRITES = (
    "append_event",
    "create_job",
    "enter_job",
    "expire_events",
    "forget_expired",
    "next_term",
    "put_member",
    "rebuild_events",
    "reindex",
    "remove_member",
    "renew_member",
    "replace_job",
)

#: Writes that are repeated every second, so that a failover may lose one: they do not wait for replicas.
_RENEWALS = frozenset({"renew_lead", "renew_member"})

#: Namespace of the lead.
_LEAD = ("acquire_lead", "release_lead", "renew_lead", "set_counters")

_LEAD_KEYS = (keys.LEADER, keys.FENCE)

#: In the reply of a primary that has fewer replicas than its `min-replicas-to-write`.
_NO_REPLICAS = "NOREPLICAS"

#: Prefix of the reply of `fenced.lua` to a writer that is no longer the leader.
_NOT_LEADER = "NOTLEADER"

#: Prefix of the reply of scripts that would take a counter to its limit.
_EXHAUSTED = "EXHAUSTED"

#: Number of keys per request in a full scan.
_SCAN_COUNT = 1_000

#: Event numbers derive from leads, which stay below the reserve; higher ones come from a store without the guard
#: against excessive reports.
_LARGEST_SEQUENCE = FENCES.largest_reported * EVENTS_PER_LEAD


class PasswordFile(redis.CredentialProvider):
    """User and password of new connections. The file is read for each, so a changed password needs no restart."""

    def __init__(self, user: str, path: Path) -> None:
        self._user = user
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """The user, unless it is the default one, and the current password in the file.

        Raises:
            AuthenticationError: the file cannot be read.
        """
        try:
            password = read_password(self._path)
        except UserError as error:
            raise redis.AuthenticationError(str(error)) from error
        return (self._user, password) if self._user else (password,)


class RedisStore:
    """`Store` in Redis. Leases use the server's clock."""

    def __init__(
        self, url: str, *, access: RedisAccess | None = None, fence: FenceSource | None = None, replicas: int = 0
    ) -> None:
        """Connect, on first use, to `redis://…`, `rediss://…` or `unix://…`.

        Args:
            url: the address, with a user name but without a password.
            access: password and certificates.
            fence: the fence of the lead that all writes require; None: no lead.
            replicas: number of replicas of Redis that must have a write before it counts.

        Raises:
            UserError: the URL or a file of `access` cannot be used.
        """
        self._target = read_url(url)
        self._redis = _connect(self._target, access or RedisAccess())
        self._fence = fence
        self._replicas = replicas
        fenced = "" if fence is None else _script("fenced")
        self._scripts: dict[str, Script] = {
            **{name: self._redis.register_script(fenced + _script(name)) for name in _WRITES},
            **{name: self._redis.register_script(_script(name)) for name in _LEAD},
        }

    def acquire_lead(self, candidate: CandidateId, name: str, *, above: Fence, lease_seconds: float) -> Lead:
        """Take the lead if it is free; see `Store` for the contract."""
        lease_ms = _milliseconds(lease_seconds)
        answer = self._call("acquire_lead", _LEAD_KEYS, [candidate, name, above, lease_ms, FENCES.limit])
        holder, holder_name, fence = cast("list[str]", answer)
        return Lead(CandidateId(holder), holder_name, Fence(int(fence)))

    def renew_lead(self, lead: Lead, *, lease_seconds: float) -> None:
        """Renew the lease of a lead."""
        lease_ms = _milliseconds(lease_seconds)
        holder = self._call("renew_lead", _LEAD_KEYS, [lead.candidate, lead.name, lead.fence, lease_ms])
        if holder:
            raise NotLeader(f"{holder} has the lead")

    def release_lead(self, lead: Lead) -> None:
        """Release a lead."""
        self._call("release_lead", _LEAD_KEYS[:1], [lead.candidate, lead.fence])

    def put_member(self, info: MemberInfo, registration: Registration, *, lease_seconds: float) -> MemberRecord:
        """Register a member."""
        order = self._run(
            "put_member",
            [keys.MEMBERS, keys.member(info.id), keys.ORDERS],
            [info.id, registration, to_json(MemberInfo, info), _milliseconds(lease_seconds)],
        )
        return MemberRecord(info, registration, int(order))

    def renew_member(self, member_id: MemberId, registration: Registration, *, lease_seconds: float) -> None:
        """Renew the lease of a member."""
        renewed = self._run("renew_member", [keys.member(member_id)], [registration, _milliseconds(lease_seconds)])
        if not int(renewed):
            raise UnknownMember(f"{member_id} is not registered with this token; register again")

    def remove_member(self, member_id: MemberId, registration: Registration) -> None:
        """Remove a member."""
        self._run("remove_member", [keys.MEMBERS, keys.member(member_id)], [member_id, registration])

    def members(self) -> tuple[MemberRecord, ...]:
        """The live members in order of registration."""
        records = []
        for member_id, fields in self._indexed(keys.MEMBERS, lambda entry: keys.member(MemberId(entry))):
            if fields:
                records.append(member_of(fields))
            else:
                self._run("forget_expired", [keys.MEMBERS, keys.member(MemberId(member_id))], [member_id])
        return tuple(records)

    def next_term(self, *, above: Term) -> Term:
        """Allocate a new term."""
        return Term(int(self._run("next_term", [keys.TERM], [above, TERMS.limit])))

    def term(self) -> Term:
        """The highest term allocated.

        Raises:
            StoreDamaged: the stored value is not a number.
        """
        found = self._counter(keys.TERM)
        if found is None:
            raise StoreDamaged(_exhausted(self._target, "its term is not a number"))
        return Term(found)

    def create_job(self, record: JobRecord) -> JobRecord:
        """Store a new job: the record first, as the index can be rebuilt from records (`repair`)."""
        kept = self._run("create_job", [keys.job(record.job_id)], [to_json(JobRecord, replace(record, version=1))])
        self._run("enter_job", [keys.JOBS, keys.JOB_ORDERS], [record.job_id])
        created: JobRecord = from_json(JobRecord, kept)
        return created

    def replace_job(self, record: JobRecord, *, keep_seconds: float | None = None) -> JobRecord:
        """Replace one version of a job by the next."""
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
            raise VersionConflict(f"job {record.job_id} does not have version {record.version}")
        return following

    def job(self, job_id: JobId) -> JobRecord | None:
        """One job, or None."""
        with self._guarded():
            text = cast("str | None", self._redis.hget(keys.job(job_id), "record"))
        return None if text is None else from_json(JobRecord, text)

    def jobs(self) -> tuple[JobRecord, ...]:
        """All jobs in order of creation."""
        records: list[JobRecord] = []
        for job_id, fields in self._indexed(keys.JOBS, lambda entry: keys.job(JobId(entry))):
            if fields:
                records.append(job_of(fields))
            else:
                self._run("forget_expired", [keys.JOBS, keys.job(JobId(job_id))], [job_id])
        return tuple(records)

    def append_event(self, job_id: JobId, event: NumberedEvent) -> None:
        """Append to the events of a job."""
        appended = self._run(
            "append_event",
            [keys.job(job_id), keys.events(job_id)],
            [event.sequence, to_json(JobEvent, event.event), MAX_EVENTS],
        )
        if not int(appended):
            raise VersionConflict(f"job {job_id} is not stored, so its event {event.sequence} cannot be appended")

    def events(self, job_id: JobId, *, after: int = 0, limit: int = 1_000) -> tuple[NumberedEvent, ...]:
        """Events of a job after a sequence number."""
        with self._guarded():
            entries = cast(
                "list[tuple[str, dict[str, str]]]",
                self._redis.xrange(keys.events(job_id), min=f"({after}-0", count=limit),
            )
        return tuple(event_of(entry, fields) for entry, fields in entries)

    def repair(self) -> Repairs:
        """Rebuild the indices from the records and renumber invalid events."""
        with self._guarded():
            found = list(self._redis.scan_iter(match=f"{keys.PREFIX}*", count=_SCAN_COUNT))
        job_ids = _ids(found, keys.JOB_PREFIX)
        jobs, dropped, more_unreadable = self._repair_jobs(job_ids)
        members, unreadable = self._repair_members(_ids(found, keys.MEMBER_PREFIX))
        streams = sorted(map(JobId, _ids(found, keys.EVENTS_PREFIX)))
        return Repairs(
            jobs=jobs,
            members=members,
            dropped_jobs=dropped,
            renumbered=tuple(job_id for job_id in self._beyond(streams) if self._renumber(job_id)),
            lost_jobs=tuple(job_id for job_id in streams if job_id not in job_ids and self._expire_events(job_id)),
            unreadable=(*more_unreadable, *unreadable),
        )

    def counters(self) -> tuple[int | None, int | None]:
        """The highest fence and the highest term; None for a value that is not a number."""
        return self._counter(keys.FENCE), self._counter(keys.TERM)

    def set_counters(self, *, fence: int | None = None, term: int | None = None) -> None:
        """Set the given counters while there is no leader. For `hetpipe repair store`: others only increment them.

        Raises:
            UserError: there is a leader; nothing has changed.
        """
        values: list[str | int] = ["" if value is None else value for value in (fence, term)]
        holder = self._call("set_counters", [*_LEAD_KEYS, keys.TERM], values)
        if holder:
            raise UserError(
                f"{holder} is the leader of this store; stop it and all standby coordinators, and repeat the "
                "command (the lead of a killed coordinator expires after a few seconds)"
            )

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _counter(self, key: str) -> int | None:
        with self._guarded():
            text = cast("str | None", self._redis.get(key)) or "0"
        return int(text) if text.isascii() and text.isdigit() else None

    def _repair_jobs(self, job_ids: set[str]) -> tuple[tuple[JobId, ...], tuple[JobId, ...], tuple[str, ...]]:
        """Index the jobs missing from the index, and sort all by submission, except deleted ones.

        Returns those added, those deleted, and the keys of unreadable records.
        """
        with self._guarded():
            entries = cast("list[tuple[str, float]]", self._redis.zrange(keys.JOBS, 0, -1, withscores=True))
        indexed = {job_id for job_id, _ in entries}
        missing, gone = sorted(job_ids - indexed), tuple(map(JobId, sorted(indexed - job_ids)))
        for job_id in gone:
            self._run("forget_expired", [keys.JOBS, keys.job(job_id)], [job_id])
        records, unreadable = self._readable(map(JobId, missing), keys.job, job_of)
        if records or len({order for _, order in entries}) < len(entries):
            ordered = sorted((*self.jobs(), *records), key=lambda record: record.submitted_wall)
            self._reindex(keys.JOBS, keys.JOB_ORDERS, [record.job_id for record in ordered], range(1, len(ordered) + 1))
        return tuple(record.job_id for record in records), gone, unreadable

    def _repair_members(self, member_ids: set[str]) -> tuple[tuple[MemberId, ...], tuple[str, ...]]:
        """Index the members missing from the index; returns them and the keys of unreadable records."""
        with self._guarded():
            missing = sorted(member_ids - set(cast("list[str]", self._redis.zrange(keys.MEMBERS, 0, -1))))
        records, unreadable = self._readable(map(MemberId, missing), keys.member, member_of)
        ids = [record.info.id for record in records]
        self._reindex(keys.MEMBERS, keys.ORDERS, ids, [record.order for record in records])
        return tuple(ids), unreadable

    def _readable(
        self, ids: Iterable[Id], key_of: Callable[[Id], str], read: Callable[[Mapping[str, str]], Record]
    ) -> tuple[list[Record], tuple[str, ...]]:
        """The readable records, and the keys of the others. Records that expired meanwhile are in neither."""
        records, unreadable = [], []
        for entry in ids:
            with self._guarded():
                fields = cast("dict[str, str]", self._redis.hgetall(key_of(entry)))
            try:
                if fields:
                    records.append(read(fields))
            except ProtocolViolation:
                unreadable.append(key_of(entry))
        return records, tuple(unreadable)

    def _reindex(self, index: str, counter: str, ids: Sequence[str], orders: Sequence[int]) -> None:
        if ids:
            arguments: list[str | int] = [word for pair in zip(orders, ids, strict=True) for word in pair]
            self._run("reindex", [index, counter], arguments)

    def _beyond(self, job_ids: Sequence[JobId]) -> list[JobId]:
        """The jobs whose newest event has an invalid number."""
        with self._guarded():
            pipeline = self._redis.pipeline(transaction=False)
            for job_id in job_ids:
                pipeline.xrevrange(keys.events(job_id), count=1)
            newest = cast("list[list[tuple[str, dict[str, str]]]]", pipeline.execute())
        found = zip(job_ids, newest, strict=True)
        return [job_id for job_id, events in found if events and sequence_of(events[0][0]) > _LARGEST_SEQUENCE]

    def _renumber(self, job_id: JobId) -> bool:
        """Give events valid numbers in the same order; returns whether any had an invalid one."""
        with self._guarded():
            entries = cast("list[tuple[str, dict[str, str]]]", self._redis.xrange(keys.events(job_id)))
        arguments: list[str | int] = []
        last = 0
        for entry, fields in entries:
            sequence = sequence_of(entry)
            last = sequence if sequence <= _LARGEST_SEQUENCE else last + 1
            arguments += [last, fields.get("event", "")]
        if arguments:
            self._run("rebuild_events", [keys.events(job_id)], arguments)
        return bool(arguments)

    def _expire_events(self, job_id: JobId) -> bool:
        """Expire the events of a job without a record like those of an ended job; returns whether there are any."""
        with self._guarded():
            is_lost = not self._redis.exists(keys.job(job_id)) and self._redis.pttl(keys.events(job_id)) == -1
        if is_lost:
            lasts = _milliseconds(ENDED_JOB_SECONDS)
            self._run("expire_events", [keys.job(job_id), keys.events(job_id)], [lasts])
        return is_lost

    def _run(self, script: str, script_keys: Sequence[str], arguments: Sequence[str | int]) -> str:
        """Run a write, under the fence of the lead if there is one."""
        if self._fence is not None:
            script_keys, arguments = [*script_keys, keys.FENCE], [*arguments, self._fence()]
        return cast("str", self._call(script, script_keys, arguments))

    def _call(self, script: str, script_keys: Sequence[str], arguments: Sequence[str | int]) -> object:
        with self._guarded():
            if not self._replicas or script in _RENEWALS:
                return self._scripts[script](keys=list(script_keys), args=list(arguments))
            # Redis waits for the writes of the connection that asks.
            with self._redis.client() as connection:  # type: ignore[no-untyped-call]  # redis ships it untyped
                answer = self._scripts[script](keys=list(script_keys), args=list(arguments), client=connection)
                have = cast("int", connection.wait(self._replicas, round(_REPLICA_SECONDS * 1_000)))
        if have < self._replicas:
            self._leave_primary()
            raise StoreUnavailable(
                f"a write reached {have} of the {self._replicas} replicas of Redis at {self._target.place} that "
                f"--store-replicas requires within {_REPLICA_SECONDS} s; restart the replicas, or repair their link"
            )
        return answer

    def _indexed(self, index: str, key_of: Callable[[str], str]) -> list[tuple[str, dict[str, str]]]:
        """The ids of an index in order, each with the fields of its record, empty if it has expired."""
        with self._guarded():
            ids = cast("list[str]", self._redis.zrange(index, 0, -1))
            pipeline = self._redis.pipeline(transaction=False)
            for entry in ids:
                pipeline.hgetall(key_of(entry))
            return list(zip(ids, cast("list[dict[str, str]]", pipeline.execute()), strict=True))

    def _leave_primary(self) -> None:
        """Another Redis may be the primary by now: let the next command connect, and resolve the name, anew."""
        self._redis.connection_pool.disconnect()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as error:
            if str(error).startswith(_NOT_LEADER):
                raise NotLeader("another coordinator leads now; the write of this one was rejected") from error
            if isinstance(error, redis.exceptions.ReadOnlyError) or _NO_REPLICAS in str(error):
                self._leave_primary()
            if str(error).startswith(_EXHAUSTED):
                raise StoreDamaged(_exhausted(self._target, str(error).removeprefix(_EXHAUSTED).strip())) from error
            raise StoreUnavailable(_sentence(self._target, error)) from error


def _connect(target: RedisTarget, access: RedisAccess) -> redis.Redis:
    credentials = None if access.password_file is None else PasswordFile(target.user, access.password_file)
    try:
        return redis.Redis.from_url(
            target.url,
            **connection_options(target, access),
            credential_provider=credentials,
            decode_responses=True,
            protocol=2,  # a third version only adds messages that are not used here
            socket_timeout=_ANSWER_SECONDS,
            socket_connect_timeout=_ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 1),
        )
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--store {target.url} is not a Redis URL: {error}") from error


def _script(name: str) -> str:
    return (resources.files("hetpipe.storage") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


def _sentence(target: RedisTarget, error: redis.RedisError) -> str:
    """The error message of a failed command, with the fix where known."""
    who = f"user {target.user}" if target.user else "the default user"
    match error:
        case redis.exceptions.NoPermissionError():
            return (
                f"Redis at {target.place} denies {who} a permission that the coordinator needs ({error}); "
                "regenerate its ACL with `hetpipe render redis-acl`"
            )
        case redis.AuthenticationError():
            return (
                f"Redis at {target.place} rejects the password of {who} ({error}); compare "
                "--store-password-file with the password configured in Redis"
            )
        case redis.ConnectionError() if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return (
                f"the certificate of Redis at {target.place} could not be verified ({error}); give --store-ca "
                "the authority that signed it, and make sure that it names this host"
            )
    return f"Redis at {target.place} rejected a command of the coordinator: {error}"


def _exhausted(target: RedisTarget, what: str) -> str:
    return (
        f"Redis at {target.place}: {what}; stop every coordinator and repair it with "
        f"`hetpipe repair store --store {target.url} …`"
    )


def _ids(found: Iterable[str], prefix: str) -> set[str]:
    return {key.removeprefix(prefix) for key in found if key.startswith(prefix)}


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000))
