"""Commits, publications, updates and grants of the simulator are those of the real decision log, to the tick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hetpipe.decide.simulator import simulate as simulator
from hetpipe.decide.simulator.clocks import Clocks
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.decide.sync.gate import Gate
from hetpipe.values.ids import Clock
from tests.decide.simulator.case import random_case
from tests.decide.simulator.jobs import plan_of
from tests.decide.simulator.real_decisions import Decisions, tie

NUM_CASES = 60


def _decided(seed: int, patch: pytest.MonkeyPatch) -> tuple[Decisions, Decisions]:
    """What the simulator and what the real log and shards decide in a random job; every other one has jitter."""
    case = replace(random_case(seed), exchange_seconds=0.0)
    plan, costs, options = plan_of(case)
    made = tie(patch.setattr, case.minibatches)
    simulate(plan, costs, replace(options, jitter_cv=0.4 if seed % 2 else 0.0, seed=seed))
    [tied] = made
    for each in (tied.decided, tied.real.decided):
        each.sort()
    assert tied.real.log.finished
    assert tied.max_distance <= tied.real.log.max_distance
    assert all(not shard.pending for shard in tied.real.shards)
    return tied.decided, tied.real.decided


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_the_same_reports_give_the_same_decisions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, real = _decided(seed, monkeypatch)
    assert found.commits
    assert found.publications
    assert found == real


def _commits_early(patch: pytest.MonkeyPatch) -> None:
    class EarlyGate(Gate):
        def may_commit(self, wave: int, published: int) -> bool:
            return super().may_commit(wave - 1, published)

    patch.setattr(simulator, "Gate", EarlyGate)


def _publishes_with_the_first_shard(patch: pytest.MonkeyPatch) -> None:
    def is_built(self: Clocks, clock: int) -> bool:
        return bool(self._num_built.get(clock)) if self._num_shards else min(self.committed) >= clock

    patch.setattr(Clocks, "_is_built", is_built)


def _chooses_newer(patch: pytest.MonkeyPatch) -> None:
    class NewerGate(Gate):
        def chosen(self, p: int, *, in_use: int, published: int) -> Clock | None:
            return Clock(max(in_use, published))

    patch.setattr(simulator, "Gate", NewerGate)


@pytest.mark.parametrize("change", [_commits_early, _publishes_with_the_first_shard, _chooses_newer])
def test_a_simulator_that_decides_otherwise_is_seen(change: Callable[[pytest.MonkeyPatch], None]) -> None:
    def differs(seed: int) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            try:
                found, real = _decided(seed, patch)
            except Exception:  # noqa: BLE001 - the real log refuses what it would not have let happen
                return True
            return found != real

    assert any(map(differs, range(NUM_CASES)))
