"""`hetpipe up`: run a job in a cluster of containers on this machine.

Without a job, or with `--detach`, the containers run until `hetpipe down`. Otherwise they are removed when the command
ends, also on an error; the run's folder is kept, with the containers' logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.deploy.deployment import DeploymentOptions, Described, describe
from hetpipe.cli.options import Json, NewRunDir
from hetpipe.cli.run.following import follow, hand_in
from hetpipe.deploy.container_logs import save_logs
from hetpipe.deploy.engine import Engine, answering
from hetpipe.deploy.labels import DEFAULT_PROJECT
from hetpipe.deploy.secrets import give, operator_folder, remove_secrets, write_secrets
from hetpipe.report.text import shown_path
from hetpipe.runs.interrupts import Interrupts
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.shell import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(DeploymentOptions):
    """Train a job in containers on this machine. One container per virtual worker, with access to its GPUs only."""

    run_dir: NewRunDir = None
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Resume from the newest checkpoint of that run: its folder or URL."),
    ] = None
    detach: Annotated[bool, typer.Option("--detach", help="Leave the containers running; do not follow the job.")] = (
        False
    )
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Start the containers and, unless detached, train the job and remove them.

    Raises:
        UserError: there is no Docker engine, an image is missing, or options or the job cannot be used.
        JobFailed, DeadlineExceeded: a container does not start, or cannot be removed.
    """
    # First, because everything else may take minutes.
    client = shell.open_docker(shell.environment)
    try:
        engine = Engine(client, clock=shell.clock, say=output.say, environment=shell.environment)
        described = describe(options, output, shell, run_dir=options.run_dir, resume=options.resume)
        engine.check(described.deployment)
        with answering(), Interrupts() as interrupts:
            return _Up(options, described, engine, interrupts).run(output, shell)
    finally:
        client.close()


class _Up:
    """One call of the command, with the containers' description."""

    def __init__(self, options: Options, described: Described, engine: Engine, interrupts: Interrupts) -> None:
        self._options = options
        self._described = described
        self._engine = engine
        self._interrupts = interrupts
        self._spec = described.spec

    def run(self, output: Output, shell: Shell) -> ExitStatus:
        if self._spec.tls:
            shell = replace(shell, tls=operator_folder(self._spec.folders.state))
        request = self._described.request
        if request is None:
            Path(self._spec.folders.runs).mkdir(exist_ok=True)
            with self._containers(output, logs=None, stay=True):
                return self._leave(output, shell)
        folder = RunFolder.create(self._options.run_dir, name=request.job.name, clock=shell.clock)
        give(folder.path, self._spec.user)
        with self._containers(output, logs=folder.logs, stay=self._options.detach):
            if self._options.detach:
                hand_in(request, folder, output, shell)
                return self._leave(output, shell)
            return follow(request, folder, output, shell)

    @contextmanager
    def _containers(self, output: Output, *, logs: Path | None, stay: bool) -> Iterator[None]:
        """Start the containers; remove them at the end of the block, or if detached only after an error."""
        deployment = self._described.deployment
        write_secrets(self._spec, [c.peer for c in deployment.containers if c.peer is not None])
        output.say(f"starting {self._described.summary}")
        done = False
        try:
            self._engine.start(deployment)
            yield
            done = True
        finally:
            if not (done and stay):
                # No process remains to be signalled, and a partial removal is useless.
                self._interrupts.listen(lambda _: None)
                self._remove(output, logs)
                if logs is not None and not done:
                    output.say(f"the logs of the containers are in {logs}")

    def _remove(self, output: Output, logs: Path | None) -> None:
        project = self._spec.project
        output.say("removing the containers")
        try:
            if logs is not None:
                save_logs(self._engine.containers(project), logs)
        finally:
            self._engine.remove(project)
            remove_secrets(Path(self._spec.folders.state))

    def _leave(self, output: Output, shell: Shell) -> ExitStatus:
        """Print the next commands."""
        address = f"127.0.0.1:{self._spec.port}"
        tls = "" if shell.tls is None else f" --tls {shown_path(shell.tls, shell.current)}"
        project = "" if self._spec.project == DEFAULT_PROJECT else f" --project {self._spec.project}"
        states = self._engine.states(self._spec.project)
        output.answer(
            {
                "project": self._spec.project,
                "coordinator": address,
                "tls": None if shell.tls is None else str(shell.tls),
                "containers": [asdict(state) for state in states],
            },
            f"submit a job with: hetpipe submit JOB --coordinator {address}{tls}",
            f"show its status with: hetpipe status --coordinator {address}{tls}",
            f"remove the cluster with: hetpipe down{project}",
        )
        return ExitStatus.OK
