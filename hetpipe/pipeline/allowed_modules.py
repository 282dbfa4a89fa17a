"""Which modules a job may have imported in this process, as the operator of its agent says. Without torch.

The list holds for the whole process and is given to it on its command line, by `--allow-modules` of the agent: so no
path through the code can forget to ask for it, and nothing that comes with a job can widen it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from hetpipe.errors import CallableError, UserError

#: The option of agents and of the processes that they start.
OPTION = "--allow-modules"

#: Modules that hetpipe has imported by itself, and that hold nothing but functions of tensors and layers. By name and
#: not by pattern: elsewhere in torch are functions that load files or fetch programs.
ALWAYS_ALLOWED = frozenset({"torch.nn", "torch.nn.functional", "hetpipe.pipeline.metrics"})

#: None: everything.
_patterns: tuple[str, ...] | None = None


def allow_only(patterns: Sequence[str]) -> None:
    """From now on, import no module for a job unless its full name matches one of `patterns` (`*`, `?`, `[…]`).

    Raises:
        UserError: a pattern is empty, or there is none.
    """
    global _patterns  # noqa: PLW0603 - the process's own property, set once at its start
    _patterns = checked_patterns(patterns)


def checked_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    """The same patterns.

    Raises:
        UserError: a pattern is empty, or there is none.
    """
    if not patterns or not all(patterns):
        raise UserError(f"{OPTION} is empty; name a module or a pattern, for example `{OPTION} 'my_project.*'`")
    return tuple(patterns)


def check_module(name: str, key: str) -> None:
    """Refuse a module that is not allowed.

    Args:
        name: its full name.
        key: the job's key that leads to it; begins the message.

    Raises:
        CallableError: it is not.
    """
    if _patterns is None or name in ALWAYS_ALLOWED or any(fnmatchcase(name, pattern) for pattern in _patterns):
        return
    raise CallableError(
        f"{key}: the module `{name}` is not among those that this node's agent imports "
        f"({', '.join(_patterns)}); have its operator add `{OPTION} {name}`"
    )


def check_attribute(name: str, key: str) -> None:
    """Refuse an attribute that leads behind what a module offers, where modules are limited.

    Raises:
        CallableError: it does.
    """
    if _patterns is not None and name.startswith("__"):
        raise CallableError(f"{key}: `{name}` is Python's own; with {OPTION}, name a function or class of the module")
