"""Files that the commands of `hetpipe render` write."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from hetpipe.errors import UserError


def check_empty(folder: Path, fix: str) -> None:
    """Reject a folder that is not empty.

    Raises:
        UserError: it is not empty; the message ends with `fix`.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; {fix}")


def copy(source: Path, target: Path) -> None:
    """Copy a file, or a folder with all that is in it.

    Raises:
        UserError: it cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    except (OSError, shutil.Error) as error:
        raise UserError(f"cannot write {target}: {error}; name another place") from error


def write(files: Mapping[Path, str]) -> None:
    """Write texts, and make their folders.

    Raises:
        UserError: one cannot be written.
    """
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; name another place with --out") from error
