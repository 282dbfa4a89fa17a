"""`python -m tests.cli.golden_schedules` rewrites the timelines that `test_render_schedule` compares with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hetpipe.decide.schedule.timeline import Pipeline, play
from hetpipe.report.schedule_picture import picture_lines
from hetpipe.report.schedule_svg import draw_schedule

FOLDER = Path(__file__).with_name("golden") / "schedules"

#: Name → what is played, and the columns of the screen.
TEXTS: Mapping[str, tuple[Pipeline, int]] = {
    "2bw-figure-2": (Pipeline(num_stages=4, num_minibatches=12, weights="double_buffer"), 240),
    "2bw-figure-3-gpipe": (Pipeline(num_stages=2, num_minibatches=8, weights="flush", schedule="gpipe"), 80),
    "2bw-figure-3-flush": (Pipeline(num_stages=2, num_minibatches=8, weights="flush"), 80),
    "pipedream": (Pipeline(num_stages=4, num_minibatches=8, weights="stash"), 100),
    "pipeoptim-figure-1e": (Pipeline(num_stages=4, num_minibatches=8, weights="predict"), 100),
    "spectrain-accumulated": (
        Pipeline(num_stages=3, num_minibatches=7, weights="spectrain", accumulate=2, backward_units=1),
        60,
    ),
}

SVG = Pipeline(num_stages=2, num_minibatches=6, weights="predict")


def text_of(name: str) -> str:
    """The picture as a terminal shows it."""
    pipeline, width = TEXTS[name]
    return "".join(f"{line}\n" for line in picture_lines(play(pipeline), width))


def golden_files() -> dict[Path, str]:
    """Every file and what belongs into it."""
    files = {FOLDER / f"{name}.txt": text_of(name) for name in TEXTS}
    return {**files, FOLDER / "predict.svg": draw_schedule(play(SVG))}


def main() -> None:
    """Rewrite all files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in golden_files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
