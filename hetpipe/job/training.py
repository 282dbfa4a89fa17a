"""The sections of a job file that say how gradients become updates: optimizer, schedule of its rate, norms, prediction.

Where a section names a class of torch, its arguments stand beside the name. Whether torch has that class and it takes
these arguments is checked where torch is at hand (`callables`); here only what a file can hold is.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hetpipe.job.sections import PositiveInt, Section, checked_reference
from hetpipe.values.problems import shown

#: What an argument of a class of torch may be.
ArgumentValue = bool | int | float | str | tuple["ArgumentValue", ...]


def _checked_argument(value: object) -> object:
    entries, where = (value, " in a list") if isinstance(value, tuple) else ((value,), "")
    for entry in entries:
        if not isinstance(entry, bool | int | float | str | None):
            # pydantic gathers ValueErrors only.
            raise ValueError(  # noqa: TRY004
                f"an argument is a number, text, true, false or a list of these, not {shown(entry)}{where}"
            )
        if isinstance(entry, float) and not math.isfinite(entry):
            raise ValueError(f"must be a finite number, not {entry}")
    return value


def _checked_pattern(pattern: str) -> str:
    if not pattern:
        raise ValueError("is an empty pattern, which no name matches; remove it")
    return pattern


def _checked_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    if not patterns:
        raise ValueError('is an empty list; give at least one pattern, for example `parameters: ["*.bias"]`')
    return patterns


def _checked_class(name: str) -> str:
    return checked_reference(name) if ":" in name else name


class _WithArguments(BaseModel):
    """Base of the sections in which a key that is not listed is an argument for torch."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, use_attribute_docstrings=True)
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_checked_argument)]] = Field(init=False)

    @property
    def arguments(self) -> dict[str, ArgumentValue]:
        """The keys that are not listed: what the class of torch is given by name."""
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
    """Class name in `torch.optim`, or a class of yours as `module:Class`, which inherits `torch.optim.Optimizer`."""
    groups: tuple[ParameterGroup, ...] = Field(default=(), examples=['[{parameters: ["*.bias"], weight_decay: 0.0}]'])
    """Parameters with arguments of their own. A parameter belongs to the first group that has a pattern of its name."""

    @property
    def is_own(self) -> bool:
        """Whether the class is the user's own."""
        return ":" in self.name


class LrScheduleSpec(_WithArguments):
    """A schedule of `torch.optim.lr_scheduler`, with its arguments beside the name."""

    name: str = Field(examples=["CosineAnnealingLR"])
    """Class name in `torch.optim.lr_scheduler`. It steps once per update, not per epoch."""
    schedulers: tuple[LrScheduleSpec, ...] = Field(default=(), examples=["[{name: LinearLR}, {name: ConstantLR}]"])
    """The schedules that `SequentialLR` and `ChainedScheduler` are made of."""


class GradientsSection(Section):
    """What happens to gradients before a step."""

    accumulate: PositiveInt = 1
    """Minibatches whose average gradient makes one update. Divides `sync.minibatches_per_wave`; `flush` and
    `double_buffer` make one update per wave anyway."""
    max_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False, examples=[1.0])
    """Gradients with a larger norm are scaled down to it; None: no clipping."""
    clip: Literal["global", "stage"] = "global"
    """What the norm is taken over: all stages of the virtual worker, or each stage by itself."""


class PredictionSection(Section):
    """Details of `weights: predict`."""

    include_decay: bool = True
    """Whether a decoupled weight decay (AdamW) is part of the predicted update, as it is of the real one. The paper's
    Table I leaves it out."""
