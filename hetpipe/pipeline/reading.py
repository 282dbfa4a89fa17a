"""Reading of minibatches: in the stage itself, or ahead of it in worker processes (job keys `data.num_workers`, …).

What a minibatch contains is decided elsewhere (`decide/sync/division.py`) and read in one way (`MinibatchSource`)
under seeds that depend on the minibatch alone, so results do not depend on who reads when. With workers, torch's
`DataLoader` reads the announced minibatches in order: it receives whole requests instead of sample indices.

Workers are forked when the reader is created, which a stage does before it has started gRPC, CUDA or its model
(`docs/semantics/processes.md`). They exchange index lists and tensors with the stage over inherited pipes and shared
memory; this is the only module of the package that uses `multiprocessing`.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.sync.division import Block
from hetpipe.errors import CallableError, DataWorkerLost
from hetpipe.observe.log import get_logger
from hetpipe.pipeline.callables import MapDataset
from hetpipe.pipeline.data import Batch, listed, read_evaluation_minibatch, read_minibatch
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex

_log = get_logger(__name__)

#: Types of leaves whose transfer cannot fail.
_PLAIN = (str, bytes, int, float, bool, type(None))

#: Timeout for the end of killed workers.
_END_SECONDS = 5.0

#: Timeout, after an error of the loader, for the end of the worker that caused it.
_CAUSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """A minibatch to read."""

    number: int
    """p, or the number of an evaluation minibatch (from 1)."""
    samples: Block
    is_evaluation: bool = False
    epoch: int = 0
    """From 0; samples of a stream are those of this epoch."""

    def __str__(self) -> str:
        """Format for messages."""
        return f"{'evaluation ' if self.is_evaluation else ''}minibatch {self.number}"


class _Unreadable:
    """The message of a `CallableError` raised in a worker, for the compute thread to raise."""

    __slots__ = ("message",)

    def __init__(self, message: str) -> None:
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchSource:
    """The minibatches of one stage: the data sets, the seeds, and the part of a minibatch that it needs."""

    train: MapDataset
    evaluation: MapDataset | None
    seed: int
    vw: VirtualWorkerIndex
    has_inputs: bool
    """Whether the inputs are needed: on the first stage."""
    has_target: bool
    """Whether the target is needed: on the last stage."""

    def read(self, request: Request) -> Batch:
        """Read a minibatch, under its own seed.

        Raises:
            CallableError: a sample or the minibatch cannot be used; with key, place and fix.
        """
        if request.is_evaluation:
            assert self.evaluation is not None, "without evaluation data there are no evaluation minibatches"
            batch = read_evaluation_minibatch(
                self.evaluation, request.samples, seed=self.seed, vw=self.vw, number=request.number
            )
        else:
            p = Minibatch(request.number)
            batch = read_minibatch(self.train, request.samples, seed=self.seed, vw=self.vw, p=p, epoch=request.epoch)
        return replace(
            batch,
            inputs=batch.inputs if self.has_inputs else (),
            target=batch.target if self.has_target else None,
        )


class DataReader(Protocol):
    """Reads the minibatches of one stage, in the announced order. For one thread, except `watch`."""

    def begin(self, requests: Sequence[Request]) -> None:
        """Announce the next minibatches, instead of those announced before and not taken."""
        ...

    def insert(self, requests: Sequence[Request]) -> None:
        """Announce minibatches that are taken before the rest of those announced."""
        ...

    def is_ready(self) -> bool:
        """Whether `take` would not wait.

        Raises:
            CallableError: a sample or the minibatch cannot be used.
            DataWorkerLost: a worker has died, or has not read the minibatch in time.
        """
        ...

    def take(self, request: Request) -> Batch:
        """The next announced minibatch, which is `request`; only after `is_ready`.

        Raises:
            CallableError: a sample or the minibatch cannot be used.
        """
        ...

    @property
    def reason(self) -> str:
        """Subject of the wait while not ready; completes "… waits for"."""
        ...

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` from another thread whenever `is_ready` may have changed."""
        ...

    def close(self) -> None:
        """End all workers. Idempotent."""
        ...


class InlineReader:
    """Reads a minibatch when it is taken, on the calling thread."""

    def __init__(self, source: MinibatchSource, *, pin_memory: bool = False) -> None:
        self._source = source
        self._pins = pin_memory

    def begin(self, requests: Sequence[Request]) -> None:
        """No effect: nothing is read ahead."""

    def insert(self, requests: Sequence[Request]) -> None:
        """No effect: nothing is read ahead."""

    def is_ready(self) -> bool:
        """Always true: `take` reads."""
        return True

    def take(self, request: Request) -> Batch:
        """Read the minibatch on this thread.

        Raises:
            CallableError: a sample or the minibatch cannot be used.
        """
        batch = self._source.read(request)
        return _pinned(batch) if self._pins else batch

    @property
    def reason(self) -> str:
        """Raises `NotImplementedError`: this reader never waits."""
        raise NotImplementedError("it is always ready")

    def watch(self, on_change: Callable[[], None]) -> None:
        """No effect: `is_ready` does not change."""

    def close(self) -> None:
        """No effect: there are no workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of worker processes."""

    num_workers: int
    """At least 1."""
    prefetch_factor: int
    """Minibatches that each worker reads ahead."""
    pin_memory: bool = False
    timeout_seconds: float
    """Timeout for a missing minibatch."""
    on_start: Callable[[], None]
    """Called in every worker first."""
    on_close: Callable[[], None]
    """Called when all workers have ended."""
    socket_folder: Path
    """Folder of the sockets over which workers pass shared memory."""
    clock: TimeSource = SYSTEM_CLOCK


class WorkerReader:
    """Reads ahead in worker processes.

    A thread drives torch's `DataLoader` and keeps one minibatch ready; further ones are in the loader. If a worker
    dies, its minibatch is lost and the stage fails; the next incarnation of the stage reads it again.
    """

    def __init__(self, source: MinibatchSource, options: WorkerOptions) -> None:
        """Fork the workers.

        Raises:
            DataWorkerLost: a worker cannot be started.
        """
        self._options = options
        self._source = source
        #: Guards the following attributes; notified when one changes.
        self._changed = threading.Condition()
        self._plan: tuple[Request, ...] = ()
        #: Number of the plan: what was read for an earlier one is discarded.
        self._generation = 0
        self._num_taken = 0
        #: Read and not taken; at most one.
        self._results: deque[Any] = deque()
        self._error: Exception | None = None
        self._is_closed = False
        self._on_change: Callable[[], None] = lambda: None
        self._workers: tuple[BaseProcess, ...] = ()
        #: When `is_ready` first found the next minibatch missing.
        self._missing_since: float | None = None
        self._started = threading.Event()
        # The kernel ends the workers with the thread that forked them.
        threading.Thread(target=self._run, name="data", daemon=True).start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        threading.Thread(target=self._watch_workers, name="data workers", daemon=True).start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    # -- for the compute thread --------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[Request]) -> None:
        """Replace the plan. The workers start immediately; minibatches of the previous one are dropped."""
        with self._changed:
            if not requests and self._num_taken == len(self._plan):
                return
            self._plan, self._num_taken = tuple(requests), 0
            self._generation += 1
            self._results.clear()
            self._missing_since = None
            self._changed.notify_all()

    def insert(self, requests: Sequence[Request]) -> None:
        """Insert minibatches before the rest of the plan, which is read again."""
        if requests:
            self.begin((*requests, *self._plan[self._num_taken :]))

    def is_ready(self) -> bool:
        """Whether the next minibatch has been read.

        Raises:
            CallableError: a sample or the minibatch cannot be used.
            DataWorkerLost: a worker has died, or has not read the minibatch within `timeout_seconds`.
        """
        with self._changed:
            if self._results:
                self._missing_since = None
                return True
            if self._error is not None:
                raise self._error
            now = self._options.clock.monotonic()
            if self._missing_since is None:
                self._missing_since = now
            if now - self._missing_since > self._options.timeout_seconds:
                raise DataWorkerLost(
                    f"{self.reason} for {now - self._missing_since:.0f} s (patience.data): the worker reads slowly or "
                    "hangs; see with `py-spy dump --pid PID` where it is, read such samples faster, or raise "
                    "patience.data"
                )
            return False

    def take(self, request: Request) -> Batch:
        """The next minibatch of the plan, which is `request`; only after `is_ready`.

        Raises:
            CallableError: a sample or the minibatch cannot be used.
        """
        with self._changed:
            expected, result = self._plan[self._num_taken], self._results.popleft()
            assert expected == request, f"{expected} was announced, and {request} is taken"
            self._num_taken += 1
            self._changed.notify_all()
        if isinstance(result, _Unreadable):
            raise CallableError(result.message)
        batch: Batch = result
        return batch

    @property
    def reason(self) -> str:
        """The minibatch being read, with the workers' process ids; completes "… waits for"."""
        request = self._plan[self._num_taken]
        pids = ", ".join(map(str, self.pids))
        key = "data.eval" if request.is_evaluation else "data.train"
        return f"{key}: {request} (samples {listed(request.samples)}) to be read by the data workers (processes {pids})"

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` from the reading thread whenever a minibatch has arrived or a worker is lost."""
        self._on_change = on_change

    def close(self) -> None:
        """Kill all workers and wait for their end. Idempotent."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join(_END_SECONDS)
        self._options.on_close()

    # -- the thread that drives the loader ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            loader = self._loader()
            self._started.set()
            for generation in self._generations():
                for result in loader:
                    pins = self._options.pin_memory and isinstance(result, Batch)
                    if not self._keep(generation, _pinned(result) if pins else result):
                        break
        except Exception as error:  # noqa: BLE001 - any error: the compute thread raises it
            self._fail(error)
        finally:
            self._started.set()

    def _loader(self) -> DataLoader[Any]:
        """The loader, whose workers are forked."""
        # There is no other way to set it; multiprocessing's own folder would remain after a SIGKILL.
        multiprocessing.current_process()._config["tempdir"] = str(self._options.socket_folder)  # type: ignore[attr-defined]  # noqa: SLF001
        others = set(multiprocessing.active_children())
        with warnings.catch_warnings():
            # The number of processors is a property of the node, not of the job.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader: DataLoader[Any] = DataLoader(
                _Requested(self._source),
                batch_size=None,
                sampler=_Plan(self._requests),
                num_workers=self._options.num_workers,
                prefetch_factor=self._options.prefetch_factor,
                collate_fn=_unchanged,
                worker_init_fn=_WorkerStart(self._options.on_start, os.getpid()),
                persistent_workers=True,
                multiprocessing_context="fork",
                # Its own draws must not disturb those of the compute thread.
                generator=torch.Generator(),
            )
            for _ in loader:  # no minibatch yet, but the first iteration forks the workers
                raise AssertionError("nothing was announced")
        found = [child for child in multiprocessing.active_children() if child not in others]
        self._workers = tuple(sorted(found, key=lambda worker: worker.pid or 0))
        return loader

    def _generations(self) -> Iterator[int]:
        """The number of each new plan, until the reader is closed."""
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda last=seen: self._is_closed or self._generation != last)  # type: ignore[misc]
                if self._is_closed:
                    return
                seen = self._generation
            yield seen

    def _requests(self) -> Iterator[Request]:
        """The requests of the plan, until there is a newer one."""
        with self._changed:
            plan, generation = self._plan, self._generation
        for request in plan:
            if generation != self._generation:
                return
            yield request

    def _keep(self, generation: int, result: Any) -> bool:
        """Store a minibatch once there is room; False if it belongs to an earlier plan."""
        with self._changed:
            self._changed.wait_for(lambda: not self._results or generation != self._generation or self._is_closed)
            if generation != self._generation or self._is_closed:
                return False
            self._results.append(result)
        self._on_change()
        return True

    def _fail(self, error: Exception) -> None:
        """Make the compute thread raise the error of the loader, or the end of the worker that caused it."""
        lost = self._lost_worker(_CAUSE_SECONDS)
        why = lost or f"data.num_workers: reading ahead failed: {error}"
        with self._changed:
            if self._is_closed or self._error is not None:
                return
            self._error = DataWorkerLost(why)
        _log.error("data_workers_failed", reason=why)
        self._on_change()

    def _watch_workers(self) -> None:
        """Fail as soon as a worker ends: the loader would notice it later or, in the middle of a message, never."""
        multiprocessing.connection.wait([worker.sentinel for worker in self._workers])
        self._fail(DataWorkerLost("a data worker ended"))

    def _lost_worker(self, seconds: float) -> str | None:
        """Reason of a worker's end within `seconds`; None without one. Its connections close before it ends."""
        if not self._workers:
            return None
        ended = multiprocessing.connection.wait([worker.sentinel for worker in self._workers], seconds)
        lost = next((worker for worker in self._workers if worker.sentinel in ended), None)
        return None if lost is None else _why_lost(lost.pid, _exit_code(lost))


def _exit_code(worker: BaseProcess) -> int | None:
    """The exit code of a worker that is ending.

    If two threads query it concurrently, as this one and the loader's do, the kernel answers only one, and
    `multiprocessing` reports None to the other.
    """
    deadline = SYSTEM_CLOCK.monotonic() + _END_SECONDS
    while worker.exitcode is None and SYSTEM_CLOCK.monotonic() < deadline:
        worker.join(0.01)
    return worker.exitcode


def _why_lost(pid: int | None, exit_code: int | None) -> str:
    """A worker's end as a sentence, with a fix."""
    if exit_code is None or exit_code >= 0:
        how, fix = f"ended with exit status {exit_code}", "its last output is in the output of the stage"
    else:
        name = signal.Signals(-exit_code).name
        how = f"was killed by {name}"
        fix = {
            "SIGBUS": "its shared memory is probably exhausted: enlarge /dev/shm (`--shm-size` of a container), or "
            "lower data.num_workers and data.prefetch_factor",
            "SIGKILL": "if the memory of the node was exhausted, lower data.num_workers and data.prefetch_factor",
        }.get(name, "it crashed in code that reads the data: read the same samples with `data.num_workers: 0`")
    return f"data.num_workers: the data worker with process id {pid} {how}; {fix}"


class _Requested(Dataset[Any]):
    """The data set of the workers: reads whole requests."""

    def __init__(self, source: MinibatchSource) -> None:
        self._source = source

    def __getitem__(self, request: Request) -> Any:
        try:
            batch = self._source.read(request)
            _check_transferable(batch, "data.eval" if request.is_evaluation else "data.train")
        except CallableError as error:
            return _Unreadable(str(error))
        return batch


class _Plan:
    """A sampler for the loader: each iteration yields the requests of the current plan."""

    def __init__(self, requests: Callable[[], Iterator[Request]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Request]:
        return self._requests()

    def __len__(self) -> int:
        raise TypeError("the plan changes")


@dataclass(frozen=True, slots=True)
class _WorkerStart:
    """Initialization of a worker."""

    on_start: Callable[[], None]
    parent: int

    def __call__(self, worker: int) -> None:
        del worker
        self.on_start()
        if os.getppid() != self.parent:
            os._exit(1)  # the stage ended before its parent-death signal was set here


def _check_transferable(batch: Batch, key: str) -> None:
    """Refuse a minibatch that cannot be sent to the stage.

    Raises:
        CallableError: naming the type; otherwise torch would only print the error, and the stage would wait.
    """
    for leaf in tree_leaves((batch.inputs, batch.target)):
        if isinstance(leaf, _PLAIN):
            continue
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise CallableError(
                f"{key}: a minibatch has a tensor that requires a gradient, which cannot leave the data worker; "
                "detach() it in the data set or in data.collate_fn"
            )
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
            raise CallableError(
                f"{key}: a minibatch has a tensor on {leaf.device}, which cannot leave the data worker; data sets and "
                "data.collate_fn return tensors on the CPU"
            )
        if isinstance(leaf, Tensor):
            continue
        try:
            ForkingPickler.dumps(leaf)
        except Exception as error:
            raise CallableError(
                f"{key}: a minibatch has an object of type {type(leaf).__name__}, which cannot leave the data worker "
                f"({type(error).__name__}: {error!s:.200}); return tensors, numbers and texts, or set "
                "`data.num_workers: 0`"
            ) from error


def _pinned(batch: Batch) -> Batch:
    """A copy in page-locked memory; the minibatch itself without a device that benefits."""
    if not torch.cuda.is_available():
        return batch
    inputs, target = tree_map_only(Tensor, Tensor.pin_memory, (batch.inputs, batch.target))
    return replace(batch, inputs=inputs, target=target)


def _unchanged(result: Any) -> Any:
    return result
