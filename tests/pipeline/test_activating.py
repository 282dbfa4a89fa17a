"""Active layers that do not fit each other are told with the key and the layers, before anything trains."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from hetpipe.errors import CallableError, PlanError
from hetpipe.pipeline.activating import check_activations
from hetpipe.pipeline.chain import chain_of
from hetpipe.pipeline.data import Batch
from hetpipe.pipeline.layering import layers_of
from tests import models
from tests.numerics.compare import Case

BATCH = Batch((torch.ones(4, 5),), torch.zeros(4, dtype=torch.long), 4, None)


def checked(model: nn.Module, **values: Any) -> None:
    chain = chain_of(model) if isinstance(model, nn.Sequential) else layers_of(model, BATCH, models.loss)
    check_activations(Case(minibatches=8, **values).job(), chain, BATCH, nn.functional.cross_entropy)


def test_layers_that_fit_pass_and_nothing_changes() -> None:
    model = nn.Sequential(*cast("nn.Sequential", models.dropout_batch_norm()), nn.Linear(3, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    checked(model, active=(0, 2, 3), activates=((2, (0, 1, 3, 4)), (5, (0, "[1234]"))))
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert torch.random.get_rng_state().equal(state)


BETWEEN = (
    r"elastic\.script\[0\]\.active: layer 4 \(4\) cannot follow there: the output of layer 1 \(1\) does not fit it "
    r"\(RuntimeError: mat1 and mat2 shapes cannot be multiplied \(4x7 and 6x3\)\)"
)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"activates": ((2, (0, 1, 4)),)}, BETWEEN),
        ({"active": (2, 3, 4)}, r"elastic\.active: layer 2 \(2\) cannot follow there: what enters the model does not"),
    ],
    ids=["between", "first"],
)
def test_layers_that_do_not_fit_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CallableError, match=message):
        checked(models.mlp32(), **values)


def test_a_last_layer_of_which_there_is_no_loss() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Flatten(0), nn.Unflatten(0, (4, 7)), nn.Linear(7, 3))
    message = r"elastic\.active: the loss cannot be computed of the output of layer 1 \(1\), the last active one"
    with pytest.raises(CallableError, match=message):
        checked(model, active=(0, 1))


def test_a_model_that_is_cut_by_its_own_forward_is_refused() -> None:
    with pytest.raises(CallableError, match=r"elastic\.active: the layers of this model are those between the cuts of"):
        checked(models.residual(), active=(0,))
    checked(models.residual())


def test_an_entry_that_means_no_layer() -> None:
    with pytest.raises(
        PlanError, match=r"elastic\.script\[0\]\.active: `stem` matches no layer; the model's are 0, 1, "
    ):
        checked(models.mlp32(), activates=((2, ("stem",)),))
