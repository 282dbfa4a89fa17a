"""Which modules a job may have imported: refused before anything of them runs, whichever key names them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetpipe.errors import CallableError, UserError
from hetpipe.job.file import Job
from hetpipe.pipeline import allowed_modules
from hetpipe.pipeline.allowed_modules import ALWAYS_ALLOWED, allow_only
from hetpipe.pipeline.callables import build_datasets, build_model, load_callable, load_loss, load_metrics
from hetpipe.pipeline.optimizer_choice import check_optimization

GOOD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build():
    return nn.Sequential(nn.Linear(2, 2))

def data():
    return TensorDataset(torch.zeros(4, 2), torch.zeros(4))

def loss(output, target):
    return output.sum()

def rate(update):
    return 1.0
"""

#: Tells that it ran.
EVIL = "from pathlib import Path\n(Path(__file__).parent / 'ran').touch()\n" + GOOD


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "allowed_of_this_test.py").write_text(GOOD)
    (tmp_path / "evil_of_this_test.py").write_text(EVIL)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(allowed_modules, "_patterns", None)
    yield tmp_path
    for name in [name for name in sys.modules if name.endswith("_of_this_test")]:
        del sys.modules[name]


def job(**overrides: Any) -> Job:
    module = "allowed_of_this_test"
    values: dict[str, Any] = {
        "model": f"{module}:build",
        "loss": f"{module}:loss",
        "metrics": {"second": f"{module}:loss"},
        "data": {"train": f"{module}:data", "eval": f"{module}:data"},
        "batch_size": 2,
        "epochs": 1,
        "optimizer": {"name": "SGD", "lr": 0.1},
        "lr_schedule": {"name": "LambdaLR", "lr_lambda": f"{module}:rate"},
    }
    return Job(**{**values, **overrides})


def import_everything(handed_in: Job, folder: Path) -> None:
    """What the children of an agent import for a job."""
    check_optimization(handed_in, folder)
    build_model(handed_in, folder)
    build_datasets(handed_in, folder)
    load_loss(handed_in, folder)
    load_metrics(handed_in, folder)


EVIL_JOBS: dict[str, dict[str, Any]] = {
    "model": {"model": "evil_of_this_test:build"},
    "loss": {"loss": "evil_of_this_test:loss"},
    "metrics.second": {"metrics": {"second": "evil_of_this_test:loss"}},
    "data.train": {"data": {"train": "evil_of_this_test:data"}},
    "data.eval": {"data": {"train": "allowed_of_this_test:data", "eval": "evil_of_this_test:data"}},
    "lr_schedule.lr_lambda": {"lr_schedule": {"name": "LambdaLR", "lr_lambda": "evil_of_this_test:rate"}},
    "lr_schedule.schedulers[0].lr_lambda": {
        "lr_schedule": {
            "name": "ChainedScheduler",
            "schedulers": [{"name": "LambdaLR", "lr_lambda": "evil_of_this_test:rate"}],
        }
    },
}


@pytest.mark.parametrize("key", EVIL_JOBS)
def test_no_key_of_a_job_gets_around_it(folder: Path, key: str) -> None:
    allow_only(["allowed_*"])
    import_everything(job(), folder)

    with pytest.raises(CallableError) as caught:
        import_everything(job(**EVIL_JOBS[key]), folder)

    assert str(caught.value) == (
        f"{key}: the module `evil_of_this_test` is not among those that this node's agent allows (allowed_*); have "
        "its operator add `--allow-modules evil_of_this_test`"
    )
    assert not (folder / "ran").exists()


def test_without_the_option_everything_is_allowed(folder: Path) -> None:
    import_everything(job(**EVIL_JOBS["model"]), folder)
    assert (folder / "ran").exists()


def test_a_star_allows_everything(folder: Path) -> None:
    allow_only(["*"])
    import_everything(job(**EVIL_JOBS["model"]), folder)


@pytest.mark.parametrize(
    "reference",
    [
        "torch.nn.functional:cross_entropy",
        "torch.nn:Identity",
        "torch.nn:functional.relu",
        "hetpipe.pipeline.metrics:accuracy",
    ],
)
def test_what_is_always_allowed(folder: Path, reference: str) -> None:
    allow_only(["nothing"])
    assert callable(load_callable(reference, folder))


@pytest.mark.parametrize(
    "reference",
    [
        "os:abort",
        "subprocess:run",
        "torch:load",
        "torch.hub:load",
        "torch.nn.functional:torch.hub.load",
        "torch.nn.functional:importlib.import_module",
        "torch.nn:modules.module.torch.load",
        "hetpipe.pipeline.callables:load_callable",
        "torch.nn.functional:__builtins__.popitem",
        "torch.nn.functional:cross_entropy.__globals__.clear",
    ],
)
def test_what_is_allowed_leads_nowhere_else(folder: Path, reference: str) -> None:
    allow_only(["nothing"])
    with pytest.raises(CallableError, match=r"--allow-modules"):
        load_callable(reference, folder)


def test_a_pattern_is_of_the_full_name(folder: Path) -> None:
    allow_only(["allowed", "of_this_test", "ALLOWED_*"])
    with pytest.raises(CallableError):
        import_everything(job(), folder)


def test_what_is_always_allowed_is_exact() -> None:
    assert not any(set(name) & set("*?[") for name in ALWAYS_ALLOWED)


@pytest.mark.parametrize("patterns", [[], [""], ["a", ""]])
def test_an_empty_list_is_a_mistake(patterns: list[str]) -> None:
    with pytest.raises(UserError, match="--allow-modules is empty"):
        allow_only(patterns)
