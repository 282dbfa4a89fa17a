"""The parts of a move of layers that take time: planning, files, the clock shard. They run on the job's own thread.

`RUN_DIR/plans` holds the plan of every move that came into force, `vw-V-life-I.json`, I being the first life by it; one
that is on its way, or was when the coordinator died, is `proposed.json`. Nobody reads them but people: what counts is
the run document of the clock shard.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hetpipe import failpoints
from hetpipe.clock import Clock as TimeSource
from hetpipe.coordinator.exchange import Admit, NewPlan, Replan, Replanned, SettleReplan
from hetpipe.coordinator.replanning import gain, left_over, played, recut
from hetpipe.coordinator.shard_port import ShardPort
from hetpipe.errors import CheckpointError
from hetpipe.observe.log import get_logger
from hetpipe.spec.ids import Clock, Incarnation, JobId, VirtualWorkerIndex
from hetpipe.spec.plan import Plan
from hetpipe.spec.wire import to_json

_log = get_logger(__name__)

#: Seconds that a life waits for the checkpoint with its optimizer state; then an older one has to do.
CHECKPOINT_SECONDS = 20.0


class ReplanTasks:
    """Of one job. Not thread-safe."""

    def __init__(self, job_id: JobId, time: TimeSource) -> None:
        self._job_id = job_id
        self._time = time
        #: Until when the checkpoint of a life is waited for.
        self._until: dict[tuple[VirtualWorkerIndex, Incarnation], float] = {}

    def replan(self, task: Replan, run_dir: str) -> Replanned:
        """Plan anew; never raises: with any trouble the plan that is stays."""
        try:
            found = self._without(task) if task.gone else self._better(task)
            if found.plan is not None:
                failpoints.reach("repartition.plan_computed")
                workers = tuple(found.plan if vw.index == task.vw else vw for vw in task.plan.virtual_workers)
                _propose(run_dir, replace(task.plan, virtual_workers=workers))
                failpoints.reach("repartition.published")
        except Exception:  # noqa: BLE001 - whatever it is, the job goes on by the plan that it has
            _log.exception("not_replanned", job=self._job_id, vw=task.vw)
            return Replanned(task.vw, task.incarnation, None, None, None, ())
        return found

    def _better(self, task: Replan) -> Replanned:
        """By what was measured."""
        before = task.plan.virtual_workers[task.vw]
        found = recut(task.basis, before, task.seconds, task.healthy)
        if found is None or found.worker == before:
            return Replanned(task.vw, task.incarnation, None, None, None, ())
        share = gain(found, task.others, staleness=task.staleness)
        if share < task.least_gain:
            _log.info("replan_does_not_pay", job=self._job_id, vw=task.vw, gain=share, least=task.least_gain)
            return Replanned(task.vw, task.incarnation, None, None, share, ())
        emulations = played(task.basis, before, found.worker, task.emulations) if task.emulations else ()
        return Replanned(task.vw, task.incarnation, found.worker, found, share, emulations)

    def _without(self, task: Replan) -> Replanned:
        """On the devices that are left."""
        before = task.plan.virtual_workers[task.vw]
        found = left_over(task.basis, before, task.gone)
        emulations = () if found is None or not task.emulations else played(task.basis, before, found, task.emulations)
        return Replanned(task.vw, task.incarnation, found, None, None, emulations)

    def settle(self, task: SettleReplan, run_dir: str) -> None:
        """File the proposed plan, or forget it. Never raises: a file that is missing keeps nobody from training."""
        proposed = _folder(run_dir) / "proposed.json"
        try:
            if task.is_in_force:
                failpoints.reach("repartition.old_plan_not_cleaned")
                proposed.replace(proposed.with_name(f"vw-{task.vw}-life-{task.incarnation}.json"))
            else:
                proposed.unlink(missing_ok=True)
        except Exception:  # noqa: BLE001 - see above
            _log.exception("replan_not_settled", job=self._job_id, vw=task.vw)

    def await_checkpoint(self, task: Admit, new: NewPlan, newest: Clock | None) -> None:
        """Hold a life up that follows one which left with a checkpoint, until that is complete, but not for ever.

        Args:
            task: that is under way.
            new: by what the life is to compute.
            newest: clock of the newest complete checkpoint of the run; None before the first.

        Raises:
            CheckpointError: it is not complete yet; ask again.
        """
        now = self._time.monotonic()
        until = self._until.setdefault((task.vw, task.incarnation), now + CHECKPOINT_SECONDS)
        if new.left_at is not None and (newest or 0) < new.left_at and now < until:
            raise CheckpointError(f"the checkpoint of clock {new.left_at} is not complete yet; it is waited for")
        del self._until[task.vw, task.incarnation]

    def make_way(self, new: NewPlan, port: ShardPort) -> None:
        """Have the clock shard keep a new plan, before it is asked to admit the first life by it.

        Raises:
            HetpipeError: the clock shard could not be asked.
        """
        failpoints.reach("repartition.some_agents_drained")
        run = port.describe(self._job_id).run
        port.keep_run(self._job_id, new.plan.term, replace(run, plan=new.plan, emulations=new.emulations))
        failpoints.reach("repartition.layers_half_moved")


def _folder(run_dir: str) -> Path:
    return Path(run_dir) / "plans"


def _propose(run_dir: str, plan: Plan) -> None:
    """Write a plan down that is not in force yet."""
    folder = _folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "proposed.json.part"
    unfinished.write_text(to_json(Plan, plan) + "\n", encoding="utf-8")
    unfinished.replace(folder / "proposed.json")
