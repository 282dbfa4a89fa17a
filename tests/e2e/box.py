#!/usr/bin/env python3
"""Try the image and docker-compose.yml for real: build, up, train the digits example over containers, check, down.

    scripts/e2e-docker [tls] [insecure]

Without arguments first under TLS, then in plain text. Needs a running dockerd, docker-compose 1.29 or Compose v2, and
the right to use them; where the official base images cannot be pulled, also debootstrap and root. Whatever happens to
it, containers, networks and volumes are removed at the end, and that nothing is left is checked.
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

_ROOT = Path(__file__).resolve().parent.parent

_IMAGE = "hetpipe:e2e"

#: Variables of docker-compose.yml for each way to run it.
_MODES: dict[str, dict[str, str]] = {
    "tls": {},
    "insecure": {"HETPIPE_TLS": "", "HETPIPE_INSECURE": "--insecure"},
}

#: The port of the coordinator on this machine's loopback, apart from one that runs already.
_PORT = "17400"

#: The digits example passes it after about 12 of its 20 epochs.
_LEAST_ACCURACY = 0.95

#: The first one ends the trial in order; it is too late for another one then.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SUBMIT_SECONDS = 600
_OTHER_SECONDS = 300
_BUILD_SECONDS = 3_600

_COORDINATOR = "coordinator:7400"


class Failed(Exception):
    """What was tried did not work; the text says what."""


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
        project = ["--project-directory", str(_ROOT), "--file", str(_ROOT / "docker-compose.yml"), "-p", self.project]
        profiles = ["--profile", "cpu", "--profile", "submit"] if arguments[0] == "down" else ["--profile", "cpu"]
        return _run([*self._program, *project, *profiles, *arguments], seconds=seconds, environment=self._environment)

    def hetpipe(self, *arguments: str, seconds: float = _OTHER_SECONDS, options: Sequence[str] = ()) -> Any:
        """Run one command of hetpipe in a container of the service `submit`; what it answers with --json."""
        return json.loads(self("run", "--rm", "-T", *options, "submit", *arguments, "--json", seconds=seconds))

    def remove(self) -> None:
        """Remove containers, networks and volumes.

        Raises:
            Failed: some are left.
        """
        self("down", "--volumes", "--remove-orphans", "--timeout", "30")
        if left := self.left():
            raise Failed(f"left behind: {', '.join(left)}")

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
        with _timed("submit"):
            result = compose.hetpipe(
                "submit", "examples/digits/job.yaml", "--coordinator", _COORDINATOR, seconds=_SUBMIT_SECONDS
            )
        accuracy = float(result["eval"]["accuracy"])
        _say(f"accuracy {accuracy:.4f}")
        if accuracy < _LEAST_ACCURACY:
            raise Failed(f"accuracy {accuracy:.4f} is below {_LEAST_ACCURACY}")
        report = compose.hetpipe("check")
        _say(f"hetpipe check: {json.dumps(report)[:300]}")
    except Failed:
        _say(_tail(compose))
        raise
    finally:
        with _timed("down"):
            compose.remove()
    _say("no container, network or volume is left")


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
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
