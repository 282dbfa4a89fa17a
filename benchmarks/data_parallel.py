"""PyTorch's DistributedDataParallel on emulated devices: a process each, over gloo.

Computations sleep as long as the profile says, layer by layer; the arithmetic is hidden in that time. The
communication hook averages each bucket for real, and then waits as long as the ring takes on the slowest link, on a
thread of its own, so that it overlaps with the backward, bucket after bucket. `simulated_seconds` says how long a step
should take so.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from benchmarks import paper
from benchmarks.sleeper import keep_time
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.planner.baselines import slowest_link, whole_model_bytes
from hetpipe.decide.planner.costs import Costs
from hetpipe.values.ids import DeviceId
from hetpipe.values.profile import LayerProfile
from hetpipe.values.run import LinkTime

if TYPE_CHECKING:  # torch.distributed has these names, but only its C++ module has their types
    from torch._C._distributed_c10d import FileStore, GradBucket
else:
    from torch.distributed import FileStore, GradBucket

#: DistributedDataParallel's own, divided as all bytes are.
_BUCKET_BYTES = 25 * 2**20 // paper.BYTES


@dataclass(frozen=True, slots=True)
class Ring:
    """The devices that hold the whole model, and the slowest link between any two of them."""

    devices: tuple[DeviceId, ...]
    link: LinkTime

    def seconds(self, num_bytes: int) -> float:
        """Of one all-reduce."""
        return self.link.ring_seconds(num_bytes, len(self.devices))


@dataclass(frozen=True, slots=True)
class Trained:
    """What one device did."""

    ends: tuple[float, ...]
    """Of each step, in seconds since the common start."""
    losses: tuple[float, ...]
    processor_seconds: float


def ring_of(costs: Costs) -> Ring:
    """The devices of a cluster that hold the whole model, by the planner's model of memory."""
    needed = whole_model_bytes(costs, optimizer_slots=0)
    devices = tuple(d for d, kind in costs.cluster.devices.items() if costs.memory_bytes[kind] >= needed)
    link = slowest_link(costs, devices)
    return Ring(devices, LinkTime(link.latency_seconds, link.effective_bytes_per_second))


def simulated_seconds(costs: Costs, ring: Ring) -> float:
    """A step: the slowest forward, then its backward, in which each bucket is averaged when the slowest has it."""
    kinds = {costs.cluster.devices[device] for device in ring.devices}
    layers = costs.profile.layers
    slowest = max(kinds, key=lambda kind: sum(layer.forward_ms[kind] + layer.backward_ms[kind] for layer in layers))
    now = sum(layer.forward_ms[slowest] for layer in layers) / 1000
    free = 0.0
    pending = 0
    for layer in reversed(layers):
        now += layer.backward_ms[slowest] / 1000
        for num_bytes in _tensors(layer):
            pending += num_bytes
            if pending >= _BUCKET_BYTES:
                free, pending = max(free, now) + ring.seconds(pending), 0
    if pending:
        free = max(free, now) + ring.seconds(pending)
    return max(now, free)


def _tensors(layer: LayerProfile) -> Sequence[int]:
    """Bytes of both matrices of a layer, in the order in which their gradients are ready."""
    return (layer.parameter_bytes // 2,) * 2 if layer.parameter_bytes else ()


def measure(full: str, costs: Costs, *, num_steps: int, rate: float) -> list[Trained]:
    """Train the small model of a name in `paper.MODELS` on every device that holds it.

    Args:
        full: the model.
        costs: its profile on the cluster, scaled.
        num_steps: minibatches of each device.
        rate: learning rate of one minibatch; averages have it times the number of devices.
    """
    ring = ring_of(costs)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory(prefix="hetpipe-bench-") as folder:
        found = context.Queue()
        task = _Task(full, costs.profile.layers, ring, num_steps, rate, str(Path(folder) / "store"))
        kinds = [costs.cluster.devices[device] for device in ring.devices]
        ranks = [context.Process(target=_rank, args=(task, rank, kind, found)) for rank, kind in enumerate(kinds)]
        for process in ranks:
            process.start()
        trained: list[Trained] = [found.get(timeout=3600) for _ in ranks]
        for process in ranks:
            process.join()
    return trained


@dataclass(frozen=True, slots=True)
class _Task:
    full: str
    layers: Sequence[LayerProfile]
    ring: Ring
    num_steps: int
    rate: float
    store: str


class _Device:
    """An emulated device: computes layer after layer, each at least as long as its profile says."""

    def __init__(self) -> None:
        self._end = 0.0

    def begin(self) -> None:
        """Begin a step now."""
        self._end = SYSTEM_CLOCK.monotonic()

    def compute(self, seconds: float) -> None:
        """Sleep until a computation that followed the last one without a pause is over."""
        self._end += seconds
        SYSTEM_CLOCK.sleep(max(0.0, self._end - SYSTEM_CLOCK.monotonic()))


class _Pause(torch.autograd.Function):
    """The identity, at the end of a layer's forward and at the beginning of its backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, device: _Device, forward: float, backward: float) -> Tensor:
        ctx.device, ctx.seconds = device, backward
        device.compute(forward)
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.device.compute(ctx.seconds)
        return gradient, None, None, None


class _Emulated(nn.Module):
    """The model, layer by layer on a device."""

    def __init__(self, task: _Task, kind: str, device: _Device) -> None:
        super().__init__()
        self._device = device
        self.layers = nn.ModuleList(paper.layers_of(paper.MODELS[task.full]()))
        self._seconds = [(layer.forward_ms[kind] / 1000, layer.backward_ms[kind] / 1000) for layer in task.layers]

    def forward(self, value: Tensor) -> Tensor:
        """Samples × inputs; returns samples × classes."""
        for layer, (forward, backward) in zip(self.layers, self._seconds, strict=True):
            value = _Pause.apply(layer(value), self._device, forward, backward)  # type: ignore[no-untyped-call]  # torch ships it untyped
        return value


def _rank(task: _Task, rank: int, kind: str, found: Any) -> None:
    torch.set_num_threads(1)
    keep_time()
    num_ranks, device = len(task.ring.devices), _Device()
    store = FileStore(task.store, num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = DistributedDataParallel(_Emulated(task, kind, device), bucket_cap_mb=_BUCKET_BYTES / 2**20)
    with ThreadPoolExecutor(1) as network:
        model.register_comm_hook(None, lambda _, bucket: _averaged(network, task.ring, bucket))
        optimizer = torch.optim.SGD(model.parameters(), lr=task.rate * num_ranks)
        batches = list(_batches(task.num_steps, rank, num_ranks))
        ends, losses = list[float](), list[float]()
        dist.barrier()
        began, used = SYSTEM_CLOCK.monotonic(), time.process_time()
        for value, target in batches:
            device.begin()
            optimizer.zero_grad()
            loss = paper.loss(model(value), target)
            loss.backward()  # type: ignore[no-untyped-call]  # torch ships it untyped
            optimizer.step()
            ends.append(SYSTEM_CLOCK.monotonic() - began)
            losses.append(loss.item())
        used = time.process_time() - used
    found.put(Trained(tuple(ends), tuple(losses), used))
    dist.destroy_process_group()


def _batches(num_steps: int, rank: int, num_ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    size = paper.BATCH_SIZE
    samples = paper.Samples(num_steps * num_ranks * size)
    for step in range(num_steps):
        first = (step * num_ranks + rank) * size
        values, targets = zip(*(samples[index] for index in range(first, first + size)), strict=True)
        yield torch.stack(values), torch.stack(targets)


def _averaged(network: ThreadPoolExecutor, ring: Ring, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket on the network's thread: buckets are averaged in their order, one at a time."""
    flat, done = bucket.buffer(), torch.futures.Future[Tensor]()

    def average() -> None:
        try:
            dist.all_reduce(flat)
        except RuntimeError as error:
            done.set_exception(error)  # type: ignore[arg-type]  # torch annotates it as a result
            return
        flat.div_(len(ring.devices))
        SYSTEM_CLOCK.sleep(ring.seconds(flat.numel() * flat.itemsize))
        done.set_result(flat)

    network.submit(average)
    return done
