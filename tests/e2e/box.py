"""The image and docker-compose.yml for real: build, up, train the digits example while each container is restarted.

    scripts/e2e-docker [tls] [insecure]

Without arguments first under TLS, then in plain text. Needs a running dockerd, docker-compose 1.29 or Compose v2, and
the right to use them; where the official base images cannot be pulled, also debootstrap and root. Under TLS containers
are restarted as `docker-compose restart` does it, in plain text they are killed and started. The job must go on after
each of them with all of its virtual workers, and end with every sample of every epoch counted once. Whatever happens,
containers, networks and volumes are removed at the end, and that nothing is left is checked.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.following import Failed, Follower, Progress

_ROOT = Path(__file__).resolve().parents[2]

_IMAGE = "hetpipe:e2e"

#: Variables of docker-compose.yml for each way to run it.
_MODES: dict[str, dict[str, str]] = {
    "tls": {},
    "insecure": {"HETPIPE_TLS": "", "HETPIPE_INSECURE": "--insecure"},
}

#: The port of the coordinator on this machine's loopback, apart from one that runs already.
_PORT = "17400"

#: The digits example passes it after about 12 epochs.
_LEAST_ACCURACY = 0.95

#: So many epochs on devices so slow last longer than all restarts, and leave the processors to those who start.
_EPOCHS = 50
_DEVICES = "[{slowdown: 12.0}, {slowdown: 12.0}, {slowdown: 18.0}, {slowdown: 18.0}]"
_SAMPLES_PER_EPOCH = 1442

#: In this order: what Redis forgot when it was restarted, the next coordinator would miss.
_RESTARTED = (
    "redis",
    "coordinator",
    "parameter-server-0",
    "parameter-server-1",
    "agent-a",
    "agent-b",
    "agent-c",
    "agent-d",
)

#: Waves that all virtual workers commit after a restart before the next one.
_WAVES_AFTER = 4

#: The first one ends the trial in order; it is too late for another one then.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_START_SECONDS = 300
_RESTART_SECONDS = 120
_RECOVERY_SECONDS = 360
_SUBMIT_SECONDS = 1_200
_HEALTHY_SECONDS = 180
_OTHER_SECONDS = 300
_BUILD_SECONDS = 3_600

_POLL_SECONDS = 2

_COORDINATOR = "coordinator:7400"


class Compose:
    """One project of docker-compose.yml, under a name of its own."""

    def __init__(self, mode: str, images: Mapping[str, str]) -> None:
        self.mode = mode
        self.project = f"hetpipe-e2e-{mode}"
        self._program = _compose_program()
        self._environment = {**os.environ, "HETPIPE_PORT": _PORT, **images, **_MODES[mode]}

    def __call__(self, *arguments: str, seconds: float = _OTHER_SECONDS) -> str:
        """Run one command of compose; its standard output.

        Raises:
            Failed: it failed, or took too long.
        """
        return _run(self._command(*arguments), seconds=seconds, environment=self._environment)

    def follow(self, *arguments: str) -> Follower:
        """Have a container of the service `submit` follow a job."""
        return Follower(self._command("run", "--rm", "-T", "submit", *arguments, "--json"), self._environment)

    def hetpipe(self, *arguments: str, seconds: float = _OTHER_SECONDS, options: Sequence[str] = ()) -> Any:
        """Run one command of hetpipe in a container of the service `submit`; what it answers with --json."""
        return json.loads(self("run", "--rm", "-T", *options, "submit", *arguments, "--json", seconds=seconds))

    def container(self, service: str) -> str:
        """The id of the container of a service.

        Raises:
            Failed: there is none, or several.
        """
        found = self("ps", "--quiet", service).split()
        if len(found) != 1:
            raise Failed(f"{service} has {len(found)} containers instead of one")
        return found[0]

    def restart(self, service: str) -> None:
        """Restart a container: in order under TLS, by a kill in plain text.

        Raises:
            Failed: it could not be done in time.
        """
        if self.mode == "tls":
            self("restart", service, seconds=_RESTART_SECONDS)
        else:
            container = self.container(service)
            _run(["docker", "kill", container], seconds=_RESTART_SECONDS)
            _run(["docker", "start", container], seconds=_RESTART_SECONDS)

    def wait_until_healthy(self, services: Sequence[str]) -> None:
        """Wait until every service says that it serves.

        Raises:
            Failed: not in time; names those that do not.
        """
        deadline = time.monotonic() + _HEALTHY_SECONDS
        containers = {self.container(service): service for service in services}
        while True:
            told = _run(["docker", "inspect", "--format", "{{.Id}} {{.State.Health.Status}}", *containers])
            states = dict(line.split() for line in told.splitlines())
            if not (
                sick := [f"{containers[name]} ({states[name]})" for name in containers if states[name] != "healthy"]
            ):
                return
            if time.monotonic() > deadline:
                raise Failed(f"not healthy within {_HEALTHY_SECONDS} s: {', '.join(sick)}")
            time.sleep(_POLL_SECONDS)

    def remove(self) -> None:
        """Remove containers, networks and volumes.

        Raises:
            Failed: some are left.
        """
        self("down", "--volumes", "--remove-orphans", "--timeout", "30")
        if left := self.left():
            raise Failed(f"left behind: {', '.join(left)}")

    def _command(self, *arguments: str) -> list[str]:
        project = ["--project-directory", str(_ROOT), "--file", str(_ROOT / "docker-compose.yml"), "-p", self.project]
        profiles = ["--profile", "cpu", "--profile", "submit"] if arguments[0] == "down" else ["--profile", "cpu"]
        return [*self._program, *project, *profiles, *arguments]

    def left(self) -> list[str]:
        """What there is of the project."""
        label = f"label=com.docker.compose.project={self.project}"
        found = []
        for kind, command in (
            ("container", ["ps", "--all"]),
            ("network", ["network", "ls"]),
            ("volume", ["volume", "ls"]),
        ):
            names = _run(["docker", *command, "--quiet", "--filter", label]).split()
            found += [f"{kind} {name}" for name in names]
        return found


def main(modes: Sequence[str]) -> int:
    """Try every mode; the exit status."""
    if unknown := [mode for mode in modes if mode not in _MODES]:
        _say(f"usage: scripts/e2e-docker [tls] [insecure]    ({unknown[0]!r} is neither)")
        return 2
    for number in _ENDING:
        signal.signal(number, _interrupt)
    try:
        _check_engine()
        images = _build()
        for mode in modes or _MODES:
            _try(Compose(mode, images))
    except Failed as error:
        _say(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted; containers, networks and volumes are removed")
        return 130
    _say("passed")
    return 0


def _check_engine() -> None:
    try:
        _run(["docker", "info"])
    except (OSError, Failed) as error:
        raise Failed(
            "no Docker daemon answers; install docker.io and docker-compose, start dockerd, try again"
        ) from error


def _build() -> dict[str, str]:
    """Build the image; the variables of docker-compose.yml that name it and that of Redis."""
    offline = {}
    with _timed("images"):
        if not _has_default_images():
            _say("the official base images cannot be pulled; making our own from the distribution's packages")
            _run([str(_ROOT / "scripts" / "offline-base-image")], seconds=_BUILD_SECONDS)
            offline = {
                "BASE_IMAGE": "hetpipe-offline-base:bookworm",
                "BUILD_IMAGE": "hetpipe-offline-build:bookworm",
                "TORCH_CPU_INDEX": "",
            }
        arguments = [word for name, value in offline.items() for word in ("--build-arg", f"{name}={value}")]
        command = ["docker", "build", "--force-rm", "--target", "cpu", "--tag", _IMAGE, *arguments, str(_ROOT)]
        _run(command, seconds=_BUILD_SECONDS)
    images = {"HETPIPE_IMAGE": _IMAGE}
    return {**images, "HETPIPE_REDIS_IMAGE": "hetpipe-offline-redis:bookworm"} if offline else images


def _has_default_images() -> bool:
    try:
        for image in (
            _default("Dockerfile", "ARG BASE_IMAGE="),
            _default("docker-compose.yml", "HETPIPE_REDIS_IMAGE:-"),
        ):
            _run(["docker", "pull", "--quiet", image])
    except Failed:
        return False
    return True


def _default(file: str, before: str) -> str:
    """The word behind `before` in a file of the repository."""
    return (_ROOT / file).read_text(encoding="utf-8").partition(before)[2].split()[0].rstrip("}")


def _try(compose: Compose) -> None:
    """Up, train, check, down, in one mode."""
    _say(f"--- {compose.mode}")
    compose.remove()  # what a run left that was killed
    try:
        with _timed("up"):
            compose("up", "--detach")
        if compose.mode == "tls":
            _expect_refusal(compose)
        with _timed("a run with a restart of each container"):
            result = _train(compose)
        _judge(result, compose.hetpipe("check"))
    except Failed:
        _say(_tail(compose))
        raise
    finally:
        with _timed("down"):
            compose.remove()
    _say("no container, network or volume is left")


def _train(compose: Compose) -> dict[str, Any]:
    """Train, and restart each container meanwhile; the result of the run."""
    follower = compose.follow(
        *("submit", "examples/digits/job.yaml", "--coordinator", _COORDINATOR),
        *("--set", f"epochs={_EPOCHS}", "--set", f"cluster.devices={_DEVICES}"),
    )
    try:
        follower.wait_for("to train", _trains, seconds=_START_SECONDS)
        for service in _RESTARTED:
            _restart(compose, follower, service)
        compose.wait_until_healthy(_RESTARTED)
        result: dict[str, Any] = json.loads(follower.result(seconds=_SUBMIT_SECONDS))
    finally:
        follower.end()
    return result


def _restart(compose: Compose, follower: Follower, service: str) -> None:
    """Restart a container; returns when the job trains on with all virtual workers, some waves later."""
    begin = time.monotonic()
    compose.restart(service)
    lasted = time.monotonic() - begin
    if service == "redis":
        compose.wait_until_healthy([service])  # training does not need it; the next coordinator does
    what = f"to train on with all virtual workers after the restart of {service}"
    after = follower.num_lines
    again, recovered = follower.wait_for(what, _trains, seconds=_RECOVERY_SECONDS, after=after)

    def goes_on(progress: Progress) -> bool:
        return progress.all_train and progress.global_clock >= again.global_clock + _WAVES_AFTER

    follower.wait_for(what, goes_on, seconds=_RECOVERY_SECONDS, after=after)
    _say(f"{service}: restarted in {lasted:.0f} s, and all virtual workers train {recovered:.0f} s later")


def _trains(progress: Progress) -> bool:
    return progress.all_train


def _judge(result: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """Compare the result and what `hetpipe check` found with what a run without any restart gives.

    Raises:
        Failed: they are not the same.
    """
    accuracy = float(result["eval"]["accuracy"])
    _say(f"accuracy {accuracy:.4f}, {result['rewinds']} rewinds, deaths {json.dumps(result['deaths'])}")
    _say(f"hetpipe check: {json.dumps(report)[:300]}")
    if accuracy < _LEAST_ACCURACY:
        raise Failed(f"accuracy {accuracy:.4f} is below {_LEAST_ACCURACY}")
    wanted = {
        "complete": True,
        "violations": 0,
        "waves_applied_twice": 0,
        "torn_waves": 0,
        "samples": _EPOCHS * _SAMPLES_PER_EPOCH,
    }
    if wrong := {name: report.get(name) for name, value in wanted.items() if report.get(name) != value}:
        raise Failed(f"hetpipe check says {wrong}; expected {wanted}")
    if result["rewinds"]:
        raise Failed(f"the job went back to a checkpoint {result['rewinds']} times; a restart should cost no wave")


def _expect_refusal(compose: Compose) -> None:
    """The coordinator answers who has a certificate, and nobody else."""
    compose.hetpipe("health", _COORDINATOR)
    try:
        compose.hetpipe("health", _COORDINATOR, options=["-e", "HETPIPE_TLS="])
    except Failed:
        _say("without a certificate: refused")
    else:
        raise Failed("the coordinator answered without a certificate")


def _tail(compose: Compose) -> str:
    try:
        return compose("ps") + compose("logs", "--tail", "20", "--no-color")
    except Failed as error:
        return f"no logs: {error}"


def _compose_program() -> list[str]:
    try:
        _run(["docker", "compose", "version"])
    except Failed:
        return ["docker-compose"]
    return ["docker", "compose"]


def _run(
    command: Sequence[str], *, seconds: float = _OTHER_SECONDS, environment: Mapping[str, str] | None = None
) -> str:
    shown = shlex.join(command)
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            start_new_session=True,  # Ctrl-C is ours
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{shown} took over {seconds:.0f} s") from error
    if done.returncode:
        raise Failed(f"{shown} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


@contextmanager
def _timed(what: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    _say(f"{what}: {time.monotonic() - begin:.0f} s")


def _interrupt(_number: int, _frame: object) -> None:
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
