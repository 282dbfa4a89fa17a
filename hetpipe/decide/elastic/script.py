"""Scripts of changes of plans: what they mean for a run, and whether they can be done. Pure (plan-versions.md §3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from hetpipe.decide.sync.segment import planned_lengths
from hetpipe.errors import PlanError
from hetpipe.job.elastic import FreezeLine, MemoryLine, MinibatchMoment, MoveLine, ScriptLine, ScriptMoment
from hetpipe.job.file import Job
from hetpipe.values.decisions import DecisionLine, FreezeDecision, MoveDecision
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.memory import MemoryChange, concerns
from hetpipe.values.plan import Plan, VirtualWorkerPlan
from hetpipe.values.sync import DataSpec, PlanChange, Progress


def plan_changes(job: Job) -> tuple[PlanChange, ...]:
    """The changes that the script of a job decides at barriers, in order.

    Policies of layers are the stages' own affair (`memory_changes`): of these lines there are only the barriers.
    """
    return tuple(
        PlanChange(
            Clock(line.at.clock),
            VirtualWorkerIndex(line.vw),
            (0, *accumulate(line.stages)) if isinstance(line, MoveLine) else (),
        )
        for line in job.elastic.script
        if isinstance(line, MoveLine | MemoryLine) and isinstance(line.at, ScriptMoment)
    )


def memory_changes(job: Job, vw: VirtualWorkerIndex) -> tuple[MemoryChange, ...]:
    """The changes of memory policies that the script of a job decides for one virtual worker, in order."""
    return tuple(
        MemoryChange(line.layers, line.policy, minibatch=line.at.p)
        if isinstance(line.at, MinibatchMoment)
        else MemoryChange(line.layers, line.policy, clock=line.at.clock)
        for line in job.elastic.script
        if isinstance(line, MemoryLine) and line.vw == vw
    )


def script_of(decisions: Iterable[DecisionLine]) -> tuple[MoveLine, ...]:
    """The lines of a script that repeat the moves of a run at their clocks, in order."""
    moves = [line for line in decisions if isinstance(line, MoveDecision)]
    return tuple(
        MoveLine(at=ScriptMoment(clock=line.at.clock), do=line.do, vw=line.vw, stages=line.stages)
        for line in sorted(moves, key=lambda line: (line.at.clock, line.vw))
    )


def freezes_of(decisions: Iterable[DecisionLine]) -> tuple[FreezeLine, ...]:
    """The lines of a script that freeze layers at the clocks at which a run has frozen them, in order."""
    frozen = [line for line in decisions if isinstance(line, FreezeDecision)]
    return tuple(FreezeLine(at=ScriptMoment(clock=each.at.clock), do=each.do, layers=each.layers) for each in frozen)


def check_script(job: Job, plan: Plan, data: DataSpec, start: Progress, names: Sequence[str]) -> None:
    """Check that every line of a job's script can be done.

    Args:
        job: planned.
        plan: of the run.
        data: its data.
        start: where it begins. Lines at or below its clock belong to the run that it continues.
        names: of the model's layers, in order.

    Raises:
        PlanError: one cannot; the message names it.
    """
    script = job.elastic.script
    ends = _end(job, plan, data, start) if script else 0
    reached: dict[int, int] = defaultdict(int)
    for number, line in enumerate(script):
        wrong = next(_mistakes(line, job, plan, ends, names), None) or next(_disorder(line, job, plan, reached), None)
        if wrong is not None:
            raise PlanError(f"elastic.script[{number}]: {wrong}")


def _mistakes(line: ScriptLine, job: Job, plan: Plan, end: int, names: Sequence[str]) -> Iterator[str]:
    workers = plan.virtual_workers
    if isinstance(line, FreezeLine):  # the layers are checked in `freezing`
        yield from _too_late(line.at.clock, end)
        return
    if line.vw >= len(workers):
        yield f"names virtual worker {line.vw}, but the run has {len(workers)}; use 0 to {len(workers) - 1}"
        return
    if isinstance(line, MoveLine):
        yield from cut_mistakes(line.stages, workers[line.vw])
    else:
        for layer in line.layers:
            if not any(concerns(layer, index, name) for index, name in enumerate(names)):
                yield f"names layer {layer}, but the model has the layers 0 to {len(names) - 1}: {', '.join(names)}"
    num_in_wave = job.minibatches_in(workers[line.vw])
    if isinstance(line.at, MinibatchMoment) and (line.at.p - 1) % num_in_wave:
        before = line.at.p - (line.at.p - 1) % num_in_wave
        yield (
            f"is at minibatch {line.at.p}, which does not begin a wave of {num_in_wave}; use {before} or "
            f"{before + num_in_wave}"
        )
    yield from _too_late(_wave(line, num_in_wave), end)


def _too_late(wave: int, end: int) -> Iterator[str]:
    if wave >= end:
        yield (
            f"is at clock {wave}, but the run ends at clock {end}, where nothing is trained any more; use a lower "
            "one, or train longer"
        )


def _wave(line: ScriptLine, num_in_wave: int) -> int:
    """The first wave in which a line is in effect."""
    return (line.at.p - 1) // num_in_wave if isinstance(line.at, MinibatchMoment) else line.at.clock


def _disorder(line: ScriptLine, job: Job, plan: Plan, reached: dict[int, int]) -> Iterator[str]:
    """Whether a line takes effect before an earlier one about the same virtual worker; `reached` has their waves."""
    if isinstance(line, FreezeLine):
        return
    wave = _wave(line, job.minibatches_in(plan.virtual_workers[line.vw]))
    if wave < reached[line.vw]:
        yield f"takes effect in wave {wave}, after one in wave {reached[line.vw]}; give the lines in order of time"
    reached[line.vw] = wave


def cut_mistakes(layers: Sequence[int], worker: VirtualWorkerPlan) -> Iterator[str]:
    """Why layers cannot move between the stages of a virtual worker; each message lacks the subject.

    Args:
        layers: of each stage after the move, ≥ 1.
        worker: with its stages.
    """
    stages = worker.stages
    if len(layers) != len(stages):
        given = f"{len(layers)} {'stage' if len(layers) == 1 else 'stages'}"
        yield (
            f"has {given} for virtual worker {worker.index}, which has {len(stages)}; a move keeps their number: give "
            "the layers of each"
        )
    elif sum(layers) != stages[-1].last_layer:
        yield (
            f"has {sum(layers)} layers for virtual worker {worker.index}, but the model has {stages[-1].last_layer}; "
            "give each of them to a stage"
        )


def _end(job: Job, plan: Plan, data: DataSpec, start: Progress) -> int:
    """The clock at which the run ends if all of its virtual workers are there all the time; later, if not."""
    waves = [job.minibatches_in(worker) for worker in plan.virtual_workers]
    lengths = planned_lengths(
        start,
        data,
        members=len(waves),
        minibatches_in_wave=sum(waves),
        checkpoint_every_waves=job.checkpoint.every_waves,
        plan_clocks=job.elastic.clocks,
        plan_every_waves=job.freeze.waves,
    )
    return max((length.end for length in lengths), default=start.clock)
