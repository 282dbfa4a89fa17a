"""Members by role: nobody takes the places of those whom a job needs, nor another's name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.decide.lifecycle.registry import MAX_MEMBERS, MAX_WORKERS_OF_OWNER, MEMBERS_OF_LEAST_LEASE, Registry
from hetpipe.errors import HetpipeError, PermissionDenied, ProtocolViolation, ResourceExhausted
from hetpipe.storage.store import MemberRecord
from hetpipe.values.ids import ShardIndex
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.members import MemberId, MemberInfo, MemberRole, Registration
from tests.decide.lifecycle.test_known_links import copies, link
from tests.server.coordinator.builders import agent_member, shard_member


def worker(name: str) -> MemberInfo:
    return MemberInfo(MemberRole.WORKER, MemberId(name), "h", 1)


def take(registry: Registry, info: MemberInfo, owner: str = "") -> None:
    registry.check_new(info, owner=owner)
    registry.put(MemberRecord(info, Registration(info.id), 1), now=0.0, owner=owner)


def test_workers_of_operators_leave_the_places_of_agents_and_parameter_servers() -> None:
    registry = Registry(5.0)
    for number in range(MAX_MEMBERS[MemberRole.WORKER]):
        take(registry, worker(f"w{number}"), owner=f"operator {number % 10}")
    with pytest.raises(ResourceExhausted, match="the limit of 100 members of the role worker is reached"):
        take(registry, worker("one more"), owner="operator new")
    for number in range(MAX_MEMBERS[MemberRole.AGENT]):
        take(registry, agent_member(f"n{number}"))
    for number in range(MAX_MEMBERS[MemberRole.PARAMETER_SERVER]):
        take(registry, replace(shard_member(0), id=MemberId(f"ps{number}")))
    take(registry, agent_member("n0", pid=7))  # who comes back has its place
    registry.remove(MemberId("n1"))
    take(registry, agent_member("one more"))


def test_leases_grow_with_the_cluster() -> None:
    registry = Registry(5.0)
    for number in range(2 * MEMBERS_OF_LEAST_LEASE):
        assert registry.lease_seconds == pytest.approx(max(5.0, 5.0 * number / MEMBERS_OF_LEAST_LEASE))
        take(registry, agent_member(f"n{number}"))
    assert len(registry.expire(now=5.0)) == MEMBERS_OF_LEAST_LEASE + 1
    assert registry.lease_seconds == 5.0


def test_one_operator_leaves_places_to_the_others() -> None:
    registry = Registry(5.0)
    for number in range(MAX_WORKERS_OF_OWNER):
        take(registry, worker(f"w{number}"), owner="operator a")
    with pytest.raises(ResourceExhausted, match="operator a has registered 25 workers, which is the limit"):
        take(registry, worker("one more"), owner="operator a")
    take(registry, worker("another"), owner="operator b")


def test_an_operator_takes_no_name_of_another() -> None:
    registry = Registry(5.0)
    take(registry, worker("w"), owner="operator a")
    for action in (
        lambda: registry.check_new(worker("w"), owner="operator b"),
        lambda: registry.check(MemberId("w"), Registration("w"), owner="operator b"),
    ):
        with pytest.raises(PermissionDenied, match="is a member of operator a, and not of operator b"):
            action()
    take(registry, worker("w"), owner="operator a")


@pytest.mark.parametrize(
    "info",
    [
        replace(worker("w"), devices=agent_member().devices),
        replace(shard_member(0), devices=agent_member().devices),
        replace(worker("w"), shard_index=ShardIndex(0)),
        replace(agent_member("n1"), devices=agent_member("n0").devices),
        replace(worker("w"), links=MeasuredLinks(links=(link("w", "w", 1e9),))),
        replace(agent_member("n1"), links=MeasuredLinks(links=(link("n1", "n0", 1e9), link("n0", "n2", 1e9)))),
        replace(agent_member("n1"), links=MeasuredLinks(copies=(copies("n0", 1e9),))),
    ],
    ids=[
        "a worker with devices",
        "a shard with devices",
        "a worker as a shard",
        "devices of another node",
        "links of a worker",
        "a link between other nodes",
        "copies on another node",
    ],
)
def test_nobody_offers_what_is_anothers(info: MemberInfo) -> None:
    with pytest.raises(ProtocolViolation) as caught:
        take(Registry(5.0), info)
    assert isinstance(caught.value, HetpipeError)
