"""The command line that chaos and partitions share."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic

from hetpipe.clock import SYSTEM_CLOCK
from tests.chaos.outcome import Results
from tests.chaos.sequence import CASES_PER_JOB, CaseT, Runner, Scene


class Command(Generic[CaseT]):
    """Chooses cases, plays them, prints the table."""

    def __init__(self, module: str, description: str, cases: Sequence[CaseT], skipped: Mapping[str, str]) -> None:
        self._module = module
        self._cases = {case.name: case for case in cases}
        self._skipped = skipped
        self._parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
        self._add_options(self._parser)

    def run(self, scene: Scene[CaseT], arguments: Sequence[str] | None = None) -> int:
        """Play the cases that were asked for; the exit status."""
        options = self._parser.parse_args(arguments)
        cases = self._chosen(options)
        if options.list:
            self._list(cases)
            return 0
        folder = options.folder or Path(tempfile.mkdtemp(prefix="hetpipe-chaos-"))
        started = SYSTEM_CLOCK.monotonic()
        outcomes = Runner(scene, folder, _say, keeps_all=options.keep).run(cases, per_job=options.per_job)
        results = Results(
            outcomes=outcomes,
            skipped=self._skipped,
            seconds=SYSTEM_CLOCK.monotonic() - started,
            seed=options.seed,
            again=f"python -m {self._module} --cell",
        )
        sys.stdout.write("\n".join([*results.lines(), ""]))
        if options.json:
            sys.stdout.write(json.dumps(results.to_json()) + "\n")
        return 0 if results.ok else 1

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cell", action="append", metavar="NAME", help="play this one (default: all of them)")
        parser.add_argument("--row", action="append", metavar="ROW", help="play the cells of one row of the table")
        parser.add_argument("--seed", type=int, default=0, help="order of the cells (%(default)s)")
        parser.add_argument(
            "--per-job", type=int, default=CASES_PER_JOB, metavar="N", help="cells that one job takes (%(default)s)"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        parser.add_argument("--folder", type=Path, metavar="DIR", help="where runs go (default: a new folder)")
        parser.add_argument("--keep", action="store_true", help="keep the folders of jobs that went well, too")
        parser.add_argument("--list", action="store_true", help="print names, and what is skipped; play nothing")

    def _chosen(self, options: argparse.Namespace) -> list[CaseT]:
        if unknown := sorted(set(options.cell or ()) - self._cases.keys()):
            self._parser.error(f"there is no cell {unknown[0]}; --list names them all")
        if options.cell:
            return [self._cases[name] for name in options.cell]
        rows = options.row or [case.row for case in self._cases.values()]
        cases = [case for case in self._cases.values() if case.row in rows]
        if not cases:
            self._parser.error(f"there is no row {rows}; --list names all cells")
        random.Random(options.seed).shuffle(cases)
        return cases

    def _list(self, cases: Sequence[CaseT]) -> None:
        names = [case.name for case in cases]
        skipped = [f"skipped: {name}: {reason}" for name, reason in self._skipped.items()]
        counted = f"{len(names)} cells, {len(skipped)} skipped"
        sys.stdout.write("\n".join([*names, *skipped, counted, ""]))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
