"""The weights of a minibatch that only the run had: a deterministic run again, in this process, from a checkpoint on.

The shards and stages are those of a run, on threads, joined by calls and links in memory, all on the CPU. When every
stage has begun the forward of the minibatch, its weights and buffers are kept, and everything ends. That it is the same
run is compared, not assumed: the samples and the losses of all waves before are those that the run has recorded.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.elastic.script import member_changes, script_of
from hetpipe.errors import UserError
from hetpipe.job.file import Job
from hetpipe.link.policy import Link
from hetpipe.observe.clock_curve import clock_shard_file
from hetpipe.observe.history import History, NullHistory
from hetpipe.observe.metrics import Metrics, NullMetrics, metrics_path
from hetpipe.observe.segments import read_lines
from hetpipe.pipeline.compute import Emulator
from hetpipe.pipeline.setup import StageParts
from hetpipe.runs.in_process import RunParts, links_of_stages, one_thread_per_operation, start_shards
from hetpipe.server.agent.stage_assembly import Wiring, assemble, load_user_code
from hetpipe.server.decisions_file import decisions_of_run
from hetpipe.server.shard.client import ShardClient
from hetpipe.server.shard.in_process import clock_calls, tensor_calls
from hetpipe.values.decisions import FreezeDecision, MemberDecision
from hetpipe.values.ids import Clock, Minibatch, StageIndex, VirtualWorkerIndex
from hetpipe.values.plan import Plan
from hetpipe.values.policies import POLICIES
from hetpipe.values.sync import DataSpec, Progress

#: Longest silence between two forwards of any stages, in seconds, before the repetition is given up.
SILENCE_SECONDS = 300.0


@dataclass(slots=True)
class Seen:
    """What a minibatch has computed with."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Name → parameter, trained or not, or buffer as it was before the forward."""
    clock: int = 0
    """W* of its weights."""
    frozen: int = 0
    """Leading layers of the chain that were frozen."""
    inactive: tuple[int, ...] = ()
    """Layers of the chain that were left out."""


@dataclass(frozen=True, slots=True)
class Start:
    """A barrier to start from."""

    plan: Plan
    """Of the run there."""
    data: DataSpec
    progress: Progress
    checkpoint: Path | None
    """None: the first weights."""


def why_not_again(run_dir: Path, job: Job) -> str:
    """Why a run does not compute the same when it is repeated in one process; empty: it does."""
    if job.sync.traits.averages_gradients:
        return "it averages gradients over replicas (sync: allreduce), and each update needs all of them"
    if job.has_shards and not job.sync.deterministic:
        return "time decided which weights it fetched; with sync.deterministic any minibatch can be replayed"
    if POLICIES[job.weights].predicts is not None:
        return f"under weights: {job.weights} forward and backward use different predictions"
    if job.freeze.recuts:
        return "its pipelines changed as layers froze (freeze.recut)"
    if member_changes(job) or any(isinstance(line, MemberDecision) for line in decisions_of_run(run_dir)):
        return "virtual workers have left or joined it"
    return ""


def weights_of(
    run_dir: Path,
    job: Job,
    import_path: Path,
    *,
    start: Start,
    vw: VirtualWorkerIndex,
    p: int,
    wave: int,
    scratch: Path,
) -> Seen:
    """Repeat a run until every stage of a virtual worker has begun minibatch `p`.

    Args:
        run_dir: its folder, or that of its newest rewind, with the records of its waves.
        job: the run's, of which `why_not_again` knows no reason.
        import_path: the first folder to import user code from.
        start: the barrier to start from.
        vw: virtual worker.
        p: minibatch, from 1.
        wave: its wave; those before it are compared.
        scratch: an empty folder for what the repetition writes.

    Raises:
        UserError: the repetition computes something else than the run, or comes to nothing.
    """
    decided = [line for line in decisions_of_run(run_dir) if not isinstance(line, FreezeDecision)]
    script = (*job.elastic.script, *script_of(decided))
    same = job.model_copy(update={"elastic": job.elastic.model_copy(update={"script": script})}) if decided else job
    again = _Again(same, import_path, start, wanted=(vw, p), scratch=scratch)
    seen = again.run()
    _compare(run_dir, scratch, len(start.plan.virtual_workers), wave)
    return seen


class _Again:
    """A run on threads. Use it once."""

    def __init__(
        self,
        job: Job,
        import_path: Path,
        start: Start,
        *,
        wanted: tuple[VirtualWorkerIndex, int],
        scratch: Path,
    ) -> None:
        self._job, self._start, self._scratch = job, start, scratch
        self._vw, self._p = wanted
        # Each stage builds the model: the file of the inspection is gone with the run.
        self._plan = plan = replace(start.plan, model_digest="")
        self._seen = Seen()
        #: Guards what follows; notified at each forward and when a stage ends.
        self._changed = threading.Condition()
        self._missing = set(range(len(plan.virtual_workers[self._vw].stages)))
        self._errors: list[Exception] = []
        self._forwards = 0
        self._running = 0
        #: Held while torch's generators are in use.
        self._guard = threading.RLock()
        self._links: list[Link] = []
        self._clients: list[ShardClient] = []
        self._history = History(clock_shard_file(scratch), host="", pid=0, role="parameter_server", term=plan.term)
        self._parts = RunParts(job, start.data, scratch, import_path)
        self._shards = self._parts.shards(plan, start.progress, lambda shard: NullHistory() if shard else self._history)

    def run(self) -> Seen:
        """What the minibatch computed with.

        Raises:
            UserError: the run ended before it, or nothing happened for too long.
            Exception: a stage failed.
        """
        with one_thread_per_operation():
            return self._run()

    def _run(self) -> Seen:
        start_shards(self._shards)
        threads = [thread for worker in self._plan.virtual_workers for thread in self._stages(worker.index)]
        self._running = len(threads)
        for thread in threads:
            thread.start()
        try:
            self._wait()
        finally:
            for link in self._links:
                link.close()
            for client in self._clients:
                client.close()
            for shard in self._shards:
                shard.stop()
            for thread in threads:
                thread.join(1.0)
            self._history.close()
        return self._seen

    def _wait(self) -> None:
        with self._changed:
            while self._missing:
                before = self._forwards, self._running
                if self._errors:
                    raise self._errors[0]
                if not self._running:
                    raise UserError(f"the repeated run ended before minibatch {self._p} of virtual worker {self._vw}")
                changed = self._changed.wait_for(
                    lambda: not self._missing or self._errors or (self._forwards, self._running) != before,  # noqa: B023 - used at once
                    timeout=SILENCE_SECONDS,
                )
                if not changed:
                    raise UserError(f"the repeated run computed nothing for {SILENCE_SECONDS:.0f} s, and was given up")

    def _stages(self, vw: VirtualWorkerIndex) -> Iterator[threading.Thread]:
        links = links_of_stages(vw, len(self._plan.virtual_workers[vw].stages))
        for stage, (upstream, downstream) in enumerate(links):
            self._links += [link for link in (upstream, downstream) if link is not None]
            body = partial(self._live, vw, StageIndex(stage), upstream, downstream)
            yield threading.Thread(target=body, name=f"replay-{vw}-{stage}", daemon=True)

    def _live(self, vw: VirtualWorkerIndex, stage: StageIndex, upstream: Link | None, downstream: Link | None) -> None:
        """A stage's thread."""
        torch.set_num_threads(1)
        is_last = stage == len(self._plan.virtual_workers[vw].stages) - 1
        config = self._parts.stage(self._plan, vw, stage, restore=self._start.checkpoint)
        wiring = Wiring(
            shards=[tensor_calls(shard) for shard in self._shards],
            clock_shard=clock_calls(self._shards[0]),
            upstream=upstream,
            downstream=downstream,
            history=NullHistory(),
            report=lambda _: None,
            guard=self._guard,
            emulator=Emulator(config.device, SYSTEM_CLOCK, seed=0),
            metrics=Metrics(metrics_path(self._scratch, vw)) if is_last else NullMetrics(),
            watch=partial(self._see, vw, stage),
        )
        try:
            with self._guard:
                code = load_user_code(self._job, config)
            runner, client = assemble(self._job, config, code, wiring)
            with self._changed:
                self._clients.append(client)
            runner.run()
        except Exception as error:  # noqa: BLE001 - raised again by the caller's thread
            with self._changed:
                self._errors.append(error)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _see(
        self,
        vw: VirtualWorkerIndex,
        stage: StageIndex,
        parts: StageParts,
        p: Minibatch,
        clock: Clock,
        weights: Mapping[str, Tensor],
    ) -> None:
        """Hear that a stage begins a forward; called on its thread."""
        with self._changed:
            self._forwards += 1
            if (vw, p) == (self._vw, self._p) and stage in self._missing:
                own = dict(weights)
                for layer in parts.layers:
                    own |= {name: layer.module.get_buffer(local) for local, name in layer.buffers.items()}
                    for names in (layer.frozen, layer.constant):
                        own |= {name: layer.module.get_parameter(local) for local, name in names.items()}
                self._seen.tensors |= {name: tensor.detach().clone() for name, tensor in own.items()}
                self._seen.clock, self._seen.frozen = clock, parts.frozen_layers
                self._seen.inactive = tuple(sorted(parts.inactive))
                self._missing.remove(stage)
            self._changed.notify_all()


def _compare(run_dir: Path, again: Path, num_workers: int, end: int) -> None:
    """Compare the waves of a repetition before wave `end` with those of the run.

    Raises:
        UserError: samples or losses differ.
    """
    other = (
        "so its weights are not those of the run: its code or data have changed since, or it lost a virtual worker, or "
        "trained on other devices than CPUs"
    )
    used = _by_wave(clock_shard_file(run_dir), "indices", "used")
    for (vw, wave), indices in _by_wave(clock_shard_file(again), "indices", "used").items():
        if wave < end and used.get((vw, wave), indices) != indices:
            raise UserError(f"repeated, the run uses other samples in wave {wave} of virtual worker {vw}, {other}")
    for vw in range(num_workers):
        losses = _by_wave(metrics_path(run_dir, vw), "loss", vw=vw)
        for (_, wave), loss in _by_wave(metrics_path(again, vw), "loss", vw=vw).items():
            if wave < end and losses.get((vw, wave), loss) != loss:
                raise UserError(
                    f"repeated, the run has the loss {loss!r} in wave {wave} of virtual worker {vw} instead of "
                    f"{losses[vw, wave]!r}, {other}"
                )


def _by_wave(path: Path, key: str, event: str = "", *, vw: int = 0) -> dict[tuple[int, int], object]:
    """(virtual worker, wave) → a value of its lines, the newest of each."""
    lines = (json.loads(line) for line in read_lines(path) if line.endswith(b"}\n"))
    return {(int(line.get("vw", vw)), line["wave"]): line[key] for line in lines if line.get("event", "") == event}
