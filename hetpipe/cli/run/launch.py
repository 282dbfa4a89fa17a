"""`hetpipe launch`: train a job on several machines that ssh reaches and that share a file system.

The coordinator and the parameter servers run on this machine, an agent on each host. All of them end with the command:
an agent ends when its ssh connection does.
"""

from __future__ import annotations

import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.deploy.deployment import modules_of
from hetpipe.cli.operate.certs.authority import check_installed
from hetpipe.cli.options import JobOrResume, Json, NewRunDir, Resume, Settings
from hetpipe.cli.run.following import follow
from hetpipe.errors import UserError
from hetpipe.forking.environment import SERVICE_ENVIRONMENT
from hetpipe.report.text import count, shown_path
from hetpipe.runs.host_check import check_hosts
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.remote import HostSpec, RemoteShell, hosts_of
from hetpipe.runs.requests import new_run
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.shell import Shell
from hetpipe.runs.supervisor import Programs, RemoteAgent, Services, Supervisor
from hetpipe.runs.training import RunRequest
from hetpipe.server.agent.devices import DeviceOffer
from hetpipe.values.identity import NamedPeer, Role
from hetpipe.values.storage_url import is_url

#: Folder of the certificates, in that of the run.
_CERTIFICATES = "certs"

#: A run of months.
_CERTIFICATE_DAYS = 365.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Train a job on several machines, through ssh. They share a file system, with this environment and the code."""

    job: JobOrResume = None
    hosts: Annotated[
        str, typer.Option(metavar="HOST[:N],…", help="Machines to train on; N: CPU devices.  [default N: the GPUs]")
    ]
    advertise: Annotated[
        str | None, typer.Option(metavar="NAME", help="This machine's name for the hosts.  [default: its host name]")
    ] = None
    ssh: Annotated[str, typer.Option(metavar="COMMAND", help="Called with a host and a command for its shell.")] = (
        "ssh -o BatchMode=yes"
    )
    python: Annotated[str, typer.Option(metavar="PATH", help="Python on the hosts.", show_default="this one")] = (
        sys.executable
    )
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS, for networks in which everyone is trusted.")
    ] = False
    settings: Settings = ()
    run_dir: NewRunDir = None
    resume: Resume = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Start the services, follow the job to its end, and end them.

    Raises:
        UserError: options or the job cannot be used, or a host cannot.
        JobFailed, DeadlineExceeded: the coordinator does not start.
    """
    hosts = hosts_of(options.hosts)
    ssh = tuple(shlex.split(options.ssh))
    if not ssh:
        raise UserError("--ssh is empty; name a command like ssh")
    name = options.advertise or socket.gethostname()
    # The address is known once the coordinator has started.
    request = new_run(options.job, options.settings, resume=options.resume, coordinator="", shell=shell)
    folder = RunFolder.create(options.run_dir, name=request.job.name, clock=shell.clock)
    try:
        check_hosts([RemoteShell(ssh, host.name, str(shell.current)) for host in hosts], options.python, folder.path)
    except UserError:
        folder.discard()
        raise
    tls = _NoTls() if options.insecure else _certificates(folder.path / _CERTIFICATES, request, hosts)
    services = Services(
        num_shards=request.job.parameter_servers.count,
        devices=DeviceOffer(),
        logs=folder.logs,
        state=folder.state,
        programs=_programs(shell.programs, name, request, folder, tls),
        shard_options=lambda index: tls.options(Role.PARAMETER_SERVER, str(index)),
        agents=[_agent(host, options.python, ssh, request, folder, tls, shell) for host in hosts],
        patience_seconds=request.job.patience.members.total_seconds(),
    )
    output.say(
        f"starting 1 coordinator and {count(services.num_shards, 'parameter server')} on this machine ({name}), and an "
        f"agent on each of {', '.join(host.name for host in hosts)}; their logs are in "
        f"{shown_path(folder.logs, shell.current)}"
    )
    try:
        with Supervisor(
            services,
            environment=shell.environment,
            on_death=lambda death: output.note(str(death)),
            on_restart=lambda restart: output.note(str(restart)),
            clock=shell.clock,
        ) as supervisor:
            address = supervisor.start()
            shell = replace(shell, tls=tls.folder(Role.OPERATOR, "launch"))
            request = replace(request, coordinator=address, resumed_by=resuming_command(options))
            return follow(request, folder, output, shell)
    finally:
        shutil.rmtree(folder.path / _CERTIFICATES, ignore_errors=True)  # of no further use


def resuming_command(options: Options) -> str:
    """The command with what is about the hosts, to resume a run on them.

    >>> resuming_command(Options(hosts="a,b:2", ssh="ssh -p 23"))
    "hetpipe launch --hosts a,b:2 --ssh 'ssh -p 23'"
    """
    default = Options(hosts=options.hosts)
    words = ["hetpipe", "launch", "--hosts", options.hosts]
    for name in ("advertise", "ssh", "python"):
        if getattr(options, name) != getattr(default, name):
            words += [f"--{name}", getattr(options, name)]
    return shlex.join([*words, *(["--insecure"] if options.insecure else [])])


def _programs(programs: Programs, name: str, request: RunRequest, folder: RunFolder, tls: _NoTls) -> Programs:
    listening = ("--host", "0.0.0.0", "--advertise", name, *_run_roots(request, folder))  # noqa: S104 - for the hosts
    return replace(
        programs,
        coordinator=(*programs.coordinator, *listening, *tls.options(Role.COORDINATOR, Role.COORDINATOR)),
        parameter_server=(*programs.parameter_server, *listening),
    )


def _agent(
    host: HostSpec,
    python: str,
    ssh: tuple[str, ...],
    request: RunRequest,
    folder: RunFolder,
    tls: _NoTls,
    shell: Shell,
) -> RemoteAgent:
    offered = () if host.num_cpu_devices is None else ("--cpu-devices", str(host.num_cpu_devices))
    allowed = [part for module in modules_of(request.job) for part in ("--allow-modules", module)]
    environment = [f"{name}={value}" for name, value in SERVICE_ENVIRONMENT.items()]
    command = (
        *("env", *environment, python, "-m", "hetpipe.launch", "hetpipe", "serve", "agent"),
        *("--node", host.name, "--host", host.name, *offered, *allowed, "--allow-environment", "*"),
        *("--code-root", str(request.import_path), *_run_roots(request, folder), *tls.options(Role.AGENT, host.name)),
    )
    return RemoteAgent(shell=RemoteShell(ssh, host.name, str(shell.current)), command=command)


def _run_roots(request: RunRequest, folder: RunFolder) -> Sequence[str]:
    roots = ["--run-root", str(folder.path)]
    if request.restore is not None and not is_url(request.restore):
        roots += ["--run-root", str(Path(request.restore).parent)]
    return roots


class _NoTls:
    """Plaintext."""

    def options(self, role: Role, name: str) -> Sequence[str]:
        """The options of a process."""
        del role, name
        return ("--insecure",)

    def folder(self, role: Role, name: str) -> Path | None:
        """The certificates of a process."""
        del role, name
        return None


class _Certificates(_NoTls):
    """Certificates of an authority of the run's own, in its folder, which all hosts have."""

    def __init__(self, authority: Path) -> None:
        self._authority = authority

    def options(self, role: Role, name: str) -> Sequence[str]:
        return ("--tls", str(self.folder(role, name)))

    def folder(self, role: Role, name: str) -> Path:
        from hetpipe.certs.files import process_folder

        return process_folder(self._authority, NamedPeer(role, name))


def _certificates(authority: Path, request: RunRequest, hosts: Sequence[HostSpec]) -> _Certificates:
    check_installed()
    from hetpipe.certs.folders import init_authority, issue_certificate

    init_authority(authority)
    peers = [NamedPeer(Role.COORDINATOR, Role.COORDINATOR), NamedPeer(Role.OPERATOR, "launch")]
    peers += [NamedPeer(Role.PARAMETER_SERVER, str(index)) for index in range(request.job.parameter_servers.count)]
    peers += [NamedPeer(Role.AGENT, host.name) for host in hosts]
    for peer in peers:
        issue_certificate(authority, peer, days=_CERTIFICATE_DAYS)
    return _Certificates(authority)
