"""`hetpipe debug`: one minibatch of a run again, in this process, under Python's debugger."""

from __future__ import annotations

import pdb  # noqa: T100 - this is what the command is for
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from hetpipe.cli.options import Json, RunDir, RunsDir
from hetpipe.errors import UserError
from hetpipe.report.text import columns, count, shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RUNS, find_run
from hetpipe.runs.shell import Shell
from hetpipe.values.quantities import significant

if TYPE_CHECKING:
    from collections.abc import Callable

    from hetpipe.runs.replay import Replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Replay one minibatch of a run in one process, on the CPU, under a debugger. The same bits as in the run.

    User code is imported from where the run imported it. The first minibatches after a checkpoint are replayed at once,
    others of a deterministic run by repeating it from the nearest checkpoint.
    """

    run_dir: RunDir = None
    minibatch: Annotated[int, typer.Option(metavar="P", min=1, help="Number of the minibatch, from 1.")]
    vw: Annotated[int, typer.Option(metavar="N", min=0, help="Virtual worker.")] = 0
    debugger: Annotated[
        bool, typer.Option("--pdb/--no-pdb", help="Stop in Python's debugger before the forward, and at an error.")
    ] = True
    runs_dir: RunsDir = RUNS
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Replay the minibatch, and print its loss and the norms of its gradients.

    Raises:
        UserError: the weights of the minibatch are not known; it says which ones are.
    """
    # Imports torch, and the user's code.
    from hetpipe.runs.replay import replay_of_run

    folder = find_run(options.run_dir, runs_dir=options.runs_dir)
    around = _under_debugger if options.debugger else None
    if options.debugger:
        output.note(
            "the debugger stops before the forward: set breakpoints in your code (b model.py:12) and continue (c), or "
            "step into it (s); after an error it stops where that was raised; unless it is among the first after a "
            "checkpoint, the run is repeated up to it first"
        )
    found = replay_of_run(folder, shell.current, vw=options.vw, p=options.minibatch, around=around)
    norms = {name: None if one is None else float(one.norm()) for name, one in found.gradients.items()}
    rows = [(name, "unused" if norm is None else significant(norm)) for name, norm in norms.items()]
    output.answer(
        {"loss": found.loss, "clock": found.clock, "indices": list(found.indices), "gradient_norms": norms},
        f"minibatch {options.minibatch} of virtual worker {options.vw} in {shown_path(folder.path, shell.current)}, on "
        f"the weights of clock {found.clock}: {count(len(found.indices), 'sample')} {list(found.indices)}",
        f"loss {found.loss!r}",
        *columns([("parameter", "norm of its gradient"), *rows]),
    )
    return ExitStatus.OK


def _under_debugger(compute: Callable[[], Replayed]) -> Replayed:
    try:
        found = pdb.Pdb().runcall(compute)
    except Exception:
        pdb.post_mortem(sys.exc_info()[2])
        raise
    if found is None:  # as `runcall` does
        raise UserError("the debugger was quit before the minibatch was computed")
    return found
