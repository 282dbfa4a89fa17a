"""Structured logs: one JSON object per line, one file per process.

A process calls `configure_logging` once, before anything else; every module has `_log = get_logger(__name__)` and calls
`_log.info("stage_started", stage=1)` with a short event name and values, never a formatted sentence. Records of
libraries that use the standard library (gRPC, Redis) are written to the same file from WARNING on.

The subject of lines (run, job, virtual worker, stage, shard, wave) is bound once and added to every line: for the whole
process by `configure_logging`, for the rest of a thread's work by `bind_context`.

In a program that never calls `configure_logging` (a user's own), lines go to the standard library's logger `hetpipe`,
and are discarded unless the user adds a handler.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import structlog

from hetpipe.clock import SYSTEM_CLOCK, Clock

#: Limit of strings, longer ones are truncated: a log line may quote input of a peer or a user.
MAX_TEXT_LENGTH = 4000
#: Deeper containers and longer lists are written as text, truncated in the same way.
_MAX_DEPTH = 4
_MAX_ITEMS = 100

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Logger = structlog.typing.FilteringBoundLogger


def get_logger(name: str) -> Logger:
    """The logger of a module (`__name__`). Thread-safe; may be called before `configure_logging`."""
    # Not structlog's own factory, which prints to standard output without a configuration.
    return cast("Logger", structlog.wrap_logger(_LibraryLogger(name)))


def bind_context(**values: object) -> None:
    """Bind `values` to every later line of this thread; a new value replaces the old one.

    Takes about a microsecond, so a wave can be bound when it begins.
    """
    structlog.contextvars.bind_contextvars(**values)


def configure_logging(
    path: Path | None, *, role: str, level: str = "info", clock: Clock = SYSTEM_CLOCK, **bound: object
) -> None:
    """Send this process's logs to `path` (appended to, its folder made), or to standard error if it is None.

    Each line is one write of one JSON object with `t` (UTC, ISO 8601), `level`, `event`, `logger`, `role`, `pid`,
    `bound`, and what the thread has bound. Control and non-ASCII characters are escaped, so a line cannot forge another
    or move a terminal's cursor.
    A second call replaces the first.

    Args:
        path: the log file.
        role: of this process: `coordinator`, `parameter_server`, `agent`, `stage`.
        level: lowest level written: `debug`, `info`, `warning` or `error`.
        clock: gives `t`.
        bound: more values for every line, for example `vw=0, stage=1`.

    Raises:
        ValueError: an unknown level.
        OSError: the file cannot be written.
    """
    if level not in _LEVELS:
        raise ValueError(f"unknown log level {level!r}; one of {', '.join(_LEVELS)}")
    global _output  # noqa: PLW0603 - one log per process
    _output = output = _LineOutput(path)
    always = {"role": role, "pid": os.getpid(), **bound}
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _Stamp(clock, always),
        structlog.processors.format_exc_info,
    ]
    render: list[structlog.typing.Processor] = [_cap, structlog.processors.JSONRenderer(serializer=_to_json)]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *names: _ModuleLogger(output, "".join(names)),
        cache_logger_on_first_use=False,
    )
    _route_standard_library(output, shared=shared, render=render)


def log_path() -> Path | None:
    """The file of this process's log; None if it goes to standard error, or nowhere."""
    return None if _output is None else _output.path


class _LineOutput:
    """The destination of rendered lines. Thread-safe."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._descriptor: int | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._lock = threading.Lock()

    def write_line(self, line: str) -> None:
        """Write one line, with one write; if the disk fails, to standard error, or nowhere."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.write(self._descriptor, line.encode() + b"\n")
                return
        with self._lock, suppress(OSError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def __del__(self) -> None:
        """Close the file once no logger refers to it."""
        if self._descriptor is not None:
            os.close(self._descriptor)


class _ModuleLogger:
    """The logger that structlog calls with a rendered line. All levels are equal: filtering happens before."""

    def __init__(self, output: _LineOutput, name: str) -> None:
        self.name = name
        self._output = output

    def msg(self, line: str) -> None:
        """Write one line."""
        self._output.write_line(line)

    debug = info = warning = warn = error = critical = fatal = exception = msg


#: Destination of this process's lines; None before `configure_logging`.
_output: _LineOutput | None = None

# Without one the standard library would write warnings to standard error.
logging.getLogger("hetpipe").addHandler(logging.NullHandler())


class _LibraryLogger:
    """The sink of a module's logger: the process's log, or the standard library where there is none."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _write(self, level: int, *arguments: Any, **options: Any) -> None:
        if _output is not None and len(arguments) == 1 and not options:
            _output.write_line(arguments[0])
        else:  # with the user's own processors
            logging.getLogger(self.name).log(level, *arguments, **options)

    def debug(self, *arguments: Any, **options: Any) -> None:
        """Write one line of this level."""
        self._write(logging.DEBUG, *arguments, **options)

    def info(self, *arguments: Any, **options: Any) -> None:
        """Write one line of this level."""
        self._write(logging.INFO, *arguments, **options)

    def warning(self, *arguments: Any, **options: Any) -> None:
        """Write one line of this level."""
        self._write(logging.WARNING, *arguments, **options)

    def error(self, *arguments: Any, **options: Any) -> None:
        """Write one line of this level."""
        self._write(logging.ERROR, *arguments, **options)

    msg, warn, exception = info, warning, error
    critical = fatal = error


class _Stamp:
    """Adds time, role, process and logger, in readable order."""

    def __init__(self, clock: Clock, always: dict[str, object]) -> None:
        self._clock = clock
        self._always = always

    def __call__(self, logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """See class."""
        now = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="microseconds")
        record = event.get("_record")
        first = {
            "t": now.replace("+00:00", "Z"),
            "level": event.pop("level"),
            "event": event.pop("event"),
            "logger": getattr(logger if record is None else record, "name", None),
        }
        return {**first, **self._always, **event}


class _StandardLibraryHandler(logging.Handler):
    """Writes records of the standard library's `logging` to the same file."""

    def __init__(self, output: _LineOutput, formatter: logging.Formatter) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(formatter)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; logging must never end a program."""
        try:
            self._output.write_line(self.format(record))
        except Exception:  # noqa: BLE001 - the convention of logging.Handler
            self.handleError(record)


def _route_standard_library(
    output: _LineOutput, *, shared: list[structlog.typing.Processor], render: list[structlog.typing.Processor]
) -> None:
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render]
    )
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _StandardLibraryHandler)]:
        root.removeHandler(handler)
    root.addHandler(_StandardLibraryHandler(output, formatter))


def _cap(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {str(key)[:MAX_TEXT_LENGTH]: _capped(value, _MAX_DEPTH) for key, value in event.items()}


def _capped(value: object, depth: int) -> object:
    """`value` with all texts truncated and values of unknown types converted to text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth and isinstance(value, dict) and len(value) <= _MAX_ITEMS:
        return {str(key)[:MAX_TEXT_LENGTH]: _capped(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
        return [_capped(item, depth - 1) for item in value]
    text = value if isinstance(value, str) else str(value)
    if len(text) <= MAX_TEXT_LENGTH:
        return text
    # Both ends: the last lines of a traceback have the error.
    half = MAX_TEXT_LENGTH // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters omitted] {text[-half:]}"


def _to_json(event: object, **_options: object) -> str:
    return json.dumps(event, ensure_ascii=True, separators=(",", ":"))
