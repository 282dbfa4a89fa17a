"""An optimizer of the user's own trains like one of torch, or is refused before a stage starts, with the fix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checkpoint.manifest import checkpoint_dir
from hetpipe.errors import CallableError, JobError
from hetpipe.job.file import OptimizerSpec
from hetpipe.pipeline.allowed_modules import allow_only
from hetpipe.pipeline.optimizer_choice import check_optimization, check_optimizer_arguments
from hetpipe.values.ids import Clock
from tests import own_optimizers
from tests.numerics.compare import ROOT, Case, run, trained

OWN = "tests.own_optimizers"
SGD: dict[str, Any] = {"name": "SGD", "lr": 0.05, "momentum": 0.9, "foreach": False}
MOMENTUM: dict[str, Any] = {"name": f"{OWN}:Momentum", "lr": 0.05, "momentum": 0.9}
ADAFACTOR: dict[str, Any] = {"name": "Adafactor", "lr": 0.02, "weight_decay": 0.1}
DECAYING: dict[str, Any] = {**ADAFACTOR, "name": f"{OWN}:Decaying"}


def spec(name: str, **arguments: object) -> OptimizerSpec:
    """The section of the job that names a class of `tests.own_optimizers`."""
    return OptimizerSpec.model_validate({"name": f"{OWN}:{name}", **arguments})


def assert_alike(some: Path, other: Path) -> None:
    """Both runs ended with the same bits."""
    expected = trained(other)
    found = trained(some)
    assert found.keys() == expected.keys()
    assert not [name for name, value in found.items() if not torch.equal(value, expected[name])]


@pytest.mark.parametrize(
    ("own", "torchs", "how"),
    [
        (MOMENTUM, SGD, {"kind": "none", "workers": 1, "weights": "stash"}),
        (MOMENTUM, SGD, {"kind": "none", "workers": 1, "weights": "predict", "wave": 2}),
        (DECAYING, ADAFACTOR, {"kind": "wsp", "workers": 2}),
    ],
    ids=["alone", "predicted", "on shards"],
)
def test_it_trains_to_the_bits_of_the_class_of_torch_that_it_copies(
    own: dict[str, Any], torchs: dict[str, Any], how: dict[str, Any], tmp_path: Path
) -> None:
    case = Case(**{"stages": 2, "wave": 2, "minibatches": 8, "deterministic": True, **how})
    run(replace(case, optimizer=torchs), tmp_path / "torch")
    run(replace(case, optimizer=own), tmp_path / "own")
    assert_alike(tmp_path / "own", tmp_path / "torch")


def test_its_state_is_in_checkpoints_and_a_run_goes_on_from_there(tmp_path: Path) -> None:
    case = Case(
        kind="none", workers=1, stages=2, wave=2, weights="stash", minibatches=8, optimizer=MOMENTUM, every_waves=2
    )
    run(case, tmp_path / "whole")
    run(case, tmp_path / "again", restore=checkpoint_dir(tmp_path / "whole", Clock(2)))
    assert_alike(tmp_path / "again", tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ByNorm", "steps a parameter differently when others are present, but each stage has only its own"),
        ("Counting", "behaves differently after its `state` was restored, as from a checkpoint; keep every"),
        ("CountingInGroup", "changes `steps` of its parameter groups, which checkpoints do not contain; keep it in"),
        ("Listing", "keeps `state[parameter]['gradients']` as list; checkpoints contain only tensors"),
        ("Sharing", "keeps `state['all']`, which is not a parameter; checkpoints contain only"),
        ("Searching", "raises in `step()`, without a closure and with one parameter that has no gradient: TypeError"),
        ("Drifting", "changes a parameter that has no gradient; skip those whose `grad` is None"),
    ],
)
def test_what_would_train_to_something_else_is_refused(name: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        check_optimizer_arguments(spec(name), ROOT)
    (problem,) = caught.value.problems
    assert problem.startswith(f"optimizer.name: {OWN}:{name} {message}")


def test_the_copies_of_classes_of_torch_and_declared_coupling_are_accepted() -> None:
    for name in ("Momentum", "Decaying", "ByNormOfStage"):
        assert check_optimizer_arguments(spec(name, lr=0.1), ROOT) is getattr(own_optimizers, name)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (spec("momentum"), "optimizer.name: `tests.own_optimizers:momentum` is of type function; it must inherit"),
        (spec("UpdateState"), "optimizer.name: `tests.own_optimizers:UpdateState` is the class UpdateState; it must"),
        (spec("Momentum", lr=-1.0), "optimizer: tests.own_optimizers:Momentum rejects its arguments: -1.0 is no rate"),
        (spec("Momentum", lrr=0.1), "optimizer.lrr: Momentum has no such argument; did you mean `lr`?"),
    ],
)
def test_what_is_no_optimizer_or_refuses_its_arguments_is_said(section: OptimizerSpec, message: str) -> None:
    with pytest.raises(JobError) as caught:
        check_optimizer_arguments(section, ROOT)
    assert caught.value.problems[0].startswith(message)


def test_a_policy_that_predicts_needs_a_declared_rule() -> None:
    job = Case(weights="predict", workers=1, stages=2, wave=2, minibatches=2, optimizer=DECAYING).job()
    with pytest.raises(JobError) as caught:
        check_optimization(job, ROOT)
    assert caught.value.problems[0].startswith(
        f"optimizer.name: {OWN}:Decaying declares no update rule, so its weights cannot be predicted; declare "
        "`prediction = Rule(change, needs_gradient)` in the class"
    )


def test_its_module_must_be_one_that_the_agent_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetpipe.pipeline.allowed_modules._patterns", None)
    allow_only(["torch*"])
    with pytest.raises(CallableError, match=r"optimizer\.name: the module `tests\.own_optimizers` is not among those"):
        check_optimizer_arguments(spec("Momentum"), ROOT)


@pytest.mark.parametrize("name", ["model:", "model:Mine()", ":Mine"])
def test_a_name_with_a_colon_is_a_reference(name: str) -> None:
    with pytest.raises(ValueError, match="must be `module:callable`"):
        OptimizerSpec.model_validate({"name": name})
