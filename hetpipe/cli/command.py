"""A command: a frozen dataclass of its options, and a function of an instance of it.

The module of a command has the dataclass `Options` and the function `run`. The docstring of `Options` is the help text;
each field is an option or an argument, annotated with `typer.Option` or `typer.Argument`, with its default. A field of
type `tuple[X, ...]` is a repeatable option. Typer derives the command line from the signature of a function, so
`callback_of` creates one with the fields as its parameters, which constructs the instance.

Two fields have the same meaning in every command: `as_json` prints the result as one line of JSON, and `tls` is the
folder of the command's certificates.
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
    """The typer callback of a command's module, with one parameter per field of its `Options`."""
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
    """Convert a field to typer's form: lists for tuples, None for an empty one."""
    default = Parameter.empty if field.default is MISSING else field.default
    item = _repeated(hint)
    if item is not None:
        lists = list[item] if default is Parameter.empty else list[item] | None  # type: ignore[valid-type]
        hint = operator.getitem(Annotated, (lists, *hint.__metadata__))
        default = Parameter.empty if default is Parameter.empty else None
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _repeated(hint: Any) -> Any:
    """X for `Annotated[tuple[X, ...], …]`, else None."""
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    match get_args(inner):
        case (item, last) if get_origin(inner) is tuple and last is Ellipsis:
            return item
    return None


def execute(ctx: typer.Context, run: Callable[..., ExitStatus], options: Any) -> None:
    """Run a command; convert any error to sentences, the JSON line and an exit status."""
    # Imported here: listing commands does not need it.
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
        # The reader has closed the pipe, as in `hetpipe clocks --watch | head -1`.
        status = ExitStatus.FAILED
    except Exception as error:  # noqa: BLE001 - the outermost frame: any error becomes one sentence and a status
        get_logger(__name__).exception("command_failed")
        output.complain([f"internal error ({type(error).__name__}: {error}); please report it with the log"])
        status = ExitStatus.FAILED
    raise typer.Exit(status)
