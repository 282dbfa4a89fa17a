"""Long operations of a job: planning with a term from the store, files, calls to shards.

They run on the job's own thread, one after the other, and return a fact for its state machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from hetpipe import failpoints
from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.elastic.activation import with_activations
from hetpipe.decide.elastic.compressing import with_freeze_plans
from hetpipe.decide.elastic.freezing import freezing_of, kept_statistics, lowered, with_freeze_levels
from hetpipe.decide.elastic.replanning import with_activation_cuts
from hetpipe.decide.elastic.script import check_script
from hetpipe.decide.lifecycle.configs import (
    check_progress,
    data_of,
    fresh_progress,
    homes_of,
    run_document,
    shard_configs,
)
from hetpipe.decide.lifecycle.exchange import (
    Admit,
    AdmitAcknowledged,
    Drain,
    DrainAcknowledged,
    DrainedPersisted,
    Evict,
    EvictAcknowledged,
    FetchClocks,
    FileJudgement,
    FileStay,
    FinalClocks,
    Input,
    MoveAnswered,
    MoveLayers,
    PersistDrained,
    Prepare,
    Prepared,
    Release,
    Replan,
    RequestBarrier,
    Rewind,
    SettleReplan,
    ShardCallFailed,
    Task,
    TaskFailed,
)
from hetpipe.decide.lifecycle.known_cluster import PlanningInputs
from hetpipe.decide.lifecycle.planning import PLANNER, Planner, check_script_memory, plan_run, with_forecast
from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.sync.division import unused
from hetpipe.decide.sync.segment import STOP
from hetpipe.errors import (
    CheckpointError,
    HetpipeError,
    JobError,
    StaleIncarnation,
    StoreUnavailable,
    Unavailable,
    UserError,
)
from hetpipe.job.file import Job
from hetpipe.observe.log import get_logger
from hetpipe.roots import Roots
from hetpipe.server.coordinator.replan_tasks import ReplanTasks, await_checkpoint
from hetpipe.storage.store import Store
from hetpipe.values import document
from hetpipe.values.bounds import MAX_COUNT
from hetpipe.values.events import Submission
from hetpipe.values.identity import StagePeer
from hetpipe.values.ids import JobId, Term
from hetpipe.values.members import MemberInfo
from hetpipe.values.memory import check_patterns
from hetpipe.values.plan import Plan
from hetpipe.values.rewinds import next_rewind, rewind_folder, run_folders
from hetpipe.values.run import AgentInfo, ClockSnapshot
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.storage_url import place_of_run
from hetpipe.values.sync import Progress
from hetpipe.values.wire import to_json
from hetpipe.wire import calls
from hetpipe.wire.call import Calls
from hetpipe.wire.calls import (
    AdmitRequest,
    DescribeRunRequest,
    DrainRequest,
    EvictRequest,
    GetShardClocksRequest,
    KeepRunRequest,
    MoveRequest,
    ReleaseRequest,
    RequestBarrierRequest,
)

T = TypeVar("T")
WorkerTask = TypeVar("WorkerTask", Evict, Admit, Drain)

_log = get_logger(__name__)

#: Tries to get a term from a store that is away, and seconds between them.
_TERM_TRIES = 10
_TERM_PAUSE_SECONDS = 1.0

#: Begins a cluster file whose links no user has stated.
_LINKS_NOT_STATED = """\
# The devices that the agents offered.
# {links}
# Correct it and name this file as cluster.file, and runs are planned by it.
"""


#: A stage's certificate: from the request as PEM and the stage's identity, the certificate as PEM.
Certify = Callable[[bytes, StagePeer], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """External dependencies of tasks."""

    open_shard: Callable[[MemberInfo], Calls]
    """A shard, which with TLS must prove its index."""
    read_progress: Callable[[str], Progress]
    """How far a checkpoint is, by its folder or URL. Raises `CheckpointError`."""
    newest_checkpoint: Callable[[str], str | None]
    """The newest complete checkpoint of the run in a folder or at a URL, all of it checked; None when it has none."""
    listed_checkpoint: Callable[[str], str | None]
    """The same by the manifest alone, which is quick: for lives that check what they read of it."""
    planner: Planner = PLANNER
    """The planner of jobs without a plan of their own."""
    certify: Certify | None = None
    """Makes a stage's certificate of its request; None without TLS. Raises `UserError`."""
    roots: Roots = field(default_factory=Roots)
    """Below which folder jobs may have their runs."""


class JobTasks:
    """Tasks of one job."""

    def __init__(
        self,
        job_id: JobId,
        job: Job,
        submission: Submission,
        *,
        submitted_wall: float,
        store: Store,
        tools: Tools,
        clock: TimeSource,
    ) -> None:
        self._job_id = job_id
        self._job = job
        self._submission = submission
        self._submitted_wall = submitted_wall
        self._store = store
        self._tools = tools
        self._clock = clock
        self._replans = ReplanTasks(job_id)

    def run(self, task: Task) -> Input | None:  # noqa: C901, PLR0911, PLR0912 - one case per kind of task
        """Execute a task; return its fact for the machine. Never raises."""
        match task:
            case Prepare() | Rewind():
                return self._answered("prepare", lambda: self._prepared(task))
            case RequestBarrier():
                return self._answered("barrier", lambda: self._request_barrier(task))
            case Evict():
                return self._call_shard(task, self._evict)
            case Admit():
                return self._call_shard(task, self._admit)
            case Drain():
                return self._call_shard(task, self._drain)
            case PersistDrained():
                return self._keep_out(task)
            case Replan():
                return self._replans.replan(task, self._submission.run_dir, wall=self._clock.wall())
            case SettleReplan():
                self._replans.settle(task, self._submission.run_dir)
                return None
            case MoveLayers():
                return self._move(task)
            case FileJudgement():
                self._replans.judge(task, self._submission.run_dir, wall=self._clock.wall())
                return None
            case FileStay():
                self._replans.stay(task, self._submission.run_dir, wall=self._clock.wall())
                return None
            case FetchClocks():
                return FinalClocks(self._last_clocks(task))
            case Release(shards=shards):
                for shard in shards:
                    self._tried(shard, lambda port: port.invoke(calls.RELEASE, ReleaseRequest(self._job_id)))
                return None

    def _answered(self, task: Literal["prepare", "barrier"], function: Callable[[], Input | None]) -> Input | None:
        try:
            return function()
        except HetpipeError as error:
            problems = error.problems if isinstance(error, JobError) else ()
            return TaskFailed(task, type(error).__name__, str(error), problems)
        except Exception as error:  # noqa: BLE001 - whatever it is, the job must hear of it
            _log.exception("task_failed", task=task, job=self._job_id)
            sentence = f"the coordinator failed to {task} job {self._job_id} (internal error, see its log)"
            return TaskFailed(task, type(error).__name__, sentence)

    def _prepared(self, task: Prepare | Rewind) -> Prepared:
        return self._rewind(task) if isinstance(task, Rewind) else self._prepare(task)

    def _prepare(self, task: Prepare) -> Prepared:
        model, first = task.inspected.model, Path(self._submission.first_run_dir)
        if model.proof is not None:
            _log.info("model_proven", job=self._job_id, proof=model.proof.sentence)
        submission = self._gone_back(self._next_rewind(first)) if task.goes_back else None
        start = self._start((submission or self._submission).restore, model.train_samples)
        written = _written_terms(first) if task.goes_back else ()
        above = max(task.above, *written, *(shard.highest_term for shard in task.shards))
        term = self._next_term(above=above)
        run = plan_run(
            self._job,
            task.inspected,
            task.agents,
            self._tools.planner,
            term=term,
            job_id=self._job_id,
            now=self._clock.wall(),
        )
        names = [layer.name for layer in model.layers]
        costs = None if run.described is None else Costs(run.described.profile, run.described.cluster)
        run = replace(run, plan=with_freeze_levels(run.plan, run.job, model.layers, start))
        run = with_freeze_plans(run, task.agents)
        run = replace(run, plan=with_activations(run.plan, run.job, model.layers, start))
        run = with_activation_cuts(run, task.agents)
        data = replace(data_of(run.job, model), homes=homes_of(run.job, run.plan))
        check_script(run.job, run.plan, data, start, names, costs)
        check_script_memory(run, start)
        check_patterns(run.job.memory, names)
        freezing = freezing_of(run.job, run.plan)
        if freezing is not None:
            for sentence in lowered(freezing):
                _log.warning("fewer_layers_frozen", job=self._job_id, reason=sentence)
            if kept := kept_statistics(freezing, run.job, model.layers):
                _log.warning("frozen_statistics", job=self._job_id, reason=kept)
        prepared = Prepared(run, data, start, submission)
        self._configure(prepared, task.agents, task.shards, model.eval_samples)
        if submission is not None:
            self._log_rewind(prepared)
        return prepared

    def _gone_back(self, number: int) -> Submission:
        """Prepare a rewound job: from its newest checkpoint or from its beginning, in the folder of that rewind."""
        first = self._submission.first_run_dir
        restore = self._tools.newest_checkpoint(self._place(first)) or self._submission.restore
        return replace(self._submission, restore=restore, run_dir=rewind_folder(first, number), rewinds=number)

    def _place(self, run_dir: str) -> str:
        """The location of the checkpoints of a run's folder."""
        return place_of_run(run_dir, self._job.storage)

    def _next_rewind(self, first: Path) -> int:
        """The number of the next rewind: neither a folder here nor an object has that or a higher one."""
        number = next_rewind(first)
        if self._job.storage is None:
            return number
        # Imported only with an object store, as it is slow.
        from hetpipe.checkpoint.locations import stored_rewinds

        try:
            return max(number, stored_rewinds(self._place(str(first))) + 1)
        except OSError as error:
            raise CheckpointError(f"storage: {error}") from error

    def _log_rewind(self, prepared: Prepared) -> None:
        restore = None if prepared.submission is None else prepared.submission.restore
        clock, term = prepared.start.clock, prepared.plan.term
        _log.warning("job_rewound", job=self._job_id, checkpoint=restore, clock=clock, term=term)

    def _rewind(self, task: Rewind) -> Prepared:
        before, submission = task.before, self._gone_back(task.number)
        start = self._start(submission.restore, before.data.num_samples)
        term = self._next_term(above=Term(max(before.plan.term, *(shard.highest_term for shard in task.shards))))
        run = replace(before.run, plan=replace(before.plan, term=term))
        prepared = Prepared(run, before.data, start, submission)
        self._configure(prepared, task.agents, task.shards, task.eval_samples)
        self._log_rewind(prepared)
        return prepared

    def _start(self, folder: str | None, num_samples: int) -> Progress:
        if folder is None:
            return fresh_progress(num_samples)
        self._tools.roots.check_run(self._submission.run_dir, folder)
        progress = self._tools.read_progress(folder)
        check_progress(progress, folder=folder, num_samples=num_samples)
        return progress

    def _configure(
        self,
        prepared: Prepared,
        agents: tuple[AgentInfo, ...],
        shards: tuple[MemberInfo, ...],
        eval_samples: int | None,
    ) -> None:
        """Write the plan, and configure every shard."""
        run, submission = prepared.run, prepared.submission or self._submission
        self._tools.roots.check_run(submission.run_dir, submission.restore, self._job.storage)
        texts = write_run_files(submission, prepared, eval_samples)
        if self._job.storage is not None and not submission.rewinds:
            self._claim(run.job, texts)
        assignment = run.assignment(submission, agents, shards)
        kept = run_document(
            assignment,
            prepared.data,
            prepared.start,
            eval_samples=eval_samples,
            submitted_wall=self._submitted_wall,
            proof=run.proof,
        )
        # The clock shard comes first: the others follow its log as soon as they are configured.
        for shard, config in zip(shards, shard_configs(run.job, kept), strict=True):
            self._with_shard(shard, partial(_configure, config))

    def _claim(self, job: Job, texts: Mapping[str, str]) -> None:
        """Write the run's documents into the object store, which therefore can be used before anyone trains."""
        # Imported only with an object store, as it is slow.
        from hetpipe.checkpoint.stored_run import claim_run

        documents = {"job.json": json.dumps(job.model_dump(mode="json")), "facts.json": texts["facts.json"]}
        claim_run(self._place(self._submission.run_dir), self._job_id, documents)

    def _next_term(self, *, above: Term) -> Term:
        for _ in range(_TERM_TRIES - 1):
            try:
                return self._store.next_term(above=above)
            except StoreUnavailable as error:
                _log.warning("no_term_yet", job=self._job_id, reason=str(error))
                self._clock.sleep(_TERM_PAUSE_SECONDS)
        return self._store.next_term(above=above)

    def _request_barrier(self, task: RequestBarrier) -> None:
        request = RequestBarrierRequest(self._job_id, task.term, STOP)
        barrier = self._with_shard(task.clock_shard, lambda port: port.invoke(calls.REQUEST_BARRIER, request)).clock
        _log.info("job_stops_at_barrier", job=self._job_id, clock=barrier)

    def _call_shard(self, task: WorkerTask, call: Callable[[WorkerTask], Input]) -> Input:
        try:
            return call(task)
        except HetpipeError as error:
            _log.warning("clock_shard_not_asked", job=self._job_id, vw=task.vw, reason=str(error))
            return ShardCallFailed(task.vw, task.incarnation, type(error).__name__, str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the virtual worker must not be forgotten
            _log.exception("clock_shard_not_asked", job=self._job_id, vw=task.vw)
            sentence = "internal error of the coordinator, see its log"
            return ShardCallFailed(task.vw, task.incarnation, type(error).__name__, sentence)

    def _evict(self, task: Evict) -> EvictAcknowledged:
        failpoints.reach("membership.evict_decided_not_published")
        try:
            request = EvictRequest(self._job_id, task.term, task.vw, task.incarnation)
            self._with_shard(task.clock_shard, lambda port: port.invoke(calls.EVICT, request))
        except StaleIncarnation as error:
            # Without the clock shard a configuration has no effect.
            _log.info("nothing_to_evict", job=self._job_id, reason=str(error))
        return EvictAcknowledged(task.vw, task.incarnation)

    def _admit(self, task: Admit) -> AdmitAcknowledged:
        folder, new = self._tools.listed_checkpoint(self._place(self._submission.run_dir)), task.replan
        if new is not None:
            newest = None if folder is None or new.left_at is None else self._tools.read_progress(folder).clock
            await_checkpoint(new, newest, now=self._clock.monotonic())
            self._with_shard(task.clock_shard, lambda port: self._replans.make_way(task, new, port))
        request = AdmitRequest(
            self._job_id,
            task.term,
            task.vw,
            task.incarnation,
            task.num_stages,
            task.minibatches_per_wave,
            task.bounds,
        )
        self._with_shard(task.clock_shard, lambda port: port.invoke(calls.ADMIT, request))
        if new is not None:
            failpoints.reach("replacement.admitted")
        return AdmitAcknowledged(task.vw, task.incarnation, folder)

    def _drain(self, task: Drain) -> DrainAcknowledged:
        request = DrainRequest(self._job_id, task.term, task.vw, task.incarnation)
        self._with_shard(task.clock_shard, lambda port: port.invoke(calls.DRAIN, request))
        return DrainAcknowledged(task.vw, task.incarnation)

    def _keep_out(self, task: PersistDrained) -> DrainedPersisted:
        def keep(port: Calls) -> None:
            run = port.invoke(calls.DESCRIBE_RUN, DescribeRunRequest(self._job_id)).run
            port.invoke(calls.KEEP_RUN, KeepRunRequest(self._job_id, task.term, replace(run, out=task.out)))

        try:
            self._with_shard(task.clock_shard, keep)
        except Exception as error:  # noqa: BLE001 - whatever it is, the clock shard is told again
            _log.warning("not_kept_who_is_out", job=self._job_id, reason=str(error))
            return DrainedPersisted(task.out, is_kept=False)
        return DrainedPersisted(task.out, is_kept=True)

    def _move(self, task: MoveLayers) -> MoveAnswered:
        request = MoveRequest(self._job_id, task.term, task.vw, task.move)
        outcome: Literal["accepted", "refused", "unreachable"] = "accepted"
        try:
            self._with_shard(task.clock_shard, lambda port: port.invoke(calls.MOVE, request))
        except Unavailable as error:
            outcome = "unreachable"
            _log.warning("move_not_requested", job=self._job_id, vw=task.vw, reason=str(error))
        except HetpipeError as error:
            outcome = "refused"
            _log.info("move_refused", job=self._job_id, vw=task.vw, reason=str(error))
        except Exception:  # noqa: BLE001 - whatever it is, the job goes on by the plan that it has
            outcome = "refused"
            _log.exception("move_refused", job=self._job_id, vw=task.vw)
        failpoints.reach("repartition.requested")
        return MoveAnswered(task.vw, task.move.incarnation, outcome)

    def _last_clocks(self, task: FetchClocks) -> ClockSnapshot | None:
        request = GetShardClocksRequest(self._job_id)
        if not task.shards:
            return None
        return self._tried(task.shards[0], lambda port: port.invoke(calls.GET_SHARD_CLOCKS, request))

    def _tried(self, shard: MemberInfo, use: Callable[[Calls], T]) -> T | None:
        """Result of `use`, or None on failure: an unreachable shard must not keep a job from ending."""
        try:
            return self._with_shard(shard, use)
        except HetpipeError as error:
            _log.info("shard_not_wrapped_up", job=self._job_id, shard=str(shard), reason=str(error))
        except Exception:  # noqa: BLE001 - whatever it is, the job must end
            _log.exception("shard_not_wrapped_up", job=self._job_id, shard=str(shard))
        return None

    def _with_shard(self, shard: MemberInfo, use: Callable[[Calls], T]) -> T:
        port = self._tools.open_shard(shard)
        try:
            return use(port)
        finally:
            port.close()


def _written_terms(run_dir: Path) -> Iterator[Term]:
    """Terms of the plans in the folders of a run, unknown to a new store."""
    for folder in run_folders(run_dir):
        try:
            term = json.loads((folder / "plan.json").read_bytes())["term"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            _log.info("no_term_written", folder=str(folder), reason=str(error))
        else:
            if isinstance(term, int) and 0 <= term < MAX_COUNT:
                yield Term(term)


def _configure(config: ShardConfig, port: Calls) -> None:
    port.invoke(calls.CONFIGURE, config)


def write_run_files(submission: Submission, prepared: Prepared, eval_samples: int | None) -> dict[str, str]:
    """Write `plan.json` and `facts.json` into the current folder of the run, with the inputs of the plan.

    Returns what was written, by file name.

    A job planned here replaces `job.json`; the prediction is in `forecast.json`. The inputs of planning, or of an
    emulation, are in `profile.json` and `cluster.yaml`. The folder of a rewind has its own `job.json`.

    Raises:
        UserError: the folder cannot be written to.
        PlanError: the plan cannot be simulated.
    """
    run, start, num_samples = prepared.run, prepared.start, prepared.data.num_samples
    foreseen = with_forecast(run, prepared.data, start)
    remaining = set(unused(start.used, num_samples))
    facts = {
        "num_samples": num_samples,
        "eval_samples": eval_samples,
        "start": {
            "clock": start.clock,
            "epoch": start.epoch,
            "used": [index for index in range(num_samples) if index not in remaining],
            "minibatches": start.minibatches,
            "samples": start.samples,
            "waves": {vw: [numbers.minibatches_per_wave, numbers.origin] for vw, numbers in start.waves.items()},
            "frozen": start.frozen,
            "lineup": start.lineup,
            "inactive": list(start.inactive),
            "fresh": list(start.fresh),
        },
        "homes": list(prepared.data.homes),
        "layers": [] if run.model is None else [layer.name for layer in run.model.layers],
    }
    folder = Path(submission.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"plan.json": to_json(Plan, run.plan), "facts.json": json.dumps(facts)}
        if run.document is not None or submission.rewinds:
            texts["job.json"] = json.dumps(run.job.model_dump(mode="json"))
        if foreseen is not None:
            texts["forecast.json"] = json.dumps(foreseen.model_dump(mode="json"))
        if run.described is not None:
            texts["profile.json"] = document.to_json(run.described.profile)
            texts["cluster.yaml"] = _cluster_text(run.described)
        for name, text in texts.items():
            unfinished = folder / f"{name}.part"
            unfinished.write_text(text + "\n", encoding="utf-8")
            unfinished.replace(folder / name)
    except OSError as error:
        raise UserError(f"the coordinator cannot write to the run's folder {folder}: {error.strerror}") from error
    return texts


def _cluster_text(described: PlanningInputs) -> str:
    text = document.to_yaml(described.cluster)
    if described.known.sources == ("stated",):
        return text
    return _LINKS_NOT_STATED.format(links=described.known.sentence) + text
