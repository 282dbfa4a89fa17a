"""`hetpipe render slurm`: a batch script for Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from hetpipe.cli.options import JobFile, Settings
from hetpipe.deploy.slurm import Allocation, batch_script
from hetpipe.errors import UserError
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.requests import new_run
from hetpipe.runs.shell import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Write a batch script for Slurm. It trains the job on the nodes of its allocation, by `hetpipe launch`."""

    job: JobFile
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Nodes.")] = 1
    gpus: Annotated[int, typer.Option(min=0, metavar="N", help="GPUs per node.")] = 0
    cpu_devices: Annotated[int, typer.Option(min=0, metavar="N", help="CPU devices per node, instead of GPUs.")] = 0
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS, for networks in which everyone is trusted.")
    ] = False
    settings: Settings = ()


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Print a script.

    Raises:
        UserError: the job cannot be used, or the options name no devices.
    """
    if bool(options.gpus) == bool(options.cpu_devices):
        raise UserError("name the devices of a node: either --gpus N or --cpu-devices N")
    job = new_run(options.job, options.settings, resume=None, coordinator="", shell=shell).job
    launched = [
        str(options.job),
        *(part for setting in options.settings for part in ("--set", setting)),
        *(["--insecure"] if options.insecure else []),
    ]
    allocation = Allocation(nodes=options.nodes, gpus=options.gpus, cpu_devices=options.cpu_devices)
    output.say(batch_script(job.name, launched, allocation).rstrip())
    return ExitStatus.OK
