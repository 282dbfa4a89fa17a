"""The help texts are those in `golden/`; `python -m tests.cli.regenerate_golden` rewrites them, then read the diff."""

from __future__ import annotations

import pytest

from hetpipe.server import SERVICES
from tests.cli.regenerate_golden import GOLDEN, commands, help_of, kept, path_of


@pytest.mark.parametrize("command", [None, *kept()])
def test_help(command: str | None) -> None:
    assert help_of(command) == path_of(command).read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {path_of(command).stem for command in (None, *kept())}


def test_every_command_of_the_manual_is_there() -> None:
    running = {
        "train",
        "launch",
        "submit",
        "status",
        "clocks",
        "check",
        "debug",
        "export",
        "doctor",
        "demo",
        "init",
        "version",
    }
    planning = {"profile", "plan", "simulate", "compare", "cluster", "cluster show", "cluster catalogue"}
    drawing = {"render", "render schedule", "render compose", "render k8s", "render redis-acl", "render manifests"}
    drawing |= {"render schema", "render slurm"}
    containers = {"up", "down", "ps", "logs", "cluster from-k8s"}
    looking_after = {"top", "ui", "debug", "script", "stop", "health", "certs", "certs init", "certs issue"}
    looking_after |= {"workers", "workers list", "workers drain", "workers add", "workers move"}
    looking_after |= {"repair", "repair store", "repair state"}
    looking_after |= {"serve", *(f"serve {service}" for service in SERVICES)}
    assert running | planning | drawing | containers | looking_after == set(commands())
