"""Export: one file by the model's own names, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hetpipe.cli.export import export_weights
from hetpipe.errors import CheckpointError, UserError
from hetpipe.pipeline.checkpoint import file_name, save_part
from hetpipe.ps.manifest import Manifest, checkpoint_dir, file_digest, write_durably
from hetpipe.spec import wire
from hetpipe.spec.ids import Clock, StageIndex, VirtualWorkerIndex
from hetpipe.spec.sync import Progress
from tests.models import dropout_batch_norm


def write_checkpoint(run_dir: Path, clock: int) -> dict[str, torch.Tensor]:
    """A checkpoint of two stages and two virtual workers; the model's state in it."""
    torch.manual_seed(clock)
    model = dropout_batch_norm()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = {name for name, _ in model.named_parameters()}
    folder = checkpoint_dir(run_dir, Clock(clock))
    paths = []
    for vw in range(2):
        for stage, layers in enumerate((("0.",), ("1.", "2.", "3."))):
            of_stage = {name: value for name, value in state.items() if name.startswith(layers) and vw == 0}
            paths.append(
                save_part(
                    folder,
                    file_name(VirtualWorkerIndex(vw), StageIndex(stage)),
                    weights={name: value for name, value in of_stage.items() if name in parameters},
                    buffers={name: value for name, value in of_stage.items() if name not in parameters},
                    optimizer={"0.0.weight": {"momentum_buffer": torch.ones(8, 5), "step": 3}} if stage == 0 else {},
                )
            )
    progress = Progress(clock=Clock(clock), epoch=0, used=b"", minibatches=1, samples=1)
    stages = {VirtualWorkerIndex(0): 2, VirtualWorkerIndex(1): 2}
    manifest = Manifest(1, "small-1", progress, stages, tuple(file_digest(path) for path in paths))
    write_durably(folder / "manifest.json", wire.to_json(Manifest, manifest).encode())
    return state


def test_the_newest_checkpoint_becomes_a_file_that_the_model_loads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3)
    state = write_checkpoint(tmp_path, 6)
    out = tmp_path / "out.safetensors"
    exported = export_weights(tmp_path, out)
    assert (exported.clock, exported.num_tensors) == (6, len(state))
    assert exported.num_bytes == out.stat().st_size
    loaded = load_file(out)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    dropout_batch_norm().load_state_dict(loaded)
    with safe_open(out, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.safetensors"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3)
    part = next(tmp_path.glob("checkpoints/*/vw-0-stage-1.safetensors"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        export_weights(tmp_path, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        export_weights(tmp_path, tmp_path / "out.safetensors")


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3)
    with pytest.raises(UserError, match=r"is a folder; name the file to write, for example .*model.safetensors"):
        export_weights(tmp_path, tmp_path)
    with pytest.raises(UserError, match="cannot write"):
        export_weights(tmp_path, tmp_path / "nowhere" / "out.safetensors")
