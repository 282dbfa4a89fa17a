"""Profile of a job's model, measured in a child process, the only one that imports the user's code."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetpipe.decide.planner.assembly import profile_for, reserve_for
from hetpipe.forking.environment import SINGLE_THREADED
from hetpipe.job.file import Job
from hetpipe.profiler.cache import cache_folder
from hetpipe.profiler.order import ProfileAnswer, ProfileOrder
from hetpipe.runs.child_answer import await_child
from hetpipe.runs.shell import Shell
from hetpipe.server.agent.child import ChildSpec
from hetpipe.server.agent.environment import child_environment
from hetpipe.values import wire
from hetpipe.values.measurement import CPU_TYPE, ProfileStep
from hetpipe.values.profile import Profile

#: Program of the measuring process; `--report-fd N` is added.
PROGRAM: tuple[str, ...] = (sys.executable, "-m", "hetpipe.server.agent.profile_process")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The parameters of profiling."""

    types: tuple[str, ...] = ()
    """Additional device types: measured if this machine has them, else estimated."""
    fresh: bool = False
    """Ignore the cache."""
    repeats: int | None = None
    """Samples per layer; None: as many as a stable median needs."""
    program: Sequence[str] = field(default=PROGRAM)


@dataclass(frozen=True, slots=True)
class Profiled:
    """A profile and its origin."""

    profile: Profile
    cached: Mapping[str, float]
    """Device types from the cache → time of measurement, in seconds since 1970-01-01 UTC."""
    reserve_bytes: int = 0
    """Memory of the framework per device, the maximum over the requested types of this machine."""


def profile_job(job: Job, wish: ProfileOptions, shell: Shell, on_step: Callable[[ProfileStep], None]) -> Profiled:
    """Measure the model of `job` on this machine, and estimate it on the other requested types.

    Args:
        job: the job; its user code is imported from the shell's current folder.
        wish: parameters of the profile.
        shell: the command's environment.
        on_step: called before each layer is measured, in this thread.

    Raises:
        UserError: a type is neither on this machine nor in the catalogue.
        CallableError, JobError: the user's code cannot be used.
        JobFailed: the measuring process died.
    """
    order = ProfileOrder(
        job=job.model_dump(mode="json"),
        import_path=str(shell.current),
        cache_folder=str(cache_folder(shell.environment)),
        with_cpu=CPU_TYPE in wish.types,
        fresh=wish.fresh,
        repeats=wish.repeats,
    )
    environment = child_environment(shell.environment, job.environment, None)
    answer = _ask(order, wish.program, environment, on_step)
    measured = {measurement.device_type: measurement.measured_at for measurement in answer.measurements}
    profile = profile_for(job, answer.measurements, wish.types)
    cached = {kind: measured[kind] for kind in answer.cached}
    return Profiled(profile, cached, reserve_for(answer.measurements, wish.types))


def _ask(
    order: ProfileOrder,
    program: Sequence[str],
    environment: Mapping[str, str],
    on_step: Callable[[ProfileStep], None],
) -> ProfileAnswer:
    def on_message(message: dict[str, Any]) -> None:
        if "step" in message:
            on_step(wire.revive(ProfileStep, message["step"]))

    with tempfile.TemporaryDirectory(prefix="hetpipe-profile-") as folder:
        spec = ChildSpec(
            name="profile",
            command=program,
            first_line=wire.to_json(ProfileOrder, order),
            environment={**environment, **SINGLE_THREADED},
            log_path=Path(folder) / "profile.out",
        )
        answer: ProfileAnswer = wire.revive(
            ProfileAnswer, await_child(spec, "the process that measures the model", on_message)
        )
        return answer
