"""Options shared by several commands, as field types with names and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpipe.wire.tls import TLS_VARIABLE

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

# -- a job to train ----------------------------------------------------------------------------------------------------

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file.")]
JobOrResume = Annotated[Path | None, typer.Argument(metavar="JOB", help="Job file; not needed with --resume.")]
Settings = Annotated[
    tuple[str, ...],
    typer.Option("--set", metavar="PATH=VALUE", help="Change a key of the job, for example sync.D=4. Repeatable."),
]
NewRunDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder for the run, new or empty.  [default: runs/NAME-TIME]")
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="RUN", help="Resume, in a new folder, from the newest checkpoint of that run: its folder or URL."
    ),
]

# -- an existing run ---------------------------------------------------------------------------------------------------

RunDir = Annotated[Path | None, typer.Argument(metavar="RUN_DIR", help="Folder of the run.  [default: the newest run]")]
RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder of the run.  [default: the newest run]")
]
RunsDir = Annotated[Path, typer.Option(metavar="DIR", help="Folder to search for the newest run.")]
NewestJobOf = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Query this coordinator for its newest job instead.")
]
Coordinator = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Query this coordinator instead.")]
JobOfCoordinator = Annotated[
    str | None, typer.Option("--job", metavar="ID", help="With --coordinator: job id.  [default: its newest]")
]
