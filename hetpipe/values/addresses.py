"""Service addresses: `HOST:PORT`, with an IPv6 host in brackets."""

from __future__ import annotations

from hetpipe.errors import UserError

_LARGEST_PORT = 65_535


def split_address(address: str) -> tuple[str, int]:
    """Split `HOST:PORT` into host and port; an IPv6 host may be in brackets.

    Raises:
        UserError: the text is not such an address.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= _LARGEST_PORT:
        raise UserError(f"{address!r} is not an address; write HOST:PORT, for example 127.0.0.1:7300")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Join host and port to `HOST:PORT`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
