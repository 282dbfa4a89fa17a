"""The sections of a job file about updates: optimizer, learning-rate schedule, gradient norms, prediction.

Where a section names a class of torch, its arguments are given beside the name. The class and its arguments are
validated where torch is available (`pipeline.callables`); here only what can be validated without it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hetpipe.job.sections import PositiveInt, Section, checked_reference
from hetpipe.values.problems import shown

#: Allowed argument values for a class of torch.
ArgumentValue = bool | int | float | str | tuple["ArgumentValue", ...]


def _checked_argument(value: object) -> object:
    entries, where = (value, " in a list") if isinstance(value, tuple) else ((value,), "")
    for entry in entries:
        if not isinstance(entry, bool | int | float | str | None):
            # pydantic collects only ValueErrors
            raise ValueError(  # noqa: TRY004
                f"an argument is a number, text, true, false or a list of these, not {shown(entry)}{where}"
            )
        if isinstance(entry, float) and not math.isfinite(entry):
            raise ValueError(f"must be a finite number, not {entry}")
    return value


def _checked_pattern(pattern: str) -> str:
    if not pattern:
        raise ValueError("is an empty pattern, which matches no name; remove it")
    return pattern


def _checked_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    if not patterns:
        raise ValueError('is an empty list; give at least one pattern, for example `parameters: ["*.bias"]`')
    return patterns


def _checked_class(name: str) -> str:
    return checked_reference(name) if ":" in name else name


class _WithArguments(BaseModel):
    """Base of the sections in which an unlisted key is an argument of the torch class."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, use_attribute_docstrings=True)
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_checked_argument)]] = Field(init=False)

    @property
    def arguments(self) -> dict[str, ArgumentValue]:
        """The unlisted keys: keyword arguments of the torch class."""
        return dict(self.__pydantic_extra__)


class ParameterGroup(_WithArguments):
    """Parameters with optimizer arguments of their own: `{parameters: ["*.bias"], weight_decay: 0.0}`."""

    parameters: Annotated[
        tuple[Annotated[str, AfterValidator(_checked_pattern)], ...], AfterValidator(_checked_patterns)
    ] = Field(examples=['["*.bias"]'])
    """Patterns (`*`, `?`, `[…]`) of the model's parameter names."""

    @model_validator(mode="after")
    def _differs(self) -> Self:
        if not self.arguments:
            raise ValueError(
                "changes nothing for its parameters; give an argument of the optimizer, for example "
                "`weight_decay: 0.0`, or remove the group"
            )
        return self


class OptimizerSpec(_WithArguments):
    """An optimizer, with its arguments beside the name: `{name: SGD, lr: 0.1, momentum: 0.9}`."""

    name: Annotated[str, AfterValidator(_checked_class)] = Field(examples=["SGD"])
    """Class name in `torch.optim`, or a class of yours as `module:Class`, which must inherit from
    `torch.optim.Optimizer`.
    """
    groups: tuple[ParameterGroup, ...] = Field(default=(), examples=['[{parameters: ["*.bias"], weight_decay: 0.0}]'])
    """Parameters with arguments of their own. A parameter belongs to the first group with a pattern that matches its
    name.
    """

    @property
    def is_own(self) -> bool:
        """Whether the class is user-defined."""
        return ":" in self.name


class LrScheduleSpec(_WithArguments):
    """A schedule of `torch.optim.lr_scheduler`, with its arguments beside the name."""

    name: str = Field(examples=["CosineAnnealingLR"])
    """Class name in `torch.optim.lr_scheduler`. It steps once per update, not per epoch."""
    schedulers: tuple[LrScheduleSpec, ...] = Field(default=(), examples=["[{name: LinearLR}, {name: ConstantLR}]"])
    """The component schedules of `SequentialLR` and `ChainedScheduler`."""


class GradientsSection(Section):
    """Processing of gradients before a step."""

    accumulate: PositiveInt = 1
    """Number of minibatches whose average gradient makes one update. Must divide `sync.minibatches_per_wave`; `flush`
    and `double_buffer` always make one update per wave.
    """
    max_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False, examples=[1.0])
    """Gradients with a larger norm are scaled down to it; None: no clipping."""
    clip: Literal["global", "stage"] = "global"
    """Scope of the norm: all stages of the virtual worker, or each stage by itself."""


class PredictionSection(Section):
    """Details of `weights: predict`."""

    include_decay: bool = True
    """Include a decoupled weight decay (AdamW) in the predicted update, as in the actual one. The paper's
    Table I omits it.
    """
