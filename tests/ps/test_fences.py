"""A coordinator that leads no more gives a parameter server no orders, over a real connection and after a restart."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from hetpipe.errors import StaleTerm
from hetpipe.observe.history import MemoryHistory
from hetpipe.ps import job_state
from hetpipe.ps.control import ShardControl
from hetpipe.ps.job_state import StateOptions, claim, disclaim, kept_fences
from hetpipe.ps.server import ShardServer
from hetpipe.rpc.server import Server, ServerConfig
from hetpipe.rpc.shard_service import add_shard_service
from hetpipe.spec.ids import Incarnation, JobId, Term, VirtualWorkerIndex

from .builders import JOB, run_document, shard_config, slices_of

BARE = shard_config(slices_of([4]))
CONFIG = replace(BARE, run=run_document(BARE))
VW, LIFE, TERM = VirtualWorkerIndex(1), Incarnation(0), Term(1)

ORDERS: dict[str, Callable[[ShardControl], object]] = {
    "configure": lambda control: control.configure(CONFIG),
    "evict": lambda control: control.evict(JOB, TERM, VW, LIFE),
    "admit": lambda control: control.admit(JOB, TERM, VW, Incarnation(1), 1),
    "drain": lambda control: control.drain(JOB, TERM, VW, Incarnation(1)),
    "request_barrier": lambda control: control.request_barrier(JOB, TERM, "stop"),
    "keep_run": lambda control: control.keep_run(JOB, TERM, run_document(BARE)),
    "describe": lambda control: control.describe(JOB),
    "release": lambda control: control.release(JobId("other")),
}


class Shard:
    """A parameter server that keeps its state, and coordinators that give it orders."""

    def __init__(self, root: Path) -> None:
        self.handler = ShardServer(lambda _config: MemoryHistory(), state=StateOptions(root=root))
        self.handler.recover()
        self.server = Server(ServerConfig(num_threads=4))
        add_shard_service(self.server, self.handler)
        self.address = self.server.start()

    def order(self, name: str, *, fence: int) -> None:
        with closing(ShardControl(self.address, fence=lambda: fence)) as control:
            ORDERS[name](control)

    def close(self) -> None:
        self.server.stop(grace_seconds=0.0)
        self.handler.stop()


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    with closing(Shard(tmp_path / "state")) as value:
        yield value


def test_every_order_of_one_that_leads_no_more_is_refused(shard: Shard) -> None:
    for name in ORDERS:
        shard.order(name, fence=7)
    before = shard.handler.describe(JOB)
    for name in ORDERS:
        with pytest.raises(StaleTerm, match="its number is 6, and one with number 7 has acted since"):
            shard.order(name, fence=6)
        with pytest.raises(StaleTerm):
            shard.order(name, fence=0)
    assert shard.handler.describe(JOB) == before
    shard.order("describe", fence=8)


def test_a_process_that_follows_still_refuses_them(tmp_path: Path) -> None:
    with closing(Shard(tmp_path)) as first:
        first.order("configure", fence=7)
    with closing(Shard(tmp_path)) as second:
        with pytest.raises(StaleTerm):
            second.order("evict", fence=6)
        assert second.handler.jobs() == (JOB,)
        second.order("evict", fence=7)


def test_where_nothing_is_kept_the_folder_goes(tmp_path: Path) -> None:
    with closing(Shard(tmp_path / "state")) as shard:
        shard.order("release", fence=7)
        assert (tmp_path / "state" / "fence").read_text() == "7"
    assert not (tmp_path / "state").exists()


def test_a_disk_that_fails_keeps_nobody_from_leading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job_state, "write_durably", full)
    fences = kept_fences(tmp_path)
    with capture_logs() as logs:
        fences.check(7)
    assert [entry["event"] for entry in logs] == ["fence_not_kept"]
    with pytest.raises(StaleTerm):
        fences.check(6)


def test_what_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "fence").write_text("seven")
    with capture_logs() as logs:
        assert kept_fences(tmp_path).highest == 0
    assert [entry["event"] for entry in logs] == ["fence_not_read"]


def test_the_number_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_fences(tmp_path).check(7)

    def cut(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", cut)
    kept_fences(tmp_path).check(8)
    assert kept_fences(tmp_path).highest == 7


def test_another_folder_is_not_touched(tmp_path: Path) -> None:
    descriptor = claim(tmp_path / "state")
    (tmp_path / "state" / "fence").write_text("7")
    (tmp_path / "state" / "job@1").mkdir()
    disclaim(tmp_path / "state", descriptor)
    assert {path.name for path in (tmp_path / "state").iterdir()} == {"owner", "fence", "job@1"}
