"""A run that begins with the weights of another one trains to the bits of the reference with these weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hetpipe.checkpoint.export import export_weights
from hetpipe.checkpoint.manifest import newest_checkpoint
from tests import models
from tests.numerics.compare import ADAMW, Case, assert_same_bits, run, trained
from tests.reference.executor import run_reference

pytestmark = pytest.mark.matrix

BASE: dict[str, Any] = {"model": "dropout_batch_norm", "data": "data32", "batch_size": 4, "epochs": 1}

#: How the first weights are named, and what the second run has beyond `BASE`; it is cut otherwise than the first one.
SECOND: dict[str, dict[str, Any]] = {
    "run": {"stages": 4, "optimizer": ADAMW},
    "checkpoint": {"workers": 1, "kind": "none", "servers": 1, "weights": "predict"},
    "file": {"workers": 3, "stages": 1, "kind": "allreduce", "servers": 1, "weights": "flush"},
}


@pytest.mark.parametrize("kind", SECOND)
def test_the_bits_of_the_reference(kind: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run(Case(**BASE), first)
    weights = trained(first)
    export_weights(first, tmp_path / "first.safetensors")
    source = {"run": first, "checkpoint": newest_checkpoint(first), "file": tmp_path / "first.safetensors"}[kind]
    case = Case(**{**BASE, **SECOND[kind], "init_from": str(source)})

    def begun() -> nn.Module:
        model = getattr(models, case.model)()
        model.load_state_dict(weights)
        return model  # type: ignore[no-any-return]

    run(case, second)
    assert_same_bits(trained(second), run_reference(case.reference(model=begun)))
    untouched = run_reference(Case(**{**BASE, **SECOND[kind]}).reference())
    found = trained(second)
    assert any(not found[name].equal(value) for name, value in untouched.weights.items())
