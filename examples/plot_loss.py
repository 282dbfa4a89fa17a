"""The losses of a run as an SVG picture: `python -m examples.plot_loss RUN_DIR loss.svg`.

The line is the training loss, a dot each evaluation; x counts the minibatches of all virtual workers. Of several runs,
`python -m examples.plot_loss RUN_DIR RUN_DIR … losses.svg`, the lines are the training losses over seconds.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.pictures import lines
from hetpipe.comparison.statistics import training_curve
from hetpipe.observe.metrics import read_metrics

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 40, 45
NUM_TICKS = 5


@dataclass(frozen=True)
class Scale:
    """Values of an axis to pixels."""

    least: float
    most: float
    first: float
    last: float
    """Pixels of `least` and of `most`."""

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.least) / (self.most - self.least or 1.0)
        return round(self.first + share * (self.last - self.first), 1)

    @property
    def ticks(self) -> list[float]:
        """Round values in the range."""
        rough = (self.most - self.least or 1.0) / NUM_TICKS
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        return [step * number for number in range(math.ceil(self.least / step), math.floor(self.most / step) + 1)]


def draw(title: str, training: Points, evaluations: Points) -> str:
    """The picture; at least one point of training, of at least one minibatch."""
    values = [y for _, y in (*training, *evaluations)]
    x_of = Scale(0.0, max(x for x, _ in (*training, *evaluations)), LEFT, WIDTH - RIGHT)
    y_of = Scale(min(values), max(values), HEIGHT - BOTTOM, TOP)
    line = " ".join(f"{x_of(x)},{y_of(y)}" for x, y in training)
    parts = [
        *(_text(x_of(x), HEIGHT - BOTTOM + 18, f"{x:g}", "middle") for x in x_of.ticks),
        *(_text(LEFT - 8, y_of(y) + 4, f"{y:g}", "end") for y in y_of.ticks),
        *(_rule(LEFT, y_of(y), WIDTH - RIGHT, y_of(y)) for y in y_of.ticks),
        _text(WIDTH / 2, HEIGHT - 8, "minibatches", "middle"),
        _text(LEFT, 22, f"{title}: training loss, and evaluations as dots", "start"),
        f'<polyline points="{line}" fill="none" stroke="#2166ac" stroke-width="1.5"/>',
        *(f'<circle cx="{x_of(x)}" cy="{y_of(y)}" r="4" fill="#b2182b"/>' for x, y in evaluations),
    ]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([start, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#333">{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#ddd"/>'


def losses_of(run_dir: Path) -> tuple[Points, Points]:
    """Training loss and evaluations of a run, each as (minibatches, loss)."""
    waves = read_metrics(run_dir)
    training = [(point.minibatches, point.values["loss"]) for point in training_curve(waves, began=0.0)]
    file = run_dir / "evaluations.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    evaluations = [(one["minibatches"], one["values"]["loss"]) for one in lines]
    return training, [(x, y) for x, y in evaluations if y is not None]


def over_seconds(run_dir: Path) -> Points:
    """Training loss of a run as (seconds since its first wave, loss)."""
    waves = read_metrics(run_dir)
    return [(point.seconds, point.values["loss"]) for point in training_curve(waves, began=waves[0].t)]


def main(arguments: Sequence[str]) -> str:
    """Draw the runs of all arguments but the last into the file of that one; an error for the shell, or nothing."""
    if len(arguments) < 2:
        return "usage: python -m examples.plot_loss RUN_DIR… FILE.svg"
    *run_dirs, file = map(Path, arguments)
    losses = {run_dir: losses_of(run_dir) for run_dir in run_dirs}
    for run_dir, (training, _) in losses.items():
        if not training:
            return (
                f"{run_dir} has no losses yet (metrics/vw-*.jsonl); give the folder of a run, as `hetpipe train` "
                "names it"
            )
    name = json.loads((run_dirs[0] / "job.json").read_text())["name"]
    if len(run_dirs) == 1:
        file.write_text(draw(name, *losses[run_dirs[0]]))
    else:
        curves = {run_dir.name: over_seconds(run_dir) for run_dir in run_dirs}
        file.write_text(lines(f"{name}: training loss over seconds", curves))
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or 0)
