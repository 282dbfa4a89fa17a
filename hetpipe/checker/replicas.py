"""Verify that under `allreduce` every update includes the gradients of every replica.

A stage writes `backward` at its start and `step` after the all-reduce, so on one host the step of a wave follows the
last backward of that wave at the same stage of every replica.
"""

from __future__ import annotations

from hetpipe.checker.events import Backward, Pass, Step
from hetpipe.checker.formulas import wave_of
from hetpipe.checker.report import Findings, Kind
from hetpipe.checker.rules import SyncRule
from hetpipe.checker.timeline import Timeline

#: A stage index and a wave: what is averaged at once.
_Group = tuple[int, int]


class ReplicaVerifier:
    """Verifies backwards and steps, in any order; ignores other kinds of synchronization."""

    def __init__(self, timeline: Timeline, findings: Findings) -> None:
        self._timeline = timeline
        self._findings = findings
        #: Group → virtual worker → its last backward.
        self._backwards: dict[_Group, dict[int, Backward]] = {}
        self._steps: dict[_Group, list[Step]] = {}

    def see(self, event: Pass | Step) -> None:
        """Record one event of a stage."""
        if self._timeline.rule.sync is not SyncRule.ALLREDUCE:
            return
        group = (event.stage, wave_of(self._timeline.rule_of(event.vw, event.p), event.p))
        if isinstance(event, Step):
            self._steps.setdefault(group, []).append(event)
        elif isinstance(event, Backward):
            found = self._backwards.setdefault(group, {})
            if event.vw not in found or found[event.vw].p < event.p:
                found[event.vw] = event

    def finish(self) -> None:
        """Verify every update against the backwards of the other replicas."""
        for group, steps in self._steps.items():
            backwards = self._backwards.get(group, {}).values()
            for step in steps:
                for backward in backwards:
                    if backward.vw != step.vw and not backward.origin.may_precede(step.origin):
                        message = (
                            f"stage {step.stage} of virtual worker {step.vw} makes the update of p = {step.p} "
                            f"before virtual worker {backward.vw} begins the backward of p = {backward.p}"
                        )
                        self._findings.add(Kind.REPLICA_AHEAD, message, step.origin)
