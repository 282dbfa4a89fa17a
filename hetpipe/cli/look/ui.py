"""`hetpipe ui`: the pages of the runs in a folder; needs the extra `ui`."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.errors import UserError
from hetpipe.report.text import shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RUNS
from hetpipe.runs.shell import Shell

#: Where the token may be, so that no list of processes shows it.
TOKEN_VARIABLE = "HETPIPE_UI_TOKEN"  # noqa: S105 - a name

#: The usual port.
PORT = 7480

_LEAST_TOKEN = 8

#: How long open pages may take to end after Ctrl-C, in seconds.
_CLOSING_SECONDS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the runs in a browser. Curves, pipelines, clocks, faults, logs; live while they train; runs side by side."""

    runs_dir: Annotated[Path, typer.Argument(metavar="RUNS", help="Folder of the runs.")] = RUNS
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on; beyond this machine with --token.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="Port; 0: any free one.")] = PORT
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN", envvar=TOKEN_VARIABLE, help="Secret that every request needs.", show_default=False
        ),
    ] = None


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Serve the pages until Ctrl-C.

    Raises:
        UserError: the extra is not installed, the address cannot be used, or the token is missing or too short.
    """
    check(options)
    try:
        import uvicorn

        from hetpipe.ui.app import LOOPBACK, make_app
    except ModuleNotFoundError as error:
        raise UserError(
            f"`hetpipe ui` needs the extra ui ({error.name} is missing): pip install 'hetpipe[ui]'"
        ) from None
    listening = listen(options.host, options.port)
    with listening:
        app = make_app(options.runs_dir.absolute(), shell, token=options.token, hosts={*LOOPBACK, options.host.lower()})
        secret = f"/?token={options.token}" if options.token else ""
        port = listening.getsockname()[1]
        where = f"http://{_in_address(options.host)}:{port}{secret}"
        output.say(f"the runs in {shown_path(options.runs_dir.absolute(), shell.current)}: {where} (Ctrl-C ends this)")
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # addresses may have the token
            lifespan="off",
            timeout_graceful_shutdown=_CLOSING_SECONDS,
        )
        with suppress(KeyboardInterrupt):  # the usual way to end it
            uvicorn.Server(config).run(sockets=[listening])
    return ExitStatus.OK


def check(options: Options) -> None:
    """Reject options that would expose runs to other machines without a token.

    Raises:
        UserError: there is no token, or a short one, beyond this machine.
    """
    if options.token is not None and len(options.token) < _LEAST_TOKEN:
        raise UserError(f"--token has {len(options.token)} characters; use at least {_LEAST_TOKEN}, at random")
    if options.token is None and not is_loopback(options.host):
        raise UserError(
            f"--host {options.host} can be reached by others, so it needs a token: --token, or {TOKEN_VARIABLE}; "
            f"or leave --host out and open a tunnel: ssh -L {PORT}:127.0.0.1:{PORT} THIS_MACHINE"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        UserError: the address is no address of this machine, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(
            f"cannot listen on {_in_address(host)}:{port}: {error.strerror or error}; choose another with --port"
        ) from error


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host
