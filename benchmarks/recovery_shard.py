"""From kill -9 of a shard of 256 MB to serving again, and what its write-ahead log costs.

The shard is a process with all that `hetpipe serve parameter-server` imports and does, but for its registration: a
coordinator would have it forget a job that it has not heard of. It is started again on its port as the services of a
run on this machine are, forked from a process that has imported torch; *serving* means that a pull of the newest clock
is answered. What a process without anything to recover takes is measured beside it.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
from pathlib import Path

import torch

from benchmarks.sizes import sized
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.sync.segment import first_progress
from hetpipe.errors import HetpipeError
from hetpipe.forking.environment import SINGLE_THREADED
from hetpipe.forking.fork_server import ForkServer
from hetpipe.observe.history import NullHistory
from hetpipe.phases import LAUNCH
from hetpipe.runs.service import Service, ServiceSpec
from hetpipe.server.runtime import announce_ready
from hetpipe.server.shard.chunks import Chunks, RunMap
from hetpipe.server.shard.job_storage import StateOptions
from hetpipe.server.shard.main import CALL_THREADS
from hetpipe.server.shard.server import ShardServer
from hetpipe.storage.wal import WalOptions, WriteAheadLog
from hetpipe.values.addresses import split_address
from hetpipe.values.ids import (
    Clock,
    Incarnation,
    JobId,
    LayerIndex,
    ShardIndex,
    StageIndex,
    Term,
    VirtualWorkerIndex,
    Wave,
)
from hetpipe.values.plan import SlicePlan, TensorSpec
from hetpipe.values.requests import PullHeader, PushHeader, Requester, SliceHeader
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import DataSpec, Membership, SyncSpec
from hetpipe.weights.allocator import settle_memory
from hetpipe.weights.flat import FlatBuffer, FlatLayout
from hetpipe.wire.calls import (
    CONFIGURE,
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

TOTAL_BYTES = sized(256, 8) * 1024 * 1024
#: Waves in the log when the shard is killed: as many as make the next snapshot fall due.
NUM_WAVES = 2
_READY_SECONDS = 60.0
_REQUESTER = Requester(JobId("bench"), Term(1), VirtualWorkerIndex(0), Incarnation(0), StageIndex(0))
#: A small slice, whose pull shows that the shard serves.
_SIZES = {"probe": 16, "weights": TOTAL_BYTES // 4}
_HEADERS = tuple(SliceHeader(name, 0, size, "float32") for name, size in _SIZES.items())


def _config(address: str, run_dir: Path) -> ShardConfig:
    data = DataSpec(1_000_000, 1, 0, 1, None)
    return ShardConfig(
        job_id=JobId("bench"),
        term=Term(1),
        shard=ShardIndex(0),
        num_shards=1,
        clock_shard_address=address,
        membership=Membership({VirtualWorkerIndex(0): 1}),
        slices=tuple(
            SlicePlan(TensorSpec(name, (size,), "float32"), LayerIndex(index), ShardIndex(0), 0, size)
            for index, (name, size) in enumerate(_SIZES.items())
        ),
        sync=SyncSpec(minibatches_per_wave=1, staleness=1),
        data=data,
        checkpoint_every_waves=None,
        checkpoint_keep=1,
        run_dir=str(run_dir),
        progress=first_progress(data),
    )


def serve() -> None:
    """The shard's process, until it is killed; its state and its port are its arguments."""
    state, port = sys.argv[1], int(sys.argv[2])
    settle_memory(one_heap=False)
    shards = ShardServer(lambda _: NullHistory(), state=StateOptions(root=Path(state)))
    shards.recover()
    server = Server(ServerConfig(port=port, num_threads=CALL_THREADS))
    shards.add_to(server)
    announce_ready("parameter_server", server.start())
    threading.Event().wait()


class Bench:
    """One shard, which is killed and started again."""

    def __init__(self) -> None:
        environment = {**os.environ, **SINGLE_THREADED}
        self._environment = environment
        self._fork_server = ForkServer(environment, programs={"shard": "benchmarks.recovery_shard:serve"})
        self._folder = Path(tempfile.mkdtemp(prefix="recovery-"))
        self._buffer = FlatBuffer(FlatLayout([(n, (s,), "float32") for n, s in _SIZES.items()]), torch.device("cpu"))
        self._runs = RunMap(_HEADERS, [slot.offset for slot in self._buffer.layout.slots])
        self._shard = self._start("state", 0)
        self._shard_address = self._shard.wait_ready(patience_seconds=_READY_SECONDS)

    def close(self) -> None:
        """End it, and delete everything."""
        self._shard.kill()
        self._fork_server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def train(self) -> None:
        """First weights and some waves."""
        control, shard = connect_shard(self._shard_address), connect_shard(self._shard_address, ShardIndex(0))
        control.invoke(CONFIGURE, _config(self._shard_address, self._folder))
        clock = connect_shard(self._shard_address, ShardIndex(0))
        clock.invoke(JOIN, JoinRequest(_REQUESTER))
        shard.upload(PUSH, PushHeader(_REQUESTER, None, _HEADERS), Chunks(self._buffer, self._runs))
        clock.invoke(REPORT_INITIALIZED, ReportInitializedRequest(_REQUESTER))
        self._wait_for(0)
        self._buffer.views["weights"].fill_(1e-3)
        for wave in range(NUM_WAVES):
            shard.upload(PUSH, PushHeader(_REQUESTER, Wave(wave), _HEADERS), Chunks(self._buffer, self._runs))
            clock.invoke(REPORT_STAGED, ReportStagedRequest(_REQUESTER, Wave(wave), ((wave,),), Clock(0)))
            self._wait_for(wave + 1)
        for connection in (control, shard, clock):
            connection.close()

    def recover(self) -> float:
        """Seconds from SIGKILL to an answer."""
        began = SYSTEM_CLOCK.monotonic()
        os.kill(self._shard.pid, signal.SIGKILL)
        self._shard.wait_ended(timeout_seconds=_READY_SECONDS)
        self._shard = self._start("state", split_address(self._shard_address)[1])
        self._wait_for(NUM_WAVES)
        return SYSTEM_CLOCK.monotonic() - began

    def start_empty(self) -> float:
        """Seconds until a shard that serves nothing yet is ready."""
        began = SYSTEM_CLOCK.monotonic()
        service = self._start("nothing", 0)
        service.wait_ready(patience_seconds=_READY_SECONDS)
        seconds = SYSTEM_CLOCK.monotonic() - began
        service.kill()
        # Its successor claims the same folder.
        service.wait_ended(timeout_seconds=_READY_SECONDS)
        return seconds

    def _start(self, state: str, port: int) -> Service:
        command = (*LAUNCH, "shard", str(self._folder / state), str(port))
        spec = ServiceSpec(key="shard", title="the shard", command=command, logs=self._folder)
        return Service(spec, environment=self._environment, on_death=lambda _: None, starter=self._fork_server.start)

    def _wait_for(self, clock: int) -> None:
        """Until a pull of `clock` is answered."""
        deadline = SYSTEM_CLOCK.monotonic() + _READY_SECONDS
        while True:
            shard = connect_shard(self._shard_address, ShardIndex(0))
            try:
                next(iter(shard.download(PULL, PullHeader(_REQUESTER, Clock(clock), _HEADERS[:1]))))
            except HetpipeError:
                if SYSTEM_CLOCK.monotonic() > deadline:
                    raise
                SYSTEM_CLOCK.sleep(0.02)
            else:
                return
            finally:
                shard.close()


def log_seconds_per_gigabyte(rounds: int, *, fsync: bool) -> list[float]:
    """What it takes to check and keep a push, without its way to the shard; behind it the log is shortened."""
    folder = Path(tempfile.mkdtemp(prefix="log-"))
    log = WriteAheadLog(folder, identity=b"bench", options=WalOptions(max_bytes=1 << 40, fsync=fsync))
    payload = memoryview(bytearray(os.urandom(1 << 20) * (TOTAL_BYTES >> 20)))
    seconds = []
    for _ in range(rounds + 1):
        began = SYSTEM_CLOCK.monotonic()
        log.sync(log.append(b"", [payload]))
        seconds.append((SYSTEM_CLOCK.monotonic() - began) * 1e9 / TOTAL_BYTES)
        log.truncate_before(log.rotate())
    log.close()
    shutil.rmtree(folder, ignore_errors=True)
    return seconds[1:]


def measure(rounds: int) -> dict[str, float]:
    """Medians, in seconds."""
    bench = Bench()
    try:
        bench.train()
        killed = [bench.recover() for _ in range(rounds)]
        empty = [bench.start_empty() for _ in range(rounds)]
    finally:
        bench.close()
    return {
        "kill -9 to serving again": statistics.median(killed),
        "a process that serves nothing, start to ready": statistics.median(empty),
        "write-ahead log, per GB": statistics.median(log_seconds_per_gigabyte(rounds, fsync=False)),
        "write-ahead log with fsync, per GB": statistics.median(log_seconds_per_gigabyte(rounds, fsync=True)),
    }
