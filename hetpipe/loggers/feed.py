"""The coordinator's end: starts the logging process, sends it lines, and never blocks on it."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hetpipe.loggers.message import Opening, StepRewind, Values
from hetpipe.loggers.process import line_of, opening_line
from hetpipe.observe.log import get_logger

_log = get_logger(__name__)

#: Capacity of the queue to the process, in lines; about a quarter of an hour of a run.
_MOST_LINES = 1000

#: The program.
PROGRAM: Sequence[str] = (sys.executable, "-m", "hetpipe.loggers.process")


class Feed:
    """One job's logging process. Thread-safe; only `join` blocks."""

    def __init__(
        self, opening: Opening, on_failure: Callable[[str, str], None], *, program: Sequence[str] = PROGRAM
    ) -> None:
        """Start the process.

        Args:
            opening: of the run.
            on_failure: called in another thread with the name of a failed logger and the reason, once per logger.
            program: command line of the process.
        """
        self._opening = opening
        self._on_failure = on_failure
        self._program = program
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MOST_LINES)
        self._failed: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="loggers", daemon=True)
        self._thread.start()

    def post(self, message: Values | StepRewind) -> None:
        """Queue a message; if the queue is full, it is dropped and the loggers are reported."""
        try:
            self._lines.put_nowait(line_of(message))
        except queue.Full:
            self._fail_all("it accepts values more slowly than the run produces them; some were dropped")

    def close(self) -> None:
        """Close the stream of lines. The process exits after its last line, possibly later than the run."""
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            _log.warning("loggers_cut_off", run_dir=self._opening.run_dir)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the exit of the process after `close`; returns whether it has exited."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        output = Path(self._opening.run_dir) / "logs" / "loggers.out"
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with output.open("ab") as errors:
                # Its own session: a signal to the coordinator's group must not cut off what is being sent.
                process = subprocess.Popen(  # noqa: S603 - this package
                    self._program,
                    bufsize=0,  # what a dead process has not taken need not be flushed
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    cwd=self._opening.run_dir,
                    start_new_session=True,
                )
        except OSError as error:
            self._fail_all(f"its process cannot be started: {error}")
            return
        assert process.stdin is not None
        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout,), name="loggers-reports", daemon=True)
        reader.start()
        try:
            with process.stdin as target:
                target.write(opening_line(self._opening))
                while (line := self._lines.get()) is not None:
                    target.write(line)
        except OSError:
            """It has exited; its status is reported below."""
        status = process.wait()
        reader.join()
        process.stdout.close()
        if status:
            self._fail_all(f"its process exited with status {status}; see {output}")

    def _read(self, reports: Iterable[bytes]) -> None:
        for line in reports:
            name, sentence = json.loads(line)
            self._fail(str(name), str(sentence))

    def _fail_all(self, sentence: str) -> None:
        for name in self._opening.options:
            self._fail(name, sentence)

    def _fail(self, name: str, sentence: str) -> None:
        if name not in self._failed:
            self._failed.add(name)
            self._on_failure(name, sentence)
