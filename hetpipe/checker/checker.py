"""Entry point of the checker: replay the decision log, verify every other line against it, report.

The decision log is replayed first, because it is the only global order of a run. Everything else is then verified line
by line against that timeline, without assuming an order between processes that the lines do not prove: times are only
compared on the same host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetpipe.checker.crossings import CrossingVerifier
from hetpipe.checker.events import (
    Apply,
    Crossed,
    Damage,
    Event,
    Forward,
    Fresh,
    Memory,
    Pass,
    Pull,
    Staged,
    Step,
    Takeover,
    Used,
    Wave,
)
from hetpipe.checker.facts import Facts, Layout, read_facts
from hetpipe.checker.fresh_layers import FreshVerifier
from hetpipe.checker.lanes import LaneVerifier
from hetpipe.checker.memory import MemoryVerifier
from hetpipe.checker.reading import read_history
from hetpipe.checker.replay import Replay, decisions_in_order, founders_of
from hetpipe.checker.replicas import ReplicaVerifier
from hetpipe.checker.report import Counts, Findings, Kind, Report
from hetpipe.checker.rules import HistoryRule
from hetpipe.checker.samples import SampleVerifier
from hetpipe.checker.shards import ShardVerifier
from hetpipe.checker.takeovers import TakeoverVerifier
from hetpipe.checker.terms import TermVerifier
from hetpipe.checker.timeline import Timeline
from hetpipe.checker.versions import VersionVerifier
from hetpipe.checker.waves import WaveVerifier
from hetpipe.errors import UserError


def check_run(run_dir: Path, *, require_complete: bool = False) -> Report:
    """Verify the run in `run_dir` by its history files.

    A run that was killed is verified as far as it went. If a disk failure truncated the history, no violations are
    reported, as any of them may be due to missing lines. With `require_complete`, a run without an end or a stop is a
    violation of its own.

    Raises:
        UserError: the folder is not a run, or its files cannot be read.
    """
    facts = read_facts(run_dir) if (run_dir / "job.json").exists() else None
    if facts is not None and facts.history is HistoryRule.OFF:
        raise UserError(
            f"{run_dir} was run with `history: off`, so nothing can be verified of it; run with `history: summary`, or "
            "with `full`, which is the default"
        )
    history = read_history(run_dir)
    report = check_events(
        history.events,
        facts or read_facts(run_dir),
        damage=history.damage,
        unknown_events=history.unknown_events,
        require_complete=require_complete,
    )
    return replace(report, violations=(), lacking=tuple(history.lacking)) if history.lacking else report


def check_events(
    events: Sequence[Event],
    facts: Facts,
    *,
    damage: Sequence[Damage] = (),
    unknown_events: int = 0,
    require_complete: bool = False,
) -> Report:
    """Verify a history. Pure; files may come in any order, events of one file in line order.

    Linear in the number of events in time and memory (n·log n for sorting).
    """
    findings = Findings()
    terms = TermVerifier(findings)
    decisions = decisions_in_order(events)
    terms.see_decisions(decisions)
    replay = Replay(facts, findings, founders_of(decisions, facts))
    for decision in decisions:
        replay.see(decision)
    replay.finish()
    verifiers = _Verifiers(facts, replay.timeline, findings)
    for event in events:
        terms.see(event)
        verifiers.see(event)
    verifiers.finish()
    _verify_damage(damage, replay.timeline, findings)
    if require_complete and not replay.timeline.complete:
        findings.add(Kind.INCOMPLETE, "the run was cut short: no barrier with reason end or stop is published")
    return verifiers.report(len(events), unknown_events)


class _Verifiers:
    """Dispatches each event to its verifiers, after validating its actor."""

    def __init__(self, facts: Facts, timeline: Timeline, findings: Findings) -> None:
        self._layout = facts.layout
        self._rule = facts.rule
        self._timeline = timeline
        self._findings = findings
        self._history = facts.history
        self._waves = WaveVerifier(facts, timeline, findings)
        self._versions = VersionVerifier(timeline, findings)
        self._lanes = LaneVerifier(facts, timeline, findings)
        self._replicas = ReplicaVerifier(timeline, findings)
        self._crossings = CrossingVerifier(timeline, findings)
        self._memory = MemoryVerifier(facts, timeline, findings)
        self._takeovers = TakeoverVerifier(timeline, findings)
        self._fresh = FreshVerifier(timeline, findings)
        self._shards = ShardVerifier(facts, timeline, findings)
        self._samples = SampleVerifier(facts, timeline, findings)
        #: (vw, incarnation, stage, shard) → whether such an actor exists.
        self._actors: dict[tuple[int, int, int, int], bool] = {}

    def see(self, event: Event) -> None:  # noqa: C901, PLR0912 - one branch per kind of event
        """Verify one event that is not a decision; decisions are already in the timeline."""
        if isinstance(event, Pass | Step):
            if self._is_known(event, event.vw, event.incarnation, event.stage):
                self._lanes.see(event)
                self._replicas.see(event)
                if isinstance(event, Pass):
                    self._versions.see(event)
                    self._takeovers.see_pass(event)
                    self._fresh.see_pass(event)
                if isinstance(event, Forward):
                    self._memory.see(event)
        elif isinstance(event, Wave):
            if self._is_summary and self._is_known(event, event.vw, event.incarnation, event.stage):
                self._waves.see(event)
                self._memory.see(event)
                self._takeovers.see_pass(event)
                self._fresh.see_pass(event)
        elif isinstance(event, Memory):
            if self._is_known(event, event.vw, event.incarnation, event.stage):
                self._memory.see(event)
        elif isinstance(event, Takeover):
            if self._is_known(event, event.vw, event.incarnation, event.stage):
                self._takeovers.see(event)
        elif isinstance(event, Fresh):
            if self._is_known(event, event.vw, event.incarnation, event.stage):
                self._fresh.see(event)
        elif isinstance(event, Crossed):
            if self._is_known(event, event.vw, event.incarnation, event.stage):
                self._crossings.see(event)
        elif isinstance(event, Staged):
            if self._is_known(event, event.vw, event.incarnation, event.stage, event.shard):
                self._shards.see_staged(event)
        elif isinstance(event, Apply):
            if self._is_known(event, event.vw, event.incarnation, shard=event.shard):
                self._shards.see_apply(event)
        elif isinstance(event, Pull):
            if self._is_known(event, event.vw, stage=event.stage, shard=event.shard):
                self._shards.see_pull(event)
        elif isinstance(event, Used) and self._is_known(event, event.vw):
            self._samples.see(event)

    def finish(self) -> None:
        """Verify the properties of the whole history."""
        if self._is_summary:
            self._waves.finish()
        else:
            self._versions.finish()
            self._lanes.finish()
            self._replicas.finish()
            self._crossings.finish()
        self._memory.finish()
        self._takeovers.finish()
        self._shards.finish()
        self._samples.finish()

    @property
    def _is_summary(self) -> bool:
        return self._history is HistoryRule.SUMMARY

    def report(self, num_events: int, unknown_events: int) -> Report:
        """The final report; call after `finish`."""
        line = self._timeline
        return Report(
            weights=self._rule.weights.value,
            schedule=self._rule.order.value,
            history=self._history.value,
            minibatches=(self._waves if self._is_summary else self._versions).num_minibatches(),
            violations=self._findings.violations(),
            waves_applied_twice=self._shards.num_applied_twice(),
            torn_waves=self._findings.count(Kind.TORN_WAVE),
            counts=Counts(
                events=num_events,
                waves=len(line.commits),
                samples=sum(commit.samples for commit in line.commits.values()),
                published_clock=line.published,
                max_clock_distance=line.max_distance,
                bound_clock_distance=self._rule.bound_clock_distance,
                unknown_events=unknown_events,
                complete=line.complete,
                skipped_updates=self._lanes.num_skipped(),
            ),
        )

    def _is_known(self, event: Event, vw: int, incarnation: int = -1, stage: int = 0, shard: int = 0) -> bool:
        """Whether the actor is in the plan and the incarnation joined; the first failure per actor is reported."""
        actor = (vw, incarnation, stage, shard)
        if actor in self._actors:
            return self._actors[actor]
        problem = _stranger(self._layout, self._timeline, (vw, incarnation), stage, shard)
        if problem is not None:
            self._findings.add(Kind.MEMBERSHIP, problem, event.origin)
        self._actors[actor] = problem is None
        return problem is None


def _stranger(layout: Layout, timeline: Timeline, life: tuple[int, int], stage: int, shard: int) -> str | None:
    """Error of an unknown actor; a line without an incarnation (-1) matches any of its virtual worker."""
    vw, incarnation = life
    known = timeline.lives_of(vw)
    if not known and not layout.stages_of(vw):
        return f"virtual worker {vw} is not in the plan of {len(layout.bounds)}"
    if incarnation < 0:
        num_stages = max([layout.stages_of(vw), *(each.num_stages for each in known)])
    else:
        found = timeline.lives.get(life)
        if found is None:
            return f"incarnation {incarnation} of virtual worker {vw} never joined"
        num_stages = found.num_stages
    if stage >= num_stages:
        return f"stage {stage} of virtual worker {vw} is not in the plan of {num_stages} stages"
    if shard >= layout.num_shards:
        return f"shard {shard} is not in the plan of {layout.num_shards} shards"
    return None


def _verify_damage(damage: Sequence[Damage], timeline: Timeline, findings: Findings) -> None:
    """Verify a torn last line: legal after a kill, if the run was cut short or that worker was evicted."""
    for line in damage:
        life = timeline.lives.get(line.life) if line.life is not None else None
        killed = not timeline.complete or (life is not None and life.eviction is not None)
        if not (line.torn and killed):
            findings.add_at(Kind.MALFORMED_LINE, f"not a whole event: {line.problem}", f"{line.file}:{line.line}")
