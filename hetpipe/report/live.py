"""The live table on a terminal: needs rich."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hetpipe.clock import Clock
from hetpipe.report.conditions import EventConditions, condition_text
from hetpipe.report.progress import (
    STATE_TEXTS,
    cells,
    evaluation_text,
    headings,
    measuring_text,
    slow_text,
    totals_text,
)
from hetpipe.report.text import duration
from hetpipe.report.view import View
from hetpipe.values.events import (
    ConditionCleared,
    ConditionRaised,
    Evaluated,
    JobEnded,
    JobEvent,
    Measuring,
    Notice,
    ProgressTable,
    Rewound,
    StateChanged,
    Waiting,
)
from hetpipe.values.measurement import ProfileStep

_REFRESHES_PER_SECOND = 4

#: Columns of numbers, from the left: all but the stages.
_TEXT_COLUMNS = {1}


class MeasuringBar:
    """The progress of a measurement as a bar, with the time that remains."""

    def __init__(self, console: Console, beginning: str, clock: Clock) -> None:
        """Describe the work before the first step as `beginning`."""
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            get_time=clock.monotonic,
        )
        self._task = self.progress.add_task(beginning, total=None)

    def show(self, step: ProfileStep) -> None:
        """Show the layer that is being measured."""
        self.progress.update(self._task, description=measuring_text(step), completed=step.done, total=step.total)

    def __rich__(self) -> RenderableType:
        """As part of a larger display."""
        return self.progress.get_renderable()


class LiveView(View):
    """A live table of state, totals, virtual workers, latest evaluation and conditions, below scrolling remarks."""

    def __init__(self, stream: TextIO, *, name: str, clock: Clock) -> None:
        """Start displaying the run of job `name` on the terminal `stream`."""
        self._name = name
        self._clock = clock
        self._began = clock.monotonic()
        self._state = "starting"
        self._has_ended = False
        self._spinner = Spinner("dots")
        self._table: ProgressTable | None = None
        self._evaluated: Evaluated | None = None
        self._conditions = EventConditions()
        #: The current wait, reported every few seconds while it lasts; empty if there is none.
        self._waiting = ""
        #: The measurement of the model's layers, while it lasts.
        self._measuring: MeasuringBar | None = None
        self._live = Live(
            console=Console(file=stream, highlight=False, soft_wrap=False),
            refresh_per_second=_REFRESHES_PER_SECOND,
            get_renderable=self._render,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def show(self, event: JobEvent) -> None:  # noqa: C901 - one per kind of event
        """Implement `View.show`."""
        match event:
            case StateChanged(state=state, remark=remark):
                self._state, self._waiting, self._measuring = STATE_TEXTS[state], "", None
                self._live.refresh()
                if remark:
                    self._print(remark)
            case Waiting(sentence=sentence, seconds=seconds):
                self._waiting = f"waiting for {duration(seconds)}: {sentence}"
                self._live.refresh()
            case Measuring(step=step):
                self._measuring = self._measuring or MeasuringBar(self._live.console, "", self._clock)
                self._measuring.show(step)
                self._waiting = ""
                self._live.refresh()
            case Evaluated():
                self._evaluated = event
            case ProgressTable():
                goes_on = self._table is not None and event.samples > self._table.samples
                self._table = event
                if goes_on and self._waiting:
                    self._waiting = ""  # a wait that persists is reported again
                    self._live.refresh()
            case Rewound():
                self._print(event.text, style="bold red")
            case Notice():
                self._print(event.text, style="yellow" if event.severity == "warning" else "")
            case ConditionRaised() | ConditionCleared():
                self._conditions.on_event(event)
                self._print(condition_text(event), style="bold red" if isinstance(event, ConditionRaised) else "")
            case JobEnded(state=state):
                self._state, self._has_ended = STATE_TEXTS[state], True
                self._live.refresh()

    def say(self, sentence: str) -> None:
        """Implement `View.say`."""
        self._print(sentence)

    def close(self) -> None:
        """Implement `View.close`."""
        self._has_ended = True
        self._live.stop()

    def _print(self, text: str, *, style: str = "") -> None:
        self._live.console.print(Text(text, style=style))

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._headline()]
        if self._measuring is not None and not self._has_ended:
            parts.append(self._measuring)
        if self._table is not None:
            parts += [Text(totals_text(self._table)), _drawn(self._table)]
            parts += [Text(slow_text(slow), style="yellow") for slow in self._table.slow]
        if self._evaluated is not None:
            parts.append(Text(evaluation_text(self._evaluated)))
        parts += [Text(line, style="yellow") for line in self._conditions.current()]
        if self._waiting and not self._has_ended:
            parts.append(Text(self._waiting, style="yellow"))
        return Group(*parts)

    def _headline(self) -> RenderableType:
        elapsed = duration(self._clock.monotonic() - self._began)
        words = f"{self._name}: {self._state}, {elapsed}"
        if self._has_ended:
            return Text(words)
        self._spinner.update(text=Text(words))
        return self._spinner


def _drawn(progress: ProgressTable) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings(progress)):
        is_text = index in _TEXT_COLUMNS
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in cells(progress):
        table.add_row(*row)
    return table
