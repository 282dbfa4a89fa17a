"""Authentication between a coordinator and Redis, in both directions.

The password comes from a file. It is never part of a URL, because URLs end up in process lists and logs. Does not need
redis-py.
"""

from __future__ import annotations

import ssl
import stat
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from hetpipe.certs.files import CERT_FILE, KEY_FILE
from hetpipe.errors import UserError
from hetpipe.observe.log import get_logger

_log = get_logger(__name__)

#: The option that names the password file.
_FILE_OPTION = "--store-password-file"

_TLS_SCHEME = "rediss"

#: Allowed query options of the URL. Others could disable the verification of certificates.
_QUERY_KEYS = frozenset({"db"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAccess:
    """The coordinator's credentials for Redis, and the authorities it trusts."""

    password_file: Path | None = None
    """The password is the file's text without trailing white space."""
    ca: Path | None = None
    """Authority that signed the certificate of Redis, as PEM; None: those trusted by this machine. Only for
    `rediss://`.
    """
    client_cert: Path | None = None
    """The coordinator's own certificate, for a Redis that requires one; with `client_key`. Only for `rediss://`."""
    client_key: Path | None = None


def access_of(url: str, *, password_file: Path | None, ca: Path | None, tls: Path | None) -> RedisAccess:
    """The access settings given by a command's options.

    Args:
        url: as given by the user.
        password_file: of `--store-password-file`.
        ca: of `--store-ca`.
        tls: the folder of `--tls`; its certificate is presented to a Redis with TLS.
    """
    own = tls if url.startswith(f"{_TLS_SCHEME}://") else None
    return RedisAccess(
        password_file=password_file,
        ca=ca,
        client_cert=None if own is None else own / CERT_FILE,
        client_key=None if own is None else own / KEY_FILE,
    )


def is_redis(url: str) -> bool:
    """Whether the URL of a store refers to Redis."""
    return url.startswith(("redis://", f"{_TLS_SCHEME}://", "unix://"))


def read_password(path: Path, option: str = _FILE_OPTION) -> str:
    """Read a password file, without trailing white space.

    Args:
        path: the file.
        option: how the user named it; prefix of every message.

    Raises:
        UserError: the file cannot be read, or does not contain a password of one line.
    """
    option = f"{option} {path}"
    try:
        password = path.read_text(encoding="utf-8").rstrip()
    except OSError as error:
        raise UserError(f"{option}: cannot be read ({error.strerror}); store the password of Redis in it") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{option}: is not a text file; store the password of Redis in it") from error
    if not password:
        raise UserError(f"{option}: is empty; store the password of Redis in it")
    if "\n" in password:
        raise UserError(f"{option}: has several lines; store the password of Redis in it, and nothing else")
    return password


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """The validated URL of a store."""

    url: str
    """Without user and password."""
    user: str
    """Empty for the default user."""
    place: str
    """For messages."""
    is_tls: bool
    is_local: bool
    """Whether all traffic stays on this machine."""


def read_url(url: str) -> RedisTarget:
    """Parse the URL of a store.

    Raises:
        UserError: it contains a password, or client options.
    """
    parts = urlsplit(url)
    query = {key for key, _ in parse_qsl(parts.query, keep_blank_values=True)}
    if parts.password is not None or "password" in query:
        raise UserError(
            "--store contains a password, which process lists and logs would show; write it to a file, pass "
            "that with --store-password-file, and remove it from the URL"
        )
    if refused := sorted(query - _QUERY_KEYS):
        raise UserError(f"--store has the query option {refused[0]!r}, which hetpipe does not support; remove it")
    place = parts.netloc.rpartition("@")[2] + parts.path + (f"?{parts.query}" if parts.query else "")
    return RedisTarget(
        url=f"{parts.scheme}://{place}",
        user=unquote(parts.username or ""),
        place=place,
        is_tls=parts.scheme == _TLS_SCHEME,
        is_local=parts.scheme == "unix" or _is_loopback(parts),
    )


def connection_options(target: RedisTarget, access: RedisAccess) -> dict[str, Any]:
    """Keyword arguments of `redis.Redis.from_url` for `target.url`, except user and password.

    Raises:
        UserError: a file of `access` cannot be used, or does not match the URL.
    """
    if access.password_file is not None:
        read_password(access.password_file)
        _warn_of_exposure(target, access.password_file)
    elif target.user:
        raise UserError(f"--store names the user {target.user!r}; give its password by --store-password-file")
    if not target.is_tls:
        if access.ca is not None:
            raise UserError(f"--store-ca {access.ca} requires TLS; write --store rediss://{target.place}")
        return {}
    _check_certificates(access)
    options: dict[str, Any] = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    if access.ca is not None:
        options["ssl_ca_certs"] = str(access.ca)
    if access.client_cert is not None:
        options |= {"ssl_certfile": str(access.client_cert), "ssl_keyfile": str(access.client_key)}
    return options


def _is_loopback(parts: SplitResult) -> bool:
    host = parts.hostname or "localhost"
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _warn_of_exposure(target: RedisTarget, password_file: Path) -> None:
    mode = password_file.stat().st_mode
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        _log.warning(
            "password_file_is_open",
            file=str(password_file),
            mode=oct(stat.S_IMODE(mode)),
            fix=f"chmod 0400 {password_file}",
        )
    if not (target.is_tls or target.is_local):
        _log.warning("password_in_the_clear", store=target.place, fix=f"--store rediss://{target.place}")


def _check_certificates(access: RedisAccess) -> None:
    """Load the certificate files early: otherwise a bad file would look like an unreachable Redis."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if access.ca is not None:
            context.load_verify_locations(cafile=access.ca)
    except OSError as error:  # ssl.SSLError is a subclass
        raise UserError(
            f"--store-ca {access.ca} is not a readable PEM file of certificates ({error.strerror})"
        ) from error
    try:
        if access.client_cert is not None:
            context.load_cert_chain(access.client_cert, access.client_key)
    except OSError as error:
        raise UserError(
            f"{access.client_cert} and its key cannot be used to authenticate to Redis ({error.strerror})"
        ) from error
