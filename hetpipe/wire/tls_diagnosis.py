"""Why a TLS connection does not come about, in words.

gRPC reports every failed handshake as "unavailable", like a peer that is gone, and a server of gRPC that refuses a
client's certificate hangs up without an alert. This connects once more by itself: whether the server speaks TLS, proves
its name, and then speaks on or hangs up, tells who refuses whom.
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

#: Longest time for the question, and for the server's next word.
PROBE_SECONDS = 1.0

_NO_TLS = "it does not speak TLS; is it started with --insecure?"


def diagnose(host: str, port: int, *, material: Material, server_name: str, clock: Clock = SYSTEM_CLOCK) -> str:
    """What is wrong with the certificates between here and there; empty if nothing is, or nobody answers.

    Args:
        host: whom to ask.
        port: where.
        material: this process's certificates; an empty `cert` stands for none.
        server_name: the name that the server must prove.
        clock: says whether the own certificate has expired.
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
            # The handshake is done on this side; the server says its first word only to whom it accepts.
            return "" if _hears_a_word(secure) else _refused(material, clock)
    except ssl.SSLCertVerificationError as error:
        return (
            f"it does not prove to be {server_name} ({error.verify_message}); both certificates must be made by the "
            f"same `hetpipe certs init`{_issue_again(server_name)}"
        )
    except (ssl.SSLEOFError, ConnectionResetError):
        # A server that is being killed hangs up just as one without TLS may.
        return _NO_TLS if _speaks_first(host, port) else ""
    except ssl.SSLError as error:
        return _NO_TLS if "WRONG_VERSION_NUMBER" in (error.reason or "") else f"TLS fails ({error.reason or error})"
    except OSError:
        return ""


def _speaks_first(host: str, port: int) -> bool:
    """Whether the server says a word before it is asked, as one of HTTP/2 without TLS does and one with TLS never."""
    try:
        with socket.create_connection((host, port), timeout=PROBE_SECONDS) as raw:
            return bool(raw.recv(1))
    except OSError:
        return False


def _issue_again(server_name: str) -> str:
    """What to do if it is a parameter server whose certificate knows it by its role alone."""
    index = server_name.partition(".")[0].removeprefix(f"{Role.PARAMETER_SERVER}-")
    again = f", and one of an earlier version again: `hetpipe certs issue DIR parameter-server {index}`"
    return again if index.isdigit() else ""


def _hears_a_word(secure: ssl.SSLSocket) -> bool:
    try:
        return bool(secure.recv(1))
    except TimeoutError:
        return True
    except OSError:  # of which an alert is one, too
        return False


def _refused(material: Material, clock: Clock) -> str:
    if not material.cert:
        why = "it wants a certificate of this process"
    elif _has_expired(material, clock):
        why = "this process's certificate has expired"
    else:
        why = "it does not accept this process's certificate, which another authority may have signed"
    return f"{why}; make a new one with `hetpipe certs issue`"


def _has_expired(material: Material, clock: Clock) -> bool:
    try:
        from hetpipe.certs.authority import facts_of

        return facts_of(material.cert).expires < datetime.fromtimestamp(clock.wall(), UTC)
    except (ImportError, UserError):
        return False


def _load_own(context: ssl.SSLContext, material: Material) -> None:
    """Python reads certificates from files only: here from one in memory, so that who is killed leaves none behind."""
    if not material.cert:
        return
    descriptor = os.memfd_create("certificate")
    try:
        both = Path(f"/proc/self/fd/{descriptor}")
        both.write_bytes(material.key + b"\n" + material.cert)
        context.load_cert_chain(both)
    finally:
        os.close(descriptor)
