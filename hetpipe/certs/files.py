"""Names of certificate folders and files, without the extra `tls`."""

from __future__ import annotations

from pathlib import PurePath
from typing import Final, TypeVar

from hetpipe.values.identity import NamedPeer, Role

#: The trusted root, and the process's own certificate and key.
CA_FILE: Final = "ca.pem"
CERT_FILE: Final = "cert.pem"
KEY_FILE: Final = "key.pem"

#: The authority's key, which stays with the operator.
CA_KEY_FILE: Final = "ca-key.pem"

#: The signer of stages, in a coordinator's folder.
SIGNER_CERT_FILE: Final = "signer-cert.pem"
SIGNER_KEY_FILE: Final = "signer-key.pem"

FolderT = TypeVar("FolderT", bound=PurePath)


def process_folder(folder: FolderT, peer: NamedPeer) -> FolderT:
    """Folder of the certificate of `peer` below the authority's folder."""
    is_only = peer.role is Role.COORDINATOR and peer.name == peer.role
    return folder / (str(peer.role) if is_only else f"{peer.role}-{peer.name}")
