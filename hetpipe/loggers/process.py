"""The logging process: reads messages (`message`), writes them to all loggers, and reports each failed logger once.

The state by which a later process, of the next coordinator or of a resumed run, continues the same curves is in
`RUN_DIR/loggers.json`: the ids of the run at each logger, and the last step of each series.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from hetpipe.durable import write_durably
from hetpipe.loggers.kinds import KINDS, Kept, Logger
from hetpipe.loggers.message import Opening, StepRewind, Values
from hetpipe.loggers.series import Series
from hetpipe.values import wire

#: In the folder of a run.
STATE_FILE = "loggers.json"

#: Called with the name of a failed logger and the reason.
Report = Callable[[str, str], None]


def log_lines(lines: Iterable[bytes], report: Report, *, kinds: Mapping[str, Callable[..., Logger]] = KINDS) -> None:
    """Log a run until the stream of messages ends.

    Args:
        lines: the opening message, then values.
        report: called for each logger that fails; that logger is not used afterwards.
        kinds: name → class of the loggers.
    """
    source = iter(lines)
    first = next(source, None)
    if first is None:
        return
    opening: Opening = wire.from_json(Opening, first)
    state = _State.read(opening)
    loggers = _Loggers(report)
    for name, options in opening.options.items():
        loggers.open(name, partial(kinds[name], opening, options, state.kept.setdefault(name, {})))
    state.write()
    for line in source:
        message = json.loads(line)
        if "step" not in message:
            state.series.repeat()
            continue
        values: Values = wire.revive(Values, message)
        admitted = state.series.admit(values.step, values.values)
        if admitted:
            loggers.log(Values(values.step, admitted, values.wall))
            state.write()
    loggers.close()


class _Loggers:
    """The loggers that have not failed."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._open: dict[str, Logger] = {}

    def open(self, name: str, begin: Callable[[], Logger]) -> None:
        with self._watching(name):
            self._open[name] = begin()

    def log(self, values: Values) -> None:
        for name, logger in list(self._open.items()):
            with self._watching(name):
                logger.log(values)
                logger.flush()

    def close(self) -> None:
        for name, logger in list(self._open.items()):
            with self._watching(name):
                logger.close()

    @contextmanager
    def _watching(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a library raises must not end the others
            self._open.pop(name, None)
            self._report(name, f"{type(error).__name__}: {error}")


class _State:
    """The content of `loggers.json`."""

    def __init__(self, path: Path, kept: dict[str, Kept], series: Series) -> None:
        self._path = path
        self.kept = kept
        self.series = series

    @classmethod
    def read(cls, opening: Opening) -> _State:
        """Read the state of this run, or else of the run that it resumes."""
        path = Path(opening.run_dir) / STATE_FILE
        places = [path, *([Path(opening.previous) / STATE_FILE] if opening.previous else [])]
        for place in places:
            try:
                values = json.loads(place.read_bytes())
                kept = {str(name): dict(found) for name, found in values["loggers"].items()}
                series = Series.of(values["series"])
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            series.repeat()
            return cls(path, kept, series)
        return cls(path, {}, Series())

    def write(self) -> None:
        values = {"version": 1, "loggers": self.kept, "series": self.series.to_object()}
        write_durably(self._path, f"{json.dumps(values)}\n".encode())


def opening_line(opening: Opening) -> bytes:
    """The first line, which opens the stream."""
    return f"{wire.to_json(Opening, opening)}\n".encode()


def line_of(message: Values | StepRewind) -> bytes:
    """A line after the first."""
    return f"{wire.to_json(type(message), message)}\n".encode()


def main() -> int:
    """Log the messages on standard input; report failures on standard output, one JSON array per line."""
    output = sys.stdout.fileno()
    # Whatever libraries print goes to the log of this process, not into the reports.
    sys.stdout = sys.stderr

    def report(name: str, sentence: str) -> None:
        # After the end of the run nobody reads reports, and the other loggers are still to be written.
        with suppress(BrokenPipeError):
            os.write(output, f"{json.dumps([name, sentence])}\n".encode())

    log_lines(sys.stdin.buffer, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
