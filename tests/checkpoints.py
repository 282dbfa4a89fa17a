"""Small complete checkpoints, written as shards, stages and the clock shard write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hetpipe.checkpoint.format import OptimizerState, save_slices
from hetpipe.checkpoint.layout import PartLabel, StoredSlice, shard_file, stage_file
from hetpipe.checkpoint.manifest import MANIFEST, VERSION, Manifest, checkpoint_dir, file_digest, manifest_bytes
from hetpipe.checkpoint.stage_part import PartWriter, StageContent
from hetpipe.values.ids import Clock, JobId, ShardIndex, StageIndex, VirtualWorkerIndex
from hetpipe.values.requests import CheckpointFile
from hetpipe.values.sync import Progress

JOB = JobId("job")


def progress_at(clock: int) -> Progress:
    return Progress(Clock(clock), epoch=1, used=b"\x05\xff", minibatches=7, samples=14)


def stage_part(
    run_dir: Path,
    clock: int,
    vw: int,
    stage: int,
    *,
    job_id: JobId = JOB,
    weights: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    optimizer: OptimizerState | None = None,
) -> CheckpointFile:
    """What a stage writes."""
    name = stage_file(VirtualWorkerIndex(vw), StageIndex(stage))
    writer = PartWriter(lambda at: checkpoint_dir(run_dir, at), job_id, name)
    state: OptimizerState = {f"{stage}.weight": {"momentum_buffer": torch.full((3,), float(vw)), "num_updates": clock}}
    content = StageContent(weights=weights or {}, buffers=buffers or {}, optimizer=optimizer or state)
    path = writer.write(Clock(clock), content, is_keeper=True)
    return file_digest(path)


def shard_part(
    run_dir: Path,
    clock: int,
    shard: int,
    *,
    job_id: JobId = JOB,
    num_elements: int = 3,
    num_shards: int = 2,
    dtype: torch.dtype = torch.float32,
) -> CheckpointFile:
    """What a shard writes: a whole parameter, and its row of another one that has one for each shard."""
    generator = torch.Generator().manual_seed(clock * 100 + shard)
    size = 2 * num_elements
    own, row = torch.rand(2, size, generator=generator).to(dtype)
    slices = [
        (StoredSlice(f"{shard}.weight", 0, size, (2, num_elements)), own),
        (StoredSlice("cut", shard * size, (shard + 1) * size, (num_shards, size)), row),
    ]
    label = PartLabel(job_id, Clock(clock), shard_file(ShardIndex(shard)))
    return file_digest(save_slices(checkpoint_dir(run_dir, Clock(clock)), label, slices))


def write_checkpoint(
    run_dir: Path,
    clock: int,
    *,
    stages: tuple[int, ...] = (2, 1),
    num_shards: int = 2,
    progress: Progress | None = None,
    num_elements: int = 3,
) -> Path:
    """A whole one, with so many stages of each virtual worker."""
    files = [
        shard_part(run_dir, clock, shard, num_elements=num_elements, num_shards=num_shards)
        for shard in range(num_shards)
    ]
    files += [stage_part(run_dir, clock, vw, stage) for vw, count in enumerate(stages) for stage in range(count)]
    num_stages = {VirtualWorkerIndex(vw): count for vw, count in enumerate(stages)}
    folder = checkpoint_dir(run_dir, Clock(clock))
    manifest = Manifest(VERSION, JOB, progress or progress_at(clock), num_stages, tuple(files), num_shards)
    (folder / MANIFEST).write_bytes(manifest_bytes(manifest))
    return folder
