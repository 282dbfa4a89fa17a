"""Export: one file by the model's own names, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hetpipe.checkpoint.export import export_weights
from hetpipe.checkpoint.format import save_slices
from hetpipe.checkpoint.layout import PartLabel, StoredSlice
from hetpipe.checkpoint.manifest import MANIFEST, VERSION, Manifest, checkpoint_dir, file_digest, manifest_bytes
from hetpipe.errors import CheckpointError, UserError
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from tests.checkpoints import JOB, progress_at, stage_part
from tests.models import dropout_batch_norm


def write_state(run_dir: Path, clock: int) -> dict[str, torch.Tensor]:
    """A checkpoint of two shards, two virtual workers and two stages each; the model's state in it.

    The first shard has half of the first weight, the second one all else.
    """
    torch.manual_seed(clock)
    model = dropout_batch_norm()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    whole = {name: tuple(p.shape) for name, p in model.named_parameters()}
    folder = checkpoint_dir(run_dir, Clock(clock))
    pieces: list[list[tuple[StoredSlice, torch.Tensor]]] = [[], []]
    for index, (name, shape) in enumerate(whole.items()):
        flat = state[name].flatten()
        half = len(flat) // 2 if index == 0 else 0
        if half:
            pieces[0].append((StoredSlice(name, 0, half, shape), flat[:half]))
        pieces[1].append((StoredSlice(name, half, len(flat), shape), flat[half:]))
    files = [
        file_digest(save_slices(folder, PartLabel(JOB, Clock(clock), f"shard-{shard}.safetensors"), pieces[shard]))
        for shard in range(2)
    ]
    for vw in range(2):
        for stage, layers in enumerate((("0.",), ("1.", "2.", "3."))):
            own = {name: value for name, value in state.items() if name.startswith(layers) and name not in whole}
            files.append(stage_part(run_dir, clock, vw, stage, buffers=own))
    stages = {VirtualWorkerIndex(0): 2, VirtualWorkerIndex(1): 2}
    manifest = Manifest(VERSION, JOB, progress_at(clock), stages, tuple(files), 2)
    (folder / MANIFEST).write_bytes(manifest_bytes(manifest))
    return state


def test_the_newest_checkpoint_becomes_a_file_that_the_model_loads(tmp_path: Path) -> None:
    write_state(tmp_path, 3)
    state = write_state(tmp_path, 6)
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
    write_state(tmp_path, 3)
    part = next(tmp_path.glob("checkpoints/*/shard-1.safetensors"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match="is corrupted"):
        export_weights(tmp_path, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        export_weights(tmp_path, tmp_path / "out.safetensors")


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    write_state(tmp_path, 3)
    with pytest.raises(UserError, match=r"is a folder; give a file name, for example .*model.safetensors"):
        export_weights(tmp_path, tmp_path)
    with pytest.raises(UserError, match="cannot write"):
        export_weights(tmp_path, tmp_path / "nowhere" / "out.safetensors")


def test_the_one_before_a_damaged_one_is_exported(tmp_path: Path) -> None:
    state = write_state(tmp_path, 3)
    write_state(tmp_path, 6)
    checkpoint_dir(tmp_path, Clock(6)).joinpath("vw-1-stage-0.safetensors").write_bytes(b"torn")
    assert export_weights(tmp_path, tmp_path / "out.safetensors").clock == 3
    assert torch.equal(load_file(tmp_path / "out.safetensors")["0.0.weight"], state["0.0.weight"])
