"""What a cached measurement depends on."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetpipe.profiler.fingerprint import Fingerprint, digests, fingerprint_of
from hetpipe.values.plan import TensorSpec
from tests.numerics.compare import ROOT
from tests.profiler import models

CPU = torch.device("cpu")
SPEC = TensorSpec("0", (16, 5), "float32")


def of(name: str, **changes: object) -> Fingerprint:
    return fingerprint_of(models.subject(name, **changes), CPU, ROOT)


def test_the_same_again_has_the_same_key() -> None:
    assert of("residual").key == of("residual").key


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "another:model"},
        {"loss": "another:loss"},
        {"sources": {}},
        {"layers": ()},
        {"inputs": ()},
        {"batch_size": 17},
        {"device": "another"},
        {"num_threads": 64},
        {"torch_version": "1.0"},
        {"precision": "bf16"},
        {"method": 0},
    ],
)
def test_whatever_differs_changes_the_key(changes: dict[str, object]) -> None:
    found = Fingerprint("m:b", "l", {"m": "0"}, (("a", ()),), (SPEC,), 16, "cpu", 1, "2.13", "fp32")
    assert replace(found, **changes).key != found.key  # type: ignore[arg-type]  # one field at a time


def test_what_training_does_to_a_job_does_not_matter() -> None:
    changed = of("residual", seed=5, epochs=7, optimizer={"name": "AdamW", "lr": 1e-3})
    assert changed == of("residual")


def test_frozen_parameters_and_shapes_are_seen() -> None:
    (_, first), (_, second), _ = of("frozen").layers
    assert [(spec.name, spec.shape) for spec in first] == [("weight", (32, 5)), ("bias", (32,))]
    assert [(spec.name, spec.shape) for spec in second] == [("weight", (16, 32)), ("bias", (16,))]


def test_the_users_files_count_and_no_others(tmp_path: Path) -> None:
    def module(name: str, path: str | None) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__file__ = None if path is None else str(tmp_path / path)
        return made

    for path in ("model.py", "pkg/layers.py", ".venv/lib/site-packages/numpy.py", "hetpipe/errors.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    modules = {
        "model": module("model", "model.py"),
        "pkg.layers": module("pkg.layers", "pkg/layers.py"),
        "numpy": module("numpy", ".venv/lib/site-packages/numpy.py"),
        "hetpipe.errors": module("hetpipe.errors", "hetpipe/errors.py"),
        "__main__": module("__main__", "hetpipe/errors.py"),
        "__mp_main__": module("__main__", "hetpipe/errors.py"),
        "builtin": module("builtin", None),
        "elsewhere": module("elsewhere", "../elsewhere.py"),
        "gone": module("gone", "gone.py"),
    }
    before = digests(modules, tmp_path)
    assert sorted(before) == ["model", "pkg.layers"]
    (tmp_path / "pkg/layers.py").write_text("# changed")
    after = digests(modules, tmp_path)
    assert (before["model"] == after["model"], before["pkg.layers"] == after["pkg.layers"]) == (True, False)
