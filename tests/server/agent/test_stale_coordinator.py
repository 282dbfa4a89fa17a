"""An agent whose coordinator has lost the lead: it says so, and carries out nothing of what that one wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from hetpipe.errors import NotLeader
from hetpipe.values.events import JobState
from hetpipe.wire.calls import GET_STATUS, GetStatusRequest
from tests.polling import wait_until
from tests.server.agent.test_agent import Node


class Lead:
    """As if another coordinator led, once `is_lost`."""

    outage = ""

    def __init__(self) -> None:
        self.fence = 4
        self.is_lost = False

    def raise_fence(self, fence: int) -> None:
        if self.is_lost:
            raise NotLeader("another coordinator leads")
        self.fence = fence + 1


@pytest.fixture
def lead() -> Lead:
    return Lead()


@pytest.fixture
def node(tmp_path: Path, lead: Lead) -> Iterator[Node]:
    with closing(Node(tmp_path, election=lead)) as value:
        yield value


@pytest.mark.processes
def test_its_commands_are_not_carried_out(node: Node, lead: Lead) -> None:
    agent = node.start_agent()
    lead.is_lost, lead.fence = True, 3
    with capture_logs() as logs:
        agent._membership.beat()
        node.submit("done")
        wait_until(
            lambda: "command_refused" in [entry["event"] for entry in logs], timeout_seconds=10.0, what="refusal"
        )

    assert "coordinator_leads_no_more" in [entry["event"] for entry in logs]
    assert agent.children.started.total() == 0
    assert node.client.invoke(GET_STATUS, GetStatusRequest()).state is JobState.INSPECTING

    lead.is_lost = False
    agent._membership.beat()
    assert lead.fence == 5
