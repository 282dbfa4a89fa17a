"""A parameter server proves its index: the certificate of one does not serve in the place of another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cryptography import x509

from hetpipe.certs.authority import new_key
from hetpipe.certs.folders import read_facts
from hetpipe.errors import Unauthenticated, UnknownJob, UserError
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.identity import NamedPeer, Role
from hetpipe.values.ids import JobId, ShardIndex
from hetpipe.values.requests import PullHeader
from hetpipe.wire.calls import GET_PROGRESS, GET_SHARD_CLOCKS, PULL, GetProgressRequest, GetShardClocksRequest
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard
from tests.certs.cluster import COORDINATOR, cluster, stage_peer
from tests.server.shard.builders import requester

SHARD_1 = NamedPeer(Role.PARAMETER_SERVER, "1")


@pytest.fixture
def address() -> Iterator[str]:
    """Of parameter server 1."""
    server = Server(ServerConfig(num_threads=4, tls=cluster().tls(SHARD_1)))
    ShardServer(lambda _config: MemoryHistory()).add_to(server)
    yield server.start()
    server.stop(grace_seconds=0.0)


REFUSED = "is not that of parameter-server-0.hetpipe .* reissued: `hetpipe certs issue DIR parameter-server 0`"


def test_the_coordinator_does_not_take_one_for_another(address: str) -> None:
    tls = cluster().tls(COORDINATOR)
    with closing(connect_shard(address, member_id="parameter-server-1", tls=tls)) as right, pytest.raises(UnknownJob):
        right.invoke(GET_SHARD_CLOCKS, GetShardClocksRequest(JobId("job")))
    with (
        closing(connect_shard(address, member_id="parameter-server-0", tls=tls)) as wrong,
        pytest.raises(Unauthenticated, match=REFUSED),
    ):
        wrong.invoke(GET_SHARD_CLOCKS, GetShardClocksRequest(JobId("job")))


def test_stages_and_shards_do_not_either(address: str) -> None:
    tls, who = cluster().tls(stage_peer("job")), requester(job="job")
    clock = connect_shard(address, ShardIndex(0), member_id="parameter-server-0", tls=tls)
    with closing(clock), pytest.raises(Unauthenticated, match=REFUSED):
        clock.invoke(GET_PROGRESS, GetProgressRequest(who))
    shard = connect_shard(address, ShardIndex(0), member_id="parameter-server-0", tls=tls)
    with closing(shard), pytest.raises(Unauthenticated, match=REFUSED):
        list(shard.download(PULL, PullHeader(who, clock=0, slices=())))  # type: ignore[arg-type]


def test_a_certificate_of_an_earlier_version_is_refused_with_the_fix(tmp_path: Path) -> None:
    class Before:
        """As certificates were made when all parameter servers shared one name."""

        uri, server_names = SHARD_1.uri, ("parameter-server.hetpipe",)

    old = cluster().authority().issue(Before(), new_key().public_key(), days=1)  # type: ignore[arg-type]
    assert x509.load_pem_x509_certificate(old)
    (tmp_path / "cert.pem").write_bytes(old)
    with pytest.raises(UserError, match="issue it again with `hetpipe certs issue DIR parameter-server 1`"):
        read_facts(tmp_path)
