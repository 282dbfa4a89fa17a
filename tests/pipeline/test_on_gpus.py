"""What a stage does differently on a GPU, without one: layouts, and losses that are read late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetpipe.errors import NonFiniteUpdate
from hetpipe.pipeline import layer_weights
from hetpipe.pipeline.chain import chain_of
from hetpipe.pipeline.compute import StageCompute
from hetpipe.pipeline.cuda import peak_bytes, use_device
from hetpipe.pipeline.layer_weights import layout_of
from tests import models
from tests.numerics.compare import Case, assert_same_bits, run, trained
from tests.reference.executor import run_reference

GPU = torch.device("cuda", 0)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_weights, "alignment_on", lambda _: 256)
    monkeypatch.setattr(StageCompute, "is_asynchronous", property(lambda _: True))
    monkeypatch.setattr(StageCompute, "finish", lambda _: None)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_bits_do_not_depend_on_it(stages: int, tmp_path: Path) -> None:
    case = Case(stages=stages, wave=2, minibatches=5, metrics=())
    run(case, tmp_path, writes_metrics=True)
    expected = run_reference(case.reference())
    assert_same_bits(trained(tmp_path), expected)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_loss_that_is_not_finite_ends_the_run_as_ever(tmp_path: Path) -> None:
    case = Case(workers=1, kind="none", stages=1, wave=1, data="poisoned32", minibatches=40)
    with pytest.raises(NonFiniteUpdate, match=r"the loss of minibatch \d+ is nan"):
        run(case, tmp_path)


def test_tensors_start_at_256_bytes_on_a_gpu() -> None:
    layers = chain_of(models.mlp32())
    offsets = [slot.offset for slot in layout_of(layers, GPU).slots]
    assert all(offset % 256 == 0 for offset in offsets)
    assert len(set(offsets)) == len(offsets)
    assert any(slot.offset % 256 for slot in layout_of(layers, torch.device("cpu")).slots)


def test_a_cpu_device_needs_no_preparation() -> None:
    environment: dict[str, str] = {}
    use_device(torch.device("cpu"), deterministic=True, environment=environment)
    assert not environment
    assert peak_bytes(torch.device("cpu")) is None


def test_deterministic_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    environment: dict[str, str] = {}
    try:
        use_device(GPU, deterministic=False, environment=environment)
        assert not environment
        assert not torch.are_deterministic_algorithms_enabled()
        use_device(GPU, deterministic=True, environment=environment)
        assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert current == [GPU, GPU]
    finally:
        torch.use_deterministic_algorithms(mode=False)
