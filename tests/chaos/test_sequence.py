"""Who was to blame where a job ended badly, who has no verdict, and how an interrupted command goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from hetpipe.errors import Unavailable
from hetpipe.values.events import JobState, JobStatus
from tests.chaos.diary import Diary
from tests.chaos.outcome import Outcome, Tally
from tests.chaos.sequence import Play, Runner
from tests.chaos.trial import Trial, Verdict


@dataclass(frozen=True)
class Fall:
    name: str
    row: str = "falls"
    column: str = "down"


A, B, C = Fall("a"), Fall("b"), Fall("c")


@dataclass(frozen=True)
class Script:
    """What happens to one job."""

    starts: bool = True
    fatal: Sequence[str] = ()
    problems: Sequence[str] = ()


class ScriptedTrial:
    def __init__(self, script: Script) -> None:
        self._script = script

    def stop(self) -> JobStatus:
        return JobStatus(None, "", JobState.STOPPED, "", "")

    def verdict(self) -> Verdict:
        return Verdict(tuple(self._script.problems), Tally(jobs=1, waves=2))


@dataclass
class ScriptedScene:
    """Jobs go by the scripts, in turn; then well."""

    scripts: list[Script]
    played: list[str] = field(default_factory=list)

    @contextmanager
    def open(self, folder: Path) -> Iterator[tuple[Trial, Play[Fall]]]:
        folder.mkdir(parents=True)
        script = self.scripts.pop(0) if self.scripts else Script()
        if not script.starts:
            raise Unavailable("Redis does not start")

        def play(case: Fall) -> Outcome:
            self.played.append(case.name)
            return Outcome(case=case, survived=case.name not in script.fatal)

        yield cast(Trial, ScriptedTrial(script)), play


def run(folder: Path, *scripts: Script) -> tuple[ScriptedScene, list[Outcome], list[str], Tally]:
    scene, told, tallies = ScriptedScene(list(scripts)), list[str](), [Tally()]
    runner = Runner(scene, folder, told.append, note=lambda _outcomes, tally: tallies.append(tally))
    outcomes = runner.run([A, B, C])
    return scene, outcomes, told, sum(tallies[1:], Tally())


def test_what_went_well_is_judged_once(tmp_path: Path) -> None:
    scene, outcomes, _, tally = run(tmp_path)
    assert outcomes == [Outcome(case=case, survived=True) for case in (A, B, C)]
    assert scene.played == ["a", "b", "c"]
    assert tally == Tally(jobs=1, waves=2)
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_can_still_be_judged_clears_those_before_the_failure(tmp_path: Path) -> None:
    scene, outcomes, _, _ = run(tmp_path, Script(fatal="b"))
    assert [outcome.survived for outcome in outcomes] == [True, False, True]
    assert scene.played == ["a", "b", "c"]
    assert not any(outcome.again for outcome in outcomes)


def test_a_job_that_broke_off_names_who_has_no_verdict_and_plays_it_again_once(tmp_path: Path) -> None:
    scene, outcomes, told, _ = run(tmp_path, Script(fatal="b", problems=["it does not end"]))
    assert "no verdict yet on a: to be played again, once" in told
    assert [outcome.survived for outcome in outcomes] == [True, False, True]
    assert [outcome.again for outcome in outcomes] == [True, False, False]
    assert sorted(scene.played) == ["a", "a", "b", "c"]


def test_what_has_no_verdict_twice_is_not_survived(tmp_path: Path) -> None:
    broken = Script(starts=False)
    scene, outcomes, _, _ = run(tmp_path, broken, broken)
    assert scene.played == []
    assert {(outcome.survived, outcome.judged, outcome.again) for outcome in outcomes} == {(False, False, True)}
    assert outcomes[0].sentence == "no job came under way: Redis does not start"


def test_whoever_spoils_a_job_in_silence_is_found_alone(tmp_path: Path) -> None:
    torn = Script(problems=["a wave is torn"])
    _, outcomes, _, tally = run(tmp_path, torn, Script(), torn, Script())
    assert [outcome.survived for outcome in outcomes] == [True, False, True]
    assert outcomes[1].sentence == "a wave is torn"
    assert tally.jobs == 4


def test_if_nobody_alone_spoils_a_job_all_together_do(tmp_path: Path) -> None:
    _, outcomes, _, _ = run(tmp_path, Script(problems=["a wave is torn"]))
    assert {(outcome.survived, outcome.sentence) for outcome in outcomes} == {
        (False, "together with the others of its job: a wave is torn")
    }


@pytest.mark.parametrize("lanes", [2, 3])
def test_every_case_is_played_once_in_some_lane(tmp_path: Path, lanes: int) -> None:
    scene = ScriptedScene([])
    outcomes = Runner(scene, tmp_path, lambda _line: None).run([A, B, C], per_job=1, lanes=lanes)
    assert [outcome.case for outcome in outcomes] == [A, B, C]
    assert sorted(scene.played) == ["a", "b", "c"]


def test_a_diary_is_found_again(tmp_path: Path) -> None:
    cases = {case.name: case for case in (A, B)}
    diary = Diary(tmp_path, cases)
    assert (diary.outcomes, diary.tally) == ({}, Tally())
    lost = Outcome(case=B, survived=False, judged=False, again=True, sentence="no cluster", seconds=1.5)
    diary.note([Outcome(case=A, survived=True)], Tally(jobs=1, waves=3))
    diary.note([lost], Tally(jobs=1))
    found = Diary(tmp_path, cases)
    assert found.outcomes == {"a": Outcome(case=A, survived=True), "b": lost}
    assert found.tally == Tally(jobs=2, waves=3)
    assert Diary(tmp_path, {"a": A}).outcomes.keys() == {"a"}
