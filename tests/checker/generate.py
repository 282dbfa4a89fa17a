"""Rewrites the shipped histories under `corrupted/`: `python -m tests.checker.generate`, from the repository's root."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.checker.corruptions import CORRUPTIONS, corrupted_lines
from tests.checker.scenario import Scenario, write_run

SHIPPED = Path(__file__).parent / "corrupted"


def shipped_names() -> list[str]:
    """The clean history and every corruption whose files are committed."""
    return ["clean", *(name for name, corruption in CORRUPTIONS.items() if corruption.shipped)]


def main() -> None:
    """Write all shipped histories anew."""
    if SHIPPED.exists():
        shutil.rmtree(SHIPPED)
    for name in shipped_names():
        write_run(SHIPPED / name, Scenario(), corrupted_lines(name))


if __name__ == "__main__":
    main()
