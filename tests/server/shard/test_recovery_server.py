"""Parameter-server processes that go on with the jobs of earlier ones, over real connections."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from hetpipe.errors import Busy, ClockNotPublished, StaleTerm, StateLost, Unavailable, UnknownJob, UserError
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard.job_storage import StateOptions, claim, disclaim
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.ids import Clock, ShardIndex, Term, Wave
from hetpipe.values.requests import PullHeader
from hetpipe.wire.calls import (
    JOIN,
    PULL,
    PUSH,
    REPORT_INITIALIZED,
    REPORT_STAGED,
    JoinRequest,
    ReportInitializedRequest,
    ReportStagedRequest,
)
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard
from tests.pipeline.witness import Witness
from tests.polling import wait_until
from tests.server.shard.builders import JOB, decode, encode, headers_of, push_header, requester, shard_config, slices_of

WITNESS = Witness(num_vws=2, num_waves=4, num_slices=2)
SECONDS = 20.0

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Processes:
    """Two shards of one job, each with a server of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.histories = [MemoryHistory(), MemoryHistory()]
        self.handlers: list[ShardServer] = []
        self.servers: list[Server] = []
        for index in range(2):
            handler, server = self.start(index)
            self.handlers.append(handler)
            self.servers.append(server)
        addresses = [server.address for server in self.servers]
        for index in range(2):
            self.handlers[index].configure(
                shard_config(
                    slices_of([WITNESS.slice_elements] * 2, shard=index),
                    shard=index,
                    num_shards=2,
                    clock_shard_address=addresses[0],
                    run_dir=str(folder),
                )
            )
        self.headers = headers_of(slices_of([WITNESS.slice_elements] * 2))
        self.shards = [connect_shard(address, ShardIndex(index)) for index, address in enumerate(addresses)]
        self.clock = connect_shard(addresses[0], ShardIndex(0))

    def start(self, index: int, port: int = 0) -> tuple[ShardServer, Server]:
        options = StateOptions(root=self.folder / f"shard-{index}")
        handler = ShardServer(lambda _config: self.histories[index], state=options)
        handler.recover()
        server = Server(ServerConfig(num_threads=12, port=port))
        handler.add_to(server)
        server.start()
        return handler, server

    def kill(self, index: int, *, restart: bool = True) -> None:
        """As by kill -9: nothing is said to anybody, and the folder is free for the next process."""
        handler = self.handlers[index]
        self.servers[index].stop(grace_seconds=0.0)
        for job in handler.job_shards():
            job._stopped.set()
            if job._transport is not None:
                job._transport.close()
            if job._clock_shard is not None:
                with job._clock_shard.condition:
                    job._clock_shard.condition.notify_all()
            assert job._thread is not None
            job._thread.join()
            assert job._state is not None
            job._state.wait_idle()
        assert handler._claim is not None
        os.close(handler._claim)
        if restart:
            port = int(self.servers[index].address.rpartition(":")[2])
            self.handlers[index], self.servers[index] = self.start(index, port)

    def close(self) -> None:
        for shard in self.shards:
            shard.close()
        self.clock.close()
        for handler, server in zip(self.handlers, self.servers, strict=True):
            server.stop(grace_seconds=0.0)
            handler.stop()

    def begin(self) -> None:
        for vw in range(2):
            self.clock.invoke(JOIN, JoinRequest(requester(vw), ""))
        for shard in self.shards:
            shard.upload(
                PUSH, push_header(requester(), None, self.headers), encode([torch.zeros(h.stop) for h in self.headers])
            )
        self.clock.invoke(REPORT_INITIALIZED, ReportInitializedRequest(requester()))
        self.wait_published(0)

    def push(self, vw: int, wave: int) -> list[bool]:
        update = encode([WITNESS.update(vw, wave, index) for index in range(2)])
        header = push_header(requester(vw), wave, self.headers)
        replies = [patiently(partial(shard.upload, PUSH, header, update)) for shard in self.shards]
        return [reply.duplicate for reply in replies]

    def commit(self, vw: int, wave: int) -> None:
        patiently(
            lambda: self.clock.invoke(
                REPORT_STAGED, ReportStagedRequest(requester(vw), Wave(wave), ((2 * wave + vw,),), Clock(0))
            )
        )

    def pull(self, clock: int, index: int) -> list[torch.Tensor]:
        header = PullHeader(requester(), Clock(clock), self.headers)
        return patiently(lambda: decode(self.shards[index].download(PULL, header), self.headers))

    def wait_published(self, clock: int) -> None:
        for index in range(2):
            self.pull(clock, index)


def patiently(work: Callable[[], T]) -> T:
    """As `server.shard.retries` does for stages."""
    answers: list[T] = []

    def attempt() -> bool:
        try:
            answers.append(work())
        except (Busy, ClockNotPublished, Unavailable):
            return False
        return True

    wait_until(attempt, timeout_seconds=SECONDS, what="answer")
    return answers[0]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with closing(Processes(tmp_path)) as value:
        value.begin()
        yield value


@pytest.mark.matrix
def test_both_are_killed_in_turn_and_every_wave_counts_once(processes: Processes) -> None:
    for wave in range(4):
        for vw in range(2):
            assert processes.push(vw, wave) == [False, False]
            processes.kill((wave + vw) % 2)
            assert processes.push(vw, wave) == [True, True], "what was acknowledged is there"
            processes.commit(vw, wave)
    processes.wait_published(4)

    assert [WITNESS.faults(processes.pull(4, index)) for index in range(2)] == [[], []]
    for index, history in enumerate(processes.histories):
        assert len(history.of("apply")) == len(history.of("staged")) == 8, f"shard {index}"
    assert [entry["clock"] for entry in processes.histories[0].of("publish")] == [0, 1, 2, 3, 4]


def test_a_configuration_that_is_repeated_changes_nothing_and_a_release_deletes_everything(
    processes: Processes, tmp_path: Path
) -> None:
    processes.push(0, 0)
    processes.kill(1)
    processes.handlers[1].configure(processes.handlers[1].job_shards()[0].config)
    assert processes.push(0, 0) == [True, True]
    processes.handlers[1].release(JOB)

    assert [path.name for path in (tmp_path / "shard-1").iterdir()] == ["owner"]
    processes.handlers[1].stop()
    assert not (tmp_path / "shard-1").exists()


def test_without_a_folder_of_its_own_it_goes_on_when_it_is_configured_again(tmp_path: Path) -> None:
    history = MemoryHistory()
    config = shard_config(slices_of([4]), stages=(1,), run_dir=str(tmp_path))
    for life in range(2):
        server = ShardServer(lambda _config: history, state=StateOptions())
        server.recover()
        server.configure(config)
        if life == 0:
            server.calls.invoke(JOIN, JoinRequest(requester(), ""))
            server.calls.upload(
                PUSH, push_header(requester(), None, headers_of(config.slices)), encode([torch.ones(4)])
            )
            server.calls.invoke(REPORT_INITIALIZED, ReportInitializedRequest(requester()))
        wait_until(
            lambda: server.clocks(JOB).published == 0,  # noqa: B023 - called at once
            timeout_seconds=SECONDS,
            what="clock 0",
        )
        if life == 1:
            header = PullHeader(requester(), Clock(0), headers_of(config.slices))
            found = patiently(lambda: list(server.calls.download(PULL, header)))  # noqa: B023
            assert torch.equal(decode(found, headers_of(config.slices))[0], torch.ones(4))
        server.stop()
    assert (tmp_path / "state" / "shard-0" / "job@1" / "job").exists()


def test_a_later_term_in_another_folder_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    """As after a rewind, when the state is in the folders of the runs."""
    server = ShardServer(lambda _config: MemoryHistory(), state=StateOptions())
    for term in (1, 2):
        server.configure(shard_config(slices_of([4]), stages=(1,), run_dir=str(tmp_path / f"run-{term}"), term=term))
    server.stop()

    assert not (tmp_path / "run-1" / "state").exists()
    assert (tmp_path / "run-2" / "state" / "shard-0" / "job@2" / "job").exists()


def test_lost_state_is_told_and_the_job_is_not_served(processes: Processes, tmp_path: Path) -> None:
    processes.push(0, 0)
    processes.kill(1, restart=False)
    (log,) = (tmp_path / "shard-1" / "job@1" / "pushes").glob("*.log")
    whole = log.read_bytes()
    log.write_bytes(whole[:100] + b"?" + whole[101:])
    port = int(processes.servers[1].address.rpartition(":")[2])
    processes.handlers[1], processes.servers[1] = processes.start(1, port)

    with pytest.raises(StateLost, match="is corrupted at byte"):
        processes.push(0, 0)
    assert "is corrupted at byte" in processes.handlers[1].lost_jobs()[JOB]
    with pytest.raises(StateLost):
        processes.handlers[1].configure(processes.handlers[0].job_shards()[0].config)


@pytest.mark.parametrize(("victim", "part"), [(1, "pushes"), (0, "decisions")])
def test_a_machine_that_forgot_what_it_had_acknowledged_sends_the_job_back(
    processes: Processes, tmp_path: Path, victim: int, part: str
) -> None:
    """Without `fsync` a power cut takes the end of a log, and what is left of it is whole."""
    (log,) = (tmp_path / f"shard-{victim}" / "job@1" / part).glob("*.log")
    before = log.stat().st_size
    for vw in range(2):
        processes.push(vw, 0)
    processes.commit(0, 0)
    own, other = (handler.job_shards()[0] for handler in processes.handlers)
    num_records = own.clock_shard.num_records
    wait_until(lambda: other.shard.num_records == num_records, timeout_seconds=SECONDS, what="commit on shard 1")
    processes.kill(victim, restart=False)
    os.truncate(log, before)
    port = int(processes.servers[victim].address.rpartition(":")[2])
    processes.handlers[victim], processes.servers[victim] = processes.start(victim, port)
    if victim == 1:
        processes.commit(1, 0)

    wait_until(lambda: processes.handlers[1].lost_jobs() != {}, timeout_seconds=SECONDS, what="loss")
    assert "to a checkpoint" in processes.handlers[1].lost_jobs()[JOB]
    with pytest.raises(StateLost):
        processes.push(0, 1)


@pytest.mark.parametrize("how", ["damaged", "removed", "whole"])
def test_the_next_term_begins_whatever_is_left_of_the_one_before(
    processes: Processes, tmp_path: Path, how: str
) -> None:
    configs = [handler.job_shards()[0].config for handler in processes.handlers]
    processes.push(0, 0)
    processes.kill(1, restart=False)
    if how == "damaged":
        (tmp_path / "shard-1" / "job@1" / "job").write_bytes(b"?")
    elif how == "removed":
        shutil.rmtree(tmp_path / "shard-1")
    port = int(processes.servers[1].address.rpartition(":")[2])
    processes.handlers[1], processes.servers[1] = processes.start(1, port)
    assert processes.handlers[1].jobs() == (() if how != "whole" else (JOB,))
    assert list(processes.handlers[1].lost_jobs()) == ([JOB] if how == "damaged" else [])
    for handler, config in zip(processes.handlers, configs, strict=True):
        handler.configure(replace(config, term=Term(2)))

    assert [handler.lost_jobs() for handler in processes.handlers] == [{}, {}]
    for index, handler in enumerate(processes.handlers):
        (folder,) = (tmp_path / f"shard-{index}").glob("job@*")
        assert (folder.name, handler.jobs(), handler.highest_term) == ("job@2", (JOB,), 2)
    with pytest.raises(StaleTerm):
        processes.push(0, 0)
    with pytest.raises(StaleTerm):
        processes.handlers[1].configure(configs[1])


def test_a_job_that_has_ended_is_not_told_as_lost_for_ever(processes: Processes, tmp_path: Path) -> None:
    processes.kill(1, restart=False)
    (tmp_path / "shard-1" / "job@1" / "job").write_bytes(b"?")
    port = int(processes.servers[1].address.rpartition(":")[2])
    processes.handlers[1], processes.servers[1] = processes.start(1, port)
    processes.handlers[1].release(JOB)

    assert [path.name for path in (tmp_path / "shard-1").iterdir()] == ["owner"]
    assert processes.handlers[1].lost_jobs() == {}
    with pytest.raises(UnknownJob):
        processes.push(0, 0)


def test_two_processes_never_share_a_folder(tmp_path: Path) -> None:
    descriptor = claim(tmp_path / "shard-0")
    with pytest.raises(UserError, match="another process uses the state"):
        claim(tmp_path / "shard-0")
    disclaim(tmp_path / "shard-0", descriptor)
    assert not (tmp_path / "shard-0").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="give another folder"):
        claim(tmp_path / "file")
