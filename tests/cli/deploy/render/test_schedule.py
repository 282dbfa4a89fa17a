"""`hetpipe render schedule`: the picture, the file, the JSON, and what cannot be drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app


def rendered(*arguments: str, columns: int = 100) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["render", "schedule", *arguments])


def as_json(*arguments: str) -> dict[str, Any]:
    result = rendered(*arguments, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_picture_is_as_wide_as_the_screen() -> None:
    wide, narrow = rendered(columns=180), rendered(columns=60)
    assert wide.exit_code == narrow.exit_code == 0
    assert sum(line.startswith("time") for line in wide.stdout.splitlines()) == 1
    assert sum(line.startswith("time") for line in narrow.stdout.splitlines()) == 3
    assert wide.stdout.startswith("HetPipe: weights wave, schedule 1f1b\n4 stages, 8 minibatches, N = 4 per wave")


def test_a_file_can_be_had_beside_the_picture() -> None:
    result = rendered("--weights", "double_buffer", "--svg", "2bw.svg")
    assert result.exit_code == 0, result.output
    assert "the picture is in 2bw.svg" in result.stdout
    assert "stage 0 [F1][F2]" in result.stdout
    assert ET.parse("2bw.svg").getroot().get("class") == "schedule"


def test_json_has_every_box() -> None:
    answer = as_json("--weights", "predict", "--minibatches", "5", "--svg", "p.svg")
    assert answer["pipeline"] == {
        "num_stages": 4,
        "num_minibatches": 5,
        "weights": "predict",
        "schedule": "1f1b",
        "minibatches_per_wave": 4,
        "accumulate": 1,
        "forward_units": 1,
        "backward_units": 2,
    }
    assert answer["minibatches_per_update"] == 1
    assert answer["end"] == 24
    assert answer["bubble"] == pytest.approx(9 / 24)
    assert answer["steady_utilisation"] == 1.0
    first = answer["stages"][0]
    assert {key: first[key] for key in ("stage", "utilisation", "most_in_flight", "weight_buffers")} == {
        "stage": 0,
        "utilisation": 15 / 24,
        "most_in_flight": 4,
        "weight_buffers": 2,
    }
    assert len(first["boxes"]) == 10
    assert first["boxes"][5] == {"kind": "forward", "p": 5, "start": 12, "end": 13, "through": 1, "steps_ahead": 3}
    assert first["updates"][0] == {"at": 12, "through": 1}
    assert Path("p.svg").exists()


def test_options_reach_the_timeline() -> None:
    answer = as_json(
        *("--stages", "3", "--minibatches", "6", "--weights", "stash", "--minibatches-per-wave", "6"),
        *("--accumulate", "2", "--backward-time", "3"),
    )
    assert answer["minibatches_per_update"] == 2
    assert [update["through"] for update in answer["stages"][2]["updates"]] == [2, 4, 6]
    assert {box["end"] - box["start"] for box in answer["stages"][0]["boxes"]} == {1, 3}


@pytest.mark.parametrize(
    ("arguments", "n"),
    [
        (["--stages", "2", "--weights", "stash"], 4),
        (["--stages", "6", "--weights", "stash"], 6),
        (["--stages", "6"], 4),
        (["--stages", "6", "--weights", "stash", "--accumulate", "4"], 8),
    ],
)
def test_the_default_of_n_is_a_jobs_unless_the_policy_needs_more(arguments: list[str], n: int) -> None:
    assert as_json(*arguments)["pipeline"]["minibatches_per_wave"] == n


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stages", "0"], "--stages is 0; give at least 1"),
        (["--minibatches", "0"], "--minibatches is 0; give at least 1"),
        (["--backward-time", "0"], "--backward-time is 0; give at least 1"),
        (["--minibatches-per-wave", "-2"], "--minibatches-per-wave is -2; give at least 1"),
        (["--accumulate", "0"], "--accumulate is 0; give at least 1"),
        (["--stages", "65"], "--stages is 65, too large for a readable picture; give at most 64"),
        (["--minibatches", "1001"], "--minibatches is 1001, too large for a readable picture"),
        (["--weights", "stsh"], "--weights 'stsh' is unknown; did you mean `stash`?"),
        (["--schedule", "1f2b"], "--schedule '1f2b' is unknown; did you mean `1f1b`?"),
        (
            ["--weights", "stash", "--schedule", "gpipe"],
            "--schedule is gpipe, but the weight versions of `stash` are defined by the strict 1F1B order; use auto or",
        ),
        (["--schedule", "gpipe"], "which is what `weights: flush` is for"),
        (["--weights", "stash", "--minibatches-per-wave", "3"], "needs at least 4 minibatches per wave, not 3"),
        (["--accumulate", "3", "--minibatches-per-wave", "4"], "3 minibatches per update do not divide the 4 of a"),
        (["--weights", "flush", "--accumulate", "4"], "flush makes one update per wave; leave it out"),
        (["--svg", "nowhere/x.svg"], "cannot write nowhere/x.svg: No such file or directory; give --svg a file in a"),
    ],
)
def test_what_cannot_be_drawn_is_said(arguments: list[str], said: str) -> None:
    result = rendered(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not result.stdout
