"""Whoever floods a server with calls that are refused, or streams, keeps nobody else out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import structlog

from hetpipe.errors import HetpipeError, PermissionDenied
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.servicer import MAX_VIEWER_STREAMS, NUM_THREADS, CoordinatorServicer
from hetpipe.values.events import StopMode
from hetpipe.values.identity import NamedPeer, Peer, Role
from hetpipe.wire import audit, patience, watchers
from hetpipe.wire.calls import GET_STATUS, STOP_JOB, SUBMIT_JOB, GetStatusRequest, StopJobRequest, SubmitJobRequest
from hetpipe.wire.coordinator_client import CoordinatorClient
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.tls import Tls
from tests.certs.cluster import COORDINATOR, MONITOR, OPERATOR
from tests.certs.cluster import cluster as certificates
from tests.server.coordinator.builders import JOB_ID, job, submission
from tests.server.coordinator.fakes import Cluster


class Served:
    """A coordinator whose first job runs."""

    def __init__(self, folder: Path, *, tls: bool) -> None:
        self._tls = tls
        self.cluster = Cluster(folder / "run").usual()
        self.coordinator: Coordinator = self.cluster.coordinator
        self.coordinator.submit_job(submission(job(), str(folder / "run")))
        self.cluster.train()
        self._server = Server(ServerConfig(num_threads=NUM_THREADS, tls=self.tls_of(COORDINATOR)))
        CoordinatorServicer(self.coordinator, host="here").add_to(self._server)
        self.address = self._server.start()

    def tls_of(self, peer: Peer) -> Tls | None:
        return certificates().tls(peer) if self._tls else None

    def client(self, peer: Peer) -> Any:
        return closing(CoordinatorClient(self.address, tls=self.tls_of(peer)))

    def close(self) -> None:
        self._server.stop(grace_seconds=0.0)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(watchers, "MIN_TURN_SECONDS", 0.0)
    with closing(Served(tmp_path, tls=True)) as value:
        yield value


@pytest.fixture
def plaintext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(watchers, "MIN_TURN_SECONDS", 0.0)
    with closing(Served(tmp_path, tls=False)) as value:
        yield value


def test_submit_comes_through_however_many_streams_of_monitors_and_operators_watch(served: Served) -> None:
    submit_beside_watchers(served)


def test_submit_comes_through_however_many_streams_of_one_box_without_tls_watch(plaintext: Served) -> None:
    submit_beside_watchers(plaintext)


def submit_beside_watchers(served: Served) -> None:
    with ExitStack() as stack:
        streams = []  # kept, as one that is dropped ends
        for number in range(MAX_VIEWER_STREAMS + 2):
            role = Role.MONITOR if number % 2 else Role.OPERATOR
            client = stack.enter_context(served.client(NamedPeer(role, f"someone-{number % 4}")))
            streams.append(client.watch_job(JOB_ID))
            assert next(streams[-1]).sequence == 1
        operator = stack.enter_context(served.client(OPERATOR))
        handed_in = submission(job(), "/nowhere/other", request_id="another-request")
        job_id = operator.invoke(SUBMIT_JOB, SubmitJobRequest(handed_in)).job_id
        followed = operator.watch_job(JOB_ID)
        assert next(followed).sequence == 1
        assert operator.invoke(GET_STATUS, GetStatusRequest(job_id)).job_id == job_id


def test_a_flood_of_refused_calls_neither_fills_the_log_nor_keeps_others_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "REFUSALS_PER_SECOND", 0.0)
    monkeypatch.setattr(audit, "LINES_PER_SECOND_PER_PEER", 0.0)
    monkeypatch.setattr(patience, "_FIRST_REST_SECONDS", STOP_JOB.deadline_seconds)  # a busy server is asked once
    stop = StopJobRequest(StopMode.NOW, JOB_ID)
    with (
        structlog.testing.capture_logs() as lines,
        served.client(MONITOR) as monitor,
        served.client(OPERATOR) as other,
    ):
        for _ in range(audit.REFUSALS_AT_ONCE):
            with pytest.raises(PermissionDenied):
                monitor.invoke(STOP_JOB, stop)
        with pytest.raises(HetpipeError, match="was refused too often; retry in a second"):
            monitor.invoke(STOP_JOB, stop)
        assert other.invoke(GET_STATUS, GetStatusRequest(JOB_ID)).job_id == JOB_ID
    assert len([line for line in lines if line["event"] == "call_refused"]) == audit.LINES_AT_ONCE_PER_PEER
