"""Functions and classes of a Python program in a job."""

from __future__ import annotations

import sys
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import nn

from hetpipe.errors import JobError, UserError
from hetpipe.runs.own_code import CELLS, OwnCode, Program, needed_definitions, own_code, write_cells
from hetpipe.runs.requests import given_job
from hetpipe.runs.shell import Shell
from tests import models

ROOT = Path(__file__).resolve().parents[2]


class Builder:
    @classmethod
    def tiny(cls, hidden: int = 2) -> nn.Module:
        return nn.Linear(hidden, hidden)

    def own(self) -> nn.Module:
        return nn.Linear(1, 1)


def build(inputs: int, /, hidden: int = 2) -> nn.Module:
    return nn.Linear(inputs, hidden)


def found(program: Program | None = None, /, **overrides: Any) -> OwnCode:
    return own_code({}, overrides, program or Program())


def test_functions_and_classes_become_references() -> None:
    code = found(
        model=partial(models.mlp32),
        data=models.data32,
        loss=torch.nn.functional.cross_entropy,
        metrics=[models.loss],
        epochs=2,
        sync={"D": 4},
    )
    assert code.overrides == {
        "model": {"call": "tests.models:mlp32", "args": {}},
        "data": {"train": "tests.models:data32"},
        "loss": "torch.nn.functional:cross_entropy",
        "metrics": {"loss": "tests.models:loss"},
        "epochs": 2,
        "sync": {"D": 4},
    }
    assert code.import_path == ROOT
    assert code.cells is None


def test_a_job_and_its_overrides() -> None:
    code = own_code({"model": models.mlp32}, {"data.eval": models.data32}, Program())
    assert (code.job, code.overrides) == ({"model": "tests.models:mlp32"}, {"data.eval": "tests.models:data32"})


def test_texts_stay_and_need_no_folder() -> None:
    code = found(model="model:build", loss=torch.nn.functional.mse_loss)
    assert (code.overrides["model"], code.import_path) == ("model:build", None)


def test_arguments_by_partial() -> None:
    inner = partial(Builder.tiny, 3)
    code = found(
        model=partial(cast("Any", models.mlp32), one=partial(cast("Any", models.loss), scale=2), two=[inner, 5])
    )
    assert code.overrides["model"] == {
        "call": "tests.models:mlp32",
        "args": {
            "one": {"call": "tests.models:loss", "args": {"scale": 2}},
            "two": [{"call": f"{__name__}:Builder.tiny", "args": {"hidden": 3}}, 5],
        },
    }


@pytest.mark.parametrize(
    ("given", "section"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), {"name": "SGD", "lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"name": "AdamW"}),
        ({"name": torch.optim.SGD, "lr": 1.0}, {"name": "SGD", "lr": 1.0}),
        ({"name": "SGD", "lr": 1.0}, {"name": "SGD", "lr": 1.0}),
        (partial(cast("Any", Builder), lr=0.1), {"name": f"{__name__}:Builder", "lr": 0.1}),
    ],
)
def test_an_optimizer(given: object, section: dict[str, Any]) -> None:
    assert found(optimizer=given).overrides == {"optimizer": section}


def test_a_schedule() -> None:
    code = found(lr_schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=3))
    assert code.overrides == {"lr_schedule": {"name": "StepLR", "step_size": 3}}


def refusal(**values: Any) -> str:
    with pytest.raises(JobError) as caught:
        found(**values)
    return str(caught.value)


def test_refusals_name_key_and_fix() -> None:
    def inner() -> nn.Module:
        return nn.Linear(1, 1)

    @wraps(cast("Any", models.loss))
    def wrapped() -> None: ...

    assert "model: is a lambda, which other processes cannot import; define it with `def`" in refusal(
        model=lambda: nn.Linear(1, 1)
    )
    assert "inner is defined inside a function" in refusal(model=inner)
    assert "functools.partial" in refusal(model=inner)
    assert "model: is an object of type Linear, which other processes cannot import; give the function that makes" in (
        refusal(model=nn.Linear(1, 1))
    )
    assert "loss: is an object of type CrossEntropyLoss" in refusal(loss=nn.CrossEntropyLoss())
    assert "model: is a method of an object of type Builder" in refusal(model=Builder().own)
    assert "loss is not found under that name in tests.models" in refusal(loss=wrapped)
    assert "model: give the arguments of build by their names" in refusal(model=partial(build, 3))
    assert "data.train" in refusal(data=inner)
    both = refusal(model=inner, loss=lambda: 0)
    assert "model: " in both
    assert "loss: " in both


def module(name: str, file: Path | None, **names: Any) -> ModuleType:
    made = ModuleType(name)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        made.__file__ = str(file)
    for key, value in names.items():
        setattr(made, key, value)
    return made


def function(module_name: str) -> Any:
    def own() -> None: ...

    own.__module__, own.__qualname__ = module_name, "own"
    return own


def test_a_function_of_the_running_script(tmp_path: Path) -> None:
    own = function("__main__")
    main = module("__main__", tmp_path / "train_it.py", own=own)
    code = found(Program(modules={"__main__": main}), model=own)
    assert (code.overrides["model"], code.import_path) == ("train_it:own", tmp_path)


def test_a_module_run_with_m(tmp_path: Path) -> None:
    own = function("__main__")
    main = module("__main__", tmp_path / "package" / "train.py", own=own)
    main.__spec__ = type("Spec", (), {"name": "package.train"})()
    code = found(Program(modules={"__main__": main}), model=own)
    assert (code.overrides["model"], code.import_path) == ("package.train:own", tmp_path)


def test_a_package(tmp_path: Path) -> None:
    own = function("zoo")
    code = found(Program(modules={"zoo": module("zoo", tmp_path / "zoo" / "__init__.py", own=own)}), model=own)
    assert (code.overrides["model"], code.import_path) == ("zoo:own", tmp_path)


def test_programs_that_cannot_be_imported(tmp_path: Path) -> None:
    own = function("__main__")
    for file, said in (
        (None, "model: own is defined in a program without a file, which other processes cannot import; put it into"),
        (tmp_path / "train-it.py", "rename the script, for example to train_it.py"),
    ):
        with pytest.raises(JobError) as caught:
            found(Program(modules={"__main__": module("__main__", file, own=own)}), model=own)
        assert said in str(caught.value)


def test_a_job_without_a_name_has_that_of_the_program(tmp_path: Path) -> None:
    def name(file: Path | None, module_name: str | None = None) -> str:
        main = module("__main__", file)
        if module_name is not None:
            main.__spec__ = type("Spec", (), {"name": module_name})()
        return Program(modules={"__main__": main}).job_name

    assert name(tmp_path / "fine-tune.py") == "fine-tune"
    assert name(tmp_path / "Ärger mit (2).py") == "rger_mit__2_"
    assert name(tmp_path / f"{'a' * 80}.py") == "a" * 64
    assert name(tmp_path / "package" / "train.py", "package.train") == "train"
    assert name(tmp_path / "package" / "__main__.py", "package.__main__") == "package"
    assert name(tmp_path / "ipython") == "", "a command is no script"
    assert name(None) == ""
    assert Program(cells=("a = 1",)).job_name == "notebook"


def test_a_name_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "current", lambda: Program(cells=("a = 1",)))
    keys = {"model": models.mlp32, "loss": models.loss, "data": models.data32, "batch_size": 4, "epochs": 1}
    optimizer = partial(torch.optim.SGD, lr=0.1)
    for job, more, expected in (
        (None, {}, "notebook"),
        ({}, {"name": "mine"}, "mine"),
        ({"name": "mine"}, {}, "mine"),
    ):
        with given_job(job, {**keys, "optimizer": optimizer, **more}, Shell()) as (loaded, _):
            assert loaded.name == expected


def test_two_folders(tmp_path: Path) -> None:
    one, other = function("one"), function("other")
    modules = {
        "one": module("one", tmp_path / "a" / "one.py", own=one),
        "other": module("other", tmp_path / "b" / "other.py", own=other),
    }
    with pytest.raises(UserError, match="come from several folders") as caught:
        found(Program(modules=modules), model=one, loss=other)
    assert f"{tmp_path / 'a'} (`model`), {tmp_path / 'b'} (`loss`)" in str(caught.value)


CELLS_OF = (
    "import torch\nfrom torch import nn\nimport hetpipe",
    "hidden = 3\nunused = open('/nonexistent')",
    "def build():\n    return nn.Linear(hidden, width())",
    "%matplotlib inline",
    "hidden = 4\nhidden += 1",
    "def width():\n    return 2\n\nclass Data:\n    pass",
    "hetpipe.train(model=build)",
)


def test_the_definitions_that_a_notebooks_function_needs() -> None:
    source = needed_definitions(CELLS_OF, ["build"])
    assert source == (
        "from torch import nn\n\n"
        "def build():\n    return nn.Linear(hidden, width())\n\n"
        "hidden = 4\n\nhidden += 1\n\n"
        "def width():\n    return 2\n"
    )


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = function("__main__")
    own.__qualname__ = "build"
    main = module("__main__", None, build=own)
    code = found(Program(modules={"__main__": main}, cells=CELLS_OF), model=own)
    assert (code.overrides["model"], code.import_path) == (f"{CELLS}:build", None)
    assert code.cells is not None
    (tmp_path / "notebooks").mkdir()
    folder = write_cells(code.cells, tmp_path / "code", beside=tmp_path / "notebooks")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.delitem(sys.modules, CELLS, raising=False)
    written: Any = __import__(CELLS)
    monkeypatch.delitem(sys.modules, CELLS)
    assert isinstance(written.build(), nn.Linear)
    assert (written.hidden, sys.path[1]) == (5, str(tmp_path / "notebooks"))
