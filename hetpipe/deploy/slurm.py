"""Slurm: the batch script that trains a job on the nodes of its allocation.

It runs `hetpipe launch` on the first node, with `srun` in place of ssh.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

#: Called with a host and a command for its shell, like ssh.
_SRUN = """bash -c 'exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$0" sh -c "$1"'"""

#: Time between the signal and the end of the allocation, in which the run reaches a barrier and writes its checkpoint.
_NOTICE_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Equal nodes of a Slurm cluster, either with GPUs or with CPU devices."""

    nodes: int
    gpus: int = 0
    """Per node; 0: CPU devices are used."""
    cpu_devices: int = 0
    """Per node; 0: GPUs are used."""


def batch_script(name: str, launched: Sequence[str], allocation: Allocation) -> str:
    """The script for `sbatch`.

    Args:
        name: of the job in the queue.
        launched: arguments of `hetpipe launch` other than `--hosts` and `--ssh`.
        allocation: the nodes to request.
    """
    per_node = f"gpus-per-node={allocation.gpus}" if allocation.gpus else f"cpus-per-task={allocation.cpu_devices}"
    offered = f" | sed 's/$/:{allocation.cpu_devices}/'" if allocation.cpu_devices else ""
    return f"""#!/bin/bash
#SBATCH --job-name={shlex.quote(name)}
#SBATCH --nodes={allocation.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --{per_node}
#SBATCH --signal=B:INT@{_NOTICE_SECONDS}
# {_NOTICE_SECONDS // 60} minutes before the end of the allocation SIGINT stops the run at a barrier, with a checkpoint.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST"{offered} | paste -sd,)
srun={shlex.quote(_SRUN)}
hetpipe launch {shlex.join(launched)} --hosts "$hosts" --ssh "$srun" &
run=$!
trap 'kill -INT $run' INT
wait $run  # ends at the signal, too
wait $run  # the exit status of the run
"""
