"""Shards to test, and a second, simple-minded way to put tensors on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import xxhash
from torch import Tensor

from hetpipe.decide.sync.segment import first_progress
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard.chunks import CHUNK_BYTES
from hetpipe.server.shard.clock_shard import ClockShard
from hetpipe.server.shard.shard import Shard
from hetpipe.values.activation import Activation
from hetpipe.values.events import Submission
from hetpipe.values.ids import (
    AgentId,
    Clock,
    DeviceId,
    Incarnation,
    JobId,
    LayerIndex,
    ShardIndex,
    StageIndex,
    Term,
    VirtualWorkerIndex,
    Wave,
)
from hetpipe.values.members import MemberId, MemberInfo, MemberRole
from hetpipe.values.plan import Plan, SlicePlan, StagePlan, TensorSpec, VirtualWorkerPlan
from hetpipe.values.requests import PullHeader, PushHeader, Requester, SliceHeader, Watermarks
from hetpipe.values.run import AgentDevice, AgentInfo
from hetpipe.values.run_document import RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import DataSpec, Membership, SyncSpec
from hetpipe.wire.call import Chunk, joined

JOB = JobId("job")
DATA = DataSpec(num_samples=1000, batch_size=1, seed=0, epochs=1, total_minibatches=None)


def slices_of(sizes: Sequence[int], *, dtype: str = "float32", shard: int = 0) -> tuple[SlicePlan, ...]:
    """One whole parameter per size: `p0`, `p1`, …"""
    return tuple(
        SlicePlan(TensorSpec(f"p{index}", (size,), dtype), LayerIndex(index), ShardIndex(shard), 0, size)
        for index, size in enumerate(sizes)
    )


def shard_config(
    slices: tuple[SlicePlan, ...],
    *,
    shard: int = 0,
    num_shards: int = 1,
    stages: Sequence[int] = (1, 1),
    staleness: int | None = 0,
    combine: str = "sum",
    term: int = 1,
    clock_shard_address: str = "",
    run_dir: str = "",
    activations: tuple[Activation, ...] = (),
) -> ShardConfig:
    """A job of `len(stages)` virtual workers with waves of one minibatch."""
    return ShardConfig(
        job_id=JOB,
        activations=activations,
        term=Term(term),
        shard=ShardIndex(shard),
        num_shards=num_shards,
        clock_shard_address=clock_shard_address,
        membership=Membership({VirtualWorkerIndex(vw): count for vw, count in enumerate(stages)}),
        slices=slices,
        sync=SyncSpec(minibatches_per_wave=1, staleness=staleness, combine=combine),
        data=DATA,
        checkpoint_every_waves=None,
        checkpoint_keep=2,
        run_dir=run_dir,
        progress=first_progress(DATA),
    )


def run_document(config: ShardConfig) -> RunDocument:
    """The run that a clock shard with this configuration serves: every stage on a device of its own of agent `n0`."""
    counts = config.membership.num_stages
    devices = [f"n0/{vw}-{stage}" for vw, count in counts.items() for stage in range(count)]
    places = iter(devices)
    workers = tuple(
        VirtualWorkerPlan(
            vw,
            tuple(
                StagePlan(AgentId("n0"), DeviceId(next(places)), LayerIndex(stage), LayerIndex(stage + 1))
                for stage in range(count)
            ),
        )
        for vw, count in counts.items()
    )
    shards = tuple(
        MemberInfo(
            MemberRole.PARAMETER_SERVER, MemberId(f"ps{i}"), "here", 1 + i, f"here:{7000 + i}", (), ShardIndex(i)
        )
        for i in range(config.num_shards)
    )
    return RunDocument(
        job={"name": "job"},
        submission=Submission("request", "{}", config.run_dir, "/code"),
        plan=Plan(config.job_id, config.term, workers, config.slices, config.num_shards),
        agents=(AgentInfo(AgentId("n0"), "here", 100, tuple(AgentDevice(d, "cpu", 1 << 30, "cpu") for d in devices)),),
        shards=shards,
        emulations=(),
        data=config.data,
        start=config.progress,
        eval_samples=None,
        submitted_wall=1.0,
    )


def requester(vw: int = 0, stage: int = 0, *, term: int = 1, incarnation: int = 0, job: str = JOB) -> Requester:
    return Requester(JobId(job), Term(term), VirtualWorkerIndex(vw), Incarnation(incarnation), StageIndex(stage))


def headers_of(slices: Sequence[SlicePlan]) -> tuple[SliceHeader, ...]:
    return tuple(SliceHeader(s.parameter.name, s.start, s.stop, s.parameter.dtype) for s in slices)


def push_header(who: Requester, wave: int | None, slices: tuple[SliceHeader, ...]) -> PushHeader:
    return PushHeader(who, None if wave is None else Wave(wave), slices)


def encode(tensors: Sequence[Tensor], *, chunk_bytes: int = CHUNK_BYTES) -> list[bytes]:
    """The chunks of a stream of `tensors`, each at the next multiple of 64 bytes."""
    stream = b"".join(
        raw + bytes(-len(raw) % 64) for raw in (bytes(t.view(torch.uint8).numpy().tobytes()) for t in tensors)
    )
    pieces = ((offset, stream[offset : offset + chunk_bytes]) for offset in range(0, len(stream), chunk_bytes))
    return [chunk_of(offset, piece) for offset, piece in pieces]


def chunk_of(offset: int, payload: bytes, *, form: int = 0) -> bytes:
    head = form.to_bytes(4, "little") + offset.to_bytes(8, "little")
    return b"hpC4" + head + plain_checksum(offset + form, payload) + payload


def plain_checksum(place: int, data: bytes) -> bytes:
    """The checksum of `hetpipe.checksum`, in the algorithm's streaming form."""
    digest = xxhash.xxh3_64(seed=place)
    for start in range(0, len(data), 1_000):
        digest.update(data[start : start + 1_000])
    return digest.digest()


def decode(chunks: Iterable[Chunk], headers: Sequence[SliceHeader]) -> list[Tensor]:
    """Inverse of `encode`."""
    stream = bytearray()
    for chunk in map(joined, chunks):
        assert chunk == chunk_of(len(stream), chunk[24:])
        stream += chunk[24:]
    tensors: list[Tensor] = []
    position = 0
    for header in headers:
        dtype: torch.dtype = getattr(torch, header.dtype)
        count = header.stop - header.start
        end = position + count * dtype.itemsize
        tensors.append(torch.frombuffer(stream[position:end], dtype=dtype) if count else torch.empty(0, dtype=dtype))
        position = -(-end // 64) * 64
    assert position == len(stream), "the stream ends with the gap behind its last slice"
    return tensors


class OneShard:
    """A shard and its decision log in one thread: `settle` carries out what was decided."""

    def __init__(self, config: ShardConfig) -> None:
        self.config = config
        self.headers = headers_of(config.slices)
        self.history = MemoryHistory()
        self.shard = Shard(config, self.history)
        self.clock = ClockShard(config, self.history)
        self._next_sample = 0

    @property
    def buffers(self) -> tuple[int, int]:
        """Buffers alive now, and at most so far."""
        return self.shard._pool.alive, self.shard._pool.peak

    def settle(self) -> None:
        while records := self.clock.records_from(self.shard.num_records):
            for record in records:
                self.shard.follow(record)
            self.clock.acknowledge(self.config.shard, self.shard.num_records)

    def push(
        self, who: Requester, wave: int | None, tensors: Sequence[Tensor], headers: Sequence[int] | None = None
    ) -> bool:
        """Push the slices at the positions `headers` (default: all); whether they were staged before."""
        named = self.headers if headers is None else tuple(self.headers[i] for i in headers)
        session = self.shard.begin_push(push_header(who, wave, named))
        if isinstance(session, Watermarks):
            return True
        for chunk in encode(tensors):
            session.write(chunk)
        session.finish()
        return False

    def pull(self, clock: int, who: Requester | None = None) -> list[Tensor]:
        with self.shard.pull(PullHeader(who or requester(), Clock(clock), self.headers)) as chunks:
            return decode(chunks, self.headers)

    def report(self, who: Requester, wave: int, *, is_empty: bool = False) -> None:
        """Say that a wave is staged; the first stage uses one sample for it."""
        blocks: tuple[tuple[int, ...], ...] | None = None
        if who.stage == 0:
            blocks = () if is_empty else ((self._next_sample,),)
            self._next_sample += 1
        self.clock.staged(who, Wave(wave), blocks, segment=Clock(0))
        self.settle()

    def begin(self, first: Sequence[Tensor] | None = None) -> OneShard:
        """Everyone joins, and `first` (default: zeros) becomes w^(0)."""
        for vw, count in self.config.membership.num_stages.items():
            for stage in range(count):
                self.clock.join(requester(vw, stage), "")
        zeros = [torch.zeros(h.stop, dtype=getattr(torch, h.dtype)) for h in self.headers]
        self.push(requester(), None, first or zeros)
        for stage in range(self.config.membership.num_stages[VirtualWorkerIndex(0)]):
            self.clock.initialized(requester(0, stage))
        self.settle()
        return self
