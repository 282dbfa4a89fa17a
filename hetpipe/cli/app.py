"""The command line as typer sees it: commands, arguments, help. What they do is in the modules beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hetpipe import __version__
from hetpipe.cli import looking
from hetpipe.cli.app_compare import compare
from hetpipe.cli.app_deploy import down, logs, ps, up
from hetpipe.cli.app_observe import top
from hetpipe.cli.app_planning import clusters, plan, profile, simulate
from hetpipe.cli.app_render import renders
from hetpipe.cli.app_repair import repairs
from hetpipe.cli.app_secure import certificates, health
from hetpipe.cli.app_serve import UNPARSED, services
from hetpipe.cli.app_stop import stop
from hetpipe.cli.app_workers import workers
from hetpipe.cli.execution import Json, Set, TlsFolder, execute
from hetpipe.cli.run import running
from hetpipe.cli.start.demo import INTRODUCTION, find_demo
from hetpipe.observe.log import configure_logging
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RUNS
from hetpipe.runs.shell import Shell

app = typer.Typer(
    name="hetpipe",
    epilog="Begin with: hetpipe doctor, hetpipe demo, hetpipe init.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:  # noqa: FBT001 - the signature of an option's callback
    if asked:
        typer.echo(f"hetpipe {__version__}")
        raise typer.Exit


@app.callback()
def program(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version of hetpipe, and end."),
    ] = False,
) -> None:
    """Train one PyTorch model on the unequal devices you already have."""


NewRunDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder for the run, new or empty.  [default: runs/NAME-TIME]")
]
RunDirOfJob = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder for the run, new or empty; or that of a job handed in before, which is followed again.  "
        "[default: runs/NAME-TIME]",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(metavar="RUN_DIR", help="Go on from the newest checkpoint of that run, in a new folder."),
]
JobFile = Annotated[Path | None, typer.Argument(metavar="JOB", help="Job file; not needed with --resume.")]
SubmittedFile = Annotated[
    Path | None,
    typer.Argument(metavar="JOB", help="Job file; not needed with --resume, nor to follow the job of --run-dir again."),
]
RunDir = Annotated[Path | None, typer.Argument(metavar="RUN_DIR", help="Folder of the run.  [default: the newest run]")]
RunsDir = Annotated[Path, typer.Option(metavar="DIR", help="Where to look for the newest run.")]
Asked = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Ask this coordinator for its newest job instead.")
]


@app.command()
def train(
    ctx: typer.Context,
    job: JobFile = None,
    *,
    settings: Set = None,
    run_dir: NewRunDir = None,
    resume: Resume = None,
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Train on a running cluster instead of starting one on this machine."),
    ] = None,
    tls: TlsFolder = None,
    as_json: Json = False,
) -> None:
    """Train a job and follow it to its end. Ctrl-C stops it at a checkpoint, a second one at once."""
    options = running.RunOptions(
        job=job, settings=tuple(settings or ()), run_dir=run_dir, resume=resume, coordinator=coordinator
    )
    execute(ctx, lambda output, shell: running.train(options, output, shell), as_json=as_json, tls=tls)


@app.command()
def submit(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    job: SubmittedFile = None,
    *,
    coordinator: Annotated[str, typer.Option(metavar="HOST:PORT", help="Coordinator of the running cluster.")],
    settings: Set = None,
    run_dir: RunDirOfJob = None,
    resume: Resume = None,
    detach: Annotated[bool, typer.Option("--detach", help="Only hand the job in; do not follow it.")] = False,
    tls: TlsFolder = None,
    as_json: Json = False,
) -> None:
    """Train a job on a running cluster and follow it to its end. Ctrl-C stops it at a checkpoint; SIGTERM detaches."""
    options = running.RunOptions(
        job=job,
        settings=tuple(settings or ()),
        run_dir=run_dir,
        resume=resume,
        coordinator=coordinator,
        again=True,
    )
    command = running.submit_only if detach else running.train
    execute(ctx, lambda output, shell: command(options, output, shell), as_json=as_json, tls=tls)


@app.command()
def status(
    ctx: typer.Context,
    run_dir: RunDir = None,
    *,
    coordinator: Asked = None,
    runs_dir: RunsDir = RUNS,
    tls: TlsFolder = None,
    as_json: Json = False,
) -> None:
    """Show how a run is doing. Its state, its processes, its clocks."""
    which = looking.Which(run_dir=run_dir, coordinator=coordinator, runs_dir=runs_dir)
    execute(ctx, lambda output, shell: looking.status(which, output, shell), as_json=as_json, tls=tls)


@app.command()
def clocks(
    ctx: typer.Context,
    run_dir: RunDir = None,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Show every change, one line each, to the end.")] = False,
    coordinator: Asked = None,
    runs_dir: RunsDir = RUNS,
    tls: TlsFolder = None,
    as_json: Json = False,
) -> None:
    """Show the clocks of a run. They count the waves that each virtual worker, and that all of them have committed."""
    which = looking.Which(run_dir=run_dir, coordinator=coordinator, runs_dir=runs_dir)
    command = looking.watch_clocks if watch else looking.clocks
    execute(ctx, lambda output, shell: command(which, output, shell), as_json=as_json, tls=tls)


@app.command()
def check(ctx: typer.Context, run_dir: RunDir = None, *, runs_dir: RunsDir = RUNS, as_json: Json = False) -> None:
    """Judge a run by its history. Staleness in bounds, waves applied once and whole, samples counted once?"""
    which = looking.Which(run_dir=run_dir, runs_dir=runs_dir)
    execute(ctx, lambda output, _: looking.check(which, output), as_json=as_json)


@app.command()
def export(
    ctx: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[RUN_DIR] OUT", help="Folder of the run (the newest, if left out), and the file to write."
        ),
    ],
    *,
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
) -> None:
    """Write the weights of a run into one file. From its newest checkpoint, by the model's names, as safetensors."""
    execute(ctx, lambda output, shell: looking.export(paths, runs_dir, output, shell), as_json=as_json)


@app.command()
def doctor(ctx: typer.Context, *, as_json: Json = False) -> None:
    """Check whether this machine has what a run needs. Says what to do if not."""
    execute(ctx, looking.doctor, as_json=as_json)


@app.command()
def demo(ctx: typer.Context, *, settings: Set = None, as_json: Json = False) -> None:
    """Train a classifier of real handwritten digits. On this machine, as an emulated cluster of unequal devices."""

    def command(output: Output, shell: Shell) -> ExitStatus:
        job, root = find_demo()
        output.say(*INTRODUCTION, "")
        options = running.RunOptions(job=job, settings=tuple(settings or ()), import_path=root)
        ended = running.train(options, output, shell)
        if ended is ExitStatus.OK:
            output.say(
                "", "That was the demo. Now look at it with `hetpipe check` and `hetpipe export digits.safetensors`,"
            )
            output.say("or begin with a job of your own: hetpipe init my-job")
        return ended

    execute(ctx, command, as_json=as_json)


@app.command()
def init(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write into.")] = Path(),
) -> None:
    """Write a job file and a model to start from. Overwrites nothing."""
    execute(ctx, lambda output, shell: looking.init(folder, output, shell), as_json=False)


app.add_typer(certificates, name="certs")
app.add_typer(clusters, name="cluster")
app.add_typer(renders, name="render")
app.add_typer(repairs, name="repair")
app.add_typer(services, name="serve")
app.add_typer(workers, name="workers")
for command_elsewhere in (stop, profile, plan, simulate, compare, top, up, down, ps, logs):
    app.command()(command_elsewhere)
app.command(context_settings=UNPARSED, add_help_option=False)(health)


@app.command()
def version(ctx: typer.Context) -> None:
    """Show the versions of hetpipe, Python, torch and gRPC."""
    execute(ctx, lambda output, _: looking.version(output), as_json=False)


#: typer's root of wrong options and arguments, which it does not export.
_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def run(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` ask for; the exit status."""
    configure_logging(None, role="cli", level="error")
    try:
        status = app(args=list(arguments), prog_name="hetpipe", standalone_mode=False)
    except _UsageError as error:
        error.show()  # type: ignore[attr-defined]
        if "--json" in arguments:
            Output(people=sys.stderr, complaints=sys.stderr, machine=sys.stdout).answer({"errors": [_text(error)]})
        return ExitStatus.USAGE
    except typer.Abort:
        return ExitStatus.INTERRUPTED
    return int(status or 0)


def _text(error: Exception) -> str:
    return str(error.format_message())  # type: ignore[attr-defined]
