"""`hetpipe init`: templates of a job file and its model, and the schema with which editors complete the former."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.errors import UserError
from hetpipe.job.schema import schema_text
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell

#: File → its template.
TEMPLATES = ("job.yaml", "model.py")
#: The job file names it, in a comment that editors with the YAML language server read.
SCHEMA = "job.schema.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Write a job file and a model to start from. Overwrites nothing."""

    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write into.")] = Path()


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Write a job to start from."""
    folder = options.folder
    job, model, schema = write_templates(folder)
    go = "" if folder.resolve() == shell.current.resolve() else f"cd {folder} && "
    output.say(
        f"wrote {job} and {model}: a small model that can be trained; replace it by yours",
        f"wrote {schema}: with it editors complete and check the keys of the job file",
        f"train it with: {go}hetpipe train job.yaml",
    )
    return ExitStatus.OK


def write_templates(folder: Path) -> list[Path]:
    """Write the templates and the schema into `folder`, created if missing; returns the files written.

    Raises:
        UserError: one of them already exists (then none is written), or the folder cannot be written to.
    """
    source = files("hetpipe.cli") / "templates"
    texts = {folder / name: (source / name).read_text(encoding="utf-8") for name in TEMPLATES}
    texts[folder / SCHEMA] = schema_text("job")
    taken = [str(target) for target in texts if target.exists()]
    if taken:
        raise UserError(f"{' and '.join(taken)} would be overwritten; name another folder: hetpipe init DIR")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for target, text in texts.items():
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; name another folder: hetpipe init DIR") from error
    return list(texts)
