"""Processes that are forked: the same as those that were started as programs, and children of whoever asked."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
from structlog.testing import capture_logs

from hetpipe.errors import ProtocolViolation
from hetpipe.forking import fork_server as client
from hetpipe.forking.fork_server import MOST_DEATHS, VARIABLE, ForkServer
from hetpipe.forking.messages import MAX_MESSAGE_BYTES, receive_message, send_message
from hetpipe.forking.process import Launch, Process, spawn
from hetpipe.phases import LAUNCH
from tests.forking.programs import PROGRAMS, environment
from tests.server.agent.programs import ends

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


class Bench:
    """Starts programs of `tests.forking.programs`, and hears what they report."""

    def __init__(self, server: ForkServer) -> None:
        self._servers: list[ForkServer] = []
        self.use(server)
        self._stack = ExitStack()
        self.environment = environment()

    def start(self, *arguments: str, starts_processes: bool = False, reports: bool = True) -> tuple[Process, IO[str]]:
        """A program, and what it writes to its descriptors."""
        reading, writing = os.pipe()
        stdin, self._held = os.pipe()
        lines = self._stack.enter_context(os.fdopen(reading))
        self._stack.callback(os.close, self._held)
        try:
            launch = Launch(
                command=[*LAUNCH, *arguments],
                environment=self.environment,
                stdin=stdin,
                stdout=writing,
                stderr=writing,
                report=writing if reports else None,
                starts_processes=starts_processes,
            )
            process = self.server.start(launch)
        finally:
            os.close(writing)
            os.close(stdin)
        self._stack.callback(self._end, process)
        return process, lines

    @staticmethod
    def _end(process: Process) -> None:
        if process.exit_code is None:
            process.signal_group(signal.SIGKILL)
            process.wait(end_group=True)

    def facts(self, *arguments: str, starts_processes: bool = False) -> tuple[Process, dict[str, Any]]:
        """A program, and what it says of itself."""
        process, lines = self.start(*arguments, starts_processes=starts_processes)
        return process, next_object(lines)

    def use(self, server: ForkServer) -> None:
        """Another fork server from now on."""
        self._servers.append(server)
        self.server = server

    def close(self, *, but: ForkServer | None = None) -> None:
        self._stack.close()
        for server in self._servers:
            if server is not but:
                server.close()


def next_object(lines: IO[str]) -> dict[str, Any]:
    """The next report; phases are none."""
    while True:
        line = lines.readline()
        assert line, "the process has ended without a word"
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:  # what else it has printed
            continue
        if found.get("kind") != "phase":
            return found


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    """For all tests that leave it as it is."""
    found = ForkServer(environment(), programs=PROGRAMS)
    yield found
    found.close()


@pytest.fixture
def shared(fork_server: ForkServer) -> Iterator[Bench]:
    found = Bench(fork_server)
    yield found
    found.close(but=fork_server)


@pytest.fixture
def bench() -> Iterator[Bench]:
    """With a fork server of its own."""
    found = Bench(ForkServer(environment(), programs=PROGRAMS))
    yield found
    found.close()


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What was started as a program of its own; `hetpipe.launch` knows no programs of tests."""
    found: list[Launch] = []

    def start(launch: Launch) -> Process:
        found.append(launch)
        arguments = launch.command[len(LAUNCH) :]
        program = (sys.executable, "-c", "from tests.forking.programs import as_program; as_program()")
        return spawn(replace(launch, command=[*program, *arguments]))

    monkeypatch.setattr(client, "spawn", start)
    return found


def test_a_forked_process_is_what_it_would_be_as_a_program(shared: Bench, spawned: list[Launch]) -> None:
    """All that a process can see of itself is the same, but for its number and what only chance decides."""
    process, forked = shared.facts("show", "wait")
    assert spawned == []
    shared.use(ForkServer({**environment(), VARIABLE: "0"}, programs=PROGRAMS))
    program, as_program = shared.facts("show", "wait")
    assert len(spawned) == 1

    for facts, pid in ((as_program, program.pid), (forked, process.pid)):
        assert (facts["pid"], facts["session"], facts["group"], facts["parent"]) == (pid, pid, pid, os.getpid())
        assert len(facts["descriptors"]) == 4, "standard ones and the report pipe"
    assert forked["command line"] == [*LAUNCH, "show", "wait", "--report-fd", str(forked["descriptors"][-1])]
    assert forked["arguments"] == forked["command line"][3:]
    assert (as_program["is forked"], forked["is forked"]) == (False, True)
    same = ("folder", "environment", "handlers", "blocked", "threads", "collects", "umask", "limits")
    assert {name: forked[name] for name in same} == {name: as_program[name] for name in same}


def test_its_first_environment_has_no_variables_of_others(bench: Bench) -> None:
    """`/proc/PID/environ` shows that of the fork server, which has what is read while it is loaded and no secrets."""
    secret = {"WANDB_API_KEY": "secret"}
    bench.use(ForkServer({**environment(), **secret}, programs=PROGRAMS))
    _, facts = bench.facts("show", "wait")
    assert "OMP_NUM_THREADS" in facts["first environment"]
    assert "WANDB_API_KEY" not in facts["first environment"]


def test_two_of_them_draw_different_random_numbers(shared: Bench) -> None:
    assert shared.facts("show", "wait")[1]["random"] != shared.facts("show", "wait")[1]["random"]


@pytest.mark.parametrize(
    ("argument", "exit_code", "words"),
    [
        ("status", 3, ""),
        ("sentence", 1, "no luck"),
        ("error", 1, "ValueError: of the program"),
        ("kill", -signal.SIGKILL, ""),
        ("return", 0, "flushed, and what was registered is run"),
        ("thread", 0, "a thread has gone on to its end"),
    ],
)
def test_how_it_ended_is_known(shared: Bench, argument: str, exit_code: int, words: str) -> None:
    process, lines = shared.start("show", argument)
    assert process.wait() == exit_code
    assert lines.read().strip().split("\n")[-1].endswith(words)
    assert process.signal_group(signal.SIGTERM) is False, "whoever has its number now is somebody else"


def test_its_group_ends_with_it(shared: Bench) -> None:
    process, lines = shared.start("show", "group")
    next_object(lines)
    grandchild = next_object(lines)["pid"]
    process.send_signal(signal.SIGKILL)
    assert process.wait(end_group=True) == -signal.SIGKILL
    assert ends(grandchild)


def test_what_runs_does_not_notice_the_end_of_the_fork_server_and_another_one_follows(bench: Bench) -> None:
    process, _ = bench.facts("show", "wait")
    before = bench.server.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert ends(before)
    bench.server.look_after()
    assert bench.server.pid not in {None, before}
    later, facts = bench.facts("show", "wait")
    assert (facts["is forked"], facts["parent"]) == (True, os.getpid())
    assert process.signal_group(signal.SIGTERM), "it runs still"
    assert process.wait() == -signal.SIGTERM
    assert later.pid != process.pid


def test_one_that_died_is_noticed_by_the_next_who_needs_it(bench: Bench) -> None:
    bench.facts("show", "wait")
    before = bench.server.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert bench.facts("show", "wait")[1]["is forked"]
    assert bench.server.pid != before


def test_one_that_does_not_answer_is_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.facts("show", "wait")
    before = bench.server.pid
    assert before is not None
    os.kill(before, signal.SIGSTOP)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.5)
    assert bench.facts("show", "wait")[1]["is forked"]
    assert ends(before)


def test_nobody_is_adopted_but_what_is_forked(shared: Bench) -> None:
    shared.facts("show", "wait")
    is_subreaper = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0)
    assert is_subreaper.value == 0


def test_who_adopts_orphans_anyway_goes_on(shared: Bench) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        shared.facts("show", "wait")
        is_subreaper = ctypes.c_int(-1)
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0)
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert is_subreaper.value == 1


def test_it_is_not_begun_for_what_it_cannot_fork(bench: Bench) -> None:
    bench.server.begin((sys.executable, "-c", "pass"))
    assert bench.server.pid is None
    bench.server.begin((*LAUNCH, "show"))
    assert bench.server.pid is not None


def test_a_process_that_starts_others_has_a_fork_server_of_its_own(shared: Bench) -> None:
    process, lines = shared.start("parent", starts_processes=True)
    said = [next_object(lines), next_object(lines)]
    (child,) = (each for each in said if "parent" in each)
    (of,) = (each for each in said if "fork server" in each)
    assert (child["parent"], child["is forked"], of["pid"]) == (process.pid, True, process.pid)
    assert of["fork server"] not in {None, shared.server.pid}
    descriptors = {str(path.readlink()) for path in Path(f"/proc/{of['fork server']}/fd").iterdir()}
    assert len([name for name in descriptors if not name.startswith("socket:")]) == 1, "it holds no pipe of others open"

    process.send_signal(signal.SIGKILL)
    assert all(ends(pid) for pid in (child["pid"], of["fork server"])), "they end with their parent"


def test_all_end_with_whoever_asked(tmp_path: Path) -> None:
    """Killed at once, whether its fork server is killed before or not: the kernel and the end of a pipe tell them."""
    script = (
        "import os, signal, sys\n"
        "from hetpipe.forking.fork_server import ForkServer\n"
        "from tests.forking.programs import PROGRAMS, environment, started\n"
        "server = ForkServer(environment(), programs=PROGRAMS)\n"
        "reading, writing = os.pipe()\n"
        "started(server, 'show', 'wait', report=1, stdin=reading)\n"
        "print('{\"server\": %d}' % server.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        said = [next_object(asking.stdout), next_object(asking.stdout)]
        pids = [each.get("server") or each["pid"] for each in said]
        asking.kill()
        assert all(ends(pid) for pid in pids)


class TestRefusals:
    """Who cannot be forked is started as a program, or not at all, and the reason is said."""

    @staticmethod
    def with_fork(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
        """Have fork servers run `code` first, in which `real` is `os.fork`."""
        run = "runpy.run_module('hetpipe.fork_server', run_name='__main__', alter_sys=True)"
        start = f"import os, runpy\nreal = os.fork\n{code}\n{run}"
        monkeypatch.setattr(client, "TITLE", (sys.executable, "-c", start))

    @pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
    @pytest.mark.parametrize("which", ["first", "second"])
    def test_no_room_for_a_process(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int, which: str
    ) -> None:
        fails = "True" if which == "first" else "os.getpid() != server"
        self.with_fork(
            monkeypatch,
            "server = os.getpid()\n"
            f"def fork():\n    if {fails}: raise OSError({number}, 'x')\n    return real()\n"
            "os.fork = fork",
        )
        with pytest.raises(OSError, match="no process can be forked: ") as raised:
            bench.start("show", "wait")
        assert raised.value.errno == number
        assert os.strerror(number) in str(raised.value)
        assert "fewer stages" in str(raised.value), "the fix is named"

    def test_imports_that_start_threads(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, spawned: list[Launch]
    ) -> None:
        thread = "threading.Thread(target=threading.Event().wait, daemon=True)"
        self.with_fork(monkeypatch, f"import threading; {thread}.start()")
        with capture_logs() as lines:
            assert not bench.facts("show", "wait")[1]["is forked"]
        assert len(spawned) == 1
        assert "have started 1 threads, which a forked process would lack" in lines[-1]["reason"]

    def test_imports_that_fail(self, bench: Bench, spawned: list[Launch]) -> None:
        bench.use(ForkServer(environment(), programs={**PROGRAMS, "none": "tests.forking.nothing:main"}))
        with capture_logs() as lines:
            assert not bench.facts("show", "wait")[1]["is forked"]
        assert "ModuleNotFoundError: No module named 'tests.forking.nothing'" in lines[-1]["reason"]

    def test_another_value_of_what_is_read_while_libraries_are_loaded(
        self, shared: Bench, spawned: list[Launch]
    ) -> None:
        shared.environment["OMP_NUM_THREADS"] = "7"
        with capture_logs() as lines:
            _, facts = shared.facts("show", "wait")
        assert (facts["is forked"], facts["environment"]["OMP_NUM_THREADS"]) == (False, "7")
        assert len(spawned) == 1
        assert lines[-1]["reason"].endswith("variables that are read at load time: OMP_NUM_THREADS")
        shared.environment = {**environment(), "MINE": "1"}
        _, facts = shared.facts("show", "wait")
        assert (facts["is forked"], facts["environment"]["MINE"]) == (True, "1")

    def test_a_kernel_that_gives_forked_processes_to_somebody_else(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, spawned: list[Launch]
    ) -> None:
        monkeypatch.setattr(client, "_set_subreaper", lambda *, is_on: None)
        assert not bench.facts("show", "wait")[1]["is forked"]
        assert len(spawned) == 1

    def test_one_that_keeps_dying_is_given_up(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, spawned: list[Launch]
    ) -> None:
        self.with_fork(monkeypatch, "os._exit(5)")
        with capture_logs() as lines:
            bench.facts("show", "wait")
            bench.facts("show", "wait")
        lost = [line for line in lines if line["event"] == "fork_server_lost"]
        assert [line["exit_code"] for line in lost] == [5] * MOST_DEATHS
        assert len(spawned) == 2

    def test_other_programs_and_a_switch(self, bench: Bench, spawned: list[Launch]) -> None:
        bench.use(ForkServer({**environment(), VARIABLE: "0"}, programs=PROGRAMS))
        bench.server.begin()
        bench.facts("show", "wait")
        assert (bench.server.pid, len(spawned)) == (None, 1)


def test_messages_are_bounded_and_none_but_json() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_message(ours, {"a": "\udcff"}, [0])
        assert receive_message(theirs) is not None
        ours.sendall((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(ProtocolViolation, match="more than the maximum of 8388608"):
            receive_message(theirs)
    for data in (b"\0\0\0\2[]", b"\0\0\0\2x]", b"\0\0\0\5{}"):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(data)
            ours.shutdown(socket.SHUT_WR)
            with pytest.raises(ProtocolViolation):
                receive_message(theirs)
