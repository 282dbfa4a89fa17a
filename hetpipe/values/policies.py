"""The weight policies, schedules and placements of a job; the properties of each weight policy as a table row.

Code that depends on a property of a policy reads it from the row, and never compares names:
`POLICIES[job.weights].drains`. The history checker and the tests' reference executor verify the policies and define
their properties independently. See docs/policies.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hetpipe.values.suggest import join_names

#: Which weights a minibatch uses: HetPipe · PipeDream · PipeDream's vertical sync · PipeDream-2BW · PipeDream-Flush and
#: GPipe · PipeOptim · SpecTrain.
WeightPolicy = Literal["wave", "stash", "vertical", "double_buffer", "flush", "predict", "spectrain"]

#: The order in which a stage computes.
Schedule = Literal["1f1b", "fifo", "gpipe"]

HistoryDetail = Literal["full", "summary", "off"]
"""Level of detail of a run's histories."""

#: When published weights are pulled: for every wave, or only where the staleness bound forbids the current ones.
PullTiming = Literal["every_wave", "required"]

#: The transport of frames between two stages.
LinkKind = Literal["gloo", "grpc", "shared_memory"]

#: The link setting of a job.
AskedLink = Literal["auto", LinkKind]

#: Assignment of parameters to shards; defined in `decide.planner.placement`.
PlacementName = Literal["balanced", "round_robin", "ed_local"]

#: Defaults of a job file, of `hetpipe plan`, and of a plan without either.
DEFAULT_PLACEMENT: PlacementName = "balanced"

WEIGHT_POLICIES: tuple[WeightPolicy, ...] = get_args(WeightPolicy)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

#: A count at stage i of K with N minibatches per wave, as a function of (i, K, N).
PerStage = Callable[[int, int, int], int]


def _none(_stage: int, _num_stages: int, _minibatches_per_wave: int) -> int:
    return 0


def _one(_stage: int, _num_stages: int, _minibatches_per_wave: int) -> int:
    return 1


def _two(_stage: int, _num_stages: int, _minibatches_per_wave: int) -> int:
    return 2


def _a_wave(_stage: int, _num_stages: int, minibatches_per_wave: int) -> int:
    return minibatches_per_wave


def _all_stages(_stage: int, num_stages: int, _minibatches_per_wave: int) -> int:
    return num_stages


def _stages_behind(stage: int, num_stages: int, _minibatches_per_wave: int) -> int:
    """K − i: this stage and those after it."""
    return num_stages - stage


def _at_most_a_wave(stage: int, num_stages: int, minibatches_per_wave: int) -> int:
    return min(minibatches_per_wave, num_stages - stage)


def _a_wave_spread(stage: int, num_stages: int, minibatches_per_wave: int) -> int:
    """A whole wave at the first stage, one minibatch at the last, linear in between."""
    n, k = minibatches_per_wave, num_stages
    if k == 1:
        return 1
    if n <= k:
        return min(n, k - stage)
    return (k - stage) + (n - k) * (k - 1 - stage) // (k - 1)


def _half_of_stage(stage: int, _num_stages: int, _minibatches_per_wave: int) -> int:
    return stage // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The properties of a weight policy: a row of the table in docs/policies.md."""

    name: WeightPolicy
    source: str
    """The paper or system it comes from."""
    schedules: tuple[Schedule, ...]
    """The schedules it supports; `auto` means the first."""
    delay: PerStage
    """Minibatches of its own virtual worker before p whose updates the forward of p does not see yet. With
    `one_update_per_wave` they are counted from the start of p's wave, in whole waves.
    """
    in_flight: PerStage
    """S_i: the maximum number of minibatches between forward and backward, unless the schedule keeps a whole wave
    there.
    """
    weight_buffers: PerStage
    """Tensors of the parameters' size allocated at rest; parameter servers add two."""
    one_update_per_wave: bool = False
    """Whether one update is made per wave, from the average of its gradients; else per `gradients.accumulate`
    minibatches.
    """
    drains: bool = False
    """Whether the pipeline is empty when a wave starts."""
    strict_order: bool = False
    """Whether its versions are defined by the strict 1F1B order of a pipeline that never drains, which requires N ≥ K.
    """
    decay: Literal["used", "newest"] = "newest"
    """The weights that decay applies to: those used by the update's last minibatch, or those the update is made on."""
    clips_globally: bool = False
    """Whether a step may wait for the norm of a gradient over all stages; under the other policies that would stall the
    pipeline.
    """
    predicts: Literal["update", "momentum"] | None = None
    """What future weights are predicted from: the optimizer's last update, or the momentum of SGD. The backward then
    sees all updates before p.
    """
    steps_ahead: PerStage = _none
    """Number of updates by which its predictions, also those for the backward, go beyond all updates before p."""

    @property
    def splits_ties(self) -> bool:
        """Whether the uses of one weight may be on several stages.

        Not under prediction: a later stage would get the predicted weight for its forward, and its backward must read
        the current one.

        >>> [POLICIES[name].splits_ties for name in ("wave", "predict")]
        [True, False]
        """
        return self.predicts is None

    @property
    def waves_behind(self) -> int:
        """Number of preceding waves of the same virtual worker that the first minibatch of a wave may not see.

        >>> [POLICIES[name].waves_behind for name in ("wave", "flush", "double_buffer")]
        [1, 0, 1]
        """
        return self.delay(0, 1, 1) if self.one_update_per_wave else 1

    def minibatches_per_update(self, minibatches_per_wave: int, accumulate: int) -> int:
        """Number of minibatches whose gradients form one update.

        >>> POLICIES["flush"].minibatches_per_update(8, 1), POLICIES["wave"].minibatches_per_update(8, 2)
        (8, 2)
        """
        return minibatches_per_wave if self.one_update_per_wave else accumulate

    def least_minibatches_per_wave(self, num_stages: int) -> int:
        """The smallest N for which the policy is defined.

        >>> [POLICIES[name].least_minibatches_per_wave(4) for name in ("stash", "wave")]
        [4, 1]
        """
        return num_stages if self.strict_order else 1

    def schedule_of(self, schedule: str = "auto") -> Schedule:
        """Resolve `schedule` under this policy.

        Raises:
            ValueError: the policy does not support it; the message gives the reason and the supported ones.

        >>> POLICIES["flush"].schedule_of(), POLICIES["flush"].schedule_of("gpipe")
        ('1f1b', 'gpipe')
        """
        if schedule == "auto":
            return self.schedules[0]
        for known in self.schedules:
            if schedule == known:
                return known
        raise ValueError(f"is {schedule}, but {self._why_not(schedule)}; use {join_names(('auto', *self.schedules))}")

    def _why_not(self, schedule: str) -> str:
        if schedule == "gpipe" and not self.strict_order:
            return "`gpipe` drains the pipeline after each wave, which is what `weights: flush` is for"
        return f"the weight versions of `{self.name}` are defined by the strict 1F1B order"


_ROWS = (
    Policy(
        name="wave",
        source="HetPipe",
        schedules=("1f1b", "fifo"),
        delay=_a_wave,
        in_flight=_a_wave_spread,
        weight_buffers=_a_wave,
        decay="used",
        clips_globally=True,
    ),
    Policy(
        name="stash",
        source="PipeDream",
        schedules=("1f1b",),
        delay=_stages_behind,
        in_flight=_stages_behind,
        weight_buffers=_stages_behind,
        strict_order=True,
    ),
    Policy(
        name="vertical",
        source="PipeDream with vertical sync",
        schedules=("1f1b",),
        delay=_all_stages,
        in_flight=_stages_behind,
        weight_buffers=_all_stages,
        strict_order=True,
        decay="used",
        clips_globally=True,
    ),
    Policy(
        name="double_buffer",
        source="PipeDream-2BW",
        schedules=("1f1b",),
        delay=_a_wave,
        in_flight=_stages_behind,
        weight_buffers=_two,
        one_update_per_wave=True,
        strict_order=True,
        clips_globally=True,
    ),
    Policy(
        name="flush",
        source="PipeDream-Flush",
        schedules=("1f1b", "gpipe", "fifo"),
        delay=_none,
        in_flight=_at_most_a_wave,
        weight_buffers=_one,
        one_update_per_wave=True,
        drains=True,
        clips_globally=True,
    ),
    Policy(
        name="predict",
        source="PipeOptim",
        schedules=("1f1b",),
        delay=_stages_behind,
        in_flight=_stages_behind,
        weight_buffers=_two,
        strict_order=True,
        predicts="update",
    ),
    Policy(
        name="spectrain",
        source="SpecTrain",
        schedules=("1f1b",),
        delay=_stages_behind,
        in_flight=_stages_behind,
        weight_buffers=_two,
        strict_order=True,
        predicts="momentum",
        steps_ahead=_half_of_stage,
    ),
)

#: Policies by name; a row's name equals its `WeightPolicy`.
POLICIES: Mapping[str, Policy] = {row.name: row for row in _ROWS}

#: The policy with the least memory, suggested where memory is short.
LEAST_MEMORY: WeightPolicy = "flush"


def policies_where(holds: Callable[[Policy], bool]) -> tuple[WeightPolicy, ...]:
    """The names of the policies that satisfy a predicate, in table order.

    >>> policies_where(lambda policy: policy.one_update_per_wave)
    ('double_buffer', 'flush')
    """
    return tuple(row.name for row in _ROWS if holds(row))
