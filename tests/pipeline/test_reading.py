"""Reading ahead in worker processes: the same minibatches as without, and sentences for whatever goes wrong there."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hetpipe.errors import CallableError, DataWorkerLost
from hetpipe.pipeline.callables import CollatedDataset, MapDataset
from hetpipe.pipeline.data import Batch
from hetpipe.pipeline.reading import DataReader, InlineReader, MinibatchSource, Request, WorkerOptions, WorkerReader
from hetpipe.values.ids import VirtualWorkerIndex
from tests.pipeline.test_data import Samples
from tests.support.fake_clock import FakeClock

REQUESTS = [Request(p, (2 * p - 2, 2 * p - 1)) for p in range(1, 5)]
EVALUATIONS = [Request(number, (number,), is_evaluation=True) for number in (1, 2)]


def augmented(index: int) -> tuple[Tensor, Tensor]:
    """A sample with draws from all three generators."""
    drawn = torch.rand(2) + random.random() + float(np.random.rand())  # noqa: NPY002 - what users draw from
    return drawn + index, torch.tensor(index)


def source_of(make: Callable[[int], Any] | MapDataset, **given: bool) -> MinibatchSource:
    dataset = Samples(make) if callable(make) else make
    parts = {"has_inputs": True, "has_target": True} | given
    return MinibatchSource(train=dataset, evaluation=dataset, seed=7, vw=VirtualWorkerIndex(1), **parts)


class Watched:
    """Waits for a reader as a compute thread does."""

    def __init__(self, reader: DataReader) -> None:
        self._reader = reader
        self._condition = threading.Condition()
        reader.watch(self._ring)

    def _ring(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def wait_ready(self) -> None:
        with self._condition:
            assert self._condition.wait_for(self._reader.is_ready, 60.0)

    def take(self, requests: Sequence[Request]) -> list[Batch]:
        batches = []
        for request in requests:
            self.wait_ready()
            batches.append(self._reader.take(request))
        return batches


@contextmanager
def workers(source: MinibatchSource, **options: Any) -> Iterator[tuple[WorkerReader, Watched]]:
    defaults: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 2, "timeout_seconds": 60.0}
    nothing: dict[str, Any] = {"on_start": lambda: None, "on_close": lambda: None}
    with TemporaryDirectory(prefix="hetpipe-test-") as folder:
        sockets = {"socket_folder": Path(folder)}
        reader = WorkerReader(source, WorkerOptions(**(defaults | nothing | sockets | options)))
        try:
            yield reader, Watched(reader)
        finally:
            reader.close()


def plain(batch: Batch) -> tuple[list[Any], Any]:
    target = batch.target.tolist() if isinstance(batch.target, Tensor) else batch.target
    return [value.tolist() for value in batch.inputs], target


def inline(source: MinibatchSource, requests: Sequence[Request]) -> list[tuple[list[Any], Any]]:
    reader = InlineReader(source)
    reader.begin(requests)
    assert reader.is_ready()
    return [plain(reader.take(request)) for request in requests]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_read_the_same_bits(num_workers: int) -> None:
    source = source_of(augmented)
    before = torch.get_rng_state()
    with workers(source, num_workers=num_workers) as (reader, watched):
        reader.begin(REQUESTS)
        found = [plain(batch) for batch in watched.take(REQUESTS)]
        assert torch.equal(torch.get_rng_state(), before), "reading ahead must not draw in the stage"
    assert found == inline(source, REQUESTS)


def test_an_evaluation_comes_in_between_and_training_goes_on_where_it_was() -> None:
    source = source_of(augmented)
    with workers(source) as (reader, watched):
        reader.begin(REQUESTS)
        found = watched.take(REQUESTS[:1])
        watched.wait_ready()
        reader.insert(EVALUATIONS)
        found += watched.take([*EVALUATIONS, *REQUESTS[1:]])
    assert list(map(plain, found)) == inline(source, [REQUESTS[0], *EVALUATIONS, *REQUESTS[1:]])


def test_a_new_plan_replaces_the_old_one() -> None:
    source = source_of(augmented)
    with workers(source) as (reader, watched):
        reader.begin(REQUESTS)
        watched.wait_ready()
        for _ in range(3):
            reader.begin(REQUESTS[2:])
        assert list(map(plain, watched.take(REQUESTS[2:]))) == inline(source, REQUESTS[2:])
        reader.begin(())
        reader.begin(REQUESTS[:1])
        assert list(map(plain, watched.take(REQUESTS[:1]))) == inline(source, REQUESTS[:1])


def test_a_stage_gets_the_part_that_it_needs() -> None:
    with workers(source_of(augmented, has_target=False), num_workers=1) as (reader, watched):
        reader.begin(REQUESTS[:1])
        (batch,) = watched.take(REQUESTS[:1])
        assert (batch.target, batch.num_samples, len(batch.inputs)) == (None, 2, 1)
    batch = InlineReader(source_of(augmented, has_inputs=False)).take(REQUESTS[0])
    assert (batch.inputs, batch.target.tolist()) == ((), [0, 1])


def refusal(source: MinibatchSource) -> str:
    with workers(source, num_workers=1) as (reader, watched):
        reader.begin(REQUESTS)
        with pytest.raises(CallableError) as caught:
            watched.take(REQUESTS)
    return str(caught.value)


def broken(index: int) -> Any:
    if index == 3:
        raise OSError("no such image")
    return torch.zeros(2), 0


def test_what_a_data_set_raises_in_a_worker_is_told_when_its_turn_comes() -> None:
    assert refusal(source_of(broken)).startswith("data.train: reading sample 3 raised OSError: no such image (")


def test_what_a_collate_fn_raises_or_returns_in_a_worker() -> None:
    def pad(samples: list[Any]) -> Any:
        raise ValueError(f"{len(samples)} of them")

    assert refusal(source_of(CollatedDataset(Samples(augmented), pad))).startswith(
        "data.collate_fn: given samples 0, 1 of data.train, it raised ValueError: 2 of them ("
    )
    local = type("Local", (), {})
    odd = CollatedDataset(Samples(augmented), lambda samples: (torch.zeros(len(samples)), local()))
    assert refusal(source_of(odd)).startswith(
        "data.train: a minibatch has an object of type Local, which cannot leave the data worker ("
    )
    grad = CollatedDataset(Samples(augmented), lambda _: (torch.zeros(2), torch.zeros(2, requires_grad=True) * 2))
    assert "requires a gradient, which cannot leave the data worker; detach() it" in refusal(source_of(grad))
    meta = CollatedDataset(Samples(augmented), lambda _: (torch.zeros(2, device="meta"), 0))
    assert "a tensor on meta, which cannot leave the data worker" in refusal(source_of(meta))


def lost(make: Callable[[int], Any]) -> str:
    with workers(source_of(make)) as (reader, watched):
        reader.begin(REQUESTS)
        with pytest.raises(DataWorkerLost) as caught:
            watched.take(REQUESTS)
    return str(caught.value)


def test_a_worker_that_is_killed() -> None:
    def deadly(index: int) -> Any:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return augmented(index)

    said = lost(deadly)
    assert said.startswith("data.num_workers: the data worker with process id ")
    assert said.endswith(
        " was killed by SIGKILL; if the memory of the node was exhausted, lower data.num_workers and "
        "data.prefetch_factor"
    )


def test_a_connection_that_breaks_before_its_worker_has_ended() -> None:
    with workers(source_of(augmented), num_workers=1) as (reader, watched):
        noticed = threading.Thread(target=reader._fail, args=(ConnectionResetError(104, "Connection reset by peer"),))
        noticed.start()
        os.kill(reader.pids[0], signal.SIGKILL)
        noticed.join()
        reader.begin(REQUESTS)
        with pytest.raises(DataWorkerLost, match="was killed by SIGKILL"):
            watched.take(REQUESTS)


def test_an_error_of_the_loader_without_a_lost_worker() -> None:
    with workers(source_of(augmented), num_workers=1) as (reader, _):
        reader._fail(OSError(24, "Too many open files"))
        with pytest.raises(DataWorkerLost, match=r"reading ahead failed: \[Errno 24\] Too many open files"):
            reader.is_ready()


@pytest.mark.parametrize(
    ("number", "fix"),
    [(signal.SIGBUS, "enlarge /dev/shm"), (signal.SIGILL, "read the same samples with `data.num_workers: 0`")],
)
def test_a_worker_that_crashes(number: signal.Signals, fix: str) -> None:
    def crash(_: int) -> Any:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    said = lost(crash)
    assert f"was killed by {number.name}; " in said
    assert fix in said


def test_a_worker_that_exits() -> None:
    assert "ended with exit status 3; its last output is in the output of the stage" in lost(lambda _: os._exit(3))


def test_a_worker_that_hangs() -> None:
    clock = FakeClock()

    def hang(index: int) -> Any:
        if index >= 2:
            threading.Event().wait()
        return augmented(index)

    with workers(source_of(hang), num_workers=1, timeout_seconds=300.0, clock=clock) as (reader, watched):
        reader.begin(REQUESTS)
        watched.take(REQUESTS[:1])
        assert not reader.is_ready()
        clock.advance(301.0)
        with pytest.raises(DataWorkerLost) as caught:
            reader.is_ready()
        (pid,) = reader.pids
    assert str(caught.value).startswith(
        f"data.train: minibatch 2 (samples 2, 3) to be read by the data workers (processes {pid}) for 301 s "
        "(patience.data): "
    )
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_workers_start_and_end_with_the_reader() -> None:
    reading, writing = os.pipe()
    ended = []
    with workers(
        source_of(augmented),
        num_workers=3,
        on_start=lambda: os.write(writing, b"s") and None,
        on_close=lambda: ended.append(True),
    ) as (reader, watched):
        reader.begin(REQUESTS)
        watched.take(REQUESTS)
        assert len(set(reader.pids)) == 3
        reader.close()
    assert os.read(reading, 10) == b"sss"
    assert ended == [True]
    for pid in reader.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    os.close(reading)
    os.close(writing)
