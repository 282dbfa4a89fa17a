"""`hetpipe render k8s`: a job as a Kustomize overlay."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from hetpipe import __version__
from hetpipe.bundled import bundled_root
from hetpipe.cli.deploy.deployment import AllowedEnvironment, Image, Insecure, modules_of
from hetpipe.cli.deploy.render.files import check_empty, copy, write
from hetpipe.cli.options import JobFile, Json, Settings
from hetpipe.deploy.kubernetes import CPU, AgentNodes, Overlay, groups_of_options, overlay_files
from hetpipe.deploy.kubernetes_secrets import APPLY_SECRETS
from hetpipe.errors import UserError
from hetpipe.job.file import Job
from hetpipe.report.text import shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.requests import new_run
from hetpipe.runs.shell import Shell
from hetpipe.server.agent.environment import check_allowed, checked_allowed

#: Folder of an overlay for the manifests that are written with it.
_OWN_MANIFESTS = "k8s"

#: Modules that the manifests let agents import by default.
_ALLOWED_BY_MANIFESTS = ("model", "torch.*", "hetpipe.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Write a job as a Kustomize overlay. Its files, its shards, its agents for each GPU product, over k8s/base."""

    job: JobFile
    agents: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="PRODUCT=NODESxDEVICES",
            help="Nodes of one GPU product, named as in their label nvidia.com/gpu.product, for example "
            "NVIDIA-TITAN-V=2x4; or cpu=2x2. Repeatable.",
        ),
    ]
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write, new or empty.")]
    settings: Settings = ()
    image: Image = None
    k8s: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Refer to the manifests in DIR, a changed copy of hetpipe's k8s.  [default: write them, too]",
        ),
    ] = None
    code: Annotated[
        tuple[Path, ...],
        typer.Option(metavar="FILE", help="Include this file, too; below the current folder. Repeatable."),
    ] = ()
    allowed_environment: AllowedEnvironment = ()
    insecure: Insecure = False
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Write a Kustomize overlay for a job.

    Raises:
        UserError: options or the job cannot be used, or the folder is not empty or cannot be written.
    """
    check_empty(options.out, "name a new folder with --out")
    if options.k8s is not None and not (options.k8s / "base").is_dir():
        raise UserError(
            f"there are no manifests in {options.k8s}; name a copy of hetpipe's folder k8s, or leave --k8s out"
        )
    k8s = options.out / _OWN_MANIFESTS if options.k8s is None else options.k8s
    job = new_run(options.job, options.settings, shell=shell).job
    check_allowed(job.environment, checked_allowed(options.allowed_environment))
    groups = groups_of_options(options.agents)
    code = dict(_code(job, options.code, shell.current))
    overlay = Overlay(
        job=job,
        code=code,
        groups=groups,
        image=options.image or f"hetpipe:{__version__}-{CPU if {g.product for g in groups} == {CPU} else 'cuda'}",
        k8s=os.path.relpath(k8s.resolve(), options.out.resolve()),
        tls=not options.insecure,
        modules=tuple(m for m in modules_of(job) if not any(fnmatchcase(m, p) for p in _ALLOWED_BY_MANIFESTS)),
        allowed_environment=options.allowed_environment,
    )
    files = overlay_files(overlay)
    if options.k8s is None:
        for part in ("base", "components"):
            copy(bundled_root() / "k8s" / part, k8s / part)
    write({options.out / path: content for path, content in files.items()})
    shown = shown_path(options.out.absolute(), shell.current)
    output.answer(
        {"folder": str(options.out), "files": sorted(files)},
        f"wrote {shown}: {', '.join(sorted(files))}",
        *_secret_steps(job, groups, k8s, tls=not options.insecure),
        f"start it with: kubectl apply -k {shown}",
    )
    return ExitStatus.OK


def _secret_steps(job: Job, groups: Iterable[AgentNodes], k8s: Path, *, tls: bool) -> Iterator[str]:
    """The prerequisites of the overlay: the namespace, and Secrets that no annotation repeats."""
    if tls:
        agents = [agent for group in groups for agent in group.agents]
        wanted = ["coordinator", "operator submit", "redis redis"]
        wanted += [f"parameter-server {index}" for index in range(job.parameter_servers.count)]
        wanted += [f"agent {agent}" for agent in agents]
        yield "create certificates and Secrets first, once:"
        yield "  hetpipe certs init certs"
        yield from (f"  hetpipe certs issue certs {peer}" for peer in wanted)
    else:
        yield "create the Secrets first, once: without TLS, only the password of Redis"
        yield "  mkdir -m 700 certs"
    yield f"  kubectl apply -f {k8s / 'base' / 'namespace.yaml'}"
    yield f"  python -m hetpipe.deploy.kubernetes_secrets certs | {APPLY_SECRETS}"


def _code(job: Job, more: Iterable[Path], current: Path) -> Iterator[tuple[str, str]]:
    """The files below `current` with the modules of `job` and their parent packages, and `more`."""
    found: dict[Path, None] = {}
    for module in modules_of(job):
        path = current.joinpath(*module.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                around = [folder / "__init__.py" for folder in candidate.relative_to(current).parents]
                found |= dict.fromkeys(current / file for file in around if (current / file).is_file())
                found[candidate] = None
    for path in (*found, *(path.absolute() for path in more)):
        if not path.is_relative_to(current):
            raise UserError(f"{path} is not below {current}, where user code is imported from; move it there")
        try:
            yield str(path.relative_to(current)), path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {path} as text: {error}") from error
