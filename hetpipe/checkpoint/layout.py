"""The layout of a checkpoint: its files and the identity stored in each (`docs/files.md`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hetpipe.values.ids import Clock, JobId, ShardIndex, StageIndex, VirtualWorkerIndex

#: Valid file names in a checkpoint: no folders, and no dots but that of the extension.
FILE_NAME = re.compile(r"(?:vw-\d{1,9}-stage-\d{1,9}|shard-\d{1,9})\.safetensors", re.ASCII)

#: Number of virtual workers that write the shared content: the lowest ones that pass the barrier.
NUM_KEEPERS = 2

#: Metadata key of a file under which all non-tensor data is stored as JSON. One key, because safetensors writes several
#: in any order, and the same content must give the same bytes.
FACTS = "hetpipe"

#: Keys in that JSON: the file's label, and the stored slices.
LABEL = "label"
SLICES = "slices"

#: Key in that JSON of a stage's file: names in the model's `state_dict` of tensors that have several, as a tied weight,
#:#: or none, as a buffer that is not persistent.
STATE_NAMES = "state_names"

#: The entry of the loss scale among the optimizer's scalars; no parameter can have this name.
LOSS_SCALE = ".loss_scale"


@dataclass(frozen=True, slots=True)
class PartLabel:
    """Identity stored in a checkpoint file, so that files of two checkpoints cannot be confused."""

    job_id: JobId
    clock: Clock
    name: str


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """The elements [start, stop) of a flattened parameter that is sliced over shards.

    >>> part = StoredSlice("0.weight", 0, 5, (2, 5))
    >>> part.whole, part.key
    ('weights/0.weight', 'weights/0.weight[0:5]')
    """

    parameter: str
    start: int
    stop: int
    shape: tuple[int, ...]
    """Shape of the whole parameter."""

    @property
    def whole(self) -> str:
        """The key of the whole parameter."""
        return f"weights/{self.parameter}"

    @property
    def key(self) -> str:
        """The key of the slice."""
        return f"{self.whole}[{self.start}:{self.stop}]"


def stage_file(vw: VirtualWorkerIndex, stage: StageIndex) -> str:
    """The file name of one stage's part.

    >>> stage_file(VirtualWorkerIndex(1), StageIndex(0))
    'vw-1-stage-0.safetensors'
    """
    return f"vw-{vw}-stage-{stage}.safetensors"


def shard_file(shard: ShardIndex) -> str:
    """The file name of one shard's part.

    >>> shard_file(ShardIndex(2))
    'shard-2.safetensors'
    """
    return f"shard-{shard}.safetensors"


def stage_files(num_stages: Mapping[VirtualWorkerIndex, int]) -> Iterator[str]:
    """The file names of all stages, virtual worker by virtual worker."""
    for vw in sorted(num_stages):
        for stage in range(num_stages[vw]):
            yield stage_file(vw, StageIndex(stage))


def optimizer_source(
    members: tuple[VirtualWorkerIndex, ...], vw: VirtualWorkerIndex, *, is_shared: bool
) -> VirtualWorkerIndex:
    """The virtual worker of a checkpoint whose optimizer state `vw` continues with.

    Its own, if the checkpoint has it; otherwise number `vw` modulo their count, so that all states are used equally
    often. Replicas that average gradients must have equal states: all use the lowest one's.

    Args:
        members: the virtual workers in the checkpoint, in order; at least one.
        vw: the virtual worker to restore.
        is_shared: whether all must continue with the same state.

    >>> [optimizer_source((0, 1), vw, is_shared=False) for vw in range(5)]
    [0, 1, 0, 1, 0]
    >>> [optimizer_source((0, 2), vw, is_shared=False) for vw in range(3)]
    [0, 2, 2]
    >>> [optimizer_source((1, 2), vw, is_shared=True) for vw in range(3)]
    [1, 1, 1]
    """
    if is_shared:
        return members[0]
    return vw if vw in members else members[vw % len(members)]
