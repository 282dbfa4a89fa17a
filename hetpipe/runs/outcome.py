"""The result of a command: exit status, and a sentence or a JSON line. Pure except for `Output`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TextIO

from hetpipe import errors
from hetpipe.errors import DocumentError, HetpipeError, JobError, JobFailed, UserError


class ExitStatus(IntEnum):
    """The exit status of a command."""

    OK = 0
    FAILED = 1
    """An error, or a failed check."""
    USAGE = 2
    """Invalid user input: options, the job, a folder."""
    LOST_CONTACT = 75
    """The coordinator does not answer any more; its job may continue, and the same command may follow it again."""
    INTERRUPTED = 130
    """Ended by Ctrl-C (128 + the number of SIGINT), by shells' convention."""
    DETACHED = 143
    """Ended by SIGTERM (128 + its number) while following a job on a cluster, which continues."""


def error_class(name: str) -> type[HetpipeError]:
    """The exception of `hetpipe.errors` by its name; `JobFailed` for any other.

    >>> error_class("CallableError").__name__, error_class("ZeroDivisionError").__name__
    ('CallableError', 'JobFailed')
    """
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, HetpipeError) else JobFailed


def error_of(name: str, sentences: Sequence[str]) -> HetpipeError:
    """The exception named `name` with `sentences`."""
    kind = error_class(name)
    return JobError(sentences) if kind is JobError else kind("; ".join(sentences))


def status_of(error: HetpipeError) -> ExitStatus:
    """The exit status after `error`."""
    return ExitStatus.USAGE if isinstance(error, UserError) else ExitStatus.FAILED


def sentences_of(error: HetpipeError) -> tuple[str, ...]:
    """The sentences of an error: every mistake of a job or a file, else one."""
    if isinstance(error, DocumentError) and error.problems:
        return error.sentences
    return error.problems if isinstance(error, JobError) else (str(error),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output of a command. With `--json`, text goes to stderr, and stdout ends with one JSON line."""

    people: TextIO
    """Progress, tables, summaries."""
    complaints: TextIO
    """Errors."""
    machine: TextIO | None
    """The JSON line; None without `--json`."""

    def say(self, *lines: str) -> None:
        """Write lines for people."""
        self.people.write("".join(f"{line}\n" for line in lines))
        self.people.flush()

    def note(self, sentence: str) -> None:
        """Print a remark to the stream of errors."""
        self.complaints.write(f"{sentence}\n")
        self.complaints.flush()

    def answer(self, value: Mapping[str, Any], *lines: str) -> None:
        """Print the result of a command: `value` as the JSON line with `--json`, else the lines."""
        if self.machine is None:
            self.say(*lines)
            return
        self.machine.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
        self.machine.flush()

    def complain(self, sentences: Sequence[str], value: Mapping[str, Any] | None = None) -> None:
        """Print an error as lines and, with `--json`, as the JSON line: `value`, or else the `errors`."""
        self.complaints.write("".join(f"error: {sentence}\n" for sentence in sentences))
        self.complaints.flush()
        if self.machine is not None:
            self.answer({"errors": list(sentences)} if value is None else value)
