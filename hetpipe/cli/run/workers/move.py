"""`hetpipe workers move`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from hetpipe.cli.options import Coordinator, JobOfCoordinator, Json, RunDirOption, RunsDir, TlsFolder
from hetpipe.cli.run.job_connection import job_connection
from hetpipe.errors import UserError
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RUNS
from hetpipe.runs.shell import Shell
from hetpipe.runs.status import worker_json
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.wire.calls import MOVE_WORKER, MoveWorkerRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Move layers between the stages of a virtual worker. While it computes, or else at the next barrier."""

    vw: Annotated[int, typer.Argument(metavar="VW", min=0, help="The virtual worker, counted from 0.")]
    layers: Annotated[
        str, typer.Argument(metavar="LAYERS,LAYERS,…", help="Layers of each of its stages from then on, as in 3,1.")
    ]
    run_dir: RunDirOption = None
    coordinator: Coordinator = None
    job: JobOfCoordinator = None
    runs_dir: RunsDir = RUNS
    tls: TlsFolder = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Request the move, and print what is to change."""
    wanted = _counts(options.layers)
    with job_connection(options, shell) as there:
        request = MoveWorkerRequest(VirtualWorkerIndex(options.vw), wanted, there.job_id)
        moving = there.client.invoke(MOVE_WORKER, request)
    before = ", ".join(map(str, moving.layers))
    after = ", ".join(map(str, wanted))
    text = f"layers {before} become {after}, at the next barrier at the latest"
    if moving.layers == wanted:
        text = f"its stages have {before} layers already"
    value = {"workers": [worker_json(moving.worker)], "before": list(moving.layers), "after": list(wanted)}
    output.answer(value, f"virtual worker {options.vw}: {text}")
    return ExitStatus.OK


def _counts(text: str) -> tuple[int, ...]:
    """The numbers of layers in `3,1`.

    Raises:
        UserError: it is something else.
    """
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise UserError(f"`{text}` is no cut: give the layers of each stage, at least 1, with commas, as in 3,1")
    return counts
