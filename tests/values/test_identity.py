"""Identities: one URI each, read back as what was written, and nothing else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.errors import UserError
from hetpipe.values.identity import (
    NamedPeer,
    Peer,
    Role,
    StagePeer,
    identity_from_uri,
    server_name,
    shard_server_name,
)
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", fullmatch=True)
INDICES = st.integers(0, 999_999_999)
NAMED = st.builds(
    NamedPeer, st.sampled_from([role for role in Role if role not in {Role.STAGE, Role.PARAMETER_SERVER}]), NAMES
)
SHARDS = INDICES.map(lambda index: NamedPeer(Role.PARAMETER_SERVER, str(index)))
COUNTS = st.integers(0, 2**53 - 1)
STAGES = st.builds(
    StagePeer,
    NAMES.map(JobId),
    INDICES.map(VirtualWorkerIndex),
    INDICES.map(StageIndex),
    COUNTS.map(Incarnation),
    COUNTS.map(Term),
)

#: A label of a DNS name, as certificates take them.
LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


def stage(job: str = "job", vw: int = 0, index: int = 0, life: int = 0, term: int = 1) -> StagePeer:
    return StagePeer(JobId(job), VirtualWorkerIndex(vw), StageIndex(index), Incarnation(life), Term(term))


@settings(max_examples=25)
@given(NAMED | SHARDS | STAGES)
def test_a_uri_means_who_wrote_it(peer: Peer) -> None:
    assert identity_from_uri(peer.uri) == peer
    hosts = r"[A-Za-z0-9._-]+" if peer.role is Role.REDIS else rf"{LABEL}(\.{LABEL})+"
    assert re.fullmatch(hosts, peer.server_name)


def test_how_identities_look() -> None:
    agent = NamedPeer(Role.AGENT, "node-a")
    assert (agent.uri, agent.server_name, str(agent)) == (
        "spiffe://hetpipe/agent/node-a",
        "agent.hetpipe",
        "agent node-a",
    )
    one = stage("digits-1", 1, 2, 3, 4)
    assert one.uri == "spiffe://stages.hetpipe/digits-1/term/4/vw/1/life/3/stage/2"
    assert str(one) == "stage 2 of virtual worker 1 of job digits-1 (life 3 in term 4)"
    assert one.role is Role.STAGE


def test_every_shard_has_a_server_name_of_its_own_beside_that_of_its_role() -> None:
    shards = [NamedPeer(Role.PARAMETER_SERVER, str(index)) for index in range(3)]
    assert [shard.server_names for shard in shards] == [
        (f"parameter-server-{index}.hetpipe", "parameter-server.hetpipe") for index in range(3)
    ]
    assert [shard_server_name(shard.member_id) for shard in shards] == [shard.server_name for shard in shards]
    assert NamedPeer(Role.COORDINATOR, "b").server_names == ("coordinator.hetpipe",)


@pytest.mark.parametrize("name", ["a", "01", "1a", "-1", "٣"])
def test_a_shard_is_named_by_its_index(name: str) -> None:
    with pytest.raises(UserError):
        NamedPeer(Role.PARAMETER_SERVER, name)


def test_every_life_of_every_stage_has_a_server_name_of_its_own() -> None:
    stages = [
        stage(job, vw, index, life, term)
        for job in ("a", "A", "a-b")
        for vw in range(2)
        for index in range(2)
        for life in range(2)
        for term in (1, 2)
    ]
    assert len({one.server_name for one in stages}) == len(stages)
    assert all(one.server_name.endswith(".stages.hetpipe") for one in stages)
    assert server_name(Role.COORDINATOR) == "coordinator.hetpipe"


@pytest.mark.parametrize("name", ["", "a/b", "-a", ".a", "a b", "ä", "a\n", "x" * 101])
def test_names_that_no_certificate_holds(name: str) -> None:
    with pytest.raises(UserError, match="is not a valid name in a certificate; use up to 100 letters"):
        NamedPeer(Role.AGENT, name)


@pytest.mark.parametrize("host", ["coordinator.hetpipe", "s0.v0.0.stages.HETPIPE", "agent.hetpipe."])
def test_a_redis_takes_nobodys_place(host: str) -> None:
    with pytest.raises(
        UserError, match=r"is not a valid name for Redis: names in \.hetpipe are reserved for hetpipe's own"
    ):
        NamedPeer(Role.REDIS, host)
    assert identity_from_uri(f"spiffe://hetpipe/redis/{host}") is None
    assert NamedPeer(Role.REDIS, "redis.example.com").server_name == "redis.example.com"


def test_a_stage_is_no_named_process() -> None:
    with pytest.raises(UserError, match="is not a valid name in a certificate"):
        NamedPeer(Role.STAGE, "0")


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "hetpipe/agent/a",
        "spiffe://hetpipe/agent",
        "spiffe://hetpipe/agent/",
        "spiffe://hetpipe/agent/a/b",
        "spiffe://hetpipe/agent/a\n",
        "spiffe://hetpipe/janitor/a",
        "spiffe://hetpipe/stage/a",
        "spiffe://other/agent/a",
        "SPIFFE://hetpipe/agent/a",
        "spiffe://stages.hetpipe/agent/a",
        "spiffe://hetpipe/job/term/1/vw/0/life/0/stage/0",
        "spiffe://stagesxhetpipe/job/term/1/vw/0/life/0/stage/0",
        "spiffe://stages.hetpipe/job/term/1/vw/01/life/0/stage/0",
        "spiffe://stages.hetpipe/job/term/1/vw/-1/life/0/stage/0",
        "spiffe://stages.hetpipe/job/term/1/vw/٣/life/0/stage/0",
        "spiffe://stages.hetpipe/job/term/1/vw/0/life/0/stage/1000000000",
        "spiffe://stages.hetpipe/job/vw/0/stage/0",  # of earlier versions: of no life
    ],
)
def test_what_is_nobodys_uri(uri: str) -> None:
    assert identity_from_uri(uri) is None
