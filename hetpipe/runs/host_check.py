"""Check of the hosts of `hetpipe launch` before anything is started.

A host must be reachable, have Python with the hetpipe of this machine, and see the folder of the run.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import hetpipe
from hetpipe.errors import UserError
from hetpipe.runs.remote import RemoteShell
from hetpipe.values.commands import exit_sentence, last_words

#: For a connection and the start of Python, all hosts at once.
PATIENCE_SECONDS = 60.0

#: Prints the version of hetpipe, and whether a folder exists. It imports no torch.
_PROBE = "import os, sys, hetpipe; print('hetpipe', hetpipe.__version__, os.path.isdir(sys.argv[1]))"

#: Exit statuses: of ssh without a connection, and of a shell without the program.
_NO_CONNECTION, _NO_PROGRAM = 255, 127


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of the probe on a host."""

    exit_code: int | None
    """None: there was none in time."""
    output: str = ""
    errors: str = ""


def check_hosts(
    shells: Sequence[RemoteShell], python: str, folder: Path, *, patience_seconds: float = PATIENCE_SECONDS
) -> None:
    """Check all hosts at once.

    Args:
        shells: one per host.
        python: the program on the hosts.
        folder: the folder of the run, which exists here.
        patience_seconds: how long to wait for answers.

    Raises:
        UserError: with the problem and the fix of every host that has one.
    """
    command = (python, "-c", _PROBE, str(folder))
    with ThreadPoolExecutor(max_workers=len(shells), thread_name_prefix="host-check") as pool:
        answers = pool.map(lambda shell: _ask(shell.command(command), patience_seconds), shells)
        found = [problem_of(shell, python, folder, answer) for shell, answer in zip(shells, answers, strict=True)]
    problems = [problem for problem in found if problem]
    if problems:
        raise UserError("; ".join(problems))


def _ask(command: Sequence[str], patience_seconds: float) -> Answer:
    try:
        done = subprocess.run(  # noqa: S603 - the user's ssh
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(None)
    except OSError as error:
        return Answer(_NO_CONNECTION, errors=f"{command[0]}: {error.strerror}")
    return Answer(done.returncode, done.stdout, done.stderr)


def problem_of(shell: RemoteShell, python: str, folder: Path, answer: Answer) -> str:
    """What is wrong with a host and how to fix it, as a sentence; empty if nothing is. Pure.

    >>> ssh = RemoteShell(("ssh",), "b", "/code")
    >>> problem_of(ssh, "python3", Path("/run"), Answer(0, f"hetpipe {hetpipe.__version__} True"))
    ''
    >>> problem_of(ssh, "python3", Path("/run"), Answer(255, errors="ssh: connect to host b: Connection refused"))
    'host b cannot be reached: ssh: connect to host b: Connection refused; try: ssh b true'
    """
    host, trial = f"host {shell.host}", shlex.join([*shell.program, shell.host, "true"])
    words = last_words([*answer.output.splitlines(), *answer.errors.splitlines()])
    if answer.exit_code is None:
        return f"{host} has not answered in time; try: {trial}"
    if answer.exit_code == 0:
        return _problem_there(host, folder, last_words(answer.output.splitlines()).split())
    if answer.exit_code == _NO_CONNECTION:
        return f"{host} cannot be reached: {words}; try: {trial}"
    if " cd: " in answer.errors:
        return f"{host} has no folder {shell.folder}: call the command in a folder that all hosts share"
    if answer.exit_code == _NO_PROGRAM or "No module named 'hetpipe'" in answer.errors:
        lacks = f"has no {python}" if answer.exit_code == _NO_PROGRAM else f"has no hetpipe for {python}"
        return f"{host} {lacks}: install hetpipe {hetpipe.__version__} there, or name its Python with --python"
    return f"{python} on {host} {exit_sentence(answer.exit_code)}: {words}"


def _problem_there(host: str, folder: Path, answered: Sequence[str]) -> str:
    match answered:
        case ["hetpipe", version, _] if version != hetpipe.__version__:
            own = hetpipe.__version__
            return (
                f"{host} has hetpipe {version}, this machine {own}: install {own} there, or name another with --python"
            )
        case ["hetpipe", _, "True"]:
            return ""
        case ["hetpipe", _, _]:
            return f"{host} does not see the run's folder {folder}: name one that all hosts share with --run-dir"
        case _:
            return f"{host} has answered {' '.join(answered)!r} instead of its version: its shell must print nothing"
