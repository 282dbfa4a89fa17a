"""A run that writes a summary: what is still verified, and what the checker says that it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checker import check_run
from hetpipe.checker.report import Kind
from hetpipe.errors import UserError
from hetpipe.runs.judge import count_violations
from tests.numerics.compare import MOMENTUM, ROOT, SGD, Case
from tests.support.in_process import InProcessRun, run_in_process

Line = dict[str, Any]


def trained(folder: Path, history: str = "summary", **values: Any) -> Path:
    """A short run with two barriers and a short wave at its end; writes `history`."""
    case = Case(
        **{"weights": "wave", "stages": 2, "wave": 2, "optimizer": SGD, "workers": 2, "staleness": 1, **values},
        model="mlp32",
        data="more32",
        minibatches=13,
        every_waves=3,
    )
    job = case.job().model_copy(update={"history": history})
    run_in_process(InProcessRun(job=job, run_dir=folder, import_path=ROOT, delay_seconds=0.0005, delay_seed=1))
    return folder


def rewrite(run_dir: Path, name: str, change: Callable[[Line], Line | None]) -> list[str]:
    """Change lines of a history or leave them out; the kinds of violations that follow."""
    path = run_dir / "history" / f"{name}.jsonl"
    lines = [new for line in path.read_text().splitlines() if (new := change(json.loads(line))) is not None]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return list(check_run(run_dir).kinds())


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"staleness": 0, "deterministic": True, "stages": 3, "wave": 3},
        {"weights": "double_buffer"},
        {"pull": "required"},
        {"weights": "spectrain", "optimizer": MOMENTUM},
        {"weights": "stash", "kind": "none", "workers": 1},
        {"weights": "flush", "kind": "allreduce"},
    ],
    ids=str,
)
def test_every_policy_writes_one_line_per_wave_and_stage_and_is_verified(
    values: dict[str, Any], tmp_path: Path
) -> None:
    report = check_run(trained(tmp_path, **values), require_complete=True)
    lines = [
        json.loads(line)["event"]
        for path in (tmp_path / "history").glob("vw-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    num_workers, stages, wave = values.get("workers", 2), values.get("stages", 2), values.get("wave", 2)

    assert report.ok, "\n".join(report.lines())
    assert report.minibatches == 13 * num_workers
    assert lines == ["wave"] * (num_workers * stages * -(-13 // wave)) or set(lines) == {"wave"}
    assert any(line.startswith("not judged, because the history is a summary") for line in report.lines())
    assert report.to_json()["history"] == "summary"


class TestWhatIsVerified:
    @pytest.fixture
    def run_dir(self, tmp_path: Path) -> Path:
        return trained(tmp_path)

    def test_the_staleness_bound_of_each_wave(self, run_dir: Path) -> None:
        """The first minibatch of wave 2 needs clock 0 and of wave 4 more; here it never got newer ones."""

        def stale(line: Line) -> Line:
            return {**line, "first_clock": 0, "last_clock": 0}

        assert Kind.STALE_CLOCK in rewrite(run_dir, "vw-0-stage-0", stale)

    def test_pulls_that_were_not_required(self, tmp_path: Path) -> None:
        """Minibatch 4 may use clock 0 with D = 1, which was in use."""
        run_dir = trained(tmp_path, pull="required")

        def pulled(line: Line) -> Line:
            return {**line, "last_clock": 1} if line["wave"] == 1 else line

        assert Kind.NEEDLESS_PULL in rewrite(run_dir, "vw-0-stage-0", pulled)

    def test_one_clock_for_all_stages(self, run_dir: Path) -> None:
        def mixed(line: Line) -> Line:
            return {**line, "last_clock": line["last_clock"] + 1} if line["wave"] == 2 else line

        assert Kind.MIXED_VERSIONS in rewrite(run_dir, "vw-1-stage-1", mixed)

    def test_what_is_committed_was_computed_by_every_stage(self, run_dir: Path) -> None:
        kinds = rewrite(run_dir, "vw-1-stage-1", lambda line: None if line["wave"] == 2 else line)

        assert kinds == [Kind.MINIBATCH_MISSING]

    def test_once(self, run_dir: Path) -> None:
        path = run_dir / "history" / "vw-1-stage-0.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines, lines[1]]))

        assert list(check_run(run_dir).kinds()) == [Kind.MINIBATCH_TWICE]

    def test_minibatches_and_samples_agree(self, run_dir: Path) -> None:
        def short(line: Line) -> Line:
            return {**line, "last": line["first"]} if line["wave"] == 1 else line

        assert rewrite(run_dir, "vw-0-stage-1", short) == [Kind.SAMPLE_COUNT]

    def test_exactly_once_application(self, run_dir: Path) -> None:
        path = run_dir / "history" / "shard-0.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        again = next(line for line in lines if '"event":"apply"' in line)
        path.write_text("".join([*lines, again]))
        report = check_run(run_dir)

        assert (list(report.kinds()), report.waves_applied_twice) == ([Kind.WAVE_APPLIED_TWICE], 1)


def test_off_writes_nothing_and_says_that_nothing_is_verified(tmp_path: Path) -> None:
    said: list[str] = []
    trained(tmp_path, "off")
    with pytest.raises(UserError, match="`history: off`, so nothing can be verified"):
        check_run(tmp_path)

    assert not (tmp_path / "history").exists()
    assert count_violations(tmp_path, say=said.append) is None
    assert said == ["no history was written (`history: off`), so the run cannot be verified"]


def test_a_summary_is_a_fraction_of_the_full_history(tmp_path: Path) -> None:
    sizes = [
        sum(path.stat().st_size for path in (trained(tmp_path / kind, kind, wave=4) / "history").iterdir())
        for kind in ("full", "summary")
    ]

    assert sizes[1] < 0.6 * sizes[0]
