"""`python -m tests.simulation`: many histories, or one again with a trace."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from functools import partial

import pytest

from tests.simulation.bugs import BUGS, Bug
from tests.simulation.history import History, play
from tests.simulation.setting import Draw, Setting, draw_short, draw_storm


def main() -> int:
    """Play histories; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one again, with a trace")
    parser.add_argument("--storm", action="store_true", help="storms instead of short histories")
    parser.add_argument("--bug", choices=sorted(BUGS), help="with this bug in it; alone: the history that shows it")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--histories", type=int, default=10_000, help="how many")
    parser.add_argument("--processes", type=int, default=2, help="how many at a time")
    options = parser.parse_args()
    draw = draw_storm if options.storm else draw_short
    if options.bug is not None:
        return _with_bug(BUGS[options.bug], options.seed, draw)
    if options.seed is not None:
        return _replay(draw(options.seed))
    return _many(range(options.first, options.first + options.histories), options.processes, draw)


def _replay(setting: Setting) -> int:
    _say(setting.describe())
    history = play(setting, traces=True)
    for line in history.story:
        _say(line)
    _say(history.violation or "no promise is broken")
    return int(history.violation is not None)


def _with_bug(bug: Bug, seed: int | None, draw: Draw) -> int:
    _say(bug.what)
    with pytest.MonkeyPatch.context() as patch:
        bug.patch(patch)
        return _replay(bug.suits(draw(bug.seed if seed is None else seed)))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _drawn(draw: Draw, seed: int) -> History:
    return play(draw(seed))


def _many(seeds: range, processes: int, draw: Draw) -> int:
    started = time.monotonic()
    faults: Counter[str] = Counter()
    failed: list[History] = []
    records = lives = terms = 0
    with multiprocessing.Pool(processes) as pool:
        for history in pool.imap_unordered(partial(_drawn, draw), seeds, chunksize=50):
            records += history.records
            lives += history.lives
            terms += history.terms
            faults.update(history.faults)
            if history.violation is not None:
                failed.append(history)
    seconds = time.monotonic() - started
    _say(
        f"{len(seeds)} histories in {seconds:.0f} s: {terms} terms, {records} records, {lives} lives of virtual "
        f"workers, {len(failed)} broke a promise"
    )
    _say("histories with: " + ", ".join(f"{name} {count}" for name, count in faults.most_common()))
    which = " --storm" if draw is draw_storm else ""
    for history in sorted(failed, key=lambda h: h.seed)[:20]:
        _say(f"  python -m tests.simulation{which} --seed {history.seed}: {history.violation}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
