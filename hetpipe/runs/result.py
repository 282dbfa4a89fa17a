"""The result of a run: the return value of `hetpipe.train`, and the output of `hetpipe train --json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetpipe.values.conditions import Condition
from hetpipe.values.freezing import FrozenSince
from hetpipe.values.plan import ProofReport
from hetpipe.values.wire import plain, revive

#: Keys of `TrainResult.eval` that are counts.
_COUNTS = frozenset({"epoch", "clock", "samples"})


@dataclass(frozen=True, slots=True)
class LossRange:
    """Mean loss of the first and of the last non-empty wave; None without one, or if it is not finite."""

    first: float | None
    last: float | None


@dataclass(frozen=True, slots=True)
class Staleness:
    """The clock distance of the virtual workers, in waves."""

    bound_clock_distance: int | None
    """D + 1; None for `asp`."""
    max_clock_distance: int
    """The largest distance seen."""
    violations: int | None
    """The verdict of the history checker; None if it could not run, for example without the history's files."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes between the stages and the shards, over all stages."""

    pushed: int
    pulled: int


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """Use of the caches behind frozen layers, summed over the stages."""

    reads: int = 0
    """Minibatches read."""
    computed: int = 0
    """Minibatches of which stages with a cache have computed frozen layers."""
    read_bytes: int = 0
    stopped: str = ""
    """Why one of them keeps nothing more; empty if none says so."""


@dataclass(frozen=True, slots=True)
class StageResult:
    """The peak memory of one stage, and the final state of its optimizer."""

    vw: int
    stage: int
    weight_bytes: int
    """Weight buffers on the stage's device."""
    activation_bytes: int
    """Tensors saved by forwards for their backwards."""
    gradient_norm: float | None
    """Norm of the last gradient, before clipping; None without clipping."""
    learning_rate: float | None
    """Learning rate of the next update; None on a stage without parameters."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One evaluation, as in `evaluations.jsonl`."""

    epoch: int
    clock: int
    minibatches: int
    """Minibatches in those weights since the start of the training, over all virtual workers."""
    samples: int
    rewinds: int
    """Number of rewinds of the job up to then."""
    values: dict[str, float | None]
    """`loss` and the job's metrics; None if not finite."""
    within_epoch: bool = False
    """Made during the epoch, by one virtual worker; else at its end, by all."""
    whole: bool = True
    """Covers all of the evaluation data."""


@dataclass(frozen=True, slots=True)
class EvaluationResults:
    """The evaluations of the run, without those undone by a rewind."""

    number: int = 0
    best: EvaluationResult | None = None
    """The first one with the lowest loss among those over all of the evaluation data; None without any."""
    listed: tuple[EvaluationResult, ...] = ()
    """In order; at most a hundred, evenly spaced, including the first, the best and the last."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A run that reached its end, or was stopped at a barrier. Counts are of this run alone, clocks of the training."""

    run_dir: Path
    waves: int
    """Committed samples, over all virtual workers."""
    minibatches: int
    samples: int
    wall_seconds: float
    """Seconds since all stages were ready, without the start-up."""
    samples_per_second: float
    loss: LossRange
    eval: dict[str, int | float | None]
    """The last evaluation over all of the evaluation data: `epoch`, `clock`, `samples`, `loss` and the job's metrics;
    empty without any."""
    staleness: Staleness
    clocks: dict[int, int]
    """Local clock per virtual worker."""
    global_clock: int
    bytes: Traffic
    waiting_seconds: dict[int, float]
    """Per virtual worker: time without work because a required clock was not published."""
    idle_seconds: dict[int, float]
    """Per virtual worker: time without work for another reason."""
    losses: dict[str, LossRange] = field(default_factory=dict)
    """Each loss by name, of a job with several, of which `loss` is the weighted sum."""
    evaluations: EvaluationResults = field(default_factory=EvaluationResults)
    deaths: dict[int, int] = field(default_factory=dict)
    """Per virtual worker: number of its incarnations that ended before the run."""
    skipped_updates: dict[int, int] = field(default_factory=dict)
    """Per virtual worker: updates skipped because a gradient overflowed (`precision: fp16`)."""
    rewinds: int = 0
    """Number of rewinds of the whole job; everything else covers the time after the last one, except for
    the evaluations, which are those that led to the weights."""
    frozen: tuple[FrozenSince, ...] = ()
    """The frozen layers, one entry per barrier at which they became more, in order."""
    cache: CacheTotals = field(default_factory=CacheTotals)
    conditions: tuple[Condition, ...] = ()
    """The conditions of the run, by start time; those without `cleared` held to the end."""
    proof: ProofReport | None = None
    """The proof of the model before training; None if unknown."""
    tokens_per_second: float | None = None
    """None where samples are not sequences of tokens."""
    model_flops_utilisation: float | None = None
    """MFU: operations of the model per second, as a share of the devices' peak; None if either is unknown."""
    model_flops_utilisation_reason: str | None = None
    """The reason for the absence of MFU; None if there is one."""
    stages: tuple[StageResult, ...] = ()
    """The stages that reported, by virtual worker and stage."""

    def __repr__(self) -> str:
        """One line, which a notebook shows below what `hetpipe.train` has printed; `to_json` has everything."""
        return f"TrainResult(run_dir={str(self.run_dir)!r}, loss={self.loss.last}, eval={self.measures}, …)"

    @property
    def measures(self) -> dict[str, int | float | None]:
        """Loss and metrics of the last evaluation: `eval` without its counts."""
        return {name: value for name, value in self.eval.items() if name not in _COUNTS}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainResult:
        """The inverse of `to_json`.

        Raises:
            ProtocolViolation: it is not such an object.
        """
        return revive(cls, dict(values))

    def to_json(self) -> dict[str, Any]:
        """The object of `train --json`."""
        values: dict[str, Any] = plain(TrainResult, self)
        return values
