"""`hetpipe top` on a terminal: needs rich."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hetpipe.cli.look.top import Picture, Screen


class LiveScreen(Screen):
    """Shows each snapshot in place of the previous one, truncated to the terminal's width."""

    def __init__(self, stream: TextIO, current: Path) -> None:
        """Start drawing on `stream`; paths are relative to the folder `current`."""
        self._current = current
        console = Console(file=stream, highlight=False)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def show(self, picture: Picture) -> None:
        """Implement `Screen.show`."""
        lines = "\n".join(picture.lines(self._current))
        self._live.update(Text(lines, no_wrap=True, overflow="ellipsis"), refresh=True)

    def say(self, sentence: str) -> None:
        """Print a sentence above the snapshot, permanently."""
        self._live.console.print(Text(sentence))

    def close(self) -> None:
        """Implement `Screen.close`."""
        self._live.stop()
