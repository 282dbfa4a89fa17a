"""`python -m tests.chaos.recovery`: how long what takes when somebody dies; medians, on a small cluster with TLS.

A stall is the longest time between two forwards of the first stage of a virtual worker that nobody hits, from the fault
until the cluster is whole again, less the usual time. `python -m benchmarks recovery-shard` measures a large shard.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetpipe.clock import SYSTEM_CLOCK
from tests.chaos import witness_job
from tests.chaos.cluster import COORDINATOR, LEASE_SECONDS, REDIS, Cluster, Layout
from tests.chaos.nemesis import LAST_WORKER, continued
from tests.chaos.sequence import SURVIVE
from tests.chaos.trial import Trial
from tests.chaos.watch import RECOVER_SECONDS, Watch
from tests.histories import whole_lines

#: Measurements of each.
ROUNDS = 5

#: How many waves before a fault say what is usual, and how far back they are looked for.
_USUAL_WAVES = 8
_USUAL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Scene:
    """A cluster with a job that is under way."""

    cluster: Cluster
    trial: Trial
    watch: Watch

    def forwards(self, *, since: float) -> list[float]:
        """When the first stage of the first virtual worker began forwards, in monotonic seconds."""
        return self._times("vw-0-stage-0.jsonl", "forward", since=since)

    def publishes(self, *, since: float) -> list[float]:
        """When clocks were published."""
        return self._times("shard-0.jsonl", "publish", since=since)

    def wait_whole(self) -> None:
        """Until everybody is there again."""
        self.watch.wait_whole("after the fault", RECOVER_SECONDS)
        self.trial.wait_moving()

    def _times(self, name: str, event: str, *, since: float) -> list[float]:
        wanted = f'"event":"{event}"'.encode()
        times = (line["t"] for line in whole_lines(self.trial.run_dir / "history" / name, wanted))
        return [t for t in times if t >= since]


def gaps(times: Sequence[float]) -> list[float]:
    """What lies between neighbours.

    >>> gaps([1.0, 1.5, 4.0])
    [0.5, 2.5]
    """
    return [after - before for before, after in itertools.pairwise(times)]


def stall(times: Sequence[float], hit: float) -> float:
    """The longest gap after `hit`, less the usual one before.

    >>> stall([0.0, 1.0, 2.0, 3.0, 7.5, 8.5], 3.25)
    3.5
    """
    usual = statistics.median(gaps([t for t in times if t < hit]))
    last = max(t for t in times if t < hit)
    return max(gaps([last, *(t for t in times if t >= hit)])) - usual


def worker_dies(scene: Scene) -> Mapping[str, float]:
    """A stage is killed."""
    hit = _hit(scene, [scene.trial.stage_pids()[LAST_WORKER, 0]], signal.SIGKILL)
    scene.wait_whole()
    return {"others stall, s": _stall_since(scene, hit), "whole again, s": SYSTEM_CLOCK.monotonic() - hit}


def node_falls_silent(scene: Scene) -> Mapping[str, float]:
    """A whole node says nothing any more: its agent and its stages are stopped for longer than the lease."""
    pids = [pid for (vw, _), pid in scene.trial.stage_pids().items() if vw == LAST_WORKER]
    pids.append(scene.cluster.kept["agent-1"].life.pid)
    with continued(pids):
        hit = _hit(scene, pids, signal.SIGSTOP)
        SYSTEM_CLOCK.sleep(LEASE_SECONDS + 2.0)
    scene.wait_whole()
    return {f"others stall, s (lease {LEASE_SECONDS:.0f} s)": _stall_since(scene, hit)}


def shard_dies(scene: Scene) -> Mapping[str, float]:
    """A small shard is killed."""
    since = SYSTEM_CLOCK.monotonic() - _USUAL_SECONDS
    scene.cluster.kept["shard-1"].kill()
    hit = SYSTEM_CLOCK.monotonic()
    scene.wait_whole()
    times = scene.publishes(since=since)
    usual = statistics.median(gaps([t for t in times if t < hit]))
    seconds = stall(times, hit)
    return {"clock stands, s": seconds, "in usual waves": seconds / usual}


def control_plane_is_wiped(scene: Scene) -> Mapping[str, float]:
    """Coordinator and Redis are killed, and Redis forgets everything; the new coordinator is told to end the job."""
    hit = SYSTEM_CLOCK.monotonic()
    scene.cluster.wipe_redis([COORDINATOR, REDIS])
    scene.watch.wait_whole("after the fault", RECOVER_SECONDS)
    status = SYSTEM_CLOCK.monotonic()
    scene.trial.ask_to_stop()
    obeyed = SYSTEM_CLOCK.monotonic()
    scene.trial.wait_ended(timeout_seconds=RECOVER_SECONDS)
    return {
        "all are up by the word of the new coordinator, s": status - hit,
        "it has taken an order, s": obeyed - hit,
        "training stalls, s": _stall_since(scene, hit),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is done to a job, and what that is like."""

    hit: Callable[[Scene], Mapping[str, float]]
    """Does it; returns its figures."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of every process."""


FAULTS: Mapping[str, Fault] = {
    "a stage is killed": Fault(hit=worker_dies),
    "a node falls silent": Fault(hit=node_falls_silent),
    "a small shard is killed": Fault(hit=shard_dies),
    "a small shard is killed, waves of a second": Fault(
        hit=shard_dies, environment={witness_job.PACE_VARIABLE: f"{1.0 / witness_job.MINIBATCHES_PER_WAVE}"}
    ),
    "coordinator and Redis are wiped": Fault(hit=control_plane_is_wiped),
}


def measure(folder: Path, fault: Fault, rounds: int) -> dict[str, list[float]]:
    """Every figure of `rounds` faults of one kind, in one job as long as it lasts.

    Raises:
        AssertionError: the job did not get over one.
    """
    found: dict[str, list[float]] = {}
    with Cluster(folder, Layout(environment=fault.environment)) as cluster:
        scene = _scene(cluster, folder / "run-0")
        for number in range(rounds):
            if scene.trial.has_ended():
                _judge(scene)
                scene = _scene(cluster, folder / f"run-{number}")
            scene.watch.wait_whole("before the fault", RECOVER_SECONDS)
            scene.trial.wait_moving(waves=_USUAL_WAVES)
            for name, value in fault.hit(scene).items():
                found.setdefault(name, []).append(value)
        if not scene.trial.has_ended():
            scene.trial.stop()
        _judge(scene)
    return found


def _scene(cluster: Cluster, run_dir: Path) -> Scene:
    trial = Trial(cluster, run_dir, survive=SURVIVE)
    trial.wait_moving()
    return Scene(cluster, trial, Watch(cluster, trial))


def _judge(scene: Scene) -> None:
    problems = scene.trial.verdict().problems
    assert not problems, f"the job is not right: {problems[0]}"


def _hit(scene: Scene, pids: Sequence[int], number: signal.Signals) -> float:
    """Signal them all; when, in monotonic seconds."""
    hit = SYSTEM_CLOCK.monotonic()
    for pid in pids:
        os.kill(pid, number)
    if number is signal.SIGKILL:
        scene.trial.wait(
            lambda: not any(pid in pids for pid in scene.trial.stage_pids().values()),
            timeout_seconds=RECOVER_SECONDS,
            what=f"end of {pids}",
        )
    return hit


def _stall_since(scene: Scene, hit: float) -> float:
    return stall(scene.forwards(since=hit - _USUAL_SECONDS), hit)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.recovery", description="How long recovery takes.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measurements of each (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)
    medians: dict[str, dict[str, float]] = {}
    failed = False
    for name, fault in FAULTS.items():
        folder = Path(tempfile.mkdtemp(prefix="hetpipe-recovery-"))
        try:
            found = measure(folder, fault, options.rounds)
        except AssertionError as error:
            failed = True
            sys.stdout.write(f"{name}: NOT SURVIVED: {error} (see {folder})\n")
            continue
        shutil.rmtree(folder)
        medians[name] = {figure: round(statistics.median(values), 3) for figure, values in found.items()}
        for figure, values in found.items():
            shown = ", ".join(f"{value:.2f}" for value in values)
            sys.stdout.write(f"{name}: {figure}: median {statistics.median(values):.2f} of {shown}\n")
        sys.stdout.flush()
    if options.json:
        sys.stdout.write(json.dumps(medians) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
