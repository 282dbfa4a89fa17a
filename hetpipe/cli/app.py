"""The table of all commands, by families, and the lazy loading of their modules.

The file of a command follows from its name: `hetpipe cluster show`, of the family `plan`, is
`cli/plan/cluster/show.py`. Help and completion use only this table; a command's module is imported when the command is
called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hetpipe import __version__
from hetpipe.cli.command import callback_of
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.server import SERVICES


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or a group of them."""

    name: str
    summary: str
    """The first sentence of its help; for a group, the whole help."""
    members: tuple[Command, ...] = ()
    """The commands of a group."""
    program: str = ""
    """For a command with its own parser: the module whose `main` takes the remaining arguments."""


@dataclass(frozen=True, slots=True)
class Family:
    """Commands under one heading of the help."""

    folder: str
    """Folder in `hetpipe/cli`."""
    title: str
    commands: tuple[Command, ...]


FAMILIES = (
    Family(
        "start",
        "Start here",
        (
            Command("doctor", "Check whether this machine meets the requirements of a run."),
            Command("demo", "Train a classifier of real handwritten digits."),
            Command("init", "Write a job file and a model to start from."),
            Command("version", "Show the versions of hetpipe, Python, torch and gRPC."),
        ),
    ),
    Family(
        "plan",
        "Plan before training",
        (
            Command("profile", "Measure the cost of every layer of a job's model."),
            Command("plan", "Compute the fastest plan that fits, and predict its speed."),
            Command("simulate", "Run a plan in simulated time."),
            Command(
                "cluster",
                "Show a cluster, the devices of this machine, and the catalogue of device types.",
                (
                    Command("show", "Show the nodes, devices and links of a cluster file."),
                    Command("catalogue", "Show the catalogue of device types."),
                    Command("from-k8s", "Generate a cluster file from a Kubernetes cluster's GPU nodes."),
                ),
            ),
        ),
    ),
    Family(
        "run",
        "Run a job",
        (
            Command("train", "Train a job and follow it to its end."),
            Command("launch", "Train a job on several machines, through ssh."),
            Command("submit", "Train a job on a running cluster and follow it to its end."),
            Command("stop", "Stop a run, attached or detached."),
            Command(
                "workers",
                "Show, drain, add and cut the virtual workers of a run.",
                (
                    Command("list", "Show the virtual workers of a run."),
                    Command("drain", "Drain virtual workers."),
                    Command("add", "Add virtual workers to a run."),
                    Command("move", "Move layers between the stages of a virtual worker."),
                ),
            ),
            Command("export", "Export the weights of a run to one file."),
        ),
    ),
    Family(
        "look",
        "Look at a run",
        (
            Command("status", "Show the status of a run."),
            Command("clocks", "Show the clocks of a run."),
            Command("top", "Watch a run and its cluster, every second."),
            Command("ui", "Show the runs in a browser."),
            Command("check", "Verify a run's history."),
            Command("script", "Show what a run has decided, as a script for a job."),
            Command("debug", "Replay one minibatch of a run in one process, on the CPU, under a debugger."),
        ),
    ),
    Family(
        "deploy",
        "Deploy in containers",
        (
            Command("up", "Train a job in containers on this machine."),
            Command("down", "Remove the cluster that `hetpipe up` started."),
            Command("ps", "Show the containers of `hetpipe up`."),
            Command("logs", "Show the logs of the containers of `hetpipe up`."),
            Command(
                "render",
                "Render schedules, manifests and other files, without running anything.",
                (
                    Command("schedule", "Draw the timeline of a weight policy."),
                    Command(
                        "redis-acl",
                        "Write an ACL file for Redis with the coordinator's user only, with the least privileges.",
                    ),
                    Command("compose", "Write the cluster of `hetpipe up` as a Compose file."),
                    Command("manifests", "Write the Compose file and the Kubernetes manifests that ship with hetpipe."),
                    Command("k8s", "Write a job as a Kustomize overlay."),
                    Command("slurm", "Write a batch script for Slurm."),
                    Command("schema", "Write the JSON Schema of a file that hetpipe reads, for editors."),
                ),
            ),
        ),
    ),
    Family(
        "operate",
        "Operate a cluster",
        (
            Command(
                "serve",
                "Run one service of a cluster, as image, Compose file, manifests and `hetpipe train` do.",
                (
                    Command("coordinator", "Run the coordinator.", program=SERVICES["coordinator"]),
                    Command(
                        "parameter-server", "Run one parameter-server shard.", program=SERVICES["parameter-server"]
                    ),
                    Command("agent", "Run the agent of a node.", program=SERVICES["agent"]),
                ),
            ),
            Command("health", "Check the health of a service.", program="hetpipe.cli.operate.health"),
            Command(
                "certs",
                "Manage certificates: a private authority, one certificate per process.",
                (
                    Command("init", "Create a private certificate authority."),
                    Command("issue", "Issue keys and certificates."),
                ),
            ),
            Command(
                "repair",
                "Repair the persistent state of processes that are not running.",
                (
                    Command("store", "Repair the coordinator's store."),
                    Command("state", "Repair the state of parameter servers."),
                ),
            ),
        ),
    ),
    Family(
        "study", "Study", (Command("compare", "Train a job under several weight policies, or values of its keys."),)
    ),
)


class _Listing(TyperGroup):
    """A group that lists commands by their rows, and imports only the one that is called.

    The callback of a listed command creates the actual command, which replaces it when a command line is parsed.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve `args` to a command, its name, and the remaining arguments."""
        name, listed, rest = super().resolve_command(ctx, args)
        if listed is None or listed.callback is None or isinstance(listed, TyperGroup):
            return name, listed, rest
        return name, listed.callback(), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each family; typer itself has sections only together with boxes."""
        shown = {name: command for name in self.list_commands(ctx) if (command := self.get_command(ctx, name))}
        width = max(map(len, shown))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in shown.items():
            summary = command.get_short_help_str(formatter.width - 6 - width)
            sections.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append(
                (name.ljust(width), summary)
            )
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _loaded(row: Command, module: str) -> Any:
    """The command as a click object."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    if row.program:
        _add_program(single, row)
    else:
        command = import_module(module)
        single.command(row.name, help=getdoc(command.Options))(callback_of(command))
    return typer.main.get_command(single)


def _add_program(single: typer.Typer, row: Command) -> None:
    """Add a command that passes all arguments, including `--help`, to the program's own parser."""
    unparsed = {"ignore_unknown_options": True, "allow_interspersed_args": False}

    @single.command(row.name, help=row.summary, context_settings=unparsed, add_help_option=False)
    def run(options: Annotated[list[str] | None, typer.Argument(metavar="[OPTION]...")] = None) -> None:
        raise typer.Exit(import_module(row.program).main(options or []))


def _list(row: Command, parent: typer.Typer, package: str, panel: str | None = None) -> None:
    """Add `row` to `parent`; its file is in `package`."""
    module = f"{package}.{row.name.replace('-', '_')}"
    if row.members:
        group = typer.Typer(cls=_Listing, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
        for member in row.members:
            _list(member, group, module)
        parent.add_typer(group, name=row.name, help=row.summary, rich_help_panel=panel)
    else:

        def load() -> Any:
            return _loaded(row, module)

        parent.command(row.name, help=row.summary, rich_help_panel=panel)(load)


def _version(asked: bool) -> None:  # noqa: FBT001 - the signature of an option's callback
    if asked:
        typer.echo(f"hetpipe {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=_Listing,
    name="hetpipe",
    epilog="Begin with: hetpipe doctor, hetpipe demo, hetpipe init.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def program(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version of hetpipe, and exit."),
    ] = False,
) -> None:
    """Train one PyTorch model on the unequal devices you already have."""


for _family in FAMILIES:
    for _row in _family.commands:
        _list(_row, app, f"hetpipe.cli.{_family.folder}", _family.title)

#: typer's base class of errors in options and arguments, which it does not export.
_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def run(arguments: Sequence[str]) -> int:
    """Run the command given by `arguments`; returns its exit status."""
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
