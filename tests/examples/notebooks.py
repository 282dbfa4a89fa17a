"""`make notebooks`: the notebooks of `examples/notebooks`, each run in an empty folder.

It needs what `requirements-notebooks.lock` has; `make notebooks` puts that into `build/notebooks`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))

#: Of one notebook, on two busy cores; a cell that takes longer is interrupted.
BUDGET_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of code."""

    notebook: Path
    index: int
    """Among all cells of its notebook."""
    text: str

    def __str__(self) -> str:
        return f"{self.notebook.name}, cell {self.index}"


def cells(notebook: Path) -> Iterator[Cell]:
    """The cells of code of a notebook, in order."""
    for index, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            yield Cell(notebook, index, "".join(cell["source"]))


def run(notebook: Path, folder: Path) -> float:
    """Run a notebook in `folder`; the seconds it took.

    Raises:
        CellExecutionError: a cell raised; the message has its traceback.
        CellTimeoutError: a cell took too long.
    """
    import nbformat  # not installed by `make setup`
    from nbclient import NotebookClient

    began = time.monotonic()
    document = nbformat.read(notebook, as_version=4)
    client = NotebookClient(
        document,
        timeout=BUDGET_SECONDS,
        startup_timeout=BUDGET_SECONDS,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    return time.monotonic() - began


def main() -> int:
    """Run all; the exit status."""
    late = False
    for notebook in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            seconds = run(notebook, Path(folder))
        late = late or seconds > BUDGET_SECONDS
        sys.stdout.write(f"{notebook.name}: {seconds:.0f} s of at most {BUDGET_SECONDS}\n")
        sys.stdout.flush()
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
