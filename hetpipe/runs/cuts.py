"""How the virtual workers of a run have been cut over time, who trained, and how fast that was (plan-versions.md §6).

Cuts that were found and not made, as they gain too little, are among them.

Cuts come from the run's plan, from `decisions.jsonl`, and from the lines of the job's script, and the plan's cuts for
active layers, that the run has reached; rates from its metrics. So they are the same while the run trains and after
its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hetpipe.errors import HetpipeError
from hetpipe.observe.metrics import TimedWave, waves_by_worker
from hetpipe.report.text import rate
from hetpipe.runs.run_folder import plan_in
from hetpipe.server.decisions_file import decisions_of_run
from hetpipe.values.activation import ActivationCut
from hetpipe.values.decisions import DecisionLine, MemberDecision, MoveDecision, MoveJudgement, StayDecision
from hetpipe.values.rewinds import run_folders
from hetpipe.values.sync import layer_counts

#: Waves on either side of a move of which the rates are compared.
_COMPARED_WAVES = 10

_SCRIPT = "script"


@dataclass(frozen=True, slots=True)
class CutChange:
    """Another cut of a virtual worker, or other memory policies, from a clock on; or it leaves or joins there.

    Or another cut was searched or requested there, and its layers stay where they are.
    """

    clock: int
    vw: int
    stages: tuple[int, ...]
    """Layers of each of its stages from there on; empty where it leaves, or joins as it was; where its layers stay,
    those by the best cut, empty if none fits.
    """
    by: str
    """What decided it: `script`, `activate` where others become active, or `by` of the decision."""
    reason: str = ""
    """Empty for a line of the script."""
    predicted_gain: float | None = None
    """Speed-up of the job that was expected, as a fraction; None: not predicted."""
    before: float | None = None
    """Minibatches per second of the virtual worker in its last waves before; None: not measured."""
    since: float | None = None
    """In its first waves behind the move, likewise."""
    judgement: str = ""
    """What the coordinator has measured of its stages; empty: nothing yet."""
    do: Literal["move", "drop", "add", "memory", "stay"] = "move"
    """Another cut, other memory policies, or it leaves or joins: the verb of a script; or its layers stay."""
    p: int | None = None
    """The first minibatch, where it sets no barrier."""
    policies: str = ""
    """Memory policies of layers from there on: `layers 0, h.*: recompute`; empty: those that they had."""

    @property
    def measured_gain(self) -> float | None:
        """Speed-up of the virtual worker, as a fraction; None: not measured."""
        return None if not self.before or self.since is None else self.since / self.before - 1.0

    @property
    def layers_text(self) -> str:
        """Layers of each stage: `3-1`."""
        return "-".join(map(str, self.stages))

    @property
    def change_text(self) -> str:
        """`is cut 3-1`, `stays as it is cut, not 3-1`, `leaves`, `joins`, `joins, cut 3-1`, or `has layers 0: swap`."""
        match self.do:
            case "memory":
                return f"has {self.policies}"
            case "move":
                return f"is cut {self.layers_text}"
            case "stay":
                is_other = self.stages and self.predicted_gain != 0.0
                return f"stays as it is cut, not {self.layers_text}" if is_other else "stays as it is cut"
            case "drop":
                return "leaves"
            case "add":
                return f"joins, cut {self.layers_text}" if self.stages else "joins"

    @property
    def gain_text(self) -> str:
        """`12.1 minibatches/s before, 25.3 since (+109 %), predicted +190 %`; empty: nothing is known."""
        parts = []
        if self.before is not None and self.since is not None:
            gain = "" if self.measured_gain is None else f" ({signed_percent(self.measured_gain)})"
            parts.append(f"{rate(self.before)} minibatches/s before, {rate(self.since)} since{gain}")
        if self.predicted_gain is not None:
            parts.append(f"predicted {signed_percent(self.predicted_gain)}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The object of `status --json` and `top --json`."""
        return {**asdict(self), "measured_gain": self.measured_gain}

    def __str__(self) -> str:
        """`clock 31: virtual worker 1 is cut 4-1, by straggler; 12.1 minibatches/s before, …`."""
        gain = f"; {self.gain_text}" if self.gain_text else ""
        moment = f"clock {self.clock}" if self.p is None else f"minibatch {self.p}, without a barrier"
        return f"{moment}: virtual worker {self.vw} {self.change_text}, by {self.by}{gain}"


def signed_percent(share: float) -> str:
    """A gain as text.

    >>> signed_percent(1.094), signed_percent(-0.001)
    ('+109 %', '+0 %')
    """
    return f"{round(100 * share):+d} %"


def read_cuts(run_dir: Path) -> tuple[CutChange, ...]:
    """The cuts of the run in a folder since its plan, in order; of a rewound run since the last rewind.

    What cannot be read counts as not there.
    """
    folder = run_folders(run_dir)[-1]
    try:
        decisions: Sequence[DecisionLine] = decisions_of_run(run_dir)
    except (OSError, HetpipeError):
        decisions = ()
    plan = plan_in(folder)
    try:
        waves: Mapping[int, Sequence[TimedWave]] = waves_by_worker(folder)
    except OSError:
        waves = {}
    try:
        job = json.loads((run_dir / "job.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        job = {}
    planned = () if plan is None else plan.activation_cuts
    return cuts_of(job if isinstance(job, dict) else {}, decisions, planned, waves)


def cuts_of(
    job: Mapping[str, Any],
    decisions: Iterable[DecisionLine],
    planned: Iterable[ActivationCut],
    waves: Mapping[int, Sequence[TimedWave]],
) -> tuple[CutChange, ...]:
    """The cuts since the plan, in order.

    Args:
        job: `job.json`; anything.
        decisions: of the run.
        planned: its plan's cuts for active layers.
        waves: by virtual worker, in order.
    """
    lines = tuple(decisions)
    judged = {(line.vw, line.version): line.sentence for line in lines if isinstance(line, MoveJudgement)}
    reached = max((own[-1].wave.wave for own in waves.values() if own), default=-1)
    moves = [
        CutChange(
            line.at.clock,
            line.vw,
            line.stages,
            line.by,
            line.reason,
            line.predicted_gain,
            judgement=judged.get((line.vw, line.version), ""),
            p=line.at.p,
        )
        for line in lines
        if isinstance(line, MoveDecision)
    ]
    stays = [
        CutChange(line.at.clock, line.vw, line.stages, line.by, line.reason, line.predicted_gain, do=line.do)
        for line in lines
        if isinstance(line, StayDecision)
    ]
    members = [
        CutChange(line.at.clock, line.vw, line.stages, line.by, line.reason, do=line.do)
        for line in lines
        if isinstance(line, MemberDecision)
    ]
    active = [
        CutChange(cut.clock, cut.vw, layer_counts(cut.bounds), "activate", "other layers are active")
        for cut in planned
        if cut.clock <= reached
    ]
    changes = [*moves, *members, *active, *_scripted(job, reached)]
    found = [*stays, *(_measured(cut, changes, waves.get(cut.vw, ())) for cut in changes)]
    return tuple(sorted(found, key=lambda cut: (cut.clock, cut.vw)))


def _scripted(job: Mapping[str, Any], reached: int) -> Iterator[CutChange]:
    """What the script has changed before wave `reached` ended."""
    elastic = job.get("elastic")
    script = elastic.get("script") if isinstance(elastic, Mapping) else None
    for line in script if isinstance(script, list) else ():
        try:
            clock, do, stages = line["at"].get("clock"), line["do"], tuple(map(int, line.get("stages") or ()))
            p = line["at"].get("p")
            if p is not None:
                per_wave = job["sync"]["minibatches_per_wave"]
                clock = (p - 1) // (per_wave if isinstance(per_wave, int) else per_wave[line["vw"]])
            if do not in ("move", "drop", "add", "memory") or clock is None or clock > reached:
                continue
            if do == "memory":
                policies = f"layers {', '.join(map(str, line['layers']))}: {line['policy']}"
                yield CutChange(int(clock), int(line["vw"]), (), _SCRIPT, do=do, p=p, policies=policies)
                continue
            is_new = do == "add" and line.get("devices") is not None
            if do != "move":
                yield CutChange(int(clock), int(line["vw"]), stages if is_new else (), _SCRIPT, do=do)
            if stages and not is_new:
                yield CutChange(int(clock), int(line["vw"]), stages, _SCRIPT, p=p)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue


def _measured(cut: CutChange, cuts: Iterable[CutChange], waves: Sequence[TimedWave]) -> CutChange:
    """A cut with the rates on both sides, as far as to the cuts before and behind."""
    others = [other.clock for other in cuts if other.vw == cut.vw and other.clock != cut.clock]
    first = max((clock for clock in others if clock < cut.clock), default=0)
    end = min((clock for clock in others if clock > cut.clock), default=None)
    before = [one for one in waves if first <= one.wave.wave < cut.clock][-_COMPARED_WAVES:]
    behind = [one for one in waves if cut.clock <= one.wave.wave and (end is None or one.wave.wave < end)]
    return replace(cut, before=_rate(before), since=_rate(behind[:_COMPARED_WAVES]))


def _rate(waves: Sequence[TimedWave]) -> float | None:
    """Minibatches per second from the end of the first wave on; the time before it includes that of a barrier."""
    if len(waves) < 2 or waves[-1].t <= waves[0].t:  # noqa: PLR2004 - an interval has two ends
        return None
    return sum(one.wave.minibatches for one in waves[1:]) / (waves[-1].t - waves[0].t)
