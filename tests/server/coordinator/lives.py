"""What tests of the lives of virtual workers share."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.decide.lifecycle.exchange import (
    Admit,
    Evict,
    MemberGone,
    ShardCallFailed,
)
from hetpipe.values.commands import StartStageCommand
from hetpipe.values.events import (
    JobState,
)
from hetpipe.values.ids import Incarnation
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.members import MemberId
from tests.server.coordinator.builders import STAGES, job, progress
from tests.server.coordinator.machine_driver import SHARDS, Driver

#: Of the driver's virtual workers.
CUT = (0, 2, 4)

UNREACHABLE = ("PeerUnreachable", "the clock shard cannot be reached")


def running(*overrides: str) -> Driver:
    return Driver(job(*overrides)).to(JobState.RUNNING)


def not_asked(vw: int, life: int, error: str = UNREACHABLE[0]) -> ShardCallFailed:
    return ShardCallFailed(Vw(vw), Incarnation(life), error, UNREACHABLE[1])


def gone(agent: str) -> MemberGone:
    return MemberGone(MemberId(agent), f"agent {agent} stopped answering")


def evict(vw: int, life: int) -> Evict:
    return Evict(Vw(vw), Incarnation(life), Driver.TERM, SHARDS[0])


def admit(vw: int, life: int) -> Admit:
    return Admit(Vw(vw), Incarnation(life), 2, Driver.TERM, SHARDS[0], bounds=CUT)


def started(driver: Driver) -> list[tuple[str, int, int, int, str | None]]:
    """Stages that were told to start after the first lives."""
    found = [(item.agent, item.command) for item in driver.start_commands[len(STAGES) :]]
    return [
        (a, c.config.vw, c.config.stage, c.config.incarnation, c.config.restore)
        for a, c in found
        if isinstance(c, StartStageCommand)
    ]


def keep_reporting(driver: Driver, seconds: float, *, but: Sequence[tuple[int, int]] = ()) -> None:
    """Let time pass while every stage of a first life but those named reports once a second."""
    for _ in range(round(seconds)):
        driver.wait(1.0)
        for vw, stage in STAGES:
            if (vw, stage) not in but:
                driver.report(vw, stage, progress())
