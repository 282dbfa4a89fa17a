"""Plays cases, several in one job and several jobs at once, and finds out which were to blame where one ended badly."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import HetpipeError
from hetpipe.values.events import JobState
from tests.chaos.outcome import Case, CaseT, Outcome, Tally
from tests.chaos.trial import Trial, Verdict

#: Most cases that one job takes, one after the other. A job lasts a few minutes at most, so that its witnesses suffice.
CASES_PER_JOB = 24

#: Seconds without a word after which a stage counts as hung; stages that wait for somebody say so every five seconds.
STALL_SECONDS = 7.0

#: What jobs here are told about processes that die: dying often is what they are for.
SURVIVE = {"stall": f"{STALL_SECONDS}s", "restarts": 1000, "backoff": "0s", "absence": "60s", "straggler": 0.0}

PlayedT_contra = TypeVar("PlayedT_contra", bound=Case, contravariant=True)

Play: TypeAlias = Callable[[CaseT], Outcome]

Say: TypeAlias = Callable[[str], None]

#: Hears what a job has shown, as soon as it is certain.
Note: TypeAlias = Callable[[Sequence[Outcome], Tally], None]


class Scene(Protocol[PlayedT_contra]):
    """Where cases are played. Several are open at once, each in a thread of its own."""

    def open(self, folder: Path) -> AbstractContextManager[tuple[Trial, Play[PlayedT_contra]]]:
        """A cluster with a job that is under way, and what does cases to it; gone with the block.

        Raises:
            AssertionError: no job came under way.
        """
        ...


@dataclass(frozen=True, slots=True)
class Batch(Generic[CaseT]):
    """Cases for one job."""

    cases: Sequence[CaseT]
    again: bool = False
    """They are played for the second time."""


@dataclass(frozen=True, slots=True)
class _Shown(Generic[CaseT]):
    """What one job, or several that look for somebody to blame, have shown."""

    outcomes: Sequence[Outcome]
    """Verdicts."""
    left: Sequence[Batch[CaseT]] = ()
    """What has none yet."""


def batches(cases: Sequence[CaseT], *, per_job: int, lanes: int) -> Iterator[Batch[CaseT]]:
    """As few jobs as the limit allows, about equally long, and as many for each lane.

    >>> [len(batch.cases) for batch in batches("abcdefghijk", per_job=4, lanes=2)]
    [3, 3, 3, 2]
    >>> [len(batch.cases) for batch in batches("abc", per_job=4, lanes=1)]
    [3]
    """
    count = min(len(cases), math.ceil(math.ceil(len(cases) / per_job) / lanes) * lanes)
    begin = 0
    for number in range(count):
        size = (len(cases) + count - 1 - number) // count
        yield Batch(cases[begin : begin + size])
        begin += size


class Runner(Generic[CaseT]):
    """Plays cases in clusters of its own, whose folders are below one folder and stay where something went wrong."""

    def __init__(
        self,
        scene: Scene[CaseT],
        folder: Path,
        say: Say,
        *,
        note: Note = lambda _outcomes, _tally: None,
        keeps_all: bool = False,
    ) -> None:
        """Prepare.

        Args:
            scene: where cases are played.
            folder: of all clusters.
            say: hears how each went; from several threads.
            note: hears verdicts; from several threads.
            keeps_all: keep the folders of what went well, too.
        """
        self._scene = scene
        self._keeps_all = keeps_all
        self._folder = folder
        self._say = say
        self._note = note
        self._lock = threading.Lock()
        self._number = len(list(folder.glob("job-*")))

    def run(self, cases: Sequence[CaseT], *, per_job: int = CASES_PER_JOB, lanes: int = 1) -> list[Outcome]:
        """Play them all, `lanes` jobs at once; their outcomes in the same order."""
        outcomes: dict[str, Outcome] = {}
        pool = ThreadPoolExecutor(lanes, thread_name_prefix="lane")
        try:
            running: set[Future[_Shown[CaseT]]] = {
                pool.submit(self._run_job, batch) for batch in batches(cases, per_job=per_job, lanes=lanes)
            }
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for shown in (future.result() for future in done):
                    outcomes |= {outcome.case.name: outcome for outcome in shown.outcomes}
                    running |= {pool.submit(self._run_job, batch) for batch in shown.left}
        finally:
            # Whoever interrupts this does not wait for what has not begun.
            pool.shutdown(wait=False, cancel_futures=True)
        return [outcomes[case.name] for case in cases]

    def _run_job(self, batch: Batch[CaseT]) -> _Shown[CaseT]:
        """Play `batch` up to the first case that is not survived; every case is in the answer."""
        with self._lock:
            self._number += 1
            folder = self._folder / f"job-{self._number}"
        played: list[Outcome] = []
        try:
            verdict = self._play(batch, folder, played)
        except Exception as error:  # noqa: BLE001 - whatever breaks here, the other lane goes on, and this is told
            kind = "" if isinstance(error, AssertionError | HetpipeError) else f"{type(error).__name__}: "
            told = f"{'the job broke off' if played else 'no job came under way'}: {kind}{' '.join(str(error).split())}"
            self._say(f"{folder.name}: {told} (see {folder})")
            return self._broken_off(batch, played, told)
        if not verdict.problems:
            if all(outcome.survived for outcome in played) and not self._keeps_all:
                shutil.rmtree(folder, ignore_errors=True)
            return self._shown(played, verdict.tally, _rest(batch, played))
        told = "; ".join(verdict.problems[:3])
        self._say(f"{folder.name}: the job of these is not right: {told} (see {folder})")
        if any(not outcome.survived for outcome in played):
            return self._broken_off(batch, played, told, verdict.tally)
        if len(played) == 1:
            return self._shown([replace(played[0], survived=False, sentence=told)], verdict.tally)
        self._note([], verdict.tally)
        return self._blame(batch, told)

    def _play(self, batch: Batch[CaseT], folder: Path, played: list[Outcome]) -> Verdict:
        """Add the outcomes to `played`; what the judges say of the job at its end."""
        with self._scene.open(folder) as (trial, play):
            for case in batch.cases:
                played.append(replace(play(case), again=batch.again))
                self._tell(played[-1], folder)
                if not played[-1].survived:
                    break
            return self._judged(trial, folder)

    def _judged(self, trial: Trial, folder: Path) -> Verdict:
        started = SYSTEM_CLOCK.monotonic()
        try:
            end = trial.stop()
        except (AssertionError, HetpipeError) as error:
            return Verdict((f"the job does not come to an end: {error}",))
        verdict = trial.verdict()
        seconds, tally = SYSTEM_CLOCK.monotonic() - started, verdict.tally
        figures = f"{tally.waves} waves, {tally.samples} samples, {len(verdict.problems)} problems"
        self._say(f"{folder.name}: the job {end.state}, and was judged in {seconds:.1f} s: {figures}")
        if end.state is not JobState.STOPPED:
            return replace(verdict, problems=(f"the job {end.state}: {end.failure}", *verdict.problems))
        return verdict

    def _shown(self, outcomes: Sequence[Outcome], tally: Tally, *left: Batch[CaseT]) -> _Shown[CaseT]:
        self._note(outcomes, tally)
        return _Shown(outcomes, [batch for batch in left if batch.cases])

    def _broken_off(
        self, batch: Batch[CaseT], played: Sequence[Outcome], told: str, tally: Tally | None = None
    ) -> _Shown[CaseT]:
        """Who was not survived is certain; the others of this job get another one, once."""
        failed = [outcome for outcome in played if not outcome.survived]
        names = {outcome.case.name for outcome in played if outcome.survived}
        silent = [case for case in batch.cases if case.name in names or not played]
        rest = _rest(batch, played) if played else replace(batch, cases=[])
        lost: list[Outcome] = []
        if silent and batch.again:
            lost = [Outcome(case=case, survived=False, judged=False, again=True, sentence=told) for case in silent]
        elif silent:
            self._say(f"no verdict yet on {', '.join(case.name for case in silent)}: to be played again, once")
        second = Batch([] if batch.again else silent, again=True)
        return self._shown([*failed, *lost], tally or Tally(), second, rest)

    def _blame(self, batch: Batch[CaseT], told: str) -> _Shown[CaseT]:
        """Play each case of a job that ended badly alone; if all end well, all together are to blame."""
        self._say("so each of them is played again alone")
        alone: list[Outcome] = []
        for case in batch.cases:
            alone += self._run_job(Batch([case], again=True)).outcomes
        if all(outcome.survived for outcome in alone):
            together = f"together with the others of its job: {told}"
            alone = [replace(one, survived=False, sentence=together) for one in alone]
            self._note(alone, Tally())
        return _Shown(alone)

    def _tell(self, outcome: Outcome, folder: Path) -> None:
        word = "survived" if outcome.survived else "NOT SURVIVED"
        more = "" if outcome.survived else f": {outcome.sentence} (see {folder})"
        times = f"{outcome.seconds:.1f} s, {outcome.recovery_seconds:.1f} s of them after the fault"
        self._say(f"{folder.name}: {word} {outcome.case.name} ({times}){more}")


def _rest(batch: Batch[CaseT], played: Sequence[Outcome]) -> Batch[CaseT]:
    """What was not played any more."""
    return replace(batch, cases=batch.cases[len(played) :])
