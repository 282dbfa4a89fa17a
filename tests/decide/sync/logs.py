"""Decision logs in a given state, driven by hand."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.decide.sync.decision_log import DecisionLog
from hetpipe.values.ids import ShardIndex, StageIndex, VirtualWorkerIndex, Wave
from hetpipe.values.requests import Blocks
from tests.decide.sync.scenario import LIFE, Scenario

VW = [VirtualWorkerIndex(vw) for vw in range(3)]
SCENARIO = Scenario(
    num_stages=(2, 1),
    num_shards=1,
    n=2,
    d=1,
    deterministic=False,
    num_samples=24,
    batch_size=1,
    epochs=1,
    total_minibatches=None,
    every=None,
)


def started(scenario: Scenario = SCENARIO) -> DecisionLog:
    """A log whose members have all joined and whose initial weights are published."""
    log = begun(DecisionLog(scenario.log_config()), scenario.num_stages)
    assert log.published == scenario.start
    return log


def begun(log: DecisionLog, num_stages: Sequence[int] = SCENARIO.num_stages) -> DecisionLog:
    """All members of `log` join, and its initial weights are published."""
    for vw, count in enumerate(num_stages):
        for stage in range(count):
            log.join(VW[vw], LIFE, StageIndex(stage))
            if vw == 0:
                log.initialized(VW[vw], LIFE, StageIndex(stage))
    acknowledge(log)
    return log


def acknowledge(log: DecisionLog) -> None:
    """Every shard carries everything out."""
    before = -1
    while before != log.num_records:
        before = log.num_records
        for shard in range(log.config.num_shards):
            log.acknowledge(ShardIndex(shard), log.num_records)


def commit(log: DecisionLog, vw: int, wave: int, blocks: Blocks = ()) -> None:
    """All stages of a member report a wave, an empty one unless its samples are given."""
    member = log.members[VW[vw]]
    for stage in range(member.num_stages):
        log.staged(
            VW[vw],
            member.incarnation,
            Wave(wave),
            StageIndex(stage),
            blocks if stage == 0 else None,
            segment=log.segment.start,
        )
