"""`hetpipe export`: the trained weights of a run, as one file or as a model of Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.checkpoint.export import Exported, export_weights
from hetpipe.cli.options import Json, RunsDir
from hetpipe.errors import UserError
from hetpipe.report.text import count, shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RUNS, RunFolder, find_run
from hetpipe.runs.shell import Shell


class Format(StrEnum):
    """What is written."""

    SAFETENSORS = "safetensors"
    HUGGING_FACE = "hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Write the weights of a run into one file. From its newest checkpoint, by the model's names, as safetensors."""

    paths: Annotated[
        tuple[Path, ...],
        typer.Argument(
            metavar="[RUN_DIR] OUT",
            help="Folder of the run (the newest, if left out), and the file to write, or with --to hf the folder.",
        ),
    ]
    to: Annotated[
        Format,
        typer.Option(
            metavar="safetensors|hf",
            help="hf: a folder that from_pretrained reads. Builds the job's model with the code in the current folder.",
        ),
    ] = Format.SAFETENSORS
    runs_dir: RunsDir = RUNS
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Write the weights of a run into one file, or into a folder."""
    *run_dirs, out = options.paths
    if len(run_dirs) > 1:
        raise UserError(
            "export takes the folder of one run and the file to write: hetpipe export RUN_DIR OUT.safetensors"
        )
    folder = find_run(run_dirs[0] if run_dirs else None, runs_dir=options.runs_dir)
    is_file = options.to is Format.SAFETENSORS
    exported = export_weights(folder.path, out) if is_file else _hugging_face(folder, out, shell)
    output.answer(
        {
            "path": str(out.absolute()),
            "checkpoint": str(exported.checkpoint),
            "clock": exported.clock,
            "tensors": exported.num_tensors,
            "bytes": exported.num_bytes,
        },
        f"wrote {out}: {count(exported.num_tensors, 'tensor')}, {exported.num_bytes} bytes, the weights of "
        f"{shown_path(folder.path, shell.current)} at clock {exported.clock}",
    )
    return ExitStatus.OK


def _hugging_face(folder: RunFolder, out: Path, shell: Shell) -> Exported:
    # Imports torch, and the user's code.
    from hetpipe.pipeline.hugging_face import export_hugging_face

    return export_hugging_face(folder.read_job(), shell.current, folder.path, out)
