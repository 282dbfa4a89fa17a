"""Failpoints: read, counted, aimed at one process, acting once, refused by default, and each in its place."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import threading
import timeit
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import InjectedFault, PeerUnreachable, UserError
from hetpipe.failpoints import ONCE_VARIABLE, OPTION, POINTS, VARIABLE, Action, arm, disarm, parse, passing, reach
from hetpipe.server.agent import stage_process
from hetpipe.server.agent.child_main import ReportPipe
from hetpipe.server.agent.children import Children
from hetpipe.server.runtime import new_parser, run_service
from hetpipe.values.ids import Incarnation, StageIndex, VirtualWorkerIndex
from hetpipe.values.run import DeviceConfig, StageConfig
from hetpipe.values.wire import to_json
from tests.numerics.compare import plan_of
from tests.numerics.test_witnesses import case
from tests.polling import wait_until

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    yield
    disarm()


def armed(text: str, once: Path | None = None, **who: str | int | None) -> None:
    """Begin a life."""
    disarm()
    arm({VARIABLE: text, ONCE_VARIABLE: str(once or "")}, is_allowed=True, **who)


def acted(name: str, times: int = 1) -> list[int]:
    """At which of `times` visits of a place something was raised; from 1."""
    hits = []
    for hit in range(1, times + 1):
        try:
            reach(name)
        except InjectedFault:
            hits.append(hit)
    return hits


class TestTheVariable:
    def test_an_entry_says_where_what_when_and_who(self) -> None:
        first, second = parse("push.after_stage=kill@3;role=parameter_server;index=1, pull.mid_stream=drop")
        assert (first.name, first.action, first.hit) == ("push.after_stage", Action.KILL, 3)
        assert first.filters == {"role": "parameter_server", "index": "1"}
        assert (second.name, second.action, second.hit, second.filters) == ("pull.mid_stream", Action.DROP, 1, {})
        assert first.mark != second.mark

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("push.sometime=kill", "there is no failpoint 'push.sometime'; they are push.before_send, "),
            ("push.after_stage", "'' is not an action; they are kill, stop, hang, error, drop"),
            ("push.after_stage=explode", "'explode' is not an action"),
            ("push.after_stage=kill@0", "'0' is not the number of a visit; write one from 1"),
            ("push.after_stage=kill@", "'' is not the number of a visit"),
            ("push.after_stage=kill@x", "'x' is not the number of a visit"),
            ("push.after_stage=kill;rank=1", "rank=1 selects no process; write one of role, index, node, vw, stage, "),
            ("push.after_stage=kill;role=", "role= selects no process"),
            ("push.after_stage=kill;role", "role= selects no process"),
            ("push.after_stage=kill,", "there is no failpoint ''"),
        ],
    )
    def test_what_cannot_be_read_is_said(self, text: str, said: str) -> None:
        with pytest.raises(UserError) as caught:
            armed(text)
        assert said in str(caught.value)
        assert str(caught.value).startswith(VARIABLE)


class TestActing:
    def test_nothing_happens_when_nothing_is_said(self) -> None:
        arm({}, is_allowed=False, role="agent")
        for name in POINTS:
            reach(name)
        chunks = [b"a"]
        assert passing("push", chunks) is chunks

    def test_off_costs_next_to_nothing(self) -> None:
        number = 20_000
        fastest = min(timeit.repeat("reach('push.after_stage')", globals={"reach": reach}, number=number, repeat=20))
        assert fastest / number < 100e-9

    def test_the_asked_for_hit_and_no_other(self) -> None:
        armed("push.after_stage=error@3")
        assert acted("push.after_stage", 10) == [3]
        assert acted("push.after_apply", 10) == []

    def test_every_life_counts_anew(self) -> None:
        for _ in range(2):
            armed("push.after_stage=error@2")
            assert acted("push.after_stage", 3) == [2]

    def test_an_entry_with_a_mark_acts_once_whatever_restarts(self, tmp_path: Path) -> None:
        text = "push.after_stage=error@2;role=parameter_server,push.after_stage=error@3"
        hits = []
        for _ in range(3):
            armed(text, tmp_path, role="parameter_server", index=1)
            hits.append(acted("push.after_stage", 4))
        assert hits == [[2, 3], [], []]
        said = [json.loads(mark.read_text()) for mark in sorted(tmp_path.iterdir())]
        who = {"role": "parameter_server", "index": "1"}
        assert said == [
            {"pid": os.getpid(), "point": "push.after_stage", "action": "error", "hit": hit, "who": who}
            for hit in (2, 3)
        ]

    def test_of_many_threads_one_is_hit(self, tmp_path: Path) -> None:
        armed("push.after_stage=error@50", tmp_path)
        hits: list[list[int]] = []
        threads = [threading.Thread(target=lambda: hits.append(acted("push.after_stage", 25))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(map(len, hits)) == 1

    @pytest.mark.parametrize(
        ("filters", "is_hit"),
        [
            ("", True),
            (";role=stage", True),
            (";role=stage;vw=1;stage=0;incarnation=2", True),
            (";role=agent", False),
            (";vw=0", False),
            (";incarnation=0", False),
            (";index=1", False),
        ],
    )
    def test_filters_choose_the_process(self, *, filters: str, is_hit: bool) -> None:
        armed(f"push.before_send=error{filters}", role="stage", vw=1, stage=0, incarnation=2, index=None)
        assert acted("push.before_send") == [1] * is_hit

    def test_drop_looks_like_a_broken_connection(self) -> None:
        armed("push.after_reply=drop")
        with pytest.raises(PeerUnreachable, match=r"failpoint push\.after_reply dropped the reply"):
            reach("push.after_reply")

    def test_places_within_a_stream_each_time_it_is_sent(self) -> None:
        armed("push.mid_stream=error@2,push.after_last_chunk=error@2")
        chunks = passing("push", [b"a", b"b"])
        assert list(chunks) == [b"a", b"b"]
        got = []
        with pytest.raises(InjectedFault, match="mid_stream"):
            got += list(chunks)
        with pytest.raises(InjectedFault, match="after_last_chunk"):
            got.extend(chunks)
        assert got == [b"a", b"b"]

    def test_hang_holds_one_thread(self) -> None:
        armed("pull.mid_stream=hang")
        begun = threading.Event()

        def body() -> None:
            begun.set()
            reach("pull.mid_stream")

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        assert begun.wait(5.0)
        reach("pull.mid_stream")
        thread.join(0.05)
        assert thread.is_alive()


REACHES = """
import os, sys
from hetpipe.failpoints import arm, reach
arm(os.environ, is_allowed=True)
reach(sys.argv[1])
print("on")
"""


def reaching(name: str, action: str, once: Path) -> subprocess.Popen[str]:
    """A process that comes to a place and goes on."""
    environment = {**os.environ, VARIABLE: f"{name}={action}", ONCE_VARIABLE: str(once)}
    command = [sys.executable, "-c", REACHES, name]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=20)[0]


@pytest.mark.processes
class TestSignals:
    def test_kill_ends_the_process_there_and_once(self, tmp_path: Path) -> None:
        for status, said in ((-signal.SIGKILL, ""), (0, "on\n")):
            process = reaching("snapshot.half_written", "kill", tmp_path)
            assert output_of(process) == said
            assert process.returncode == status

    def test_stop_holds_it_there_until_it_is_told_to_go_on(self, tmp_path: Path) -> None:
        process = reaching("snapshot.temp_open", "stop", tmp_path)

        def is_stopped() -> bool:
            return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

        wait_until(is_stopped, timeout_seconds=20.0, what="stopped process")
        process.send_signal(signal.SIGCONT)
        assert output_of(process) == "on\n"


class TestPermission:
    def test_the_variable_alone_is_an_error(self) -> None:
        with pytest.raises(UserError, match=f"{VARIABLE} is set, .* unset it, or give {OPTION} if that is intended"):
            arm({VARIABLE: "push.after_stage=kill"}, is_allowed=False)
        assert acted("push.after_stage") == []

    def test_the_folder_of_the_marks_must_be_there(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="not a folder; create it first"):
            armed("push.after_stage=kill", tmp_path / "missing")

    @pytest.mark.parametrize("role", ["coordinator", "parameter_server", "agent"])
    def test_a_service_does_not_start(
        self, role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        monkeypatch.setenv(VARIABLE, "push.after_stage=kill")
        options = new_parser(role, "").parse_args(["--log", str(tmp_path / "log")])
        assert run_service(role, options, lambda _: pytest.fail("it serves")) == 1
        (sentence,) = capsys.readouterr().err.splitlines()
        assert sentence.startswith(f"{VARIABLE} is set")

    def test_a_service_knows_itself_by_its_options(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(VARIABLE, "push.after_stage=error;role=parameter_server;index=1")
        # It cannot be told to end here, which is no part of this test.
        monkeypatch.setattr("hetpipe.server.runtime.Shutdown", lambda exit_with_parent: None)
        found: list[list[int]] = []
        for index in (0, 1):
            options = new_parser("parameter_server", "").parse_args(["--log", str(tmp_path / "log"), OPTION])
            options.index = index
            assert run_service("parameter_server", options, lambda _: found.append(acted("push.after_stage"))) == 0
            disarm()
        assert found == [[], [1]]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("push.before_send=error;role=stage;vw=1;stage=0;incarnation=2", "InjectedFault"),
        ("push.before_send=error;role=stage;vw=1;stage=0;incarnation=0", "it came through"),
        ("push.before_send=explode", "'explode' is not an action"),
    ],
)
def test_a_stage_inherits_them_from_its_agent(
    entry: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    children = Children(send=lambda _: None, environment={VARIABLE: entry}, clock=SYSTEM_CLOCK)
    monkeypatch.setenv(VARIABLE, children._environment[VARIABLE])

    def run(*_: object, **__: object) -> None:
        reach("push.before_send")
        raise UserError("it came through")

    monkeypatch.setattr(stage_process, "_run", run)
    monkeypatch.setattr(stage_process, "settle_memory", lambda one_heap: None)
    job = case().job()
    config = StageConfig(
        job=job.model_dump(mode="json"),
        plan=plan_of(job),
        vw=VirtualWorkerIndex(1),
        stage=StageIndex(0),
        incarnation=Incarnation(2),
        device=DeviceConfig("cpu"),
        shard_addresses=(),
        run_dir=str(tmp_path),
        import_path="",
        host="127.0.0.1",
    )
    reports: list[str] = []
    pipe = SimpleNamespace(write=reports.append)
    assert stage_process.main(cast("ReportPipe", pipe), to_json(StageConfig, config).encode()) == 1
    assert said in reports[0]


#: Which roles run a module; the first prefix that fits counts.
ROLES_OF: Mapping[str, tuple[str, ...]] = {
    "hetpipe/server/shard/failing.py": ("stage",),
    "hetpipe/pipeline/clock_use.py": ("stage",),
    "hetpipe/pipeline/entry.py": ("stage",),
    "hetpipe/pipeline/moving.py": ("stage",),
    "hetpipe/pipeline/live_move.py": ("stage",),
    "hetpipe/pipeline/segment_run.py": ("stage",),
    "hetpipe/server/member_session.py": ("parameter_server", "agent"),
    "hetpipe/server/coordinator/": ("coordinator",),
    "hetpipe/server/shard/": ("parameter_server",),
    "hetpipe/wire/": ("parameter_server",),
    "hetpipe/durable.py": ("parameter_server",),
    "hetpipe/storage/wal/": ("parameter_server",),
    "hetpipe/checkpoint/stage_part.py": ("stage",),
    "hetpipe/checkpoint/": ("parameter_server",),
}

#: What a file goes through is written once for all kinds of files; who writes one says whether, and under which name.
_PREFIXED = "snapshot"


def placed() -> dict[str, Counter[str]]:
    """Name → how often each role has it."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(ROOT.glob("hetpipe/**/*.py")):
        module, source = path.relative_to(ROOT).as_posix(), path.read_text()
        if "failpoints" not in source or module == "hetpipe/failpoints.py":
            continue
        for node in ast.walk(ast.parse(source)):
            for name in _names(node) if isinstance(node, ast.Call) else ():
                roles = next((roles for prefix, roles in ROLES_OF.items() if module.startswith(prefix)), None)
                assert roles is not None, f"{module} is run by whom?"
                found[name].update(roles)
    return found


def _names(call: ast.Call) -> list[str]:
    """The places at a call: of `reach`, `passing`, or of what reaches `POINTS.PLACE` where the caller gives POINTS."""
    prefixes = [keyword.value for keyword in call.keywords if keyword.arg == "points"]
    for prefix in prefixes:
        is_passed_on = isinstance(prefix, ast.Name) and prefix.id == "points"
        assert is_passed_on or ast.literal_eval(prefix) == _PREFIXED, ast.unparse(call)
    match ast.unparse(call.func).rpartition(".")[2], [*map(ast.unparse, call.args)]:
        case "reach", ["f'{points}.{place}'"]:
            return []  # in `_reach`, whose calls are read
        case "reach", [name]:
            literal = re.sub(r"\{(self\._)?points\}", _PREFIXED, name).removeprefix("f")
            return [str(ast.literal_eval(literal))]
        case "_reach", ["points", place]:
            return [f"{_PREFIXED}.{ast.literal_eval(place)}"]
        case "passing", [operation, _]:
            return [f"{ast.literal_eval(operation)}.{place}" for place in ("mid_stream", "after_last_chunk")]
    return []


def test_every_place_is_in_the_code_once_for_each_of_its_roles() -> None:
    found = placed()
    assert set(found) <= set(POINTS), "a place that the table does not know"
    for name, point in POINTS.items():
        if name.startswith((_PREFIXED, "repartition.")):
            assert set(found[name]) == set(point.roles), f"{name}: several kinds of files, two kinds of moves"
        else:
            assert found[name] == Counter(point.roles), name


def test_the_table_has_every_injection_point_of_the_design() -> None:
    counts = Counter(name.partition(".")[0] for name in POINTS)
    assert counts == {
        "push": 7,
        "pull": 4,
        "commit": 4,
        "membership": 4,
        "repartition": 9,
        "freezing": 2,
        "takeover": 6,
        "replacement": 5,
        "snapshot": 7,
    }
