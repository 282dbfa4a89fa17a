"""Messages of a fork server: length-prefixed JSON over an inherited socket.

File descriptors of an order are sent with the length. Only the process that started a fork server holds the other end
of its socket; nothing is unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetpipe.errors import ProtocolViolation

#: Maximum length of a message: arguments and environment of a process, which the kernel limits to 2 MiB in `exec`.
MAX_MESSAGE_BYTES = 8 * 1024 * 1024

#: Maximum number of descriptors of an order: setup socket, folder, three standard streams, report pipe.
MAX_DESCRIPTORS = 6

#: Sent to a forked process to let it continue, and by it after its setup.
GO = b"g"
DONE = b"d"

#: Command line of a fork server in `ps`.
TITLE = (sys.executable, "-m", "hetpipe.fork_server")

#: Its last argument: reserves space for the command lines of forked processes, which overwrite its own.
PADDING = "." * 4096

_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """Order to fork a process.

    Descriptors, in order: a socket on which the process receives permission to continue and reports its setup; its
    current folder; standard input, output and error; and, if it reports, the pipe for that.
    """

    program: str
    """Its name in the fork server's table of programs."""
    arguments: tuple[str, ...]
    environment: dict[str, str]
    """The whole environment."""
    title: tuple[str, ...]
    """Its command line for `ps`, without arguments."""
    parent: int
    """Process id of the intended parent."""
    reports: bool
    starts_processes: bool
    """Whether it gets a fork server of its own."""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ForkOrder:
        """Convert from the result of `to_json`.

        Raises:
            ProtocolViolation: `values` is not a valid order.
        """
        try:
            return cls(
                program=str(values["program"]),
                arguments=tuple(map(str, values["arguments"])),
                environment={str(name): str(value) for name, value in values["environment"].items()},
                title=tuple(map(str, values["title"])),
                parent=int(values["parent"]),
                reports=bool(values["reports"]),
                starts_processes=bool(values["starts_processes"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolViolation(f"not an order of a process: {error!r}") from error


def send_message(connection: socket.socket, values: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message with descriptors.

    Raises:
        OSError: the socket is closed, or its timeout has passed.
    """
    # Surrogates represent bytes in file names and variables that are not UTF-8; escaping preserves them.
    data = json.dumps(values, ensure_ascii=True).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], list(descriptors))
    connection.sendall(data)


def receive_message(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive a message and its descriptors, which the caller must close; None if the other end is closed.

    Raises:
        ProtocolViolation: the message is malformed or truncated.
        OSError: the socket's timeout has passed.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, MAX_DESCRIPTORS)
    if not head:
        return None
    head += _read(connection, _LENGTH.size - len(head))
    (length,) = _LENGTH.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolViolation(f"a message has {length} bytes, more than the maximum of {MAX_MESSAGE_BYTES}")
    try:
        values = json.loads(_read(connection, length))
    except (ValueError, RecursionError) as error:
        raise ProtocolViolation(f"a message is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ProtocolViolation("a message is not a JSON object")
    return values, descriptors


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise ProtocolViolation("a message is truncated")
        data += more
    return bytes(data)
