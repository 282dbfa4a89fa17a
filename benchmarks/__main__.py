"""`make bench`: every figure of docs/benchmarks.md, measured side by side in one run."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import typer

from benchmarks import (
    allocation,
    link,
    pipeline,
    planner,
    policies,
    prediction,
    protocol,
    recovery_shard,
    simulator,
    wire,
)
from benchmarks.sizes import SMOKE, is_smoke, sized
from hetpipe.clock import SYSTEM_CLOCK

ROUNDS = sized(5, 1)


def _say(title: str, figures: Mapping[str, Any] | Sequence[Any]) -> None:
    sys.stdout.write(f"\n{title}\n{json.dumps(figures, indent=1, ensure_ascii=False)}\n")
    sys.stdout.flush()


def _pipeline() -> None:
    rates = pipeline.measure(ROUNDS)
    _say("(a) pipeline runtime, samples per second", {n: round(statistics.median(r), 2) for n, r in rates.items()})
    _say("    ratios (of each round, then the median)", pipeline.ratios(rates))


def _wire() -> None:
    one, four = wire.measure(ROUNDS, 1), wire.measure(ROUNDS, 4)
    for streams, found in ((1, one), (4, four)):
        speeds = {name: round(wire.TOTAL_BYTES / statistics.median(s) / 1e9, 2) for name, s in found.items()}
        _say(f"(b) 256 MiB to and from one shard, {streams} stream(s), GB/s", speeds)
        _say("    relative to one raw socket", wire.ratios(found, one))
        _say(f"    relative to {streams} raw socket(s)", wire.ratios(found, found))


def _protocol() -> None:
    runs = [protocol.measure() for _ in range(ROUNDS)]
    fractions = ("of ideal", "plain loops, of ideal", "of plain loops")
    title = "(c) protocol overhead, 4 virtual workers × 4 stages of 50 ms"
    _say(f"{title}, each run", {name: [run[name] for run in runs] for name in fractions})
    _say("    medians", {name: statistics.median(run[name] for run in runs) for name in fractions})
    _say("(d) peak resident MiB per process, largest of its role", runs[-1]["peak resident MiB"])


def _simulator() -> None:
    title = f"simulator, {simulator.NUM_STAGES} stages × {simulator.NUM_WAVES} waves, twice the job each time"
    _say(title, simulator.measure())


def _allocation() -> None:
    for name, profile in allocation.profiles().items():
        _say(f"(f) `auto`, {name}, four times the cluster each time", allocation.measure(profile))


def _planner() -> None:
    for title, figures in planner.measure(ROUNDS):
        _say(title, figures)


def _prediction() -> None:
    for case in prediction.CASES:
        _say(f"predicted and measured, {case.name}", prediction.figures(prediction.measure(case)))


def _policies() -> None:
    rates = policies.measure(ROUNDS)
    _say("(i) weight policies, samples per second", rates.table())
    _say("    ratios (of each round, then the median)", rates.ratios())
    _say("    seconds of forward and backward per minibatch, stage by stage", rates.stage_seconds)
    _say("    memory, stage by stage", policies.memory())


def _link() -> None:
    rates = link.measure(ROUNDS)
    _say("(j) frames between two stages, GB/s", link.table(rates))
    _say("    relative to one raw socket", link.ratios(rates))
    _say("    the demo, samples per second", link.demo(ROUNDS))


def _recovery_shard() -> None:
    found = recovery_shard.measure(ROUNDS)
    _say("a shard of 256 MiB, seconds", {name: round(seconds, 3) for name, seconds in found.items()})


PARTS = {
    "pipeline": _pipeline,
    "wire": _wire,
    "protocol": _protocol,
    "simulator": _simulator,
    "allocation": _allocation,
    "planner": _planner,
    "prediction": _prediction,
    "policies": _policies,
    "link": _link,
    "recovery-shard": _recovery_shard,
}


def main(
    parts: Annotated[list[str] | None, typer.Argument(help=f"Any of {', '.join(PARTS)}; all without one.")] = None,
    *,
    smoke: Annotated[bool, typer.Option("--smoke", help="Only see that it works: seconds, and no figures.")] = False,
) -> None:
    """Measure every figure of docs/benchmarks.md, or some parts, and print medians and ratios."""
    if smoke and not is_smoke():
        # Anew, so that every module of this process and of those that it starts has the sizes of a smoke run.
        os.environ[SMOKE] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *(parts or ())])  # noqa: S606 - itself
    unknown = sorted(set(parts or ()) - set(PARTS))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(PARTS)}")
    sys.stdout.write(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, medians of {ROUNDS}\n")
    for name in parts or PARTS:
        started = SYSTEM_CLOCK.monotonic()
        PARTS[name]()
        sys.stderr.write(f"{name}: {SYSTEM_CLOCK.monotonic() - started:.1f} s\n")


if __name__ == "__main__":
    typer.run(main)
