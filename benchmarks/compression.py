"""(z) Pushes rounded to bfloat16 (`sync.compress_pushes`): whether training gets as far, and the bytes.

The digits example, with the same seeds with and without rounding, in turn. Deterministic runs, so the two of a seed
differ in nothing but the rounding.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hetpipe
from benchmarks.sizes import sized

JOB = Path(__file__).parents[1] / "examples" / "digits" / "job.yaml"
EPOCHS = sized(20, 1)
KINDS = ("none", "bfloat16")


def train(compression: str, seed: int) -> Mapping[str, float]:
    """Loss and accuracy on the test data after the last epoch, and MB pushed in all."""
    with tempfile.TemporaryDirectory() as folder:
        result = hetpipe.train(
            JOB,
            run_dir=Path(folder) / "run",
            progress="none",
            seed=seed,
            epochs=EPOCHS,
            sync={"compress_pushes": compression, "deterministic": True},
        )
        last = {name: float(result.eval[name] or 0.0) for name in ("loss", "accuracy")}
        return {**last, "MB pushed": result.bytes.pushed / 1e6}


def measure(rounds: int) -> dict[str, Any]:
    """Each kind seed by seed, and the differences of the pairs."""
    found: dict[str, list[Mapping[str, float]]] = {kind: [] for kind in KINDS}
    for seed in range(rounds):
        for kind in KINDS:
            found[kind].append(train(kind, seed))
    figures: dict[str, Any] = {
        kind: {name: [round(run[name], 4) for run in runs] for name in runs[0]} for kind, runs in found.items()
    }
    exact, rounded = found.values()
    figures["rounded - exact, median"] = {
        name: round(statistics.median(b[name] - a[name] for a, b in zip(exact, rounded, strict=True)), 4)
        for name in ("loss", "accuracy")
    }
    pushed = [sum(run["MB pushed"] for run in runs) for runs in (exact, rounded)]
    figures["bytes pushed, rounded / exact"] = round(pushed[1] / pushed[0], 3)
    return figures
