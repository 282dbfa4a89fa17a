"""Replicas in the threads of one process: sums are made in the order of the virtual workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hetpipe.errors import DeadlineExceeded
from hetpipe.values.ids import Clock, VirtualWorkerIndex

Tensors = Sequence[Tensor]


class ReplicaMeeting:
    """Where the same stage of all virtual workers meets."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._bell = threading.Condition()
        self._brought: dict[VirtualWorkerIndex, Tensors] = {}
        self._result: list[Tensor] = []
        self._round = 0

    def exchange(
        self,
        vw: VirtualWorkerIndex,
        tensors: Tensors,
        combine: Callable[[Sequence[Tensors]], list[Tensor]],
        stall_seconds: float,
    ) -> list[Tensor]:
        """What `combine` makes of the tensors of all virtual workers, in their order."""
        with self._bell:
            own_round = self._round
            self._brought[vw] = [tensor.clone() for tensor in tensors]
            if len(self._brought) == self._num_workers:
                self._result = combine([self._brought[i] for i in sorted(self._brought)])
                self._brought = {}
                self._round += 1
                self._bell.notify_all()
            elif not self._bell.wait_for(lambda: self._round > own_round, stall_seconds):
                raise DeadlineExceeded(f"virtual worker {vw} waited {stall_seconds:.0f} s for its replicas")
            return self._result


class InProcessReplicas:
    """One virtual worker's end; see `pipeline.setup.Replicas`."""

    def __init__(
        self,
        meet: Callable[[Clock, Sequence[VirtualWorkerIndex]], ReplicaMeeting],
        vw: VirtualWorkerIndex,
        stall_seconds: float,
    ) -> None:
        self._meet = meet
        self._meeting: ReplicaMeeting | None = None
        self._members: tuple[VirtualWorkerIndex, ...] = ()
        self._vw = vw
        self._stall_seconds = stall_seconds

    def regroup(self, start: Clock, members: Sequence[VirtualWorkerIndex]) -> None:
        """See `Replicas.regroup`."""
        if tuple(members) != self._members:
            self._meeting, self._members = self._meet(start, members), tuple(members)

    def sum_(self, tensors: Tensors) -> None:
        """See `Replicas.sum_`."""
        self._become(tensors, _added)

    def copy_first_(self, tensors: Tensors) -> None:
        """See `Replicas.copy_first_`."""
        self._become(tensors, lambda brought: list(brought[0]))

    def _become(self, tensors: Tensors, combine: Callable[[Sequence[Tensors]], list[Tensor]]) -> None:
        assert self._meeting is not None, "a stage forms its group before it uses it"
        result = self._meeting.exchange(self._vw, tensors, combine, self._stall_seconds)
        for tensor, value in zip(tensors, result, strict=True):
            tensor.copy_(value)


def _added(brought: Sequence[Tensors]) -> list[Tensor]:
    total = [tensor.clone() for tensor in brought[0]]
    for tensors in brought[1:]:
        total = [torch.add(left, right) for left, right in zip(total, tensors, strict=True)]
    return total
