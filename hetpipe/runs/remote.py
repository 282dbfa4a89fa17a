"""Hosts of `hetpipe launch`, and commands that run on one of them through ssh. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.errors import UserError


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One machine of a run."""

    name: str
    """As ssh and the other machines know it."""
    num_cpu_devices: int | None = None
    """CPU devices to offer; None: its GPUs, or else one device per CPU."""


@dataclass(frozen=True, slots=True)
class RemoteShell:
    """Runs commands on a host, in a folder."""

    program: tuple[str, ...]
    """`ssh`, with options."""
    host: str
    folder: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The local command that runs `arguments` there; it ends with its standard input.

        >>> RemoteShell(("ssh",), "b", "/my code").command(["python", "-m", "x y"])
        ['ssh', 'b', "cd '/my code' && exec python -m 'x y'"]
        """
        return [*self.program, self.host, f"cd {shlex.quote(self.folder)} && exec {shlex.join(arguments)}"]


def hosts_of(text: str) -> tuple[HostSpec, ...]:
    """Parse the value of `--hosts`.

    Raises:
        UserError: it names no host, a host twice, or a number of devices that is none.

    >>> hosts_of("a, b:2")
    (HostSpec(name='a', num_cpu_devices=None), HostSpec(name='b', num_cpu_devices=2))
    """
    found: dict[str, HostSpec] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, number = part.partition(":")
        if not name or name.startswith("-") or (colon and (not number.isdecimal() or int(number) < 1)):
            raise UserError(f"--hosts has {part!r}; write HOST, or HOST:N for N CPU devices, for example a,b:2")
        if name in found:
            raise UserError(f"--hosts names {name} twice; name each host once, with its number of devices")
        found[name] = HostSpec(name, int(number) if colon else None)
    if not found:
        raise UserError("--hosts names no host; write for example a,b:2")
    return tuple(found.values())
