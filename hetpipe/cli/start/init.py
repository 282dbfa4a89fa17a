"""`hetpipe init`: a job file with its model and data, and the schema with which editors complete the former."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.start.own_model import TASKS, missing_remarks, model_files
from hetpipe.errors import UserError
from hetpipe.job.schema import schema_text
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.values.suggest import join_names

#: File → its template.
TEMPLATES = ("job.yaml", "model.py")
#: The job file names it, in a comment that editors with the YAML language server read.
SCHEMA = "job.schema.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Write a job file and a model to start from. Overwrites nothing."""

    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write into.")] = Path()
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Train this model, unmodified: hf:NAME of Hugging Face's hub or hf:FOLDER, or timm:NAME.",
        ),
    ] = None
    task: Annotated[
        str | None, typer.Option(metavar="TASK", help=f"With --from hf:NAME, what it learns: {', '.join(TASKS)}.")
    ] = None


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Write a job to start from.

    Raises:
        UserError: an option cannot be used, a file exists already, or the folder cannot be written to.
    """
    folder, remarks = options.folder, list[str]()
    if options.source is None:
        if options.task is not None:
            raise UserError("--task is given without --from; name a model as well: hetpipe init DIR --from hf:NAME")
        texts, what = _templates(), "a small model that can be trained; replace it by yours"
    else:
        texts = model_files(options.source, options.task, shell.current)
        remarks = missing_remarks(options.source, texts, shell.current)
        what = "they train the model on data made up for a start; replace these by yours"
    written = write_files(folder, {**texts, SCHEMA: schema_text("job")})
    go = "" if folder.resolve() == shell.current.resolve() else f"cd {folder} && "
    output.say(
        f"wrote {join_names(map(str, written[:-1]), 'and')}: {what}",
        f"wrote {written[-1]}: with it editors complete and check the keys of the job file",
        *remarks,
        f"train it with: {go}hetpipe train job.yaml",
    )
    return ExitStatus.OK


def _templates() -> Mapping[str, str]:
    source = files("hetpipe.cli") / "templates"
    return {name: (source / name).read_text(encoding="utf-8") for name in TEMPLATES}


def write_files(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write files into `folder`, created if missing; returns their paths.

    Raises:
        UserError: one of them already exists (then none is written), or the folder cannot be written to.
    """
    targets = {folder / name: text for name, text in texts.items()}
    taken = [str(target) for target in targets if target.exists()]
    if taken:
        raise UserError(f"{join_names(taken, 'and')} would be overwritten; name another folder: hetpipe init DIR")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for target, text in targets.items():
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; name another folder: hetpipe init DIR") from error
    return list(targets)
