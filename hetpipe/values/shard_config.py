"""Configuration of a shard for one job."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.values.activation import Activation
from hetpipe.values.freezing import Freezing
from hetpipe.values.ids import JobId, ShardIndex, Term
from hetpipe.values.plan import SlicePlan
from hetpipe.values.run_document import RunDocument
from hetpipe.values.sync import DataSpec, MemberChange, Membership, PlanChange, Progress, SyncSpec, WaveChange


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Everything one shard needs to serve a job."""

    job_id: JobId
    term: Term
    shard: ShardIndex
    num_shards: int
    clock_shard_address: str
    membership: Membership
    slices: tuple[SlicePlan, ...]
    """The slices this shard holds, in chain order."""
    sync: SyncSpec
    data: DataSpec
    checkpoint_every_waves: int | None
    checkpoint_keep: int
    run_dir: str
    progress: Progress
    """Where the run starts: clock 0, or the barrier of the restored checkpoint."""
    run: RunDocument | None = None
    """The run document; None on shards other than the clock shard."""
    clock_shard_id: str = ""
    """Member id of the clock shard, which with TLS it must prove; empty in state stored by earlier versions."""
    last_checkpoint_seconds: float = 60.0
    """How long the final checkpoint is retried while a disk is full or broken."""
    keeps_history: bool = True
    """Whether the shard writes its history into the folder of the run."""
    plan_changes: tuple[PlanChange, ...] = ()
    """Changes of plans that the job decides, in order of their clocks."""
    wave_changes: tuple[WaveChange, ...] = ()
    """Changes of N that the job decides, in order of their clocks."""
    member_changes: tuple[MemberChange, ...] = ()
    """Virtual workers that leave and come back as the job decides, in order of their clocks."""
    storage: str | None = None
    """URL of the object store for checkpoints; None: they are in the folder of the run."""
    freezing: Freezing | None = None
    """How layers freeze, for the clock shard; None: none do."""
    activations: tuple[Activation, ...] = ()
    """Which layers are inactive from when on, in order of their clocks; empty: all are active all the time."""


def shard_name(shard: ShardIndex) -> str:
    """A parameter server's name for messages."""
    return f"parameter server {shard}"
