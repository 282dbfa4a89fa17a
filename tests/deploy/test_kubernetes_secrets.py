"""The Secrets that k8s/ mounts, from a folder of certificates."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetpipe.deploy import kubernetes_secrets
from hetpipe.deploy.kubernetes_secrets import PASSWORD_FILE, kept_password, secrets_of
from hetpipe.errors import UserError
from hetpipe.storage.redis_acl import acl_lines

ROOT = Path(__file__).parents[2]
FILES = ("ca.pem", "cert.pem", "key.pem")

#: What takes manifests from standard input, as Secrets are handed over, in a way that repeats them in an annotation.
REPEATS_IN_AN_ANNOTATION = re.compile(
    r"kubectl\b(?!.*--server-side).*\bapply\b(?!.*--server-side).*\s(-f|--filename)[ =]?-(?!\w)"
)


def issue(folder: Path, name: str, *more: str) -> None:
    (folder / name).mkdir()
    for file in (*FILES, *more):
        (folder / name / file).write_text(f"{name}/{file}" if file != "ca.pem" else "the authority")


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    """As `hetpipe certs` leaves it."""
    for name in ("ca.pem", "ca-key.pem"):
        (tmp_path / name).write_text("only here")
    issue(tmp_path, "coordinator", "signer-cert.pem", "signer-key.pem", ".key.pem.4711")
    issue(tmp_path, "operator-me")
    issue(tmp_path, "redis-redis")
    kept_password(tmp_path, PASSWORD_FILE)
    issue(tmp_path, "monitor-prometheus")
    for name in ("parameter-server-0", "parameter-server-1", "agent-cpu-0", "agent-rtx-3090-0"):
        issue(tmp_path, name)
    return tmp_path


def test_one_process_has_a_secret_of_its_own_and_many_have_one_with_their_names(certs: Path) -> None:
    made = secrets_of(certs, "password", "another")
    assert {name: sorted(files) for name, files in made.items()} == {
        "redis-password": ["password"],
        "redis-users": ["users.acl"],
        "redis-replication": ["replication.conf", "users.acl"],
        "tls-coordinator": ["ca.pem", "cert.pem", "key.pem", "signer-cert.pem", "signer-key.pem"],
        "tls-operator": ["ca.pem", "cert.pem", "key.pem"],
        "tls-redis": ["ca.pem", "cert.pem", "key.pem"],
        "tls-parameter-server": ["0.cert.pem", "0.key.pem", "1.cert.pem", "1.key.pem", "ca.pem"],
        "tls-agent": ["ca.pem", "cpu-0.cert.pem", "cpu-0.key.pem", "rtx-3090-0.cert.pem", "rtx-3090-0.key.pem"],
    }
    assert made["tls-redis"]["key.pem"] == b"redis-redis/key.pem"
    assert made["tls-agent"]["rtx-3090-0.key.pem"] == b"agent-rtx-3090-0/key.pem"
    assert b"only here" not in {content for files in made.values() for content in files.values()}


def test_redis_has_a_digest_and_the_coordinator_the_password(tmp_path: Path) -> None:
    made = secrets_of(tmp_path, "a password", "another")
    assert made["redis-password"] == {"password": b"a password"}
    assert made["redis-users"]["users.acl"].decode().splitlines() == list(acl_lines("hetpipe", "a password"))
    assert b"a password" not in made["redis-users"]["users.acl"]
    assert len(made) == 3


def test_replicas_have_a_user_of_their_own(tmp_path: Path) -> None:
    found = {
        name: text.decode() for name, text in secrets_of(tmp_path, "a password", "another")["redis-replication"].items()
    }
    assert found["replication.conf"].splitlines() == ["masteruser replication", "masterauth another"]
    *users, replicas = found["users.acl"].splitlines()
    assert users == list(acl_lines("hetpipe", "a password"))
    digest = hashlib.sha256(b"another").hexdigest()
    assert replicas == f"user replication on #{digest} resetchannels -@all +ping +psync +replconf"


def test_the_password_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    password = kept_password(tmp_path, PASSWORD_FILE)
    assert len(password) >= 43
    assert kept_password(tmp_path, PASSWORD_FILE) == password
    assert (tmp_path / "redis-password").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("role", "name", "names"), [("operator", "you", "me, you"), ("redis", "other", "other, redis")]
)
def test_whose_certificate_is_meant_must_be_clear(certs: Path, role: str, name: str, names: str) -> None:
    issue(certs, f"{role}-{name}")
    with pytest.raises(UserError, match=f"several: {role} {names};"):
        secrets_of(certs, "password", "another")


def test_printed_for_kubectl(certs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kubernetes_secrets.main([str(certs), "--namespace", "elsewhere"]) == 0
    printed = capsys.readouterr()
    documents: list[dict[str, Any]] = list(yaml.safe_load_all(printed.out))
    assert {document["kind"] for document in documents} == {"Secret"}
    assert {document["metadata"]["namespace"] for document in documents} == {"elsewhere"}
    found = {document["metadata"]["name"]: document["data"] for document in documents}
    assert base64.b64decode(found["tls-coordinator"]["signer-key.pem"]) == b"coordinator/signer-key.pem"
    assert printed.err.startswith("Secrets: redis-password, redis-users, redis-replication, tls-coordinator")


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kubernetes_secrets.main([str(tmp_path / "none")]) == 2
    assert "give a folder of your own" in capsys.readouterr().err


def test_no_page_template_or_output_copies_keys_into_annotations() -> None:
    """`kubectl apply` without --server-side writes all that it sends into an annotation of the object."""
    folders = (ROOT / name for name in ("docs", "hetpipe", "services", "k8s", "deploy", "examples", "scripts", "proto"))
    files = [path for folder in (*folders, ROOT) for path in folder.glob("*" if folder == ROOT else "**/*")]
    lines = 0
    for file in files:
        if not file.is_file():
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            lines += "kubernetes_secrets" in line and "kubectl" in line
            assert not REPEATS_IN_AN_ANNOTATION.search(line), f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
    assert lines >= 3, "the pages no longer say how Secrets get into the cluster"


def test_what_tells_of_the_secrets_says_how_to_apply_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kubernetes_secrets.main(["--help"])
    assert "kubectl apply --server-side -f -" in " ".join(capsys.readouterr().out.split())
