"""What a fork server is asked and what it answers: JSON with its length in front, over a socket that it has inherited.

The descriptors of a process that is asked for travel beside the length. Only the process that started a fork server
holds the other end of its socket; nothing is unpickled.
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

#: Longest message, in bytes: arguments and environment of a process, which the kernel bounds at 2 MiB for others.
MAX_MESSAGE_BYTES = 8 * 1024 * 1024

#: Most descriptors of one order: the conversation with the process, its folder, its standard ones, its report pipe.
MAX_DESCRIPTORS = 6

#: What is said to a forked process that may go on, and what it says once it is what was ordered.
GO = b"g"
DONE = b"d"

#: How a fork server shows in `ps`.
TITLE = (sys.executable, "-m", "hetpipe.fork_server")

#: Its last argument: room for the command lines of the processes that it forks, which show where its own one stands.
PADDING = "." * 4096

_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """Fork a process.

    Its descriptors, in order: a socket on which it hears that it may go on and says that it has; its current folder;
    standard input, output and error; and, if it reports, that pipe.
    """

    program: str
    """By its name in the fork server's table of programs."""
    arguments: tuple[str, ...]
    environment: dict[str, str]
    """The whole environment."""
    title: tuple[str, ...]
    """Its command line, for `ps`; without the arguments."""
    parent: int
    """The process that is to be its parent."""
    reports: bool
    starts_processes: bool
    """It gets a fork server of its own."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ForkOrder:
        """The order that `to_json` has made.

        Raises:
            ProtocolViolation: it is none.
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
            raise ProtocolViolation(f"no order of a process: {error!r}") from error


def send_message(connection: socket.socket, values: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message with descriptors.

    Raises:
        OSError: nobody receives it any more, or not in the socket's time.
    """
    # Surrogates stand for what is no UTF-8 in names of files and variables; escaped they survive.
    data = json.dumps(values, ensure_ascii=True).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], list(descriptors))
    connection.sendall(data)


def receive_message(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors, which are the caller's to close; None when the other end is closed.

    Raises:
        ProtocolViolation: it is no message, or one that was cut off.
        OSError: there was none in the socket's time.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, MAX_DESCRIPTORS)
    if not head:
        return None
    head += _read(connection, _LENGTH.size - len(head))
    (length,) = _LENGTH.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolViolation(f"a message of {length} bytes, where at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        values = json.loads(_read(connection, length))
    except (ValueError, RecursionError) as error:
        raise ProtocolViolation(f"a message that is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ProtocolViolation("a message that is no JSON object")
    return values, descriptors


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise ProtocolViolation("a message was cut off")
        data += more
    return bytes(data)
