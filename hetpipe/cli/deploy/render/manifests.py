"""`hetpipe render manifests`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.bundled import bundled_root
from hetpipe.cli.deploy.render.files import check_empty, copy
from hetpipe.cli.options import Json
from hetpipe.report.text import shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell

#: The files written.
_MANIFESTS = ("docker-compose.yml", "deploy/compose", "k8s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Write the Compose file and the Kubernetes manifests that ship with hetpipe. Unchanged, for you to edit."""

    out: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write, new or empty.")]
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Write the files that ship with hetpipe: `docker-compose.yml` with its settings, and `k8s`.

    Raises:
        UserError: the folder is not empty or cannot be written, or this installation has none.
    """
    out = options.out
    check_empty(out, "name a new folder")
    for path in _MANIFESTS:
        copy(bundled_root() / path, out / path)
    shown = shown_path(out.absolute(), shell.current)
    output.answer(
        {"folder": str(out), "files": list(_MANIFESTS)},
        f"wrote {shown}: {', '.join(_MANIFESTS)}",
        f"Kubernetes: kubectl kustomize {shown}/k8s/overlays/cpu-demo shows the demo; Helm: {shown}/k8s/chart",
        f"Docker:     docker compose --file {shown}/docker-compose.yml config",
    )
    return ExitStatus.OK
