"""A process of `hetpipe` that measures something: given one order, it tells how far it is, and answers once."""

from __future__ import annotations

import json
import queue
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe.agent.child import Child, ChildSpec, Listener
from hetpipe.agent.children import SINGLE_THREADED
from hetpipe.cli.outcome import error_of
from hetpipe.errors import DeadlineExceeded, JobFailed
from hetpipe.spec.commands import exit_sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringProgram:
    """What to start, and what to call it."""

    name: str
    """For logs, threads and folders."""
    task: str
    """What it does: `measures the model`."""
    command: Sequence[str]
    """`--report-fd N` is added."""
    environment: Mapping[str, str]


class MeasuringProcess:
    """The messages of a process that measures."""

    def __init__(self, task: str) -> None:
        self._task = task
        #: Messages, and a sentence when the process has ended.
        self._news: queue.SimpleQueue[dict[str, Any] | str] = queue.SimpleQueue()

    def message(self, *, timeout_seconds: float | None = None) -> dict[str, Any]:
        """The next message, which is no error.

        Args:
            timeout_seconds: to wait for it; None: as long as the process lives.

        Raises:
            DeadlineExceeded: there was none.
            HetpipeError: what the process reports as its error.
            JobFailed: it ended.
        """
        try:
            message = self._news.get(timeout=timeout_seconds)
        except queue.Empty:
            raise DeadlineExceeded(
                f"the process that {self._task} has said nothing for {timeout_seconds:.0f} s"
            ) from None
        if isinstance(message, str):
            raise JobFailed(message)
        if "error" in message:
            raise error_of(str(message["error"]), [str(problem) for problem in message.get("problems", ())])
        return message

    def on_line(self, line: bytes) -> None:
        """It reported."""
        self._news.put(json.loads(line))

    def on_exit(self, exit_code: int, last_words: str) -> None:
        """It ended."""
        words = f"; its last words: {last_words}" if last_words else ""
        self._news.put(f"the process that {self._task} {exit_sentence(exit_code)} before it was done{words}")


@contextmanager
def measuring_process(program: MeasuringProgram, order: str) -> Iterator[MeasuringProcess]:
    """A process that carries out `order`, a line of JSON. It ends with the block."""
    process = MeasuringProcess(program.task)
    with tempfile.TemporaryDirectory(prefix=f"hetpipe-{program.name}-") as folder:
        child = Child(
            ChildSpec(
                name=program.name,
                command=program.command,
                first_line=order,
                environment={**program.environment, **SINGLE_THREADED},
                log_path=Path(folder) / f"{program.name}.out",
            ),
            Listener(on_line=process.on_line, on_exit=process.on_exit),
        )
        try:
            yield process
        finally:
            child.send_signal(signal.SIGKILL)
            child.exited.wait()
