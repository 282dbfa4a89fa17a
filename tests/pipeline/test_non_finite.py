"""What is told of a non-finite update comes from what its error carries."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from hetpipe.errors import NonFiniteUpdate
from hetpipe.pipeline.non_finite import explained
from hetpipe.pipeline.setup import StageParts
from hetpipe.pipeline.streams import StreamDataset


def parts(average: float) -> StageParts:
    """A stage with one layer, whose optimizer has averaged this gradient."""
    optimizer = SimpleNamespace(state=lambda: {"head.weight": {"momentum": torch.tensor([average])}})
    layer = SimpleNamespace(index=3, name="head", parameters={"weight": "head.weight"})
    return cast(
        "StageParts",
        SimpleNamespace(
            identity="stage 1", weights=SimpleNamespace(optimizer=optimizer), layers=(layer,), run_dir=Path()
        ),
    )


def test_the_call_that_reads_the_samples_of_a_stream_names_the_epoch() -> None:
    stage = parts(1.0)
    stage.identity = SimpleNamespace(vw=1)  # type: ignore[assignment]
    for train, expected in (
        (StreamDataset([], 8, key="data.train", length_key="data.length", seed=0), "indices=[4, 5], epoch=3)"),
        ([1, 2], "indices=[4, 5])"),
    ):
        stage.data = SimpleNamespace(train=train)  # type: ignore[assignment]
        error = NonFiniteUpdate("the loss of minibatch 6 is nan", minibatch=6)
        told = str(explained(error, stage, ((2, 3), (4, 5)), first=5, epoch=2))
        assert told.endswith(f"hetpipe.minibatch('job.json', vw=1, p=6, {expected}")


@pytest.mark.parametrize(("average", "quantity"), [(1.0, "update"), (float("nan"), "gradient")])
def test_layer_and_quantity_do_not_depend_on_the_words_of_the_error(average: float, quantity: str) -> None:
    found = NonFiniteUpdate.in_parameter("head.weight", quantity="update", minibatches=range(5, 9))
    reworded = NonFiniteUpdate("other words", parameter=found.parameter, minibatches=found.minibatches)

    told = str(explained(found, parts(average), (), first=1))
    again = str(explained(reworded, parts(average), (), first=1))

    sentence = f"the {quantity} of one of the minibatches 5 to 8 is not finite in parameter head.weight"
    assert told == f"stage 1: {sentence} of layer 3 (head)"
    assert again == (told.replace(sentence, "other words") if quantity == "update" else told)
