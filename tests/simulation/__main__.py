"""`python -m tests.simulation`: many histories, or one again with a trace."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter

import pytest

from tests.simulation.bugs import BUGS, Bug
from tests.simulation.job import Job, draw
from tests.simulation.world import History, run


def main() -> int:
    """Run histories; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one, with a trace")
    parser.add_argument("--bug", choices=sorted(BUGS), help="with this bug in it; alone: the history that shows it")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--histories", type=int, default=10_000, help="how many")
    parser.add_argument("--processes", type=int, default=2, help="how many at a time")
    options = parser.parse_args()
    if options.bug is not None:
        return _with_bug(BUGS[options.bug], options.seed)
    if options.seed is not None:
        return _replay(options.seed, draw(options.seed))
    return _many(range(options.first, options.first + options.histories), options.processes)


def _replay(seed: int, job: Job) -> int:
    _say(job.describe())
    violation = run(seed, traces=True, job=job).violation
    _say(violation or "no promise is broken")
    return int(violation is not None)


def _with_bug(bug: Bug, seed: int | None) -> int:
    _say(bug.what)
    chosen = bug.seed if seed is None else seed
    with pytest.MonkeyPatch.context() as patch:
        bug.patch(patch)
        return _replay(chosen, bug.suits(draw(chosen)))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _many(seeds: range, processes: int) -> int:
    started = time.monotonic()
    faults: Counter[str] = Counter()
    failed: list[History] = []
    records = lives = 0
    with multiprocessing.Pool(processes) as pool:
        for history in pool.imap_unordered(run, seeds, chunksize=50):
            records += history.records
            lives += history.lives
            faults.update(set(history.faults))
            if history.violation is not None:
                failed.append(history)
    seconds = time.monotonic() - started
    _say(
        f"{len(seeds)} histories in {seconds:.0f} s: {records} records, {lives} lives of virtual workers, "
        f"{len(failed)} broke a promise"
    )
    _say("histories with: " + ", ".join(f"{name} {count}" for name, count in faults.most_common()))
    for history in sorted(failed, key=lambda h: h.seed)[:20]:
        _say(f"  python -m tests.simulation --seed {history.seed}: {history.violation}")
    return 1 if failed else 0


sys.exit(main())
