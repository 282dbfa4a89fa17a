"""`hetpipe demo`: its job, and its introduction and summary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hetpipe.bundled import bundled_root
from hetpipe.cli.look.ui import PORT
from hetpipe.cli.options import Json, Settings
from hetpipe.cli.run.following import follow
from hetpipe.report.text import shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.requests import new_run
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.shell import Shell

_JOB = Path("examples") / "digits" / "job.yaml"

INTRODUCTION = (
    "Training a classifier of real handwritten digits on an emulated, unequal",
    "cluster: 2 virtual workers of 2 stages each, the second one slower, and 2",
    "parameter servers. Each row of the table is a virtual worker: which layers its",
    "stages hold on which devices, the waves it has committed (clock), how many waves",
    "it is ahead of the slowest, its speed, its loss, and how much of its time it",
    "waited for the others, as the staleness bound D demands.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Train a classifier of real handwritten digits. On this machine, as an emulated cluster of unequal devices."""

    settings: Settings = ()
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Train the demo's job, and print the next commands.

    Raises:
        UserError: this installation has no demo, or the settings cannot be used.
    """
    job, root = find_demo()
    output.say(*INTRODUCTION, "")
    request = replace(new_run(job, options.settings, shell=shell), import_path=root)
    folder = RunFolder.create(None, name=request.job.name, clock=shell.clock)
    ended = follow(request, folder, output, shell)
    if ended is ExitStatus.OK:
        plan = shown_path(job, shell.current) if root == shell.current else None
        output.say(*ending(folder.path.name, plan=plan, has_pages=_has_pages()))
    return ended


def _has_pages() -> bool:
    """Whether the extra `ui` is installed."""
    try:
        import uvicorn  # noqa: F401 - only whether it is there
    except ModuleNotFoundError:
        return False
    return True


def ending(run: str, *, plan: str | None, has_pages: bool) -> list[str]:
    """The pages and commands to look at after the demo.

    Args:
        run: name of its run.
        plan: its job file, if `hetpipe plan` can import its modules from the current folder.
        has_pages: whether the extra `ui` is installed.
    """
    rows = [
        *([] if has_pages else [("pip install 'hetpipe[ui]'", "what the next command needs")]),
        ("hetpipe ui", f"the run in a browser: http://127.0.0.1:{PORT}/runs/{run}"),
        *([(f"hetpipe plan {plan} --html plan.html", "a page about its plan: why this cut")] if plan else []),
        ("hetpipe check", "verifies its history"),
        ("hetpipe export digits.safetensors", "its weights"),
        ("hetpipe init my-job", "begins a job of your own"),
    ]
    width = max(len(command) for command, _ in rows)
    return ["", "That was the demo. Now:", *(f"  {command:<{width}}  {what}" for command, what in rows)]


def find_demo() -> tuple[Path, Path]:
    """The demo's job file and the folder its modules are imported from.

    Raises:
        UserError: see `bundled_root`.
    """
    root = bundled_root()
    return root / _JOB, root
