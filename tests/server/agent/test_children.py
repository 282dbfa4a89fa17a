"""Real child processes: fed, heard, ended, and told about."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.certs.authority import facts_of
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.lifecycle.configs import Assignment, stage_commands
from hetpipe.decide.planner.partition import plan_job
from hetpipe.errors import HetpipeError, PermissionDenied, Unavailable
from hetpipe.forking.process import Launch, Process, spawn
from hetpipe.profiler.link_order import LinkAnswer
from hetpipe.roots import Roots
from hetpipe.server.agent.child import MAX_UNSENT_BYTES, Child, ChildSpec, Listener, end_children
from hetpipe.server.agent.children import Children, Programs
from hetpipe.server.agent.stage_certificates import StageCertificates
from hetpipe.values.commands import (
    AgentReport,
    ChildExit,
    InspectCommand,
    InspectionResult,
    InspectionStep,
    KeyedStageReport,
    LinkAwaited,
    LinkResult,
    LinkTask,
    MeasureLinkCommand,
    StageKey,
    StartStageCommand,
    StopVirtualWorkerCommand,
    end_key,
)
from hetpipe.values.ids import AgentId, Incarnation, JobId, Term, VirtualWorkerIndex
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.rewinds import MODEL_FILE
from hetpipe.values.run import StageConditions, StageDone, StageEvaluation, StageFailed, StageReady
from hetpipe.values.wire import plain
from hetpipe.wire.tls import TLS_VARIABLE, Tls
from tests.certs.cluster import AGENT, cluster
from tests.decide.lifecycle.test_known_links import copies, link
from tests.polling import wait_until
from tests.profiler.builders import measurement
from tests.server.agent.programs import ends, environment, fake_programs
from tests.server.coordinator.builders import JOB_ID, agent_info, job, model, shard_member, submission

pytestmark = pytest.mark.processes


class Bench:
    """Children and what they told."""

    def __init__(
        self,
        folder: Path,
        programs: Programs | None = None,
        *,
        certificates: StageCertificates | None = None,
        roots: Roots | None = None,
    ) -> None:
        self.run_dir = folder / "run"
        self.reports: queue.SimpleQueue[AgentReport] = queue.SimpleQueue()
        self.children = Children(
            send=self.reports.put,
            environment={**environment(), TLS_VARIABLE: "/the/agent's"},
            clock=SYSTEM_CLOCK,
            programs=programs or fake_programs(folder),
            certificates=certificates,
            roots=roots or Roots(),
        )

    def start(self, behaviour: str, *, stage: int = 0, storage: object = None) -> StartStageCommand:
        handed_in = replace(submission(job(), str(self.run_dir)), import_path=behaviour)
        assignment = Assignment(
            job=job(),
            submission=handed_in,
            plan=plan_job(job(), model(), [agent_info()], Term(1), JOB_ID),
            agents=(agent_info(),),
            shards=(shard_member(0),),
        )
        command = stage_commands(assignment)[stage]
        if storage is not None:
            command = replace(command, config=replace(command.config, job={**command.config.job, "storage": storage}))
        self.children.start_stage(command)
        return command

    def inspect(self, behaviour: str) -> InspectionResult:
        self.children.inspect(InspectCommand(JOB_ID, "{}", behaviour, str(self.run_dir)))
        result = self.next()
        assert isinstance(result, InspectionResult)
        return result

    def next(self) -> AgentReport:
        return self.reports.get(timeout=20.0)

    def next_exit(self) -> ChildExit:
        while True:
            report = self.next()
            if isinstance(report, ChildExit):
                return report

    def next_ready_pid(self) -> int:
        while True:
            report = self.next()
            if isinstance(report, KeyedStageReport) and isinstance(report.report, StageReady):
                return report.report.pid


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.children.stop_all()


class TestStages:
    def test_one_that_is_refused_has_failed_through_nobodys_fault(self, bench: Bench) -> None:
        command = bench.start("done")
        bench.next_exit()
        bench.children.refuse_stage(command, Unavailable("agent n0 was told to end"))
        failed = bench.next()
        assert isinstance(failed, KeyedStageReport)
        sentence = "its process could not be started: agent n0 was told to end"
        assert failed.report == StageFailed("Unavailable", sentence, secondary=True)
        assert bench.next() == ChildExit(command.key, 0, 1)

    def test_reports_come_in_order_and_the_exit_last(self, bench: Bench) -> None:
        key = bench.start("done").key

        heard = [bench.next() for _ in range(4)]

        assert [type(report.report) for report in heard[:3] if isinstance(report, KeyedStageReport)] == [
            StageReady,
            StageEvaluation,
            StageDone,
        ]
        assert isinstance(heard[3], ChildExit)
        assert (heard[3].key, heard[3].exit_code, heard[3].last_output) == (key, 0, "")
        assert bench.children.jobs() == ()

    def test_who_is_ready_is_told_again(self, bench: Bench) -> None:
        bench.start("hang")
        ready = bench.next()
        assert isinstance(ready, KeyedStageReport)
        assert isinstance(ready.report, StageReady)
        bench.children.resend()
        assert bench.next() == ready

    def test_so_are_its_newest_conditions(self, bench: Bench) -> None:
        bench.start("cut")
        ready, _, newest = (bench.next() for _ in range(3))
        assert isinstance(newest, KeyedStageReport)
        assert isinstance(newest.report, StageConditions)
        assert [condition.times for condition in newest.report.conditions] == [2]
        bench.children.resend()
        assert [bench.next(), bench.next()] == [ready, newest]

    def test_but_not_after_its_end(self, bench: Bench) -> None:
        bench.start("done")
        bench.next_exit()
        bench.children.resend()
        assert bench.reports.empty()

    def test_the_last_words_are_told(self, bench: Bench) -> None:
        bench.start("fail")

        report = bench.next_exit()

        assert (report.exit_code, report.last_output) == (3, "ValueError: the last words")
        assert (bench.run_dir / "logs" / "vw-0-stage-0.out").read_text() == "a traceback\nValueError: the last words\n"

    def test_a_signal_is_told_as_one(self, bench: Bench) -> None:
        bench.start("hang")
        os.kill(bench.next_ready_pid(), signal.SIGKILL)

        assert bench.next_exit().exit_code == -signal.SIGKILL

    def test_starting_a_stage_that_runs_changes_nothing(self, bench: Bench) -> None:
        bench.start("hang")
        first = bench.next_ready_pid()
        bench.start("hang")
        bench.start("hang", stage=1)
        assert bench.next_ready_pid() != first
        assert bench.children.jobs() == (JOB_ID,)

    def test_what_is_no_report_is_left_out(self, bench: Bench) -> None:
        bench.start("babble")

        assert isinstance(bench.next(), KeyedStageReport)
        assert isinstance(bench.next(), ChildExit)

    def test_a_program_that_cannot_be_started_has_failed(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, Programs(stage=("/no/such/program",), inspection=("/no/such/program",)))
        bench.start("done")

        failed, gone = bench.next(), bench.next()

        assert isinstance(failed, KeyedStageReport)
        assert isinstance(failed.report, StageFailed)
        assert "could not be started" in failed.report.sentence
        assert isinstance(gone, ChildExit)
        assert "No such file" in bench.inspect("ok").problems[0]

    @pytest.mark.parametrize(
        ("storage", "told"),
        [
            ("s3://other/x", "storage s3://other/x is not below s3://ours/runs, as required here"),
            (7, "storage: 7 is not the URL of an object store; write it as text"),
        ],
    )
    def test_one_with_an_object_store_that_is_not_permitted_here_has_failed(
        self, tmp_path: Path, storage: object, told: str
    ) -> None:
        bench = Bench(tmp_path, roots=Roots(storage=("s3://ours/runs",)))
        bench.start("trains", storage=storage)
        failed = bench.next()
        assert isinstance(failed, KeyedStageReport)
        assert isinstance(failed.report, StageFailed)
        assert f"its process could not be started: {told}" in failed.report.sentence


class TestEnding:
    def test_a_job_is_ended_in_order(self, bench: Bench) -> None:
        for stage in range(3):
            bench.start("hang", stage=stage)
            bench.next_ready_pid()
        bench.children.stop_job(JOB_ID)

        assert {bench.next_exit().exit_code for _ in range(3)} == {-signal.SIGTERM}
        assert bench.children.jobs() == ()

    def test_a_child_that_ignores_it_is_killed(self, bench: Bench) -> None:
        bench.start("stubborn")
        bench.next_ready_pid()
        started = SYSTEM_CLOCK.monotonic()
        bench.children.stop_all()

        assert bench.next_exit().exit_code == -signal.SIGKILL
        assert 1.5 <= SYSTEM_CLOCK.monotonic() - started < 5.0

    def test_a_virtual_worker_is_killed_though_its_processes_were_stopped(self, bench: Bench) -> None:
        commands = [bench.start("hang", stage=stage) for stage in range(3)]
        pids = [bench.next_ready_pid() for _ in commands]
        victims = {command.key for command in commands if command.config.vw == 0}
        assert 0 < len(victims) < len(commands)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        bench.children.kill_worker(StopVirtualWorkerCommand(JOB_ID, VirtualWorkerIndex(0), Incarnation(3), Term(1)))
        exits = [bench.next_exit() for _ in victims]

        assert {report.key for report in exits} == victims
        assert {(report.exit_code, report.ordered) for report in exits} == {(-signal.SIGKILL, True)}
        assert bench.children.counts.running["stage"] == len(commands) - len(victims)

    def test_one_that_was_dead_already_did_not_die_of_it(self, tmp_path: Path) -> None:
        listener = Listener(on_line=lambda _: None, on_exit=lambda _code, _words: None)
        script = ("import os; os.read(0, 1); os.kill(os.getpid(), 9)", "import signal; signal.pause()")
        children = [
            Child(
                ChildSpec(
                    name="child",
                    command=(sys.executable, "-S", "-c", source),
                    first_line="{}",
                    environment=environment(),
                    log_path=tmp_path / "child.out",
                ),
                listener,
            )
            for source in script
        ]
        with children[0]._process._lock, suppress(ChildProcessError):  # nobody takes note of its end from now on
            os.waitid(os.P_PID, children[0].pid, os.WEXITED | os.WNOWAIT)
        # Whether it was taken note of meanwhile or not.
        assert [child.send_signal(signal.SIGKILL) for child in children] == [False, True]
        assert all(child.exited.wait(10.0) for child in children)

    def test_a_later_life_is_not_meant(self, bench: Bench) -> None:
        bench.start("hang")
        pid = bench.next_ready_pid()
        bench.children.kill_worker(
            StopVirtualWorkerCommand(JobId("other"), VirtualWorkerIndex(0), Incarnation(0), Term(1))
        )
        bench.children.kill_worker(StopVirtualWorkerCommand(JOB_ID, VirtualWorkerIndex(0), Incarnation(-1), Term(1)))
        os.kill(pid, signal.SIGKILL)
        report = bench.next_exit()

        assert (report.exit_code, report.ordered) == (-signal.SIGKILL, False)

    def test_stopping_what_is_not_there_is_nothing(self, bench: Bench) -> None:
        bench.children.stop_job(JOB_ID)
        bench.children.stop_all()

    def test_its_own_children_end_with_it(self, tmp_path: Path) -> None:
        script = tmp_path / "parent.py"
        script.write_text(
            "import os, subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'])\n"
            "os.write(int(sys.argv[2]), f'{child.pid}\\n'.encode())\n"
        )
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        exits: queue.SimpleQueue[int] = queue.SimpleQueue()
        spec = ChildSpec(
            name="parent",
            command=(sys.executable, "-S", str(script)),
            first_line="{}",
            environment=environment(),
            log_path=tmp_path / "parent.out",
        )
        Child(spec, Listener(on_line=lines.put, on_exit=lambda code, _: exits.put(code)))
        grandchild = int(lines.get(timeout=10.0))
        assert exits.get(timeout=10.0) == 0

        assert ends(grandchild)

    def test_it_reads_what_it_is_told(self, tmp_path: Path) -> None:
        child, lines = self.listening(tmp_path, "line, *rest = [sys.stdin.readline() for _ in range(3)]; report(rest)")
        wait_until(lambda: child.tell(b"one\n"), timeout_seconds=10.0, what="its first line is written")
        assert child.tell(b"two\n")
        assert lines.get(timeout=10.0) == b"['one\\n', 'two\\n']\n"
        assert child.exited.wait(10.0)
        assert not child.tell(b"three\n")

    def test_nobody_waits_for_one_that_does_not_read(self, tmp_path: Path) -> None:
        child, lines = self.listening(tmp_path, "sys.stdin.readline(); report(0); time.sleep(60)")
        assert lines.get(timeout=10.0) == b"0\n"
        kilobytes, told = bytes(1024), 0
        while child.tell(kilobytes):
            told += 1
        assert told * 1024 > MAX_UNSENT_BYTES
        assert not child.tell(b""), "what it is told has a hole"
        child.send_signal(signal.SIGKILL)
        assert child.exited.wait(10.0)

    def listening(self, folder: Path, source: str) -> tuple[Child, queue.SimpleQueue[bytes]]:
        script = folder / "child.py"
        head = "import os, sys, time\ndef report(what): os.write(int(sys.argv[2]), f'{what}\\n'.encode())\n"
        script.write_text(f"{head}{source}\n")
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        spec = ChildSpec(
            name="child",
            command=(sys.executable, "-S", str(script)),
            first_line="{}",
            environment=environment(),
            log_path=folder / "child.out",
        )
        return Child(spec, Listener(on_line=lines.put, on_exit=lambda _code, _words: None)), lines

    def test_ending_nobody_takes_no_time(self) -> None:
        end_children([], grace_seconds=10.0, clock=SYSTEM_CLOCK)


class TestInspections:
    def test_a_model_is_reported(self, bench: Bench) -> None:
        assert bench.inspect("fine") == InspectionResult(JOB_ID, model(), measurements=(measurement("cpu"),))

    def test_its_steps_are_told_while_it_measures(self, bench: Bench) -> None:
        bench.children.inspect(InspectCommand(JOB_ID, "{}", "fine", str(bench.run_dir), measure=("cpu",)))

        steps = [bench.next(), bench.next()]

        assert steps == [InspectionStep(JOB_ID, ProfileStep("cpu", "a", done, 2)) for done in range(2)]
        assert isinstance(bench.next(), InspectionResult)

    def test_mistakes_are_reported(self, bench: Bench) -> None:
        result = bench.inspect("unimportable")

        assert (result.error, result.problems) == ("JobError", ("model: no module named 'model'", "loss: the same"))

    def test_an_end_without_a_word_is_reported_too(self, bench: Bench) -> None:
        result = bench.inspect("dies")

        assert result.error == "JobFailed"
        assert result.problems == ("the inspection of the model was killed by SIGKILL before it reported",)

    def test_a_killed_inspection_leaves_no_half_of_a_model(self, bench: Bench) -> None:
        unfinished = bench.run_dir / f"{MODEL_FILE}.tmp"
        unfinished.parent.mkdir()
        unfinished.write_text("half")
        bench.inspect("dies")
        assert not unfinished.exists()


class TestLinks:
    """One end of a link that is measured: a process that tells where it awaits the other, and what came of it."""

    TASK = LinkTask(number=2, other=AgentId("n1"), run_dir="")

    def measured(self, folder: Path, body: str, **changes: Any) -> Bench:
        program = folder / "link.py"
        program.write_text(
            "import json, os, sys\norder = json.loads(sys.stdin.readline())\n"
            "out = int(sys.argv[sys.argv.index('--report-fd') + 1])\n"
            "def tell(value):\n    os.write(out, (json.dumps(value) + '\\n').encode())\n" + body
        )
        bench = Bench(folder, Programs(link=(sys.executable, "-S", "-E", str(program))))
        task = replace(self.TASK, run_dir=str(bench.run_dir), **changes)
        bench.children.measure_link(MeasureLinkCommand(JOB_ID, task), AgentId("n0"), host="10.0.0.1")
        return bench

    def test_it_is_awaited_at_the_agents_address_and_its_measurement_is_told(self, tmp_path: Path) -> None:
        found = link("n0", "n1", 3e8)
        answer = json.dumps(plain(LinkAnswer, LinkAnswer(link=found, copies=(copies("n0", 1e9),))))
        body = "tell({'kind': 'phase', 'phase': 'importing torch', 'seconds': 1.0})\n"
        body += "tell({'address': order['host'] + ':70'})\n"
        body += "assert [order[k] for k in ('role', 'node', 'other', 'number')] == ['await', 'n0', 'n1', 2], order\n"
        bench = self.measured(tmp_path, body + f"tell({{'ok': json.loads({answer!r})}})\n")
        assert bench.next() == LinkAwaited(JOB_ID, 2, "10.0.0.1:70")
        assert bench.next() == LinkResult(JOB_ID, 2, MeasuredLinks(links=(found,), copies=(copies("n0", 1e9),)))
        assert bench.children.counts.started["link"] == 1

    def test_the_other_end_calls_where_it_is_told(self, tmp_path: Path) -> None:
        body = "assert (order['role'], order['address']) == ('call', 'n1.host:70'), order\n"
        bench = self.measured(tmp_path, body + "tell({'ok': {}})\n", address="n1.host:70")
        assert bench.next() == LinkResult(JOB_ID, 2)

    def test_what_went_wrong_is_told(self, tmp_path: Path) -> None:
        bench = self.measured(tmp_path, "tell({'error': 'PeerUnreachable', 'problems': ['nobody came']})\n")
        assert bench.next() == LinkResult(JOB_ID, 2, problem="nobody came")
        bench = self.measured(tmp_path, "os.kill(os.getpid(), 9)\n")
        sentence = "the measuring process was killed by SIGKILL before it reported"
        assert bench.next() == LinkResult(JOB_ID, 2, problem=sentence)

    def test_the_end_of_the_job_is_its_end(self, tmp_path: Path) -> None:
        bench = self.measured(tmp_path, "tell({'address': '10.0.0.1:70'})\nsys.stdin.read()\n")
        assert bench.next() == LinkAwaited(JOB_ID, 2, "10.0.0.1:70")
        assert bench.children.jobs() == (JOB_ID,)
        bench.children.stop_job(JOB_ID)
        told = bench.next()
        assert isinstance(told, LinkResult)
        assert "was killed by SIGTERM" in told.problem


class TestSurroundings:
    def test_children_are_single_threaded_and_see_nothing_else(self, tmp_path: Path) -> None:
        show = tmp_path / "show.py"
        show.write_text("import os, json; print(json.dumps(dict(os.environ)))\n")
        bench = Bench(tmp_path, Programs(stage=(sys.executable, "-S", "-E", str(show)), inspection=()))
        bench.start("done")
        bench.next_exit()

        shown = (bench.run_dir / "logs" / "vw-0-stage-0.out").read_text()
        for variable in ('"OMP_NUM_THREADS": "1"', '"MKL_NUM_THREADS": "1"', '"PATH"'):
            assert variable in shown
        assert "HOME" not in shown
        assert TLS_VARIABLE not in shown


class TestCertificates:
    def test_a_stage_is_itself_and_not_its_agent(self, tmp_path: Path) -> None:
        show = tmp_path / "show.py"
        show.write_text(
            f"import os, pathlib; print((pathlib.Path(os.environ[{TLS_VARIABLE!r}]) / 'cert.pem').read_text())\n"
        )
        certificates = certified()
        bench = Bench(
            tmp_path, Programs(stage=(sys.executable, "-S", "-E", str(show)), inspection=()), certificates=certificates
        )
        started = bench.start("done", stage=1)
        bench.next_exit()

        shown = (bench.run_dir / "logs" / "vw-0-stage-1.out").read_bytes()
        key = started.key
        assert facts_of(shown).peer == key.peer
        assert list(certificates._root.path.glob("*/")) == [], "the end of the process is the end of its certificate"
        certificates.close()

    def test_an_end_of_a_link_that_encrypts_is_that_end(self, tmp_path: Path) -> None:
        show = tmp_path / "show.py"
        show.write_text(
            f"import os, pathlib; print((pathlib.Path(os.environ[{TLS_VARIABLE!r}]) / 'cert.pem').read_text())\n"
        )
        certificates = certified()
        bench = Bench(tmp_path, Programs(link=(sys.executable, "-S", "-E", str(show))), certificates=certificates)
        task = LinkTask(number=2, other=AgentId("n1"), run_dir=str(bench.run_dir))
        bench.children.measure_link(MeasureLinkCommand(JOB_ID, task), AgentId("n0"), host="10.0.0.1")
        assert isinstance(bench.next(), LinkResult)

        shown = (bench.run_dir / "logs" / "link-2-n0.out").read_bytes()
        assert facts_of(shown).peer == end_key(JOB_ID, 2, is_first=True).peer
        assert list(certificates._root.path.glob("*/")) == []
        certificates.close()

    def test_an_inspection_is_nobody(self, tmp_path: Path) -> None:
        show = tmp_path / "show.py"
        show.write_text("import os; print(dict(os.environ))\n")
        inspection = (sys.executable, "-S", "-E", str(show))
        certificates = certified()
        bench = Bench(tmp_path, Programs(stage=(), inspection=inspection), certificates=certificates)
        bench.inspect("fine")

        shown = (bench.run_dir / "logs" / "inspection.out").read_text()
        assert "PATH" in shown
        assert TLS_VARIABLE not in shown
        certificates.close()

    def test_a_stage_that_nobody_certifies_has_failed(self, tmp_path: Path) -> None:
        certificates = certified(PermissionDenied("no stage of that name is to run on agent n0"))
        bench = Bench(tmp_path, certificates=certificates)
        key = bench.start("done").key

        failed, gone = bench.next(), bench.next()

        assert isinstance(failed, KeyedStageReport)
        assert failed.report == StageFailed(
            "PermissionDenied",
            "its process could not be started: no stage of that name is to run on agent n0",
            secondary=True,
        )
        assert gone == ChildExit(key, 0, 1)
        assert bench.children.jobs() == ()
        certificates.close()

    def test_a_program_that_cannot_be_started_leaves_no_certificate(self, tmp_path: Path) -> None:
        certificates = certified()
        Bench(tmp_path, Programs(stage=("/no/such/program",), inspection=()), certificates=certificates).start("done")
        assert list(certificates._root.path.glob("*/")) == []
        certificates.close()


def certified(error: HetpipeError | None = None) -> StageCertificates:
    """Certificates by a coordinator that asks nothing, or refuses."""

    def certify(stage: StageKey, request_pem: bytes) -> bytes:
        if error is not None:
            raise error
        return cluster().signer().sign_stage(request_pem, stage.peer)

    return StageCertificates(Tls(cluster().tls(AGENT).folder), certify)


class TestWhatAChildIsForkedFrom:
    def test_heartbeats_go_on_while_it_is_not_ready(self, tmp_path: Path) -> None:
        """It may import torch for long; who asks for the agent's jobs and stages meanwhile is answered."""
        asked, goes_on = threading.Event(), threading.Event()

        def starter(launch: Launch) -> Process:
            asked.set()
            assert goes_on.wait(10.0)
            return spawn(launch)

        bench = Bench(tmp_path, replace(fake_programs(tmp_path), starter=starter))
        starting = threading.Thread(target=bench.start, args=("done",))
        starting.start()
        assert asked.wait(10.0)
        asking = threading.Thread(target=bench.children.jobs)
        asking.start()
        asking.join(5.0)
        was_answered = not asking.is_alive()
        goes_on.set()
        starting.join()
        asking.join()
        assert was_answered
        assert bench.next_exit().exit_code == 0
        assert bench.children.stages() == (), "it ended after it had been entered"
