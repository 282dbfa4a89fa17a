"""The section of a job file about layers that are trained no more (docs/semantics/freezing.md)."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from hetpipe.job.sections import PositiveInt, Section
from hetpipe.values.bounds import MAX_LISTED
from hetpipe.values.freezing import CompressMeasure, FreezeMode
from hetpipe.values.problems import shown


def _as_word(value: object) -> object:
    """YAML reads `on` and `off` without quotation marks as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


#: Whether what enters the first trained layer is cached.
CacheMode = Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_word)]


class FreezePoint(Section):
    """Layers that are frozen from the end of a pass over the data on."""

    epoch: PositiveInt = Field(examples=[1])
    """Completed passes over the data."""
    layers: PositiveInt = Field(examples=[4])
    """Number of frozen layers from there on, counted as `freeze.layers`."""


def _rising(schedule: tuple[FreezePoint, ...]) -> tuple[FreezePoint, ...]:
    for number, (before, after) in enumerate(pairwise(schedule), start=2):
        if after.epoch <= before.epoch:
            raise ValueError(
                f"entry {number} is at epoch {after.epoch}, after one at epoch {before.epoch}; give them in order"
            )
        if after.layers <= before.layers:
            raise ValueError(
                f"entry {number} freezes {after.layers} layers, after one that freezes {before.layers}: frozen layers "
                "stay frozen; give a larger number, or remove it"
            )
    return schedule


def _above_the_start(schedule: tuple[FreezePoint, ...], info: ValidationInfo) -> tuple[FreezePoint, ...]:
    at_start = info.data.get("layers", 0)
    if schedule and schedule[0].layers <= at_start:
        raise ValueError(
            f"entry 1 freezes {schedule[0].layers} layers, but `layers` freezes {at_start} from the start: frozen "
            "layers stay frozen; give a larger number, or remove it"
        )
    return schedule


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


#: Without exponents: `Fraction("1e999999999")` would compute a number of a billion digits.
_FRACTION = re.compile(r"\d{1,9}(\.\d{1,18}|/0*[1-9]\d{0,8})?", re.ASCII)


def _inside(text: str | None) -> str | None:
    if text is None:
        return None
    if not _FRACTION.fullmatch(text):
        raise ValueError(f"must be a number or a fraction between 0 and 1, for example 1/3, not {shown(text)}")
    if not 0 < Fraction(text) < 1:
        raise ValueError(f"is {text}; it must be above 0 and below 1, for example 1/3")
    return text


class FreezeSection(Section):
    """Layers that are trained no more: they keep their weights."""

    layers: int = Field(default=0, ge=0, examples=[2])
    """Number of layers with trainable parameters, from the first on, that are frozen from the start; layers without
    such parameters in between and directly behind them are frozen, too.
    """
    schedule: Annotated[
        tuple[FreezePoint, ...], Field(max_length=MAX_LISTED), AfterValidator(_rising), AfterValidator(_above_the_start)
    ] = Field(default=(), examples=["[{epoch: 1, layers: 4}, {epoch: 3, layers: 8}]"])
    """Further ones, frozen at the ends of passes over the data."""
    every: Literal["epoch"] | None = Field(default=None, examples=["epoch"])
    """At the end of each pass over the data, the norms of gradients decide how many layers are frozen."""
    waves: PositiveInt | None = Field(default=None, examples=[50])
    """Instead, they decide at every barrier at a multiple of this clock, which is set."""
    alpha: Annotated[
        str | None, BeforeValidator(_as_text, json_schema_input_type=float | str | None), AfterValidator(_inside)
    ] = Field(default=None, examples=["1/3"])
    """α, above 0 and below 1: the part of the trained layers that may freeze at once. As a fraction it is exact."""
    recut: bool = False
    """Where layers freeze while the job trains, layers move between the stages of each virtual worker, so that the
    slowest one has least to do.
    """
    compress: bool = False
    """Besides, wherever that is predicted to be no slower, pipelines are replaced with twice as many that have half as
    many stages, at the barrier after the one at which layers freeze, as long as no device needs more memory than at
    the start.
    """
    compress_by: CompressMeasure = "memory"
    """What no device may have more of than at the start: predicted `memory`, or `parameters`, of which a frozen one
    counts a sixth, as in PipeTransformer.
    """
    keep_global_batch: bool = True
    """Where pipelines are compressed, a wave of all virtual workers has as many minibatches as before; else its length
    is the best predicted one between K and 6·K.
    """
    mode: FreezeMode = "eval"
    """Training flags of frozen layers: `eval`, those of an evaluation, so that dropout does not draw and BatchNorm
    neither uses nor changes the statistics of minibatches; or `train`, as before.
    """
    tied: Literal["lower", "everywhere"] = "lower"
    """Where a frozen layer would share a parameter with a trained one: fewer layers are frozen, or the parameter is
    frozen in `everywhere` that it is used.
    """

    cache: CacheMode = "auto"
    """Whether what enters the first trained layer is kept on each node and read in later passes over the data, instead
    of being computed again: `auto`, where minibatches may come back (with `data.shuffle`, if all stages are on one
    node), and as long as that is faster; `on`, always; or `off`.
    """
    cache_memory_bytes: Annotated[int, Field(ge=0)] = Field(default=1 << 30, examples=[4294967296])
    """Bytes of it on each node in shared memory (`/dev/shm`)."""
    cache_disk_bytes: Annotated[int, Field(ge=0)] = Field(default=0, examples=[17179869184])
    """Bytes of it on each node in the folder for temporary files, for what does not fit into memory."""

    @property
    def recuts(self) -> bool:
        """Whether layers move where others freeze."""
        return self.recut or self.compress

    @property
    def is_used(self) -> bool:
        """Whether any layer freezes by it."""
        return self.layers > 0 or bool(self.schedule) or self.alpha is not None
