"""Weights that are published while a stage computes are fetched while it computes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hetpipe.decide.schedule.policy import Kind
from hetpipe.server.shard.client import ShardClient
from hetpipe.values.ids import Clock
from tests.numerics.compare import Case, run
from tests.support.in_process import RandomDelays

#: Longest wait for what has to happen.
PATIENCE_SECONDS = 30.0


def test_a_publish_is_heard_in_the_middle_of_a_computation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 computes its second minibatch until w^(1) is asked for; worker 0 lets clock 1 come only meanwhile."""
    second_began, asked = threading.Event(), threading.Event()
    forwards = {"vw-0-stage-0": 0, "vw-1-stage-0": 0}
    heard: list[bool] = []
    fetch = ShardClient.fetch

    def stretch(_: RandomDelays, kind: Kind, started: float, *, skipped: range = range(0)) -> None:
        del started
        name = threading.current_thread().name
        if kind is not Kind.FORWARD:
            return
        forwards[name] += 1
        if (name, forwards[name]) == ("vw-0-stage-0", 1):
            assert second_began.wait(PATIENCE_SECONDS)
        if (name, forwards[name]) == ("vw-1-stage-0", 2):
            second_began.set()
            heard.append(asked.wait(PATIENCE_SECONDS))

    def noticed(client: ShardClient, clock: Clock, *, ahead: bool) -> None:
        if client.requester.vw == 1 and ahead:
            asked.set()
        fetch(client, clock, ahead=ahead)

    monkeypatch.setattr(RandomDelays, "stretch", stretch)
    monkeypatch.setattr(ShardClient, "fetch", noticed)
    run(Case(workers=2, stages=1, wave=1, staleness=4, deterministic=False, minibatches=6), tmp_path)
    assert heard == [True]
