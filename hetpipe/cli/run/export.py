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
from hetpipe.values.quantities import bytes_text
from hetpipe.values.storage_url import is_url


class Format(StrEnum):
    """Format of the output."""

    SAFETENSORS = "safetensors"
    HUGGING_FACE = "hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Export the weights of a run to one file. Newest checkpoint, the model's names, safetensors."""

    paths: Annotated[
        tuple[str, ...],
        typer.Argument(
            metavar="[RUN] OUT",
            help="Folder or URL of the run (default: the newest), and the file or URL to write; a folder with --to hf.",
        ),
    ]
    to: Annotated[
        Format,
        typer.Option(
            metavar="safetensors|hf",
            help="hf: a folder that from_pretrained reads. Builds the job's model with the code of the run.",
        ),
    ] = Format.SAFETENSORS
    best: Annotated[
        bool, typer.Option("--best", help="The best checkpoint, by checkpoint.best or early_stopping; not the newest.")
    ] = False
    runs_dir: RunsDir = RUNS
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Export the weights of a run to one file, or to a folder."""
    *runs, out = options.paths
    if len(runs) > 1:
        raise UserError(
            "export takes the folder of one run and the file to write: hetpipe export RUN_DIR OUT.safetensors"
        )
    exported, shown = export_run(
        runs[0] if runs else None,
        out,
        is_hugging_face=options.to is Format.HUGGING_FACE,
        is_best=options.best,
        runs_dir=options.runs_dir,
        shell=shell,
    )
    output.answer(
        {
            "path": out if is_url(out) else str(Path(out).absolute()),
            "checkpoint": exported.checkpoint,
            "clock": exported.clock,
            "tensors": exported.num_tensors,
            "bytes": exported.num_bytes,
        },
        f"wrote {out}: {count(exported.num_tensors, 'tensor')}, {bytes_text(exported.num_bytes)}, the weights of "
        f"{shown} at clock {exported.clock}",
    )
    return ExitStatus.OK


def export_run(
    run: str | None, out: str, *, is_hugging_face: bool, is_best: bool, runs_dir: Path, shell: Shell
) -> tuple[Exported, str]:
    """Write the weights of a run; returns what was written, and the name of the run for messages.

    Args:
        run: folder or URL of the run; None: the newest one in `runs_dir`.
        out: file or URL; with `is_hugging_face`, a folder that `from_pretrained` reads.
        is_hugging_face: build the job's model with the code of the run (`RunFolder.import_path`), and save it.
        is_best: of its best checkpoint instead of the newest.
        runs_dir: searched for the newest run.
        shell: the command's environment.

    Raises:
        UserError: there is no such run, or `out` cannot be written.
        CheckpointError: the run has no complete checkpoint, or one of its files is corrupted.
    """
    if run is not None and is_url(run):
        folder, place, shown = None, run, run
    else:
        folder = find_run(None if run is None else Path(run), runs_dir=runs_dir)
        place, shown = folder.place, shown_path(folder.path, shell.current)
    if not is_hugging_face:
        return export_weights(place, out, is_best=is_best), shown
    if folder is None or is_url(out):
        raise UserError("--to hf reads the folder of a run and writes a folder, not a URL; export safetensors instead")
    return _hugging_face(folder, Path(out), shell, is_best=is_best), shown


def _hugging_face(folder: RunFolder, out: Path, shell: Shell, *, is_best: bool) -> Exported:
    # Imports torch, and the user's code.
    from hetpipe.pipeline.hugging_face import export_hugging_face

    job, code = folder.read_job(), folder.import_path(shell.current)
    return export_hugging_face(job, code, folder.place, out, is_best=is_best)
