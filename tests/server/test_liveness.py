"""Busy is not dead: what probes are told while a service cannot serve yet, or has no thread to spare."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

from hetpipe.cli.operate.health import HealthQuery, query_health
from hetpipe.errors import PeerUnreachable
from hetpipe.server import runtime
from hetpipe.server.agent import main as agent
from hetpipe.server.agent.agent import Agent
from hetpipe.server.shard import main as shard
from hetpipe.server.shard.server import ShardServer
from hetpipe.wire.probes import LIVE
from tests.server.test_two_coordinators import free_port
from tests.wire.echo import echo_server, say, serving

Seen = dict[str, str]


class Unasked:
    """A `Shutdown` that leaves this process's signals alone, and that nobody asks for anything."""

    def __init__(self, *, exit_with_parent: bool) -> None:
        self.requested = threading.Event()

    def on_request(self, callback: Callable[[], None]) -> None:
        """Nobody does."""


@pytest.mark.parametrize(
    ("service", "owner", "waits_in"),
    [(shard, ShardServer, "recover"), (agent, Agent, "start")],
    ids=["a shard that reads back what it has acknowledged", "an agent without a coordinator"],
)
def test_who_cannot_serve_yet_is_alive(
    service: ModuleType, owner: type[Any], waits_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, seen = free_port(), Seen()

    def look(*_: object) -> None:
        seen.update({name: query_health(HealthQuery(address=f"127.0.0.1:{port}", service=name)) for name in ("", LIVE)})
        raise PeerUnreachable("that was all")

    monkeypatch.setattr(runtime, "Shutdown", Unasked)
    monkeypatch.setattr(owner, waits_in, look)
    monkeypatch.setattr(service, "settle_memory", lambda **_: None, raising=False)
    monkeypatch.delenv("HETPIPE_TLS", raising=False)
    options = ["--coordinator", "127.0.0.1:1", "--health-port", str(port), "--log", "/dev/null"]
    threads = ["--threads", "1"] if service is shard else ["--cpu-devices", "1"]
    assert service.main([*options, *threads]) == 1
    assert seen == {"": "NOT_SERVING", LIVE: "SERVING"}


def test_who_has_no_thread_to_spare_is_alive_and_serves() -> None:
    blocked, go_on = threading.Event(), threading.Event()

    def wait(request: Any, _: object) -> Any:
        blocked.set()
        assert go_on.wait(30.0)
        return request

    server = echo_server(wait, num_threads=1, health_port=0)
    with serving(server) as caller, ThreadPoolExecutor(1) as callers:
        answer = callers.submit(say, caller, deadline_seconds=30.0)
        assert blocked.wait(30.0)
        try:
            answers = [query_health(HealthQuery(address=server.health_address, service=name)) for name in ("", LIVE)]
            with pytest.raises(Exception, match="Check"):
                query_health(HealthQuery(address=server.address, timeout_seconds=0.2))
        finally:
            go_on.set()
        assert answer.result(30.0) == "hello"
    assert answers == ["SERVING", "SERVING"]
