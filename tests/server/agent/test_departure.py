"""An agent that is told to end: whom it tells, what it waits for, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from hetpipe.errors import HetpipeError, PeerUnreachable, UnknownMember
from hetpipe.server.agent.departure import Departure
from hetpipe.server.agent.main import main
from hetpipe.values.commands import StageKey
from hetpipe.values.ids import AgentId, Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.values.members import MemberId, Registration
from hetpipe.wire.call import Unary
from hetpipe.wire.caller import Caller
from hetpipe.wire.calls import DEPART, HEARTBEAT, LEAVE, DepartRequest, HeartbeatRequest, LeaveRequest
from hetpipe.wire.coordinator_client import CoordinatorClient
from tests.support.fake_clock import FakeClock


class Leaving:
    """An agent with two stages, whose coordinator gives these answers, and then none but yes."""

    def __init__(self, *answers: HetpipeError) -> None:
        self.answers = list(answers)
        self.num_asked = 0
        self.clock = FakeClock()
        self.stages = [
            StageKey(JobId("job"), VirtualWorkerIndex(0), StageIndex(stage), Incarnation(0), Term(1))
            for stage in range(2)
        ]

    def begin(self) -> Departure:
        return Departure(request=self._ask, stages=self._stages, clock=self.clock, seconds=8.0)

    def _stages(self) -> Sequence[StageKey]:
        return tuple(self.stages)

    def _ask(self) -> None:
        self.num_asked += 1
        if self.answers:
            raise self.answers.pop(0)


def test_it_is_over_when_the_last_stage_has_ended() -> None:
    agent = Leaving()
    with capture_logs() as logs:
        departure = agent.begin()
        assert not departure.is_over()
        assert not departure.is_over()
        agent.stages.pop()
        agent.clock.advance(2.5)
        assert not departure.is_over()
        agent.stages.pop()
        assert departure.is_over()
    assert (agent.num_asked, departure.is_accepted) == (1, True)
    told = [(line["count"], line["seconds_left"]) for line in logs if line["event"] == "stages_to_leave"]
    assert told == [(2, 8.0), (1, 5.5)]


def test_who_stays_is_named_when_the_time_is_over() -> None:
    agent = Leaving()
    departure = agent.begin()
    agent.clock.advance(7.9)
    assert not departure.is_over()
    agent.clock.advance(0.1)
    with capture_logs() as logs:
        assert departure.is_over()
    assert logs[0]["stages"] == [str(stage) for stage in agent.stages]


def test_without_stages_nobody_is_asked() -> None:
    agent = Leaving()
    agent.stages.clear()
    departure = agent.begin()
    assert departure.is_over()
    assert (agent.num_asked, departure.is_accepted) == (0, False)


def test_without_a_coordinator_nothing_is_waited_for() -> None:
    agent = Leaving(PeerUnreachable("the coordinator at c:1 does not answer"))
    departure = agent.begin()
    assert departure.is_over()
    assert not departure.is_accepted


class Unanswered(Caller):
    """Adds up how long calls would wait for a coordinator that hangs."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def invoke(self, call: Unary[Any, Any], request: object, *, deadline_seconds: float | None = None) -> Any:
        self.seconds += call.deadline_seconds


def test_a_coordinator_that_hangs_holds_nobody_up_beyond_ten_seconds() -> None:
    """So long do container runtimes wait by themselves."""
    client, calls = CoordinatorClient("127.0.0.1:1"), Unanswered()
    client.close()
    client._caller = calls
    client.invoke(DEPART, DepartRequest(AgentId("n0"), Registration("r")))
    client.invoke(HEARTBEAT, HeartbeatRequest(MemberId("n0"), Registration("r")))
    client.invoke(LEAVE, LeaveRequest(MemberId("n0"), Registration("r")))
    assert calls.seconds < 10.0


def test_one_that_has_forgotten_the_agent_is_asked_again() -> None:
    """The agent registers again meanwhile."""
    agent = Leaving(UnknownMember("no agent n0"), UnknownMember("no agent n0"))
    departure = agent.begin()
    assert [departure.is_over() for _ in range(4)] == [False] * 4
    assert (agent.num_asked, departure.is_accepted) == (3, True)


@pytest.mark.parametrize(
    ("option", "value"), [("--drain-seconds", "-1"), ("--drain-seconds", "soon"), ("--sigterm-exit-status", "256")]
)
def test_options_that_are_none(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--coordinator", "h:1", option, value])
    assert f"'{value}' is no" in capsys.readouterr().err
