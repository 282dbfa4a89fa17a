"""The allowlist of modules that jobs may import in this process, set by the operator of the agent. Without torch.

The list is process-wide and set on the command line by the agent's `--allow-modules`: no code path can bypass it, and
no job can extend it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from hetpipe.errors import CallableError, UserError

#: Option of agents and of the processes they start.
OPTION = "--allow-modules"

#: Modules that hetpipe itself imports and that define functions on tensors and layers only. Exact names rather than
#: patterns: other modules of torch have functions that load files or download code.
ALWAYS_ALLOWED = frozenset({"torch.nn", "torch.nn.functional", "hetpipe.pipeline.metrics"})

#: Allowed patterns; None allows everything.
_patterns: tuple[str, ...] | None = None


def allow_only(patterns: Sequence[str]) -> None:
    """Restrict imports on behalf of jobs to modules whose full name matches one of `patterns` (`*`, `?`, `[…]`).

    Raises:
        UserError: `patterns` is empty or contains an empty pattern.
    """
    global _patterns  # noqa: PLW0603 - the process's own property, set once at its start
    _patterns = checked_patterns(patterns)


def checked_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    """Validate `patterns` and return them.

    Raises:
        UserError: `patterns` is empty or contains an empty pattern.
    """
    if not patterns or not all(patterns):
        raise UserError(f"{OPTION} is empty; name a module or a pattern, for example `{OPTION} 'my_project.*'`")
    return tuple(patterns)


def check_module(name: str, key: str) -> None:
    """Check that a module is allowed.

    Args:
        name: full name of the module.
        key: the job key that refers to it; begins the message.

    Raises:
        CallableError: it is not allowed.
    """
    if _patterns is None or name in ALWAYS_ALLOWED or any(fnmatchcase(name, pattern) for pattern in _patterns):
        return
    raise CallableError(
        f"{key}: the module `{name}` is not among those that this node's agent allows "
        f"({', '.join(_patterns)}); have its operator add `{OPTION} {name}`"
    )


def check_attribute(name: str, key: str) -> None:
    """Reject attributes through which code outside the allowed modules can be reached, if there is an allowlist.

    Raises:
        CallableError: `name` is such an attribute.
    """
    if _patterns is not None and name.startswith("__"):
        raise CallableError(f"{key}: `{name}` is Python's own; with {OPTION}, name a function or class of the module")
