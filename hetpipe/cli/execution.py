"""How every command is carried out: its output, its exit status, and errors as sentences."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.errors import HetpipeError
from hetpipe.observe.log import get_logger
from hetpipe.runs.outcome import ExitStatus, Output, sentences_of, status_of
from hetpipe.runs.shell import Shell
from hetpipe.wire.tls import TLS_VARIABLE

_log = get_logger(__name__)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")]
TlsFolder = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        metavar="DIR",
        envvar=TLS_VARIABLE,
        help="Certificates for a cluster with TLS: a folder made by `hetpipe certs issue DIR operator NAME`.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a key of the job, for example sync.D=4. Repeatable."),
]


def execute(
    ctx: typer.Context, command: Callable[[Output, Shell], ExitStatus], *, as_json: bool, tls: Path | None = None
) -> None:
    """Run a command; whatever goes wrong becomes sentences, the JSON line and an exit status."""
    output = Output(
        people=sys.stderr if as_json else sys.stdout, complaints=sys.stderr, machine=sys.stdout if as_json else None
    )
    shell = ctx.obj if isinstance(ctx.obj, Shell) else Shell()
    if tls is not None:
        shell = replace(shell, tls=tls)
    try:
        status = command(output, shell)
    except HetpipeError as error:
        output.complain(sentences_of(error))
        status = status_of(error)
    except KeyboardInterrupt:
        output.complain(["interrupted"])
        status = ExitStatus.INTERRUPTED
    except BrokenPipeError:
        # Nobody reads on, as in `hetpipe clocks --watch | head -1`.
        status = ExitStatus.FAILED
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever it is, one sentence and a status
        _log.exception("command_failed")
        output.complain([f"internal error ({type(error).__name__}: {error}); please report it with the log"])
        status = ExitStatus.FAILED
    raise typer.Exit(status)
