"""Certificates of a small cluster for tests, made once, and those that must not work."""

from __future__ import annotations

import atexit
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from hetpipe.certs.authority import Authority, key_to_pem, new_key, request_for
from hetpipe.certs.files import CA_FILE, CERT_FILE, KEY_FILE, process_folder
from hetpipe.certs.folders import init_authority, issue_certificate, read_authority, read_signer
from hetpipe.values.identity import NamedPeer, Peer, Role, StagePeer
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.wire.tls import Material, Tls

COORDINATOR = NamedPeer(Role.COORDINATOR, "coordinator")
SHARD = NamedPeer(Role.PARAMETER_SERVER, "0")
AGENT = NamedPeer(Role.AGENT, "n0")
OPERATOR = NamedPeer(Role.OPERATOR, "me")
MONITOR = NamedPeer(Role.MONITOR, "grafana")


def stage_peer(job: str = "job", vw: int = 0, stage: int = 0, *, incarnation: int = 0, term: int = 1) -> StagePeer:
    return StagePeer(JobId(job), VirtualWorkerIndex(vw), StageIndex(stage), Incarnation(incarnation), Term(term))


@dataclass(frozen=True)
class Cluster:
    folder: Path

    def authority(self) -> Authority:
        return read_authority(self.folder)

    def signer(self) -> Authority:
        return read_signer(process_folder(self.folder, COORDINATOR))

    def tls(self, peer: Peer) -> Tls:
        """The folder of a process; made on first use."""
        if isinstance(peer, StagePeer):
            return self._stage(peer)
        own = process_folder(self.folder, peer)
        if not own.exists():
            issue_certificate(self.folder, peer, days=1)
        return Tls(own)

    def _stage(self, peer: StagePeer) -> Tls:
        own = self.folder / f"stage-{peer.job_id}-{peer.term}-{peer.vw}-{peer.incarnation}-{peer.stage}"
        if not own.exists():
            key = new_key()
            write(own, self.authority(), self.signer().sign_stage(request_for(peer, key), peer), key_to_pem(key))
        return Tls(own)

    def issued_by(self, authority: Authority, peer: Peer, *, days: float = 1.0) -> Tls:
        """A certificate that another authority signs, for a process that trusts this cluster."""
        own = Path(mkdtemp(dir=self.folder))
        key = new_key()
        write(own, self.authority(), authority.issue(peer, key.public_key(), days=days), key_to_pem(key))
        return Tls(own)


def write(own: Path, root: Authority, certificate: bytes, key: bytes) -> None:
    own.mkdir(exist_ok=True)
    (own / CA_FILE).write_bytes(root.certificate_pem)
    (own / CERT_FILE).write_bytes(certificate)
    (own / KEY_FILE).write_bytes(key)


class NoCertificate(Tls):
    """A client that trusts the cluster and shows nothing."""

    @property
    def material(self) -> Material:
        return replace(super().material, cert=b"", key=b"")


@cache
def cluster() -> Cluster:
    """The cluster of this test process."""
    folder = Path(mkdtemp(prefix="hetpipe-test-ca-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    init_authority(folder)
    made = Cluster(folder)
    made.tls(COORDINATOR)
    return made
