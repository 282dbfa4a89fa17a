"""Exit statuses, errors by name, and where a command writes."""

from __future__ import annotations

import io
import json

import pytest

from hetpipe.errors import CallableError, HetpipeError, JobError, JobFailed, NonFiniteUpdate, PeerUnreachable, UserError
from hetpipe.runs.outcome import ExitStatus, Output, error_class, error_of, sentences_of, status_of
from hetpipe.runs.result import EvaluationResults, TrainResult
from tests.cli.fakes import RESULT


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (JobError("a: b"), ExitStatus.USAGE),
        (CallableError("a"), ExitStatus.USAGE),
        (UserError("a"), ExitStatus.USAGE),
        (JobFailed("a"), ExitStatus.FAILED),
        (PeerUnreachable("a"), ExitStatus.FAILED),
        (NonFiniteUpdate("a"), ExitStatus.FAILED),
    ],
)
def test_the_users_mistakes_have_a_status_of_their_own(error: HetpipeError, status: ExitStatus) -> None:
    assert status_of(error) is status


def test_errors_come_back_by_their_names() -> None:
    assert error_class("NonFiniteUpdate") is NonFiniteUpdate
    assert error_class("RuntimeError") is JobFailed
    assert error_class("annotations") is JobFailed
    error = error_of("JobError", ["a: b", "c: d"])
    assert sentences_of(error) == ("a: b", "c: d")
    assert sentences_of(error_of("CallableError", ["model: x"])) == ("model: x",)


def test_without_json_people_read_standard_output() -> None:
    people, complaints = io.StringIO(), io.StringIO()
    output = Output(people=people, complaints=complaints, machine=None)
    output.answer({"a": 1}, "one", "two")
    output.complain(["no"])
    assert people.getvalue() == "one\ntwo\n"
    assert complaints.getvalue() == "error: no\n"


def test_with_json_the_answer_is_one_line() -> None:
    people, machine = io.StringIO(), io.StringIO()
    output = Output(people=people, complaints=people, machine=machine)
    output.say("progress")
    output.complain(["first", "second"])
    output.answer({"a": "x\ny"}, "not shown")
    assert people.getvalue() == "progress\nerror: first\nerror: second\n"
    told = machine.getvalue().splitlines()
    assert [json.loads(line) for line in told] == [{"errors": ["first", "second"]}, {"a": "x\ny"}]


def test_a_result_keeps_the_promised_keys_and_their_types() -> None:
    result = TrainResult.from_json(RESULT)
    assert result.to_json() == RESULT
    assert list(result.to_json()) == [
        "run_dir",
        "waves",
        "minibatches",
        "samples",
        "wall_seconds",
        "samples_per_second",
        "loss",
        "eval",
        "staleness",
        "clocks",
        "global_clock",
        "bytes",
        "waiting_seconds",
        "idle_seconds",
        "losses",
        "evaluations",
        "deaths",
        "skipped_updates",
        "rewinds",
        "frozen",
        "cache",
        "conditions",
        "proof",
        "tokens_per_second",
        "model_flops_utilisation",
        "model_flops_utilisation_reason",
        "stages",
    ]
    assert result.clocks == {0: 6, 1: 6}
    assert isinstance(result.eval["clock"], int)
    assert result.staleness.bound_clock_distance == 2
    assert [(stage.vw, stage.weight_bytes) for stage in result.stages] == [(0, 8192), (1, 8192)]


def test_results_of_before_stages_told_of_their_memory_are_still_read() -> None:
    older = {key: value for key, value in RESULT.items() if key != "stages"}
    assert TrainResult.from_json(older).stages == ()


def test_results_of_before_evaluations_were_listed_are_still_read() -> None:
    older = {key: value for key, value in RESULT.items() if key != "evaluations"}
    assert TrainResult.from_json(older).evaluations == EvaluationResults(0, None, ())
