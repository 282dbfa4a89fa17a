"""Verify the memory policies of layers that the job's script changes while it trains (`memory-policy.md` §5).

Each stage of such a virtual worker records its layers' policies at its first minibatch and wherever they change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

from hetpipe.checker.events import Forward, Memory, Wave
from hetpipe.checker.facts import Facts, MemoryLine
from hetpipe.checker.formulas import wave_of
from hetpipe.checker.report import Findings, Kind
from hetpipe.checker.timeline import Life, Timeline

_POLICIES = ("keep", "recompute", "recompute-new-run", "swap")


@dataclass(slots=True)
class _Stage:
    """One stage of one incarnation."""

    lines: list[Memory] = field(default_factory=list)
    begins: list[Forward | Wave] = field(default_factory=list)
    """The first forward of each wave, or the waves of a summary."""


class MemoryVerifier:
    """Verifies lines of policies, and that no wave begins without those that the script decides."""

    def __init__(self, facts: Facts, timeline: Timeline, findings: Findings) -> None:
        self._script = facts.memory
        self._timeline = timeline
        self._findings = findings
        self._stages: dict[tuple[int, int, int], _Stage] = defaultdict(_Stage)

    def see(self, event: Memory | Forward | Wave) -> None:
        """Take one event of a known incarnation, in any order."""
        stage = self._stages[event.vw, event.incarnation, event.stage]
        if isinstance(event, Memory):
            stage.lines.append(event)
        elif isinstance(event, Wave) or self._begins_wave(event.vw, event.p):
            stage.begins.append(event)

    def finish(self) -> None:
        """Verify everything; needs the whole incarnation."""
        for (vw, incarnation, stage), seen in self._stages.items():
            life = self._timeline.lives[vw, incarnation]
            script = [line for line in self._script if line.vw == vw]
            seen.lines.sort(key=lambda line: line.p)
            before: dict[int, str] = {}
            whole: list[dict[int, str]] = []
            for line in seen.lines:
                before = self._verify_line(line, life, before, script)
                whole.append(before)
            for begin in seen.begins if script else ():
                p = begin.first if isinstance(begin, Wave) else begin.p
                index = bisect_right(seen.lines, p, key=lambda line: line.p) - 1
                self._verify_begin(begin, p, whole[index] if index >= 0 else {}, script, self._layers(life, stage, p))

    def _verify_line(
        self, line: Memory, life: Life, before: dict[int, str], script: list[MemoryLine]
    ) -> dict[int, str]:
        """Verify one line; returns the policy of each layer."""
        rule = self._timeline.rule_of(line.vw, line.p)
        layers = self._layers(life, line.stage, line.p)
        wave = wave_of(rule, line.p)
        unknown = [policy for policy in line.policies if policy not in _POLICIES]
        if not self._begins_wave(line.vw, line.p):
            self._add(line, "which does not begin a wave")
        elif unknown:
            self._add(line, f"of which {unknown[0]} is none")
        elif layers is not None and len(layers) != len(line.policies):
            self._add(line, f"but the stage has {len(layers)} layers there")
        elif before and rule.predicts and self._timeline.floor_clock(line.vw, line.incarnation, wave) != wave:
            self._add(line, f"within a segment, although {rule.weights} recomputes on the backward's weights")
        found = dict(zip(layers or (), line.policies, strict=False))
        for layer, policy in found.items():
            due = _due(script, layer, line.p, wave)
            if due is None and before.get(layer, policy) != policy:
                self._add(line, f"but nothing changes layer {layer} from {before[layer]} to {policy}")
        return found

    def _verify_begin(
        self, begin: Forward | Wave, p: int, policies: dict[int, str], script: list[MemoryLine], layers: range | None
    ) -> None:
        wave = wave_of(self._timeline.rule_of(begin.vw, p), p)
        for layer in layers or ():
            due = _due(script, layer, p, wave)
            if due is not None and policies.get(layer) != due:
                has = f"has {policies[layer]}" if layer in policies else "has no recorded policy"
                self._findings.add(
                    Kind.MEMORY_POLICY,
                    f"{begin.name} runs layer {layer}, which {has}, where the script has {due}",
                    begin.origin,
                )
                return

    def _layers(self, life: Life, stage: int, p: int) -> range | None:
        """The layers of a stage for minibatch `p`; None: not known."""
        bounds = life.bounds_at(wave_of(self._timeline.rule_of(life.vw, p), p))
        return None if bounds is None or stage + 1 >= len(bounds) else range(bounds[stage], bounds[stage + 1])

    def _begins_wave(self, vw: int, p: int) -> bool:
        rule = self._timeline.rule_of(vw, p)
        return p == rule.through(wave_of(rule, p)) + 1

    def _add(self, line: Memory, why: str) -> None:
        self._findings.add(Kind.MEMORY_POLICY, f"{line.name} has {len(line.policies)} policies, {why}", line.origin)


def _due(script: list[MemoryLine], layer: int, p: int, wave: int) -> str | None:
    """The policy that the script has for a layer in minibatch `p`; None: it has never changed it."""
    return next((line.policy for line in reversed(script) if layer in line.layers and line.is_due(p, wave)), None)
