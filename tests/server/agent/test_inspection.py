"""What an inspection reports and measures, in this process."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch import Tensor, nn

from hetpipe.errors import CallableError, UserError
from hetpipe.job.file import Job, load_job
from hetpipe.profiler import profiling, subject
from hetpipe.profiler.order import ProfileAnswer, ProfileOrder
from hetpipe.server.agent import inspection
from hetpipe.server.agent.inspection import CHECKED, UNEQUAL_LENGTHS, carry_out
from hetpipe.server.agent.inspection_order import InspectionAnswer, InspectionOrder
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.plan import ProofReport
from tests.cli.fakes import small_job
from tests.numerics.compare import ROOT
from tests.support.fake_clock import FakeClock
from tests.support.inspection import inspect_job

JOB = small_job(data={"train": "tests.models:data32", "eval": "tests.models:more32"})


def carried_out(folder: Path, *, of: Job = JOB, **changes: Any) -> tuple[InspectionAnswer, list[ProfileStep]]:
    values: dict[str, Any] = {"with_model": True, "measure": (), **changes}
    order = InspectionOrder(job=of.model_dump(mode="json"), import_path=str(ROOT), cache_folder=str(folder), **values)
    steps: list[ProfileStep] = []
    return carry_out(order, FakeClock(), steps.append), steps


def profiled(folder: Path) -> ProfileAnswer:
    """What `hetpipe profile` finds, and leaves in the cache."""
    order = ProfileOrder(
        job=JOB.model_dump(mode="json"), import_path=str(ROOT), cache_folder=str(folder), with_cpu=True, repeats=1
    )
    return profiling.carry_out(order, FakeClock(), lambda _: None)


def test_the_model_alone(tmp_path: Path) -> None:
    answer, steps = carried_out(tmp_path)
    assert answer.model is not None and answer.model.proof is not None
    assert answer == InspectionAnswer(replace(inspect_job(JOB, ROOT), proof=answer.model.proof))
    assert [layer.activation_elements for layer in answer.model.layers] == [28, 28, 24, 24, 12]
    assert (answer.model.train_samples, answer.model.eval_samples) == (46, 301)
    assert steps == []
    assert list(tmp_path.iterdir()) == []


def test_what_was_profiled_before_is_not_measured_again(tmp_path: Path) -> None:
    cpu = next(found for found in profiled(tmp_path).measurements if found.device_type == "cpu")
    answer, steps = carried_out(tmp_path, with_model=False, measure=("cpu",))
    assert answer == InspectionAnswer(None, (cpu,))
    assert steps == []


def test_types_that_are_not_here_are_not_answered(tmp_path: Path) -> None:
    profiled(tmp_path)
    answer, _ = carried_out(tmp_path, measure=("cpu", "TITAN_V"))
    assert answer.model is not None
    assert [found.device_type for found in answer.measurements] == ["cpu"]


def test_mistakes_in_what_is_not_measured_are_found_first(tmp_path: Path) -> None:
    of = small_job(metrics={"accuracy": "tests.models:no_metric"})
    with pytest.raises(CallableError, match="no_metric"):
        carried_out(tmp_path, of=of, measure=("cpu",))
    assert list(tmp_path.iterdir()) == []


def proof_of(folder: Path, **keys: Any) -> ProofReport:
    data = {"train": "tests.models:data32", **keys.pop("data", {})}
    answer, _ = carried_out(folder, of=small_job(data=data, **keys))
    assert answer.model is not None and answer.model.proof is not None
    return answer.model.proof


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ({"optimizer.name": "SGDD"}, "optimizer.name: torch.optim has no 'SGDD'; did you mean `SGD`?"),
        ({"optimizer.momentun": 0.9}, "optimizer.momentun: SGD has no such argument; did you mean `momentum`?"),
        ({"lr_schedule": {"name": "StepLR"}}, "lr_schedule.step_size: is missing; StepLR has no default for it"),
        ({"loss": "tests.models:nothing_of_that_name"}, "loss: `tests.models` has no `nothing_of_that_name`"),
        ({"data.train": "tests.models:nothing_of_that_name"}, "data.train: `tests.models` has no"),
    ],
    ids=["optimizer", "its argument", "schedule", "loss", "data"],
)
def test_a_mistake_is_found_before_the_model_is_made(
    mistake: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> NoReturn:
        raise AssertionError("a model may take minutes to make")

    monkeypatch.setattr(subject, "build_model", build)
    with pytest.raises(UserError, match=re.escape(sentence)):
        carried_out(tmp_path, of=small_job(**mistake))


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ({"model": "tests.nowhere:build"}, "model: there is no module `tests.nowhere`"),
        ({"loss": "tests.models:mlp32"}, "loss: `tests.models:mlp32` must take (output, target)"),
        ({"data.train": "tests.nowhere:data"}, "data.train: there is no module `tests.nowhere`"),
        ({"optimizer.name": "SGDD"}, "optimizer.name: torch.optim has no 'SGDD'"),
    ],
    ids=["model", "loss", "data", "optimizer"],
)
def test_names_are_checked_before_torch_makes_an_optimizer(
    mistake: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*_: object) -> NoReturn:
        raise AssertionError("torch imports its compiler for that, which takes a second")

    monkeypatch.setattr(subject, "check_optimization", check)
    with pytest.raises(UserError, match=re.escape(sentence)):
        carried_out(tmp_path, of=small_job(**mistake))


def test_a_wrong_metric_is_found_before_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(*_: object) -> NoReturn:
        raise AssertionError("a proof may take minutes")

    monkeypatch.setattr(inspection, "prove_subject", prove)
    with pytest.raises(CallableError, match=r"metrics\.mine: `tests\.models` has no `nothing_of_that_name`"):
        carried_out(tmp_path, of=small_job(metrics={"mine": "tests.models:nothing_of_that_name"}))


def test_the_answer_says_why_there_are_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "has_unequal_lengths", lambda _: True)
    assert proof_of(tmp_path).sentence.endswith(f"; {UNEQUAL_LENGTHS}")
    assert proof_of(tmp_path, tokens_per_sample=21).notices == ()


def test_the_answer_says_what_was_proven(tmp_path: Path) -> None:
    proof = proof_of(tmp_path)
    assert (proof.scope, proof.equality, proof.samples, proof.checked) == ("whole model", "bits", 4, CHECKED)
    said = "the layers compute what the model computes, to the bit (proof: whole model, "
    assert proof.sentence.startswith(said)
    assert replace(proof, notices=("a thing to know",)).sentence.endswith("; a thing to know")


def test_a_model_in_evaluation_mode_is_trained_and_that_is_said(tmp_path: Path) -> None:
    (notice,) = proof_of(tmp_path, model="tests.models:all_in_evaluation_mode").notices
    assert "returned the model in evaluation mode; it is trained in training mode" in notice


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"model": "tests.models:tied_in_secret", "data": {"train": "tests.models:tokens"}},
            "2.tied[0].weight is used",
        ),
        (
            {"loss": "tests.models:LOSS_WITH_PARAMETERS"},
            "has parameters of its own, which no optimizer would ever train",
        ),
        ({"data": {"train": "tests.models:own_generator"}}, "data.train: the inputs of one minibatch, read twice"),
        (
            {"data": {"sampler": "tests.models:never_alike"}},
            "data.sampler: `tests.models:never_alike` gives another order",
        ),
        (
            {"data": {"train": "tests.models:misplaced32", "shuffle": False, "length": 46}},
            "data.train: the inputs of a minibatch that begins at position 1 differ between `iterate_from(1)` and",
        ),
        (
            {"data": {"eval": "tests.models:misplaced32", "eval_length": 9}},
            "data.eval: the inputs of a minibatch that begins at position 1 differ between `iterate_from(1)` and",
        ),
        ({"data": {"eval": "tests.models:own_generator"}}, "data.eval: the inputs of one minibatch, read twice"),
        (
            {"data": {"train": "tests.models:flipped32"}, "freeze": {"layers": 1, "cache": "on"}},
            "freeze.cache: is on, but the inputs of one minibatch differ between two passes over data.train",
        ),
    ],
    ids=[
        "hidden",
        "loss with parameters",
        "own generator",
        "sampler",
        "stream that jumps elsewhere",
        "stream that jumps elsewhere, evaluation",
        "own generator, evaluation",
        "cache of what never comes back",
    ],
)
def test_what_would_train_to_something_else_is_refused(keys: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(CallableError, match=re.escape(sentence)):
        proof_of(tmp_path, **keys)


def test_a_model_that_takes_whole_minibatches_only_gets_one(tmp_path: Path) -> None:
    assert proof_of(tmp_path, model="tests.models:whole_minibatches", batch_size=6).samples == 6


@pytest.mark.parametrize("name", ["digits", "moved_digits", "text"])
def test_the_examples_are_proven_to_the_bit(name: str, tmp_path: Path) -> None:
    answer, _ = carried_out(tmp_path, of=load_job(ROOT / "examples" / name / "job.yaml"))
    assert answer.model is not None and answer.model.proof is not None
    assert (answer.model.proof.equality, answer.model.proof.notices) == ("bits", ())


@pytest.mark.parametrize(
    "keys",
    [
        *({"model": f"tests.models:{name}"} for name in ("mlp32", "dropout_batch_norm", "hooked", "noisy")),
        *({"model": f"tests.models:frozen_by_{name}"} for name in ("eval", "train")),
        {"model": "tests.models:mlp64", "data": {"train": "tests.models:data64"}},
        {"data": {"train": "tests.models:flipped32"}, "loss": "tests.models:distance"},
        *(
            {"model": f"tests.profiler.models:{name}", "data": {"train": "tests.profiler.models:data"}}
            for name in ("linear_relu", "shifts", "batch_norm", "views", "tuples", "residual", "frozen")
        ),
    ],
    ids=lambda keys: str(keys.get("model", keys)).rpartition(":")[2],
)
def test_what_other_tests_train_is_proven_to_the_bit(keys: dict[str, Any], tmp_path: Path) -> None:
    assert proof_of(tmp_path, **keys).equality == "bits"


@pytest.mark.parametrize(
    ("precision", "model", "others"),
    [("fp16", "rrelu", "use bf16 or fp32"), ("bf16", "pairwise", "use fp32")],
)
def test_an_operation_without_a_kernel_of_the_precision_is_told_with_the_fix(
    precision: str, model: str, others: str, tmp_path: Path
) -> None:
    job = small_job(precision=precision, model=f"tests.server.agent.test_inspection:{model}")
    with pytest.raises(CallableError) as caught:
        carried_out(tmp_path, of=job)
    dtype = {"fp16": "float16", "bf16": "bfloat16"}[precision]
    told = str(caught.value)
    assert told.startswith(f"precision: is {precision}, and torch has no {dtype} kernel of an operation of the model")
    assert f"{others}" in told and "layer 1 (1) failed on input of shape" in told


def test_in_another_precision_the_same_model_is_proven(tmp_path: Path) -> None:
    job = small_job(precision="bf16", model="tests.server.agent.test_inspection:rrelu")
    answer, _ = carried_out(tmp_path, of=job)
    assert answer.model is not None and answer.model.proof is not None and answer.model.proof.work is not None
    assert answer.model.proof.work.compute_dtype == "bfloat16"


def rrelu() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.RReLU(), nn.Linear(7, 3))


def pairwise() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), Distances())


class Distances(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return nn.functional.pdist(values)
