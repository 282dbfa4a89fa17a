"""A failover from a primary to a replica, both real servers, behind an address that follows the primary."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from hetpipe.errors import NotLeader, StoreUnavailable, UserError
from hetpipe.storage import redis_keys, redis_store
from hetpipe.storage.redis_store import RedisStore
from hetpipe.storage.store import CandidateId, Fence
from hetpipe.storage.stores import open_store
from tests.storage.redis_server import Server, needs_redis
from tests.storage.store_contract import record

pytestmark = needs_redis


class Pair:
    """A primary and its replica."""

    def __init__(self, folder: Path) -> None:
        self._servers: list[Server] = []
        self._ports = _free_ports(2)
        for index, port in enumerate(self._ports):
            home = folder / str(index)
            home.mkdir()
            self._servers.append(Server(home, "--port", str(port), "--repl-diskless-sync-delay", "0"))
        self._address = folder / "primary.sock"
        self.url = f"unix://{self._address}"
        self._primary = 0
        self._follow()
        self.attach()

    @property
    def replica(self) -> Server:
        return self._servers[1 - self._primary]

    def attach(self) -> None:
        """Let the replica follow the primary, until it has everything."""
        self.replica.redis.replicaof("127.0.0.1", str(self._ports[self._primary]))
        with self._servers[self._primary].redis.client() as connection:  # type: ignore[no-untyped-call]
            connection.set("probe", "1")
            while connection.wait(1, 10_000) < 1:
                """the first answer may precede the attachment"""

    def detach(self) -> None:
        """Promote the replica, which lacks everything from here on; nobody is told."""
        self.replica.redis.replicaof("NO", "ONE")

    def move(self) -> None:
        """Let the address follow a promotion, of which the former primary knows nothing."""
        self._primary = 1 - self._primary
        self._follow()

    def fail_over(self) -> None:
        """Change the roles, and let the address follow."""
        self.detach()
        self.move()
        self.attach()

    def stop(self) -> None:
        for server in self._servers:
            server.stop()

    def _follow(self) -> None:
        self._address.unlink(missing_ok=True)
        self._address.symlink_to(self._servers[self._primary].socket)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What succeeds may take its time on a busy machine."""
    monkeypatch.setattr(redis_store, "_ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(redis_store, "_REPLICA_SECONDS", 30.0)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """A context in which a write without replicas fails soon."""

    @contextmanager
    def soon() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(redis_store, "_REPLICA_SECONDS", 0.1)
            yield

    return soon


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.stop()


def test_a_failover_loses_no_write_that_counts(pair: Pair) -> None:
    store = RedisStore(pair.url, replicas=1)
    lead = store.acquire_lead(CandidateId("a"), "A", above=Fence(0), lease_seconds=60.0)
    store.create_job(record())
    pair.fail_over()

    with pytest.raises(StoreUnavailable, match="read only replica"):
        store.renew_lead(lead, lease_seconds=60.0)
    store.renew_lead(lead, lease_seconds=60.0)
    assert store.jobs() == (record(),)
    store.close()


@pytest.mark.parametrize("refuses", [True, False])
def test_a_former_primary_is_left_by_who_was_connected_to_it(
    pair: Pair, hurry: Callable[[], AbstractContextManager[None]], *, refuses: bool
) -> None:
    """It cannot be reached by who promotes another, and says nothing but that it has no replicas."""
    store = RedisStore(pair.url, replicas=1)
    store.create_job(record("before"))
    pair.detach()
    pair.move()
    former = pair.replica
    former.redis.config_set("min-replicas-to-write", int(refuses))
    with hurry(), pytest.raises(StoreUnavailable, match="NOREPLICAS" if refuses else "reached 0 of the 1 replicas"):
        store.create_job(record("lost"))
    assert store.jobs() == (record("before"),)
    pair.attach()
    store.create_job(record("after"))
    assert store.jobs() == (record("before"), record("after"))
    store.close()


def test_a_write_that_no_replica_has_does_not_count(
    pair: Pair, hurry: Callable[[], AbstractContextManager[None]]
) -> None:
    store = RedisStore(pair.url, replicas=1)
    pair.detach()
    with hurry(), pytest.raises(StoreUnavailable, match=r"reached 0 of the 1 replicas .* --store-replicas requires"):
        store.create_job(record())
    pair.attach()
    store.create_job(record())
    assert store.jobs() == (record(),)
    store.close()


def test_the_leader_stays_the_leader_of_a_primary_that_only_knows_an_older_one(pair: Pair) -> None:
    former, leader = RedisStore(pair.url), RedisStore(pair.url)
    old = former.acquire_lead(CandidateId("a"), "A", above=Fence(0), lease_seconds=60.0)
    pair.attach()
    pair.detach()
    former.release_lead(old)
    new = leader.acquire_lead(CandidateId("b"), "B", above=Fence(0), lease_seconds=60.0)
    pair.fail_over()
    assert pair.replica.redis.get(redis_keys.FENCE) is not None

    leader.close()  # so that the next command connects to the new primary
    leader.renew_lead(new, lease_seconds=60.0)
    former.close()
    with pytest.raises(NotLeader, match="B has the lead"):
        former.renew_lead(old, lease_seconds=60.0)
    fenced = RedisStore(pair.url, fence=lambda: new.fence)
    fenced.create_job(record())
    for store in (fenced, leader, former):
        store.close()


def test_a_store_in_memory_has_no_replicas() -> None:
    with pytest.raises(UserError, match="--store memory has no replicas"):
        open_store("memory", replicas=1)
