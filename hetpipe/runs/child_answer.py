"""Child processes of a command that import the user's code or measure, report progress, and return one answer."""

from __future__ import annotations

import json
import queue
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import DeadlineExceeded, JobFailed
from hetpipe.forking.process import Starter, spawn
from hetpipe.phases import PHASE
from hetpipe.runs.outcome import error_of
from hetpipe.server.agent.child import Child, ChildSpec, Listener
from hetpipe.values.commands import exit_sentence

#: Polling interval for messages, the delay of detecting a deadline.
_POLL_SECONDS = 0.25

#: Timeout for the remaining output of a process that has answered.
_LEAVING_SECONDS = 1.0


class ReportingChild:
    """The messages of a reporting process."""

    def __init__(self, spec: ChildSpec, title: str, *, starter: Starter = spawn) -> None:
        """Start the process.

        Raises:
            JobFailed: it could not be started.
        """
        self._title = title
        #: Messages, and a sentence when the process has ended.
        self._messages: queue.SimpleQueue[dict[str, Any] | str] = queue.SimpleQueue()
        listener = Listener(on_line=lambda line: self._messages.put(json.loads(line)), on_exit=self._on_exit)
        try:
            self._child = Child(spec, listener, starter=starter)
        except OSError as error:
            raise JobFailed(f"{title} could not be started: {error}") from error

    def next_message(self, *, timeout_seconds: float) -> dict[str, Any] | None:
        """The next message that is not an error; None if there was none within `timeout_seconds`.

        Raises:
            HetpipeError: the error that the process reported; `JobFailed` where it has another name.
            JobFailed: the process ended.
        """
        try:
            message = self._messages.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        if isinstance(message, str):
            raise JobFailed(message)
        if "ok" in message or "error" in message:
            self._child.exited.wait(_LEAVING_SECONDS)
        if "error" in message:
            raise error_of(str(message["error"]), [str(problem) for problem in message.get("problems", ())])
        return message

    def kill(self) -> None:
        """End the process, and wait until it has ended."""
        self._child.send_signal(signal.SIGKILL)
        self._child.exited.wait()

    def _on_exit(self, exit_code: int, last_words: str) -> None:
        words = f"; its last output: {last_words}" if last_words else ""
        self._messages.put(f"{self._title} {exit_sentence(exit_code)} before it was done{words}")


@contextmanager
def reporting_child(spec: ChildSpec, title: str, *, starter: Starter = spawn) -> Iterator[ReportingChild]:
    """A process that executes a request; it ends with the block.

    Args:
        spec: the process.
        title: of the process, for error messages: `the process that measures the model`.
        starter: launches it.

    Raises:
        JobFailed: it could not be started.
    """
    child = ReportingChild(spec, title, starter=starter)
    try:
        yield child
    finally:
        child.kill()


def await_child(
    spec: ChildSpec,
    title: str,
    on_message: Callable[[dict[str, Any]], None],
    *,
    patience_seconds: float | None = None,
    starter: Starter = spawn,
    clock: Clock = SYSTEM_CLOCK,
) -> Any:
    """Start a process and wait for its answer (`hetpipe.server.agent.child_main.answer_once`).

    Args:
        spec: the process.
        title: of the process, for error messages: `the process that measures the model`.
        on_message: receives every message before the answer; called in this thread.
        patience_seconds: timeout without a message; None: no timeout.
        starter: launches it.
        clock: for the timeout.

    Returns:
        The answer, as plain JSON values.

    Raises:
        HetpipeError: the error that the process reported; `JobFailed` where it has another name.
        JobFailed: the process could not be started, or ended before it answered.
        DeadlineExceeded: it was silent for too long.
    """
    phase, last_answer = "", clock.monotonic()
    with reporting_child(spec, title, starter=starter) as child:
        while True:
            message = child.next_message(timeout_seconds=_POLL_SECONDS)
            if message is None:
                silent_seconds = clock.monotonic() - last_answer
                if patience_seconds is not None and silent_seconds >= patience_seconds:
                    last = f"; its last phase was {phase}" if phase else ""
                    raise DeadlineExceeded(f"{title} has reported nothing for {silent_seconds:.0f} s{last}")
                continue
            if "ok" in message:
                return message["ok"]
            if message.get("kind") == PHASE:
                phase = str(message["phase"])
            on_message(message)
            last_answer = clock.monotonic()
