"""A coordinator that leads no more gives a parameter server no orders, over a real connection and after a restart."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.errors import StaleIncarnation, StaleTerm
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard import job_storage
from hetpipe.server.shard.job_storage import StateOptions, claim, disclaim, kept_fences
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.counters import FENCES, TERMS
from hetpipe.values.ids import Incarnation, JobId, Term, VirtualWorkerIndex
from hetpipe.values.sync import PlanMove
from hetpipe.wire.caller import Caller
from hetpipe.wire.calls import (
    ADMIT,
    CONFIGURE,
    DESCRIBE_RUN,
    DRAIN,
    EVICT,
    KEEP_RUN,
    MOVE,
    RELEASE,
    REQUEST_BARRIER,
    AdmitRequest,
    DescribeRunRequest,
    DrainRequest,
    EvictRequest,
    KeepRunRequest,
    MoveRequest,
    ReleaseRequest,
    RequestBarrierRequest,
)
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard
from tests.server.shard.builders import JOB, run_document, shard_config, slices_of

BARE = shard_config(slices_of([4]))
CONFIG = replace(BARE, run=run_document(BARE))
VW, LIFE, TERM = VirtualWorkerIndex(1), Incarnation(0), Term(1)


def move(control: Caller) -> None:
    """Asks for a move of one that is gone; the fence comes first."""
    with suppress(StaleIncarnation):
        control.invoke(MOVE, MoveRequest(JOB, TERM, VW, PlanMove(Incarnation(1), (0, 1, 2), "operator", "asked")))


ORDERS: dict[str, Callable[[Caller], object]] = {
    "configure": lambda control: control.invoke(CONFIGURE, CONFIG),
    "evict": lambda control: control.invoke(EVICT, EvictRequest(JOB, TERM, VW, LIFE)),
    "admit": lambda control: control.invoke(ADMIT, AdmitRequest(JOB, TERM, VW, Incarnation(1), 1)),
    "drain": lambda control: control.invoke(DRAIN, DrainRequest(JOB, TERM, VW, Incarnation(1))),
    "move": move,
    "request_barrier": lambda control: control.invoke(REQUEST_BARRIER, RequestBarrierRequest(JOB, TERM, "stop")).clock,
    "keep_run": lambda control: control.invoke(KEEP_RUN, KeepRunRequest(JOB, TERM, run_document(BARE))),
    "describe": lambda control: control.invoke(DESCRIBE_RUN, DescribeRunRequest(JOB)),
    "release": lambda control: control.invoke(RELEASE, ReleaseRequest(JobId("other"))),
}


class Shard:
    """A parameter server that keeps its state, and coordinators that give it orders."""

    def __init__(self, root: Path) -> None:
        self.handler = ShardServer(lambda _config: MemoryHistory(), state=StateOptions(root=root))
        self.handler.recover()
        self.server = Server(ServerConfig(num_threads=4))
        self.handler.add_to(self.server)
        self.address = self.server.start()

    def order(self, name: str, *, fence: int) -> None:
        with closing(connect_shard(self.address, fence=lambda: fence)) as control:
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
    before = shard.handler.calls.invoke(DESCRIBE_RUN, DescribeRunRequest(JOB))
    for name in ORDERS:
        with pytest.raises(StaleTerm, match="its fence is 6, and a coordinator with fence 7 has acted since"):
            shard.order(name, fence=6)
        with pytest.raises(StaleTerm):
            shard.order(name, fence=0)
    assert shard.handler.calls.invoke(DESCRIBE_RUN, DescribeRunRequest(JOB)) == before
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

    monkeypatch.setattr(job_storage, "write_durably", full)
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


@pytest.mark.parametrize("text", [str(FENCES.limit), str(1 << 53), "-1"])
def test_a_number_that_no_lead_can_have_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "fence").write_text(text)
    with capture_logs() as logs:
        fences = kept_fences(tmp_path)
    assert [entry["event"] for entry in logs] == ["fence_not_read"]
    fences.check(3)
    assert kept_fences(tmp_path).highest == 3


def test_an_order_with_such_a_number_is_refused(tmp_path: Path) -> None:
    with closing(Shard(tmp_path / "state")) as shard:
        with pytest.raises(StaleTerm, match=f"{1 << 53} is not a valid fence of a coordinator"):
            shard.order("release", fence=1 << 53)
        shard.order("release", fence=7)
        assert (tmp_path / "state" / "fence").read_text() == "7"


class TestRepair:
    """`hetpipe repair state`."""

    @pytest.fixture
    def state(self, tmp_path: Path) -> Path:
        """A folder with the job of a usual term and one of a term that no coordinator accepts."""
        state = tmp_path / "state"
        with closing(Shard(state)) as shard:
            for term in (2, TERMS.limit - 1):
                shard.handler.configure(replace(BARE, term=Term(term), job_id=JobId(f"job{term}"), run_dir="/runs/x"))
        return state

    def run(self, *arguments: object) -> Result:
        return CliRunner().invoke(app, ["repair", "state", *map(str, arguments)])

    @pytest.mark.parametrize("fence", [str(FENCES.largest_reported + 1), str(1 << 53), "seven"])
    def test_what_no_coordinator_accepts_is_deleted(self, state: Path, fence: str) -> None:
        (state / "fence").write_text(fence)

        result = self.run(state, "--json")

        assert result.exit_code == 0, result.output
        [found] = json.loads(result.stdout)["folders"]
        assert (found["folder"], found["is_fence_forgotten"]) == (str(state), True)
        assert [(job["job_id"], job["term"]) for job in found["jobs"]] == [(f"job{TERMS.limit - 1}", TERMS.limit - 1)]
        assert {path.name for path in state.iterdir()} == {"owner", "job2@2"}

    def test_people_are_told_where_to_go_on(self, state: Path) -> None:
        (state / "fence").write_text(str(1 << 53))
        result = self.run(state)
        assert f"{state}: fence is not a valid fence, deleted" in result.stdout
        assert "deleted; resume it from /runs/x" in result.stdout

    def test_what_can_be_right_stays(self, tmp_path: Path) -> None:
        (tmp_path / "state" / "job@1").mkdir(parents=True)
        (tmp_path / "state" / "fence").write_text("7")

        assert self.run(tmp_path / "state").stdout == f"{tmp_path / 'state'}: fence 7\n"
        assert (tmp_path / "state" / "fence").read_text() == "7"
        assert (tmp_path / "state" / "job@1").is_dir()
        assert "fence 7, deleted" in self.run(tmp_path / "state", "--forget-fence").stdout
        assert not (tmp_path / "state" / "fence").exists()
        assert self.run(tmp_path / "state", "--forget-fence").exit_code == 0

    def test_not_while_the_parameter_server_runs(self, tmp_path: Path) -> None:
        with closing(Shard(tmp_path / "state")):
            result = self.run(tmp_path / "state")
        assert result.exit_code == 2
        assert "another process uses the state" in result.stderr

    def test_a_folder_that_is_none(self, tmp_path: Path) -> None:
        result = self.run(tmp_path / "none")
        assert result.exit_code == 2
        assert "is not a folder; give the folder that a parameter server has as --state" in result.stderr


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
