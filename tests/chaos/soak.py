"""`python -m tests.chaos.soak`: half an hour of training with a fault a minute. Exit status 1 if anything is wrong.

Victims are the last virtual worker, its agent, the second shard, the coordinator and Redis. The others are there from
the beginning to the end: what they hold must not grow, the loss must go on falling, and the history must be right.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hetpipe.checker import check_run
from hetpipe.clock import SYSTEM_CLOCK
from tests.chaos import soak_job
from tests.chaos.cells import Cell, Deed, Provocation, all_cells
from tests.chaos.cluster import Cluster
from tests.chaos.nemesis import Nemesis, layout_for
from tests.chaos.outcome import Outcome
from tests.chaos.processes import Ledger
from tests.chaos.sequence import SURVIVE
from tests.chaos.trial import Trial
from tests.histories import whole_lines

#: Who is hit.
VICTIMS = frozenset({"stage-0", "stage-1", "shard-1", "agent-1", "coordinator", "redis", "coordinator+redis"})

#: Between two looks at what processes hold.
_LOOK_SECONDS = 5.0

#: The part of the time that processes may take to come to their size; in half an hour each victim is hit in it once.
_WARM_UP = 0.25

#: The loss is compared by parts of the time, each with so many waves at least.
_PARTS = 4
_LEAST_WAVES = 50


@dataclass(slots=True)
class Story:
    """What has happened."""

    outcomes: list[Outcome] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    quarters: list[float] = field(default_factory=list)
    """Median losses of the four parts of the time."""
    growth: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description="Training with a fault a minute.")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (%(default)s)")
    parser.add_argument("--every", type=float, default=60.0, metavar="S", help="seconds between faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which faults (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the run goes (default: a new folder)")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="hetpipe-soak-"))
    story = soak(folder, seconds=60.0 * options.minutes, every_seconds=options.every, seed=options.seed)
    _tell(story, folder, seed=options.seed)
    if options.json:
        sys.stdout.write(json.dumps(_to_json(story, seed=options.seed)) + "\n")
    return 1 if story.problems else 0


def soak(folder: Path, *, seconds: float, every_seconds: float, seed: int) -> Story:
    """Train for so long, with a fault every so often."""
    story, ledger = Story(), Ledger()
    arming = folder / "arming"
    arming.mkdir(parents=True)
    with Cluster(folder, layout_for(arming)) as cluster:
        trial = Trial(cluster, folder / "run", survive=SURVIVE, **soak_job.CHANGES)
        trial.wait_moving()
        began = SYSTEM_CLOCK.monotonic()
        with _watched(cluster, trial, ledger):
            _hit(Nemesis(cluster, trial, arming), story, until=began + seconds, every_seconds=every_seconds, seed=seed)
        ended = SYSTEM_CLOCK.monotonic()
        end = trial.stop()
        if end.state != "stopped":
            story.problems.append(f"the job {end.state}: {end.failure}")
    _judge_growth(story, ledger, began=began, ended=ended)
    story.losses = _losses(trial.run_dir)
    _judge_losses(story)
    story.problems += [f"{v.kind.value}: {v.message} ({v.where})" for v in check_run(trial.run_dir).violations[:20]]
    story.problems += [f"{o.case.name}: {o.sentence}" for o in story.outcomes if not o.survived]
    return story


def _hit(nemesis: Nemesis, story: Story, *, until: float, every_seconds: float, seed: int) -> None:
    for cell in itertools.cycle(_order(seed)):
        now = SYSTEM_CLOCK.monotonic()
        if now >= until:
            return
        due = min(until, now + every_seconds)
        story.outcomes.append(nemesis.play(cell))
        outcome = story.outcomes[-1]
        word = "survived" if outcome.survived else f"NOT SURVIVED ({outcome.sentence})"
        sys.stderr.write(f"  {word} {cell.name} ({outcome.seconds:.1f} s)\n")
        if not outcome.survived:
            return
        SYSTEM_CLOCK.sleep(max(0.0, due - SYSTEM_CLOCK.monotonic()))


def _order(seed: int) -> list[Cell]:
    """One fault of each victim, because some things happen the first time alone, then all others."""
    cells = [cell for cell in all_cells() if cell.victim in VICTIMS and _leaves_survivors(cell)]
    random.Random(seed).shuffle(cells)
    first = {cell.victim: cell for cell in cells}
    return [*first.values(), *(cell for cell in cells if cell not in first.values())]


def _leaves_survivors(cell: Cell) -> bool:
    """Whether this job can be brought there, and the first virtual worker lives on: with a disk, everybody goes."""
    return cell.provocation is not Provocation.WORKER_SLOWS and cell.deed is not Deed.LOSE_DISK


@contextmanager
def _watched(cluster: Cluster, trial: Trial, ledger: Ledger) -> Iterator[None]:
    """Look at what processes hold, from a thread."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_SECONDS):
            pids = {key: kept.life.pid for key, kept in cluster.kept.items()}
            pids |= {f"stage {stage} of vw {vw}": pid for (vw, stage), pid in trial.stage_pids().items()}
            ledger.look(pids, at=SYSTEM_CLOCK.monotonic())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _losses(run_dir: Path) -> list[float]:
    """Of every wave of the first virtual worker, which nobody hits."""
    lines = whole_lines(run_dir / "metrics" / "vw-0.jsonl")
    return [line["loss"] for line in lines if line["loss"] is not None]


def _judge_growth(story: Story, ledger: Ledger, *, began: float, ended: float) -> None:
    warm_up = _WARM_UP * (ended - began)
    grown = ledger.growth(born=began + warm_up / 2.0, since=began + warm_up, until=ended)
    if not grown:
        story.problems.append("no process lived from the end of the warm-up to the end")
    for name, figures in sorted(grown.items()):
        story.growth.append(f"{name}: {', '.join(map(str, figures))}")
        story.problems += [f"{name} has grown: {figure}" for figure in figures if not figure.is_flat]


def _judge_losses(story: Story) -> None:
    size = len(story.losses) // _PARTS
    if size < _LEAST_WAVES:
        story.problems.append(f"only {len(story.losses)} waves were made, too few to say whether the loss falls")
        return
    story.quarters = [statistics.median(story.losses[part * size : (part + 1) * size]) for part in range(_PARTS)]
    if story.quarters != sorted(story.quarters, reverse=True):
        story.problems.append(f"the loss does not go on falling: {_shown(story.quarters)}")


def _shown(losses: Sequence[float]) -> str:
    return " → ".join(f"{loss:.4f}" for loss in losses)


def _tell(story: Story, folder: Path, *, seed: int) -> None:
    survived = sum(outcome.survived for outcome in story.outcomes)
    lines = [f"{survived} of {len(story.outcomes)} faults survived, seed {seed}, the run is in {folder}"]
    if story.losses:
        lines.append(f"loss by quarters of {len(story.losses)} waves: {_shown(story.quarters)}")
    lines += [*story.growth, *(f"WRONG: {problem}" for problem in story.problems)]
    sys.stdout.write("\n".join([*lines, ""]))


def _to_json(story: Story, *, seed: int) -> dict[str, object]:
    return {
        "seed": seed,
        "faults": [outcome.case.name for outcome in story.outcomes],
        "survived": sum(outcome.survived for outcome in story.outcomes),
        "losses": story.quarters,
        "growth": story.growth,
        "problems": story.problems,
    }


if __name__ == "__main__":
    sys.exit(main())
