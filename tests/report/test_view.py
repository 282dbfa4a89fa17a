"""How a run is shown: lines at their pace, a live table, a function, nothing."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from hetpipe.report.live import LiveView
from hetpipe.report.view import EVALUATION_SECONDS, LINE_SECONDS, CallbackView, LineView, SilentView
from hetpipe.values.conditions import ConditionKind
from hetpipe.values.events import (
    ConditionCleared,
    ConditionRaised,
    JobEnded,
    JobEvent,
    JobState,
    Measuring,
    ReplanJudged,
    Rewound,
    StateChanged,
    Straggling,
    Waiting,
    WorkerLeft,
    WorkerLost,
    WorkerQuarantined,
    WorkerRejoined,
    WorkerReplanned,
)
from hetpipe.values.ids import AgentId, Clock, Incarnation, StageIndex
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.measurement import ProfileStep
from tests.cli.fakes import evaluated, table
from tests.support.fake_clock import FakeClock

LIVES: tuple[JobEvent, ...] = (
    WorkerLost(Vw(1), Incarnation(0), "its agent is gone"),
    WorkerRejoined(Vw(1), Incarnation(1)),
    WorkerLeft(Vw(1), Incarnation(1), returns=True),
    WorkerLeft(Vw(1), Incarnation(2), returns=False),
    WorkerQuarantined(Vw(1), "it died too often"),
    WorkerReplanned(Vw(1), Incarnation(2), (3, 5), (7, 1), 0.5),
    ReplanJudged(Vw(1), 0.25, "it is faster"),
    Rewound(Clock(9), Clock(4), "runs/a/rewind-1", "a disk is gone"),
    ConditionRaised(ConditionKind.CHECKPOINT_GIVEN_UP, ("checkpoints",), "no room", 3.0, 1),
    ConditionCleared(ConditionKind.CHECKPOINT_GIVEN_UP, ("checkpoints",), "written again at clock 57", 5.0, 0),
    ConditionRaised(ConditionKind.DURABILITY_LOST, ("ps 0", "ps 1"), "ps 0 cannot write", 6.0, 5),
)


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_lines_tell_states_waits_and_remarks_at_once() -> None:
    clock, stream = FakeClock(), io.StringIO()
    view = LineView(stream, clock)
    view.say("the run's folder is runs/a")
    clock.advance(1.25)
    view.show(StateChanged(JobState.INSPECTING))
    view.show(Waiting("stage 0 waits for stage 1", 5.04))
    view.show(StateChanged(JobState.RUNNING, "links between stages: gloo"))
    for event in LIVES:
        view.show(event)
    assert lines_of(stream) == [
        't=0.0 event=note sentence="the run\'s folder is runs/a"',
        "t=1.2 state=inspecting",
        't=1.2 event=waiting seconds=5 sentence="stage 0 waits for stage 1"',
        't=1.2 state=running sentence="links between stages: gloo"',
        't=1.2 event=worker_lost vw=1 life=1 sentence="its agent is gone"',
        "t=1.2 event=worker_rejoined vw=1 life=2",
        "t=1.2 event=worker_left vw=1 life=2 returns=True",
        "t=1.2 event=worker_left vw=1 life=3 returns=False",
        't=1.2 event=worker_quarantined vw=1 sentence="it died too often"',
        "t=1.2 event=worker_replanned vw=1 life=3 before=3-5 after=7-1 foreseen_percent=50",
        't=1.2 event=replan_judged vw=1 gained_percent=25 sentence="it is faster"',
        't=1.2 event=rewound from_clock=9 to_clock=4 folder=runs/a/rewind-1 sentence="a disk is gone"',
        't=1.2 event=condition_raised condition=checkpoint_given_up who=checkpoints times=1 sentence="no room"',
        (
            "t=1.2 event=condition_cleared condition=checkpoint_given_up who=checkpoints remaining=0 "
            'sentence="written again at clock 57"'
        ),
        't=1.2 event=condition_raised condition=durability_lost who="ps 0, ps 1" times=5 sentence="ps 0 cannot write"',
    ]


def test_progress_keeps_to_its_pace_and_the_last_picture_is_not_lost() -> None:
    clock, stream = FakeClock(), io.StringIO()
    view = LineView(stream, clock)
    for wave in range(12):
        view.show(table(wave, wave))
        clock.advance(1.0)
    shown = [line.split("vw0.clock=")[1].split()[0] for line in lines_of(stream)]
    assert shown == ["0", "5", "10"]
    assert LINE_SECONDS == 5.0
    view.show(StateChanged(JobState.FINISHED))
    view.show(JobEnded(JobState.FINISHED))
    view.close()
    view.close()
    assert "vw0.clock=11" in lines_of(stream)[3]
    assert lines_of(stream)[4:] == ["t=12.0 state=finished"]


def test_frequent_evaluations_are_thinned_out_but_the_newest_is_shown() -> None:
    clock, stream = FakeClock(), io.StringIO()
    view = LineView(stream, clock)
    for epoch in range(1, 5):
        view.show(evaluated(epoch))
        clock.advance(EVALUATION_SECONDS / 2)
    view.close()
    assert [line.split("epoch=")[1].split()[0] for line in lines_of(stream)] == ["1", "3", "4"]


def test_a_reader_that_is_gone_does_not_end_the_run() -> None:
    class Broken(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    view = LineView(Broken(), FakeClock())
    view.say("nobody hears this")
    view.show(StateChanged(JobState.RUNNING))
    view.close()


def test_a_function_hears_every_event() -> None:
    heard: list[JobEvent] = []
    view = CallbackView(heard.append)
    view.show(evaluated())
    view.say("a remark is no event")
    view.close()
    assert heard == [evaluated()]


def test_silence() -> None:
    view = SilentView()
    view.show(table(1))
    view.say("nothing")
    view.close()


def test_the_same_wait_is_told_again_more_and_more_rarely() -> None:
    clock, stream = FakeClock(), io.StringIO()
    view = LineView(stream, clock)
    for seconds in range(5, 305, 5):
        view.show(
            Waiting(f"the coordinator waits for agent n0, which is importing torch ({seconds} s)", float(seconds))
        )
        clock.advance(5.0)
    assert [line.split("seconds=")[1].split()[0] for line in lines_of(stream)] == ["5", "15", "35", "75", "155"]
    view.show(Waiting("the coordinator waits for agent n1", 5.0))
    view.show(Waiting("the coordinator waits for agent n1", 4.0))
    assert len(lines_of(stream)) == 7, "another wait, or one that begins anew, is told at once"


def measuring(done: int) -> Measuring:
    return Measuring(ProfileStep("cpu", f"h.{done}", done, 14), AgentId("n0"))


def test_lines_about_measured_layers_keep_their_distance() -> None:
    clock, stream = FakeClock(), io.StringIO()
    view = LineView(stream, clock)
    for done in range(4):
        view.show(measuring(done))
        clock.advance(5.0)
    assert lines_of(stream) == [
        "t=0.0 measuring=h.0 on=cpu layers=0/14",
        "t=10.0 measuring=h.2 on=cpu layers=2/14",
    ]


class Terminal(io.StringIO):
    """A terminal of 120 columns."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("_wide")
def test_a_wait_stays_on_one_line_of_the_terminal_until_somebody_goes_on() -> None:
    terminal = Terminal()
    view = LiveView(terminal, name="small", clock=FakeClock())
    view.show(StateChanged(JobState.RUNNING))
    view.show(table(3, 4))
    for seconds in (5.0, 10.0):
        view.show(Waiting("stage 0 waits for stage 1", seconds))
    view.say("a remark")
    after = terminal.getvalue().rpartition("a remark")[2]
    assert "waiting for 10 s: stage 0 waits for stage 1" in after
    assert "waiting for 5.0 s" not in after
    view.show(replace(table(3, 4), samples=100_000))
    view.say("another remark")
    assert "waiting for" not in terminal.getvalue().rpartition("another remark")[2]
    view.close()


@pytest.mark.usefixtures("_wide")
def test_measured_layers_are_one_bar_until_the_next_state() -> None:
    clock, terminal = FakeClock(), Terminal()
    view = LiveView(terminal, name="small", clock=clock)
    view.show(StateChanged(JobState.INSPECTING))
    view.show(Waiting("the coordinator waits for agent n0 to import and inspect the model", 5.0))
    for done in (0, 2, 4):
        view.show(measuring(done))
        clock.advance(5.0)
    view.say("a remark")
    after = terminal.getvalue().rpartition("a remark")[2]
    assert "measuring h.4 on cpu" in after
    assert "4/14" in after
    assert "0:00:25" in after, "the time that remains: ten layers of 2.5 s"
    assert "waiting for" not in after
    view.show(StateChanged(JobState.PLANNING))
    view.say("another remark")
    assert "measuring" not in terminal.getvalue().rpartition("another remark")[2]
    view.close()


@pytest.mark.usefixtures("_wide")
def test_the_live_table() -> None:
    clock, terminal = FakeClock(), Terminal()
    view = LiveView(terminal, name="small", clock=clock)
    view.show(StateChanged(JobState.RUNNING))
    view.show(replace(table(3, 4), slow=(Straggling(Vw(1), StageIndex(0), 2.04),)))
    view.show(evaluated())
    view.show(Waiting("virtual worker 0 waits for virtual worker 1", 6.0))
    view.say("a remark")
    for event in LIVES:
        view.show(event)
    clock.advance(61.0)
    view.show(JobEnded(JobState.FINISHED))
    view.close()
    view.close()
    last_frame = terminal.getvalue().rpartition("small: finished, 1 min 01 s")[2]
    assert "ahead (D = 1)" in last_frame
    assert "1-4 on n0/3" in last_frame
    assert "stage 0 of virtual worker 1 takes 2.0 times as long as planned" in last_frame
    assert "1 of 2" in last_frame
    assert "5 times: ps 0 cannot write (also: ps 1)" not in last_frame, "they are told as often as each was raised"
    assert "ps 0 cannot write (also: ps 1)" in last_frame, "what holds stays on the screen"
    assert "no room" not in last_frame, "and what is over does not"
    assert "WARNING: no room" in terminal.getvalue()
    assert "WARNING: ps 0 cannot write (also: ps 1) (5 times since the last warning)" in terminal.getvalue()
    assert "accuracy 0.9634" in last_frame
    assert "waiting for 6.0 s: virtual worker 0 waits for virtual worker 1" in terminal.getvalue()
    assert "a remark" in terminal.getvalue()
    assert "virtual worker 1 is lost (life 1): its agent is gone" in terminal.getvalue()
    assert "virtual worker 1 is ready (life 2); it joins at the next barrier" in terminal.getvalue()
    assert "it died too often" in terminal.getvalue()
    assert "THE JOB WAS REWOUND TO CLOCK 4: waves committed from clock 4 to 9 are lost" in terminal.getvalue()
    view.say("afterwards")
    assert terminal.getvalue().endswith("afterwards\n")
