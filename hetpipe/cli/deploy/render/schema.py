"""`hetpipe render schema`: JSON Schemas, with which editors complete and check job files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from hetpipe.errors import UserError
from hetpipe.job.schema import DESCRIBED, schema_text
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.values.suggest import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Write the JSON Schema of a file that hetpipe reads, for editors. Contradictions between keys are not in it."""

    name: Annotated[
        str, typer.Argument(metavar="NAME", help="What it describes: job, cluster, profile, plan, elastic or memory.")
    ] = "job"


def run(options: Options, output: Output, _shell: Shell) -> ExitStatus:
    """Print a schema.

    Raises:
        UserError: there is none of this name.
    """
    if options.name not in DESCRIBED:
        raise UserError(f"no schema is called {options.name!r}; {did_you_mean(options.name, DESCRIBED)}")
    output.say(schema_text(options.name).rstrip())
    return ExitStatus.OK
