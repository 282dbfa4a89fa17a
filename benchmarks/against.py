"""This version against an earlier one, side by side, in turn, many times: `python -m benchmarks.against COMMIT`.

The earlier commit is checked out beside this one, and both run in the same environment. A pair is one run of each, in
turns the one and the other first, so that a machine that drifts or is busy slows both alike. What counts is the ratio
within a pair; of all pairs the geometric mean is told with its 95 % interval (bootstrap over pairs), so that noise is
not taken for a difference, nor a difference for noise.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.records import ROOT

#: What is run in either version: prints seconds (less is better) by name. Both versions need what it imports.
PARTS: Mapping[str, str] = {
    "pipeline": (
        "from benchmarks.pipeline import hetpipe_rate\n"
        "figures = {f'{n} minibatches per wave': 1 / hetpipe_rate(n, 24 // n) for n in (4, 12)}"
    ),
    "wire": (
        "import statistics\n"
        "from benchmarks import wire\n"
        "found = wire.measure(1, 1)\n"
        "figures = {name: statistics.median(found[name]) for name in ('push: whole', 'pull')}"
    ),
    "planner": (
        "from benchmarks import planner\n"
        "figures = {model: planner._figures(planner.Setting(model, 'all types on every node', 600, 16), 3)['seconds']\n"
        "           for model in planner.MODELS}"
    ),
}

_RESAMPLES = 10_000
_LONGEST_RUN_SECONDS = 300.0


def interval(ratios: Sequence[float], *, seed: int = 0) -> tuple[float, float, float]:
    """Geometric mean of ratios, and the bounds of its 95 % interval.

    >>> [round(value, 2) for value in interval([0.5, 2.0] * 8)]
    [1.0, 0.71, 1.41]
    """
    logs = [math.log(ratio) for ratio in ratios]
    draw = random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(_RESAMPLES))
    low, high = means[round(0.025 * _RESAMPLES)], means[round(0.975 * _RESAMPLES)]
    return math.exp(statistics.fmean(logs)), math.exp(low), math.exp(high)


def _seconds(part: str, folder: Path) -> dict[str, float]:
    lines = (
        "import json",
        "if __name__ == '__main__':",
        textwrap.indent(PARTS[part], "    "),
        "    print(json.dumps(figures))",
    )
    code = "\n".join(lines)
    script = folder / f".against-{part}.py"
    script.write_text(code)
    try:
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=_LONGEST_RUN_SECONDS,
            check=False,
        )
    finally:
        script.unlink()
    if done.returncode:
        sys.exit(f"{part} in {folder}: {done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(part: str, before: Path, now: Path, pairs: int) -> dict[str, list[float]]:
    """Seconds of this version / seconds of the earlier one, pair by pair, by what is timed."""
    ratios: dict[str, list[float]] = {}
    for number in range(pairs):
        folders = (before, now) if number % 2 == 0 else (now, before)
        found = {folder: _seconds(part, folder) for folder in folders}
        for name, seconds in found[now].items():
            ratios.setdefault(name, []).append(seconds / found[before][name])
        sys.stderr.write(f"{part}: pair {number + 1} of {pairs}\n")
    return ratios


def main(
    commit: Annotated[str, typer.Argument(help="The earlier version.")],
    parts: Annotated[list[str] | None, typer.Argument(help=f"Any of {', '.join(PARTS)}; all without one.")] = None,
    *,
    pairs: Annotated[int, typer.Option(help="Runs of each version.", min=2)] = 15,
) -> None:
    """Print time now / time at COMMIT for parts of hetpipe, each with its 95 % interval; below 1 is faster."""
    unknown = sorted(set(parts or ()) - set(PARTS))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="hetpipe-against-") as folder:
        before = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(before), commit], check=True)
        try:
            for part in parts or PARTS:
                for name, ratios in measure(part, before, ROOT, pairs).items():
                    mean, low, high = interval(ratios)
                    sys.stdout.write(f"{part}, {name}: {mean:.3f} ({low:.3f} to {high:.3f}), {pairs} pairs\n")
                    sys.stdout.flush()
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)


if __name__ == "__main__":
    typer.run(main)
