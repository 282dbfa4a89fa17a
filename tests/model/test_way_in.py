"""How a job names a model, its arguments and its data, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetpipe.errors import CallableError, JobError
from hetpipe.job.file import Job, load_job
from hetpipe.job.sections import CallSpec
from hetpipe.pipeline.callables import build_model, own_loss
from hetpipe.pipeline.data import Batch, read_batch
from hetpipe.pipeline.layering import layers_of
from tests.model import zoo
from tests.numerics.compare import ROOT


def job_of(model: Any, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "model": model,
        "data": {"train": "tests.model.zoo:tokens"},
        "optimizer": {"name": "SGD", "lr": 0.1},
        "epochs": 1,
    }
    return Job(**values, **changes)


def test_a_model_is_called_with_arguments_that_may_be_calls_themselves() -> None:
    layer = {"call": "torch.nn:TransformerEncoderLayer", "args": {"d_model": 8, "nhead": 2, "dim_feedforward": 16}}
    job = job_of(
        {
            "call": "torch.nn:TransformerEncoder",
            "args": {"encoder_layer": layer, "num_layers": 2, "enable_nested_tensor": False},
        }
    )
    assert str(job.model) == "torch.nn:TransformerEncoder"
    model = build_model(Job.model_validate(job.model_dump(mode="json")), ROOT)
    assert isinstance(model, nn.TransformerEncoder)
    assert len(model.layers) == 2


def test_null_is_the_value_of_an_argument_and_no_value_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        """
model:
  call: torch.nn:Sequential
  args: {}
loss: null
data: {train: "tests.model.zoo:tokens", eval: null}
optimizer: {name: SGD, lr: 0.1}
epochs: 1
"""
    )
    assert load_job(file).loss is None
    inner = {"call": "tests.model.test_way_in:nullable", "args": {"width": 2, "bias": None}}
    job = load_job({**job_of(inner).model_dump(mode="json"), "loss": None})
    again = Job.model_validate(job.model_dump(mode="json"))
    for each in (job, again, load_job(again)):
        assert isinstance(each.model, CallSpec)
        assert each.model.args == {"width": 2, "bias": None}
        model = build_model(each, ROOT)
        assert isinstance(model, nn.Linear)
        assert model.bias is None


def nullable(width: int, bias: str | None = "with") -> nn.Module:
    """Builds a module whose argument has another default than None."""
    return nn.Linear(width, width, bias=bias is not None)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"call": "torch.nn:Linear", "args": {"in_feature": 2, "out_features": 2}}, "is called with these arguments"),
        ({"call": "torch.nn:Linear"}, "is called without arguments"),
        ({"call": "torch.nn.functional:relu", "args": {"input": 1}}, "relu"),
    ],
)
def test_arguments_that_do_not_fit_are_told(model: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CallableError, match=sentence):
        build_model(job_of(model), ROOT)


def test_a_call_needs_a_name() -> None:
    with pytest.raises(JobError, match="model"):
        job_of({"args": {"in_features": 2}})


def test_samples_may_be_mappings_of_the_models_arguments() -> None:
    batch = read_batch(zoo.tokens(), range(3))
    assert batch.keys == ("input_ids", "attention_mask", "labels")
    assert [tuple(value.shape) for value in batch.inputs] == [(3, zoo.TOKENS)] * 3
    assert set(batch.target) == set(batch.keys)


class Bare(nn.Module):
    """Has no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.linear(value)
        return result


def test_an_output_without_loss_is_told() -> None:
    batch = Batch((torch.zeros(2, 2),), torch.zeros(2), 2)
    with pytest.raises(CallableError, match=r"loss: is not set, and the model's output \(Tensor\) has no tensor"):
        layers_of(Bare(), batch, None)
    assert own_loss({"loss": torch.tensor(1.0)}) == 1.0


def test_a_chain_takes_no_mappings() -> None:
    batch = Batch((torch.zeros(2, 2),), {}, 2, ("value",))
    with pytest.raises(CallableError, match="is a chain, whose first layer takes tensors by position"):
        layers_of(nn.Sequential(nn.Linear(2, 2)), batch, zoo.cross_entropy)


def test_a_batch_that_the_model_does_not_take_is_told() -> None:
    with pytest.raises(CallableError, match=r"mappings of other, but Bare\.forward needs `value` as well"):
        layers_of(Bare(), Batch((torch.zeros(2, 2),), {}, 2, ("other",)), zoo.cross_entropy)
