"""What tests of leaving share."""

from __future__ import annotations

from hetpipe.decide.lifecycle.exchange import (
    AfterDrain,
    AgentDeparts,
    Drain,
    DrainAcknowledged,
    DrainRequested,
    MemberGone,
)
from hetpipe.values.ids import AgentId, Clock, Incarnation
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from hetpipe.values.members import MemberId
from hetpipe.values.run import StageDone
from tests.server.coordinator.machine_driver import SHARDS, Driver


def drain(driver: Driver, vw: int = 1, then: AfterDrain = "out") -> None:
    driver.feed(DrainRequested(Vw(vw), then))


def departs(driver: Driver, agent: str = "n1") -> None:
    driver.feed(AgentDeparts(AgentId(agent)))


def gone(agent: str) -> MemberGone:
    return MemberGone(MemberId(agent), f"agent {agent} left the cluster")


def order(vw: int, life: int) -> Drain:
    return Drain(Vw(vw), Incarnation(life), Driver.TERM, SHARDS[0])


def pass_barrier(driver: Driver, vw: int = 1, *, life: int = 0, reason: str = "drain", exits: bool = True) -> None:
    """The clock shard lets it go, its stages come to the barrier, and its processes end."""
    driver.feed(DrainAcknowledged(Vw(vw), Incarnation(life)))
    for stage in (0, 1):
        driver.report(vw, stage, StageDone(Clock(4), reason), life=life)
    for stage in (0, 1) if exits else ():
        driver.exit(vw, stage, 0, life=life)


def state(driver: Driver, vw: int = 1) -> LifeState:
    return driver.worker(vw).state
