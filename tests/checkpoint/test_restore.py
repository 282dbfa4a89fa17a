"""What a stage begins with: all of a checkpoint, only its own optimizer state, or nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetpipe.checkpoint.manifest import MANIFEST, checkpoint_dir, manifest_bytes, newest_checkpoint, read_manifest
from hetpipe.checkpoint.stage_part import restore
from hetpipe.errors import CheckpointError
from hetpipe.pipeline.chain import Layer, chain_of
from hetpipe.pipeline.layer_weights import layout_of
from hetpipe.server.agent.stage_assembly import restore_targets
from hetpipe.values.ids import Clock, Incarnation, StageIndex, VirtualWorkerIndex
from hetpipe.values.run import DeviceConfig, StageConfig
from hetpipe.weights.flat import FlatBuffer
from hetpipe.weights.optimizer import StageOptimizer
from tests import models
from tests.numerics.compare import Case, plan_of, run

CPU = torch.device("cpu")
CASE = Case(workers=2, stages=1, servers=1, minibatches=5, every_waves=2, wave=2)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at clocks 2 and 3."""
    folder = tmp_path_factory.mktemp("run")
    run(CASE, folder, delay_seconds=0.0)
    return folder


class Stage:
    """A new stage of the whole model, before it restores."""

    def __init__(self, run_dir: Path, restored: Path | None, *, vw: int = 1, incarnation: int = 0) -> None:
        torch.manual_seed(99)  # not the job's
        self.layers: tuple[Layer, ...] = chain_of(models.mlp32())
        self.job = job = CASE.job()
        self.optimizer = StageOptimizer(job.optimizer, FlatBuffer(layout_of(self.layers, CPU), CPU))
        self.config = StageConfig(
            job=job.model_dump(mode="json"),
            plan=plan_of(job),
            vw=VirtualWorkerIndex(vw),
            stage=StageIndex(0),
            incarnation=Incarnation(incarnation),
            device=DeviceConfig("cpu"),
            shard_addresses=(),
            run_dir=str(run_dir),
            import_path="",
            host="",
            restore=None if restored is None else str(restored),
        )
        self.before = self.weights()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for layer in self.layers for p in layer.module.parameters()]

    def restore(self) -> int:
        return restore(self.config, restore_targets(self.layers, self.optimizer), self.job.sync.traits)

    @property
    def took_weights(self) -> bool:
        return not all(torch.equal(a, b) for a, b in zip(self.before, self.weights(), strict=True))


def test_a_fresh_run_restores_nothing(run_dir: Path) -> None:
    stage = Stage(run_dir, None)
    assert (stage.restore(), stage.took_weights, stage.optimizer.num_updates) == (0, False, 0)


def test_a_resumed_run_begins_with_all_of_it(run_dir: Path) -> None:
    first, second = (Stage(run_dir / "new", newest_checkpoint(run_dir), vw=vw) for vw in (0, 1))
    assert (first.restore(), second.restore()) == (3, 3)
    assert first.took_weights
    assert all(torch.equal(a, b) for a, b in zip(first.weights(), second.weights(), strict=True))
    assert (first.optimizer.num_updates, second.optimizer.num_updates) == (5, 5)
    one, other = (stage.optimizer.state()["0.weight"]["momentum_buffer"] for stage in (first, second))
    assert isinstance(one, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    assert not torch.equal(one, other)


def test_who_comes_back_takes_its_own_optimizer_state_only(run_dir: Path) -> None:
    stage = Stage(run_dir, newest_checkpoint(run_dir), incarnation=1)
    stage.restore()
    assert (stage.took_weights, stage.optimizer.num_updates) == (False, 5)


def test_who_comes_back_before_the_run_has_a_checkpoint_begins_as_the_run_did(run_dir: Path) -> None:
    """It may have to make the initial weights."""
    stage = Stage(run_dir / "new", newest_checkpoint(run_dir), incarnation=1)
    assert stage.restore() == 3
    assert (stage.took_weights, stage.optimizer.num_updates) == (True, 5)


def test_who_was_away_when_the_newest_checkpoint_was_made_is_in_an_earlier_one(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(run_dir / "checkpoints", folder)
    newest = newest_checkpoint(tmp_path / "run")
    manifest = read_manifest(newest)
    files = tuple(file for file in manifest.files if not file.name.startswith("vw-1-"))
    without = replace(manifest, num_stages={VirtualWorkerIndex(0): 1}, files=files)
    (newest / MANIFEST).write_bytes(manifest_bytes(without))
    stage = Stage(tmp_path / "run", newest, incarnation=1)
    stage.restore()
    assert (stage.took_weights, stage.optimizer.num_updates) == (False, 4)


def test_who_comes_back_unknown_to_the_checkpoint_begins_anew(run_dir: Path) -> None:
    stage = Stage(run_dir, newest_checkpoint(run_dir), incarnation=1)
    stage.config = replace(stage.config, vw=VirtualWorkerIndex(2))
    stage.restore()
    assert (stage.took_weights, stage.optimizer.num_updates) == (False, 0)


def test_a_checkpoint_that_was_replaced_meanwhile_is_no_loss(run_dir: Path) -> None:
    stage = Stage(run_dir, checkpoint_dir(run_dir, Clock(1)), incarnation=1)
    stage.restore()
    assert stage.optimizer.num_updates == 5
    nowhere = Stage(run_dir / "new", run_dir / "new" / "checkpoints" / "clock-00000001", incarnation=1)
    nowhere.restore()
    assert nowhere.optimizer.num_updates == 0


def test_a_damaged_file_is_never_used(run_dir: Path, tmp_path: Path) -> None:
    """Whole files of it were read before; what was in them is not used either."""
    folder = tmp_path / newest_checkpoint(run_dir).name
    folder.mkdir()
    for path in newest_checkpoint(run_dir).iterdir():
        content = bytearray(path.read_bytes())
        if path.name == "vw-1-stage-0.safetensors":
            content[-1] ^= 1
        (folder / path.name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"vw-1-stage-0\.safetensors is corrupted"):
        Stage(run_dir / "new", folder).restore()
    back = Stage(tmp_path, folder, incarnation=1)
    back.restore()
    assert back.optimizer.num_updates == 0
    assert Stage(run_dir / "new", folder, vw=0).restore() == 3, "others do not need that file"
