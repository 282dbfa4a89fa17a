"""Plays cases, several in one job, and finds out which of them was to blame where the job did not end well."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import HetpipeError
from hetpipe.spec.events import JobState
from tests.chaos.outcome import Case, Outcome
from tests.chaos.trial import Trial

#: Cases that one job takes, one after the other. A job lasts a few minutes at most, so that its witnesses suffice.
CASES_PER_JOB = 22

#: Seconds without a word after which a stage counts as hung; stages that wait for somebody say so every five seconds.
STALL_SECONDS = 7.0

#: What jobs here are told about processes that die: dying often is what they are for.
SURVIVE = {"stall": f"{STALL_SECONDS}s", "restarts": 1000, "backoff": "0s", "absence": "60s"}

CaseT = TypeVar("CaseT", bound=Case)
PlayedT_contra = TypeVar("PlayedT_contra", bound=Case, contravariant=True)

Play: TypeAlias = Callable[[CaseT], Outcome]

Say: TypeAlias = Callable[[str], None]


class Scene(Protocol[PlayedT_contra]):
    """Where cases are played."""

    def open(self, folder: Path) -> AbstractContextManager[tuple[Trial, Play[PlayedT_contra]]]:
        """A cluster with a job that is under way, and what does cases to it; gone with the block.

        Raises:
            AssertionError: no job came under way.
        """
        ...


class Runner(Generic[CaseT]):
    """Plays cases in clusters of its own, whose folders are below one folder and stay where something went wrong."""

    def __init__(self, scene: Scene[CaseT], folder: Path, say: Say, *, keeps_all: bool = False) -> None:
        """Prepare.

        Args:
            scene: where cases are played.
            folder: of all clusters.
            say: hears how each went.
            keeps_all: keep the folders of what went well, too.
        """
        self._scene = scene
        self._keeps_all = keeps_all
        self._folder = folder
        self._say = say
        self._number = 0

    def run(self, cases: Sequence[CaseT], *, per_job: int = CASES_PER_JOB) -> list[Outcome]:
        """Play them all; their outcomes in the same order."""
        left = deque(cases)
        outcomes: dict[str, Outcome] = {}
        while left:
            batch = [left.popleft() for _ in range(min(per_job, len(left)))]
            found = {outcome.case.name: outcome for outcome in self._run_job(batch)}
            outcomes |= found
            # A job that broke down ends its batch early, and tells nothing of those before; they get another one.
            left.extendleft(case for case in reversed(batch) if case.name not in found)
        return [outcomes[case.name] for case in cases]

    def _run_job(self, batch: Sequence[CaseT]) -> list[Outcome]:
        """Play `batch` up to the first case that is not survived; what is known for sure then, at least one outcome."""
        self._number += 1
        folder = self._folder / f"job-{self._number}"
        try:
            played, problems = self._play(batch, folder)
        except (AssertionError, HetpipeError) as error:
            sentence = f"no job came under way: {' '.join(str(error).split())}"
            self._say(f"  {sentence} (see {folder})")
            return [Outcome(case=batch[0], survived=False, sentence=sentence)]
        failed = [outcome for outcome in played if not outcome.survived]
        if problems:
            told = "; ".join(problems[:3])
            self._say(f"  the job of these is not right: {told} (see {folder})")
            if failed:
                return failed
            if len(played) == 1:
                return [replace(played[0], survived=False, sentence=told)]
            return self._blame(batch, told)
        if not failed and not self._keeps_all:
            shutil.rmtree(folder, ignore_errors=True)
        return played

    def _blame(self, batch: Sequence[CaseT], told: str) -> list[Outcome]:
        """Play each case of a job that ended badly alone; if all end well, all together are to blame."""
        self._say("  so each of them is played again alone")
        alone = [self._run_job([case])[0] for case in batch]
        if any(not outcome.survived for outcome in alone):
            return alone
        return [replace(one, survived=False, sentence=f"together with the others of its job: {told}") for one in alone]

    def _play(self, batch: Sequence[CaseT], folder: Path) -> tuple[list[Outcome], Sequence[str]]:
        """The outcomes, and what is wrong with the job at its end."""
        played: list[Outcome] = []
        with self._scene.open(folder) as (trial, play):
            for case in batch:
                played.append(play(case))
                self._tell(played[-1], folder)
                if not played[-1].survived:
                    break
            return played, self._judged(trial)

    def _judged(self, trial: Trial) -> Sequence[str]:
        """What is wrong with the job at its end."""
        started = SYSTEM_CLOCK.monotonic()
        try:
            end = trial.stop()
        except (AssertionError, HetpipeError) as error:
            return (f"the job does not come to an end: {error}",)
        verdict = trial.verdict()
        seconds = SYSTEM_CLOCK.monotonic() - started
        figures = f"{verdict.waves} waves, {verdict.samples} samples, {len(verdict.problems)} problems"
        self._say(f"  the job {end.state}, and was judged in {seconds:.1f} s: {figures}")
        return verdict.problems if end.state is JobState.STOPPED else (f"the job {end.state}: {end.failure}",)

    def _tell(self, outcome: Outcome, folder: Path) -> None:
        word = "survived" if outcome.survived else "NOT SURVIVED"
        more = "" if outcome.survived else f": {outcome.sentence} (see {folder})"
        times = f"{outcome.seconds:.1f} s, {outcome.recovery_seconds:.1f} s of them after the fault"
        self._say(f"  {word} {outcome.case.name} ({times}){more}")
