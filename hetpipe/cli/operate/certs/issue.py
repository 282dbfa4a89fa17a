"""`hetpipe certs`: a private authority, and one certificate per process."""

from __future__ import annotations

from pathlib import Path

from hetpipe.certs.folders import init_authority, issue_certificate, read_facts
from hetpipe.errors import UserError
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.values.identity import NamedPeer, Role

#: Roles that an operator makes certificates for.
ROLES = tuple(role for role in Role if role is not Role.STAGE)

#: Names for an example of each role; for people there is `me`.
_EXAMPLES = {Role.PARAMETER_SERVER: "0 1", Role.AGENT: "node-a", Role.REDIS: "redis.example.com"}


def init(folder: Path, output: Output) -> ExitStatus:
    """Make an authority."""
    init_authority(folder)
    output.answer(
        {"folder": str(folder.absolute())},
        f"made an authority in {folder}; keep ca-key.pem to yourself, as whoever has it can play every process",
        f"next, for each process: hetpipe certs issue {folder} coordinator",
    )
    return ExitStatus.OK


def issue(folder: Path, role: str, names: list[str], days: float, output: Output) -> ExitStatus:
    """Make certificates for processes of one role; existing ones are replaced."""
    issued = []
    for peer in peers_of(role, names):
        own = issue_certificate(folder, peer, days=days)
        _, expires = read_facts(own)
        issued.append({"identity": peer.uri, "folder": str(own.absolute()), "expires": expires})
    lines = [f"{entry['identity']}: {entry['folder']}, until {entry['expires']}" for entry in issued]
    output.answer({"issued": issued}, *lines)
    return ExitStatus.OK


def peers_of(role: str, names: list[str]) -> list[NamedPeer]:
    """Whom the words after `certs issue DIR` mean.

    Raises:
        UserError: there is no such role, it needs a name, or a name cannot stand in a certificate.
    """
    if role not in ROLES:
        hint = "; stages get theirs from the coordinator when they start" if role == Role.STAGE else ""
        raise UserError(f"{role!r} is no role; write one of {', '.join(ROLES)}{hint}")
    if not names and role != Role.COORDINATOR:
        example = _EXAMPLES.get(Role(role), "me")
        raise UserError(f"every {role} has a name of its own: hetpipe certs issue DIR {role} {example}")
    return [NamedPeer(Role(role), name) for name in names or [role]]
