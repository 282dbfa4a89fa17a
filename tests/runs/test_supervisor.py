"""Services as processes: small stand-ins that are ready, die, or do not want to end."""

from __future__ import annotations

import os
import queue
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.errors import DeadlineExceeded, JobFailed
from hetpipe.runs.remote import RemoteShell
from hetpipe.runs.restarts import RestartRules
from hetpipe.runs.service import Service, ServiceDeath, ServiceSpec, end_services
from hetpipe.runs.supervisor import Programs, RemoteAgent, ServiceRestart, Services, Supervisor
from hetpipe.server.agent.devices import DeviceOffer
from tests.polling import wait_until
from tests.support.fake_clock import FakeClock

pytestmark = pytest.mark.processes

READY = 'import json, sys\nprint(json.dumps({"role": "r", "address": "h:1", "pid": 1}), flush=True)\n'
UNTIL_INPUT_ENDS = "sys.stdin.read()\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
NOTES_ITS_END = """
import os, signal, sys
def end(*_):
    name = next(a for a in sys.argv if a.endswith(".log"))
    os.write(os.open(os.path.join(os.path.dirname(name), "order"), os.O_APPEND | os.O_CREAT | os.O_WRONLY),
             (os.path.basename(name) + "\\n").encode())
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
"""

Deaths = queue.SimpleQueue[ServiceDeath]
Restarts = queue.SimpleQueue[ServiceRestart]


def program(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


#: No test waits long; the third death is one too many.
QUICK = RestartRules(first_pause_seconds=0.01, longest_pause_seconds=0.02, most_deaths=3)


def start(logs: Path, code: str, deaths: Deaths | None = None) -> Service:
    spec = ServiceSpec(key="stand-in-0", title="stand-in 0", command=program(code), logs=logs)
    return Service(spec, environment=dict(os.environ), on_death=(deaths or Deaths()).put)


def test_a_service_tells_its_address_and_ends_when_asked(tmp_path: Path) -> None:
    deaths: Deaths = Deaths()
    service = start(tmp_path, READY + UNTIL_INPUT_ENDS, deaths)
    assert service.wait_ready(patience_seconds=10.0) == "h:1"
    end_services([service], grace_seconds=5.0)
    assert service.wait_ended(timeout_seconds=0.0)
    assert deaths.empty(), "it was asked to end"
    assert not (tmp_path / "stand-in-0.out").exists(), "an empty output is no file worth keeping"


def test_a_service_that_was_killed_is_named(tmp_path: Path) -> None:
    deaths: Deaths = Deaths()
    service = start(tmp_path, READY + UNTIL_INPUT_ENDS, deaths)
    service.wait_ready(patience_seconds=10.0)
    os.kill(service.pid, signal.SIGKILL)
    assert str(deaths.get(timeout=10.0)) == f"stand-in 0 (pid {service.pid}) was killed by SIGKILL"


def test_a_service_that_fails_at_its_start_tells_why(tmp_path: Path) -> None:
    deaths: Deaths = Deaths()
    service = start(tmp_path, 'import sys\nsys.exit("port 7 is taken")', deaths)
    with pytest.raises(JobFailed, match=r"stand-in 0 \(pid \d+\) ended with exit code 1: port 7 is taken"):
        service.wait_ready(patience_seconds=10.0)
    assert deaths.get(timeout=10.0).last_words == "port 7 is taken"


def test_a_service_that_is_never_ready(tmp_path: Path) -> None:
    service = start(tmp_path, "import sys\nprint('hello', flush=True)\n" + UNTIL_INPUT_ENDS)
    with pytest.raises(DeadlineExceeded, match="is not ready, and has reported nothing for 0 s"):
        service.wait_ready(patience_seconds=0.2)
    end_services([service], grace_seconds=5.0)


#: Says what it is doing until there is a file `go` in the folder of its log.
SLOW = """
import json, os, sys, time
folder = os.path.dirname(next(a for a in sys.argv if a.endswith(".log")))
while not os.path.exists(os.path.join(folder, "go")):
    print(json.dumps({"kind": "phase", "phase": "importing torch", "seconds": 3.2}), flush=True)
    time.sleep(0.01)
"""


def test_a_service_that_is_slow_and_says_so_is_waited_for_and_a_silent_one_is_given_up(tmp_path: Path) -> None:
    clock = FakeClock()
    stand_in = NOTES_ITS_END + READY + UNTIL_INPUT_ENDS
    given = replace(services(tmp_path), patience_seconds=30.0)
    programs = replace(given.programs, parameter_server=program(SLOW + stand_in), agent=program(stand_in))
    with Supervisor(
        replace(given, programs=programs, num_shards=1),
        environment=os.environ,
        on_death=Deaths().put,
        on_restart=Restarts().put,
        clock=clock,
    ) as supervisor:
        supervisor.start()
        told = "parameter server 0 (importing torch, 3 s)"
        for _ in range(4):
            clock.advance(29.0)
            wait_until(
                lambda: (
                    supervisor.awaited == told and supervisor._kept["parameter-server-0"].service.silent_seconds < 1
                ),
                timeout_seconds=10.0,
                what="another word",
            )
            assert supervisor.given_up(is_queued=True) == ""
        pid = supervisor.pids["parameter-server-0"]
        os.kill(pid, signal.SIGSTOP)
        clock.advance(60.0)
        wait_until(lambda: supervisor.given_up(is_queued=True) != "", timeout_seconds=10.0, what="an end of patience")
        assert supervisor.given_up(is_queued=False).startswith(
            f"parameter server 0 (pid {pid}) is not ready, and has reported nothing for 60 s; its last phase was "
            "importing torch, 3 s; its log is"
        )
        os.kill(pid, signal.SIGCONT)
        (tmp_path / "go").touch()
        wait_until(lambda: not supervisor.awaited, timeout_seconds=10.0, what="readiness")

        # Ready, and still of no use for the job: a run's own services are not waited for for ever.
        assert supervisor.given_up(is_queued=True) == ""
        clock.advance(31.0)
        assert (
            "all services of this run are ready, but the job has lacked resources of them for 31 s"
            in supervisor.given_up(is_queued=True)
        )
        assert supervisor.given_up(is_queued=False) == ""


def test_a_service_that_does_not_want_to_end_is_killed(tmp_path: Path) -> None:
    service = start(tmp_path, STUBBORN + READY + UNTIL_INPUT_ENDS)
    service.wait_ready(patience_seconds=10.0)
    end_services([service], grace_seconds=0.2)
    assert service.wait_ended(timeout_seconds=0.0)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    spec = ServiceSpec(key="none", title="the agent", command=["/nowhere/python"], logs=tmp_path)
    with pytest.raises(JobFailed, match="the agent could not be started"):
        Service(spec, environment={}, on_death=Deaths().put)


def services(logs: Path, *, agent: str = NOTES_ITS_END + UNTIL_INPUT_ENDS) -> Services:
    stand_in = NOTES_ITS_END + READY + UNTIL_INPUT_ENDS
    programs = Programs(coordinator=program(stand_in), parameter_server=program(stand_in), agent=program(agent))
    return Services(
        num_shards=2,
        devices=DeviceOffer(num_cpu_devices=4),
        logs=logs,
        state=logs / "state",
        programs=programs,
        restart_rules=QUICK,
    )


def supervisor_of(given: Services, *, deaths: Deaths | None = None, restarts: Restarts | None = None) -> Supervisor:
    return Supervisor(
        given, environment=os.environ, on_death=(deaths or Deaths()).put, on_restart=(restarts or Restarts()).put
    )


def command_line(pid: int) -> list[str]:
    path = Path(f"/proc/{pid}/cmdline")
    # A new program's memory is there a moment after its parent was told that it runs.
    wait_until(lambda: path.read_text() != "", timeout_seconds=10.0, what="command line")
    return path.read_text().split("\0")


def test_what_is_started(tmp_path: Path) -> None:
    with supervisor_of(services(tmp_path)) as supervisor:
        assert supervisor.start() == "h:1"
        pids = supervisor.pids
        assert set(pids) == {"coordinator", "parameter-server-0", "parameter-server-1", "agent"}
        log = ["--log", str(tmp_path / "agent.log"), "--exit-with-parent", ""]
        at_once = ["--drain-seconds", "0"]
        assert command_line(pids["agent"])[4:] == ["--coordinator", "h:1", "--cpu-devices", "4", *at_once, *log]
        state = ["--state", str(tmp_path / "state" / "shard-1")]
        assert command_line(pids["parameter-server-1"])[4:10] == ["--coordinator", "h:1", "--index", "1", *state]
        assert command_line(pids["coordinator"])[4:6] == ["--store", "memory"]
        environment = Path(f"/proc/{pids['agent']}/environ").read_text().split("\0")
        assert {"OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1", "PYTHONSAFEPATH=1"} <= set(environment)
        assert os.getsid(pids["agent"]) == pids["agent"], "Ctrl-C at the terminal must not reach it"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_agents_on_other_machines(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    stand_in = program(NOTES_ITS_END + UNTIL_INPUT_ENDS)
    hosts = [RemoteAgent(shell=RemoteShell((str(ssh),), name, str(tmp_path)), command=stand_in) for name in ("a", "b")]
    given = replace(services(tmp_path), agents=hosts, shard_options=lambda index: ("--own", str(index)))
    with supervisor_of(given) as supervisor:
        assert supervisor.start() == "h:1"
        pids = supervisor.pids
        assert set(pids) == {"coordinator", "parameter-server-0", "parameter-server-1", "agent-a", "agent-b"}
        wait_until(
            lambda: Path(command_line(pids["agent-b"])[0]).name != "sh", timeout_seconds=10.0, what="the program"
        )
        log = ["--log", str(tmp_path / "agent-b.log"), "--exit-with-parent", ""]
        assert command_line(pids["agent-b"])[4:] == ["--coordinator", "h:1", "--drain-seconds", "0", *log]
        assert command_line(pids["parameter-server-1"])[10:12] == ["--own", "1"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_the_real_programs_are_modules_of_the_services() -> None:
    programs = Programs()
    assert programs.coordinator == (sys.executable, "-m", "hetpipe.launch", "hetpipe", "serve", "coordinator")
    assert programs.parameter_server == (sys.executable, "-m", "hetpipe.launch", "hetpipe", "serve", "parameter-server")
    assert programs.agent == (sys.executable, "-m", "hetpipe.launch", "hetpipe", "serve", "agent")


def test_they_end_in_the_stated_order(tmp_path: Path) -> None:
    ready = NOTES_ITS_END + "open(next(a for a in sys.argv if a.endswith('.log')) + '.up', 'w')\n" + UNTIL_INPUT_ENDS
    with supervisor_of(services(tmp_path, agent=ready)) as supervisor:
        supervisor.start()
        wait_until((tmp_path / "agent.log.up").exists, timeout_seconds=10.0, what="agent")
    order = (tmp_path / "order").read_text().split()
    assert order[0] == "agent.log"
    assert order[-1] == "coordinator.log"


def test_one_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    deaths, restarts = Deaths(), Restarts()
    agent = "import sys\nsys.exit('no devices')\n"
    with supervisor_of(services(tmp_path, agent=agent), deaths=deaths, restarts=restarts) as supervisor:
        supervisor.start()
        death = deaths.get(timeout=10.0)
    reason = "no devices; it is not restarted, as it has died 3 times within 60 s"
    assert str(death) == f"the agent (pid {death.pid}) ended with exit code 1: {reason}"
    assert deaths.empty()
    assert restarts.qsize() == 2


def test_one_that_dies_is_started_again_where_others_look_for_it(tmp_path: Path) -> None:
    deaths, restarts = Deaths(), Restarts()
    given = services(tmp_path)
    serves = READY.replace("h:1", "h:7301") + UNTIL_INPUT_ENDS
    given = replace(given, programs=replace(given.programs, parameter_server=program(serves)))
    with supervisor_of(given, deaths=deaths, restarts=restarts) as supervisor:
        supervisor.start()
        before = supervisor.pids
        key = "parameter-server-1"
        kept = supervisor._kept[key]
        for _ in range(2):
            kept.service.wait_ready(patience_seconds=10.0)
            os.kill(kept.service.pid, signal.SIGKILL)
            restart = restarts.get(timeout=10.0)
        after = supervisor.pids
        assert after == {**before, key: restart.pid}
        state = ["--state", str(tmp_path / "state" / "shard-1")]
        arguments = ["--coordinator", "h:1", "--index", "1", *state, "--port", "7301"]
        assert command_line(restart.pid)[4 : 4 + len(arguments)] == arguments
        assert str(restart).endswith(f"was killed by SIGKILL; it was restarted (pid {restart.pid})")
    assert not any(Path(f"/proc/{pid}").exists() for pid in after.values())
    assert deaths.empty()


def test_last_words_are_those_of_the_last_life(tmp_path: Path) -> None:
    (tmp_path / "stand-in-0.out").write_text("what an earlier life said\n")
    deaths: Deaths = Deaths()
    service = start(tmp_path, READY + UNTIL_INPUT_ENDS, deaths)
    service.wait_ready(patience_seconds=10.0)
    service._process.send_signal(signal.SIGKILL)
    assert deaths.get(timeout=10.0).last_words == ""
    assert (tmp_path / "stand-in-0.out").exists()


def test_a_coordinator_that_dies_is_started_again_on_its_port(tmp_path: Path) -> None:
    deaths, restarts = Deaths(), Restarts()
    given = services(tmp_path)
    serves = READY.replace("h:1", "h:7300") + UNTIL_INPUT_ENDS
    given = replace(given, programs=replace(given.programs, coordinator=program(serves)))
    with supervisor_of(given, deaths=deaths, restarts=restarts) as supervisor:
        supervisor.start()
        os.kill(supervisor.pids["coordinator"], signal.SIGKILL)
        restart = restarts.get(timeout=10.0)
        assert restart.key == "coordinator"
        assert command_line(restart.pid)[4:8] == ["--store", "memory", "--port", "7300"]


def test_a_coordinator_that_fails_starts_nothing_else(tmp_path: Path) -> None:
    broken = Programs(coordinator=program("import sys\nsys.exit('no port')"))
    given = Services(
        num_shards=1, devices=DeviceOffer(num_cpu_devices=1), logs=tmp_path, state=tmp_path, programs=broken
    )
    with (
        supervisor_of(given) as supervisor,
        pytest.raises(JobFailed, match=r"the coordinator \(pid \d+\) ended with exit code 1: no port"),
    ):
        supervisor.start()
    assert list(supervisor.pids) == ["coordinator"]
