"""The examples of docs/python.md that plan, with a measurement at hand, do what the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetpipe.cli.plan import plan as plan_command
from hetpipe.cli.plan.profiling import Profiled
from hetpipe.values.document import document_of, to_plain
from hetpipe.values.profile import Profile
from tests.cli import plans
from tests.docs.pages import ROOT, blocks


def profile_of_cpus() -> Profile:
    """Of the minibatches of the digits."""
    values: dict[str, Any] = to_plain(plans.profile(6, estimated=()))
    values["batch_size"] = 16
    for layer in values["layers"]:
        for key in ("forward_ms", "backward_ms"):
            layer[key] = {"cpu": layer[key]["TITAN_V"]}
    return document_of(Profile, values, what="profile")


def test_a_plan_is_looked_at_simulated_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(plan_command, "profile_job", lambda *_: Profiled(profile_of_cpus(), {}))
    (block,) = (one for one in blocks("python") if one.page.name == "python.md" and "hetpipe.plan(" in one.text)
    exec(compile(block.text, str(block), "exec"), {})
    shown = capsys.readouterr().out
    assert "this plan" in shown
    assert "single:cpu" in shown
    assert {path.name for path in (tmp_path / "digits-plan").iterdir()} == {"plan.json", "profile.json", "cluster.yaml"}
