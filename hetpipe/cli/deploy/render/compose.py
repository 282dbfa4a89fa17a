"""`hetpipe render compose`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.deploy.deployment import DeploymentOptions, describe
from hetpipe.cli.deploy.render.files import write
from hetpipe.cli.options import Json
from hetpipe.deploy.compose import compose_file
from hetpipe.deploy.kubernetes import yaml_of
from hetpipe.deploy.secrets import give, operator_folder, write_secrets
from hetpipe.deploy.topology import submission_of
from hetpipe.errors import UserError
from hetpipe.job.file import load_job
from hetpipe.report.text import shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(DeploymentOptions):
    """Write the cluster of `hetpipe up` as a Compose file. Creates its certificates, too."""

    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path("compose.yaml")
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Write a Compose file, and create the certificates that it mounts.

    Raises:
        UserError: options or the job cannot be used, or the file already exists or cannot be written.
    """
    out = options.out
    if out.exists():
        raise UserError(f"{out} already exists; remove it, or name another file with --out")
    described = describe(options, output, shell)
    spec, deployment = described.spec, described.deployment
    files: dict[Path, str] = {}
    submission = None
    if described.request is not None and options.job is not None:
        job_file = options.job.absolute()
        if described.request.job != load_job(options.job):
            job_file = out.absolute().with_suffix(".job.yaml")
            files[job_file] = yaml_of(described.request.job)
        if not job_file.is_relative_to(shell.current):
            raise UserError(
                f"{job_file} is not below {shell.current}, which is mounted in the containers; move it there"
            )
        submission = submission_of(spec, deployment, str(job_file.relative_to(shell.current)))
    files[out] = compose_file(deployment, submission)
    write_secrets(spec, [c.peer for c in deployment.containers if c.peer is not None])
    runs = Path(spec.folders.runs)
    runs.mkdir(exist_ok=True)
    give(runs, spec.user)
    write(files)
    shown = shown_path(out.absolute(), shell.current)
    tls = f" --tls {operator_folder(spec.folders.state)}" if spec.tls else ""
    output.answer(
        {"files": list(map(str, files)), "services": [container.name for container in deployment.containers]},
        f"wrote {shown}: {described.summary}",
        f"start it with: docker compose -f {shown} up --detach",
        *([f"train the job with: docker compose -f {shown} run --rm {submission.name}"] if submission else []),
        f"submit other jobs with: hetpipe submit JOB --coordinator 127.0.0.1:{spec.port}{tls}",
    )
    return ExitStatus.OK
