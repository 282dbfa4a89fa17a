"""Parameter groups of the optimizer, selected by patterns of parameter names (`optimizer.groups`).

The groups are those of the job, in its order, followed by the group of all parameters that no pattern matches. A
schedule with a list of values, one per group, uses the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from hetpipe.job.file import OptimizerSpec
from hetpipe.job.training import ArgumentValue


def members_of(spec: OptimizerSpec, names: Iterable[str]) -> dict[int, list[str]]:
    """Group → its parameters among `names`, in their order; empty groups are omitted.

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
    """The options that differ from the optimizer's arguments, per group; empty for the last one."""
    return (*(group.arguments for group in spec.groups), {})


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern (`*`, `?`, `[…]`) matches a parameter's name; case-sensitive.

    >>> matches("*.bias", "layers.0.bias"), matches("*.Bias", "layers.0.bias")
    (True, False)
    """
    return fnmatchcase(name, pattern)


def _group_of(spec: OptimizerSpec, name: str) -> int:
    for index, group in enumerate(spec.groups):
        if any(matches(pattern, name) for pattern in group.parameters):
            return index
    return len(spec.groups)
