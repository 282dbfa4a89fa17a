"""A command: a dataclass of its options, and a function that is handed an instance of it.

How to think about it: the module of a command has `Options`, a frozen dataclass, and `run`. `Options` is all that a
user is asked: its docstring is the help, each field an option or an argument, annotated with `typer.Option` or
`typer.Argument`, its default that of the option; a `tuple[X, ...]` may be given again and again. Typer reads what a
command takes from the signature of a function, so `callback_of` makes one with the fields as its parameters, which
hands on an instance.

Two fields mean something to every command that has them: with `as_json` the answer is one line of JSON, and `tls` is
the folder of certificates that the command shows.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, replace
from inspect import Parameter, Signature
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from hetpipe.errors import HetpipeError
from hetpipe.runs.outcome import ExitStatus, Output, sentences_of, status_of


def callback_of(command: ModuleType) -> Callable[..., None]:
    """What typer calls for the command of a module: one parameter for each field of its `Options`."""
    options: type[Any] = command.Options
    hints = get_type_hints(options, include_extras=True)
    parameters = {field.name: _parameter(field, hints[field.name]) for field in fields(options)}
    repeated = {name for name, hint in hints.items() if _repeated(hint) is not None}

    def callback(ctx: typer.Context, **values: Any) -> None:
        given = {name: tuple(value or ()) if name in repeated else value for name, value in values.items()}
        execute(ctx, command.run, options(**given))

    context = Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    callback.__signature__ = Signature([context, *parameters.values()])  # type: ignore[attr-defined] # PEP 362
    return callback


def _parameter(field: Field[Any], hint: Any) -> Parameter:
    """A field as typer would have it: lists for tuples, None for an empty one."""
    default = Parameter.empty if field.default is MISSING else field.default
    item = _repeated(hint)
    if item is not None:
        lists = list[item] if default is Parameter.empty else list[item] | None  # type: ignore[valid-type]
        hint = operator.getitem(Annotated, (lists, *hint.__metadata__))
        default = Parameter.empty if default is Parameter.empty else None
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _repeated(hint: Any) -> Any:
    """Of `Annotated[tuple[X, ...], …]` X, else None."""
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    match get_args(inner):
        case (item, last) if get_origin(inner) is tuple and last is Ellipsis:
            return item
    return None


def execute(ctx: typer.Context, run: Callable[..., ExitStatus], options: Any) -> None:
    """Run a command; whatever goes wrong becomes sentences, the JSON line and an exit status."""
    # Here, as the list of commands does without.
    from hetpipe.observe.log import configure_logging, get_logger
    from hetpipe.runs.shell import Shell

    configure_logging(None, role="cli", level="error")
    as_json, tls = getattr(options, "as_json", False), getattr(options, "tls", None)
    output = Output(
        people=sys.stderr if as_json else sys.stdout, complaints=sys.stderr, machine=sys.stdout if as_json else None
    )
    shell = ctx.obj if isinstance(ctx.obj, Shell) else Shell()
    if tls is not None:
        shell = replace(shell, tls=tls)
    try:
        status = run(options, output, shell)
    except HetpipeError as error:
        output.complain(sentences_of(error))
        status = status_of(error)
    except KeyboardInterrupt:
        output.complain(["interrupted"])
        status = ExitStatus.INTERRUPTED
    except BrokenPipeError:
        # Nobody reads on, as in `hetpipe clocks --watch | head -1`.
        status = ExitStatus.FAILED
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever it is, one sentence and a status
        get_logger(__name__).exception("command_failed")
        output.complain([f"internal error ({type(error).__name__}: {error}); please report it with the log"])
        status = ExitStatus.FAILED
    raise typer.Exit(status)
