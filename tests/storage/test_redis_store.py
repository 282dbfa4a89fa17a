"""The store in Redis keeps the contract, against a real server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import pytest

from hetpipe.errors import NotLeader, StoreUnavailable, UserError
from hetpipe.storage import redis_keys, redis_store
from hetpipe.storage.redis_store import RedisStore
from hetpipe.storage.store import Store
from hetpipe.storage.stores import open_store
from hetpipe.values.bounds import MAX_COUNT
from hetpipe.values.ids import JobId, Term
from hetpipe.values.members import MemberId
from tests.server.coordinator.builders import agent_member
from tests.storage.redis_server import Server, needs_redis
from tests.storage.store_contract import FIRST, Advance, StoreContract, acquire, numbered, record

pytestmark = needs_redis


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    store = RedisStore(server.url)
    yield store
    store.close()


class TestRedisStore(StoreContract):
    @pytest.fixture
    def advance(self, server: Server) -> Advance:
        return server.advance


def test_what_is_kept_outlives_the_coordinator(server: Server, store: Store) -> None:
    store.create_job(record())
    store.put_member(agent_member(), FIRST, lease_seconds=5.0)
    store.next_term(above=Term(9))

    successor = open_store(server.url)

    assert successor.jobs() == (record(),)
    assert [member.info for member in successor.members()] == [agent_member()]
    assert successor.next_term(above=Term(0)) == 11
    successor.close()


def test_stale_index_entries_are_dropped_when_listed(server: Server, store: Store) -> None:
    store.put_member(agent_member(), FIRST, lease_seconds=5.0)
    server.advance(6.0)
    assert server.redis.zcard(redis_keys.MEMBERS) == 1
    store.members()
    assert server.redis.zcard(redis_keys.MEMBERS) == 0


def test_leases_have_a_time_to_live_and_jobs_have_none(server: Server, store: Store) -> None:
    store.put_member(agent_member(), FIRST, lease_seconds=5.0)
    store.create_job(record())

    assert 0 < server.redis.pttl(redis_keys.member(MemberId("n0"))) <= 5_000
    assert server.redis.pttl(redis_keys.job(JobId("digits"))) == -1


def part(store: Store) -> RedisStore:
    """A store of which something is tried that has no method of its own."""
    assert isinstance(store, RedisStore)
    return store


def damage(server: Server) -> None:
    """Let there be something to repair."""
    server.redis.xadd(redis_keys.events(JobId("lost")), {"event": "{}"}, id="1-0")
    server.redis.xadd(redis_keys.events(JobId("beyond")), {"event": "{}"}, id=f"{MAX_COUNT}-0")


WRITES: dict[str, Callable[[Store], object]] = {
    "append_event": lambda store: store.append_event(JobId("digits"), numbered(1)),
    "create_job": lambda store: store.create_job(record("another")),
    "enter_job": lambda store: part(store)._run("enter_job", [redis_keys.JOBS, redis_keys.JOB_ORDERS], ["another"]),
    "expire_events": lambda store: part(store)._expire_events(JobId("lost")),
    "next_term": lambda store: store.next_term(above=Term(0)),
    "put_member": lambda store: store.put_member(agent_member("n1"), FIRST, lease_seconds=5.0),
    "rebuild_events": lambda store: part(store)._renumber(JobId("beyond")),
    "reindex": lambda store: part(store)._reindex(redis_keys.JOBS, redis_keys.JOB_ORDERS, ["digits"], [7]),
    "remove_member": lambda store: store.remove_member(MemberId("n0"), FIRST),
    "renew_member": lambda store: store.renew_member(MemberId("n0"), FIRST, lease_seconds=5.0),
    "replace_job": lambda store: store.replace_job(record(), keep_seconds=60.0),
}


def test_every_write_is_tried_below() -> None:
    assert {*WRITES, "forget_expired"} == set(redis_store._WRITES)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_who_led_before_writes_no_more(server: Server, store: Store, write: Callable[[Store], object]) -> None:
    lead = acquire(store, "a")
    leader = open_store(server.url, fence=lambda: lead.fence)
    leader.create_job(record())
    leader.put_member(agent_member(), FIRST, lease_seconds=50.0)
    damage(server)
    server.advance(6.0)
    acquire(store, "b")
    before = {key: server.redis.dump(key) for key in server.redis.scan_iter()}

    with pytest.raises(NotLeader, match="another coordinator leads now"):
        write(leader)

    assert {key: server.redis.dump(key) for key in server.redis.scan_iter()} == before
    assert leader.job(JobId("digits")) == record()
    leader.close()


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_the_leader_writes(server: Server, store: Store, write: Callable[[Store], object]) -> None:
    lead = acquire(store, "a")
    leader = open_store(server.url, fence=lambda: lead.fence)
    leader.create_job(record())
    leader.put_member(agent_member(), FIRST, lease_seconds=50.0)
    damage(server)

    write(leader)

    assert server.redis.ttl(redis_keys.FENCE) == -1
    leader.close()


def test_a_store_that_lost_its_memory_takes_the_leader_back(server: Server, store: Store) -> None:
    lead = acquire(store, "a", above=6)
    leader = open_store(server.url, fence=lambda: lead.fence)
    server.redis.flushall()
    with pytest.raises(NotLeader):
        leader.next_term(above=Term(3))

    store.renew_lead(lead, lease_seconds=5.0)

    assert leader.next_term(above=Term(3)) == 4
    assert acquire(store, "b") == lead
    leader.close()


def test_every_key_lies_in_one_slot() -> None:
    names = [redis_keys.MEMBERS, redis_keys.ORDERS, redis_keys.TERM, redis_keys.JOBS, redis_keys.JOB_ORDERS]
    names += [redis_keys.LEADER, redis_keys.FENCE]
    names += [redis_keys.member(MemberId("n}0")), redis_keys.job(JobId("a")), redis_keys.events(JobId("a"))]

    assert {re.match(r"[^{]*\{([^}]+)\}", name)[1] for name in names} == {"hetpipe"}  # type: ignore[index]


def test_scripts_use_no_key_but_those_they_are_given() -> None:
    for script in (resources.files("hetpipe.storage") / "lua").iterdir():
        text = script.read_text(encoding="utf-8")
        code = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
        assert "hetpipe" not in code, script.name
        used = {int(number) for number in re.findall(r"KEYS\[(\d)\]", code)}
        described = {int(number) for number in re.findall(r"^-- KEYS\[(\d)\] ", text, flags=re.MULTILINE)}
        assert used <= described, script.name


def test_a_server_that_is_away_is_a_typed_error(tmp_path: Path) -> None:
    server = Server(tmp_path)
    store = RedisStore(server.url)
    store.next_term(above=Term(0))
    server.stop()

    with pytest.raises(StoreUnavailable, match=r"redis.sock"):
        store.next_term(above=Term(0))
    with pytest.raises(StoreUnavailable):
        store.jobs()
    store.close()


@pytest.mark.parametrize(
    ("option", "refusing", "usual", "sentence"),
    [
        ("min-replicas-to-write", "1", "0", "Not enough good replicas"),
        ("maxmemory", "1", "0", "maxmemory"),
    ],
)
def test_a_server_that_takes_no_writes_is_a_typed_error(
    server: Server, store: Store, option: str, refusing: str, usual: str, sentence: str
) -> None:
    before = store.next_term(above=Term(0))
    store.create_job(record())
    server.redis.config_set(option, refusing)
    try:
        with pytest.raises(StoreUnavailable, match=sentence):
            store.next_term(above=Term(0))
        with pytest.raises(StoreUnavailable, match=sentence):
            store.put_member(agent_member(), FIRST, lease_seconds=5.0)
        assert store.jobs() == (record(),)
    finally:
        server.redis.config_set(option, usual)
    assert store.members() == ()
    assert store.next_term(above=Term(0)) == before + 1


def test_a_replica_is_a_typed_error(server: Server, store: Store) -> None:
    server.redis.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(StoreUnavailable, match="read only replica"):
            store.put_member(agent_member(), FIRST, lease_seconds=5.0)
    finally:
        server.redis.replicaof("no", "one")


def test_a_server_that_does_not_answer_is_a_typed_error_in_time(
    server: Server, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_ANSWER_SECONDS", 0.05)
    impatient = RedisStore(server.url)
    impatient.next_term(above=Term(0))
    server.redis.client_pause(300)
    with pytest.raises(StoreUnavailable, match="Timeout"):
        impatient.next_term(above=Term(0))
    impatient.close()

    assert store.next_term(above=Term(0)) >= 2


@pytest.mark.parametrize("url", ["", "mysql://x", "redis://host:port", "unix:/x"])
def test_an_unusable_url_is_the_users_error(url: str) -> None:
    with pytest.raises(UserError, match="--store"):
        open_store(url)
