"""What is an update made with? Learning rate, momentum and so on of every parameter group, by the update number.

Any schedule of `torch.optim.lr_scheduler` can move them. It moves a stand-in: an optimizer of the job's class with the
job's groups but no elements in its parameters. So every stage sees every group, also those that it has no parameter of,
and a schedule that takes one value per group takes the same list everywhere.
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

#: The key of the job; begins every message.
KEY = "lr_schedule"

#: Arguments that torch calls; a job names them as `module:callable`.
_CALLABLES = ("lr_lambda", "scale_fn")

#: Arguments that are not the user's: hetpipe gives them.
_GIVEN = ("self", "optimizer", "last_epoch")

#: Schedules that cannot work here, with the reason and a way out.
_REFUSED: Mapping[str, str] = {
    "ReduceLROnPlateau": "it waits for a metric, and here the rate depends on the update number alone, which all "
    "stages know; use CosineAnnealingLR or MultiStepLR",
    "SWALR": "it goes with averaged weights, which are not kept here; use CosineAnnealingLR",
    "LRScheduler": "it is the base of the others and has no rate of its own; use LambdaLR with an `lr_lambda`",
}


class OneCycleLR(lr_scheduler.OneCycleLR):
    """Torch's, but after its last update it stays where that one was.

    Torch refuses to go on. Here nobody can say beforehand how many updates a virtual worker will make: when others die
    or leave it makes more, because their samples are its own then; when others join it makes fewer.
    """

    _is_over = False

    def step(self, epoch: int | None = None) -> None:
        """Go on by one update, or to a given one."""
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
        """Begin before the first update.

        Args:
            optimizer: class, arguments and groups; checked already (`pipeline.optimizer_choice`).
            schedule: moves them from update to update; None: they stay.
            load: finds what the schedule names by `module:callable`.

        Raises:
            JobError: there is no such schedule, or it refuses its arguments.
            CallableError: what it names cannot be loaded.
        """
        self._spec = optimizer
        self._schedule = schedule
        self._load = load
        self._begin()

    def of(self, group: int) -> Mapping[str, Any]:
        """The options of `group` for the next update, as torch keeps them; −1 is the group without patterns."""
        options: dict[str, Any] = self._stand_in.param_groups[group]
        return options

    @property
    def is_scheduled(self) -> bool:
        """Whether options can differ from update to update."""
        return self._scheduler is not None

    def advance(self) -> None:
        """An update was made.

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
                f"{self.num_updates} update{'s' if self.num_updates > 1 else ''}: {_told(error)}; give it arguments "
                "that last for the whole run"
            ) from error

    def go_to(self, num_updates: int) -> None:
        """Be where `num_updates` updates lead.

        Most schedules compute a rate from the one before, so only the same steps give the same bits; and one number is
        all that a checkpoint needs, whatever the schedule keeps. A step takes microseconds.
        """
        if num_updates < self.num_updates:
            self._begin()
        while self.num_updates < num_updates:
            self.advance()

    def _begin(self) -> None:
        self.num_updates = 0
        # A matrix, because Muon takes nothing else.
        groups = [{"params": [nn.Parameter(torch.empty(0, 0))], **own} for own in overrides_of(self._spec)]
        kind: Any = optimizer_class(self._spec, self._load)
        self._stand_in: torch.optim.Optimizer = kind(groups, **self._spec.arguments)
        self._scheduler: lr_scheduler.LRScheduler | None = None
        if self._schedule is not None:
            self._scheduler = _build(self._schedule, KEY, self._stand_in, self._load)
            # Torch warns if a schedule moves before its optimizer did.
            self._stand_in.step()


def _build(
    spec: LrScheduleSpec, path: str, optimizer: torch.optim.Optimizer, load: CallableLoader | None
) -> lr_scheduler.LRScheduler:
    """The scheduler of `spec`, which stands at `path` of the job, with those that it is made of."""
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
            f"{_argument_path(spec, path, error)}: {spec.name} refuses its arguments: {_told(error)}"
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
    """Raise JobError with every argument that `kind` does not take, and every one that it misses."""
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
    """Refuse what torch takes and cannot start: a `SequentialLR` starts what is in it as no composite can."""
    for index, inner in enumerate(spec.schedulers):
        if spec.name == "SequentialLR" and inner.schedulers:
            raise JobError(
                f"{path}.schedulers[{index}]: torch cannot start a {inner.name} inside a SequentialLR; make a "
                "ChainedScheduler around the SequentialLR instead"
            )


def _loaded(value: object, path: str, load: CallableLoader | None) -> object:
    """What a reference, or each of several, names; torch refuses anything else."""
    if isinstance(value, tuple):
        return [_loaded(entry, f"{path}[{index}]", load) for index, entry in enumerate(value)]
    if not isinstance(value, str):
        return value
    assert load is not None, "a schedule that names callables needs a loader"
    return load(value, key=path)


def _argument_path(spec: LrScheduleSpec, path: str, error: Exception) -> str:
    """The path of the argument that torch complains about, as far as it can be told from its words."""
    names = [*spec.arguments, *(["schedulers"] if spec.schedulers else [])]
    blamed = names if len(names) == 1 else [name for name in names if name in str(error)]
    return f"{path}.{blamed[0]}" if len(blamed) == 1 else path


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
