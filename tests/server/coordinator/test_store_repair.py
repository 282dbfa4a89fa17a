"""A store that has kept only a part, or numbers that nobody counts to: what is found again, against a real Redis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import ProtocolViolation, StoreDamaged, StoreUnavailable
from hetpipe.server.coordinator.candidate import Candidate
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.store_repair import repair_store
from hetpipe.storage import redis_keys
from hetpipe.storage.redis_access import RedisAccess
from hetpipe.storage.redis_acl import acl_lines
from hetpipe.storage.redis_store import RedisStore
from hetpipe.storage.store import ENDED_JOB_SECONDS, Fence, Repairs, Store
from hetpipe.values.bounds import MAX_COUNT
from hetpipe.values.counters import EVENTS_PER_LEAD, FENCES, MAX_REPORTED_AHEAD, TERMS
from hetpipe.values.events import JobState, NumberedEvent, StopMode
from hetpipe.values.ids import JobId, Term
from hetpipe.values.members import MemberId, MemberInfo
from tests.server.coordinator.builders import agent_member, shard_member
from tests.server.coordinator.fakes import FakeShards
from tests.storage.redis_server import Server, needs_redis
from tests.storage.store_contract import FIRST, acquire, fill, kept_by, numbered, record
from tests.support.fake_clock import FakeClock

pytestmark = needs_redis

PASSWORD = "a long password"
WAITS, RUNS, ENDED = JobId("waits"), JobId("runs"), JobId("ended")


@pytest.fixture
def store(server: Server) -> Iterator[RedisStore]:
    store = RedisStore(server.url)
    yield store
    store.close()


def coordinator_of(store: Store) -> Coordinator:
    return Coordinator(store, FakeShards().tools, clock=FakeClock())


def names(store: Store) -> list[str]:
    return [job.name for job in store.jobs()]


class TestAfterAReplayUnderTheOldAcl:
    """`user default off` alone: Redis drops every script with two writes from the replay of its append-only file."""

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[Server]:
        acl = tmp_path / "users.acl"
        acl.write_text("\n".join(["user default off", acl_lines("hetpipe", PASSWORD)[1], ""]))
        server = Server(tmp_path, "--aclfile", str(acl), "--appendonly", "yes", "--appendfsync", "always")
        yield server
        server.stop()

    @pytest.fixture
    def store(self, server: Server, tmp_path: Path) -> Iterator[RedisStore]:
        password = tmp_path / "password"
        password.write_text(PASSWORD)
        password.chmod(0o600)
        store = RedisStore(f"unix://hetpipe@{server.socket}", access=RedisAccess(password_file=password))
        yield store
        store.close()

    def test_a_new_leader_finds_every_record_again_and_says_so(self, server: Server, store: RedisStore) -> None:
        fill(store)
        before = kept_by(store)
        server.restart(kill=True)
        assert store.jobs() == (), "this Redis replays as another one; then there is nothing to repair"

        with capture_logs() as logs:
            coordinator = coordinator_of(store)

        told = {entry["event"]: entry for entry in logs if entry["log_level"] == "error"}
        assert told["store_reindexed"]["jobs"] == (ENDED, RUNS, WAITS)
        assert "hetpipe render redis-acl" in told["store_reindexed"]["fix"]
        assert "job_record_lost" not in told
        assert names(store) == [job.name for job in before.jobs]
        # Its end was told, and what had to forget it in time was dropped.
        assert coordinator.record(ENDED).state is JobState.FINISHED
        assert coordinator.record(None).job_id == ENDED
        assert coordinator.stop_job(RUNS, StopMode.NOW) is JobState.RUNNING
        for job in (WAITS, RUNS, ENDED):
            assert store.events(job)[:2] == before.events[job][:2]
        coordinator.close()

    def test_it_is_done_once(self, server: Server, store: RedisStore) -> None:
        fill(store)
        server.restart(kill=False)
        assert store.repair()
        assert not store.repair()
        store.create_job(record("next"))
        assert names(store) == ["waits", "runs", "ended", "next"]


class TestRecordsAndIndexes:
    def test_a_job_that_no_index_names_is_entered_in_order_of_submission(
        self, server: Server, store: RedisStore
    ) -> None:
        for second, name in enumerate(("a", "b", "c")):
            store.create_job(replace(record(name), submitted_wall=float(second)))
        server.redis.zrem(redis_keys.JOBS, "b")
        server.redis.delete(redis_keys.JOB_ORDERS)
        assert names(store) == ["a", "c"]

        assert store.repair() == Repairs(jobs=(JobId("b"),))

        assert names(store) == ["a", "b", "c"]
        store.create_job(record("d"))
        assert names(store) == ["a", "b", "c", "d"]

    def test_an_index_that_names_a_missing_record_names_it_no_more(self, server: Server, store: RedisStore) -> None:
        store.create_job(record("a"))
        store.create_job(record("b"))
        store.append_event(JobId("b"), numbered(1))
        server.redis.delete(redis_keys.job(JobId("b")))

        with capture_logs() as logs:
            coordinator_of(store).close()

        assert [entry["jobs"] for entry in logs if entry["event"] == "jobs_dropped"] == [("b",)]
        assert names(store) == ["a"]
        assert server.redis.zrange(redis_keys.JOBS, 0, -1) == ["a"]
        assert [entry["job"] for entry in logs if entry["event"] == "job_record_lost"] == ["b"]

    def test_events_without_a_record_wait_for_it_as_long_as_ended_jobs_are_kept(
        self, server: Server, store: RedisStore
    ) -> None:
        store.create_job(record("a"))
        store.append_event(JobId("a"), numbered(1))
        server.redis.delete(redis_keys.job(JobId("a")))

        assert store.repair() == Repairs(dropped_jobs=(JobId("a"),), lost_jobs=(JobId("a"),))
        assert not store.repair()

        assert 0 < server.redis.ttl(redis_keys.events(JobId("a"))) <= ENDED_JOB_SECONDS
        found = store.create_job(record("a"))
        store.replace_job(found.at(JobState.RUNNING, failure=""))
        assert store.events(JobId("a")) == (numbered(1),)
        assert server.redis.ttl(redis_keys.events(JobId("a"))) == -1

    def test_a_member_that_no_index_names_is_entered_in_its_order(self, server: Server, store: RedisStore) -> None:
        for name in ("n2", "n1", "n0"):
            store.put_member(agent_member(name), FIRST, lease_seconds=50.0)
        before = store.members()
        server.redis.delete(redis_keys.MEMBERS, redis_keys.ORDERS)

        assert store.repair() == Repairs(members=tuple(map(MemberId, ("n0", "n1", "n2"))))

        assert store.members() == before
        assert store.put_member(agent_member("n3"), FIRST, lease_seconds=5.0).order == 4

    def test_two_jobs_with_one_order_are_told_apart_by_their_submission(
        self, server: Server, store: RedisStore
    ) -> None:
        """A replay that is whole, of a file that a partly replayed Redis went on writing, counts twice from one."""
        for second, name in ((5.0, "a"), (1.0, "z")):
            store.create_job(replace(record(name), submitted_wall=second))
        server.redis.zadd(redis_keys.JOBS, {"a": 1, "z": 1})

        store.repair()

        assert names(store) == ["z", "a"]

    @pytest.mark.parametrize("fields", [{"version": "1"}, {"version": "1", "record": "{"}])
    def test_what_cannot_be_read_is_told_and_left(
        self, server: Server, store: RedisStore, fields: dict[Any, Any]
    ) -> None:
        server.redis.hset(redis_keys.job(JobId("odd")), mapping=fields)

        with capture_logs() as logs:
            coordinator_of(store).close()

        assert [entry["key"] for entry in logs if entry["event"] == "record_unreadable"] == ["{hetpipe}:job:odd"]
        assert server.redis.hgetall(redis_keys.job(JobId("odd"))) == fields
        assert names(store) == []

    def test_a_whole_store_is_not_touched(self, server: Server, store: RedisStore) -> None:
        fill(store)
        server.redis.set("another program's", "x")
        before = {key: server.redis.dump(key) for key in server.redis.scan_iter()}

        assert not store.repair()

        assert {key: server.redis.dump(key) for key in server.redis.scan_iter()} == before

    def test_events_with_numbers_that_nobody_counts_to_get_others(self, server: Server, store: RedisStore) -> None:
        store.create_job(record())
        store.append_event(JobId("digits"), numbered(1))
        for sequence in (MAX_COUNT + EVENTS_PER_LEAD, 17 * MAX_COUNT):
            event = NumberedEvent(sequence, numbered(2).event)
            store.append_event(JobId("digits"), event)
        with pytest.raises(ProtocolViolation):
            store.events(JobId("digits"))

        assert store.repair() == Repairs(renumbered=(JobId("digits"),))

        assert [event.sequence for event in store.events(JobId("digits"))] == [1, 2, 3]
        store.append_event(JobId("digits"), numbered(4))
        assert len(store.events(JobId("digits"))) == 4


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["repair", *arguments])


def candidate(store: Store) -> Candidate:
    return Candidate(store, "a coordinator", clock=SYSTEM_CLOCK, on_lost=lambda _: None)


#: What the store had after a registration with a fence of 2^53 - 1, when nothing bounded that.
POISONED = MAX_COUNT


class TestCounters:
    def test_nobody_leads_with_a_number_that_leaves_none_for_the_next(self, server: Server, store: RedisStore) -> None:
        server.redis.set(redis_keys.FENCE, POISONED)
        with pytest.raises(StoreDamaged, match=r"no fence is left; .* `hetpipe repair store --store unix://"):
            candidate(store)._request_lead()
        assert server.redis.get(redis_keys.FENCE) == str(POISONED)

    @pytest.mark.parametrize("found", [str(POISONED), "9" * 18, str(FENCES.limit), "many"])
    def test_a_poisoned_store_is_recovered_by_the_command(self, server: Server, store: RedisStore, found: str) -> None:
        store.create_job(record())
        server.redis.mset({redis_keys.FENCE: found, redis_keys.TERM: str(TERMS.limit)})

        result = run("store", "--store", server.url, "--json")

        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        assert answer["fence"]["after"] == answer["term"]["after"] == 0
        assert answer["fence"]["before"] == (None if found == "many" else int(found))
        # The repair had a lead of its own.
        assert acquire(store, "a").fence == 2
        assert store.next_term(above=Term(41)) == 42
        assert store.jobs() == (record(),)

    def test_people_are_told_what_to_restart(self, server: Server) -> None:
        server.redis.set(redis_keys.FENCE, POISONED)
        result = run("store", "--store", server.url)
        assert f"fence: {POISONED}, now 0" in result.stdout
        assert "restart every agent and every parameter server" in result.stdout

    def test_a_whole_store_is_left_as_it_is(self, server: Server, store: RedisStore) -> None:
        fill(store)
        store.release_lead(kept_by(store).lead)
        before = (store.jobs(), store.members(), store.term())

        result = run("store", "--store", server.url)

        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines() == ["fence: 42", "term: 8", "no repairs needed"]
        assert (store.jobs(), store.members(), store.term()) == before

    def test_numbers_can_be_given(self, server: Server, store: RedisStore) -> None:
        result = run("store", "--store", server.url, "--fence", "1500000", "--term", "77")
        assert result.exit_code == 0, result.output
        assert acquire(store, "a").fence == 1_500_002
        assert store.next_term(above=Term(0)) == 78

    @pytest.mark.parametrize("option", ["--fence", "--term"])
    @pytest.mark.parametrize("value", [-1, MAX_COUNT])
    def test_not_every_number_can(self, server: Server, option: str, value: int) -> None:
        result = run("store", "--store", server.url, option, str(value))
        assert result.exit_code == 2
        assert f"{option} {value} is not from 0 to" in result.stderr
        assert server.redis.get(redis_keys.FENCE) is None

    @pytest.mark.parametrize("fence", [4, POISONED])
    def test_nothing_is_changed_under_a_coordinator(self, server: Server, store: RedisStore, fence: int) -> None:
        acquire(store, "a", above=4)
        server.redis.set(redis_keys.FENCE, fence)

        result = run("store", "--store", server.url, "--json")

        assert result.exit_code == 2
        assert "this store; stop it" in json.loads(result.stdout)["errors"][0]
        assert server.redis.get(redis_keys.FENCE) == str(fence)

    def test_memory_is_repaired_by_a_restart(self) -> None:
        result = run("store", "--store", "memory")
        assert result.exit_code == 2
        assert "restart that one instead" in result.stderr

    def test_a_server_that_is_away(self, tmp_path: Path) -> None:
        result = run("store", "--store", f"unix://{tmp_path / 'none'}", "--json")
        assert result.exit_code == 1
        assert "rejected a command" in json.loads(result.stdout)["errors"][0]


class TestAsACoordinatorDoes:
    """With the rendered user, its password file, and no other rights."""

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[Server]:
        acl = tmp_path / "users.acl"
        acl.write_text("\n".join([*acl_lines("hetpipe", PASSWORD), "user admin on >admin ~* &* +@all", ""]))
        server = Server(tmp_path, "--aclfile", str(acl), user="admin")
        yield server
        server.stop()

    def test_a_poisoned_store_is_recovered(self, server: Server, tmp_path: Path) -> None:
        server.redis.set(redis_keys.FENCE, POISONED)
        server.redis.xadd(redis_keys.events(JobId("lost")), {"event": "{}"}, id=f"{MAX_COUNT}-0")
        server.redis.hset(redis_keys.job(JobId("odd")), mapping={"version": "1"})
        (tmp_path / "password").write_text(PASSWORD)
        (tmp_path / "password").chmod(0o600)
        url = f"unix://hetpipe@{server.socket}"

        refused = run("store", "--store", url)
        result = run("store", "--store", url, "--store-password-file", str(tmp_path / "password"), "--json")

        assert (refused.exit_code, "give its password by --store-password-file" in refused.stderr) == (2, True)
        assert result.exit_code == 0, result.output
        records = json.loads(result.stdout)["records"]
        assert (records["renumbered"], records["lost_jobs"]) == (["lost"], ["lost"])
        assert records["unreadable"] == ["{hetpipe}:job:odd"]
        refused_commands = {entry["object"] for entry in server.redis.acl_log()}
        assert refused_commands <= {"client|setinfo"}

    def test_a_user_of_an_older_acl_is_told_what_it_lacks(self, server: Server, tmp_path: Path) -> None:
        server.redis.execute_command("ACL", "SETUSER", "hetpipe", "-scan")  # type: ignore[no-untyped-call]
        (tmp_path / "password").write_text(PASSWORD)
        access = RedisAccess(password_file=tmp_path / "password")
        with pytest.raises(StoreUnavailable, match=r"denies user hetpipe a permission .* `hetpipe render redis-acl`"):
            repair_store(f"unix://hetpipe@{server.socket}", access)
        store = RedisStore(f"unix://hetpipe@{server.socket}", access=access)
        with pytest.raises(StoreUnavailable, match="`hetpipe render redis-acl`"):
            coordinator_of(store)
        store.close()


class TestPoisonedRegistrations:
    """A coordinator that leads by a Redis, and one process that reports numbers nobody has given out."""

    @pytest.fixture
    def lead(self, server: Server) -> Iterator[Candidate]:
        lead = candidate(RedisStore(server.url))
        lead.request_lead()
        yield lead
        lead.end()

    @pytest.fixture
    def coordinator(self, server: Server, lead: Candidate) -> Iterator[Coordinator]:
        store = RedisStore(server.url, fence=lambda: lead.fence)
        coordinator = Coordinator(store, FakeShards().tools, clock=FakeClock(), election=lead)
        yield coordinator
        coordinator.close()

    @pytest.mark.parametrize(
        ("info", "known"),
        [
            (replace(shard_member(9), highest_fence=MAX_COUNT - 1), 1),
            (replace(agent_member("evil"), highest_fence=FENCES.limit - 1), 1),
            (replace(agent_member("evil"), highest_fence=MAX_REPORTED_AHEAD + 2), 1),
            (replace(shard_member(9), highest_term=Term(MAX_COUNT - 1)), 0),
            (replace(shard_member(9), highest_term=Term(MAX_REPORTED_AHEAD + 1)), 0),
        ],
    )
    def test_they_are_refused_and_the_cluster_goes_on(
        self, server: Server, lead: Candidate, coordinator: Coordinator, info: MemberInfo, known: int
    ) -> None:
        with pytest.raises(ProtocolViolation) as caught:
            coordinator.register(info)

        assert f"{info} reports a " in str(caught.value)
        assert f"this coordinator's is {known}, and it accepts no report above" in str(caught.value)
        assert "`hetpipe repair state DIR`" in str(caught.value)
        is_plausible = MAX_REPORTED_AHEAD < max(info.highest_fence, info.highest_term) < 2 * MAX_REPORTED_AHEAD
        assert ("`hetpipe repair store --" in str(caught.value)) is is_plausible
        assert (lead.fence, server.redis.get(redis_keys.FENCE)) == (1, "1")
        assert coordinator.members() == ()
        coordinator.register(replace(shard_member(0), highest_fence=1))
        assert [member.info.id for member in coordinator.members()] == [shard_member(0).id]

    def test_what_members_of_a_wiped_store_have_seen_is_accepted(
        self, server: Server, lead: Candidate, coordinator: Coordinator
    ) -> None:
        lease = coordinator.register(
            replace(shard_member(0), highest_fence=MAX_REPORTED_AHEAD, highest_term=Term(5_000))
        )
        assert lease.fence == lead.fence == MAX_REPORTED_AHEAD + 1
        assert coordinator.register(replace(shard_member(1), highest_fence=lead.fence)).fence >= lead.fence

    def test_many_reports_together_move_it_no_further_than_one(self, lead: Candidate, coordinator: Coordinator) -> None:
        coordinator.register(replace(shard_member(0), highest_fence=MAX_REPORTED_AHEAD + 1))
        with pytest.raises(ProtocolViolation, match="reports a fence"):
            coordinator.register(replace(shard_member(1), highest_fence=MAX_REPORTED_AHEAD + 3))
        assert lead.fence == MAX_REPORTED_AHEAD + 2

    def test_the_reserve_is_for_leads_that_the_store_gives(self, server: Server, store: RedisStore) -> None:
        server.redis.set(redis_keys.FENCE, FENCES.largest_reported - 1)
        lead = candidate(RedisStore(server.url))
        lead.request_lead()
        coordinator = Coordinator(store, FakeShards().tools, clock=FakeClock(), election=lead)
        assert lead.fence == FENCES.largest_reported
        with pytest.raises(ProtocolViolation, match="reports a fence"):
            coordinator.register(replace(shard_member(0), highest_fence=FENCES.largest_reported + 1))
        coordinator.close()
        lead.end()
        assert acquire(RedisStore(server.url), "next", above=Fence(0)).fence == FENCES.largest_reported + 1
