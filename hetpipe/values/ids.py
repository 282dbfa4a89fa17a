"""Ids and indices, as `NewType`s so that mypy rejects a wave where a clock belongs."""

from __future__ import annotations

from collections.abc import Collection
from typing import NewType

VirtualWorkerIndex = NewType("VirtualWorkerIndex", int)
StageIndex = NewType("StageIndex", int)
ShardIndex = NewType("ShardIndex", int)
LayerIndex = NewType("LayerIndex", int)

#: Incarnation of a virtual worker; starts at 0 and only grows.
Incarnation = NewType("Incarnation", int)

#: Version of plan and membership; starts at 1 and only grows.
Term = NewType("Term", int)

#: Number of a minibatch within its virtual worker: 1, 2, … (docs/semantics/wsp.md, section 1).
Minibatch = NewType("Minibatch", int)

#: Number of a wave within its virtual worker: wave c holds minibatches cN + 1 … (c + 1)N.
Wave = NewType("Wave", int)

#: A count of waves: local clock, global clock or published clock.
Clock = NewType("Clock", int)

JobId = NewType("JobId", str)
AgentId = NewType("AgentId", str)

#: `NODE/INDEX`, for example `n0/3`.
DeviceId = NewType("DeviceId", str)


def virtual_workers_text(indices: Collection[VirtualWorkerIndex]) -> str:
    """Format virtual workers for a sentence.

    >>> virtual_workers_text([VirtualWorkerIndex(0), VirtualWorkerIndex(2)])
    'virtual workers 0, 2'
    """
    return "virtual worker" + ("s " if len(indices) > 1 else " ") + ", ".join(str(vw) for vw in indices)
