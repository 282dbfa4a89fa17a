"""Scripts of changes of plans: what they mean for a run, and whether they can be done. Pure (plan-versions.md §3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hetpipe.decide.elastic.freezing import freezing_of
from hetpipe.decide.elastic.moving import stays_near
from hetpipe.decide.planner.borders import check_borders
from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.sync.records import SegmentRecord
from hetpipe.decide.sync.segment import ScriptedChanges, planned_lengths, wave_change_at
from hetpipe.errors import PlanError
from hetpipe.job.elastic import (
    ActivateLine,
    AddLine,
    BarrierLine,
    DropLine,
    FreezeLine,
    MemoryLine,
    MinibatchMoment,
    MoveLine,
    ScriptLine,
    ScriptMoment,
    WavesLine,
)
from hetpipe.job.file import Job
from hetpipe.values.decisions import (
    BarrierDecision,
    DecisionLine,
    DecisionMoment,
    FreezeDecision,
    MemberDecision,
    MoveDecision,
    MoveJudgement,
    StayDecision,
    WavesDecision,
)
from hetpipe.values.freezing import FreezeLineup
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.memory import MemoryChange, concerns
from hetpipe.values.plan import Plan, VirtualWorkerPlan
from hetpipe.values.policies import POLICIES
from hetpipe.values.sync import (
    DataSpec,
    MemberChange,
    PlanChange,
    Progress,
    WaveChange,
    WaveNumbers,
    is_absent,
    layer_counts,
)


def plan_changes(job: Job, plan: Plan | None = None) -> tuple[PlanChange, ...]:
    """The changes of plans that the script of a job decides, and those of its plan for active layers, in order.

    Policies of layers are the stages' own affair (`memory_changes`): of these lines there are only the barriers.
    """
    cuts = () if plan is None else plan.activation_cuts
    found = [PlanChange(cut.clock, cut.vw, cut.bounds) for cut in cuts]
    for line in job.elastic.script:
        if isinstance(line, MoveLine) and isinstance(line.at, MinibatchMoment):
            vw = VirtualWorkerIndex(line.vw)
            found.append(PlanChange(_clock_before(job, vw, line.at.p), vw, (0, *accumulate(line.stages)), live=True))
        if isinstance(line.at, MinibatchMoment) or isinstance(line, WavesLine | DropLine | FreezeLine | ActivateLine):
            continue
        cut = _new_cut(line)
        if cut or not isinstance(line, AddLine):
            vw = VirtualWorkerIndex(0 if isinstance(line, BarrierLine) else line.vw)
            found.append(PlanChange(Clock(line.at.clock), vw, (0, *accumulate(cut)) if cut else ()))
    return tuple(sorted(found, key=lambda change: change.clock))


def scripted_cut(job: Job, vw: VirtualWorkerIndex, after: Clock, upto: Clock) -> tuple[int, ...]:
    """The bounds that the script gives a virtual worker last, above clock `after` and up to `upto`; empty: none."""
    changes = [change for change in plan_changes(job) if change.vw == vw and after < change.clock <= upto]
    return next((change.bounds for change in reversed(changes) if change.bounds), ())


def _clock_before(job: Job, vw: VirtualWorkerIndex, p: int) -> Clock:
    """The clock at which the wave of minibatch `p` begins, if N has not changed before it."""
    return Clock((p - 1) // job.minibatches_of(vw))


def _new_cut(line: ScriptLine) -> tuple[int, ...]:
    """Layers of each stage behind a line that cuts a virtual worker anew; empty: it does not."""
    is_first = isinstance(line, AddLine) and line.devices is not None
    return line.stages or () if isinstance(line, MoveLine | AddLine) and not is_first else ()


def member_changes(job: Job) -> tuple[MemberChange, ...]:
    """The virtual workers that leave and come back as the script of a job decides, in order."""
    return job.elastic.member_changes


def wave_changes(job: Job) -> tuple[WaveChange, ...]:
    """The changes of N that the script of a job decides, in order of their clocks, at most one for each.

    Raises:
        JobError: `keep_global_batch` requires N, which is not planned yet.
    """
    given = {line.at.clock: line.counts for line in job.elastic.waves}
    if not job.elastic.keep_global_batch or not job.elastic.members:
        return tuple(WaveChange(Clock(clock), counts) for clock, counts in given.items())
    workers = [VirtualWorkerIndex(vw) for vw in range(job.num_ever)]
    own = [job.minibatches_of(vw) for vw in workers]
    lines, found = member_changes(job), list[WaveChange]()
    unit = 1 if POLICIES[job.weights].one_update_per_wave else job.gradients.accumulate
    total = _total(own, lines, 0)
    for clock in sorted({0, *given, *(line.clock for line in lines)}):
        if clock in given:
            change = WaveChange(Clock(clock), given[clock])
            own = [change.of(vw) for vw in workers]
            total = _total(own, lines, clock)
        present = [vw for vw in workers if not is_absent(lines, vw, clock)]
        shares = dict(zip(present, dealt_in_proportion(total, [own[vw] for vw in present], unit=unit), strict=True))
        if clock:
            found.append(WaveChange(Clock(clock), tuple(shares.get(vw, own[vw]) for vw in workers)))
    return tuple(found)


def _total(own: Sequence[int], lines: Sequence[MemberChange], clock: int) -> int:
    """Minibatches of a wave of all members."""
    return sum(n for vw, n in enumerate(own) if not is_absent(lines, vw, clock))


def dealt_in_proportion(total: int, weights: Sequence[int], *, unit: int = 1) -> list[int]:
    """Whole multiples of `unit` with a sum, in proportion to `weights`; by largest remainder, the first of equals.

    >>> dealt_in_proportion(12, [4, 4]), dealt_in_proportion(16, [4, 4, 4]), dealt_in_proportion(12, [4, 2], unit=2)
    ([6, 6], [6, 5, 5], [8, 4])
    """
    units, whole = total // unit, sum(weights)
    found = [units * weight // whole for weight in weights]
    by_rest = sorted(range(len(weights)), key=lambda index: (-(units * weights[index] % whole), index))
    for index in by_rest[: units - sum(found)]:
        found[index] += 1
    return [unit * each for each in found]


def memory_changes(job: Job, vw: VirtualWorkerIndex) -> tuple[MemoryChange, ...]:
    """The changes of memory policies that the script of a job decides for one virtual worker, in order."""
    return tuple(
        MemoryChange(line.layers, line.policy, minibatch=line.at.p)
        if isinstance(line.at, MinibatchMoment)
        else MemoryChange(line.layers, line.policy, clock=line.at.clock)
        for line in job.elastic.script
        if isinstance(line, MemoryLine) and line.vw == vw
    )


def most_minibatches_per_wave(job: Job, plan: Plan, vw: VirtualWorkerIndex) -> int:
    """The largest N_v that a virtual worker ever has."""
    compressed = [lineup.minibatches_per_wave for lineup in plan.freeze_lineups]
    own = job.minibatches_in(plan.virtual_workers[vw])
    return max(own, *(change.of(vw) for change in wave_changes(job)), *compressed, 1)


#: The lines that repeat what a run has decided.
DecidedLine = MoveLine | DropLine | AddLine | WavesLine | FreezeLine | BarrierLine


def script_of(decisions: Iterable[DecisionLine]) -> tuple[DecidedLine, ...]:
    """The lines of a script that repeat what a run has decided, at the clocks at which that took effect, in order."""
    found: list[tuple[int, int, DecidedLine]] = []
    for line in decisions:
        if isinstance(line, MoveJudgement | StayDecision):
            continue  # it changes nothing
        clock, at = line.at.clock, ScriptMoment(clock=line.at.clock)
        match line:
            case MoveDecision():
                moment = at if line.at.p is None else MinibatchMoment(p=line.at.p)
                found.append((clock, line.vw, MoveLine(at=moment, do=line.do, vw=line.vw, stages=line.stages)))
            case MemberDecision(do="drop"):
                found.append((clock, line.vw, DropLine(at=at, do="drop", vw=line.vw)))
            case MemberDecision():
                new = {"stages": line.stages, "devices": line.devices} if line.devices else {}
                found.append((clock, line.vw, AddLine(at=at, do="add", vw=line.vw, **new)))
            case FreezeDecision():
                found.append((clock, -1, FreezeLine(at=at, do=line.do, layers=line.layers)))
            case WavesDecision():
                waves = WavesLine(at=at, do=line.do, minibatches_per_wave=line.minibatches_per_wave)
                found.append((clock, -1, waves))
            case BarrierDecision():
                found.append((clock, -1, BarrierLine(at=at, do=line.do)))
    return tuple(line for _, _, line in sorted(found, key=lambda entry: entry[:2]))


def member_decisions(
    record: SegmentRecord,
    scripted: Iterable[MemberChange],
    before: Sequence[DecisionLine],
    *,
    initial: Mapping[VirtualWorkerIndex, int],
    wall: float,
) -> Iterator[MemberDecision]:
    """The decisions about virtual workers that leave or join at the barrier of `record`, as no script says.

    Args:
        record: of the segment behind the barrier.
        scripted: what the script of the job decides.
        before: the decisions of the run so far.
        initial: virtual workers of the plan → number of their stages.
        wall: when they are written, in seconds since 1970.
    """
    moment = DecisionMoment(record.start)
    dropped = {change.vw for change in scripted if change.clock == record.start and not change.joins}
    for left in record.left:
        if left.vw not in dropped:
            yield MemberDecision(moment, "drop", left.vw, "drain", "it was drained", wall)
    lines = [line for line in before if isinstance(line, MemberDecision)]
    newest = {line.vw: line.do for line in lines}
    num_devices = sum(initial.values()) + sum(len(line.devices) for line in lines if line.by == "operator")
    for member in record.members:
        if member.joined and newest.get(member.vw) == "drop":
            yield MemberDecision(moment, "add", member.vw, "drain", "it came back after it was drained", wall)
        elif member.joined and member.vw not in {*initial, *newest}:
            stages = layer_counts(member.bounds)
            devices = tuple(range(num_devices, num_devices := num_devices + len(stages)))
            why, per_wave = "an operator has added it", member.minibatches_per_wave
            yield MemberDecision(moment, "add", member.vw, "operator", why, wall, stages, devices, per_wave)


def absent_after_rewind(
    record: SegmentRecord, expected: Iterable[VirtualWorkerIndex], *, wall: float
) -> Iterator[MemberDecision]:
    """The decisions by which virtual workers are not back after a rewind, at the checkpoint where `record` begins."""
    present = {member.vw for member in record.members}
    for vw in expected:
        if vw not in present:
            why = "it was not there when the run continued from its checkpoint"
            yield MemberDecision(DecisionMoment(record.start), "drop", vw, "rewind", why, wall)


@dataclass(frozen=True, slots=True)
class DecidedSince:
    """What a run has decided since it was rewound."""

    start: Clock
    """Of the checkpoint to which it was rewound."""
    num_workers: int
    """Virtual workers in its plan, which all continue from there unless `absent_after_rewind` names them."""
    decisions: tuple[DecisionLine, ...]


def over_rewinds(first: Sequence[DecisionLine], rewinds: Iterable[DecidedSince]) -> tuple[DecisionLine, ...]:
    """The decisions that have led to the weights of a run, in order.

    Those beyond a checkpoint to which it was rewound did not happen.

    Args:
        first: before the first rewind.
        rewinds: since then, in order.
    """
    found = tuple(first)
    for rewind in rewinds:
        found = tuple(_with_rewind(found, rewind))
    return found


def _with_rewind(before: Sequence[DecisionLine], rewind: DecidedSince) -> Iterator[DecisionLine]:
    start, decided = rewind.start, rewind.decisions
    moment, why = DecisionMoment(start), "the run was rewound to its checkpoint there"
    kept = [line for line in before if _took_effect(line, start, before)]
    by_request = [line for line in kept if isinstance(line, MemberDecision) and line.by != "freeze"]
    newest = {line.vw: line for line in by_request}
    added = {line.vw: line for line in before if isinstance(line, MemberDecision) and line.by == "operator"}
    gone = {line.vw for line in decided if isinstance(line, MemberDecision) and line.by == "rewind"}
    gone |= {vw for vw in added if vw >= rewind.num_workers}
    changed = {vw: line for vw, line in newest.items() if (line.do == "drop") != (vw in gone)}
    undone = {line.key for line in changed.values() if line.at.clock == start}
    known = {(vw, "rewind") for vw in newest.keys() | added.keys()}
    lines: list[DecisionLine] = [line for line in kept if line.key not in undone]
    lines += [BarrierDecision(moment, "barrier", "rewind", why, 0.0)]
    for vw, line in changed.items():
        if line.key not in undone:
            lines += [MemberDecision(moment, "drop" if vw in gone else "add", vw, "rewind", why, 0.0)]
    lines += [replace(line, at=moment) for vw, line in added.items() if vw not in newest.keys() | gone]
    lines += [line for line in decided if not isinstance(line, MemberDecision) or (line.vw, line.by) not in known]
    # No line of a script is at clock 0: one whose first line is `add` is absent from the start.
    yield from (line for line in lines if isinstance(line, MoveJudgement) or line.at.clock)


def _took_effect(line: DecisionLine, clock: Clock, lines: Iterable[DecisionLine]) -> bool:
    """Whether a decision has taken effect at or below a clock; of a judgement, the move that it judges."""
    if not isinstance(line, MoveJudgement):
        return line.at.clock <= clock
    moves = (move for move in lines if isinstance(move, MoveDecision) and move.at.clock <= clock)
    return any((move.vw, move.version) == (line.vw, line.version) for move in moves)


def lineup_decisions(
    record: SegmentRecord, before: FreezeLineup, lineup: FreezeLineup, *, wall: float
) -> Iterator[MemberDecision | WavesDecision]:
    """The decisions by which a lineup replaces another one at the barrier of `record` (freezing.md §4)."""
    moment = DecisionMoment(record.start)
    reason = f"pipelines are compressed, as {lineup.frozen} layers with parameters or more are frozen"
    joined = {member.vw: member for member in record.members if member.joined}
    for member in record.left:
        if member.vw not in lineup.members:
            yield MemberDecision(moment, "drop", member.vw, "freeze", reason, wall)
    for worker in lineup.workers:
        if worker.vw in joined:
            stages = layer_counts(joined[worker.vw].bounds)
            yield MemberDecision(moment, "add", worker.vw, "freeze", reason, wall, stages, worker.devices)
    if before.minibatches_per_wave != lineup.minibatches_per_wave:
        yield WavesDecision(moment, "waves", lineup.minibatches_per_wave, "freeze", reason, wall)


def next_add(job: Job, vw: VirtualWorkerIndex, after: int) -> tuple[int, AddLine] | None:
    """The first line, and its number, with which the script adds a virtual worker at a clock above `after`."""
    adds = ((number, line) for number, line in enumerate(job.elastic.script) if isinstance(line, AddLine))
    return next(((number, line) for number, line in adds if line.vw == vw and line.at.clock > after), None)


def predecessor(
    job: Job, plan: Plan, vw: VirtualWorkerIndex, clock: int, left: Iterable[VirtualWorkerIndex] | None = None
) -> VirtualWorkerIndex | None:
    """The virtual worker whose state `vw` takes over, as it leaves where `vw` joins, and had its first device.

    Args:
        job: of the run.
        plan: of the run.
        vw: joins.
        clock: of the barrier.
        left: who has left there; None: those that the script drops there.
    """
    is_compressed = any(vw in lineup.members for lineup in plan.freeze_lineups[1:])
    if not is_compressed and not any(line.vw == vw and line.at.clock == clock for _, line in job.elastic.added):
        return None
    if left is None:
        left = [change.vw for change in member_changes(job) if change.clock == clock and not change.joins]
    first = plan.virtual_workers[vw].stages[0]
    for other in left:
        places = [(stage.agent, stage.device) for stage in plan.virtual_workers[other].stages]
        if (first.agent, first.device) in places:
            return other
    return None


def cannot_come(number: int, line: AddLine, cause: str) -> str:
    """Sentence: a virtual worker that the script adds is not there."""
    return (
        f"elastic.script[{number}]: adds virtual worker {line.vw} at clock {line.at.clock}, but it cannot come: "
        f"{cause}; mend that, or remove the line"
    )


def building_line(job: Job, vw: VirtualWorkerIndex, clock: int) -> str:
    """The newest line at or below `clock` that builds a virtual worker's stages anew, for a message; empty: none."""
    found = ""
    for number, line in enumerate(job.elastic.script):
        if isinstance(line, MoveLine | AddLine) and _new_cut(line) and line.vw == vw:
            what = f"moves layers of virtual worker {vw} to {list(_new_cut(line))}"
        elif isinstance(line, FreezeLine):
            what = f"freezes {line.layers} layers"
        elif isinstance(line, ActivateLine) and line.fresh:
            what = "builds layers anew"
        else:
            continue
        if isinstance(line.at, MinibatchMoment):
            at, when = _clock_before(job, vw, line.at.p), f"minibatch {line.at.p}"
        else:
            at, when = Clock(line.at.clock), f"clock {line.at.clock}"
        if at <= clock:
            found = f"elastic.script[{number}]: {what} at {when}"
    return found


def check_script(
    job: Job, plan: Plan, data: DataSpec, start: Progress, names: Sequence[str], costs: Costs | None = None
) -> None:
    """Check that every line of a job's script can be done.

    Args:
        job: planned.
        plan: of the run.
        data: its data.
        start: where it begins. Lines at or below its clock belong to the run that it continues.
        names: of the model's layers, in order.
        costs: of the model, which forbid cuts; None: not known, as the job states everything.

    Raises:
        PlanError: one cannot; the message names it.
    """
    if not job.elastic.script:
        return
    run = _ScriptedRun(job, plan, start, names, costs, _end(job, plan, data, start))
    reached: dict[int, int] = defaultdict(int)
    for number, line in enumerate(job.elastic.script):
        wrong = next(run.mistakes(line), None) or next(run.disorder(line, reached), None)
        if isinstance(line, DropLine | AddLine):
            if all(job.elastic.is_absent(worker.index, line.at.clock) for worker in plan.virtual_workers):
                wrong = f"drops virtual worker {line.vw}, the last one that trains; keep one"
            wrong = wrong or next(run.mistakes_of_shares(line), None) or next(run.shared_devices(line), None)
            wrong = wrong or next(run.mistakes_of_replicas(line), None)
        if wrong is not None:
            raise PlanError(f"elastic.script[{number}]: {wrong}")


@dataclass(frozen=True, slots=True)
class _ScriptedRun:
    """A run, for the lines of its script."""

    job: Job
    plan: Plan
    start: Progress
    names: Sequence[str]
    costs: Costs | None
    end: int
    """The clock at which it ends."""

    def mistakes(self, line: ScriptLine) -> Iterator[str]:
        """The reasons why a line cannot be applied; each lacks the subject."""
        workers = self.plan.virtual_workers
        if isinstance(line, WavesLine):
            yield from self._mistakes_of_waves(line)
        elif isinstance(line, FreezeLine | ActivateLine | BarrierLine):
            pass  # `decide.elastic.freezing` checks how many layers it names
        elif line.vw >= len(workers):
            yield f"names virtual worker {line.vw}, but the run has {len(workers)}; use 0 to {len(workers) - 1}"
            return
        elif isinstance(line, MoveLine | AddLine) and line.stages:
            yield from cut_mistakes(line.stages, workers[line.vw])
            yield from self._forbidden(line.vw, line.stages)
        elif isinstance(line, MemoryLine):
            for layer in line.layers:
                if not any(concerns(layer, index, name) for index, name in enumerate(self.names)):
                    known = f"0 to {len(self.names) - 1}: {', '.join(self.names)}"
                    yield f"names layer {layer}, but the model has the layers {known}"
        if isinstance(line, MemoryLine | MoveLine) and isinstance(line.at, MinibatchMoment):
            yield from self._mistakes_of_moment(line.vw, line.at.p)
            yield from self._mistakes_of_live(line)
        if (wave := self._wave(line)) >= self.end:
            yield (
                f"is at clock {wave}, but the run ends at clock {self.end}, where nothing is trained any more; use a "
                "lower one, or train longer"
            )

    def _mistakes_of_live(self, line: MoveLine | MemoryLine) -> Iterator[str]:
        """Why layers cannot move without a barrier."""
        if isinstance(line, MemoryLine):
            return
        worker, wave = self.plan.virtual_workers[line.vw], self._wave(line)
        known, after = self.start.plans.get(worker.index), (0, *accumulate(line.stages))
        if worker.index in self.start.waves:
            yield "is a minibatch, but the run goes on from one in which N has changed; give a `clock`"
        before = known.bounds if known is not None and known.planned == worker.bounds else worker.bounds
        for other in self.job.elastic.moves:
            if other is line or other.vw != line.vw or self._wave(other) <= self.start.clock:
                continue
            if self._wave(other) == wave:
                yield f"moves virtual worker {line.vw} a second time in wave {wave}; remove one"
            if self._wave(other) < wave:
                before = (0, *accumulate(other.stages))
        if len(before) == len(after) and not stays_near(before, after):
            yield (
                f"moves layers of virtual worker {line.vw} from {list(layer_counts(before))} to {list(line.stages)}, "
                "some beyond the next stage; give a `clock`, as without a barrier they go to a neighbour only"
            )

    def disorder(self, line: ScriptLine, reached: dict[int, int]) -> Iterator[str]:
        """Whether it takes effect before an earlier line about the same virtual worker; `reached` has their waves."""
        if isinstance(line, WavesLine | FreezeLine | ActivateLine | BarrierLine):
            return
        wave = self._wave(line)
        if wave < reached[line.vw]:
            yield f"takes effect in wave {wave}, after one in wave {reached[line.vw]}; give the lines in order of time"
        reached[line.vw] = wave

    def _forbidden(self, vw: int, stages: Sequence[int]) -> Iterator[str]:
        """The reason why the model cannot be cut there."""
        if self.costs is not None:
            try:
                check_borders(list(accumulate(stages))[:-1], self.costs, vw)
            except PlanError as error:
                yield str(error)

    def mistakes_of_shares(self, line: DropLine | AddLine) -> Iterator[str]:
        """Why the minibatches of a wave cannot be dealt to those that train from a line on; see `keep_global_batch`."""
        changes, lines = wave_changes(self.job), member_changes(self.job)
        change = wave_change_at(changes, line.at.clock)
        if not self.job.elastic.keep_global_batch or change is None:
            return
        for worker in self.plan.virtual_workers:
            least = POLICIES[self.job.weights].least_minibatches_per_wave(len(worker.stages))
            n = change.of(worker.index)
            if n < least and not is_absent(lines, worker.index, line.at.clock):
                yield (
                    f"leaves {n} minibatches per wave to virtual worker {worker.index}, but it needs {least} or more; "
                    "use a larger sync.minibatches_per_wave, or remove `keep_global_batch`"
                )

    def mistakes_of_replicas(self, line: DropLine | AddLine) -> Iterator[str]:
        """Why those that train from a line on cannot do without parameter servers."""
        job, clock = self.job, line.at.clock
        if job.has_shards:
            return
        vw = VirtualWorkerIndex(line.vw)
        if isinstance(line, AddLine) and predecessor(job, self.plan, vw, clock) is None:
            yield (
                f"adds virtual worker {vw}, but under `{job.sync.kind}` only the stages hold the weights; drop one "
                "that has its first device at the same clock"
            )
        if isinstance(line, AddLine) and job.storage is not None:
            yield f"adds virtual worker {vw}, which needs files of the run's folder, but `storage` is set; remove one"
        present = [worker for worker in self.plan.virtual_workers if not job.elastic.is_absent(worker.index, clock)]
        cuts = {worker.index: worker.bounds for worker in present}
        cuts |= {
            change.vw: change.bounds
            for change in plan_changes(job)
            if change.vw in cuts and change.bounds and change.clock <= clock
        }
        if len(set(cuts.values())) > 1:
            yield (
                f"leaves virtual workers {', '.join(map(str, cuts))} with different cuts from clock {clock} on, but "
                f"under `{job.sync.kind}` all are cut equally; drop and add all of them there, with the same `stages`"
            )
        change = wave_change_at(wave_changes(job), clock)
        if change is not None and len({change.of(worker.index) for worker in present}) > 1:
            yield (
                f"leaves virtual workers {', '.join(map(str, cuts))} with waves of different lengths from clock "
                f"{clock} on, but under `{job.sync.kind}` all have equal waves; use a number of minibatches that they "
                "can share"
            )

    def shared_devices(self, line: DropLine | AddLine) -> Iterator[str]:
        """The devices that two virtual workers would have at once from a line's clock on."""
        lines = member_changes(self.job)
        users: dict[tuple[str, str], int] = {}
        for worker in self.plan.virtual_workers:
            for stage in () if is_absent(lines, worker.index, line.at.clock) else worker.stages:
                other = users.setdefault((stage.agent, stage.device), worker.index)
                if other != worker.index:
                    yield (
                        f"has virtual worker {worker.index} train on device {stage.device} from clock {line.at.clock} "
                        f"on, where virtual worker {other} trains; drop that there or before"
                    )

    def _mistakes_of_waves(self, line: WavesLine) -> Iterator[str]:
        workers = self.plan.virtual_workers
        if len(line.counts) not in (1, len(workers)):
            yield f"has {len(line.counts)} numbers, but the run has {len(workers)} virtual workers; give one for each"
            return
        change = WaveChange(Clock(line.at.clock), line.counts)
        for worker in workers:
            if not self._trains_between(worker.index, line.at.clock):
                continue
            least = POLICIES[self.job.weights].least_minibatches_per_wave(len(worker.stages))
            if change.of(worker.index) < least:
                yield (
                    f"has {change.of(worker.index)} minibatches per wave, but {self.job.weights} needs as many as "
                    f"virtual worker {worker.index} has stages; use {least} or more"
                )

    def _trains_between(self, vw: VirtualWorkerIndex, clock: int) -> bool:
        """Whether a virtual worker trains at any time from a line `waves` on, up to the next one."""
        lines, later = member_changes(self.job), [line.at.clock for line in self.job.elastic.waves]
        end = min((at for at in later if at > clock), default=self.end)
        return any(not is_absent(lines, vw, at) for at in (clock, *(c.clock for c in lines if clock < c.clock < end)))

    def _mistakes_of_moment(self, vw: int, p: int) -> Iterator[str]:
        wave, numbers = self._numbers_at(vw, p)
        first = numbers.origin + wave * numbers.minibatches_per_wave + 1
        if p != first:
            yield (
                f"is at minibatch {p}, which does not begin a wave of {numbers.minibatches_per_wave}; use {first} or "
                f"{first + numbers.minibatches_per_wave}"
            )

    def _wave(self, line: ScriptLine) -> int:
        """The first wave in which a line is in effect."""
        if isinstance(line, MemoryLine | MoveLine) and isinstance(line.at, MinibatchMoment):
            return self._numbers_at(line.vw, line.at.p)[0]
        assert isinstance(line.at, ScriptMoment), "other lines begin at barriers"
        return line.at.clock

    def _numbers_at(self, vw: int, p: int) -> tuple[int, WaveNumbers]:
        """The wave of a minibatch, and the numbers in force there, as if they were so from clock 0 on."""
        worker = self.plan.virtual_workers[vw]
        known = self.start.waves.get(worker.index)
        n, since = self.job.minibatches_in(worker), 0 if known is None else self.start.clock
        numbers = WaveNumbers(n, 0) if known is None else known
        for change in wave_changes(self.job):
            origin = numbers.origin + (change.clock - since) * numbers.minibatches_per_wave
            if change.clock <= since:
                continue
            if p <= origin:
                break
            numbers, since = WaveNumbers(change.of(worker.index), origin), change.clock
        n = numbers.minibatches_per_wave
        return since + (p - 1 - numbers.origin) // n, WaveNumbers(n, numbers.origin - since * n)


def cut_mistakes(layers: Sequence[int], worker: VirtualWorkerPlan) -> Iterator[str]:
    """The reasons why layers cannot move between the stages of a virtual worker; each lacks the subject.

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
    """The clock at which the run ends if its virtual workers are there whenever the script says; later, if not."""
    known = [start.waves.get(worker.index) for worker in plan.virtual_workers]
    waves = [
        job.minibatches_in(worker) if numbers is None else numbers.minibatches_per_wave
        for worker, numbers in zip(plan.virtual_workers, known, strict=True)
    ]
    lengths = planned_lengths(
        start,
        data,
        per_wave=waves,
        scripted=ScriptedChanges(
            [change for change in wave_changes(job) if change.clock > start.clock], member_changes(job)
        ),
        checkpoint_every_waves=job.checkpoint.every_waves,
        plan_clocks=job.elastic.clocks,
        freezing=freezing_of(job, plan),
    )
    return max((length.end for length in lengths), default=start.clock)
