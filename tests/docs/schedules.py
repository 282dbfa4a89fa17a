"""The pictures of docs/schedules.md: `python -m tests.docs.schedules` rewrites them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from hetpipe.decide.schedule.timeline import Pipeline, play
from hetpipe.report.schedule_svg import draw_schedule
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "schedules.md"
FOLDER = ROOT / "docs" / "schedules"

#: File → what it shows; in the order of the page.
PICTURES: Mapping[str, Pipeline] = {
    "wave": Pipeline(num_stages=4, num_minibatches=8),
    "wave-fifo": Pipeline(
        num_stages=3, num_minibatches=10, weights="wave", schedule="fifo", minibatches_per_wave=8, backward_units=1
    ),
    "stash": Pipeline(num_stages=4, num_minibatches=8, weights="stash"),
    "vertical": Pipeline(num_stages=4, num_minibatches=8, weights="vertical"),
    "double_buffer": Pipeline(num_stages=4, num_minibatches=12, weights="double_buffer"),
    "flush": Pipeline(num_stages=4, num_minibatches=8, weights="flush"),
    "gpipe": Pipeline(num_stages=4, num_minibatches=8, weights="flush", schedule="gpipe"),
    "predict": Pipeline(num_stages=4, num_minibatches=8, weights="predict"),
    "spectrain": Pipeline(num_stages=4, num_minibatches=8, weights="spectrain"),
}


def picture(name: str) -> str:
    """The text of a file."""
    return draw_schedule(play(PICTURES[name]))


def path_of(name: str) -> Path:
    """The file."""
    return FOLDER / f"{name}.svg"


def main() -> int:
    """Rewrite the files; the exit status."""
    FOLDER.mkdir(exist_ok=True)
    for name in PICTURES:
        path_of(name).write_text(picture(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
