"""`python -m tests.chaos.costs`: what it costs to be able to survive, in samples per second on the text job.

Every contender runs on a cluster of its own (real processes, mutual TLS), one after the other, again and again in
another order; a ratio is that of two neighbours of one round. What is compared:

    write-ahead log    all pushes and decisions logged, old files deleted / nothing kept on disk at all
    snapshots          as users have it, and a checkpoint every 50 waves / the log alone
    staged commit      D = 1 / D = 8

There is no transport that applies a push without staging it, so the cost of the staged commit is not switched off but
bounded: with D = 8 nobody waits for a commit, whatever one takes; and it is told how long one takes, from the last part
of a wave that is staged to the last shard that has added it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.job.file import load_job
from tests.chaos.cluster import ROOT, Cluster, Layout
from tests.chaos.keeper import cpu_seconds_of, owned
from tests.chaos.trial import Trial
from tests.histories import whole_lines

ROUNDS = 5

#: Waves before those that count, and those that count: less than an epoch together, whose end is a barrier.
_WARM_WAVES, _WAVES = 20, 150
_WAVES_SECONDS = 300.0

_NO_CHECKPOINTS: Mapping[str, Any] = {"keep": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to train the text job."""

    shard: tuple[str, ...] = ("hetpipe", "serve", "parameter-server")
    """Module that runs as parameter server, and what its options begin with."""
    checkpoint: Mapping[str, Any] = field(default_factory=lambda: _NO_CHECKPOINTS)
    staleness: int = 1


CONTENDERS: Mapping[str, Contender] = {
    "nothing kept": Contender(shard=("tests.chaos.measured_shard", "nothing")),
    "log alone": Contender(shard=("tests.chaos.measured_shard", "log")),
    "log and snapshots": Contender(checkpoint={**_NO_CHECKPOINTS, "every_waves": 50}),
    "D = 8": Contender(shard=("tests.chaos.measured_shard", "log"), staleness=8),
}

#: What costs → with it, without it.
RATIOS: Mapping[str, tuple[str, str]] = {
    "write-ahead log": ("log alone", "nothing kept"),
    "snapshots": ("log and snapshots", "log alone"),
    "staged commit: waiting for it": ("log alone", "D = 8"),
}


@dataclass(frozen=True, slots=True)
class Rate:
    """How one contender did in one round."""

    samples_per_second: float
    cpu_seconds: float
    """Of all processes of its cluster, per 1,000 samples."""
    shard_seconds: float
    """Of its parameter servers, per 1,000 samples."""
    commit_seconds: float
    """From a wave's last part that is staged to the last shard that has added it; median."""


def text_job(contender: Contender) -> dict[str, Any]:
    """`examples/text/job.yaml`, without evaluation and with no end in sight."""
    job = load_job(ROOT / "examples/text/job.yaml").model_dump(mode="json", exclude_unset=True)
    job["data"].pop("eval")
    sync = {**job["sync"], "D": contender.staleness}
    return {**job, "epochs": 100, "sync": sync, "checkpoint": dict(contender.checkpoint)}


def measure(rounds: int) -> Mapping[str, Sequence[Rate]]:
    """The rates of every contender, round by round."""
    found: defaultdict[str, list[Rate]] = defaultdict(list)
    with _clusters() as clusters:
        names = list(CONTENDERS)
        for number in range(rounds):
            for name in names if number % 2 else reversed(names):
                cluster = clusters[CONTENDERS[name].shard]
                found[name].append(_rate(cluster, CONTENDERS[name], f"{number}-{len(found[name])}-{names.index(name)}"))
    return found


@contextmanager
def _clusters() -> Iterator[Mapping[tuple[str, ...], Cluster]]:
    """A cluster for each way to keep state; whoever does not train costs next to nothing."""
    folder = Path(tempfile.mkdtemp(prefix="hetpipe-costs-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        clusters = {}
        for number, shard in enumerate(dict.fromkeys(contender.shard for contender in CONTENDERS.values())):
            allowed = {"agent": ("--allow-modules", "examples.*")}
            layout = Layout(options=allowed, programs={"shard": shard})
            clusters[shard] = stack.enter_context(Cluster(folder / str(number), layout))
        yield clusters


def _rate(cluster: Cluster, contender: Contender, name: str) -> Rate:
    trial = Trial(cluster, cluster.folder / f"run-{name}", **text_job(contender))
    try:
        trial.wait_moving(waves=_WARM_WAVES)
        first, began, before = trial.published(), SYSTEM_CLOCK.monotonic(), _cpu_seconds(cluster)
        trial.wait_moving(waves=_WAVES, timeout_seconds=_WAVES_SECONDS)
        last, seconds, after = trial.published(), SYSTEM_CLOCK.monotonic() - began, _cpu_seconds(cluster)
    finally:
        trial.abandon()
    samples = _samples(trial.run_dir, first, last)
    spent, of_shards = (1_000 * (used - was) / samples for was, used in zip(before, after, strict=True))
    return Rate(samples / seconds, spent, of_shards, statistics.median(_commits(trial.run_dir)))


def _cpu_seconds(cluster: Cluster) -> tuple[float, float]:
    """What all processes have used so far, and what the parameter servers have."""
    used = {pid: cpu_seconds_of(pid) for pid in owned(cluster.owner)}
    return sum(used.values()), sum(used[cluster.kept[shard].lives[-1].pid] for shard in cluster.layout.shards)


def _samples(run_dir: Path, first: int, last: int) -> int:
    """Committed by waves that `last` has, and `first` has not."""
    lines = _lines(run_dir, "shard-0.jsonl", "commit")
    return sum(line["samples"] for line in lines if first <= line["wave"] < last)


def _commits(run_dir: Path) -> list[float]:
    """How long each wave took, in seconds, from staged to added everywhere."""
    staged: dict[tuple[int, int], float] = {}
    added: dict[tuple[int, int], float] = {}
    for path in ("shard-0.jsonl", "shard-1.jsonl"):
        for times, event in ((staged, "staged"), (added, "apply")):
            for line in _lines(run_dir, path, event):
                if line["wave"] is not None:
                    key = (line["vw"], line["wave"])
                    times[key] = max(times.get(key, 0.0), line["t"])
    return [added[key] - staged[key] for key in added]


def _lines(run_dir: Path, name: str, event: str) -> Iterator[dict[str, Any]]:
    return whole_lines(run_dir / "history" / name, f'"event":"{event}"'.encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.costs", description="What surviving costs.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of all contenders (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)
    rates = measure(options.rounds)
    for name, found in rates.items():
        sys.stdout.write(
            f"{name}: {_spread([rate.samples_per_second for rate in found], 1)} samples/s; "
            f"{_spread([rate.cpu_seconds for rate in found], 2)} s of processor per 1,000, "
            f"{_spread([rate.shard_seconds for rate in found], 3)} of them in parameter servers; "
            f"{_spread([1e3 * rate.commit_seconds for rate in found], 1)} ms from staged to added\n"
        )
    medians: dict[str, float] = {}
    for name, (one, other) in RATIOS.items():
        pairs = list(zip(rates[one], rates[other], strict=True))
        shares = [with_it.samples_per_second / without.samples_per_second for with_it, without in pairs]
        medians[name] = round(statistics.median(shares), 4)
        work = [with_it.cpu_seconds / without.cpu_seconds for with_it, without in pairs]
        more = [(with_it.shard_seconds - without.shard_seconds) / without.cpu_seconds for with_it, without in pairs]
        sys.stdout.write(
            f"{name}: samples/s × {_spread(shares, 3)}; processor time × {_spread(work, 3)}, "
            f"in parameter servers {_spread([100 * share for share in more], 2)} % more of all\n"
        )
    if options.json:
        sys.stdout.write(json.dumps(medians) + "\n")
    return 0


def _spread(values: Sequence[float], digits: int) -> str:
    """`1.02 (0.98 to 1.10)`: the median, and between what it lies."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    sys.exit(main())
