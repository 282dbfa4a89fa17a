"""`hetpipe certs issue`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from hetpipe.cli.operate.certs.authority import Authority, check_installed
from hetpipe.cli.options import Json
from hetpipe.errors import UserError
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.values.identity import NamedPeer, Role

#: Roles for which an operator issues certificates.
ROLES = tuple(role for role in Role if role is not Role.STAGE)

#: Example name per role; `me` for people.
_EXAMPLES = {Role.PARAMETER_SERVER: "0 1", Role.AGENT: "node-a", Role.REDIS: "redis.example.com"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Issue keys and certificates. One folder per process, DIR/ROLE-NAME, for its option --tls."""

    folder: Authority
    role: Annotated[
        str, typer.Argument(metavar="ROLE", help="coordinator, parameter-server, agent, operator, monitor or redis.")
    ]
    names: Annotated[
        tuple[str, ...],
        typer.Argument(metavar="[NAME]...", help="A shard's index, an agent's node, a person's name, a host."),
    ] = ()
    days: Annotated[float, typer.Option(metavar="N", min=0.001, max=3650, help="Days of validity.")] = 365
    as_json: Json = False


def run(options: Options, output: Output, _shell: Shell) -> ExitStatus:
    """Issue certificates for processes of one role; existing ones are replaced.

    Raises:
        UserError: the folder, the role or a name cannot be used, or the extra is not installed.
    """
    check_installed()
    from hetpipe.certs.folders import issue_certificate, read_facts  # of the extra

    issued = []
    for peer in peers_of(options.role, options.names):
        own = issue_certificate(options.folder, peer, days=options.days)
        _, expires = read_facts(own)
        issued.append({"identity": peer.uri, "folder": str(own.absolute()), "expires": expires})
    lines = [f"{entry['identity']}: {entry['folder']}, until {entry['expires']}" for entry in issued]
    output.answer({"issued": issued}, *lines)
    return ExitStatus.OK


def peers_of(role: str, names: Sequence[str]) -> list[NamedPeer]:
    """The identities given by the arguments after `certs issue DIR`.

    Raises:
        UserError: the role is unknown or needs a name, or a name is not valid in a certificate.
    """
    if role not in ROLES:
        hint = "; stages get theirs from the coordinator when they start" if role == Role.STAGE else ""
        raise UserError(f"{role!r} is not a role; use one of {', '.join(ROLES)}{hint}")
    if not names and role != Role.COORDINATOR:
        example = _EXAMPLES.get(Role(role), "me")
        raise UserError(f"every {role} has a name of its own: hetpipe certs issue DIR {role} {example}")
    return [NamedPeer(Role(role), name) for name in names or [role]]
