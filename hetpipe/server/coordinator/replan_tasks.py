"""Long operations of a repartition: planning, files, the clock shard. They run on the job's own thread.

`RUN_DIR/plans` holds the plan of every repartition with new processes that took effect, `vw-V-life-I.json`, where I is
the first incarnation on it; a pending one, or one pending when the coordinator died, is `proposed.json`. Plans of
virtual workers that join a running job are there, too. They are for people only: the run document of the clock shard is
authoritative. `RUN_DIR/decisions.jsonl` has the moves between running stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetpipe import failpoints
from hetpipe.decide.elastic.repartitions import replanned
from hetpipe.decide.lifecycle.configs import with_agents
from hetpipe.decide.lifecycle.exchange import (
    Admit,
    FileJudgement,
    FileStay,
    NewPlan,
    Replan,
    Replanned,
    SettleReplan,
)
from hetpipe.errors import CheckpointError
from hetpipe.observe.log import get_logger
from hetpipe.server.decisions_file import append_decision, append_decisions
from hetpipe.values.decisions import DecisionLine, DecisionMoment, MoveDecision, MoveJudgement, StayDecision
from hetpipe.values.ids import Clock, JobId
from hetpipe.values.plan import Plan
from hetpipe.values.wire import to_json
from hetpipe.wire.call import Calls
from hetpipe.wire.calls import DESCRIBE_RUN, KEEP_RUN, DescribeRunRequest, KeepRunRequest

_log = get_logger(__name__)


class ReplanTasks:
    """Repartitioning tasks of one job."""

    def __init__(self, job_id: JobId) -> None:
        self._job_id = job_id

    def replan(self, task: Replan, run_dir: str, *, wall: float) -> Replanned:
        """Compute a new plan; never raises: after any error the current plan stays."""
        try:
            found = replanned(task)
            if found.stay is not None:
                self.stay(FileStay(task.vw, task.clock, "straggler", found.stay), run_dir, wall=wall)
            if found.plan is not None:
                failpoints.reach("repartition.plan_computed")
            if found.plan is not None and found.recut is None:
                workers = tuple(found.plan if vw.index == task.vw else vw for vw in task.plan.virtual_workers)
                _write(run_dir, "proposed.json", replace(task.plan, virtual_workers=workers))
                failpoints.reach("replacement.published")
        except Exception:  # noqa: BLE001 - whatever it is, the job goes on by the plan that it has
            _log.exception("not_replanned", job=self._job_id, vw=task.vw)
            return Replanned(task.vw, task.incarnation, None, None, None, ())
        return found

    def settle(self, task: SettleReplan, run_dir: str) -> None:
        """Rename the proposed plan, or delete it. Never raises: a missing file is no reason to stop training."""
        proposed = _folder(run_dir) / "proposed.json"
        try:
            if task.is_in_force:
                failpoints.reach("replacement.not_settled")
                proposed.replace(proposed.with_name(f"vw-{task.vw}-life-{task.incarnation}.json"))
            else:
                proposed.unlink(missing_ok=True)
        except Exception:  # noqa: BLE001 - see above
            _log.exception("replan_not_settled", job=self._job_id, vw=task.vw)

    def judge(self, task: FileJudgement, run_dir: str, *, wall: float) -> None:
        """Add what a move has gained to the decisions of the run."""
        line = MoveJudgement("judge", task.vw, task.version, task.measured_gain, task.sentence, wall)
        append_decision(Path(run_dir), line)

    def stay(self, task: FileStay, run_dir: str, *, wall: float) -> None:
        """Add that layers stay where they are to the decisions of the run, unless its file has their move."""
        stay, vw, at = task.stay, task.vw, DecisionMoment(task.clock)
        line = StayDecision(
            at,
            "stay",
            vw,
            stay.stages,
            "operator" if task.by == "operator" else "straggler",
            stay.reason,
            stay.predicted_gain,
            wall,
        )

        def unless_moved(before: Sequence[DecisionLine]) -> Sequence[DecisionLine]:
            cuts = [each.stages for each in before if isinstance(each, MoveDecision) and each.vw == vw]
            return () if task.was_requested and cuts[-1:] == [stay.stages] else (line,)

        _log.info("layers_stay", job=self._job_id, vw=vw, reason=stay.reason)
        append_decisions(Path(run_dir), unless_moved)

    def make_way(self, task: Admit, new: NewPlan, port: Calls) -> None:
        """Store a new plan on the clock shard before it admits the first incarnation on it.

        Raises:
            HetpipeError: the clock shard is unreachable.
        """
        failpoints.reach("replacement.not_kept")
        run = port.invoke(DESCRIBE_RUN, DescribeRunRequest(self._job_id)).run
        if task.vw >= len(run.plan.virtual_workers):
            self._file(f"vw-{task.vw}-life-{task.incarnation}.json", new.plan, run.submission.run_dir)
        agents = with_agents(run.agents, new.agents)
        run = replace(run, plan=new.plan, agents=agents, emulations=new.emulations)
        port.invoke(KEEP_RUN, KeepRunRequest(self._job_id, new.plan.term, run))
        failpoints.reach("replacement.kept")

    def _file(self, name: str, plan: Plan, run_dir: str) -> None:
        """Write the plan of a joining virtual worker. Never raises: see `settle`."""
        try:
            _write(run_dir, name, plan)
        except OSError:
            _log.exception("plan_not_filed", job=self._job_id, file=name)


def await_checkpoint(new: NewPlan, newest: Clock | None, *, now: float) -> None:
    """Delay an incarnation until its predecessor's checkpoint is complete, up to a time limit.

    Args:
        new: the plan of the incarnation.
        newest: clock of the newest complete checkpoint of the run; None before the first.
        now: monotonic seconds.

    Raises:
        CheckpointError: it is not complete yet; retry.
    """
    if new.left_at is not None and (newest or 0) < new.left_at and now < new.awaited_until:
        raise CheckpointError(f"the checkpoint of clock {new.left_at} is not complete yet; it is waited for")


def _folder(run_dir: str) -> Path:
    return Path(run_dir) / "plans"


def _write(run_dir: str, name: str, plan: Plan) -> None:
    folder = _folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{name}.part"
    unfinished.write_text(to_json(Plan, plan) + "\n", encoding="utf-8")
    unfinished.replace(folder / name)
