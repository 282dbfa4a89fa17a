"""The inspection of a local run: its process, what it answers, and what a mistake it finds leaves undone."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.errors import CallableError, DeadlineExceeded, JobError, JobFailed
from hetpipe.job.file import Job
from hetpipe.runs.interrupts import Interrupts
from hetpipe.runs.local_inspection import inspect_locally
from hetpipe.runs.outcome import ExitStatus
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.shell import Shell
from hetpipe.runs.supervisor import Programs
from hetpipe.runs.training import RunEnd, RunRequest, Training
from hetpipe.server.agent.inspection_order import InspectionAnswer
from hetpipe.values.events import JobState, Waiting
from hetpipe.values.plan import ModelReport
from hetpipe.values.wire import plain
from tests.cli.fakes import FakeCoordinator, RecordingView, shell_with, small_job
from tests.server.agent.programs import ends
from tests.server.coordinator.builders import model
from tests.support.fake_clock import FakeClock

pytestmark = pytest.mark.processes

ANSWERS = f"tell({{'ok': {plain(InspectionAnswer, InspectionAnswer(model()))!r}}})\n"
REFUSES = "tell({'error': 'CallableError', 'problems': ['model: there is no module `nope`']})\n"


def program(folder: Path, body: str) -> tuple[str, ...]:
    """A process that reads its order and behaves as `body` says."""
    script = folder / "inspection.py"
    script.write_text(
        "import json, os, sys\n"
        "order = json.loads(sys.stdin.readline())\n"
        "out = int(sys.argv[sys.argv.index('--report-fd') + 1])\n"
        "def tell(value):\n"
        "    os.write(out, (json.dumps(value) + chr(10)).encode())\n"
        "def phase(name, seconds):\n"
        "    tell({'kind': 'phase', 'phase': name, 'seconds': seconds})\n" + body
    )
    return (sys.executable, "-S", "-E", str(script))


def shell_of(folder: Path, body: str) -> Shell:
    environment = {"PATH": os.environ["PATH"], "SECRET": "s", "HETPIPE_X": "x"}
    world = shell_with(FakeCoordinator(), folder)
    return replace(world, environment=environment, inspection=program(folder, body))


def inspected(folder: Path, body: str, *, of: Job | None = None, phases: list[str] | None = None) -> ModelReport:
    def on_phase(phase: str, seconds: float) -> None:
        if phases is not None:
            phases.append(f"{phase} ({seconds:.0f} s)")

    shell = shell_of(folder, body)
    return inspect_locally(
        of or small_job(), folder, run_folder=folder, logs=folder / "logs", shell=shell, on_phase=on_phase
    )


def test_it_has_the_environment_of_an_agents_child_and_answers_with_a_report(tmp_path: Path) -> None:
    body = "print(json.dumps([order, dict(os.environ)]))\nphase('importing torch', 3.0)\n"
    phases: list[str] = []
    job = small_job(environment={"inherit": [], "set": {"MINE": "1"}})
    assert inspected(tmp_path, body + ANSWERS, of=job, phases=phases) == model()
    assert phases == ["importing torch (3 s)"]
    order, environment = json.loads((tmp_path / "logs" / "inspection.out").read_text())
    assert (order["import_path"], order["with_model"], order["measure"]) == (str(tmp_path), True, [])
    assert order["job"] == job.model_dump(mode="json")
    assert (environment["MINE"], environment["HETPIPE_X"], environment["OMP_NUM_THREADS"]) == ("1", "x", "1")
    assert environment["PYTHONSAFEPATH"] == "1", "the current folder must not hide installed packages"
    assert "SECRET" not in environment


def test_mistakes_come_back_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(CallableError, match="no module `nope`"):
        inspected(tmp_path, REFUSES)
    with pytest.raises(JobError) as raised:
        inspected(tmp_path, "tell({'error': 'JobError', 'problems': ['one', 'two']})\n")
    assert raised.value.problems == ("one", "two")
    with pytest.raises(JobFailed, match=r"inspection of the model was killed by SIGKILL .*; its last output: no luck"):
        inspected(tmp_path, "print('no luck', flush=True)\nos.kill(os.getpid(), 9)\n")


def test_one_that_is_silent_for_its_patience_is_given_up_and_ended(tmp_path: Path) -> None:
    class Passing(FakeClock):
        """Seconds pass whenever it is read after the last word."""

        def monotonic(self) -> float:
            if len(pids) == 2:
                self.advance(1.0)
            return super().monotonic()

    def on_phase(phase: str, _: float) -> None:
        clock.advance(300.0)  # it has said something, so that was no silence
        pids.append(int(phase))

    clock = Passing()
    pids: list[int] = []
    body = "phase(str(os.getpid()), 1.0)\nphase(str(os.getpid()), 2.0)\nsys.stdin.read()\n"
    shell = replace(shell_of(tmp_path, body), clock=clock)
    job = small_job(patience={"inspection": "4s"})
    expected = r"the inspection of the model has reported nothing for 4 s; its last phase was \d+"
    with pytest.raises(DeadlineExceeded, match=expected):
        inspect_locally(job, tmp_path, run_folder=tmp_path, logs=tmp_path, shell=shell, on_phase=on_phase)
    assert ends(pids[0])


def silent_services(folder: Path) -> Programs:
    """Each leaves its process id behind, and is never ready."""
    note = f"import os, signal; open({str(folder / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n'); signal.pause()"
    mark = (sys.executable, "-S", "-E", "-c", note)
    return Programs(coordinator=mark, parameter_server=mark, agent=mark)


def trained(
    folder: Path, body: str, view: RecordingView, *, clock: FakeClock | None = None
) -> tuple[RunEnd, RunFolder]:
    """A local run whose coordinator leaves its process id behind, and is never ready."""
    shell = replace(shell_of(folder, body), programs=silent_services(folder), clock=clock or FakeClock())
    run = RunFolder.create(folder / "run", name="small", clock=FakeClock())
    request = RunRequest(job=small_job(), import_path=folder)
    with Interrupts([]) as interrupts:
        return Training(request, run, shell, view=view, interrupts=interrupts).run(), run


#: The inspection waits for the first line of the coordinator: they are under way at the same time, or for ever.
WHEN_A_SERVICE_RUNS = """
import time
note = os.path.join(order["import_path"], "pid")
while not (os.path.exists(note) and open(note).read().endswith(chr(10))):
    time.sleep(0.01)
"""


def test_services_start_while_the_model_is_inspected_and_a_mistake_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    view = RecordingView()
    end, run = trained(tmp_path, WHEN_A_SERVICE_RUNS + REFUSES, view)
    assert (end.state, end.error, end.exit_status) == (JobState.FAILED, "CallableError", ExitStatus.USAGE)
    assert end.sentences == ("model: there is no module `nope`",)
    assert view.remarks[-1] == "inspecting the job: optimizer, imports, loss, data, model, one minibatch"
    assert ends(int((tmp_path / "pid").read_text()), timeout_seconds=0.0), "nothing is left when the command ends"
    assert run.read_record().job_id == "", "nobody was told of the job"
    written = run.read_result()
    assert written is not None
    assert (written.state, written.errors) == ("failed", end.sentences)
    assert not (tmp_path / "runs" / "latest").is_symlink()


class Slow(FakeClock):
    """Ten seconds pass between two looks."""

    def monotonic(self) -> float:
        self.advance(10.0)
        return super().monotonic()


def test_a_phase_that_has_just_begun_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(RecordingView):
        def show(self, event: object) -> None:
            if isinstance(event, Waiting):
                told.append(event.sentence.split(", which is ")[1])

    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    body = "phase('importing', 0.0)\nphase('importing', 1.0)\nphase('proving', 0.0)\n" + REFUSES
    trained(tmp_path, body, Told(), clock=Slow())
    assert told == ["importing (1 s)"]


def test_ctrl_c_during_the_inspection_ends_it_and_starts_nothing(tmp_path: Path) -> None:
    class Pressed(RecordingView):
        def show(self, event: object) -> None:
            assert isinstance(event, Waiting)
            pids.append(int(event.sentence.split(" is ")[1].split()[0]))
            raise KeyboardInterrupt

    pids: list[int] = []
    shell = replace(shell_of(tmp_path, "phase(str(os.getpid()), 6.0)\nsys.stdin.read()\n"), clock=Slow())
    shell = replace(shell, programs=silent_services(tmp_path))
    run = RunFolder.create(tmp_path / "run", name="small", clock=FakeClock())
    with Interrupts([]) as interrupts:
        request = RunRequest(job=small_job(), import_path=tmp_path)
        end = Training(request, run, shell, view=Pressed(), interrupts=interrupts).run()
    assert (end.state, end.sentences) == (JobState.STOPPED, ("the run was stopped before it began",))
    assert ends(pids[0])
