"""Processes that are started again whenever they die, and that are all gone at the end, whatever happens.

One thread starts them all, because the kernel tells a child of its parent's death when the *thread* that started it
ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from hetpipe.clock import SYSTEM_CLOCK
from tests.polling import wait_until

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

#: Names, in the environment of every process of a cluster and of their children, which cluster they are of.
OWNER_VARIABLE = "HETPIPE_CHAOS_OWNER"

#: Between two looks at all processes.
_LOOK_SECONDS = 0.02

#: Between a death and the next life; doubled for each start that failed in a row, as a supervisor does.
_REST_SECONDS = 0.1
_MOST_DOUBLINGS = 6

#: How long the kernel may take to end what was killed.
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What to keep alive."""

    key: str
    """Names it and its files: `shard-0`."""
    command: Sequence[str]
    environment: Mapping[str, str]
    """Of every life."""
    ready: str
    """It is ready when its standard output holds this."""
    current: Path | None = None
    """Its working directory; None: that of this process."""
    restarts: bool = True
    """Start it again whenever it ends; False: only when somebody here ended it, as its own end is its result."""


@dataclass(slots=True)
class Life:
    """One process."""

    number: int
    pid: int
    started: float
    ended: float | None = None
    code: int | None = None
    """Exit status, or minus the number of a signal; None while it lives."""
    is_ready: bool = False
    expected: bool = False
    """Somebody here meant it to die."""


@dataclass(slots=True)
class Kept:
    """A process and its lives. Written by the keeper's thread, read by everybody."""

    spec: Spec
    folder: Path
    wanted: bool = True
    """Start it again when it dies."""
    once: dict[str, str] = field(default_factory=dict)
    """Added to the environment of the next life alone."""
    lives: list[Life] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def life(self) -> Life:
        """The newest."""
        return self.lives[-1]

    @property
    def is_up(self) -> bool:
        """Its newest life lives and is ready."""
        return bool(self.lives) and self.life.is_ready and self.life.code is None

    @property
    def failures(self) -> int:
        """How many of its newest lives ended before they were ready, although nobody hit them."""
        count = 0
        for life in reversed(self.lives):
            if life.is_ready or life.expected:
                break
            count += life.code is not None
        return count

    def wait_up(self, *, timeout_seconds: float) -> None:
        """Until it is ready."""
        wait_until(lambda: self.is_up, timeout_seconds=timeout_seconds, what=f"ready {self.spec.key}: {self.story()}")

    def kill(self) -> Life:
        """`kill -9`; the life that ended. Nothing happens when it is down."""
        life = self.life
        life.expected = True
        if life.code is None:
            with suppress(ProcessLookupError):
                os.kill(life.pid, signal.SIGKILL)
        return life

    @property
    def exit_status(self) -> int | None:
        """That of a process that has ended by itself and is not started again; None while it may go on."""
        return None if self.wanted or not self.lives else self.life.code

    def output(self) -> Path:
        """Standard output of the newest life."""
        return self.folder / f"{self.spec.key}.{self.life.number}.out"

    def story(self) -> str:
        """Its lives in a few words, and the last ones of what it said."""
        lives = ", ".join(f"pid {life.pid} {'lives' if life.code is None else life.code}" for life in self.lives[-3:])
        return f"{len(self.lives)} lives ({lives}); {self.last_words()}"

    def last_words(self) -> str:
        """The last line on its standard error."""
        with suppress(OSError):
            lines = (self.folder / f"{self.spec.key}.err").read_text(errors="replace").strip().splitlines()
            return lines[-1][-300:] if lines else ""
        return ""


class Keeper:
    """Keeps processes. Use it in a `with` block, which ends them all however it is left."""

    def __init__(self, folder: Path, owner: str) -> None:
        """Prepare.

        Args:
            folder: for what they write.
            owner: their `OWNER_VARIABLE`, unlike any other on this machine.
        """
        self._folder = folder
        self._owner = owner
        self._kept: list[Kept] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper")

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()

    def keep(self, spec: Spec) -> Kept:
        """Start a process, from now on again and again."""
        kept = Kept(spec, self._folder)
        self._kept = [*self._kept, kept]
        return kept

    def _run(self) -> None:
        try:
            while not self._closing.wait(_LOOK_SECONDS):
                for kept in self._kept:
                    self._look(kept)
        finally:
            for process in (kept.process for kept in self._kept if kept.process is not None):
                process.kill()
                process.communicate(timeout=_END_SECONDS)
            end_all(self._owner)

    def _look(self, kept: Kept) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if kept.process is None:
            rest = _REST_SECONDS * 2.0 ** min(kept.failures, _MOST_DOUBLINGS)
            if kept.wanted and (not kept.lives or now >= (kept.life.ended or 0.0) + rest):
                self._start(kept, now)
            return
        life = kept.life
        code = kept.process.poll()
        if code is not None:
            life.ended, life.code = now, code
            if kept.process.stdin is not None:
                kept.process.stdin.close()
            kept.process = None
            kept.wanted = kept.wanted and (kept.spec.restarts or life.expected)
        elif not life.is_ready:
            life.is_ready = kept.spec.ready in kept.output().read_text(errors="replace")

    def _start(self, kept: Kept, now: float) -> None:
        number = len(kept.lives)
        environment = {**kept.spec.environment, **kept.once, OWNER_VARIABLE: self._owner}
        kept.once.clear()
        base = self._folder / kept.spec.key
        with Path(f"{base}.{number}.out").open("wb") as output, Path(f"{base}.err").open("ab") as errors:
            kept.process = subprocess.Popen(
                list(kept.spec.command),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                cwd=kept.spec.current,
                env=environment,
            )
        kept.lives.append(Life(number, kept.process.pid, now))


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """`command`, ended by the kernel when whoever starts it ends, where the system has `setpriv`."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--", *command] if setpriv else list(command)


def owned(owner: str) -> Iterator[int]:
    """The living processes of one cluster, children of children too; not redis-server, which overwrites its own."""
    wanted = f"{OWNER_VARIABLE}={owner}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0") and state_of(int(entry.name)) != "Z":
                    yield int(entry.name)


def end_all(owner: str) -> None:
    """`kill -9` until nobody is left."""
    deadline = SYSTEM_CLOCK.monotonic() + _END_SECONDS
    while left := list(owned(owner)):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert SYSTEM_CLOCK.monotonic() < deadline, f"these do not end: {left}"
        SYSTEM_CLOCK.sleep(_LOOK_SECONDS)


def state_of(pid: int) -> str:
    """The letter of a process's state, `T` for stopped; empty when it is gone."""
    return next(_stat(pid), "")


def is_fork_server(pid: int) -> bool:
    """Whether a process is a fork server, and none that was forked from it."""
    try:
        return b"\0hetpipe.fork_server\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def parent_of(pid: int) -> int:
    """The process that has started another one; 0 when that is gone."""
    _, parent, *_ = (*_stat(pid), "", "0")
    return int(parent)


def cpu_seconds_of(pid: int) -> float:
    """The processor time that a process has used so far; 0 when it is gone."""
    *_, user, system = (*_stat(pid), *13 * "0")[:13]
    return (int(user) + int(system)) / _TICKS_PER_SECOND


def _stat(pid: int) -> Iterator[str]:
    """What the kernel says of a process, after its name; nothing when it is gone."""
    with suppress(OSError, IndexError):
        yield from Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def when_not(pids: Sequence[int]) -> Callable[[], bool]:
    """Whether all of `pids` are gone."""
    return lambda: not any(state_of(pid) not in {"", "Z"} for pid in pids)
