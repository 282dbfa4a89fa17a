"""The folder of a run: named, found, written and read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetpipe.errors import JobError, UserError
from hetpipe.runs.run_folder import RunFolder, RunRecord, find_run
from tests.cli.fakes import RESULT, small_job
from tests.support.fake_clock import FakeClock


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(name: str = "small", *, wall: float = 1_700_000_000.0, run_dir: Path | None = None) -> RunFolder:
    folder = RunFolder.create(run_dir, name=name, clock=FakeClock(wall=wall))
    folder.write_record(RunRecord(run_dir=str(folder.path), name=name, host="here", started_wall=wall))
    return folder


def test_a_run_is_named_after_its_job_and_the_time() -> None:
    first, second, third = make(), make(), make()
    assert first.path.name.startswith("small-2023111")
    assert len(first.path.name) == len("small-20231114-221320")
    assert [second.path.name, third.path.name] == [f"{first.path.name}-2", f"{first.path.name}-3"]
    assert first.logs.is_dir()
    assert first.path.is_absolute()


def test_latest_names_the_newest_run_that_came_to_train_wherever_it_is(tmp_path: Path) -> None:
    make()
    assert not Path("runs/latest").exists()
    second = make()
    second.point_latest()
    make()
    assert Path("runs/latest").readlink() == Path(second.path.name)
    elsewhere = make(run_dir=tmp_path / "elsewhere" / "mine")
    elsewhere.point_latest()
    assert Path("runs/latest").resolve() == elsewhere.path


def test_a_folder_with_a_run_is_not_used_again() -> None:
    run_dir = Path("mine")
    run_dir.mkdir()
    make(run_dir=run_dir)
    with pytest.raises(UserError, match="already contains a run"):
        make(run_dir=run_dir)


def test_a_folder_that_cannot_be_made() -> None:
    Path("file").write_text("")
    with pytest.raises(UserError, match="cannot create the run's folder file/run"):
        make(run_dir=Path("file/run"))


def test_a_latest_that_is_no_link_is_left_alone() -> None:
    Path("runs/latest").mkdir(parents=True)
    make().point_latest()
    assert Path("runs/latest").is_dir()
    assert not Path("runs/latest").is_symlink()


def test_the_newest_run_is_found_by_its_start() -> None:
    newest = make("a", wall=1_700_000_500.0)
    make("b", wall=1_700_000_000.0)
    (Path("runs") / "no-run").mkdir()
    (Path("runs") / "torn").mkdir()
    (Path("runs") / "torn" / "run.json").write_text("{")
    assert find_run(None).path == newest.path


def test_a_run_elsewhere_is_found_through_latest(tmp_path: Path) -> None:
    elsewhere = make(run_dir=tmp_path / "elsewhere", wall=1_800_000_000.0)
    make("older")
    elsewhere.point_latest()
    assert find_run(None).path == elsewhere.path
    assert find_run(Path("runs/latest")).path == elsewhere.path


def test_no_run_to_be_found() -> None:
    with pytest.raises(UserError, match=r"there is no run in runs/; start one with `hetpipe train job.yaml`"):
        find_run(None)
    with pytest.raises(UserError, match="nowhere: no such folder"):
        find_run(Path("nowhere"))


def test_record_and_job_come_back_as_they_were_written() -> None:
    folder = make()
    record = RunRecord(
        run_dir=str(folder.path), name="small", host="here", started_wall=1.5, job_id="small-1", pids={"agent": 7}
    )
    folder.write_record(record)
    folder.write_job(small_job())
    assert folder.read_record() == record
    assert folder.read_job() == small_job()
    assert not list(folder.path.glob(".*")), "nothing unfinished is left"


def test_results() -> None:
    folder = make()
    assert folder.read_result() is None
    folder.write_result("finished", RESULT)
    finished = folder.read_result()
    assert finished is not None
    assert (finished.state, finished.errors, finished.values["waves"]) == ("finished", (), 12)
    folder.write_result("failed", {"errors": ["stage 0 was killed"]})
    failed = folder.read_result()
    assert failed is not None
    assert (failed.state, failed.errors) == ("failed", ("stage 0 was killed",))


def test_what_is_no_run_is_said_so() -> None:
    folder = RunFolder(Path("empty"))
    folder.path.mkdir()
    with pytest.raises(UserError, match=r"is not a run: it has no job.json"):
        folder.read_job()
    with pytest.raises(UserError, match=r"is not a run: it has no run.json"):
        folder.read_record()
    for name in ("job.json", "run.json", "result.json"):
        (folder.path / name).write_text("[")
    for read in (folder.read_job, folder.read_record, folder.read_result):
        with pytest.raises(UserError, match="cannot be read"):
            read()
    (folder.path / "result.json").write_text("[]")
    with pytest.raises(UserError, match="does not contain a JSON object"):
        folder.read_result()
    (folder.path / "job.json").write_text(json.dumps({"name": "x"}))
    with pytest.raises(JobError):
        folder.read_job()


def test_fragments_become_one_trace() -> None:
    folder = make()
    folder.merge_trace()
    assert not (folder.path / "trace.json").exists()
    (folder.path / "trace").mkdir()
    (folder.path / "trace" / "vw-0-stage-0.jsonl").write_text("\n")
    folder.merge_trace()
    assert json.loads((folder.path / "trace.json").read_text())["traceEvents"] == []
