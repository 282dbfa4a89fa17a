"""Every call × everyone who may not make it, on real servers with TLS. Reflection says which calls there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from hetpipe.certs.authority import Authority, new_key
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import HetpipeError, PermissionDenied, Unauthenticated
from hetpipe.observe.history import MemoryHistory
from hetpipe.proto.v2 import coordinator_pb2, values_pb2
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.servicer import CoordinatorServicer
from hetpipe.server.coordinator.tasks import Tools
from hetpipe.server.shard.server import ShardServer
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.values.identity import NamedPeer, Peer, Role, server_name
from hetpipe.wire.calls import ACCESS, CALLS, TENSOR_SERVICE
from hetpipe.wire.channel import as_is
from hetpipe.wire.codec import message_type
from hetpipe.wire.connection import Connection, Target
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.tls import Tls
from tests.certs.cluster import AGENT, COORDINATOR, MONITOR, OPERATOR, SHARD, NoCertificate, cluster, stage_peer

SECONDS = 10.0
STAGE = stage_peer()
RIGHT: dict[Role, Peer] = {
    Role.COORDINATOR: COORDINATOR,
    Role.PARAMETER_SERVER: SHARD,
    Role.AGENT: AGENT,
    Role.OPERATOR: OPERATOR,
    Role.MONITOR: MONITOR,
    Role.STAGE: STAGE,
    Role.REDIS: NamedPeer(Role.REDIS, "redis"),
}

#: The raw calls, which no descriptor tells of, with the message that opens them.
RAW: dict[str, Any] = {call.path: message_type(call.request) for call in CALLS if call.service == TENSOR_SERVICE}


class Fixture:
    """A coordinator and a shard with TLS, and one connection per caller and server."""

    def __init__(self) -> None:
        tools = Tools(
            open_shard=_never,
            read_progress=_never,
            newest_checkpoint=_never,
            listed_checkpoint=_never,
            certify=cluster().signer().sign_stage,
        )
        self.coordinator = Server(self._config(COORDINATOR))
        CoordinatorServicer(Coordinator(MemoryStore(SYSTEM_CLOCK), tools, clock=SYSTEM_CLOCK), host="127.0.0.1").add_to(
            self.coordinator
        )
        shards = ShardServer(lambda _config: MemoryHistory())
        self.shard = Server(self._config(SHARD))
        shards.add_to(self.shard)
        self.servers = {Role.COORDINATOR: self.coordinator, Role.PARAMETER_SERVER: self.shard}
        for server in self.servers.values():
            server.start()
        self.connections: dict[tuple[int, Role], Connection] = {}

    def _config(self, peer: Peer) -> ServerConfig:
        return ServerConfig(num_threads=8, reflection=True, tls=cluster().tls(peer))

    def connection(self, tls: Tls, server: Role) -> Connection:
        key = (id(tls), server)
        if key not in self.connections:
            address = self.servers[server].address
            self.connections[key] = Connection(
                Target(address=address, role=server, tls=tls, server_name=server_name(server))
            )
        return self.connections[key]

    def call(self, tls: Tls, server: Role, call: str, request: bytes) -> None:
        """Make any call as a stream in both directions, whatever it is, and read one answer.

        Raises:
            HetpipeError: what the server or the connection answers.
        """
        connection = self.connection(tls, server)
        with connection.channel() as channel:
            method = channel.stream_stream(call, as_is, as_is)
            answers = method(iter((request,)), timeout=SECONDS)
            try:
                next(iter(answers), None)
            except grpc.RpcError as error:
                raise connection.translated(error, call, 0.0) from error
            finally:
                answers.cancel()

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        for server in self.servers.values():
            server.stop(grace_seconds=0.0)


def _never(*_: object) -> Any:
    raise AssertionError("nobody gets this far")


@pytest.fixture(scope="module")
def running() -> Iterator[Fixture]:
    fixture = Fixture()
    try:
        yield fixture
    finally:
        fixture.close()


def calls_of(running: Fixture, server: Role) -> dict[str, Any]:
    """Every call a server answers, by its reflection, with the class of its (first) message."""
    with running.connection(cluster().tls(OPERATOR), server).channel() as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        found: dict[str, Any] = {}
        pool = descriptor_pool.DescriptorPool(database)
        for service in database.get_services():
            if service == TENSOR_SERVICE:
                found |= RAW
                continue
            for method in pool.FindServiceByName(service).methods:
                found[f"/{service}/{method.name}"] = message_factory.GetMessageClass(method.input_type)
        return found


def request_of(kind: Any, *, peer: Peer = STAGE) -> bytes:
    """A request made in the name of stage 0 of worker 0 of the job, of agent n0, of shard 0: whatever it can say."""
    message: Message = kind()
    if "requester" in message.DESCRIPTOR.fields_by_name and peer.role is Role.STAGE:
        who = message.requester  # type: ignore[attr-defined]
        who.job_id, who.vw, who.stage, who.term = STAGE.job_id, STAGE.vw, STAGE.stage, STAGE.term
    if "job_id" in message.DESCRIPTOR.fields_by_name:
        message.job_id = STAGE.job_id  # type: ignore[attr-defined]
    if "agent_id" in message.DESCRIPTOR.fields_by_name:
        message.agent_id = AGENT.name  # type: ignore[attr-defined]
    is_shard = peer.role is Role.PARAMETER_SERVER
    member_id = f"parameter-server-{SHARD.name}" if is_shard else AGENT.name
    if peer.role is Role.OPERATOR:
        member_id = "worker"
    if "stage" in message.DESCRIPTOR.fields_by_name:
        message.stage.job_id = STAGE.job_id  # type: ignore[attr-defined]
    if "member_id" in message.DESCRIPTOR.fields_by_name:
        message.member_id = member_id  # type: ignore[attr-defined]
    if "member" in message.DESCRIPTOR.fields_by_name:
        member = message.member  # type: ignore[attr-defined]
        member.id, member.host = member_id, "h"
        member.links.SetInParent()
        member.role = {
            Role.PARAMETER_SERVER: values_pb2.MEMBER_ROLE_PARAMETER_SERVER,
            Role.OPERATOR: values_pb2.MEMBER_ROLE_WORKER,
        }.get(peer.role, values_pb2.MEMBER_ROLE_AGENT)
    return message.SerializeToString()


def refused(running: Fixture, tls: Tls, server: Role, call: str, request: bytes) -> type[HetpipeError] | None:
    try:
        running.call(tls, server, call, request)
    except HetpipeError as error:
        return type(error)
    return None


SERVERS = (Role.COORDINATOR, Role.PARAMETER_SERVER)


@pytest.mark.parametrize("server", SERVERS)
def test_the_table_names_every_call_and_no_other(running: Fixture, server: Role) -> None:
    calls = calls_of(running, server)
    assert len(calls) >= 16
    assert calls.keys() <= ACCESS.keys()


def test_every_entry_of_the_table_is_a_call(running: Fixture) -> None:
    assert set().union(*(calls_of(running, server) for server in SERVERS)) == ACCESS.keys()


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("fault", ["no certificate", "self-signed", "expired", "another authority"])
def test_who_cannot_prove_who_they_are_call_nothing(running: Fixture, server: Role, fault: str) -> None:
    root, peer = cluster().authority(), RIGHT[Role.OPERATOR]
    if fault == "no certificate":
        caller: Tls = NoCertificate(cluster().tls(OPERATOR).folder)
    elif fault == "self-signed":
        key = new_key()
        own = Authority(root.certificate, key)  # says that the root has signed it, and has signed it itself
        caller = cluster().issued_by(own, peer)
    elif fault == "expired":
        caller = cluster().issued_by(root, peer, days=-0.001)
    else:
        caller = cluster().issued_by(Authority.new_root(), peer)
    # Whom the handshake refuses, no call knows of: some of them are enough.
    calls = dict(list(calls_of(running, server).items())[:: 1 if fault == "no certificate" else 5])
    answers = {call: refused(running, caller, server, call, request_of(kind)) for call, kind in calls.items()}
    assert answers == dict.fromkeys(calls, Unauthenticated)


@pytest.mark.parametrize("server", SERVERS)
def test_a_certificate_that_names_no_process_calls_nothing(running: Fixture, server: Role) -> None:
    class Nobody:
        uri, server_names, role = "spiffe://hetpipe/janitor/x", ("janitor.hetpipe",), Role.OPERATOR

    caller = cluster().issued_by(cluster().authority(), Nobody())  # type: ignore[arg-type]
    calls = calls_of(running, server)
    answers = {call: refused(running, caller, server, call, request_of(kind)) for call, kind in calls.items()}
    assert answers == dict.fromkeys(calls, Unauthenticated)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("role", Role)
def test_each_role_calls_what_the_table_gives_it_and_nothing_else(running: Fixture, server: Role, role: Role) -> None:
    caller = cluster().tls(RIGHT[role])
    for call, kind in calls_of(running, server).items():
        answer = refused(running, caller, server, call, request_of(kind, peer=RIGHT[role]))
        assert (answer is PermissionDenied) == (role not in ACCESS[call]), f"{role} {call}: {answer}"
        assert answer is not Unauthenticated


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(
    "other",
    [
        stage_peer(vw=1),
        stage_peer(stage=1),
        stage_peer(job="another"),
        stage_peer(incarnation=1),
        stage_peer(term=2),
    ],
    ids=["another virtual worker", "another stage", "another job", "another life", "another term"],
)
def test_no_stage_calls_in_the_name_of_another(running: Fixture, server: Role, other: Peer) -> None:
    caller = cluster().tls(other)
    calls = calls_of(running, server)
    answers = {call: refused(running, caller, server, call, request_of(kind)) for call, kind in calls.items()}
    assert answers == dict.fromkeys(calls, PermissionDenied)


@pytest.mark.parametrize("role", [Role.AGENT, Role.PARAMETER_SERVER])
def test_no_member_calls_in_the_name_of_another(running: Fixture, role: Role) -> None:
    other = type(AGENT)(role, "7")
    for call, kind in calls_of(running, Role.COORDINATOR).items():
        if role in ACCESS[call] and not call.startswith("/grpc."):
            answer = refused(running, cluster().tls(other), Role.COORDINATOR, call, request_of(kind, peer=other))
            assert answer is PermissionDenied, call


def test_members_register_as_what_they_are(running: Fixture) -> None:
    call = "/hetpipe.proto.v2.CoordinatorService/Register"
    request = request_of(coordinator_pb2.RegisterRequest, peer=SHARD)
    for peer in (AGENT, OPERATOR):
        assert refused(running, cluster().tls(peer), Role.COORDINATOR, call, request) is PermissionDenied


def test_the_signer_of_stages_makes_nobody_else(running: Fixture) -> None:
    thief = cluster().signer()
    caller = cluster().issued_by(thief, OPERATOR)
    chain = (caller.folder / "cert.pem").read_bytes() + thief.certificate_pem
    (caller.folder / "cert.pem").write_bytes(chain)
    call = "/hetpipe.proto.v2.CoordinatorService/GetStatus"
    answer = refused(running, Tls(caller.folder), Role.COORDINATOR, call, b"")
    assert answer is Unauthenticated
