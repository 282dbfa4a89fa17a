"""The store of a coordinator that may be restarted elsewhere: Redis 6 or newer, one Lua script per atomic operation.

Values are JSON, numbers are Redis's own. A connection that breaks is tried once more at once; every script may safely
run twice. Keys are built in `redis_keys`; each script's header names those it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.retry import Retry

from hetpipe.coordinator import redis_keys as keys
from hetpipe.coordinator.store import MAX_EVENTS, JobRecord, MemberRecord
from hetpipe.errors import StoreUnavailable, UnknownMember, UserError, VersionConflict
from hetpipe.spec.events import JobEvent, NumberedEvent
from hetpipe.spec.ids import JobId, Term
from hetpipe.spec.members import MemberId, MemberInfo, Registration
from hetpipe.spec.wire import from_json, to_json

#: Seconds for a connection and for an answer. Below a heartbeat's deadline, which may wait for it.
_ANSWER_SECONDS = 1.0

_SCRIPTS = (
    "append_event",
    "create_job",
    "forget_expired",
    "next_term",
    "put_member",
    "remove_member",
    "renew_member",
    "replace_job",
)


class RedisStore:
    """`Store` in Redis. Leases run by the server's clock."""

    def __init__(self, url: str) -> None:
        """Connect on first use to `redis://…`, `rediss://…` or `unix://…`.

        Raises:
            UserError: the URL is malformed.
        """
        try:
            self._redis: redis.Redis = redis.Redis.from_url(
                url,
                decode_responses=True,
                socket_timeout=_ANSWER_SECONDS,
                socket_connect_timeout=_ANSWER_SECONDS,
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError as error:
            raise UserError(f"--store {url} is no Redis URL: {error}") from error
        #: The URL without its password, for messages.
        self._place = url.rpartition("@")[2].removeprefix("redis://")
        scripts = resources.files("hetpipe.coordinator") / "lua"
        self._scripts: dict[str, Script] = {
            name: self._redis.register_script((scripts / f"{name}.lua").read_text(encoding="utf-8"))
            for name in _SCRIPTS
        }

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
                info: MemberInfo = from_json(MemberInfo, fields["info"])
                records.append(MemberRecord(info, Registration(fields["registration"]), int(fields["order"])))
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
                records.append(from_json(JobRecord, fields["record"]))
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
            raise VersionConflict(f"event {event.sequence} of job {job_id} does not follow the last one that is kept")

    def events(self, job_id: JobId, *, after: int = 0, limit: int = 1_000) -> tuple[NumberedEvent, ...]:
        """As `Store.events`."""
        with self._guarded():
            entries = cast(
                "list[tuple[str, dict[str, str]]]",
                self._redis.xrange(keys.events(job_id), min=f"({after}-0", count=limit),
            )
        return tuple(
            NumberedEvent(int(entry.partition("-")[0]), from_json(JobEvent, fields["event"]))
            for entry, fields in entries
        )

    def close(self) -> None:
        """As `Store.close`."""
        self._redis.close()

    def _run(self, script: str, script_keys: Sequence[str], arguments: Sequence[str | int]) -> str:
        with self._guarded():
            return cast("str", self._scripts[script](keys=list(script_keys), args=list(arguments)))

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
            raise StoreUnavailable(
                f"Redis at {self._place} did not take a command of the coordinator: {error}"
            ) from error


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000))
