"""Every role's certificate × every call × every field that names another's, on running servers with TLS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.message import Message

from hetpipe.certs.authority import new_key, request_for
from hetpipe.checkpoint.layout import shard_file, stage_file
from hetpipe.errors import Busy, DeadlineExceeded, HetpipeError, PermissionDenied
from hetpipe.observe.history import MemoryHistory
from hetpipe.proto.v2 import coordinator_pb2 as pb
from hetpipe.proto.v2 import values_pb2 as values_pb
from hetpipe.roots import RUN_OPTION, Roots, root_of
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.servicer import CoordinatorServicer
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.commands import StageKey
from hetpipe.values.identity import NamedPeer, Peer, Role, StagePeer, server_name
from hetpipe.values.ids import AgentId, JobId, ShardIndex, StageIndex, VirtualWorkerIndex
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.members import MemberId, MemberInfo, MemberRole, Registration
from hetpipe.wire.calls import ACCESS, CALLS, SHARD_SERVICE, TENSOR_SERVICE, SubmitJobRequest
from hetpipe.wire.channel import as_is
from hetpipe.wire.codec import to_message
from hetpipe.wire.connection import Connection, Target
from hetpipe.wire.server import Server, ServerConfig
from tests.certs.cluster import AGENT, COORDINATOR, MONITOR, OPERATOR, SHARD, stage_peer
from tests.certs.cluster import cluster as certificates
from tests.decide.lifecycle.test_known_links import link
from tests.server.coordinator.builders import agent_member, job, shard_member, submission
from tests.server.coordinator.fakes import Cluster
from tests.server.shard.builders import run_document, shard_config, slices_of
from tests.wire.access_fields import FIELDS, REQUESTS, VALUES, Outcome, leaves, unclassified
from tests.wire.examples import CODE

SECONDS = 10.0
#: The agent without devices, and so without stages.
SPARE = 9

#: How long an answer is waited for from a stream that may have none.
STREAM_SECONDS = 0.3

SHARD_1 = NamedPeer(Role.PARAMETER_SERVER, "1")
STAGE = stage_peer("job-j")
CALLERS: dict[Role, Peer] = {
    Role.COORDINATOR: COORDINATOR,
    Role.PARAMETER_SERVER: SHARD_1,
    Role.AGENT: AGENT,
    Role.OPERATOR: OPERATOR,
    Role.MONITOR: MONITOR,
    Role.STAGE: STAGE,
    Role.REDIS: NamedPeer(Role.REDIS, "redis"),
}
STREAMS = {"FollowLog", "WatchCommands", "WatchJob", "WatchClocks", "Push", "Pull", "PushBuffers", "PullBuffers"}

#: Calls that end what their caller has, so that their own case is not tried first.
ENDS = {"Leave", "Depart"}


class Coordinated(Cluster):
    """A coordinator with a signer, which reads and writes below one folder only."""

    def new_coordinator(self) -> Coordinator:
        roots = Roots(runs=root_of([self.run_dir], RUN_OPTION, is_needed=True))
        tools = replace(self.shards.tools, certify=certificates().signer().sign_stage, roots=roots)
        return Coordinator(self.store, tools, clock=self.clock, executor_of=lambda _: self.executor)


class World:
    """A coordinator that leads two jobs and inspects a third, a clock shard of two jobs, and whoever has a part there.

    Agents n0 to n3 have a stage each of the first job, n4 to n7 of the second; n8 inspects the third. Of the clock
    shard's jobs, parameter servers 0 and 1 serve the first, 0 and 2 the second.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        cluster = self.cluster = Coordinated(folder)
        for index in range(10):
            cluster.join(agent_member(f"n{index}", devices=0 if index == SPARE else 1))
        for index in range(3):
            cluster.join(replace(shard_member(index), id=MemberId(f"parameter-server-{index}")))
        self.worker = MemberInfo(MemberRole.WORKER, MemberId("yours"), "h", 1)
        lease = cluster.coordinator.register(self.worker, owner="operator you")
        cluster.registrations["yours"] = lease.registration
        cluster._addresses["yours"] = ""
        cluster.registrations["mine"] = cluster.coordinator.register(
            replace(self.worker, id=MemberId("mine")), owner=str(OPERATOR)
        ).registration
        cluster._addresses["mine"] = ""
        self.jobs = [self._submit("first-request"), self._submit("second-request")]
        cluster.wait(62.0)  # what members tell when a coordinator begins may be of a store that lost its memory
        self.inspected = self._submit("third-request", "workers.count=1", "workers.stages=1")
        self.coordinator = Server(self._config(COORDINATOR))
        CoordinatorServicer(cluster.coordinator, host="127.0.0.1").add_to(self.coordinator)
        self.shards = ShardServer(lambda _config: MemoryHistory())
        for name, others, agent in (("job-j", (0, 1), "n0"), ("job-k", (0, 2), "n1")):
            self.shards.configure(_config_of(name, others, AgentId(agent)))
        self.shard = Server(self._config(SHARD))
        self.shards.add_to(self.shard)
        for server in (self.coordinator, self.shard):
            server.start()
        self._connections: dict[tuple[str, str], Connection] = {}

    def _submit(self, request_id: str, *overrides: str) -> JobId:
        handed_in = replace(
            submission(job(*overrides), str(self.folder / request_id), request_id=request_id), code=CODE
        )
        job_id = self.cluster.coordinator.submit_job(handed_in)
        if request_id != "third-request":
            self.cluster.train()
        return job_id

    @staticmethod
    def _config(peer: Peer) -> ServerConfig:
        return ServerConfig(num_threads=8, tls=certificates().tls(peer))

    def key(self, agent: str) -> StageKey:
        [found] = [key for job_id in self.jobs for key in self.cluster.stages(agent, job_id)]
        assert isinstance(found, StageKey)
        return found

    def call(self, peer: Peer, call: str, request: Message) -> HetpipeError | None:
        """What the server answers: nothing but an error is of interest."""
        of_shard = call.split("/")[1] in {SHARD_SERVICE, TENSOR_SERVICE}
        server, role = (self.shard, Role.PARAMETER_SERVER) if of_shard else (self.coordinator, Role.COORDINATOR)
        connection = self._connections.get((peer.uri, role))
        if connection is None:
            target = Target(
                address=server.address, role=role, tls=certificates().tls(peer), server_name=server_name(role)
            )
            connection = self._connections[peer.uri, role] = Connection(target)
        may_have_none = call.rpartition("/")[2] in STREAMS and peer.role in ACCESS[call]  # a refusal is an answer
        seconds = STREAM_SECONDS if may_have_none else SECONDS
        with connection.channel() as channel:
            answers = channel.stream_stream(call, as_is, as_is)(iter((request.SerializeToString(),)), timeout=seconds)
            try:
                next(iter(answers), None)
            except grpc.RpcError as error:
                return connection.translated(error, call, 0.0)
            finally:
                answers.cancel()
        return None

    def others(self, caller: Peer) -> object:
        """Everything that is not the caller's."""
        self.cluster.executor.run_all()
        coordinator, own = self.cluster.coordinator, getattr(caller, "member_id", "")
        hosts = [
            (
                host.job_id,
                host.machine.state,
                host.machine.clocks,
                [(str(life), life.state, life.exited, life.pid) for life in host.machine.stages if life.agent != own],
            )
            for host in coordinator.hosts()
        ]
        members = [member.info for member in coordinator.members() if member.info.id not in {own, "mine"}]
        free = [agent for agent in coordinator.free_devices() if agent.agent != own]
        mail = {agent: len(box.waiting) for agent, box in coordinator._mailboxes._boxes.items() if agent != own}
        clocks = [
            (
                shard.clock_shard.snapshot(),
                shard.clock_shard.num_records,
                shard.clock_shard.describe().lives,
                {
                    place: address
                    for place, address in shard.clock_shard._addresses.items()
                    if not (isinstance(caller, StagePeer) and place == (caller.vw, caller.stage))
                },
            )
            for shard in self.shards.job_shards()
        ]
        return hosts, members, free, mail, clocks

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        for server in (self.coordinator, self.shard):
            server.stop(grace_seconds=0.0)


def _config_of(name: str, others: tuple[int, ...], agent: AgentId) -> Any:
    bare = replace(shard_config(slices_of([4]), num_shards=2, stages=(2, 2)), job_id=JobId(name))
    run = run_document(bare)
    shards = tuple(
        replace(member, id=MemberId(f"parameter-server-{index}"))
        for member, index in zip(run.shards, others, strict=True)
    )
    agents = tuple(replace(info, agent=agent) for info in run.agents)
    return replace(bare, run=replace(run, shards=shards, agents=agents))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("runs"))
    try:
        yield made
    finally:
        made.close()


def put_stage(message: Any, key: StageKey) -> None:
    message.job_id, message.vw, message.stage = key.job_id, key.vw, key.stage
    message.incarnation, message.term = key.incarnation, key.term


def own_request(world: World, call: str, role: Role, path: str) -> Any:
    """A request in which everything is the caller's own; with the part that holds `path`."""
    request: Any = REQUESTS[call]()
    fields = request.DESCRIPTOR.fields_by_name
    member = member_of(call, role)
    if "member" in fields:
        put_member(request.member, world, member)
    for name in {"member_id", "agent_id"}.intersection(fields):
        setattr(request, name, member)
        request.registration = world.cluster.registrations[member]
    if "requester" in fields and role is Role.STAGE:
        put_stage(request.requester, StageKey(STAGE.job_id, STAGE.vw, STAGE.stage, STAGE.incarnation, STAGE.term))
    if call.split("/")[1] == SHARD_SERVICE:
        put_of_shard(request)
    elif "job_id" in fields:
        request.job_id = world.jobs[0]
    put_wish(request, world)
    if isinstance(request, pb.ReportRequest):
        put_report(request, world, path)
    if isinstance(request, pb.MeasureLinksRequest):
        request.request_id = "first-request"
    if isinstance(request, pb.SubmitJobRequest):
        run_dir = str(world.folder / "first-request")
        handed_in = submission(job(), run_dir, request_id="first-request")
        request.CopyFrom(cast("Any", to_message)(SubmitJobRequest(replace(handed_in, import_path="/code"))))
    return request


def put_wish(request: Any, world: World) -> None:
    """What an agent needs for a stage."""
    if isinstance(request, pb.CertifyStageRequest):
        put_stage(request.stage, world.key("n0"))
        request.request_pem = request_for(AGENT, new_key())
    if isinstance(request, pb.FetchCodeRequest):
        request.digest = CODE.digest


def member_of(call: str, role: Role) -> str:
    """The member that calls: agents register as one without stages, which nobody has to do without."""
    agent = "n9" if call.endswith("/Register") else "n0"
    return {Role.PARAMETER_SERVER: "parameter-server-1", Role.AGENT: agent, Role.OPERATOR: "mine"}.get(role, "")


def put_member(info: Any, world: World, member: str) -> None:
    found = next(each.info for each in world.cluster.coordinator.members() if each.info.id == member)
    info.id, info.host, info.pid, info.address = found.id, found.host, found.pid, found.address
    info.role = {
        MemberRole.AGENT: values_pb.MEMBER_ROLE_AGENT,
        MemberRole.PARAMETER_SERVER: values_pb.MEMBER_ROLE_PARAMETER_SERVER,
        MemberRole.WORKER: values_pb.MEMBER_ROLE_WORKER,
    }[found.role]
    info.links.SetInParent()
    for device in found.devices:
        info.devices.add(device=device.device, type="cpu", memory_bytes=1, torch_device="cpu")
    if found.shard_index is not None:
        info.shard_index = found.shard_index


def put_of_shard(request: Any) -> None:
    """As a parameter server or a stage of the first job of the clock shard."""
    fields = request.DESCRIPTOR.fields_by_name
    for name, value in {"job_id": "job-j", "term": 1, "shard": 1, "clock": 1}.items():
        if name in fields:
            setattr(request, name, value)
    if "files" in fields:
        name = shard_file(ShardIndex(1)) if "shard" in fields else stage_file(STAGE.vw, STAGE.stage)
        request.files.add(name=name, sha256="0" * 64, num_bytes=1)


def told_condition(request: Any, job_id: str) -> None:
    """A condition of a job, as its parameter servers tell them."""
    request.conditions[job_id].conditions.add(kind="durability_lost", who="parameter server 0", sentence="full")


def put_report(request: Any, world: World, path: str) -> None:
    """News of one's own, of the kind that `path` names."""
    request.batch = world.cluster._batches["n0"] = world.cluster._batches["n0"] + 1
    match path.split(".")[:2]:
        case ["reports", "stage_report"]:
            reports = request.reports.add().stage_report
            put_stage(reports.key, world.key("n0"))
            reports.stage_ready.pid = 1
        case ["reports", "child_exit"]:
            put_stage(request.reports.add().child_exit.key, world.key("n0"))
        case ["reports", "inspection_step"]:
            about = request.reports.add().inspection_step
            about.job_id = world.jobs[0]
            about.step.device_type, about.step.layer, about.step.total = "cpu", "layer", 5
        case ["reports", "inspection_phase"]:
            phase = request.reports.add().inspection_phase
            phase.job_id, phase.phase = world.jobs[0], "loading the model"
        case ["reports", "link_awaited"]:
            awaited = request.reports.add().link_awaited
            awaited.job_id, awaited.address = world.jobs[0], "n0.host:7000"
        case ["reports", "link_result"]:
            result = request.reports.add().link_result
            result.job_id = world.jobs[0]
            result.measured.SetInParent()
        case ["reports", "inspection_result"]:
            request.reports.add().inspection_result.job_id = world.jobs[0]


def put(name: str, value: Any) -> Callable[[Any, World], None]:
    """Write one field."""

    def change(request: Any, _world: World) -> None:
        *inner, last = name.split(".")
        for part in inner:
            found = getattr(request, part)
            request = found if isinstance(found, Message) else found[0]
        setattr(request, last, value)

    return change


def measured(one: str, other: str) -> Message:
    """The link between two nodes, as somebody has measured it."""
    return to_message(MeasuredLinks(links=(link(one, other, 1e3),)))


def from_world(name: str, value: Callable[[World], Any]) -> Callable[[Any, World], None]:
    return lambda request, world: put(name, value(world))(request, world)


def told_stage(field: str) -> Callable[[Any, World], None]:
    """A stage that another agent has, or nobody."""

    def change(request: Any, world: World) -> None:
        put_stage(request.member.stages.add(), replace(world.key("n0"), **{field: _other(world, field)}))

    return change


def told_life(kind: str, field: str) -> Callable[[Any, World], None]:
    """News of a stage of another agent, or of a life that there is not; of another job in the term that it is in."""

    def change(request: Any, world: World) -> None:
        key = world.key("n4") if field == "job_id" else replace(world.key("n0"), **{field: _other(world, field)})
        put_stage(getattr(request.reports[0], kind).key, key)

    return change


def another_stage(field: str) -> Callable[[Any, World], None]:
    return from_world(f"stage.{field}", lambda world: _other(world, field))


def _other(world: World, field: str) -> Any:
    own = world.key("n0")
    return {
        "job_id": world.jobs[1],
        "vw": next(key.vw for key in (world.key(f"n{i}") for i in range(4)) if key.vw != own.vw),
        "stage": next(key.stage for key in (world.key(f"n{i}") for i in range(4)) if key.stage != own.stage),
        "incarnation": 7,
        "term": 7,
    }[field]


LIFE = ("job_id", "vw", "stage", "incarnation", "term")
OTHER_LIFE = {"job_id": "job-k", "vw": 1, "stage": 1, "incarnation": 1, "term": 2}

#: How each field is made to name another's, for calls that have such a field; by path, or by call and path.
ANOTHERS: dict[str, Callable[[Any, World], None]] = {
    "agent_id": put("agent_id", "n1"),
    "registration": from_world("registration", lambda world: world.cluster.registrations["n1"]),
    "member.role": put("member.role", values_pb.MEMBER_ROLE_UNSPECIFIED),
    "member.host": put("member.host", "n1.host"),
    "member.address": put("member.address", "shards.host:7000"),
    "member.shard_index": put("member.shard_index", 0),
    "member.devices.device": lambda request, _: request.member.devices.add(
        device="n1/0", type="cpu", memory_bytes=1, torch_device="cpu"
    ),
    "member.links": lambda request, _: request.member.links.CopyFrom(measured("n0", "n1")),
    **{f"member.stages.{field}": told_stage(field) for field in LIFE},
    "clocks": lambda request, world: request.clocks[world.jobs[0]].CopyFrom(
        values_pb.ClockSnapshot(term=9, published=9)
    ),
    "lost": lambda request, world: request.lost.update({world.jobs[0]: "gone"}),
    "conditions": lambda request, world: told_condition(request, world.jobs[0]),
    "jobs": lambda request, world: request.jobs.extend([world.jobs[1], "made-up"]),
    **{
        f"reports.{kind}.key.{field}": told_life(kind, field)
        for kind in ("stage_report", "child_exit")
        for field in LIFE
    },
    "reports.inspection_result.job_id": from_world("reports.inspection_result.job_id", lambda world: world.inspected),
    "reports.inspection_step.job_id": from_world("reports.inspection_step.job_id", lambda world: world.inspected),
    "reports.inspection_phase.job_id": from_world("reports.inspection_phase.job_id", lambda world: world.inspected),
    **{
        f"reports.{kind}.job_id": from_world(f"reports.{kind}.job_id", lambda world: world.inspected)
        for kind in ("link_awaited", "link_result")
    },
    **{f"reports.{kind}.number": put(f"reports.{kind}.number", 7) for kind in ("link_awaited", "link_result")},
    "reports.link_awaited.address": put("reports.link_awaited.address", "n1.host:7000"),
    "reports.link_result.measured": lambda request, _: request.reports[0].link_result.measured.CopyFrom(
        measured("n1", "n2")
    ),
    **{f"stage.{field}": another_stage(field) for field in LIFE},
    "request_pem": put("request_pem", request_for(OPERATOR, new_key())),
    "request_id": put("request_id", "second-request"),
    "submission.request_id": put("submission.request_id", "second-request"),
    "submission.run_dir": put("submission.run_dir", "/etc"),
    "submission.import_path": put("submission.import_path", "/etc"),
    "submission.restore": put("submission.restore", "/etc/checkpoints/clock-00000001"),
    "job_id": from_world("job_id", lambda world: world.jobs[1]),
    **{f"requester.{field}": put(f"requester.{field}", value) for field, value in OTHER_LIFE.items()},
    "link_address": put("link_address", "127.0.0.1:1"),
    "replicas_address": put("replicas_address", "127.0.0.1:1"),
    "files.name": put("files.name", stage_file(VirtualWorkerIndex(1), StageIndex(0))),
    "term": put("term", 7),
    "shard": put("shard", 0),
}


def changed(world: World, call: str, role: Role, path: str) -> Any:
    """The caller's own request, but for one field, which names another's."""
    request = own_request(world, call, role, path)
    if path in {"member_id", "member.id"}:
        anothers = {Role.PARAMETER_SERVER: "parameter-server-0", Role.AGENT: "n1", Role.OPERATOR: "yours"}[role]
        put(path, anothers)(request, world)
        if path == "member_id":
            request.registration = world.cluster.registrations[anothers]
    elif path == "job_id" and call.split("/")[1] == SHARD_SERVICE:
        request.job_id = "job-k"
    else:
        ANOTHERS[path](request, world)
    return request


def test_every_field_of_every_request_is_classified() -> None:
    assert unclassified() == []


def test_a_new_field_of_a_request_has_to_be_classified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VALUES, "SliceHeader", frozenset({"start", "stop", "dtype"}))
    assert "/hetpipe.proto.v2.TensorService/Push slices.parameter: not classified" in unclassified()
    monkeypatch.setitem(FIELDS, "/x/Y", {})
    assert "/x/Y: no such call" in unclassified()


def test_the_tables_are_of_the_same_calls_and_roles() -> None:
    assert FIELDS.keys() == {call for call in ACCESS if not call.startswith("/grpc.")}
    assert FIELDS.keys() == {call.path for call in CALLS}
    for call, fields in FIELDS.items():
        assert all(outcomes.keys() == ACCESS[call].keys() for outcomes in fields.values()), call
    assert len(list(leaves(cast("Any", pb.ReportRequest.DESCRIPTOR)))) > 20


@pytest.mark.parametrize("call", FIELDS, ids=lambda call: call.rpartition("/")[2])
def test_who_names_anothers_is_refused_or_changes_nothing(world: World, call: str) -> None:
    for role in Role:
        assert_refused_or_unchanged(world, call, role)


def assert_refused_or_unchanged(world: World, call: str, role: Role) -> None:
    caller = NamedPeer(role, f"n{SPARE}") if member_of(call, role) == f"n{SPARE}" else CALLERS[role]
    for path, outcomes in FIELDS[call].items():
        cell = f"{role} × {call} × {path}"
        if role not in ACCESS[call]:
            before = world.others(caller)
            # Or, on a slow machine, since it was refused too often within a second.
            assert isinstance(world.call(caller, call, REQUESTS[call]()), PermissionDenied | Busy), cell
            assert world.others(caller) == before, cell
            continue
        outcome = outcomes[role]
        if outcome is Outcome.TASK:
            # To act on anybody's is what these are for; so here it is a job that there is not.
            answer = world.call(caller, call, REQUESTS[call](**({"job_id": "none"} if path == "job_id" else {})))
            assert not isinstance(answer, PermissionDenied), f"{cell}: {answer}"
            continue
        if call.rpartition("/")[2] not in ENDS and not path.startswith(
            ("reports.child_exit", "reports.inspection", "reports.link")
        ):
            own = world.call(caller, call, own_request(world, call, role, path))
            assert not isinstance(own, PermissionDenied), f"{cell}: its own is refused: {own}"
            _register_again(world, call, role)
        before = world.others(caller)
        answer = world.call(caller, call, changed(world, call, role, path))
        if outcome is Outcome.REFUSED:
            assert isinstance(answer, HetpipeError) and not isinstance(answer, DeadlineExceeded), f"{cell}: {answer}"
        assert world.others(caller) == before, f"{cell} has an effect on others: {answer}"
        _register_again(world, call, role)


def _register_again(world: World, call: str, role: Role) -> None:
    """Whoever has registered anew, or left, is there as before."""
    name = call.rpartition("/")[2]
    if name not in {"Register", *ENDS}:
        return
    match role:
        case Role.AGENT if name == "Register":
            world.cluster.join(agent_member(f"n{SPARE}", devices=0))
        case Role.AGENT:
            world.cluster.join(replace(agent_member("n0", devices=1), stages=(world.key("n0"),)))
        case Role.PARAMETER_SERVER:
            world.cluster.join(replace(shard_member(1), id=MemberId("parameter-server-1")))
        case _:
            mine = replace(world.worker, id=MemberId("mine"))
            lease = world.cluster.coordinator.register(mine, owner=str(OPERATOR))
            world.cluster.registrations["mine"] = Registration(lease.registration)
