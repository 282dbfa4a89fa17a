"""Validation of the job's optimizer and learning-rate schedule: existing classes of torch, valid arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetpipe.errors import JobError
from hetpipe.job.file import Job, LrScheduleSpec, OptimizerSpec
from hetpipe.pipeline.callables import load_callable
from hetpipe.values.suggest import did_you_mean
from hetpipe.weights.lr_schedule import GroupOptions
from hetpipe.weights.optimizer_class import optimizer_class
from hetpipe.weights.optimizer_trial import check_own_optimizer
from hetpipe.weights.parameter_groups import matches, members_of
from hetpipe.weights.prediction import check_predictable

#: Options of torch's optimizers that only apply outside pipelines, with the reason.
_REFUSED_SWITCHES: Mapping[str, str] = {
    "capturable": "it is for CUDA graphs, which a pipeline does not record; remove it",
    "differentiable": "nothing here differentiates through a step; remove it",
}

#: Limit on the parameter names shown as examples in a message.
_SHOWN_NAMES = 3


def check_optimization(job: Job, import_path: Path) -> None:
    """Check the job's update settings as far as possible without its model.

    Raises:
        JobError: invalid optimizer, groups, policy or schedule; with the path in the job.
        CallableError: a callable of the schedule cannot be loaded.
    """
    kind = check_optimizer_arguments(job.optimizer, import_path)
    check_predictable(kind, job.optimizer.name, job.weights)
    if job.lr_schedule is not None:
        check_lr_schedule(job.lr_schedule, job.optimizer, import_path)


def check_optimizer_arguments(spec: OptimizerSpec, import_path: Path | None = None) -> type[torch.optim.Optimizer]:
    """Check arguments that the class would reject in every stage, and the user's own classes.

    Args:
        spec: optimizer section of the job.
        import_path: the user's folder, for classes of the user; None if user code must not be imported here.

    Raises:
        JobError: lists every unknown argument, or else the class's error about the values.
        CallableError: the user's module cannot be used.
    """
    kind = check_optimizer_names(spec, import_path)
    refusal = _refusal(kind, spec.arguments)
    if refusal is not None:
        raise JobError(f"optimizer: {spec.name} rejects its arguments: {refusal}")
    problems = [
        problem
        for index, group in enumerate(spec.groups)
        for problem in _refused_in_group(kind, f"optimizer.groups[{index}]", spec.arguments, group.arguments)
    ]
    if problems:
        raise JobError(problems)
    if spec.is_own:
        for own in ({}, *(group.arguments for group in spec.groups)):
            check_own_optimizer(kind, spec.name, {**spec.arguments, **own})
    return kind


def check_optimizer_names(spec: OptimizerSpec, import_path: Path | None = None) -> type[torch.optim.Optimizer]:
    """Check the names of arguments; returns the class. Creates no optimizer, which takes torch a second.

    Args:
        spec: optimizer section of the job.
        import_path: the user's folder, for classes of the user; None if user code must not be imported here.

    Raises:
        JobError: lists every unknown argument, or the class does not exist.
        CallableError: the user's module cannot be used.
    """
    kind = optimizer_class(spec, None if import_path is None else partial(load_callable, import_path=import_path))
    given = {"optimizer": spec.arguments}
    given |= {f"optimizer.groups[{index}]": group.arguments for index, group in enumerate(spec.groups)}
    problems = [problem for path, arguments in given.items() for problem in _unknown(kind, path, arguments)]
    if problems:
        raise JobError(problems)
    return kind


def _unknown(kind: type[torch.optim.Optimizer], path: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    # The first parameter receives the model's parameters, whatever its name.
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    allowed = [parameter.name for parameter in parameters]
    for name in arguments:
        if name not in allowed and not takes_any:
            yield f"{path}.{name}: {kind.__name__} has no such argument; {did_you_mean(name, allowed)}"
    for name, reason in _REFUSED_SWITCHES.items():
        if arguments.get(name) and kind.__module__.startswith("torch."):
            yield f"{path}.{name}: is not supported: {reason}"


def _refused_in_group(
    kind: type[torch.optim.Optimizer], path: str, arguments: Mapping[str, Any], own: Mapping[str, Any]
) -> Iterator[str]:
    """Arguments of a group that the class rejects as arguments of its own; torch checks groups too late."""
    together = _refusal(kind, {**arguments, **own})
    if together is None:
        return
    alone = {name: _refusal(kind, {**arguments, name: value}) for name, value in own.items()}
    blamed = {name: refusal for name, refusal in alone.items() if refusal is not None}
    for name, refusal in blamed.items():
        yield f"{path}.{name}: {kind.__name__} rejects it: {refusal}"
    if not blamed:
        yield f"{path}: {kind.__name__} rejects its arguments: {together}"


def _refusal(kind: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> str | None:
    """The class's error about the arguments; None if it accepts them."""
    try:
        # A matrix, because Muon accepts nothing else.
        kind([nn.Parameter(torch.zeros(2, 2))], **arguments)
    except Exception as error:  # noqa: BLE001 - the class may be the user's
        return str(error)
    return None


def check_lr_schedule(schedule: LrScheduleSpec, optimizer: OptimizerSpec, import_path: Path) -> None:
    """Check a schedule for errors that torch would raise in every stage.

    Args:
        schedule: the learning-rate schedule.
        optimizer: the optimizer, already validated.
        import_path: the user's folder, for its callables.

    Raises:
        JobError: names the path in the job and the class's error.
        CallableError: a callable cannot be loaded.
    """
    options = GroupOptions(optimizer, schedule, partial(load_callable, import_path=import_path))
    # Some schedules only divide by their arguments here.
    options.advance()


def check_groups(spec: OptimizerSpec, parameter_names: Sequence[str]) -> None:
    """Check that every group matches parameters of the model.

    Raises:
        JobError: lists patterns without a match, and groups whose parameters all belong to earlier ones.
    """
    members = members_of(spec, parameter_names)
    problems: list[str] = []
    for index, group in enumerate(spec.groups):
        path = f"optimizer.groups[{index}].parameters"
        idle = [pattern for pattern in group.parameters if not any(matches(pattern, name) for name in parameter_names)]
        problems += [
            f"{path}: no parameter matches {pattern!r}; there are {_names_like(pattern, parameter_names)}"
            for pattern in idle
        ]
        if not idle and index not in members:
            problems.append(
                f"{path}: every parameter that matches belongs to an earlier group, and the first match applies; move "
                "this group before it, or remove it"
            )
    if problems:
        raise JobError(problems)


def _names_like(pattern: str, names: Sequence[str]) -> str:
    """Examples of the names, similar ones if possible."""
    shown = difflib.get_close_matches(pattern, names, n=_SHOWN_NAMES) or names[:_SHOWN_NAMES]
    return ", ".join(sorted(shown)) + (" …" if len(names) > len(shown) else "")
