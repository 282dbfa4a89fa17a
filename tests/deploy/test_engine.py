"""Containers made, waited for and removed, with an engine that is played."""

from __future__ import annotations

from typing import Any

import pytest
from docker.errors import DockerException
from requests import ReadTimeout

from hetpipe.deploy import labels
from hetpipe.deploy.engine import READY_SECONDS, Engine, answering, open_client
from hetpipe.deploy.topology import STOP_SECONDS, Deployment, StoreKind
from hetpipe.errors import DeadlineExceeded, JobFailed, PeerUnreachable, UserError
from tests.deploy.deployments import ON_GPUS, deployment
from tests.deploy.fake_docker import FakeContainer, FakeDocker, api_error
from tests.support.fake_clock import FakeClock


def engine_of(docker: FakeDocker, said: list[str] | None = None) -> Engine:
    return Engine(docker, clock=FakeClock(auto_advance=True), say=(said if said is not None else []).append)


def started(docker: FakeDocker, described: Deployment | None = None) -> Engine:
    engine = engine_of(docker)
    engine.start(described or deployment())
    return engine


def names_of(docker: FakeDocker, happening: str) -> list[str]:
    return [event.removeprefix(f"{happening} mine-") for event in docker.happened if event.startswith(f"{happening} ")]


def test_everything_starts_in_order() -> None:
    docker = FakeDocker()
    said: list[str] = []
    engine_of(docker, said).start(deployment())
    order = ["coordinator", "parameter-server-0", "parameter-server-1", "agent-0", "agent-1"]
    assert names_of(docker, "start") == order
    assert said == [f"starting {name}" for name in order]
    assert [network.name for network in docker.nets] == ["mine"]
    assert {container.labels[labels.PROJECT] for container in docker.made} == {"mine"}


def test_what_ends_is_started_again_but_not_before_all_are_ready() -> None:
    docker = FakeDocker()
    before: list[str] = []
    docker.on_start = lambda container: before.append(container.restart_policy)
    started(docker)
    assert set(before) == {""}
    assert {container.restart_policy for container in docker.made} == {"unless-stopped"}


def test_a_container_waits_for_whom_it_needs() -> None:
    docker = FakeDocker()
    clock = FakeClock(auto_advance=True)
    ready_at: dict[str, float] = {}

    def slowly(container: FakeContainer) -> None:
        needed = {"mine-coordinator": [], "mine-agent-1": ["mine-agent-0"]}.get(container.name, ["mine-coordinator"])
        assert all(docker.named(name).stdout for name in needed), f"{container.name} started too early"
        container.status = "running"
        ready_at[container.name] = clock.monotonic() + 3.0

    docker.on_start = slowly
    original = FakeContainer.logs

    def logs(self: FakeContainer, **options: Any) -> Any:
        if clock.monotonic() >= ready_at[self.name]:
            self.stdout = b'{"role": "x"}\n'
        return original(self, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeContainer, "logs", logs)
        Engine(docker, clock=clock, say=lambda _: None).start(deployment())
    assert clock.monotonic() == pytest.approx(9.0, abs=1.0)


def test_one_that_is_not_ready_in_time() -> None:
    def never(container: FakeContainer) -> None:
        if container.name == "mine-agent-0":
            container.status = "running"

    with pytest.raises(
        DeadlineExceeded, match=rf"agent-1 waits for agent-0, .* within {READY_SECONDS:.0f} s; its last output: line 2"
    ):
        started(FakeDocker(on_start=never))


def test_what_it_logs_does_not_make_it_ready() -> None:
    def logs_only(container: FakeContainer) -> None:
        container.status, container.stderr = "running", b'{"event": "starting", "role": "coordinator"}\n'

    with pytest.raises(DeadlineExceeded):
        started(FakeDocker(on_start=logs_only))


def test_gpus_are_asked_for_by_their_ids() -> None:
    docker = FakeDocker()
    started(docker, deployment(agents=ON_GPUS))
    requests = {container.name: container.options["device_requests"] for container in docker.made}
    assert requests.pop("mine-agent-0") == [
        {"Driver": "", "Count": 0, "DeviceIDs": ["GPU-1", "GPU-0"], "Capabilities": [["gpu"]], "Options": {}}
    ]
    assert requests.pop("mine-agent-1")[0]["DeviceIDs"] == ["GPU-2"]
    assert not any(requests.values())


def test_one_that_ends_before_it_is_ready() -> None:
    def dies(container: FakeContainer) -> None:
        container.status, container.exit_code = "exited", 3

    with pytest.raises(JobFailed, match="coordinator ended with exit status 3 before it was ready; its last output"):
        started(FakeDocker(on_start=dies))


@pytest.mark.parametrize(
    ("explanation", "kind", "sentence"),
    [
        ('could not select device driver "" with capabilities: [[gpu]]', UserError, "NVIDIA container toolkit"),
        ("Bind for 127.0.0.1:7400 failed: port is already allocated", UserError, "port .* is in use; .* --port"),
        ("no space left on device", JobFailed, "could not be started: no space left on device"),
    ],
)
def test_refusals_of_the_engine_become_sentences(explanation: str, kind: type[Exception], sentence: str) -> None:
    def refuses(_: FakeContainer) -> None:
        raise api_error(explanation)

    with pytest.raises(kind, match=sentence):
        started(FakeDocker(on_start=refuses), deployment(agents=ON_GPUS))


@pytest.mark.parametrize(
    ("image", "command"),
    [
        ("hetpipe:0.1.0-cpu", "docker build --target cpu --tag hetpipe:0.1.0-cpu ."),
        ("hetpipe:0.1.0-cuda", "docker build --target cuda --tag hetpipe:0.1.0-cuda ."),
    ],
)
def test_an_image_that_is_missing(image: str, command: str) -> None:
    with pytest.raises(UserError) as refused:
        engine_of(FakeDocker(images_there=set())).check(deployment(image=image))
    assert command in str(refused.value)


def test_a_store_image_that_is_missing() -> None:
    docker = FakeDocker(images_there={"hetpipe:test"})
    with pytest.raises(UserError, match="docker pull redis:test"):
        engine_of(docker).check(deployment(store=StoreKind.REDIS, store_image="redis:test"))


def test_a_project_is_up_only_once() -> None:
    docker = FakeDocker()
    started(docker)
    with pytest.raises(UserError, match="mine is already up; end it with `hetpipe down --project mine`"):
        engine_of(docker).check(deployment())


def test_removal_ends_users_before_what_they_use() -> None:
    docker = FakeDocker()
    engine = started(docker)
    docker.happened.clear()
    removed = engine.remove("mine")
    order = names_of(docker, "remove")[:-1]
    assert {*names_of(docker, "SIGTERM")} == {*order}
    assert {*order[:2]} == {"agent-0", "agent-1"}
    assert {*order[2:4]} == {"parameter-server-0", "parameter-server-1"}
    assert order[4:] == ["coordinator"]
    assert docker.happened.index("SIGTERM mine-agent-1") < docker.happened.index("remove mine-agent-0")
    assert (docker.made, docker.nets) == ([], [])
    assert len(removed) == 6


def test_removal_is_idempotent() -> None:
    docker = FakeDocker()
    engine = started(docker)
    engine.remove("mine")
    assert engine.remove("mine") == ()


def test_removal_touches_nothing_else() -> None:
    docker = FakeDocker()
    started(docker)
    other = docker.containers.create("x", [], name="other", labels={labels.PROJECT: "other"})
    docker.networks.create("other", labels={labels.PROJECT: "other"})
    bystander = docker.containers.create("x", [], name="mine-too", labels={})
    engine_of(docker).remove("mine")
    assert docker.made == [other, bystander]
    assert [network.name for network in docker.nets] == ["other"]


def test_one_that_does_not_end_is_killed_after_the_grace() -> None:
    docker = FakeDocker()
    clock = FakeClock(auto_advance=True)
    engine = Engine(docker, clock=clock, say=lambda _: None)
    engine.start(deployment())
    docker.named("mine-agent-0").ends = False
    engine.remove("mine")
    assert docker.made == []
    assert clock.monotonic() == pytest.approx(STOP_SECONDS, abs=1.0)


def test_one_that_others_remove_is_no_error() -> None:
    docker = FakeDocker()
    engine = started(docker)
    gone = docker.named("mine-agent-0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gone, "kill", lambda _: docker.made.remove(gone))
        engine.remove("mine")
    assert docker.made == []


def test_what_is_left_is_an_error() -> None:
    docker = FakeDocker()
    engine = started(docker)
    docker.named("mine-agent-0").refuses = api_error("removal in progress", 409)
    with pytest.raises(JobFailed, match="mine-agent-0 could not be removed"):
        engine.remove("mine")


def test_an_engine_that_refuses_to_remove_is_told() -> None:
    docker = FakeDocker()
    engine = started(docker)
    docker.named("mine-agent-0").refuses = api_error("driver failed.")
    with pytest.raises(JobFailed, match=r"refused: driver failed$"), answering():
        engine.remove("mine")


def test_an_engine_that_is_gone() -> None:
    with pytest.raises(PeerUnreachable, match="does not answer any more"), answering():
        raise ReadTimeout


def test_states() -> None:
    docker = FakeDocker()
    engine = started(docker, deployment(agents=ON_GPUS))
    docker.named("mine-agent-1").status = "exited"
    docker.named("mine-agent-1").exit_code = 1
    states = {state.name: state for state in engine.states("mine")}
    assert list(states) == sorted(states)
    assert states["coordinator"].address == "127.0.0.1:7400"
    assert states["agent-0"].devices == "GPU-1,GPU-0"
    assert (states["agent-1"].state, states["agent-0"].state) == ("exited (1)", "running")
    assert states["agent-0"].health == "healthy"


def test_containers_are_found_by_name_and_by_role() -> None:
    docker = FakeDocker()
    engine = started(docker)
    found = {wanted: [c.name for c in engine.find("mine", wanted)] for wanted in [(), ("agent",), ("coordinator",)]}
    assert found[("agent",)] == ["mine-agent-0", "mine-agent-1"]
    assert found[("coordinator",)] == ["mine-coordinator"]
    assert len(found[()]) == 5
    with pytest.raises(UserError, match="mine has no agent-7; it has agent-0, agent-1, coordinator"):
        engine.find("mine", ("agent-7",))
    with pytest.raises(UserError, match="other is not up"):
        engine.find("other", ())


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("('Connection aborted.', FileNotFoundError(2, 'No such file'))", "start docker, or set DOCKER_HOST"),
        ("('Connection aborted.', PermissionError(13, 'Permission denied'))", "usermod -aG docker"),
    ],
)
def test_no_engine(monkeypatch: pytest.MonkeyPatch, reason: str, sentence: str) -> None:
    def absent(**_: Any) -> None:
        raise DockerException(f"Error while fetching server API version: {reason}")

    monkeypatch.setattr("docker.from_env", absent)
    with pytest.raises(UserError, match=sentence) as refused:
        open_client({"DOCKER_HOST": "tcp://there:2375"})
    assert "tcp://there:2375" in str(refused.value)
