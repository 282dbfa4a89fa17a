"""The folders of a run that went back to a checkpoint."""

from __future__ import annotations

from pathlib import Path

from hetpipe.values.events import Submission
from hetpipe.values.rewinds import MODEL_FILE, discard_model_file, rewind_folder, run_folders


def test_they_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    assert run_folders(tmp_path) == [tmp_path]
    for number in (10, 9, 1):
        Path(rewind_folder(str(tmp_path), number)).mkdir()
    for name in ("rewind-0", "rewind-x", "rewind-01", "rewind-1-old", "rewind-" + 10 * "9"):
        (tmp_path / name).mkdir()
    (tmp_path / "rewind-11").write_text("no folder")

    assert run_folders(tmp_path) == [tmp_path, *(tmp_path / f"rewind-{number}" for number in (1, 9, 10))]


def test_a_submission_knows_the_folder_of_its_run() -> None:
    first = Submission("0123456789", "{}", "/runs/rewind-7", "/code")

    assert first.first_run_dir == "/runs/rewind-7"
    rewound = Submission("0123456789", "{}", rewind_folder("/runs/rewind-7", 2), "/code", rewinds=2)
    assert rewound.first_run_dir == "/runs/rewind-7"


def test_the_inspected_model_is_deleted_with_what_a_killed_inspection_left(tmp_path: Path) -> None:
    for name in (MODEL_FILE, f"{MODEL_FILE}.tmp", "plan.json"):
        (tmp_path / name).write_text("bytes")
    for _ in range(2):
        discard_model_file(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
