"""The folder of secrets."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.deploy.secrets import operator_folder, remove_secrets, write_secrets
from hetpipe.deploy.topology import DeploymentSpec, StoreKind, deployment_of
from hetpipe.errors import UserError
from tests.deploy.deployments import SPEC


@pytest.fixture
def spec(tmp_path: Path) -> DeploymentSpec:
    folders = replace(SPEC.folders, state=str(tmp_path / "state"))
    return replace(SPEC, folders=folders, user=f"{os.getuid()}:{os.getgid()}")


def write(spec: DeploymentSpec) -> Path:
    write_secrets(spec, [c.peer for c in deployment_of(spec).containers if c.peer is not None])
    return Path(spec.folders.state)


def test_every_container_finds_what_it_is_shown(spec: DeploymentSpec) -> None:
    spec = replace(spec, store=StoreKind.REDIS)
    state = write(spec)
    for container in deployment_of(spec).containers:
        for mount in container.mounts:
            if mount.source.startswith(str(state)):
                # Redis fills its folder itself.
                assert any(Path(mount.source).iterdir()) is mount.read_only, mount
    assert (operator_folder(str(state)) / "key.pem").is_file()


def test_only_the_owner_may_look(spec: DeploymentSpec) -> None:
    state = write(replace(spec, store=StoreKind.REDIS))
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    secret = [*state.rglob("*key*.pem"), state / "store-password" / "password"]
    assert len(secret) > 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}


def test_each_start_has_secrets_of_its_own(spec: DeploymentSpec) -> None:
    first = (write(spec) / "certs" / "ca.pem").read_bytes()
    assert (write(spec) / "certs" / "ca.pem").read_bytes() != first
    remove_secrets(Path(spec.folders.state))
    remove_secrets(Path(spec.folders.state))
    assert not Path(spec.folders.state).exists()


def test_without_tls_there_is_nothing_to_keep(spec: DeploymentSpec) -> None:
    assert list(write(replace(spec, tls=False)).iterdir()) == []


def test_root_gives_containers_what_they_read(spec: DeploymentSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[Path, tuple[int, int]] = {}
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.chown", lambda path, uid, gid, **_: given.update({Path(path): (uid, gid)}))
    state = write(replace(spec, user="10001:10002"))
    assert given[state / "certs" / "coordinator" / "key.pem"] == (10001, 10002)
    assert state not in given


def test_a_state_folder_that_cannot_be_written(spec: DeploymentSpec, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folders = replace(spec.folders, state=str(tmp_path / "file" / "state"))
    with pytest.raises(UserError, match="set XDG_STATE_HOME"):
        write(replace(spec, folders=folders))


def test_without_the_library(spec: DeploymentSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hetpipe.certs.folders", None)
    with pytest.raises(UserError, match="or use --insecure"):
        write(spec)
