"""What the options of `hetpipe plan` ask of the planner, checked, and filled up from the job where there is one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, get_args

from hetpipe.cli.plan.simulate import staleness_of
from hetpipe.decide.lifecycle.planning import options_of
from hetpipe.decide.planner.allocation.parallel import PLANNED_POLICY
from hetpipe.decide.planner.cuts import Recompute
from hetpipe.decide.planner.optimizer_slots import slots_of
from hetpipe.decide.planner.options import SCHEDULE_CHOICES, AllocationName, PlanOptions, ScheduleChoice
from hetpipe.errors import UserError
from hetpipe.job.file import Job
from hetpipe.values.ids import DeviceId
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, PlacementName, WeightPolicy
from hetpipe.values.suggest import did_you_mean

ALLOCATIONS: Mapping[str, AllocationName] = {name: name for name in get_args(AllocationName)}
PLACEMENTS: Mapping[str, PlacementName] = {name: name for name in get_args(PlacementName)}
WEIGHTS: Mapping[str, WeightPolicy] = {name: name for name in WEIGHT_POLICIES}
SCHEDULES: Mapping[str, ScheduleChoice] = {name: name for name in SCHEDULE_CHOICES}
RECOMPUTE: Mapping[str, Recompute] = {name: name for name in get_args(Recompute)}

AUTO = "auto"

#: What most optimizers keep at most; assumed of one that is not known.
_MOST_SLOTS = 2

_WORKERS_EXAMPLE = """--workers '[["n0/0", "n1/0"], ["n0/1", "n1/1"]]'"""

ChoiceT = TypeVar("ChoiceT", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options as they were typed; None: not given."""

    job: Path | None = None
    profile: Path | None = None
    cluster: Path | None = None
    allocation: str | None = None
    workers: str | None = None
    minibatches_per_wave: str | None = None
    placement: str | None = None
    staleness: str | None = None
    max_staleness: int | None = None
    weights: str | None = None
    schedule: str | None = None
    optimizer_slots: int | None = None
    recompute: str | None = None
    max_batch: int | None = None
    shards: int | None = None
    reserve_bytes: int | None = None
    why: bool = False
    html: Path | None = None
    out: Path | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is asked of the planner, and what the user should know of how it was understood."""

    options: PlanOptions
    remarks: tuple[str, ...]


def check_request(request: PlanRequest, *, as_json: bool) -> None:
    """Refuse options that contradict each other.

    Raises:
        UserError: naming the fix.
    """
    if request.job is None:
        absent = [name for name in ("profile", "cluster") if getattr(request, name) is None]
        if len(absent) > 1:
            raise UserError("there is nothing to plan; name a job file, or give --profile and --cluster")
        if absent:
            given = "cluster" if absent == ["profile"] else "profile"
            raise UserError(f"--{given} is given without --{absent[0]}; give both, or name a job file")
    if request.why and as_json:
        raise UserError("--json has every alternative with its reason already; leave out --why")
    if (request.staleness == AUTO) != (request.max_staleness is not None):
        raise UserError(
            "--D auto and --max-D belong together; give for example --D auto --max-D 8, or one number with --D"
        )
    _check_belongs("--workers", request.workers, "explicit", request.allocation)
    _check_belongs("--max-batch", request.max_batch, "parallel", request.allocation)
    if request.allocation == "explicit" and request.workers is None:
        raise UserError(f"--allocation explicit needs the devices of each virtual worker: {_WORKERS_EXAMPLE}")
    if request.allocation == "parallel" and request.max_batch is None:
        raise UserError("--allocation parallel needs --max-batch: the largest global batch that still trains well")


def _check_belongs(option: str, value: object, allocation: str, asked: str | None) -> None:
    if value is not None and asked != allocation:
        fix = f"add --allocation {allocation}" if asked is None else f"leave it out, or ask for {allocation}"
        raise UserError(f"{option} is for --allocation {allocation}{f', not {asked}' if asked else ''}; {fix}")


def wishes_of(request: PlanRequest, job: Job | None) -> Wishes:
    """What to plan: what was typed, else what the job says, else the defaults.

    Raises:
        UserError: a text means nothing, or what the job wants cannot be foreseen.
    """
    if job is not None and job.sync.traits.averages_gradients:
        raise UserError(
            f"how fast stages average gradients among themselves is not foreseen, and `sync: {job.sync.kind}` is cut "
            "alike everywhere, not planned; plan it with `sync: bsp`, which brings weights together as often"
        )
    remarks: tuple[str, ...] = ()
    slots = request.optimizer_slots
    if job is not None and slots is None and slots_of(job.optimizer, job.weights) is None:
        slots = _MOST_SLOTS
        assumed = f"planned for {slots} tensors of the parameters' size, say --optimizer-slots if it is another number"
        remarks = (f"what {job.optimizer.name} keeps is not known; {assumed}",)
    base = PlanOptions(optimizer_slots=slots or 0) if job is None else options_of(job, slots=slots)
    if request.shards is not None and not base.with_shards:
        raise UserError("--shards is for parameter servers, which the job goes without; leave it out")
    if request.allocation == "parallel":
        # PipeDream-2BW's planner, which chooses N by itself
        base = replace(_with_weights(PLANNED_POLICY, base), minibatches_per_wave=None)
    base = _with_weights(_choice("--weights", request.weights, WEIGHTS, base.weights), base)
    workers = base.workers if request.allocation is None else None
    options = replace(
        base,
        allocation=_choice("--allocation", request.allocation, ALLOCATIONS, base.allocation),
        workers=workers if request.workers is None else workers_of(request.workers),
        minibatches_per_wave=_minibatches_of(request.minibatches_per_wave, base.minibatches_per_wave),
        placement=_placement_of(request.placement, base.placement),
        staleness=base.staleness if request.staleness in (None, AUTO) else staleness_of(str(request.staleness)),
        max_staleness=request.max_staleness if request.staleness == AUTO else base.max_staleness,
        schedule=_choice("--schedule", request.schedule, SCHEDULES, base.schedule),
        recompute=_choice("--recompute", request.recompute, RECOMPUTE, base.recompute),
        reserve_bytes=request.reserve_bytes or 0,
        num_shards=base.num_shards if request.shards is None else request.shards,
        max_batch=request.max_batch,
    )
    return Wishes(options, remarks)


def _with_weights(weights: WeightPolicy, base: PlanOptions) -> PlanOptions:
    """The same under a policy, which has a schedule of its own and may accumulate by itself."""
    if weights == base.weights:
        return base
    accumulate = 1 if POLICIES[weights].one_update_per_wave else base.accumulate
    return replace(base, weights=weights, schedule="auto", accumulate=accumulate)


def workers_of(text: str) -> tuple[tuple[DeviceId, ...], ...]:
    """The value of `--workers`.

    Raises:
        UserError: it is no JSON list of lists of device names.

    >>> workers_of('[["n0/0", "n1/0"], ["n0/1"]]')
    (('n0/0', 'n1/0'), ('n0/1',))
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"--workers is no JSON ({error}); give for example {_WORKERS_EXAMPLE}") from None
    match value:
        case [[*_], *_] if all(isinstance(name, str) for names in value for name in _entries(names)):
            return tuple(tuple(map(DeviceId, names)) for names in value)
        case _:
            raise UserError(f"--workers is a list of lists of device names, not {text}; for example {_WORKERS_EXAMPLE}")


def _entries(names: object) -> list[object]:
    return names if isinstance(names, list) else [None]


def _placement_of(text: str | None, default: PlacementName | None) -> PlacementName | None:
    if text is None or text == AUTO:
        return default if text is None else None
    return _choice("--placement", text, PLACEMENTS, "balanced")


def _minibatches_of(text: str | None, default: int | None) -> int | None:
    if text is None:
        return default
    if text == AUTO:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--minibatches-per-wave is {text!r}; give a whole number from 1 on, or auto")
    return int(text)


def _choice(option: str, text: str | None, choices: Mapping[str, ChoiceT], default: ChoiceT) -> ChoiceT:
    if text is None:
        return default
    if text not in choices:
        raise UserError(f"{option} knows no {text!r}; {did_you_mean(text, choices)}")
    return choices[text]
