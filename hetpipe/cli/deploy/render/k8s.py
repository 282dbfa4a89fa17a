"""`hetpipe render compose` and `hetpipe render k8s`: files for whoever starts the containers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from hetpipe import __version__
from hetpipe.bundled import bundled_root
from hetpipe.cli.deploy.deployment import DeploymentOptions, describe, modules_of
from hetpipe.deploy.compose import compose_file
from hetpipe.deploy.kubernetes import CPU, AgentNodes, Overlay, groups_of_options, overlay_files, yaml_of
from hetpipe.deploy.kubernetes_secrets import APPLY_SECRETS
from hetpipe.deploy.secrets import give, operator_folder, write_secrets
from hetpipe.deploy.topology import submission_of
from hetpipe.errors import UserError
from hetpipe.job.file import Job, load_job
from hetpipe.report.text import shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.requests import new_run
from hetpipe.runs.shell import Shell
from hetpipe.server.agent.environment import check_wish, checked_allowed

#: Where an overlay has the manifests that are written along.
_OWN_MANIFESTS = "k8s"

#: What `render manifests` writes.
_MANIFESTS = ("docker-compose.yml", "deploy/compose", "k8s")

#: What the manifests let agents import without being told.
_ALLOWED_BY_MANIFESTS = ("model", "torch.*", "hetpipe.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """The options of `hetpipe render k8s`."""

    job: Path
    agents: tuple[str, ...]
    out: Path
    settings: tuple[str, ...] = ()
    image: str | None = None
    k8s: Path | None = None
    """The folder of the manifests; None: those that come with hetpipe are written along."""
    files: tuple[Path, ...] = ()
    allowed_environment: tuple[str, ...] = ()
    insecure: bool = False


def compose(options: DeploymentOptions, out: Path, output: Output, shell: Shell) -> ExitStatus:
    """Write a Compose file, and make the certificates that it shows the containers.

    Raises:
        UserError: options or the job cannot be used, or the file is there already or cannot be written.
    """
    if out.exists():
        raise UserError(f"{out} is there already; remove it, or name another file with --out")
    described = describe(options, output, shell)
    wishes, deployment = described.wishes, described.deployment
    files: dict[Path, str] = {}
    submission = None
    if described.request is not None and options.job is not None:
        job_file = options.job.absolute()
        if described.request.job != load_job(options.job):
            job_file = out.absolute().with_suffix(".job.yaml")
            files[job_file] = yaml_of(described.request.job)
        if not job_file.is_relative_to(shell.current):
            raise UserError(f"{job_file} is not below {shell.current}, which containers are shown; keep it there")
        submission = submission_of(wishes, deployment, str(job_file.relative_to(shell.current)))
    files[out] = compose_file(deployment, submission)
    write_secrets(wishes, [c.peer for c in deployment.containers if c.peer is not None])
    runs = Path(wishes.folders.runs)
    runs.mkdir(exist_ok=True)
    give(runs, wishes.user)
    _write(files)
    shown = shown_path(out.absolute(), shell.current)
    tls = f" --tls {operator_folder(wishes.folders.state)}" if wishes.tls else ""
    output.answer(
        {"files": list(map(str, files)), "services": [container.name for container in deployment.containers]},
        f"wrote {shown}: {described.summary}",
        f"start it with: docker compose -f {shown} up --detach",
        *([f"train the job with: docker compose -f {shown} run --rm {submission.name}"] if submission else []),
        f"hand other jobs in with: hetpipe submit JOB --coordinator 127.0.0.1:{wishes.port}{tls}",
    )
    return ExitStatus.OK


def kubernetes(options: KubernetesOptions, output: Output, shell: Shell) -> ExitStatus:
    """Write a Kustomize overlay for a job.

    Raises:
        UserError: options or the job cannot be used, or the folder is not empty or cannot be written.
    """
    _check_empty(options.out, "name a new folder with --out")
    if options.k8s is not None and not (options.k8s / "base").is_dir():
        raise UserError(
            f"there are no manifests in {options.k8s}; name a copy of hetpipe's folder k8s, or leave --k8s out"
        )
    k8s = options.out / _OWN_MANIFESTS if options.k8s is None else options.k8s
    job = new_run(options.job, options.settings, shell=shell).job
    check_wish(job.environment, checked_allowed(options.allowed_environment))
    groups = groups_of_options(options.agents)
    code = dict(_code(job, options.files, shell.current))
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
            _copy(bundled_root() / "k8s" / part, k8s / part)
    _write({options.out / path: content for path, content in files.items()})
    shown = shown_path(options.out.absolute(), shell.current)
    output.answer(
        {"folder": str(options.out), "files": sorted(files)},
        f"wrote {shown}: {', '.join(sorted(files))}",
        *_secret_steps(job, groups, k8s, tls=not options.insecure),
        f"start it with: kubectl apply -k {shown}",
    )
    return ExitStatus.OK


def manifests(out: Path, output: Output, shell: Shell) -> ExitStatus:
    """Write what comes with hetpipe: `docker-compose.yml` with its settings, and `k8s`.

    Raises:
        UserError: the folder is not empty or cannot be written, or this installation has none.
    """
    _check_empty(out, "name a new folder")
    for path in _MANIFESTS:
        _copy(bundled_root() / path, out / path)
    shown = shown_path(out.absolute(), shell.current)
    output.answer({"folder": str(out), "files": list(_MANIFESTS)}, f"wrote {shown}: {', '.join(_MANIFESTS)}")
    return ExitStatus.OK


def _check_empty(folder: Path, fix: str) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; {fix}")


def _copy(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    except (OSError, shutil.Error) as error:
        raise UserError(f"cannot write {target}: {error}; name another place") from error


def _secret_steps(job: Job, groups: Iterable[AgentNodes], k8s: Path, *, tls: bool) -> Iterator[str]:
    """What has to be in the cluster before the overlay: the namespace, and Secrets that no annotation repeats."""
    if tls:
        agents = [agent for group in groups for agent in group.agents]
        wanted = ["coordinator", "operator submit", "redis redis"]
        wanted += [f"parameter-server {index}" for index in range(job.parameter_servers.count)]
        wanted += [f"agent {agent}" for agent in agents]
        yield "make certificates and Secrets first, once:"
        yield "  hetpipe certs init certs"
        yield from (f"  hetpipe certs issue certs {peer}" for peer in wanted)
    else:
        yield "make the Secrets first, once: without TLS, the password of Redis alone"
        yield "  mkdir -m 700 certs"
    yield f"  kubectl apply -f {k8s / 'base' / 'namespace.yaml'}"
    yield f"  python -m hetpipe.deploy.kubernetes_secrets certs | {APPLY_SECRETS}"


def _code(job: Job, more: Iterable[Path], current: Path) -> Iterator[tuple[str, str]]:
    """The files below `current` that hold the modules of `job`, with those of the packages around them, and `more`."""
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


def _write(files: Mapping[Path, str]) -> None:
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; name another place with --out") from error
