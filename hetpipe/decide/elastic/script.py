"""Scripts of changes of plans: what they mean for a run, and whether they can be done. Pure (plan-versions.md §3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from hetpipe.decide.sync.segment import planned_lengths
from hetpipe.errors import PlanError
from hetpipe.job.elastic import ScriptLine, ScriptMoment
from hetpipe.job.file import Job
from hetpipe.values.decisions import MoveDecision, MoveJudgement
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.plan import Plan, VirtualWorkerPlan
from hetpipe.values.sync import DataSpec, PlanChange, Progress


def plan_changes(job: Job) -> tuple[PlanChange, ...]:
    """The changes of plans that the script of a job decides, in order."""
    return tuple(
        PlanChange(Clock(line.at.clock), VirtualWorkerIndex(line.vw), (0, *accumulate(line.stages)))
        for line in job.elastic.script
    )


def script_of(decisions: Iterable[MoveDecision | MoveJudgement]) -> tuple[ScriptLine, ...]:
    """The script that repeats the decisions of a run at their clocks, in order."""
    moves = [line for line in decisions if isinstance(line, MoveDecision)]
    return tuple(
        ScriptLine(at=ScriptMoment(clock=line.at.clock), do=line.do, vw=line.vw, stages=line.stages)
        for line in sorted(moves, key=lambda line: (line.at.clock, line.vw))
    )


def check_script(job: Job, plan: Plan, data: DataSpec, start: Progress) -> None:
    """Check that every line of a job's script can be done.

    Args:
        job: planned.
        plan: of the run.
        data: its data.
        start: where it begins. Lines at or below its clock belong to the run that it continues.

    Raises:
        PlanError: one cannot; the message names it.
    """
    script = job.elastic.script
    ends = _end(job, plan, data, start) if script else 0
    for number, line in enumerate(script):
        wrong = next(_mistakes(line, plan, ends), None)
        if wrong is not None:
            raise PlanError(f"elastic.script[{number}]: {wrong}")


def _mistakes(line: ScriptLine, plan: Plan, end: int) -> Iterator[str]:
    workers, clock = plan.virtual_workers, line.at.clock
    if line.vw >= len(workers):
        yield f"moves virtual worker {line.vw}, but the run has {len(workers)}; use 0 to {len(workers) - 1}"
        return
    yield from cut_mistakes(line.stages, workers[line.vw])
    if clock >= end:
        yield (
            f"is at clock {clock}, but the run ends at clock {end}, where nothing is trained any more; use a lower "
            "one, or train longer"
        )


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
        plan_clocks=[line.at.clock for line in job.elastic.script],
    )
    return max((length.end for length in lengths), default=start.clock)
