"""The equalities of `policies.md` that concern `wave`, resuming, and what must be refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checkpoint.manifest import checkpoint_dir, newest_checkpoint
from hetpipe.decide.sync.segment import first_progress, planned_segments
from hetpipe.errors import NonFiniteUpdate
from hetpipe.pipeline.chain import chain_of
from hetpipe.pipeline.data import read_batch
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from tests import models
from tests.numerics.compare import ADAMW, MOMENTUM, ROOT, SGD, Case, assert_same_bits, run, trained
from tests.pairwise import all_pairs, every_nth
from tests.reference.executor import run_reference
from tests.support.in_process import InProcessRun, run_in_process


@pytest.mark.parametrize("stages", every_nth(3, [[[3, 2], [2, 3]], [[1, 4], [1, 4]], 5, 3, 1]))
def test_another_partition_computes_the_same_bits(stages: Any, tmp_path: Path) -> None:
    case = Case(stages=stages, minibatches=13, every_waves=3)
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_dropout_batch_norm_and_in_place_layers_do_not_feel_the_cut(stages: int, tmp_path: Path) -> None:
    case = Case(model="dropout_batch_norm", data="data32", stages=stages, epochs=2, every_waves=2, batch_size=4)
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))


def test_a_model_returned_in_evaluation_mode_trains_as_one_in_training_mode(tmp_path: Path) -> None:
    case = Case(model="all_in_evaluation_mode", minibatches=8)
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference(model=models.dropout_batch_norm)))


@pytest.mark.parametrize(
    ("schedule", "combine"),
    [
        ("1f1b", "mean"),
        ("fifo", "sum"),
        pytest.param("1f1b", "sum", marks=pytest.mark.exhaustive),
        pytest.param("fifo", "mean", marks=pytest.mark.exhaustive),
    ],
)
def test_orders_and_combinations(schedule: str, combine: str, tmp_path: Path) -> None:
    case = Case(workers=3, stages=3, wave=4, schedule=schedule, combine=combine, minibatches=22)
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("dtype", "optimizer", "stages"), all_pairs(product(("32", "64"), (SGD, MOMENTUM, ADAMW), (1, 2, 3)))
)
def test_one_worker_and_waves_of_one_are_a_plain_loop(
    dtype: str, optimizer: dict[str, Any], stages: int, tmp_path: Path
) -> None:
    case = Case(
        workers=1,
        wave=1,
        staleness=0,
        stages=stages,
        minibatches=20,
        optimizer=optimizer,
        model=f"mlp{dtype}",
        data=f"more{dtype}",
    )
    run(case, tmp_path)

    torch.manual_seed(3)
    model = getattr(models, f"mlp{dtype}")()
    arguments = {key: value for key, value in optimizer.items() if key != "name"}
    plain = getattr(torch.optim, optimizer["name"])(model.parameters(), **arguments)
    data = getattr(models, f"more{dtype}")()
    spec = case.job().data_spec(len(data))
    progress = first_progress(spec)
    segments = planned_segments(progress, spec, per_wave={VirtualWorkerIndex(0): 1}, checkpoint_every_waves=None)
    for _, blocks in segments:
        for block in blocks[VirtualWorkerIndex(0)]:
            batch = read_batch(data, block)
            plain.zero_grad()
            torch.autograd.backward(models.loss(model(*batch.inputs), batch.target))
            plain.step()
    found = trained(tmp_path)
    for layer in chain_of(model):
        for local, name in layer.parameters.items():
            expected = layer.module.get_parameter(local)
            if dtype == "64":
                torch.testing.assert_close(found[name], expected.detach(), rtol=1e-12, atol=1e-14)
            else:
                torch.testing.assert_close(found[name], expected.detach(), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("model", ["mlp32", "dropout_batch_norm"])
def test_a_resumed_run_equals_an_uninterrupted_one(model: str, tmp_path: Path) -> None:
    case = Case(model=model, data="data32", batch_size=4, workers=2, stages=2, epochs=3, every_waves=2)
    run(case, tmp_path / "whole")
    folders = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    middle = folders[0]
    run(case, tmp_path / "resumed", restore=middle)
    whole, resumed = trained(tmp_path / "whole"), trained(tmp_path / "resumed")
    assert newest_checkpoint(tmp_path / "whole").name == newest_checkpoint(tmp_path / "resumed").name != middle.name
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_stopped_and_resumed_run_equals_one_with_that_barrier(tmp_path: Path) -> None:
    case = Case(workers=2, stages=2, minibatches=60)
    stopped = run(case, tmp_path / "stopped", stop_when=lambda clocks: clocks.published >= 3)
    assert stopped.snapshot is not None
    barrier = stopped.snapshot.published
    assert barrier < 30, "it stopped early"
    run(case, tmp_path / "resumed", restore=checkpoint_dir(tmp_path / "stopped", Clock(barrier)))
    assert_same_bits(trained(tmp_path / "resumed"), run_reference(case.reference(extra_barriers=(barrier,))))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "staleness"), every_nth(2, [("wsp", 0), ("wsp", 1), ("wsp", 4), ("bsp", 0), ("asp", 0)])
)
def test_runs_that_follow_the_newest_clock_keep_every_rule(kind: str, staleness: int, tmp_path: Path) -> None:
    case = Case(kind=kind, staleness=staleness, workers=3, deterministic=False, minibatches=19, every_waves=4)
    result = run(case, tmp_path, delay_seconds=0.002)
    assert result.snapshot is not None
    assert result.snapshot.minibatches == 57
    if kind != "asp":
        assert result.snapshot.max_distance <= staleness + 1


def test_a_stop_under_asp_is_safe(tmp_path: Path) -> None:
    case = Case(kind="asp", workers=2, deterministic=False, minibatches=120)
    result = run(case, tmp_path, stop_when=lambda clocks: clocks.published >= 5, delay_seconds=0.001)
    assert result.snapshot is not None
    assert 5 <= result.snapshot.published < 60


def test_a_non_finite_loss_names_stage_and_minibatch(tmp_path: Path) -> None:
    case = Case(data="poisoned32", workers=1, stages=2, epochs=1, batch_size=4)
    with pytest.raises(
        NonFiniteUpdate, match=r"stage 1 of virtual worker 0: the loss of minibatch \d+ is nan; its samples are"
    ):
        run_in_process(InProcessRun(job=case.job(), run_dir=tmp_path, import_path=ROOT, stall_seconds=20.0))
