"""The Compose file says what the engine does."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from hetpipe.deploy.compose import compose_file
from hetpipe.deploy.engine import create_options
from hetpipe.deploy.topology import Role, StoreKind, submission_of
from tests.deploy.deployments import ON_GPUS, SPEC, deployment


def parsed(**changes: Any) -> dict[str, Any]:
    described = deployment(**changes)
    value: dict[str, Any] = yaml.safe_load(compose_file(described, submission_of(SPEC, described, "job.yaml")))
    return value


def test_one_service_for_each_container() -> None:
    value = parsed()
    names = ["coordinator", "parameter-server-0", "parameter-server-1", "agent-0", "agent-1", "submit"]
    assert list(value["services"]) == names
    assert [service.get("profiles") for service in value["services"].values()] == [None] * 5 + [["submit"]]
    assert value["networks"]["default"] == {"name": "mine", "labels": {"org.hetpipe.project": "mine"}}


def test_every_service_is_contained() -> None:
    for service in parsed()["services"].values():
        assert service["user"] == "1000:1001"
        assert service["read_only"] is service["init"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["pids_limit"] > 0
        assert service["stop_grace_period"] == "60s"
        assert not {"privileged", "cap_add", "network_mode", "devices"} & set(service)
        assert [v["source"] for v in service["volumes"] if not v["read_only"]] in ([], [SPEC.folders.runs])


def test_redis_writes_to_its_own_folder_alone() -> None:
    services = parsed(store=StoreKind.REDIS)["services"]
    written = {
        name: [v["source"] for v in service["volumes"] if not v["read_only"]] for name, service in services.items()
    }
    assert written["store"] == [f"{SPEC.folders.state}/store-data"]
    assert not any("store-data" in source for name in set(written) - {"store"} for source in written[name])


def test_members_are_started_again_and_submit_is_not() -> None:
    restarts = {name: service.get("restart") for name, service in parsed(store=StoreKind.REDIS)["services"].items()}
    assert restarts.pop("submit") is None
    assert set(restarts.values()) == {"unless-stopped"}


def test_ports_are_on_loopback_only() -> None:
    ports = {name: service.get("ports") for name, service in parsed(port=7777)["services"].items()}
    assert ports.pop("coordinator") == ["127.0.0.1:7777:7400"]
    assert set(ports.values()) == {None}


def test_order_by_health() -> None:
    services = parsed()["services"]
    assert services["agent-1"]["depends_on"] == {"agent-0": {"condition": "service_healthy"}}
    for name in {dependency for service in services.values() for dependency in service.get("depends_on", {})}:
        assert services[name]["healthcheck"]["test"] == ["CMD", "hetpipe", "health", "127.0.0.1:7401"]


def test_gpus_by_their_ids() -> None:
    services = parsed(agents=ON_GPUS)["services"]
    devices = services["agent-0"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "device_ids": ["GPU-1", "GPU-0"], "capabilities": ["gpu"]}]
    assert "deploy" not in services["coordinator"]


def test_dollars_are_no_variables() -> None:
    described = deployment(modules=("a$b",))
    assert "a$$b" in yaml.safe_load(compose_file(described))["services"]["agent-0"]["command"]


@pytest.mark.parametrize("changes", [{}, {"tls": False}, {"agents": ON_GPUS}])
def test_the_engine_is_told_the_same(changes: dict[str, Any]) -> None:
    described = deployment(**changes)
    services = yaml.safe_load(compose_file(described))["services"]
    for container in described.containers:
        service, told = services[container.name], create_options("mine", container, {})
        for key in ("user", "read_only", "cap_drop", "security_opt", "init", "pids_limit", "shm_size", "labels"):
            assert service[key] == told[key], key
        assert service["container_name"] == told["name"]
        assert service["entrypoint"] == told["entrypoint"]
        assert service["environment"] == told["environment"]
        mounts = [(mount["Source"], mount["Target"], mount["ReadOnly"]) for mount in told["mounts"]]
        assert [(v["source"], v["target"], v["read_only"]) for v in service["volumes"]] == mounts


def test_variables_of_the_callers_environment_are_named_in_the_file_and_their_values_are_not() -> None:
    """Compose takes a variable without a value from where it is called; the engine is told the value, for it cannot."""
    described = deployment(allowed_environment=("HF_HOME", "WANDB_*", "PATH"))
    agent = next(container for container in described.containers if container.name == "agent-0")
    environment = yaml.safe_load(compose_file(described))["services"]["agent-0"]["environment"]
    told = create_options("mine", agent, {"HF_HOME": "/cache/hf", "WANDB_API_KEY": "secret", "PATH": "/bin"})

    assert environment == {"HF_HOME": None, **dict(agent.environment)}
    assert told["environment"] == {"HF_HOME": "/cache/hf", **dict(agent.environment)}
    assert create_options("mine", agent, {})["environment"] == dict(agent.environment)
    assert all(not c.passed_environment for c in described.containers if c.role is not Role.AGENT)
