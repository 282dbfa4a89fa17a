"""Whether a script repeats what has happened to the members of a run. Pure (plan-versions.md §6).

A script says who trains from a barrier on, and by which cut. It cannot say that one died, with fewer waves than the
others; nor that one was restarted with another number of stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from hetpipe.job.elastic import AddLine, DropLine, MoveLine, ScriptLine
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.sync import MemberChange, is_absent


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """A line of the clock shard's history that matters here; `observe.history` says what each means."""

    event: Literal["join", "plan", "evict", "barrier", "publish"]
    clock: Clock
    vw: VirtualWorkerIndex | None = None
    """Of `join`, `plan` and `evict`."""
    bounds: tuple[int, ...] = ()
    """Of `plan`."""
    ends_run: bool = False
    """Of `barrier`."""


@dataclass(frozen=True, slots=True)
class Past:
    """What has happened in the folder of a run, or of one of its rewinds."""

    start: Clock
    """Where it begins."""
    num_workers: int
    """Virtual workers of its plan."""
    events: tuple[MemberEvent, ...]
    """In order."""


def unrepeatable(script: Sequence[ScriptLine], pasts: Sequence[Past], *, compresses: bool, recuts: bool) -> str | None:
    """Why a job with a script does not repeat a run; None: it does.

    Args:
        script: of the run's job, and of what the run has decided.
        pasts: of the run, and of its rewinds, in order; those before another one count up to where that begins.
        compresses: whether fewer virtual workers begin than the plan has, as frozen layers let others take over.
        recuts: whether absent virtual workers are cut anew where other layers become active.
    """
    return next(_reasons(script, pasts, compresses=compresses, recuts=recuts), None)


def _reasons(script: Sequence[ScriptLine], pasts: Sequence[Past], *, compresses: bool, recuts: bool) -> Iterator[str]:
    added = [line.vw for line in script if isinstance(line, AddLine) and line.devices is not None]
    for vw in sorted({vw for vw in added if added.count(vw) > 1}):
        yield (
            f"virtual worker {vw}, which an operator has added, was lost in a rewind and added again, and a script "
            "adds it with its devices once"
        )
    cuts = _Cuts(script, has_own_cuts=recuts)
    for number, past in enumerate(pasts):
        upto = pasts[number + 1].start if number + 1 < len(pasts) else None
        if number == 0 and not compresses:
            yield from _missing_founders(script, past)
        yield from _reasons_in(past, upto, cuts)


def _missing_founders(script: Sequence[ScriptLine], past: Past) -> Iterator[str]:
    """Those that were to begin the run, and did not."""
    founders = {each.vw for each in past.events if each.event == "join" and each.clock == past.start}
    changes = [
        MemberChange(Clock(line.at.clock), VirtualWorkerIndex(line.vw), joins=isinstance(line, AddLine))
        for line in script
        if isinstance(line, DropLine | AddLine)
    ]
    for vw in map(VirtualWorkerIndex, range(past.num_workers)):
        if founders and vw not in founders and not is_absent(changes, vw, past.start):
            yield f"virtual worker {vw} was not there when the run began, as it had died"


@dataclass(slots=True)
class _Cuts:
    """The cut of each virtual worker, as far as the history has told."""

    script: Sequence[ScriptLine]
    has_own_cuts: bool
    """Of those that are absent."""
    known: dict[VirtualWorkerIndex, tuple[int, ...]] = field(default_factory=dict)

    def rejoins(self, vw: VirtualWorkerIndex, bounds: tuple[int, ...]) -> bool:
        """Take the cut with which one joins; returns whether the script has it, too."""
        before = self.known.get(vw, bounds)
        self.known[vw] = bounds
        if bounds == before:
            return True
        if len(bounds) != len(before):
            return False
        stated = (line.stages for line in self.script if isinstance(line, MoveLine | AddLine) and line.vw == vw)
        return self.has_own_cuts or any((0, *accumulate(stages)) == bounds for stages in stated if stages)


def _reasons_in(past: Past, upto: Clock | None, cuts: _Cuts) -> Iterator[str]:
    """What no script repeats in one folder, up to the checkpoint at `upto`; None: to its end."""
    barrier, joined, published = None, set[VirtualWorkerIndex | None](), Clock(-1)
    for each in past.events:
        is_beyond = upto is not None and published >= upto
        match each.event:
            case "publish":
                published = each.clock
                if barrier is not None and barrier.ends_run and barrier.clock == published:
                    return
            case "barrier":
                barrier = each
            case "evict" if not is_beyond:
                yield f"virtual worker {each.vw} died, having committed {each.clock} waves; what it did depends on when"
            case "join" if not is_beyond:
                joined.add(each.vw)
            case "plan" if each.vw is not None and (upto is None or each.clock <= upto):
                if each.vw not in joined:
                    cuts.known[each.vw] = each.bounds
                elif not cuts.rejoins(each.vw, each.bounds):
                    yield f"virtual worker {each.vw} was restarted with another cut at clock {each.clock}"
                joined.discard(each.vw)
            case _:
                pass
