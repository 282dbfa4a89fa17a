"""What `Dockerfile`, `.dockerignore` and `docker-compose.yml` promise. Read only; `make e2e-docker` tries them."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import hetpipe

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
VERSION = hetpipe.__version__

#: Run once and end; nobody asks them how they are.
ONE_SHOT = {"credentials", "submit"}

USER = "10001:10001"

each_service = pytest.mark.parametrize("service", sorted(SERVICES))
each_member = pytest.mark.parametrize("service", sorted(set(SERVICES) - ONE_SHOT))


def stages() -> dict[str, list[str]]:
    """Stage of the Dockerfile → its instructions, continued lines joined, comments and empty lines left out."""
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE))
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in filter(None, map(str.strip, joined.splitlines())):
        if line.startswith("FROM "):
            name = line.rpartition(" AS ")[2]
            found[name] = []
        found[name].append(line)
    return found


STAGES = stages()


def mounts(service: str) -> dict[str, str]:
    """Where → named volume."""
    pairs = (entry.split(":") for entry in SERVICES[service].get("volumes", ()))
    return {where: volume for volume, where, *_ in pairs}


@each_service
def test_no_container_has_more_rights_than_it_needs(service: str) -> None:
    settings = SERVICES[service]
    assert settings["cap_drop"] == ["ALL"]
    assert "cap_add" not in settings
    assert "privileged" not in settings
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert settings["read_only"] is True
    assert settings["user"] == USER
    assert settings["init"] is True


@each_service
def test_containers_are_bounded(service: str) -> None:
    settings = SERVICES[service]
    assert settings["mem_limit"]
    assert settings["pids_limit"] > 0
    assert settings["stop_grace_period"] == "60s"
    assert settings["logging"]["options"] == {"max-size": "10m", "max-file": "3"}


@each_service
def test_members_are_started_again_and_nobody_else(service: str) -> None:
    assert SERVICES[service].get("restart") == (None if service in ONE_SHOT else "unless-stopped")


def test_shards_keep_their_state_on_volumes_of_their_own() -> None:
    for index in range(2):
        service = f"parameter-server-{index}"
        assert mounts(service)["/state"] == f"{service}-state"
        assert "--state /state " in SERVICES[service]["command"]


@each_member
def test_members_are_asked_how_they_are(service: str) -> None:
    assert SERVICES[service]["healthcheck"]["test"]


@each_member
def test_members_are_asked_on_a_port_that_they_have(service: str) -> None:
    command, test = shlex.split(SERVICES[service]["command"]), SERVICES[service]["healthcheck"]["test"]
    if command[0] != "redis-server":
        port = command[command.index("--health-port") + 1]
        assert test == ["CMD", "env", "HETPIPE_TLS=", "hetpipe", "health", f"127.0.0.1:{port}"]


@each_member
def test_agents_import_what_the_operator_says(service: str) -> None:
    command = shlex.split(SERVICES[service]["command"])
    if command[0] == "agent":
        assert command[command.index("--allow-modules") + 1] == "${HETPIPE_MODULES:-examples.*}"


@each_service
def test_ports_are_open_to_this_machine_only(service: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[service].get("ports", ()))
    assert SERVICES[service].get("network_mode", "none") == "none"


@each_service
def test_images_have_versions(service: str) -> None:
    default = re.fullmatch(r"\$\{[A-Z_]+:-(?P<image>[^}]+)\}", SERVICES[service]["image"])
    assert default, "an image that others may name"
    name, _, tag = default["image"].partition(":")
    assert re.search(r"\d+\.\d+\.\d+", tag)
    assert name != "hetpipe" or tag == f"{VERSION}-cpu"


@each_service
def test_no_secret_is_in_an_environment_or_a_command(service: str) -> None:
    assert set(SERVICES[service].get("environment", ())) <= {"HETPIPE_TLS"}
    assert not re.search(r"(?i)requirepass|--pass\b|://[^ ]*:[^ ]*@", str(SERVICES[service].get("command", "")))


@each_service
def test_everything_but_submit_and_agents_starts_without_a_profile(service: str) -> None:
    kind = {"submit": ["submit"], "agent-gpu": ["gpu"]}.get(service, ["cpu"] if service.startswith("agent") else None)
    assert SERVICES[service].get("profiles") == kind


@each_service
def test_nobody_starts_before_what_it_needs(service: str) -> None:
    needs = {
        "credentials": {},
        "redis": {"credentials": {"condition": "service_completed_successfully"}},
        "coordinator": {"redis": {"condition": "service_healthy"}},
    }
    assert SERVICES[service].get("depends_on", {}) == needs.get(
        service, {"coordinator": {"condition": "service_healthy"}}
    )


def test_everybody_has_its_own_key_and_only_the_maker_has_all() -> None:
    made = mounts("credentials")
    own = {service: mounts(service)["/credentials/own"] for service in set(SERVICES) - {"credentials", "redis"}}
    assert len(set(own.values())) == len(own)
    for service, volume in own.items():
        assert f"{volume}:/credentials/own:ro" in SERVICES[service]["volumes"]
        folder = "/credentials/operator-box" if service == "submit" else f"/credentials/{service}"
        assert made[folder] == volume
    assert "authority" not in {volume for service in own for volume in mounts(service).values()}


def test_certificates_are_made_under_the_names_of_the_members() -> None:
    made = set(shlex.split(SERVICES["credentials"]["command"]))
    members = {"coordinator", "operator box"}
    for service in set(SERVICES) - ONE_SHOT - {"redis", "coordinator"}:
        role, *options = SERVICES[service]["command"].split()
        members.add(f"{role} {options[options.index('--node' if role == 'agent' else '--index') + 1]}")
    assert made == members


def test_a_new_volume_for_credentials_belongs_to_who_fills_it() -> None:
    """Docker gives it the owner of the folder of the image that it covers."""
    (made,) = (line for line in STAGES["runtime"] if "/credentials/$name" in line)
    names = set(re.findall(r"for name in (.+?);", made)[0].split())
    assert {where.removeprefix("/credentials").lstrip("/") or "." for where in mounts("credentials")} <= names


def test_a_new_volume_for_what_processes_write_belongs_to_them() -> None:
    (made,) = (line for line in STAGES["runtime"] if "/credentials/$name" in line)
    assert "install -d -o 10001 -g 10001 -m 0755 /runs /cache /state" in " ".join(made.split())


def test_volumes_are_all_declared_and_used() -> None:
    used = {volume for service in SERVICES for volume in mounts(service).values()}
    assert used == set(COMPOSE["volumes"])


def test_redis_has_no_network() -> None:
    assert SERVICES["redis"]["network_mode"] == "none"
    assert "--port 0 " in SERVICES["redis"]["command"]


def test_runs_and_code_are_at_one_path_for_all_who_read_or_write_them() -> None:
    for service in set(SERVICES) - {"credentials", "redis"}:
        assert mounts(service)["/runs"] == "runs"


def test_gpus_are_given_out_by_name() -> None:
    (device,) = SERVICES["agent-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert device["device_ids"]
    assert "count" not in device
    assert not any("deploy" in SERVICES[service] for service in set(SERVICES) - {"agent-gpu"})


def test_code_of_the_users_own_is_at_one_path_for_all_who_import_it() -> None:
    override = yaml.safe_load((ROOT / "deploy/compose/own-code.yml").read_text(encoding="utf-8"))
    assert set(override["services"]) == {"submit", *(service for service in SERVICES if service.startswith("agent"))}
    assert all(added == {"volumes": ["${HETPIPE_CODE}:/code:ro"]} for added in override["services"].values())


def test_plain_text_is_two_words_in_one_file() -> None:
    text = (ROOT / "deploy/compose/insecure.env").read_text(encoding="utf-8")
    settings = [line for line in text.splitlines() if not line.startswith("#")]
    assert settings == ["HETPIPE_TLS=", "HETPIPE_INSECURE=--insecure"]
    for service in set(SERVICES) - ONE_SHOT - {"redis"}:
        assert "${HETPIPE_INSECURE-}" in SERVICES[service]["command"]
        assert SERVICES[service]["environment"]["HETPIPE_TLS"] == "${HETPIPE_TLS-/credentials/own}"


def test_targets_differ_in_torch_only() -> None:
    cpu, cuda = ([line.replace("torch-cuda", "torch-cpu") for line in STAGES[name][1:]] for name in ("cpu", "cuda"))
    assert [line for line in cuda if not line.startswith("ENV NVIDIA_")] == cpu


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_layers_go_from_what_changes_least_to_what_changes_most(target: str) -> None:
    copied = [line.removeprefix("COPY ") for line in STAGES[target] if line.startswith("COPY ")]
    begin = [f"--from=torch-{target}", "--from=dependencies", "--from=application", "deploy/image/", "examples"]
    assert [line.startswith(word) for line, word in zip(copied, begin, strict=True)] == [True] * len(begin)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_nothing_is_installed_or_compiled_in_the_final_stage(target: str) -> None:
    assert STAGES[target][0] == f"FROM runtime AS {target}"
    assert STAGES["runtime"][0] == "FROM ${BASE_IMAGE} AS runtime"
    commands = [line for name in (target, "runtime") for line in STAGES[name] if line.startswith("RUN ")]
    assert not re.search(r"\b(apt|apt-get|pip|gcc|curl|wget|make)\b", " ".join(commands))


@pytest.mark.parametrize("stage", ["torch-cpu", "torch-cuda"])
def test_the_extra_models_is_an_argument_of_the_build(stage: str) -> None:
    """Without it nothing is added; torchvision comes after torch, brings none along, and has to fit it."""
    assert "ARG EXTRAS=" in STAGES["dependencies"]
    assert "ARG EXTRAS=" in STAGES[stage]
    (install,) = (line for line in STAGES[stage] if line.startswith("RUN "))
    words = " ".join(install.split())
    extra = (
        'if [ -n "$EXTRAS" ]; then pip install --no-deps --requirement requirements-torchvision.lock '
        '&& python3 -c "import torchvision"; fi'
    )
    assert words.index("--requirement requirements-torch.lock") < words.index(extra)


def test_only_extras_that_the_lock_has_are_taken(tmp_path: Path) -> None:
    (check,) = (line for line in STAGES["dependencies"] if line.startswith("RUN case "))
    for value, taken in {"": True, "models": True, "model": False, "development": False}.items():
        ended = subprocess.run(
            ["/bin/sh", "-c", check.removeprefix("RUN ")],
            env={"EXTRAS": value},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ended.returncode == 0) is taken
        assert taken or ended.stderr == f'EXTRAS is "{value}": use models, or leave it empty\n'


def test_the_image_runs_as_a_number_and_ends_on_sigterm() -> None:
    runtime = STAGES["runtime"]
    assert f"USER {USER}" in runtime
    assert "STOPSIGNAL SIGTERM" in runtime
    assert 'ENTRYPOINT ["hetpipe-entrypoint"]' in runtime
    assert not any(line.startswith("USER ") for name in ("cpu", "cuda") for line in STAGES[name])


def test_the_image_says_what_it_is() -> None:
    (labels,) = (line for line in STAGES["runtime"] if line.startswith("LABEL "))
    for key in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{key}=" in labels
    assert f"ARG VERSION={VERSION}" in STAGES["runtime"]


def test_base_images_are_arguments_with_versions() -> None:
    base, build = STAGES[""]
    assert re.fullmatch(r"ARG BASE_IMAGE=python:3\.\d+\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", base)
    assert build == "ARG BUILD_IMAGE=${BASE_IMAGE}"
    assert "latest" not in DOCKERFILE


def test_both_builders_understand_the_dockerfile() -> None:
    assert not re.search(r"--mount|--chmod|--link|<<|# *syntax=", DOCKERFILE), "only BuildKit knows these"


def test_the_builder_gets_what_it_copies_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    sent = {line.removeprefix("!") for line in patterns if line.startswith("!")}
    copied = {
        word
        for instructions in STAGES.values()
        for line in instructions
        if line.startswith("COPY ") and "--from=" not in line
        for word in line.split()[1:-1]
    }
    assert patterns[0] == "*"
    assert {word for word in copied if not word.startswith("deploy/image/")} | {"deploy/image"} == sent
    assert {"**/__pycache__", "**/.*"} < set(patterns)
