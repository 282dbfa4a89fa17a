"""The weight policies, schedules and placements a job can name; what each weight policy is, a row each (`policies.md`).

Whoever must know something of a policy asks its row, never for its name: `POLICIES[job.weights].drains`. The history
checker and the tests' reference executor judge the policies, and have knowledge of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hetpipe.values.suggest import join_names

#: Which weights a minibatch sees: HetPipe · PipeDream · PipeDream's vertical sync · PipeDream-2BW · PipeDream-Flush and
#: GPipe · PipeOptim · SpecTrain.
WeightPolicy = Literal["wave", "stash", "vertical", "double_buffer", "flush", "predict", "spectrain"]

#: In which order a stage computes.
Schedule = Literal["1f1b", "fifo", "gpipe"]

HistoryDetail = Literal["full", "summary", "off"]
"""How much of what it does a run writes down."""

#: When published weights are fetched: for every wave, or where the staleness bound forbids the ones in use.
PullTiming = Literal["every_wave", "required"]

#: What carries frames between two stages.
LinkKind = Literal["gloo", "grpc"]

#: What a job says of its links.
AskedLink = Literal["auto", LinkKind]

#: Which parameters lie on which shard; defined in `decide.planner.placement`.
PlacementName = Literal["balanced", "round_robin", "ed_local"]

#: Of a job file, of `hetpipe plan`, and of a plan without either.
DEFAULT_PLACEMENT: PlacementName = "balanced"

WEIGHT_POLICIES: tuple[WeightPolicy, ...] = get_args(WeightPolicy)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

#: A count at stage i of K, where N minibatches make a wave, as a function of (i, K, N).
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
    """A whole wave at the first stage, one minibatch at the last, and evenly fewer in between."""
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
    """What a weight policy is, as far as anybody asks: a row of the table in `policies.md`."""

    name: WeightPolicy
    source: str
    """Who described it."""
    schedules: tuple[Schedule, ...]
    """Those that it can use; `auto` means the first."""
    delay: PerStage
    """Minibatches of its own virtual worker before p whose updates the forward of p does not see yet. With
    `one_update_per_wave` the count begins before the wave of p, and is one of whole waves."""
    in_flight: PerStage
    """S_i: the most minibatches between forward and backward, unless the schedule has a whole wave there."""
    weight_buffers: PerStage
    """Tensors of the parameters' size alive at rest; with parameter servers two more are."""
    one_update_per_wave: bool = False
    """From the average of its gradients; else there is an update per `gradients.accumulate` minibatches."""
    drains: bool = False
    """Whether the pipeline is empty where a wave starts."""
    strict_order: bool = False
    """Whether its versions are defined by the strict 1F1B order of a pipeline that never drains, which needs N ≥ K."""
    decay: Literal["used", "newest"] = "newest"
    """The weights that decay in an update: those that its last minibatch used, or those that it is made on."""
    clips_globally: bool = False
    """Whether a step may wait for the norm of a gradient over all stages; others' pipeline would stand still."""
    predicts: Literal["update", "momentum"] | None = None
    """What it expects its weights from where it computes with weights that it does not have: the optimizer's last
    update, or the momentum of SGD. Then the backward sees all updates before p."""
    steps_ahead: PerStage = _none
    """Updates by which its predictions, of the backward, too, go beyond all updates before p."""

    @property
    def waves_behind(self) -> int:
        """Own waves before its own of which the first minibatch of a wave may see nothing.

        >>> [POLICIES[name].waves_behind for name in ("wave", "flush", "double_buffer")]
        [1, 0, 1]
        """
        return self.delay(0, 1, 1) if self.one_update_per_wave else 1

    def minibatches_per_update(self, minibatches_per_wave: int, accumulate: int) -> int:
        """Minibatches whose gradients make one update together.

        >>> POLICIES["flush"].minibatches_per_update(8, 1), POLICIES["wave"].minibatches_per_update(8, 2)
        (8, 2)
        """
        return minibatches_per_wave if self.one_update_per_wave else accumulate

    def least_minibatches_per_wave(self, num_stages: int) -> int:
        """The smallest N under which it is defined.

        >>> [POLICIES[name].least_minibatches_per_wave(4) for name in ("stash", "wave")]
        [4, 1]
        """
        return num_stages if self.strict_order else 1

    def schedule_of(self, schedule: str = "auto") -> Schedule:
        """The schedule that `schedule` means under this policy.

        Raises:
            ValueError: the policy cannot use it; the message says why, and which it can.

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

#: Policies by name; a row's name is the same text as a `WeightPolicy`.
POLICIES: Mapping[str, Policy] = {row.name: row for row in _ROWS}

#: The policy that keeps least, proposed where memory is short.
LEAST_MEMORY: WeightPolicy = "flush"


def policies_where(holds: Callable[[Policy], bool]) -> tuple[WeightPolicy, ...]:
    """The names of the policies of which something is true, in the order of the table.

    >>> policies_where(lambda policy: policy.one_update_per_wave)
    ('double_buffer', 'flush')
    """
    return tuple(row.name for row in _ROWS if holds(row))
