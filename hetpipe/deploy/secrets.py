"""The folder of a deployment's secrets: certificates by process, the store's password and its data.

It is recreated at each start and readable by its owner only. A container mounts its own folder in it, and no other.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from hetpipe.certs.files import process_folder
from hetpipe.deploy.topology import (
    CERTIFICATES,
    OPERATOR,
    PASSWORD_FILE,
    STORE_DATA,
    STORE_PASSWORD,
    STORE_USER,
    STORE_USERS,
    USERS_FILE,
    DeploymentSpec,
    StoreKind,
)
from hetpipe.errors import UserError
from hetpipe.values.identity import NamedPeer

_OWNER_ONLY = 0o700


def write_secrets(spec: DeploymentSpec, peers: Iterable[NamedPeer]) -> None:
    """Create the folder `spec.folders.state`, replacing an older one.

    Args:
        spec: the description of the deployment.
        peers: the processes to issue certificates for.

    Raises:
        UserError: it cannot be written, or the package for certificates is not installed.
    """
    state = Path(spec.folders.state)
    remove_secrets(state)
    try:
        state.mkdir(parents=True, mode=_OWNER_ONLY)
        if spec.tls:
            _write_certificates(state / CERTIFICATES, peers)
        if spec.store is StoreKind.REDIS:
            _write_store(state)
        for folder in state.iterdir():
            give(folder, spec.user)
    except OSError as error:
        raise UserError(
            f"cannot write {state}: {error.strerror}; set XDG_STATE_HOME to a folder of your own"
        ) from error


def remove_secrets(state: Path) -> None:
    """Remove the folder; no effect if it does not exist."""
    shutil.rmtree(state, ignore_errors=True)


def operator_folder(state: str) -> Path:
    """The folder with the certificates of the operator who submits jobs."""
    return process_folder(Path(state) / CERTIFICATES, OPERATOR)


def give(folder: Path, user: str) -> None:
    """Change the owner of `folder` to the containers' user (`UID:GID`). Possible and necessary for root only."""
    if os.geteuid() == 0:
        uid, gid = map(int, user.split(":"))
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, gid, follow_symlinks=False)


def _write_certificates(folder: Path, peers: Iterable[NamedPeer]) -> None:
    try:
        from hetpipe.certs.authority import PROCESS_DAYS
        from hetpipe.certs.folders import init_authority, issue_certificate
    except ModuleNotFoundError as error:
        raise UserError(
            f"TLS needs {error.name}; install it with: pip install 'hetpipe[tls]', or use --insecure if "
            "you are the only user of this machine"
        ) from error
    init_authority(folder)
    for peer in (*peers, OPERATOR):
        issue_certificate(folder, peer, days=PROCESS_DAYS)


def _write_store(state: Path) -> None:
    from hetpipe.storage.redis_acl import acl_lines

    password = secrets.token_urlsafe(32)
    contents = {
        state / STORE_PASSWORD / PASSWORD_FILE: password,
        state / STORE_USERS / USERS_FILE: "\n".join(acl_lines(STORE_USER, password)) + "\n",
    }
    (state / STORE_DATA).mkdir(mode=_OWNER_ONLY)
    for path, content in contents.items():
        path.parent.mkdir()
        path.touch(mode=0o600)
        path.write_text(content, encoding="utf-8")
