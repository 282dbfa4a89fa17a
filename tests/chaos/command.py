"""The command line that chaos and partitions share."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Generic

from hetpipe.clock import SYSTEM_CLOCK
from tests.chaos.diary import Diary
from tests.chaos.outcome import CaseT, Results
from tests.chaos.sequence import CASES_PER_JOB, Runner, Scene


class Command(Generic[CaseT]):
    """Chooses cases, plays them, prints the table."""

    def __init__(
        self,
        module: str,
        description: str,
        cases: Sequence[CaseT],
        skipped: Mapping[str, str],
        *,
        lanes: int = 1,
        per_job: int = CASES_PER_JOB,
    ) -> None:
        """Prepare.

        Args:
            module: what `python -m` runs.
            description: for its help.
            cases: all there are.
            skipped: name of what is not played → why.
            lanes: jobs at once, unless the command line says otherwise.
            per_job: most cases of one job, unless it does.
        """
        self._module = module
        self._cases = {case.name: case for case in cases}
        self._skipped = skipped
        self._parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
        self._add_options(self._parser, lanes, per_job)

    def run(self, scene: Scene[CaseT], arguments: Sequence[str] | None = None) -> int:
        """Play the cases that were asked for; the exit status. An interruption ends this process."""
        options = self._parser.parse_args(arguments)
        cases = self._chosen(options)
        if options.list:
            self._list(cases)
            return 0
        folder = options.folder or Path(tempfile.mkdtemp(prefix="hetpipe-chaos-"))
        diary = Diary(folder, self._cases)
        known = {name for name, outcome in diary.outcomes.items() if outcome.judged}
        started = SYSTEM_CLOCK.monotonic()
        runner = Runner(scene, folder, _say, note=diary.note, keeps_all=options.keep)
        interrupted = False
        try:
            runner.run([case for case in cases if case.name not in known], per_job=options.per_job, lanes=options.lanes)
        except KeyboardInterrupt:
            interrupted = True
        results = Results(
            outcomes=[diary.outcomes[case.name] for case in cases if case.name in diary.outcomes],
            skipped=self._skipped,
            seconds=SYSTEM_CLOCK.monotonic() - started,
            seed=options.seed,
            again=f"python -m {self._module} --only",
            tally=diary.tally,
            missing=[case.name for case in cases if case.name not in diary.outcomes],
        )
        sys.stdout.write("\n".join([*results.lines(), f"verdicts and what went wrong are in {folder}", ""]))
        if options.json:
            sys.stdout.write(json.dumps(results.to_json()) + "\n")
        sys.stdout.flush()
        if interrupted:
            # Lanes under way hold this process up for minutes; the processes of their clusters end when it does.
            os._exit(128 + signal.SIGINT)
        return 0 if results.ok else 1

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser, lanes: int, per_job: int) -> None:
        parser.add_argument(
            "--only",
            action="append",
            metavar="NAME",
            help="play this cell; `snapshot.*`, `*/coordinator/*`: all that fit (default: every one; may be repeated)",
        )
        parser.add_argument("--seed", type=int, default=0, help="order of the cells (%(default)s)")
        parser.add_argument("--count", type=int, metavar="N", help="play the first N of them (default: all)")
        parser.add_argument("--lanes", type=int, default=lanes, metavar="N", help="jobs at once (%(default)s)")
        parser.add_argument(
            "--per-job", type=int, default=per_job, metavar="N", help="most cells of one job (%(default)s)"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        parser.add_argument(
            "--folder",
            type=Path,
            metavar="DIR",
            help="where runs and verdicts go (default: a new folder); what has a verdict there is not played again",
        )
        parser.add_argument("--keep", action="store_true", help="keep the folders of jobs that went well, too")
        parser.add_argument("--list", action="store_true", help="print names, and what is skipped; play nothing")

    def _chosen(self, options: argparse.Namespace) -> list[CaseT]:
        """In the order of `--only`, without it in one that the seed makes; as many as `--count` says."""
        return self._ordered(options)[: options.count]

    def _ordered(self, options: argparse.Namespace) -> list[CaseT]:
        if not options.only:
            cases = list(self._cases.values())
            random.Random(options.seed).shuffle(cases)
            return cases
        found: dict[str, CaseT] = {}
        for pattern in options.only:
            fitting = {name: case for name, case in self._cases.items() if fnmatchcase(name, pattern)}
            if not fitting:
                self._parser.error(f"there is no cell {pattern}; --list names them all")
            found |= fitting
        return list(found.values())

    def _list(self, cases: Sequence[CaseT]) -> None:
        names = [case.name for case in cases]
        skipped = [f"skipped: {name}: {reason}" for name, reason in self._skipped.items()]
        counted = f"{len(names)} cells, {len(skipped)} skipped"
        sys.stdout.write("\n".join([*names, *skipped, counted, ""]))


def _say(line: str) -> None:
    sys.stderr.write(f"  {line}\n")
    sys.stderr.flush()
