"""Certificate folders, one per process, with everything it needs.

    CA/ca.pem, CA/ca-key.pem                   the root; its key stays with the operator
    CA/ROLE-NAME/ca.pem, cert.pem, key.pem     the folder of one process
    CA/coordinator/signer-cert.pem, …-key.pem  beside them for coordinators: the signer of stages

Files are replaced atomically; keys are readable by their owner only.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hetpipe.certs.authority import Authority, authority_from_pem, facts_of, key_to_pem, new_key
from hetpipe.certs.files import (
    CA_FILE,
    CA_KEY_FILE,
    CERT_FILE,
    KEY_FILE,
    SIGNER_CERT_FILE,
    SIGNER_KEY_FILE,
    process_folder,
)
from hetpipe.errors import UserError
from hetpipe.observe.log import get_logger
from hetpipe.values.identity import NamedPeer, Role, StagePeer

_log = get_logger(__name__)

_PRIVATE = 0o600
_PUBLIC = 0o644


def init_authority(folder: Path) -> None:
    """Create the root of a new cluster in `folder`, which is created if missing.

    Raises:
        UserError: it already exists, or the folder cannot be written.
    """
    if (folder / CA_KEY_FILE).exists() or (folder / CA_FILE).exists():
        raise UserError(f"{folder} already contains an authority; choose another folder, or keep this one")
    root = Authority.new_root()
    write_file(folder / CA_KEY_FILE, root.key_pem, mode=_PRIVATE)
    write_file(folder / CA_FILE, root.certificate_pem, mode=_PUBLIC)


def issue_certificate(folder: Path, peer: NamedPeer, *, days: float) -> Path:
    """Create a key and a certificate for `peer`, signed by the authority in `folder`; replaces older ones.

    Returns:
        The folder for that process.

    Raises:
        UserError: there is no authority, it cannot be read, or the folder cannot be written.
    """
    root = read_authority(folder)
    own = process_folder(folder, peer)
    key = new_key()
    write_file(own / CA_FILE, (folder / CA_FILE).read_bytes(), mode=_PUBLIC)
    if peer.role is Role.COORDINATOR and not (own / SIGNER_KEY_FILE).exists():
        signer = root.new_signer()
        write_file(own / SIGNER_KEY_FILE, signer.key_pem, mode=_PRIVATE)
        write_file(own / SIGNER_CERT_FILE, signer.certificate_pem, mode=_PUBLIC)
    certificate = root.issue(peer, key.public_key(), days=days)
    write_file(own / KEY_FILE, key_to_pem(key), mode=_PRIVATE)
    write_file(own / CERT_FILE, certificate, mode=_PUBLIC)
    return own


def read_authority(folder: Path) -> Authority:
    """Load the root from an authority's folder.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    return _authority(folder, CA_FILE, CA_KEY_FILE, "create one with `hetpipe certs init`")


def read_signer(folder: Path) -> Authority:
    """Load the signer of stages from a coordinator's folder.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    return _authority(
        folder, SIGNER_CERT_FILE, SIGNER_KEY_FILE, "create one with `hetpipe certs issue DIR coordinator`"
    )


class StageSigner:
    """Signer in a coordinator's folder, reloaded for every stage to allow rotation."""

    def __init__(self, folder: Path) -> None:
        """Load the signer, to fail early.

        Raises:
            UserError: it holds no signer, or one that cannot be read.
        """
        self._folder = folder
        self._newest = read_signer(folder)

    def sign(self, request_pem: bytes, peer: StagePeer) -> bytes:
        """See `Authority.sign_stage`."""
        try:
            self._newest = read_signer(self._folder)
        except UserError as error:
            # Rotation in progress: the previous signer is still valid.
            _log.warning("signer_unusable", sentence=str(error))
        return self._newest.sign_stage(request_pem, peer)


def read_facts(folder: Path) -> tuple[NamedPeer, str]:
    """Identity and expiry (ISO date) of a process's certificate.

    Raises:
        UserError: there is no certificate, or it is not one of such a process, or lacks a required server name.
    """
    try:
        facts = facts_of((folder / CERT_FILE).read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {folder / CERT_FILE}: {error.strerror}") from error
    if not isinstance(facts.peer, NamedPeer):
        raise UserError(f"{folder / CERT_FILE} is the certificate of {facts.peer}, made for one run")
    if facts.peer.server_name not in facts.server_names:
        raise UserError(
            f"{folder / CERT_FILE} is not valid for {facts.peer.server_name}, as an earlier version created it; issue "
            f"it again with `hetpipe certs issue DIR {facts.peer.role} {facts.peer.name}`"
        )
    return facts.peer, facts.expires.date().isoformat()


def write_file(path: Path, content: bytes, *, mode: int) -> None:
    """Write a file atomically: readers see the old content or the new one.

    Raises:
        UserError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _authority(folder: Path, certificate: str, key: str, fix: str) -> Authority:
    try:
        return authority_from_pem((folder / certificate).read_bytes(), (folder / key).read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{folder} does not contain {certificate} with {key}; {fix}") from error
    except OSError as error:
        raise UserError(f"cannot read {folder / certificate} or {key}: {error.strerror}") from error
