"""The store in Redis keeps the contract, against a real server."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
import redis

from hetpipe.coordinator import redis_keys
from hetpipe.coordinator.redis_store import RedisStore
from hetpipe.coordinator.store import Store
from hetpipe.coordinator.stores import open_store
from hetpipe.errors import StoreUnavailable, UserError
from hetpipe.spec.ids import JobId, Term
from hetpipe.spec.members import MemberId
from tests.coordinator.builders import agent_member
from tests.coordinator.store_contract import FIRST, Advance, StoreContract, record

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None,
    reason="NOT TESTED: the Redis store, because there is no redis-server; `make setup` installs it",
)


class Server:
    """A redis-server of our own, on a Unix socket, without persistence."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._process = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "eady to accept connections" in line:
                break
        self.redis = redis.Redis(unix_socket_path=str(self._socket), decode_responses=True)

    def advance(self, seconds: float) -> None:
        """Let every time to live shrink by so much."""
        for key in self.redis.scan_iter():
            left_ms = self.redis.pttl(key)
            if left_ms >= 0:
                if left_ms > seconds * 1_000:
                    self.redis.pexpire(key, round(left_ms - seconds * 1_000))
                else:
                    self.redis.delete(key)

    def stop(self) -> None:
        self.redis.close()
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.redis.flushall()
    return shared_server


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


def test_every_key_lies_in_one_slot() -> None:
    names = [redis_keys.MEMBERS, redis_keys.ORDERS, redis_keys.TERM, redis_keys.JOBS, redis_keys.JOB_ORDERS]
    names += [redis_keys.member(MemberId("n}0")), redis_keys.job(JobId("a")), redis_keys.events(JobId("a"))]

    assert {re.match(r"[^{]*\{([^}]+)\}", name)[1] for name in names} == {"hetpipe"}  # type: ignore[index]


def test_scripts_use_no_key_but_those_they_are_given() -> None:
    for script in (resources.files("hetpipe.coordinator") / "lua").iterdir():
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


def test_a_password_never_gets_into_a_message() -> None:
    store = open_store("redis://user:secret@127.0.0.1:1/0")

    with pytest.raises(StoreUnavailable) as caught:
        store.next_term(above=Term(0))
    assert "127.0.0.1:1" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "mysql://x", "redis://host:port", "unix:/x"])
def test_an_unusable_url_is_the_users_error(url: str) -> None:
    with pytest.raises(UserError, match="--store"):
        open_store(url)
