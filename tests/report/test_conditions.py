"""Lost safety in the status and in the last words of a run: the first cause stays the last line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.cli.run.summary import summary_lines
from hetpipe.errors import UserError
from hetpipe.report.conditions import condition_lines
from hetpipe.runs.follow import CoordinatorLost, ReceivedEvent
from hetpipe.runs.outcome import ExitStatus
from hetpipe.runs.result import TrainResult
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.status import status_of_job, status_of_run
from hetpipe.runs.training import RunEnd
from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.events import ConditionCleared, ConditionRaised, JobEnded, JobState
from hetpipe.values.wire import plain
from tests.checkpoints import write_checkpoint
from tests.cli.fakes import RESULT, FakeCoordinator, running_status, shell_with
from tests.runs.test_follow import DEATH, Case
from tests.runs.test_status import Away
from tests.runs.test_training import run
from tests.support.fake_clock import FakeClock

FULL = Condition(ConditionKind.DISK_NEARLY_FULL, "the disk at /runs", "the disk at /runs is nearly full", 5.0, times=1)
GIVEN_UP = Condition(ConditionKind.CHECKPOINT_GIVEN_UP, "checkpoints", "clock 42 was given up", 7.0, times=18)
OVER = Condition(ConditionKind.STORE_UNREACHABLE, "Redis", "Redis is away", 1.0, 4.0, "Redis answers again", 1)
NO_ROOM = "cannot write /runs/a/result.json: No space left on device"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    return RunFolder.create(None, name="small", clock=FakeClock())


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fits into the folder of the run at its end."""

    def refuse(*_: object) -> None:
        raise UserError(NO_ROOM)

    monkeypatch.setattr(RunFolder, "write_result", refuse)


class TestLines:
    def test_what_began_first_and_still_holds_is_the_last_line(self) -> None:
        lines = condition_lines([OVER, FULL, GIVEN_UP])
        assert [line.partition(": ")[2] for line in lines] == [
            "Redis is away; Redis answers again",
            "clock 42 was given up",
            "the disk at /runs is nearly full",
        ]
        assert lines[0].startswith("from ")
        assert lines[1].startswith("since ")
        assert ", 18 times: " in lines[1]

    def test_those_of_a_kind_share_one(self) -> None:
        many = [
            Condition(ConditionKind.HISTORY_INCOMPLETE, f"stage {i}", "it ends", float(i), times=1) for i in range(9)
        ]
        (line,) = condition_lines(many)
        assert line.endswith(", 9 times: it ends (also: stage 1, stage 2, stage 3 and 5 more)")


class TestStatus:
    def test_of_a_run_under_way(self) -> None:
        status = status_of_job(replace(running_status("/runs/a"), conditions=(FULL, GIVEN_UP)))
        assert status.to_json()["conditions"] == [plain(Condition, FULL), plain(Condition, GIVEN_UP)]
        lines = status.lines(Path("/runs"))
        assert any(line.startswith("since ") and line.endswith("the disk at /runs is nearly full") for line in lines)

    def test_of_a_run_that_has_ended(self, folder: RunFolder) -> None:
        ended = JobEnded(JobState.FAILED, "no", "JobFailed", conditions=(FULL,))
        run(folder, FakeCoordinator([ended]))
        status = status_of_run(folder, shell_with(Away(), folder.path.parent))
        assert status.conditions == (FULL,)


class TestFollower:
    """What has ended the run without a word of its coordinator."""

    def ending(self, sentence: str, *, cleared: bool) -> tuple[str, tuple[Condition, ...]]:
        case = Case()
        case.follower.handle(ReceivedEvent(ConditionRaised(FULL.kind, (FULL.who,), FULL.sentence, FULL.since, 1)))
        if cleared:
            case.follower.handle(ReceivedEvent(ConditionCleared(FULL.kind, (FULL.who,), "there is room again", 6.0, 0)))
        case.follower.handle(CoordinatorLost("PeerUnreachable", sentence))
        assert case.follower.ending is not None
        return case.follower.ending.sentences[0], case.follower.ending.conditions

    def test_the_first_cause_that_was_told_is_named(self) -> None:
        told, conditions = self.ending("its log: No space left on device", cleared=False)
        assert told == "its log: No space left on device; first cause: the disk at /runs is nearly full"
        assert conditions == (FULL,)

    def test_but_not_if_it_is_over(self) -> None:
        told, conditions = self.ending("its log: No space left on device", cleared=True)
        assert told == "its log: No space left on device"
        assert [one.clearance for one in conditions] == ["there is room again"]

    def test_nor_if_something_else_has_happened(self) -> None:
        case = Case()
        case.follower.handle(ReceivedEvent(ConditionRaised(FULL.kind, (FULL.who,), FULL.sentence, FULL.since, 1)))
        case.follower.handle(DEATH)
        assert case.follower.ending is not None
        assert "first cause" not in case.follower.ending.sentences[0]
        assert case.follower.ending.conditions == (FULL,)


class TestLastWords:
    def failed(self, folder: RunFolder) -> RunEnd:
        ended = JobEnded(JobState.FAILED, "clock 400 was given up; first cause: the disk at /runs is nearly full")
        coordinator = FakeCoordinator([replace(ended, error="CheckpointNotWritten", conditions=(FULL, GIVEN_UP))])
        return run(folder, coordinator)[0]

    def test_a_run_that_fails_lists_them_and_ends_with_the_first_cause(self, folder: RunFolder) -> None:
        write_checkpoint(folder.path, 3)
        end = self.failed(folder)
        assert "; first cause: the disk at /runs is nearly full; resume with: " in end.sentences[-1]
        written = folder.read_result()
        assert written is not None
        assert written.conditions == (FULL, GIVEN_UP)

    @pytest.mark.usefixtures("full")
    def test_a_result_for_which_there_is_no_room_is_not_the_cause(self, folder: RunFolder) -> None:
        end = self.failed(folder)
        assert end.exit_status is ExitStatus.FAILED
        assert end.sentences == ("clock 400 was given up; first cause: the disk at /runs is nearly full",)

    @pytest.mark.usefixtures("full")
    def test_a_run_that_finished_without_room_for_its_result_says_so_and_why(self, folder: RunFolder) -> None:
        ended = JobEnded(JobState.FINISHED, result=RESULT, conditions=(FULL,))
        end, _ = run(folder, FakeCoordinator([ended]))
        assert end.exit_status is ExitStatus.FAILED
        assert end.sentences == (f"the run finished, but {NO_ROOM}; first cause: the disk at /runs is nearly full",)

    def test_a_run_that_finishes_warns_last(self) -> None:
        values: dict[str, Any] = {**RESULT, "conditions": [plain(Condition, FULL)]}
        end = RunEnd(
            run_dir=Path("/runs/a"),
            state=JobState.FINISHED,
            result=TrainResult.from_json(values),
            conditions=(FULL, OVER),
        )
        lines = summary_lines(end, current=Path("/"))
        assert lines[-1].startswith("safety:  since ")
        assert lines[-1].endswith("the disk at /runs is nearly full")
        assert "Redis is away" in lines[-2]
