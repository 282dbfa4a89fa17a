"""Certificates for the processes of a benchmark under TLS."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hetpipe.certs.authority import Authority, key_to_pem, new_key
from hetpipe.certs.files import CA_FILE, CERT_FILE, KEY_FILE
from hetpipe.values.identity import Peer


def certify(folder: Path, peers: Iterable[Peer]) -> list[Path]:
    """A folder of certificates for each peer, in order, all of one new authority."""
    root, made = Authority.new_root(), []
    for index, peer in enumerate(peers):
        key, own = new_key(), folder / str(index)
        own.mkdir()
        (own / CA_FILE).write_bytes(root.certificate_pem)
        (own / CERT_FILE).write_bytes(root.issue(peer, key.public_key(), days=1))
        (own / KEY_FILE).write_bytes(key_to_pem(key))
        made.append(own)
    return made
