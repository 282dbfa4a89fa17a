"""Diagnosis of failed TLS connections.

gRPC reports every failed handshake as "unavailable", as for an unreachable peer, and a gRPC server that rejects a
client's certificate closes the connection without an alert. This module opens a connection of its own: whether the
server speaks TLS, proves its name, and keeps the connection open shows which side rejects the other.
"""

from __future__ import annotations

import os
import socket
import ssl
from datetime import UTC, datetime
from pathlib import Path

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import UserError
from hetpipe.values.identity import Role
from hetpipe.wire.tls import Material

#: Timeouts for the connection and for the server's first message.
PROBE_SECONDS = 1.0

_NO_TLS = "it does not use TLS; is it started with --insecure?"


def diagnose(host: str, port: int, *, material: Material, server_name: str, clock: Clock = SYSTEM_CLOCK) -> str:
    """The problem with the certificates of either side; empty if there is none, or the server does not answer.

    Args:
        host: the server's host.
        port: the server's port.
        material: this process's certificates; an empty `cert` means none.
        server_name: the name that the server's certificate must contain.
        clock: determines whether the own certificate has expired.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(cadata=material.ca.decode("ascii"))
        _load_own(context, material)
        with (
            socket.create_connection((host, port), timeout=PROBE_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=server_name) as secure,
        ):
            # The handshake is complete on this side; the server sends its first message only to clients it accepts.
            return "" if _receives_data(secure) else _refused(material, clock)
    except ssl.SSLCertVerificationError as error:
        return (
            f"its certificate is not that of {server_name} ({error.verify_message}); both certificates must be "
            f"made by the same `hetpipe certs init`{_issue_again(server_name)}"
        )
    except (ssl.SSLEOFError, ConnectionResetError):
        # A server that is being killed closes the connection just as one without TLS may.
        return _NO_TLS if _sends_first(host, port) else ""
    except ssl.SSLError as error:
        return _NO_TLS if "WRONG_VERSION_NUMBER" in (error.reason or "") else f"TLS fails ({error.reason or error})"
    except OSError:
        return ""


def _sends_first(host: str, port: int) -> bool:
    """Whether the server sends data first, as HTTP/2 without TLS does and TLS never does."""
    try:
        with socket.create_connection((host, port), timeout=PROBE_SECONDS) as raw:
            return bool(raw.recv(1))
    except OSError:
        return False


def _issue_again(server_name: str) -> str:
    """The fix for a parameter server whose certificate names only its role."""
    index = server_name.partition(".")[0].removeprefix(f"{Role.PARAMETER_SERVER}-")
    again = (
        f", and one issued by an earlier version must be reissued: `hetpipe certs issue DIR parameter-server {index}`"
    )
    return again if index.isdigit() else ""


def _receives_data(secure: ssl.SSLSocket) -> bool:
    try:
        return bool(secure.recv(1))
    except TimeoutError:
        return True
    except OSError:  # which includes alerts
        return False


def _refused(material: Material, clock: Clock) -> str:
    if not material.cert:
        why = "it requires a certificate of this process"
    elif _has_expired(material, clock):
        why = "this process's certificate has expired"
    else:
        why = "it rejects this process's certificate, which may have been signed by another authority"
    return f"{why}; make a new one with `hetpipe certs issue`"


def _has_expired(material: Material, clock: Clock) -> bool:
    try:
        from hetpipe.certs.authority import facts_of

        return facts_of(material.cert).expires < datetime.fromtimestamp(clock.wall(), UTC)
    except (ImportError, UserError):
        return False


def _load_own(context: ssl.SSLContext, material: Material) -> None:
    """Python loads certificates from files only: use one in memory, so that a killed process leaves none behind."""
    if not material.cert:
        return
    descriptor = os.memfd_create("certificate")
    try:
        both = Path(f"/proc/self/fd/{descriptor}")
        both.write_bytes(material.key + b"\n" + material.cert)
        context.load_cert_chain(both)
    finally:
        os.close(descriptor)
