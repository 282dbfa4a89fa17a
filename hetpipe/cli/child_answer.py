"""One question to a process that imports the user's code, and its answer. The process ends with the question."""

from __future__ import annotations

import json
import queue
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetpipe.agent.child import Child, ChildSpec, Listener
from hetpipe.cli.outcome import error_of
from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import DeadlineExceeded, JobFailed
from hetpipe.phases import PHASE
from hetpipe.spec.commands import exit_sentence

#: Longest wait for the next message, which is how late a deadline may be noticed.
_POLL_SECONDS = 0.25

#: How long a process that has answered may take to write down the rest of what it prints.
_LEAVING_SECONDS = 1.0


def ask_child(
    spec: ChildSpec,
    title: str,
    on_message: Callable[[dict[str, Any]], None],
    *,
    patience_seconds: float | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Any:
    """Start a process and wait for what it answers (`hetpipe.agent.child_main.answer_once`).

    Args:
        spec: what to start.
        title: of the process, for error messages: `the process that measures the model`.
        on_message: receives every message before the answer; called in this thread.
        patience_seconds: how long the process may be silent; None: any time.
        clock: measures that.

    Returns:
        The answer, as plain JSON values.

    Raises:
        HetpipeError: the error that the process reported; `JobFailed` where it has another name.
        JobFailed: the process could not be started, or ended before it answered.
        DeadlineExceeded: it was silent for too long.
    """
    phase, heard = "", clock.monotonic()
    with _process(spec, title) as (child, messages):
        while True:
            try:
                message = messages.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                silent_seconds = clock.monotonic() - heard
                if patience_seconds is not None and silent_seconds >= patience_seconds:
                    last = f"; the last was that it is {phase}" if phase else ""
                    raise DeadlineExceeded(
                        f"gave up after {silent_seconds:.0f} s without a word of {title}{last}"
                    ) from None
                continue
            if isinstance(message, str):
                raise JobFailed(message)
            if "ok" in message or "error" in message:
                child.exited.wait(_LEAVING_SECONDS)
            if "ok" in message:
                return message["ok"]
            if "error" in message:
                raise error_of(str(message["error"]), [str(problem) for problem in message.get("problems", ())])
            if message.get("kind") == PHASE:
                phase = str(message["phase"])
            on_message(message)
            heard = clock.monotonic()


@contextmanager
def _process(spec: ChildSpec, title: str) -> Iterator[tuple[Child, queue.SimpleQueue[dict[str, Any] | str]]]:
    """The process; and its messages, and a sentence when it has ended. It ends with the block.

    Raises:
        JobFailed: it could not be started.
    """
    messages: queue.SimpleQueue[dict[str, Any] | str] = queue.SimpleQueue()

    def on_exit(exit_code: int, last_words: str) -> None:
        words = f"; its last words: {last_words}" if last_words else ""
        messages.put(f"{title} {exit_sentence(exit_code)} before it was done{words}")

    try:
        child = Child(spec, Listener(on_line=lambda line: messages.put(json.loads(line)), on_exit=on_exit))
    except OSError as error:
        raise JobFailed(f"{title} could not be started: {error}") from error
    try:
        yield child, messages
    finally:
        child.send_signal(signal.SIGKILL)
        child.exited.wait()
