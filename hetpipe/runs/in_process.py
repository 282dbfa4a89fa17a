"""A run whose shards and stages are threads of one process: the code of processes, joined by wires in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hetpipe.decide.lifecycle.configs import Assignment, run_document, shard_configs
from hetpipe.job.file import Job
from hetpipe.link.in_process import in_process_pair
from hetpipe.link.policy import Link
from hetpipe.observe.history import HistoryWriter
from hetpipe.server.shard.in_process import clock_calls
from hetpipe.server.shard.job_shard import JobShard
from hetpipe.values.events import Submission
from hetpipe.values.ids import Incarnation, ShardIndex, StageIndex, VirtualWorkerIndex
from hetpipe.values.members import MemberId, MemberInfo, MemberRole
from hetpipe.values.plan import Plan
from hetpipe.values.run import DeviceConfig, StageConfig
from hetpipe.values.sync import DataSpec, Progress

#: Stands for host and members, of which a run in one process has none.
_HERE = "in-process"


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Let torch use one thread per operation, as stage processes do, in threads that begin meanwhile too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class RunParts:
    """Makes the shards and the configurations of the stages of a run."""

    job: Job
    data: DataSpec
    run_dir: Path
    """Where checkpoints are written, whatever `storage` of the job says."""
    import_path: Path
    """The first folder to import user code from."""

    def shards(self, plan: Plan, start: Progress, history: Callable[[ShardIndex], HistoryWriter]) -> list[JobShard]:
        """The shards, in index order; `start_shards` starts them. The first one is the clock shard.

        Args:
            plan: of the run.
            start: progress at the start of the run.
            history: makes the history of a shard.
        """
        members = tuple(
            MemberInfo(MemberRole.PARAMETER_SERVER, MemberId(f"{_HERE}-{index}"), "", 0)
            for index in range(plan.num_shards)
        )
        submission = Submission(_HERE, "", str(self.run_dir), str(self.import_path), None)
        assignment = Assignment(job=self.job, submission=submission, plan=plan, agents=(), shards=members)
        document = run_document(assignment, self.data, start, eval_samples=None, submitted_wall=0.0)
        configs = [replace(config, storage=None, run=None) for config in shard_configs(self.job, document)]
        return [JobShard(config, history(config.shard)) for config in configs]

    def stage(
        self,
        plan: Plan,
        vw: VirtualWorkerIndex,
        stage: StageIndex,
        *,
        restore: Path | None,
        incarnation: Incarnation = Incarnation(0),  # noqa: B008 - a number
        device: str = "cpu",
    ) -> StageConfig:
        """The configuration of a stage.

        Args:
            plan: of the run.
            vw, stage, incarnation: identify the stage.
            restore: a checkpoint to start from; None: the first weights.
            device: torch's name of its device.
        """
        return StageConfig(
            job=self.job.model_dump(mode="json"),
            plan=plan,
            vw=vw,
            stage=stage,
            incarnation=incarnation,
            device=DeviceConfig(device),
            shard_addresses=(),
            run_dir=str(self.run_dir),
            import_path=str(self.import_path),
            host=_HERE,
            restore=None if restore is None else str(restore),
            homes=self.data.homes,
        )


def start_shards(shards: Sequence[JobShard]) -> None:
    """Start the shards of a run: all but the first follow its decision log."""
    for shard in shards:
        shard.start(None if shard is shards[0] else clock_calls(shards[0]))


def links_of_stages(vw: VirtualWorkerIndex, count: int) -> list[tuple[Link | None, Link | None]]:
    """The links of each of the `count` stages of a virtual worker: to the stage before it, and to the one behind it."""
    pairs = [in_process_pair(f"stage {index} of {vw}", f"stage {index + 1} of {vw}") for index in range(count - 1)]
    upstream = [None, *(following for _, following in pairs)]
    return list(zip(upstream, [*(preceding for preceding, _ in pairs), None], strict=True))
