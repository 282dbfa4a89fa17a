"""`hetpipe profile`: what it tells, what it writes, and how it fails."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.cli.plan import profiling
from hetpipe.cli.plan.profile import lines
from hetpipe.cli.plan.profile_view import ProfileBar, ProfileLines
from hetpipe.cli.plan.profiling import ProfileOptions, profile_job
from hetpipe.decide.planner.assembly import profile_of
from hetpipe.errors import CallableError, JobError, JobFailed
from hetpipe.profiler.order import ProfileAnswer, ProfileOrder
from hetpipe.runs.shell import Shell
from hetpipe.values import wire
from hetpipe.values.document import read_document
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.profile import Profile
from tests.cli.fakes import small_job
from tests.numerics.compare import ROOT
from tests.profiler.builders import layer, measurement
from tests.server.agent.programs import ends
from tests.support.fake_clock import FakeClock

NOW = 1_700_000_000.0
ANSWER = ProfileAnswer((measurement("cpu", layer("0", parameters=9), layer("head", flops=10**9)),), ())
STEP = ProfileStep("cpu", "head", 1, 2)


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = small_job().model_dump(mode="json", exclude_none=True)
    Path("job.yaml").write_text(yaml.safe_dump(job))


def shell() -> Shell:
    return Shell(
        clock=FakeClock(wall=NOW),
        environment={"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(Path.cwd() / "cache")},
        current=Path.cwd(),
    )


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[ProfileOrder]:
    """Answers in place of the process; the orders it got."""
    got: list[ProfileOrder] = []

    def answer(order: ProfileOrder, program: Any, environment: Any, on_step: Callable[[ProfileStep], None]) -> Any:
        got.append(order)
        on_step(STEP)
        return ANSWER

    monkeypatch.setattr(profiling, "_ask", answer)
    return got


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", "job.yaml", *arguments], obj=shell())


def test_tells_layer_by_layer(orders: list[ProfileOrder]) -> None:
    result = invoke()
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "measuring=head on=cpu layers=1/2",
        "layer   parameters  activations  output     cpu forward ms  backward ms",
        "0       36 bytes    300 bytes    100 bytes           2.000        5.000",
        "1 head  0 bytes     300 bytes    100 bytes           2.000        5.000",
        "sum     36 bytes    600 bytes                        4.000       10.000",
        "",
        "per minibatch of 4 samples; the last layer's figures include the loss",
    ]


def test_options_become_an_order(orders: list[ProfileOrder]) -> None:
    assert invoke("--fresh", "--repeats", "7", "--types", "cpu", "--set", "batch_size=2").exit_code == 0
    (order,) = orders
    assert (order.fresh, order.repeats, order.with_cpu, order.job["batch_size"]) == (True, 7, True, 2)
    assert order.import_path == str(Path.cwd())
    assert order.cache_folder == str(Path.cwd() / "cache" / "hetpipe" / "profiles")
    assert invoke().exit_code == 0
    assert (orders[1].fresh, orders[1].repeats, orders[1].with_cpu) == (False, None, False)


def test_types_that_are_not_here_are_estimated_and_said_to_be(orders: list[ProfileOrder]) -> None:
    result = invoke("--types", "T4,cpu,T4", "--out", "p.json")
    assert result.exit_code == 0, result.output
    assert "T4 (estimated) forward ms" in result.stdout
    assert "estimated from peak figures of the catalogue, not measured: T4" in result.stdout
    assert "written to p.json" in result.stdout
    found = read_document(Profile, Path("p.json"))
    assert (found.device_types, found.estimated) == (("T4", "cpu"), ("T4",))


def test_the_json_line_is_the_profile(orders: list[ProfileOrder]) -> None:
    result = invoke("--json")
    assert result.exit_code == 0, result.output
    assert Profile.model_validate_json(result.stdout) == profile_of(
        "tests.models:mlp32", 4, measured=ANSWER.measurements
    )
    assert "layer   parameters" in result.stderr


def test_a_cached_type_is_told_with_its_age(orders: list[ProfileOrder], monkeypatch: pytest.MonkeyPatch) -> None:
    old = replace(ANSWER.measurements[0], measured_at=NOW - 7384.0)
    monkeypatch.setattr(profiling, "_ask", lambda *_: ProfileAnswer((old,), ("cpu",)))
    result = invoke()
    assert (
        "cpu was measured 2 h 03 min ago, and nothing has changed since; measure it again with --fresh" in result.stdout
    )


def test_an_unknown_type_is_refused(orders: list[ProfileOrder]) -> None:
    result = invoke("--types", "RTX_309", "--json")
    assert result.exit_code == 2
    (error,) = json.loads(result.stdout)["errors"]
    assert "is not among those here (cpu)," in error
    assert "did you mean `RTX_3090`?" in error


def test_a_file_that_cannot_be_written(orders: list[ProfileOrder]) -> None:
    result = invoke("--out", "nowhere/p.json")
    assert result.exit_code == 2
    assert "cannot write nowhere/p.json" in result.stderr


def test_lines_come_every_few_seconds() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with ProfileLines(stream, clock) as view:
        for position in range(8):
            view.show(ProfileStep("T4", "block one", position, 8))
            clock.advance(2.0)
    assert stream.getvalue().splitlines() == [
        'measuring="block one" on=T4 layers=0/8',
        'measuring="block one" on=T4 layers=3/8',
        'measuring="block one" on=T4 layers=6/8',
    ]


class Terminal(io.StringIO):
    """Looks like one."""

    def isatty(self) -> bool:
        return True


def test_the_bar_names_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with ProfileBar(stream, FakeClock()) as view:
        view.show(STEP)
    assert "measuring head on cpu" in stream.getvalue()
    assert "1/2" in stream.getvalue()


def test_a_table_has_a_row_per_layer() -> None:
    found = lines(profile_of("m", 1, measured=ANSWER.measurements))
    assert [line.split()[0] for line in found] == ["layer", "0", "1", "sum"]


# -- with a process ----------------------------------------------------------------------------------------------------


def fake_program(body: str) -> tuple[str, ...]:
    """A process that reads its order and behaves as `body` says."""
    script = Path.cwd() / "program.py"
    script.write_text(
        "import json, os, sys\n"
        "order = json.loads(sys.stdin.readline())\n"
        "out = int(sys.argv[sys.argv.index('--report-fd') + 1])\n"
        "def tell(value):\n"
        "    os.write(out, (json.dumps(value) + chr(10)).encode())\n" + body
    )
    return (sys.executable, "-S", "-E", str(script))


def ask(body: str, steps: list[ProfileStep] | None = None) -> Profile:
    wish = ProfileOptions(program=fake_program(body))
    heard = [] if steps is None else steps
    return profile_job(small_job(), wish, shell(), heard.append).profile


@pytest.mark.processes
def test_the_process_is_heard() -> None:
    steps: list[ProfileStep] = []
    answer = (
        f"tell({{'step': {wire.plain(ProfileStep, STEP)!r}}})\ntell({{'ok': {wire.plain(ProfileAnswer, ANSWER)!r}}})\n"
    )
    assert ask(answer, steps).layers[1].name == "head"
    assert steps == [STEP]


@pytest.mark.processes
def test_errors_of_the_users_code_come_back_as_they_are() -> None:
    with pytest.raises(CallableError, match="no `build`"):
        ask("tell({'error': 'CallableError', 'problems': ['model: no `build`']})\n")
    with pytest.raises(JobError) as raised:
        ask("tell({'error': 'JobError', 'problems': ['one', 'two']})\n")
    assert raised.value.problems == ("one", "two")


@pytest.mark.processes
def test_a_process_that_dies_is_an_error_with_its_last_words() -> None:
    with pytest.raises(JobFailed, match=r"was killed by SIGKILL before it was done; its last output: out of luck"):
        ask("print('out of luck', flush=True)\nos.kill(os.getpid(), 9)\n")


@pytest.mark.processes
def test_the_process_does_not_outlive_the_question() -> None:
    pids: list[int] = []

    def give_up(step: ProfileStep) -> None:
        pids.append(step.done)
        raise KeyboardInterrupt

    body = "tell({'step': {'device_type': 'cpu', 'layer': '0', 'done': os.getpid(), 'total': 1}})\nsys.stdin.read()\n"
    with pytest.raises(KeyboardInterrupt):
        profile_job(small_job(), ProfileOptions(program=fake_program(body)), shell(), give_up)
    assert ends(pids[0])


@pytest.mark.exhaustive
@pytest.mark.processes
def test_the_real_process_measures_and_then_remembers() -> None:
    world = replace(shell(), current=ROOT)
    steps: list[ProfileStep] = []
    wish = ProfileOptions(types=("cpu", "T4"), repeats=2)
    first = profile_job(small_job(), wish, world, steps.append)
    assert len(first.profile.layers) == 5
    assert {"cpu", "T4"} <= set(first.profile.device_types)
    assert all(0 < layer.forward_ms["cpu"] < 1000 for layer in first.profile.layers)
    assert first.cached == {}
    assert [step.layer for step in steps if step.device_type == "cpu"] == ["0", "1", "2", "3", "4"]
    again = profile_job(small_job(), wish, world, steps.append)
    assert again.profile == first.profile
    assert "cpu" in again.cached
    with pytest.raises(CallableError, match="did you mean `mlp32`"):
        profile_job(small_job(model="tests.models:mlp31"), wish, world, steps.append)
