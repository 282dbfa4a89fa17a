"""`python -m hetpipe.deploy.kubernetes_secrets DIR | kubectl apply --server-side -f -`: the Secrets that k8s/ mounts.

Without `--server-side`, `kubectl apply` would copy the keys into the annotation
`kubectl.kubernetes.io/last-applied-configuration`.

DIR is a folder of `hetpipe certs`. The Secrets contain the certificates in it, so more shards or agents need more
certificates and no other manifest; without any, only users and passwords of Redis. Only DIR/redis-password and
DIR/redis-replication-password are written, once. The output contains keys: use a pipe, not a file.

| Secret | keys | mounted by |
|---|---|---|
| `tls-coordinator`, `tls-operator`, `tls-redis` | all files of its folder | that process |
| `tls-parameter-server`, `tls-agent` | `ca.pem`, and of each process `NAME.cert.pem`, `NAME.key.pem` | each its own |
| `redis-password` | `password` | the coordinator |
| `redis-users` | `users.acl`, with a digest of the password | Redis |
| `redis-replication` | the same with the user of replicas, `replication.conf` with its password | Redis with replicas |
"""

from __future__ import annotations

import argparse
import base64
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from hetpipe.certs.files import CA_FILE, CERT_FILE, KEY_FILE
from hetpipe.errors import UserError
from hetpipe.storage.redis_acl import acl_lines, replication_line
from hetpipe.values.identity import Role

#: Users in Redis: the coordinator's, and that of replicas.
REDIS_USER = "hetpipe"
REPLICATION_USER = "replication"

#: Files in DIR with the passwords of the two.
PASSWORD_FILE = "redis-password"  # noqa: S105 - the name of a file
REPLICATION_PASSWORD_FILE = "redis-replication-password"  # noqa: S105 - the name of a file

#: The command that applies the Secrets from standard input without copying them into annotations.
APPLY_SECRETS = "kubectl apply --server-side -f -"

_NUM_RANDOM_BYTES = 32

_Files = Mapping[str, bytes]


def secrets_of(folder: Path, password: str, replication_password: str) -> dict[str, _Files]:
    """Secret → key → content.

    Args:
        folder: an authority's, with one folder per process below.
        password: of the user `REDIS_USER`.
        replication_password: of the user `REPLICATION_USER`.

    Raises:
        UserError: a file cannot be read, or a Secret for one process would contain the certificates of several.
    """
    users = acl_lines(REDIS_USER, password)
    replicated = (*users, replication_line(REPLICATION_USER, replication_password))
    credential = (f"masteruser {REPLICATION_USER}", f"masterauth {replication_password}")
    found: dict[str, _Files] = {
        "redis-password": {"password": password.encode()},
        "redis-users": {"users.acl": _lines(users)},
        "redis-replication": {"users.acl": _lines(replicated), "replication.conf": _lines(credential)},
    }
    for role in (Role.COORDINATOR, Role.OPERATOR, Role.REDIS):
        processes = dict(_processes(folder, role))
        if len(processes) > 1:
            names = ", ".join(sorted(processes))
            raise UserError(f"{folder} has certificates of several: {role} {names}; keep only the right one there")
        found |= {f"tls-{role}": files for files in processes.values()}
    for role in (Role.PARAMETER_SERVER, Role.AGENT):
        together: dict[str, bytes] = {}
        for name, files in _processes(folder, role):
            own = {f"{name}.{file}": files[file] for file in (CERT_FILE, KEY_FILE)}
            together |= {CA_FILE: files[CA_FILE], **own}
        if together:
            found[f"tls-{role}"] = together
    return found


def _lines(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def manifests(contents: Mapping[str, _Files], namespace: str) -> str:
    """The Secrets as YAML documents."""
    return yaml.safe_dump_all(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/name": "hetpipe"}},
            "data": {key: base64.b64encode(content).decode() for key, content in files.items()},
        }
        for name, files in contents.items()
    )


def kept_password(folder: Path, name: str) -> str:
    """The password of Redis in the file `name` of `folder`, created if missing.

    Raises:
        UserError: it can neither be read nor written.
    """
    path = folder / name
    try:
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_urlsafe(_NUM_RANDOM_BYTES), encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(
            f"cannot store the password of Redis in {path}: {error.strerror}; give a folder of your own"
        ) from error


def _processes(folder: Path, role: Role) -> Iterator[tuple[str, _Files]]:
    """Name → files of each process of `role`; the name of a coordinator is optional."""
    for path in sorted(folder.glob(f"{role}*")):
        name = path.name.removeprefix(role).removeprefix("-")
        if path.is_dir():
            try:
                yield name, {file.name: file.read_bytes() for file in sorted(path.glob("[!.]*.pem"))}
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the Secrets; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hetpipe.deploy.kubernetes_secrets",
        description=f"Print the Secrets that k8s/ mounts, for `{APPLY_SECRETS}`.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of `hetpipe certs`")
    parser.add_argument("--namespace", default="hetpipe", metavar="NAME", help="of the Secrets (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        passwords = [kept_password(options.folder, name) for name in (PASSWORD_FILE, REPLICATION_PASSWORD_FILE)]
        contents = secrets_of(options.folder, *passwords)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(manifests(contents, options.namespace))
    sys.stderr.write(f"Secrets: {', '.join(contents)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
