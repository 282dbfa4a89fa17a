"""Which arguments of the optimizer does a parameter have? Groups are told by patterns of names (`optimizer.groups`).

The groups are those of the job, in its order, and behind them the one of all parameters that no pattern matches. That
is also the order in which a schedule takes a list of values, one per group.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from hetpipe.job.file import OptimizerSpec
from hetpipe.job.training import ArgumentValue


def members_of(spec: OptimizerSpec, names: Iterable[str]) -> dict[int, list[str]]:
    """Group → its parameters among `names`, in their order; groups without any are left out.

    A parameter belongs to the first group that has a matching pattern.

    >>> groups = ({"parameters": ("*.bias", "norm?.*"), "weight_decay": 0.0},)
    >>> spec = OptimizerSpec.model_validate({"name": "AdamW", "groups": groups})
    >>> members_of(spec, ["0.weight", "0.bias", "norm1.weight"])
    {1: ['0.weight'], 0: ['0.bias', 'norm1.weight']}
    """
    members: dict[int, list[str]] = {}
    for name in names:
        members.setdefault(_group_of(spec, name), []).append(name)
    return members


def overrides_of(spec: OptimizerSpec) -> tuple[dict[str, ArgumentValue], ...]:
    """What differs from the optimizer's arguments, per group; nothing in the last one."""
    return (*(group.arguments for group in spec.groups), {})


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern (`*`, `?`, `[…]`) is of a parameter's name; case matters.

    >>> matches("*.bias", "layers.0.bias"), matches("*.Bias", "layers.0.bias")
    (True, False)
    """
    return fnmatchcase(name, pattern)


def _group_of(spec: OptimizerSpec, name: str) -> int:
    for index, group in enumerate(spec.groups):
        if any(matches(pattern, name) for pattern in group.parameters):
            return index
    return len(spec.groups)
