"""Run folders of a job that was rewound to a checkpoint: `rewind-N` in the folder of its run, N = 1, 2, ….

Each has the layout of a resumed run: a plan, facts, histories, checkpoints of its own.
"""

from __future__ import annotations

import re
from pathlib import Path

from hetpipe.durable import TEMPORARY

#: File in the first folder of a run: the inspected model, from which its stages are built (`pipeline/model_file.py`).
MODEL_FILE = "initial.safetensors"

#: The folder of a rewind.
REWIND = re.compile(r"rewind-([1-9][0-9]{0,8})")


def first_folder(run_dir: str) -> str:
    """The folder of the run, of its own or of one of its rewinds.

    >>> first_folder("/runs/digits/rewind-2"), first_folder("/runs/digits")
    ('/runs/digits', '/runs/digits')
    """
    path = Path(run_dir)
    return str(path.parent) if REWIND.fullmatch(path.name) else run_dir


def rewind_folder(run_dir: str, number: int) -> str:
    """The folder in which the run in `run_dir` continues after rewind `number`, which counts from 1."""
    return str(Path(run_dir) / f"rewind-{number}")


def next_rewind(run_dir: Path) -> int:
    """The number of the next rewind of the run in `run_dir`: there is no folder with that or a higher number."""
    newest = REWIND.fullmatch(run_folders(run_dir)[-1].name)
    return 1 if newest is None else int(newest[1]) + 1


def run_folders(run_dir: Path) -> list[Path]:
    """All folders of a run: its own, then those of its rewinds, oldest first."""
    found = ((REWIND.fullmatch(path.name), path) for path in run_dir.glob("rewind-*") if path.is_dir())
    return [run_dir, *(path for _, path in sorted((int(match[1]), path) for match, path in found if match))]


def discard_model_file(run_dir: Path) -> None:
    """Delete the inspected model of a run that has ended for good, and what a killed inspection left of it.

    Idempotent. No stage of the run can be built from it afterwards; those that have it memory-mapped are unaffected.

    Raises:
        OSError: a file cannot be deleted.
    """
    for name in (MODEL_FILE, f"{MODEL_FILE}{TEMPORARY}"):
        (run_dir / name).unlink(missing_ok=True)
