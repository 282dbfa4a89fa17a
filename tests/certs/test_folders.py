"""Folders of certificates: what is in them, who can read it, what stays when they are made again."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from hetpipe.certs.authority import Authority, facts_of, key_to_pem, new_key, request_for
from hetpipe.certs.folders import (
    StageSigner,
    init_authority,
    issue_certificate,
    read_authority,
    read_facts,
    read_signer,
    write_file,
)
from hetpipe.errors import UserError
from hetpipe.values.identity import NamedPeer, Role
from hetpipe.wire.tls import Tls
from tests.certs.cluster import AGENT, COORDINATOR, SHARD, cluster, stage_peer, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A new authority's."""
    init_authority(tmp_path / "ca")
    return tmp_path / "ca"


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.is_file()}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class TestAuthority:
    def test_only_its_owner_reads_its_key(self, folder: Path) -> None:
        assert modes(folder) == {"ca.pem": 0o644, "ca-key.pem": 0o600}

    @pytest.mark.parametrize("left", ["ca.pem", "ca-key.pem"])
    def test_it_is_made_once(self, folder: Path, left: str) -> None:
        for name in {"ca.pem", "ca-key.pem"} - {left}:
            (folder / name).unlink()
        kept = content(folder)
        with pytest.raises(UserError, match="already contains an authority; choose another folder, or keep this one"):
            init_authority(folder)
        assert content(folder) == kept

    def test_without_one_nothing_is_issued(self, tmp_path: Path) -> None:
        with pytest.raises(
            UserError, match=r"does not contain ca\.pem with ca-key\.pem; create one with `hetpipe certs init`"
        ):
            issue_certificate(tmp_path, AGENT, days=1)
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match=r"cannot write .*ca-key\.pem: Not a directory"):
            init_authority(tmp_path / "file" / "ca")


class TestIssue:
    def test_a_process_gets_one_folder_with_all_it_needs(self, folder: Path) -> None:
        own = issue_certificate(folder, SHARD, days=2)
        assert own == folder / "parameter-server-0"
        assert modes(own) == {"ca.pem": 0o644, "cert.pem": 0o644, "key.pem": 0o600}
        assert read_facts(own)[0] == SHARD
        assert Tls(own).material.ca == read_authority(folder).certificate_pem

    def test_a_coordinator_gets_a_signer_too(self, folder: Path) -> None:
        own = issue_certificate(folder, COORDINATOR, days=2)
        assert own == folder / "coordinator"
        assert modes(own)["signer-key.pem"] == 0o600
        assert modes(own)["signer-cert.pem"] == 0o644
        assert issue_certificate(folder, NamedPeer(Role.COORDINATOR, "b"), days=2) == folder / "coordinator-b"

    def test_a_new_certificate_comes_with_a_new_key_and_keeps_the_signer(self, folder: Path) -> None:
        before = content(issue_certificate(folder, COORDINATOR, days=2))
        after = content(issue_certificate(folder, COORDINATOR, days=2))
        assert {name for name in before if before[name] != after[name]} == {"cert.pem", "key.pem"}
        assert before.keys() == after.keys(), "nothing is left of the writing"

    def test_who_reads_meanwhile_keeps_what_it_had(self, folder: Path) -> None:
        own = issue_certificate(folder, AGENT, days=2)
        with (own / "key.pem").open("rb") as old:
            first = old.read()
            issue_certificate(folder, AGENT, days=2)
            old.seek(0)
            assert old.read() == first

    def test_what_is_not_there_is_named(self, folder: Path) -> None:
        with pytest.raises(UserError, match=r"cannot read .*cert\.pem: No such file"):
            read_facts(folder)
        with pytest.raises(
            UserError, match=r"does not contain signer-cert\.pem .*`hetpipe certs issue DIR coordinator`"
        ):
            read_signer(folder)

    def test_a_stage_is_nobody_whom_a_service_could_be(self) -> None:
        own = cluster().tls(stage_peer()).folder
        with pytest.raises(UserError, match=r"is the certificate of stage 0 .* made for one run"):
            read_facts(own)


class TestWriting:
    def test_a_failure_leaves_nothing_behind(self, tmp_path: Path) -> None:
        (tmp_path / "key.pem" / "x").mkdir(parents=True)
        with pytest.raises(UserError, match=r"cannot write .*key\.pem: Is a directory"):
            write_file(tmp_path / "key.pem", b"secret", mode=0o600)
        assert [path.name for path in tmp_path.iterdir()] == ["key.pem"]

    def test_what_a_killed_process_left_is_no_obstacle(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.getpid", lambda: 7)
        (tmp_path / ".key.pem.7").write_bytes(b"half")
        (tmp_path / ".key.pem.7").chmod(0o644)
        write_file(tmp_path / "key.pem", b"whole", mode=0o600)
        assert content(tmp_path) == {"key.pem": b"whole"}
        assert modes(tmp_path) == {"key.pem": 0o600}


class TestSigner:
    def test_it_may_be_replaced_while_the_coordinator_runs(self, folder: Path, tmp_path: Path) -> None:
        own = issue_certificate(folder, COORDINATOR, days=1)
        signer, request = StageSigner(own), request_for(stage_peer(), new_key())
        first = signer.sign(request, stage_peer())
        assert first.endswith((own / "signer-cert.pem").read_bytes())

        init_authority(tmp_path / "next")
        following = issue_certificate(tmp_path / "next", COORDINATOR, days=1)
        shutil.copy(following / "signer-cert.pem", own)
        half = signer.sign(request, stage_peer())
        assert half.endswith(first.split(b"-----END CERTIFICATE-----\n")[1] + b"-----END CERTIFICATE-----\n")
        shutil.copy(following / "signer-key.pem", own)
        assert signer.sign(request, stage_peer()).endswith((following / "signer-cert.pem").read_bytes())

    def test_a_certificate_is_of_the_stage_that_is_named(self) -> None:
        own = cluster().tls(COORDINATOR).folder
        assert facts_of(StageSigner(own).sign(request_for(AGENT, new_key()), stage_peer())).peer == stage_peer()


class TestTls:
    def test_a_half_written_authority_is_refused_like_any_other(self, tmp_path: Path) -> None:
        key = new_key()
        root = Authority.new_root()
        write(tmp_path, root, root.issue(AGENT, key.public_key(), days=1), key_to_pem(key))
        (tmp_path / "ca.pem").write_bytes(b"")
        with pytest.raises(UserError, match="cannot be used"):
            Tls(tmp_path)
