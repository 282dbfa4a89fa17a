"""The progress of a measurement: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, TextIO

from hetpipe.clock import Clock
from hetpipe.report.progress import measuring_pairs
from hetpipe.report.text import pairs
from hetpipe.runs.outcome import Output
from hetpipe.runs.shell import Shell
from hetpipe.values.measurement import ProfileStep

#: Interval between lines, in seconds.
LINE_SECONDS = 5.0


class ProfileView(Protocol):
    """A display of measuring steps, as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def show(self, step: ProfileStep) -> None:
        """Show the layer that is being measured."""
        ...


class ProfileLines:
    """One `key=value` line every few seconds, the first at once."""

    def __init__(self, stream: TextIO, clock: Clock, unit: str = "layers") -> None:
        """`unit` is the noun for the counted steps."""
        self._stream = stream
        self._unit = unit
        self._clock = clock
        self._written_at: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """No-op."""

    def show(self, step: ProfileStep) -> None:
        """Implement `ProfileView`."""
        now = self._clock.monotonic()
        if self._written_at is None or now - self._written_at >= LINE_SECONDS:
            self._written_at = now
            self._stream.write(f"{pairs(measuring_pairs(step, self._unit))}\n")
            self._stream.flush()


class ProfileBar:
    """A progress bar."""

    def __init__(self, stream: TextIO, clock: Clock, beginning: str = "importing the model") -> None:
        """Display the work before the first step."""
        # rich is slow to import, and not needed for pipes
        from rich.console import Console

        from hetpipe.report.live import MeasuringBar

        self._bar = MeasuringBar(Console(file=stream), beginning, clock)

    def __enter__(self) -> Self:
        self._bar.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.progress.stop()

    def show(self, step: ProfileStep) -> None:
        """Implement `ProfileView`."""
        self._bar.show(step)


def view_for(
    output: Output, shell: Shell, *, unit: str = "layers", beginning: str = "importing the model"
) -> ProfileView:
    """The display of a measurement: a bar on a terminal, else lines.

    Args:
        output: destination.
        shell: the command's environment.
        unit: the unit of progress, as `layer`.
        beginning: the work before the first step.
    """
    if shell.is_screen(output.people):
        return ProfileBar(output.people, shell.clock, beginning)
    return ProfileLines(output.people, shell.clock, unit)
