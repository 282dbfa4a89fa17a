"""What `hetpipe submit` tells of a job while it follows it, line by line, and waits for what it is to tell next."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

_LINES_IN_FAILURES = 8

#: How long a follower that was told to end may take.
_END_SECONDS = 60


class Failed(Exception):
    """What was tried did not work; the text says what."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One line about a running job."""

    global_clock: int
    num_samples: int
    workers: Mapping[int, str]
    """Virtual worker → its state; empty for one that trains."""

    @property
    def all_train(self) -> bool:
        """Whether each virtual worker trains."""
        return bool(self.workers) and not any(self.workers.values())


def progress_of(line: str) -> Progress | None:
    """What a line of the follower tells of all virtual workers; None if it is about something else."""
    values = dict(re.findall(r"([\w.]+)=(\S+)", line))
    if values.get("state") != "running" or "global_clock" not in values:
        return None
    workers = {int(vw): values.get(f"vw{vw}.state", "") for vw in re.findall(r"\bvw(\d+)\.clock=", line)}
    return Progress(int(values["global_clock"]), int(values["samples"].partition("/")[0]), workers)


class Follower:
    """A process that follows a job: its lines on standard error, its result as the last line of standard output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is ours
        )
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._output: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self._process.stderr, self._lines), (self._process.stdout, self._output))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def num_lines(self) -> int:
        """How many lines there are so far."""
        with self._changed:
            return len(self._lines)

    def wait_for(
        self, what: str, is_it: Callable[[Progress], bool], *, seconds: float, after: int = 0
    ) -> tuple[Progress, float]:
        """The first progress among the lines from number `after` on that is what is waited for, and how long it took.

        Raises:
            Failed: it did not come in time, or the follower ended before; with the last lines.
        """
        begin = time.monotonic()
        deadline = begin + seconds
        with self._changed:
            while True:
                for line in self._lines[after:]:
                    after += 1
                    if (progress := progress_of(line)) is not None and is_it(progress):
                        return progress, time.monotonic() - begin
                if not self._readers[0].is_alive() and after == len(self._lines):
                    raise Failed(f"the job ended while this was waited for: {what}{self._tail()}")
                if (left := deadline - time.monotonic()) <= 0:
                    raise Failed(f"waited {seconds:.0f} s in vain for the job: {what}{self._tail()}")
                self._changed.wait(left)

    def result(self, *, seconds: float) -> str:
        """The last line of standard output, once the follower has ended.

        Raises:
            Failed: it failed, or takes longer.
        """
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"the job did not end within {seconds:.0f} s{self._tail()}") from None
        for reader in self._readers:
            reader.join(_END_SECONDS)
        if status or not self._output:
            raise Failed(f"hetpipe submit ended with {status}{self._tail()}\n{''.join(self._output)[-2000:]}")
        return self._output[-1]

    def end(self) -> None:
        """End the process if it is still there."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(_END_SECONDS)
        for reader in self._readers:
            reader.join(_END_SECONDS)

    def _read(self, stream: IO[str], lines: list[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _tail(self) -> str:
        return "; its last lines:\n" + "".join(self._lines[-_LINES_IN_FAILURES:])
