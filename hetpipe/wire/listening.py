"""Listening sockets: exclusive, on this machine's addresses, and beyond loopback only with TLS or `--insecure`."""

from __future__ import annotations

import errno
import ipaddress
import socket

import grpc

from hetpipe.errors import PortInUse, UserError
from hetpipe.values.addresses import join_address


def refuse_plaintext_beyond_loopback(host: str) -> None:
    """Check that a plaintext port stays on loopback.

    Raises:
        UserError: `host` is, or may be, an address that other machines can reach.
    """
    if not is_loopback(host):
        raise UserError(
            f"{host or 'every interface'} can be reached by other machines, so it needs TLS: give --tls DIR, a "
            "folder that `hetpipe certs issue` makes, or --insecure if only trusted people can reach it"
        )


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only. Names that do not resolve count as reachable from others."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)  # noqa: S104 - asked, not bound
    except OSError:
        return False
    return all(ipaddress.ip_address(str(target[0]).partition("%")[0]).is_loopback for *_, target in found)


def listen(server: grpc.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> str:
    """Bind `server`; returns the address with the port chosen by the system.

    Raises:
        PortInUse: the address is in use.
        UserError: the host is unknown or not this machine's.
    """
    _check_bindable(host, port)
    wanted = join_address(host, port)
    try:
        if credentials is None:
            return join_address(host, server.add_insecure_port(wanted))
        return join_address(host, server.add_secure_port(wanted, credentials))
    except RuntimeError as error:
        raise _port_in_use(wanted) from error


def _port_in_use(address: str) -> PortInUse:
    return PortInUse(f"address {address} is in use; choose another with --port")


def _check_bindable(host: str, port: int) -> None:
    """Bind a socket first: gRPC does not report why binding fails, and logs to standard error."""
    address = join_address(host, port)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except socket.gaierror as error:
        raise UserError(f"cannot listen on {address}: the host name is unknown ({error.strerror})") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _port_in_use(address) from error
        raise UserError(f"cannot listen on {address}: {error.strerror}") from error
