"""Allreduce of gradients among equal replicas with torch.distributed: NCCL if each has a GPU of its own, else gloo.

The process group is created directly, so that no global state of `torch.distributed` is touched. All tensors of a call
are sent as one flat tensor per dtype: one collective costs less than many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import DeadlineExceeded, PeerUnreachable, UserError
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.run import LinkTime

if TYPE_CHECKING:  # torch.distributed has these names, but only its C++ module has their types
    from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, Work
else:
    from torch.distributed import PrefixStore, ProcessGroupGloo


class DistributedReplicas:
    """The same stage of several virtual workers, over one process group."""

    def __init__(
        self,
        group: ProcessGroup,
        who: str,
        pace: LinkTime | None = None,
        *,
        sleep: Callable[[float], None] = SYSTEM_CLOCK.sleep,
    ) -> None:
        """Use a group.

        Args:
            group: of all replicas.
            who: for errors.
            pace: emulation: a sum takes the time of a ring over this link.
            sleep: waits so many seconds.
        """
        self._group = group
        self._who = who
        self._pace = pace
        self._sleep = sleep

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum the tensors over all replicas, in place."""
        self._on_flat(tensors, lambda flat: self._group.allreduce([flat]), "to add up gradients")
        if self._pace is not None:
            num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
            self._sleep(self._pace.ring_seconds(num_bytes, self._group.size()))

    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of the first replica to all others, in place."""
        self._on_flat(tensors, lambda flat: self._group.broadcast(flat, 0), "to start from the same weights")

    def close(self) -> None:
        """Leave the group."""
        self._group.shutdown()

    def _on_flat(self, tensors: Sequence[Tensor], work: Callable[[Tensor], Work], why: str) -> None:
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            began = SYSTEM_CLOCK.monotonic()
            try:
                work(flat).wait()
            except RuntimeError as error:
                raise _lost(error, f"{self._who} waited {SYSTEM_CLOCK.monotonic() - began:.1f} s", why) from error
            for tensor, part in zip(same, torch.split(flat, [tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(part.view_as(tensor))


class ReplicaGroups:
    """The same stage of the members of each segment; see `pipeline.setup.Replicas`."""

    def __init__(self, connect: Callable[[Clock, Sequence[VirtualWorkerIndex]], DistributedReplicas]) -> None:
        """Form groups with `connect`, which takes the start of a segment and its members, at least two."""
        self._connect = connect
        self._members: tuple[VirtualWorkerIndex, ...] = ()
        self._group: DistributedReplicas | None = None

    def regroup(self, start: Clock, members: Sequence[VirtualWorkerIndex]) -> None:
        """See `Replicas.regroup`."""
        if tuple(members) == self._members:
            return
        self.close()
        self._group = self._connect(start, members) if len(members) > 1 else None
        self._members = tuple(members)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """See `Replicas.sum_`."""
        if self._group is not None:
            self._group.sum_(tensors)

    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        """See `Replicas.copy_first_`."""
        if self._group is not None:
            self._group.copy_first_(tensors)

    def close(self) -> None:
        """Leave the group, if there is one."""
        if self._group is not None:
            self._group.close()
            self._group = None


def connect_replicas(  # noqa: PLR0913 - all that replicas agree on, and their emulation
    store: Store,
    *,
    stage: int,
    vw: int,
    members: Sequence[int],
    host: str,
    device: torch.device,
    stall_seconds: float,
    start: int = 0,
    pace: LinkTime | None = None,
) -> DistributedReplicas:
    """Join the group of `stage` of some virtual workers; each of them calls this with the same store.

    Args:
        store: the rendezvous of the first of them.
        stage: own index in the pipeline.
        vw: own virtual worker.
        members: the virtual workers, in order.
        host: own address, at which the others reach this process.
        device: device of the gradients.
        stall_seconds: maximum wait for another replica, now and in every call.
        start: of the segment that it is for.
        pace: see `DistributedReplicas`.

    Raises:
        DeadlineExceeded: another replica did not join in time.
        PeerUnreachable: the rendezvous or a replica disconnected meanwhile.
        UserError: `host` is not an address of this machine.
    """
    who = f"stage {stage} of virtual worker {vw}"
    shared, rank, size = PrefixStore(f"replicas/{start}/stage-{stage}", store), members.index(vw), len(members)
    timeout = timedelta(seconds=stall_seconds)
    began = SYSTEM_CLOCK.monotonic()
    try:
        if have_own_gpus(shared, rank, size, device, timeout):
            return DistributedReplicas(_nccl(shared, rank, size, timeout), who, pace)
        return DistributedReplicas(_gloo(shared, rank, size, timeout, host), who, pace)
    except RuntimeError as error:
        elapsed = SYSTEM_CLOCK.monotonic() - began
        raise _lost(error, f"{who} waited {elapsed:.1f} s", "to connect") from error


def have_own_gpus(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> bool:
    """Whether every replica has a GPU that no other replica has, as NCCL needs; all replicas get the same answer."""
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"gpu-{rank}", own)
    keys = [f"gpu-{other}" for other in range(size)]
    store.wait(keys, timeout)
    gpus = [store.get(key) for key in keys]
    return all(gpus) and len(set(gpus)) == size


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, host: str) -> ProcessGroup:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - the stub lacks it
    options._timeout = timeout  # noqa: SLF001 - so named in Python
    try:
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
    except RuntimeError as error:
        raise UserError(f"cannot use the address {host} ({error}); give an address of this machine") from error
    options._threads = 1  # noqa: SLF001
    return cast("ProcessGroup", ProcessGroupGloo(store, rank, size, options))


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    from torch.distributed import ProcessGroupNCCL  # not in CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001 - so named in Python
    return cast("ProcessGroup", ProcessGroupNCCL(store, rank, size, options))


def _lost(error: RuntimeError, waited: str, why: str) -> DeadlineExceeded | PeerUnreachable:
    text = str(error).split("\n", maxsplit=1)[0][:200]
    if isinstance(error, dist.DistStoreError) or "timed out" in text.lower():
        return DeadlineExceeded(f"{waited} for its replicas {why} ({text})")
    return PeerUnreachable(f"{waited} for its replicas {why}, and lost one ({text})")
