"""The environment variables of a process that runs user code. Pure; values are never inspected.

A job gets a variable by inheriting it from the agent (`environment.inherit`) or by setting it (`environment.set`).
Where jobs come from other machines, the operator's list must also permit it. Variables that every program needs, and
hetpipe's own, are always passed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from hetpipe.errors import UserError
from hetpipe.job.sections import EnvironmentSection

#: The option of agents.
OPTION = "--allow-environment"

#: Variables of the agent's environment that every process inherits.
ALWAYS = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "HOSTNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_*", "XDG_*", "SSL_CERT_*", "COVERAGE_*"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "GRPC_*", "TORCH_*", "PYTORCH_*", "OMP_*", "MKL_*", "MALLOC_*"),
    "HETPIPE_*",
)


def child_environment(
    own: Mapping[str, str], section: EnvironmentSection, allowed: Sequence[str] | None
) -> dict[str, str]:
    """The environment of a process that runs a job's code, before its agent's additions.

    Args:
        own: the agent's environment.
        section: the job's section `environment`.
        allowed: patterns of names that jobs may inherit and set here; None: any, and by default all are inherited.

    Raises:
        UserError: the job names a variable that is not allowed here; the message has no values.
    """
    check_allowed(section, allowed)
    unless_said: tuple[str, ...] = ("*",) if allowed is None else ()
    inherited = unless_said if section.inherit is None else section.inherit
    kept = {
        name: value
        for name, value in own.items()
        if _matches(name, ALWAYS) or (_matches(name, inherited) and (allowed is None or _matches(name, allowed)))
    }
    return {**kept, **section.set}


def missing(own: Mapping[str, str], section: EnvironmentSection) -> tuple[str, ...]:
    """Names that a job inherits and that are not set here; patterns match the set ones."""
    return tuple(name for name in section.inherit or () if not is_pattern(name) and name not in own)


def checked_allowed(patterns: Sequence[str]) -> tuple[str, ...]:
    """Validate patterns; returns them unchanged.

    Raises:
        UserError: a pattern is empty.
    """
    if not all(patterns):
        raise UserError(f"{OPTION} is empty; name a variable or a pattern, for example `{OPTION} 'WANDB_*'`")
    return tuple(patterns)


def is_pattern(name: str) -> bool:
    """Whether an entry of a list is a pattern.

    >>> is_pattern("WANDB_*"), is_pattern("HF_HOME")
    (True, False)
    """
    return not {"*", "?", "["}.isdisjoint(name)


def passed_on(allowed: Sequence[str]) -> tuple[str, ...]:
    """The variables of a list to pass to an agent's container: neither patterns nor variables that every program has.

    >>> passed_on(["HF_HOME", "WANDB_*", "PATH"])
    ('HF_HOME',)
    """
    return tuple(name for name in allowed if not is_pattern(name) and not _matches(name, ALWAYS))


def check_allowed(section: EnvironmentSection, allowed: Sequence[str] | None) -> None:
    """Reject a job that names a variable outside `allowed`; None: all are allowed.

    Raises:
        UserError: naming the variable and the option; without values.
    """
    if allowed is None:
        return
    named = {f"environment.inherit: {name}": name for name in section.inherit or ()}
    named |= {f"environment.set: {name}": name for name in section.set}
    for where, name in named.items():
        if not _matches(name, allowed) and not _matches(name, ALWAYS):
            listed = f"those that this node's agent passes on ({', '.join(allowed)})" if allowed else "any it passes on"
            raise UserError(f"{where} is not among {listed}; have its operator add `{OPTION} '{name}'`, or remove it")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
