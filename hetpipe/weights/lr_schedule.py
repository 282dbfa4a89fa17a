"""Learning-rate schedules: learning rate, momentum and so on of every parameter group, by update number.

Any schedule of `torch.optim.lr_scheduler` can be used. It operates on a proxy: an optimizer of the job's class with the
job's groups but no elements in its parameters. Every stage thus has every group, including those without parameters on
the stage, and a schedule with one value per group takes the same list everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from hetpipe.errors import JobError
from hetpipe.job.file import LrScheduleSpec, OptimizerSpec
from hetpipe.observe.log import get_logger
from hetpipe.values.suggest import did_you_mean
from hetpipe.weights.optimizer_class import CallableLoader, optimizer_class
from hetpipe.weights.parameter_groups import overrides_of

_log = get_logger(__name__)

#: The job's key; prefix of every message.
KEY = "lr_schedule"

#: Arguments that are callables; a job names them as `module:callable`.
_CALLABLES = ("lr_lambda", "scale_fn")

#: Arguments set by hetpipe, not by the user.
_GIVEN = ("self", "optimizer", "last_epoch")

#: Unsupported schedules, with the reason and an alternative.
_REFUSED: Mapping[str, str] = {
    "ReduceLROnPlateau": "it depends on a metric, but the learning rate depends only on the update number, which all "
    "stages know; use CosineAnnealingLR or MultiStepLR",
    "SWALR": "it requires averaged weights, which are not kept here; use CosineAnnealingLR",
    "LRScheduler": "it is the base of the others and has no rate of its own; use LambdaLR with an `lr_lambda`",
}


class OneCycleLR(lr_scheduler.OneCycleLR):
    """torch's `OneCycleLR`, but it keeps its final value after its last update.

    torch raises an error instead. Here the number of updates of a virtual worker is not known in advance: it makes more
    when others die or leave, because it takes over their samples, and fewer when others join.
    """

    _is_over = False

    def step(self, epoch: int | None = None) -> None:
        """Advance by one update, or to a given one."""
        if (self.last_epoch + 1 if epoch is None else epoch) < self.total_steps:
            super().step(epoch)
        elif not self._is_over:
            self._is_over = True
            _log.warning("lr_schedule_is_over", total_steps=self.total_steps)


class GroupOptions:
    """The options of every parameter group for the next update. Not thread-safe.

    Attributes:
        num_updates: updates so far; the next one has this number, counted from 0.
    """

    def __init__(
        self, optimizer: OptimizerSpec, schedule: LrScheduleSpec | None = None, load: CallableLoader | None = None
    ) -> None:
        """Start before the first update.

        Args:
            optimizer: class, arguments and groups; already validated (`pipeline.optimizer_choice`).
            schedule: changes them from update to update; None: constant.
            load: loads the schedule's callables, given as `module:callable`.

        Raises:
            JobError: there is no such schedule, or it rejects its arguments.
            CallableError: one of its callables cannot be loaded.
        """
        self._spec = optimizer
        self._schedule = schedule
        self._load = load
        self._begin()

    def of(self, group: int) -> Mapping[str, Any]:
        """The options of `group` for the next update, in torch's format; −1 is the group without patterns."""
        options: dict[str, Any] = self._stand_in.param_groups[group]
        return options

    @property
    def is_scheduled(self) -> bool:
        """Whether options can differ from update to update."""
        return self._scheduler is not None

    def advance(self) -> None:
        """Advance after an update.

        Raises:
            JobError: the schedule has no rate for the next one.
        """
        self.num_updates += 1
        if self._scheduler is None:
            return
        try:
            self._scheduler.step()
        except Exception as error:
            assert self._schedule is not None, "a scheduler has a spec"
            raise JobError(
                f"{_argument_path(self._schedule, KEY, error)}: {self._schedule.name} has no rate after "
                f"{self.num_updates} update{'s' if self.num_updates > 1 else ''}: {_error_text(error)}; give it "
                "arguments that last for the whole run"
            ) from error

    def go_to(self, num_updates: int) -> None:
        """Restore the state after `num_updates` updates.

        Most schedules compute a rate from the previous one, so only replaying all steps gives the same bits; and a
        checkpoint needs only one number, whatever state the schedule has. A step takes microseconds.
        """
        if num_updates < self.num_updates:
            self._begin()
        while self.num_updates < num_updates:
            self.advance()

    def _begin(self) -> None:
        self.num_updates = 0
        # A matrix, because Muon accepts nothing else.
        groups = [{"params": [nn.Parameter(torch.empty(0, 0))], **own} for own in overrides_of(self._spec)]
        kind: Any = optimizer_class(self._spec, self._load)
        self._stand_in: torch.optim.Optimizer = kind(groups, **self._spec.arguments)
        self._scheduler: lr_scheduler.LRScheduler | None = None
        if self._schedule is not None:
            self._scheduler = _build(self._schedule, KEY, self._stand_in, self._load)
            # torch warns if a schedule steps before its optimizer.
            self._stand_in.step()


def _build(
    spec: LrScheduleSpec, path: str, optimizer: torch.optim.Optimizer, load: CallableLoader | None
) -> lr_scheduler.LRScheduler:
    """Build the scheduler of `spec`, at `path` of the job, including nested ones."""
    kind = _class_named(spec.name, path)
    given: dict[str, Any] = {
        name: _loaded(value, f"{path}.{name}", load) if name in _CALLABLES else value
        for name, value in spec.arguments.items()
    }
    if spec.schedulers:
        given["schedulers"] = [
            _build(inner, f"{path}.schedulers[{index}]", optimizer, load) for index, inner in enumerate(spec.schedulers)
        ]
    _check_names(kind, given, path)
    _check_nesting(spec, path)
    try:
        return kind(optimizer=optimizer, **given)
    except Exception as error:
        raise JobError(
            f"{_argument_path(spec, path, error)}: {spec.name} rejects its arguments: {_error_text(error)}"
        ) from error


def _class_named(name: str, path: str) -> type[lr_scheduler.LRScheduler]:
    if name in _REFUSED:
        raise JobError(f"{path}.name: {name} is not supported: {_REFUSED[name]}")
    classes = {
        key: value
        for key, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler) and not key.startswith("_")
    } | {OneCycleLR.__name__: OneCycleLR}
    if name not in classes:
        usable = [key for key in classes if key not in _REFUSED]
        raise JobError(f"{path}.name: torch.optim.lr_scheduler has no {name!r}; {did_you_mean(name, usable)}")
    return classes[name]


def _check_names(kind: type[lr_scheduler.LRScheduler], given: Mapping[str, Any], path: str) -> None:
    """Raise JobError with every unknown and every missing argument of `kind`."""
    taken = {name: parameter for name, parameter in inspect.signature(kind).parameters.items() if name not in _GIVEN}
    problems = [
        f"{path}.{name}: {kind.__name__} has no such argument; {did_you_mean(name, taken)}"
        for name in given
        if name not in taken
    ]
    problems += [
        f"{path}.{name}: is missing; {kind.__name__} has no default for it"
        for name, parameter in taken.items()
        if name not in given and parameter.default is parameter.empty
    ]
    if problems:
        raise JobError(problems)


def _check_nesting(spec: LrScheduleSpec, path: str) -> None:
    """Reject a composite that torch accepts but cannot start inside a `SequentialLR`."""
    for index, inner in enumerate(spec.schedulers):
        if spec.name == "SequentialLR" and inner.schedulers:
            raise JobError(
                f"{path}.schedulers[{index}]: torch cannot start a {inner.name} inside a SequentialLR; make a "
                "ChainedScheduler around the SequentialLR instead"
            )


def _loaded(value: object, path: str, load: CallableLoader | None) -> object:
    """Load one or several references; torch rejects any other value."""
    if isinstance(value, tuple):
        return [_loaded(entry, f"{path}[{index}]", load) for index, entry in enumerate(value)]
    if not isinstance(value, str):
        return value
    assert load is not None, "a schedule that names callables needs a loader"
    return load(value, key=path)


def _argument_path(spec: LrScheduleSpec, path: str, error: Exception) -> str:
    """The path of the argument that torch's error message refers to, if it can be determined."""
    names = [*spec.arguments, *(["schedulers"] if spec.schedulers else [])]
    blamed = names if len(names) == 1 else [name for name in names if name in str(error)]
    return f"{path}.{blamed[0]}" if len(blamed) == 1 else path


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
