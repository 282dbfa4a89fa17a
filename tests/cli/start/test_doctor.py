"""The doctor: what it finds, what it advises."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

import pytest

from hetpipe.cli.start import doctor
from hetpipe.cli.start.doctor import Check, Health


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_machine_can_run(tmp_path: Path) -> None:
    checks = by_name(doctor.examine(tmp_path))
    assert not doctor.has_failed(list(checks.values())), checks
    assert list(checks) == [
        "python",
        "torch",
        "grpcio",
        "protobuf",
        "torchvision",
        "devices",
        "cores",
        "memory",
        "loopback",
        "gloo",
        "redis-server",
        "folder",
    ]
    assert checks["gloo"].health is Health.OK


def test_what_is_missing_comes_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert doctor._package("torch") == Check("torch", Health.FAIL, "not installed", "pip install 'torch>=2.9'")
    assert doctor._redis().health is Health.WARN


def test_a_torchvision_of_another_build_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"torchvision": "0.28.0", "torch": "2.13.0+cpu"}.__getitem__)
    monkeypatch.setattr("hetpipe.pipeline.torchvision_operators.mismatch", lambda: "libc10_cuda.so: not found")
    check = doctor._torchvision()
    assert check.health is Health.WARN
    assert check.found == (
        "0.28.0, built for another torch than 2.13.0+cpu: models work unless they use its operators "
        "(libc10_cuda.so: not found)"
    )
    assert "index" in check.fix
    monkeypatch.setattr("hetpipe.pipeline.torchvision_operators.mismatch", lambda: None)
    assert doctor._torchvision() == Check("torchvision", Health.OK, "0.28.0")


def test_an_old_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.8.1+cpu")
    assert doctor._package("torch") == Check("torch", Health.FAIL, "2.8.1+cpu", "pip install 'torch>=2.9'")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.13.0+cpu")
    assert doctor._package("torch").health is Health.OK


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    check = doctor._folder(tmp_path / "nowhere")
    assert check.health is Health.WARN
    assert "--run-dir" in check.fix


def test_whatever_breaks_is_a_finding() -> None:
    def broken() -> Check:
        raise OSError("no sockets here")

    assert doctor._examined("loopback", broken).found == "OSError: no sockets here"
    assert doctor._examined("loopback", broken).health is Health.FAIL


def test_for_people_and_for_programs() -> None:
    checks = [Check("python", Health.OK, "3.11"), Check("redis-server", Health.WARN, "not found", "install it")]
    assert doctor.lines(checks) == [
        "python        ok    3.11",
        "redis-server  warn  not found",
        "    fix: install it",
        "verdict: ready, with 1 remark",
    ]
    assert doctor.to_json(checks) == {
        "ok": True,
        "checks": [
            {"name": "python", "health": "ok", "found": "3.11", "fix": ""},
            {"name": "redis-server", "health": "warn", "found": "not found", "fix": "install it"},
        ],
    }
    failed = [Check("torch", Health.FAIL, "not installed", "install it")]
    assert doctor.lines(failed)[-1] == "verdict: 1 problem to fix before a run can work"
    assert doctor.has_failed(failed)
