"""`hetpipe init`: templates of a job file and its model."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.errors import UserError
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell

#: File → its template.
TEMPLATES = ("job.yaml", "model.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Write a job file and a model to start from. Overwrites nothing."""

    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write into.")] = Path()


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Write a job to start from."""
    folder = options.folder
    written = write_templates(folder)
    go = "" if folder.resolve() == shell.current.resolve() else f"cd {folder} && "
    output.say(
        f"wrote {' and '.join(map(str, written))}: a small model that can be trained; replace it by yours",
        f"train it with: {go}hetpipe train job.yaml",
    )
    return ExitStatus.OK


def write_templates(folder: Path) -> list[Path]:
    """Write the templates into `folder`, created if missing; returns the files written.

    Raises:
        UserError: one of them already exists (then none is written), or the folder cannot be written to.
    """
    targets = [folder / name for name in TEMPLATES]
    taken = [str(target) for target in targets if target.exists()]
    if taken:
        raise UserError(f"{' and '.join(taken)} would be overwritten; name another folder: hetpipe init DIR")
    source = files("hetpipe.cli") / "templates"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for target in targets:
            target.write_text((source / target.name).read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; name another folder: hetpipe init DIR") from error
    return targets
