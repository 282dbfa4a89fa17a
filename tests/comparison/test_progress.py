"""How a comparison is shown while it goes on."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from hetpipe.comparison.progress import (
    CompareLines,
    CompareLive,
    CompareProgress,
    Pace,
    record_text,
    remaining_seconds,
)
from hetpipe.comparison.record import TrialState
from hetpipe.values.events import JobEnded, JobState, StateChanged, Waiting, WorkerLost
from hetpipe.values.ids import Incarnation, VirtualWorkerIndex
from tests.cli.fakes import evaluated, table
from tests.comparison.comparisons import diverged, record, trials
from tests.support.fake_clock import FakeClock


def test_time_left_is_that_of_this_run_and_of_those_after_it() -> None:
    assert remaining_seconds(Pace(3, [])) is None
    assert remaining_seconds(Pace(3, [], elapsed=4.0, eta_seconds=6.0)) == 36.0
    assert remaining_seconds(Pace(3, [20.0], elapsed=4.0, eta_seconds=6.0)) == 6.0 + 3 * 15.0
    assert remaining_seconds(Pace(1, [20.0], elapsed=50.0)) == 20.0


def test_how_a_run_ended() -> None:
    assert record_text(record("wave", 3)) == "finished after 2.0 s: loss 0.5000, accuracy 0.5000, 184 samples/s"
    assert record_text(diverged("wave", 3)).startswith("diverged: stage 1 of virtual worker 0")
    assert record_text(record("wave", 3, evaluations=())) == "finished after 2.0 s: 184 samples/s"


def run_two(progress: CompareProgress, clock: FakeClock, folder: Path) -> None:
    first, second = trials(folder, seeds=1)
    with progress:
        progress.begin(1, 3, first)
        progress.say("starting 1 coordinator")
        progress.show(StateChanged(JobState.RUNNING))
        progress.show(table(2, 3))
        progress.show(evaluated())
        clock.advance(10.0)
        progress.show(Waiting("stage 0 waits for stage 1", 5.0))
        progress.show(WorkerLost(VirtualWorkerIndex(1), Incarnation(0), "it was killed"))
        progress.show(JobEnded(JobState.FINISHED))
        progress.close()
        progress.end(record("wave", 3), is_used_again=False)
        progress.begin(2, 3, second)
        progress.say("starting 1 coordinator")
        progress.end(replace(diverged("flush", 3)), is_used_again=True)


LINES = [
    "starting 1 coordinator",
    "run 1 of 3: wave, seed 3: waiting for 5.0 s: stage 0 waits for stage 1",
    "run 1 of 3: wave, seed 3: virtual worker 1 is lost (life 1): it was killed",
    ("run 1 of 3: wave, seed 3: finished after 2.0 s: loss 0.5000, accuracy 0.5000, 184 samples/s; about 20 s left"),
]


def test_a_line_for_every_run(tmp_path: Path) -> None:
    clock, stream = FakeClock(), io.StringIO()
    run_two(CompareLines(stream, clock), clock, tmp_path)
    shown = stream.getvalue().splitlines()
    assert shown[:4] == LINES
    assert shown[4].startswith("run 2 of 3: flush, seed 3: trained before, diverged: stage 1")
    assert shown[4].endswith("; about 10 s left")
    assert len(shown) == 5


def test_a_wait_that_is_reported_every_second_is_not_shown_every_second(tmp_path: Path) -> None:
    clock, stream = FakeClock(), io.StringIO()
    progress = CompareLines(stream, clock)
    progress.begin(1, 1, trials(tmp_path, seeds=1)[0])
    for seconds in range(1, 31):
        progress.show(Waiting(f"the coordinator waits for agent n0, which is importing torch ({seconds} s)", seconds))
        clock.advance(1.0)
    assert len(stream.getvalue().splitlines()) == 2, "at once, and after ten seconds; the next one after twenty more"


def test_the_run_under_way_is_told_on_a_terminal(tmp_path: Path) -> None:
    clock = FakeClock()
    progress = CompareLive(io.StringIO(), clock)
    progress.begin(2, 3, trials(tmp_path, seeds=1)[0])
    progress.show(StateChanged(JobState.STARTING))
    assert progress._line() == "run 2 of 3: wave, seed 3 · starting the stages"
    clock.advance(2.0)
    progress.show(StateChanged(JobState.RUNNING))
    progress.show(table(2, 3, eta_seconds=6.0))
    assert progress._line() == (
        "run 2 of 3: wave, seed 3 · epoch 2, 60 of 240 samples (25.0 %), 300 samples/s, ETA 6.0 s · loss 1.2500 · all "
        "done in about 14 s"
    )


def test_a_terminal_keeps_the_lines(tmp_path: Path) -> None:
    clock, stream = FakeClock(), io.StringIO()
    run_two(CompareLive(stream, clock), clock, tmp_path)
    for line in LINES:
        assert line.split(": finished")[0] in stream.getvalue()


def test_a_failure_is_told(tmp_path: Path) -> None:
    clock, stream = FakeClock(), io.StringIO()
    progress = CompareLines(stream, clock)
    progress.begin(1, 1, trials(tmp_path, seeds=1)[0])
    failed = replace(diverged("wave", 3), state=TrialState.FAILED, sentence="stage 0 was killed")
    progress.end(failed, is_used_again=False)
    assert stream.getvalue() == "run 1 of 1: wave, seed 3: failed: stage 0 was killed\n"


def test_a_reader_that_is_gone_does_not_end_the_comparison(tmp_path: Path) -> None:
    class Broken(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    progress = CompareLines(Broken(), FakeClock())
    progress.say("nobody hears this")
    progress.say("nor this")
