"""A whole run inside one process: real shards, real stage runners on threads, links and transports without sockets.

The code that computes, orders and synchronises is the one that runs in processes; only the wires differ. Random delays
in stages and shards can be injected, to show that timing changes nothing.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import patch

import torch

from hetpipe.checkpoint.manifest import newest_listed, read_manifest
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.elastic.activation import with_activations
from hetpipe.decide.elastic.caching import CacheFolders, allowed_bytes
from hetpipe.decide.elastic.compressing import with_freeze_plans
from hetpipe.decide.elastic.freezing import with_freeze_levels
from hetpipe.decide.elastic.replanning import with_activation_cuts
from hetpipe.decide.elastic.script import check_script
from hetpipe.decide.lifecycle.configs import homes_of
from hetpipe.decide.lifecycle.planning import PlannedRun
from hetpipe.decide.planner.partition import plan_job
from hetpipe.decide.schedule.policy import Kind
from hetpipe.decide.sync.segment import DRAIN, first_progress
from hetpipe.job.file import Job
from hetpipe.link.policy import Link
from hetpipe.observe.history import History, HistoryWriter, NullHistory, in_detail
from hetpipe.observe.metrics import Metrics, MetricsWriter, NullMetrics, metrics_path
from hetpipe.pipeline import model_file
from hetpipe.pipeline.compute import Emulator
from hetpipe.pipeline.runner import StageRunner
from hetpipe.pipeline.setup import Replicas
from hetpipe.runs.in_process import RunParts, links_of_stages, start_shards
from hetpipe.server.agent.stage_assembly import Wiring, assemble, load_user_code
from hetpipe.server.shard.client import ShardClient
from hetpipe.server.shard.clock_shard import ClockShard
from hetpipe.server.shard.in_process import clock_calls, tensor_calls
from hetpipe.values import wire
from hetpipe.values.ids import (
    AgentId,
    Clock,
    DeviceId,
    Incarnation,
    JobId,
    LayerIndex,
    ShardIndex,
    StageIndex,
    Term,
    VirtualWorkerIndex,
)
from hetpipe.values.memory import check_patterns
from hetpipe.values.plan import ModelReport, Plan, StagePlan, VirtualWorkerPlan
from hetpipe.values.requests import PullHeader, PushHeader, PushReply
from hetpipe.values.run import (
    AgentDevice,
    AgentInfo,
    ClockSnapshot,
    DeviceConfig,
    StageConfig,
    StageEvaluation,
    StageReport,
)
from hetpipe.values.sync import PlanMove
from hetpipe.wire.call import Calls, Chunk
from hetpipe.wire.calls import PULL, PUSH
from tests.support.inspection import inspect_job, inspect_once
from tests.support.lives import Death, Life, MortalCalls, MortalHistory
from tests.support.method_calls import MethodCalls
from tests.support.replicas import InProcessReplicas, ReplicaMeeting

#: How often a delay happens: few long ones mix threads up as well as many short ones, which take more of a core.
_SHARE = 0.25


def _sleep_sometimes(draws: random.Random, longest_seconds: float) -> None:
    """Sleep a random time up to `longest_seconds`, in one of four calls on average."""
    seconds = draws.random() * longest_seconds
    if draws.random() < _SHARE and seconds:
        SYSTEM_CLOCK.sleep(seconds)


class RandomDelays(Emulator):
    """Sleeps a random time, seeded, up to `longest_seconds` after some of the computations."""

    def __init__(self, seed: int, longest_seconds: float) -> None:
        super().__init__(DeviceConfig("cpu"), SYSTEM_CLOCK, seed=seed)
        self._longest_seconds = longest_seconds

    def stretch(self, kind: Kind, started: float, *, skipped: range = range(0)) -> None:
        """Sleep."""
        del kind, started, skipped
        _sleep_sometimes(self._random, self._longest_seconds)


class DelayedShard(MethodCalls):
    """A shard that answers late sometimes, by a random, seeded time."""

    def __init__(self, shard: Calls, seed: int, longest_seconds: float) -> None:
        self._shard = shard
        self._random = random.Random(seed)
        self._longest_seconds = longest_seconds

    def push(self, header: PushHeader, chunks: Iterable[Chunk]) -> PushReply:
        self._delay()
        return self._shard.upload(PUSH, header, chunks)

    def pull(self, header: PullHeader) -> Iterator[Chunk]:
        self._delay()
        return self._shard.download(PULL, header)

    def close(self) -> None:
        """See `Calls.close`."""
        self._shard.close()

    def _delay(self) -> None:
        _sleep_sometimes(self._random, self._longest_seconds)


@dataclass(frozen=True, slots=True)
class InProcessRun:
    """What to run and how."""

    job: Job
    run_dir: Path
    import_path: Path
    restore: Path | None = None
    delay_seconds: float = 0.0
    """Longest random delay of a computation, a push or a pull."""
    delay_seed: int = 0
    keep_history: bool = True
    writes_metrics: bool = False
    stall_seconds: float = 60.0
    stop_when: Callable[[ClockSnapshot], bool] | None = None
    """Asks for a stop barrier as soon as this holds, before anything else can be decided."""
    deaths: tuple[Death, ...] = ()
    """Each at most once. Who dies is evicted at once, and comes back in a new life unless the death says otherwise; who
    is drained comes back when all its stages have left."""
    device: str = "cpu"
    """Of all stages."""
    nodes: int = 1
    """With equally many devices each."""
    replans: Mapping[int, VirtualWorkerPlan] = field(default_factory=dict)
    """Virtual worker → the plan of its later lives, where that is not the one of its first."""
    shares_inspection: bool = False
    """Whether the model is inspected once for all runs of it (`inspect_once`)."""
    coordinate: Callable[[VirtualWorkerIndex, StageIndex, StageReport], tuple[VirtualWorkerIndex, PlanMove] | None] = (
        lambda *_: None
    )
    """Hears what each stage reports, on its thread, and may answer whose layers move at the next barrier, and where."""


@dataclass(slots=True)
class InProcessResult:
    """How it went."""

    plan: Plan
    reports: list[tuple[VirtualWorkerIndex, StageIndex, StageReport]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    snapshot: ClockSnapshot | None = None
    peak_buffers: dict[tuple[VirtualWorkerIndex, StageIndex], int] = field(default_factory=dict)
    """Weight buffers that a stage had on its device, at most at once."""
    peak_buffers_at_rest: dict[tuple[VirtualWorkerIndex, StageIndex], int] = field(default_factory=dict)
    """The same between two actions, by the account of the version store."""
    ended: list[tuple[VirtualWorkerIndex, Incarnation, StageIndex, Exception]] = field(default_factory=list)
    """What the stages of lives that ended early ended with."""
    num_lives: int = 0


def run_in_process(run: InProcessRun) -> InProcessResult:
    """Run a job to its end. Raises the first error of a stage."""
    cluster = _Cluster(run)
    result = cluster.run()
    if result.errors:
        raise result.errors[0]
    return result


def _stopping(stop_when: Callable[[ClockSnapshot], bool]) -> Callable[..., None]:
    """`ClockShard.acknowledge`, after which clocks are published, with a stop barrier once `stop_when` holds."""
    acknowledge = ClockShard.acknowledge

    def and_stop(
        own: ClockShard, shard: ShardIndex, num_records: int, durable: int | None = None, *, applied: bool = False
    ) -> None:
        with own.condition:
            acknowledge(own, shard, num_records, durable, applied=applied)
            if stop_when(own.snapshot()):
                own.request_barrier("stop")

    return and_stop


def _cache_folders(job: Job, run_dir: Path, agent: AgentId) -> CacheFolders:
    """What an agent gives to its stages."""
    folders = CacheFolders(run_dir / "cache" / agent, run_dir / "cache-on-disk" / agent, allowed_bytes(job))
    for folder in (folders.memory, folders.disk):
        folder.mkdir(parents=True, exist_ok=True)
    return folders


class _Cluster:
    def __init__(self, run: InProcessRun) -> None:
        self._run = run
        run.run_dir.mkdir(parents=True, exist_ok=True)
        inspect = inspect_once if run.shares_inspection else inspect_job
        report = inspect(run.job, run.import_path, run_folder=run.run_dir)
        count = run.job.num_devices
        agents = [
            AgentInfo(
                AgentId(f"n{node}"),
                "127.0.0.1",
                0,
                tuple(AgentDevice(f"n{node}/{i}", "cpu", 1 << 34, run.device) for i in range(count // run.nodes)),
            )
            for node in range(run.nodes)
        ]
        self.plan = plan_job(run.job, report, agents, Term(1), JobId(run.job.name))
        self._guard = threading.RLock()
        self._caches = {agent.agent: _cache_folders(run.job, run.run_dir, agent.agent) for agent in agents}
        self._threads: list[threading.Thread] = []
        self._histories: list[History] = []
        data = run.job.data_spec(report.train_samples)
        self._progress = first_progress(data) if run.restore is None else read_manifest(run.restore).progress
        names = [layer.name for layer in report.layers]
        check_script(run.job, self.plan, data, self._progress, names)
        check_patterns(run.job.memory, names)
        self.plan = with_freeze_levels(self.plan, run.job, report.layers, self._progress)
        self.plan = with_activations(self.plan, run.job, report.layers, self._progress)
        self.plan = with_freeze_plans(PlannedRun(run.job, self.plan, model=report), agents).plan
        self.plan = with_activation_cuts(PlannedRun(run.job, self.plan, model=report), agents).plan
        data = run.job.data_spec(report.train_samples, homes_of(run.job, self.plan))
        self.result = InProcessResult(self.plan)
        if run.keep_history:
            self._write_facts(report)
        self._parts = RunParts(run.job, data, run.run_dir, run.import_path)
        self._shards = self._parts.shards(
            self.plan, self._progress, lambda index: self._history(f"shard-{index}", "parameter_server")
        )
        self._clock = clock_calls(self._shards[0])
        self._meetings: dict[tuple[StageIndex, Clock], ReplicaMeeting] = {}
        self._begun: list[Life] = []
        #: The newest of each virtual worker.
        self._lives: dict[VirtualWorkerIndex, Life] = {}
        #: Lives that are over, with their death; and, without one, lives of which a stage has ended.
        self._ended: SimpleQueue[tuple[Life, Death | None]] = SimpleQueue()
        #: Who was asked to leave and is to come back.
        self._leaving: list[Life] = []

    def run(self) -> InProcessResult:
        # Of one process for all stages no stage has memory to give back, and looking for garbage takes long.
        with patch.object(model_file, "_give_back_memory"):
            return self._run_until_stopped()

    def _run_until_stopped(self) -> InProcessResult:
        if self._run.stop_when is None:
            return self._run_to_the_end()
        with patch.object(ClockShard, "acknowledge", _stopping(self._run.stop_when)):
            return self._run_to_the_end()

    def _run_to_the_end(self) -> InProcessResult:
        start_shards(self._shards)
        for vw in self.plan.virtual_workers:
            self._begin(vw.index, Incarnation(0))
        for life in self._lives.values():
            for thread in life.threads:
                thread.start()
        self._await_stages()
        for thread in self._threads:
            thread.join(0.1 if self.result.errors else None)
        self.result.snapshot = self._shards[0].clock_shard.snapshot()
        for shard in self._shards:
            shard.stop()
        if not any(thread.is_alive() for thread in self._threads):
            for history in self._histories:  # select() takes no file descriptor above 1023
                history.close()
        return self.result

    def _await_stages(self) -> None:
        """Return when no stage is left, or with the first error; no wait of a stage is longer than `stall_seconds`."""
        while any(life.num_running for life in self._begun) and not self.result.errors:
            life, death = self._ended.get()
            if death is None:
                life.num_running -= 1
                self._replace_leaver(life)
            else:
                self._replace(life, death)

    # -- lives -------------------------------------------------------------------------------------------------------

    def _begin(self, vw: VirtualWorkerIndex, incarnation: Incarnation) -> Life:
        """A new life, whose threads have yet to start."""
        life = Life(vw, incarnation, self._run.deaths, self._end)
        life.threads.extend(self._worker(life))
        life.num_running = len(life.threads)
        self._lives[vw] = life
        self._begun.append(life)
        self._threads.extend(life.threads)
        self.result.num_lives += 1
        return life

    def _end(self, life: Life, death: Death) -> None:
        """A death happens, or a request to leave, on the thread of a stage."""
        if death.how == "moved":
            move = PlanMove(life.incarnation, (0, *accumulate(death.stages)), "operator", "a test asked for it")
            self._shards[0].clock_shard.move(life.vw, move)
            return
        if death.how == "enlarged":
            self._enlarge(death.stages)
            return
        others = (self._lives[VirtualWorkerIndex(vw)] for vw in death.also)
        if death.how == "drained":
            for each in (life, *(other for other in others if other.drain())):
                self._shards[0].clock_shard.drain(each.vw, each.incarnation)
                if death.comes_back:
                    self._leaving.append(each)
            return
        for each in (life, *(other for other in others if other.end())):
            if death.how == "killed":
                each.kill()
            self._ended.put((each, death))

    def _enlarge(self, counts: Sequence[int]) -> None:
        """What a coordinator does when an operator adds a virtual worker, on devices of its own."""
        vw, ends = VirtualWorkerIndex(len(self.plan.virtual_workers)), [0, *accumulate(counts)]
        stages = tuple(
            StagePlan(AgentId("n0"), DeviceId(f"n0/{vw}-{stage}"), LayerIndex(first), LayerIndex(last))
            for stage, (first, last) in enumerate(pairwise(ends))
        )
        new = VirtualWorkerPlan(vw, stages)
        self.plan = self.result.plan = replace(self.plan, virtual_workers=(*self.plan.virtual_workers, new))
        self._shards[0].clock_shard.admit(vw, Incarnation(1), len(stages), bounds=new.bounds)
        for thread in self._begin(vw, Incarnation(1)).threads:
            thread.start()

    def _stays_dropped(self, vw: VirtualWorkerIndex) -> bool:
        """Whether the script has dropped a virtual worker that it does not add again."""
        return self._run.job.elastic.stays_dropped(vw) or bool(self.plan.freeze_lineups)

    def _replace_leaver(self, life: Life) -> None:
        """What a coordinator does when all stages of a life that was to leave have ended."""
        if life in self._leaving and not life.num_running:
            self._leaving.remove(life)
            if life.has_left and not life.is_over:
                self._come_back(life)

    def _replace(self, life: Life, death: Death) -> None:
        """What a coordinator does when a life is over."""
        with self._shards[0].clock_shard.condition:  # no decision in between: a run may depend on its deaths alone
            self._shards[0].clock_shard.evict(life.vw, life.incarnation)
            if death.comes_back:
                self._come_back(life)

    def _come_back(self, life: Life) -> None:
        following = Incarnation(life.incarnation + 1)
        workers = tuple(
            self._run.replans.get(vw.index, vw) if vw.index == life.vw else vw for vw in self.plan.virtual_workers
        )
        self.plan = replace(self.plan, virtual_workers=workers)
        next_plan = self.plan.virtual_workers[life.vw]
        self._shards[0].clock_shard.admit(life.vw, following, len(next_plan.stages), bounds=next_plan.bounds)
        for thread in self._begin(life.vw, following).threads:
            thread.start()

    def _restored(self, incarnation: Incarnation) -> Path | None:
        """The checkpoint that a life starts from."""
        newest = newest_listed(self._run.run_dir) if incarnation > 0 else None
        return newest or self._run.restore

    # -- parts -------------------------------------------------------------------------------------------------------

    def _write_facts(self, report: ModelReport) -> None:
        import json

        run_dir, progress = self._run.run_dir, self._progress
        (run_dir / "job.json").write_text(self._run.job.model_dump_json())
        (run_dir / "plan.json").write_text(wire.to_json(Plan, self.plan))
        used = [i for i in range(report.train_samples) if progress.used[i >> 3] >> (i & 7) & 1]
        start = {
            "clock": progress.clock,
            "epoch": progress.epoch,
            "used": used,
            "minibatches": progress.minibatches,
            "waves": {vw: [one.minibatches_per_wave, one.origin] for vw, one in progress.waves.items()},
            "frozen": progress.frozen,
            "lineup": progress.lineup,
            "inactive": list(progress.inactive),
            "fresh": list(progress.fresh),
        }
        facts = {
            "num_samples": report.train_samples,
            "eval_samples": report.eval_samples,
            "start": start,
            "layers": [layer.name for layer in report.layers],
        }
        (run_dir / "facts.json").write_text(json.dumps(facts))

    def _history(self, name: str, role: str) -> HistoryWriter:
        if not self._run.keep_history or self._run.job.history == "off":
            return NullHistory()
        history = History(self._run.run_dir / "history" / f"{name}.jsonl", host="test", pid=0, role=role, term=1)
        self._histories.append(history)
        return history

    def _replicas(self, vw: VirtualWorkerIndex, stage: StageIndex) -> Replicas | None:
        if self._run.job.sync.kind != "allreduce":
            return None
        return InProcessReplicas(partial(self._meet, stage), vw, self._run.stall_seconds)

    def _meet(self, stage: StageIndex, start: Clock, members: Sequence[VirtualWorkerIndex]) -> ReplicaMeeting:
        with self._guard:
            return self._meetings.setdefault((stage, start), ReplicaMeeting(len(members)))

    def _worker(self, life: Life) -> Iterator[threading.Thread]:
        restored = self._restored(life.incarnation)
        links = links_of_stages(life.vw, len(self.plan.virtual_workers[life.vw].stages))
        for stage, (upstream, downstream) in enumerate(links):
            life.links += [link for link in (upstream, downstream) if link is not None]
            yield self._stage(life, StageIndex(stage), upstream, downstream, restored)

    def _stage(
        self, life: Life, stage: StageIndex, upstream: Link | None, downstream: Link | None, restored: Path | None
    ) -> threading.Thread:
        run, vw = self._run, life.vw
        config = self._config(life, stage, restored)
        seed = hash((run.delay_seed, vw, stage))
        shards: list[Calls] = [
            MortalCalls(DelayedShard(tensor_calls(shard), seed + i, run.delay_seconds), life, stage)
            for i, shard in enumerate(self._shards)
        ]
        wiring = Wiring(
            shards=shards,
            clock_shard=MortalCalls(self._clock, life, stage),
            upstream=upstream,
            downstream=downstream,
            history=in_detail(
                MortalHistory(self._history(f"vw-{vw}-stage-{stage}", "stage"), life, stage), run.job.history
            ),
            report=partial(self._hear, life, stage),
            guard=self._guard,
            replicas=self._replicas(vw, stage),
            cache=self._caches[self.plan.stage(vw, stage).agent],
            emulator=RandomDelays(seed, run.delay_seconds),
            metrics=self._metrics(vw, stage),
            stall_seconds=run.stall_seconds,
        )
        with self._guard:
            code = load_user_code(run.job, config)
        own = [link for link in (upstream, downstream) if link is not None]
        body = partial(self._live, life, stage, own, partial(assemble, run.job, config, code, wiring))
        return threading.Thread(target=body, name=f"vw-{vw}-stage-{stage}", daemon=True)

    def _config(self, life: Life, stage: StageIndex, restored: Path | None) -> StageConfig:
        device, incarnation = self._run.device, life.incarnation
        return self._parts.stage(self.plan, life.vw, stage, restore=restored, incarnation=incarnation, device=device)

    def _metrics(self, vw: VirtualWorkerIndex, stage: StageIndex) -> MetricsWriter:
        is_last = stage == len(self.plan.virtual_workers[vw].stages) - 1
        return Metrics(metrics_path(self._run.run_dir, vw)) if self._run.writes_metrics and is_last else NullMetrics()

    def _hear(self, life: Life, stage: StageIndex, report: StageReport) -> None:
        if isinstance(report, StageEvaluation):
            life.reach("before evaluation", report.clock, stage)
        self.result.reports.append((life.vw, stage, report))
        if (asked := self._run.coordinate(life.vw, stage, report)) is not None:
            self._shards[0].clock_shard.move(*asked)

    def _live(
        self, life: Life, stage: StageIndex, own: Sequence[Link], begin: Callable[[], tuple[StageRunner, ShardClient]]
    ) -> None:
        """A stage's thread; `own` are its links."""
        torch.set_num_threads(
            1
        )  # of this thread, as in a stage process: its first convolution would still have them all
        client: ShardClient | None = None
        try:
            runner, client = begin()
            done = runner.run()
            life.has_left = done.reason == DRAIN
            if life.has_left and stage == 0 and not life.is_drained and not self._stays_dropped(life.vw):
                self._leaving.append(life)
            self.result.reports.append((life.vw, stage, done))
            self.result.peak_buffers[life.vw, stage] = runner.peak_buffers
            self.result.peak_buffers_at_rest[life.vw, stage] = runner.peak_buffers_at_rest
        except Exception as error:  # noqa: BLE001 - raised again by the caller's thread
            if life.is_over:
                self.result.ended.append((life.vw, life.incarnation, stage, error))
            else:
                self.result.errors.append(error)
        finally:
            if client is not None:
                client.close()
            for link in own if life.is_over else ():
                link.close()
            self._ended.put((life, None))
