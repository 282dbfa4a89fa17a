"""No benchmark rots: each is a part of the one table, and continuous integration runs the whole table, small."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.__main__ import PARTS

ROOT = Path(__file__).parents[2]

#: What measures by itself; the others are what these measure with.
_HELPERS = {
    "__init__",
    "__main__",
    "against",
    "alone",
    "bare",
    "certificates",
    "data_parallel",
    "graphs",
    "hand_overs",
    "memory_layers",
    "minimal",
    "model",
    "paired",
    "paper",
    "pictures",
    "records",
    "sizes",
    "sleeper",
    "stages",
    "turns",
    "unequal",
    "vpipe",
}


def test_every_benchmark_is_a_part_of_the_table() -> None:
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert modules - _HELPERS == {name.replace("-", "_") for name in PARTS}


def test_continuous_integration_runs_all_of_them() -> None:
    assert re.search(r"^part \d+ bench-smoke$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert "bench-smoke: $(STAMP)\n\t@$(BIN)/python -m benchmarks --smoke\n" in makefile
