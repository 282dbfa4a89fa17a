"""What runs in which container."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetpipe.deploy.groups import AgentGroup
from hetpipe.deploy.topology import (
    OPERATOR,
    STORE_FOLDER,
    TLS_FOLDER,
    Container,
    Folders,
    Role,
    StoreKind,
    submission_of,
)
from hetpipe.errors import UserError
from tests.deploy.deployments import ON_GPUS, SPEC, by_name, cpus, deployment

NAMES = ["coordinator", "parameter-server-0", "parameter-server-1", "agent-0", "agent-1"]


def option(container: Container, name: str) -> str:
    return container.command[container.command.index(name) + 1]


def sources(container: Container) -> dict[str, bool]:
    """What it is shown, and whether it may only read it."""
    return {mount.source: mount.read_only for mount in container.mounts}


def test_starting_order() -> None:
    described = deployment()
    assert [container.name for container in described.containers] == NAMES
    before: set[str] = set()
    for container in described.containers:
        assert set(container.depends_on) <= before
        before.add(container.name)


def test_agents_register_one_after_the_other() -> None:
    """Devices are dealt in the order of registration, so the order of the virtual workers is that of the agents."""
    described = by_name(deployment())
    assert described["agent-0"].depends_on == ("coordinator",)
    assert described["agent-1"].depends_on == ("agent-0",)


def test_memory_is_the_default_store() -> None:
    described = by_name(deployment())
    assert Role.STORE not in {container.role for container in described.values()}
    assert option(described["coordinator"], "--store") == "memory"


def test_members_find_the_coordinator_and_say_how_they_are_reached() -> None:
    described = by_name(deployment())
    for name in NAMES[1:]:
        assert option(described[name], "--coordinator") == "coordinator:7400"
    for name in NAMES[:3]:
        assert option(described[name], "--advertise") == name
    assert option(described["agent-1"], "--host") == "agent-1"
    assert [option(described[f"parameter-server-{index}"], "--index") for index in (0, 1)] == ["0", "1"]
    assert [container.published for container in described.values()] == [7400, None, None, None, None]


def test_an_agent_sees_the_gpus_of_its_virtual_worker_in_the_order_of_the_stages() -> None:
    described = by_name(deployment(agents=ON_GPUS))
    assert described["agent-0"].gpus == ("GPU-1", "GPU-0")
    assert dict(described["agent-0"].environment)["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-0"
    assert described["agent-1"].gpus == ("GPU-2",)
    assert "--cpu-devices" not in described["agent-0"].command
    assert all(not described[name].gpus for name in NAMES[:3])


def test_an_agent_without_gpus_declares_its_cpu_devices() -> None:
    described = by_name(deployment(agents=(AgentGroup("n0", cpus(3)),)))
    assert option(described["agent-0"], "--cpu-devices") == "3"
    assert option(described["agent-0"], "--node") == "n0"
    assert "CUDA_VISIBLE_DEVICES" not in dict(described["agent-0"].environment)


def test_everybody_has_one_certificate_of_its_own() -> None:
    described = deployment()
    shown = {c.name: [m.source for m in c.mounts if m.target == TLS_FOLDER] for c in described.containers}
    certificates = f"{SPEC.folders.state}/certs"
    assert shown == {
        "coordinator": [f"{certificates}/coordinator"],
        "parameter-server-0": [f"{certificates}/parameter-server-0"],
        "parameter-server-1": [f"{certificates}/parameter-server-1"],
        "agent-0": [f"{certificates}/agent-vw-0"],
        "agent-1": [f"{certificates}/agent-vw-1"],
    }
    for container in described.containers:
        assert option(container, "--tls") == TLS_FOLDER
        assert "--insecure" not in container.command
        # The authority's key is beside the folders of the processes.
        assert SPEC.folders.state not in sources(container)
        assert certificates not in sources(container)


def test_without_tls() -> None:
    for container in deployment(tls=False).containers:
        assert "--insecure" in container.command
        assert "--tls" not in container.command
        assert container.peer is None
        assert all(mount.target != TLS_FOLDER for mount in container.mounts)


def test_only_stages_see_user_code_and_nobody_may_change_it() -> None:
    described = by_name(deployment(folders=replace(SPEC.folders, more=("/data",))))
    code, runs = SPEC.folders.code, SPEC.folders.runs
    assert {name for name, container in described.items() if code in sources(container)} == {"agent-0", "agent-1"}
    assert {name for name, container in described.items() if "/data" in sources(container)} == {"agent-0", "agent-1"}
    for container in described.values():
        writable = [source for source, read_only in sources(container).items() if not read_only]
        assert writable == [runs]


def test_folders_keep_their_paths() -> None:
    """A run's folder has one name for whoever hands the job in and for the processes that write into it."""
    for container in deployment().containers:
        assert all(m.source == m.target for m in container.mounts if m.target != TLS_FOLDER)


def test_shards_keep_their_state_apart_and_outside_of_their_containers() -> None:
    described = by_name(deployment())
    states = [option(described[f"parameter-server-{index}"], "--state") for index in range(2)]
    assert states == [f"{SPEC.folders.runs}/.state/mine/shard-{index}" for index in range(2)]


def test_modules_that_stages_may_import() -> None:
    command = by_name(deployment())["agent-0"].command
    assert [command[i + 1] for i, word in enumerate(command) if word == "--allow-modules"] == ["model", "torch.*"]


def test_agents_pass_on_the_variables_that_are_named_and_no_others() -> None:
    command = by_name(deployment(allowed_environment=("HF_HOME", "WANDB_*")))["agent-0"].command
    assert [command[i + 1] for i, word in enumerate(command) if word == "--allow-environment"] == ["HF_HOME", "WANDB_*"]
    assert "--allow-environment" not in by_name(deployment())["agent-0"].command


def test_redis_is_known_to_the_coordinator_only() -> None:
    described = by_name(deployment(store=StoreKind.REDIS, store_image="redis:test"))
    assert next(iter(described)) == "store"
    assert described["store"].image == "redis:test"
    assert described["coordinator"].depends_on == ("store",)
    assert option(described["coordinator"], "--store") == "redis://hetpipe@store:6379/0"
    assert option(described["coordinator"], "--store-password-file") == f"{STORE_FOLDER}/password"
    state = SPEC.folders.state
    assert sources(described["store"]) == {f"{state}/store-users": True, f"{state}/store-data": False}
    holders = {name for name, container in described.items() if f"{state}/store-password" in sources(container)}
    assert holders == {"coordinator"}


def test_whoever_hands_the_job_in_waits_for_all_members() -> None:
    described = deployment()
    submission = submission_of(SPEC, described, "job.yaml")
    assert set(submission.depends_on) == set(NAMES[1:])
    assert submission.peer == OPERATOR
    assert submission.working_dir == SPEC.folders.code
    assert submission.command[:3] == ("hetpipe", "submit", "job.yaml")
    assert submission_of(replace(SPEC, tls=False), described, "job.yaml").peer is None


@pytest.mark.parametrize(
    ("folders", "sentence"),
    [
        ({"code": "/"}, "hide their own files"),
        ({"code": "/tmp"}, "hide their own files"),
        ({"more": ("/usr",)}, "hide their own files"),
        ({"code": "/home/me"}, "all private keys are below it"),
        ({"more": ("/home",)}, "all private keys are below it"),
        ({"runs": "/home/me/.local/state"}, "all private keys are below it"),
    ],
)
def test_folders_that_containers_must_not_be_shown(folders: dict[str, Any], sentence: str) -> None:
    shown = {"code": SPEC.folders.code, "runs": SPEC.folders.runs, "state": SPEC.folders.state}
    with pytest.raises(UserError, match=sentence):
        deployment(folders=Folders(**{**shown, **folders}))


def test_cluster_names_that_no_certificate_can_have() -> None:
    with pytest.raises(UserError, match="is not a valid name in a certificate"):
        deployment(agents=(AgentGroup("no spaces", cpus(1)),))
