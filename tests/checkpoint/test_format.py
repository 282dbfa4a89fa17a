"""The files of a checkpoint: what is written is what is read, whoever wrote it in whatever pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetpipe.checkpoint.format import CheckpointReader, copy_exactly, save_part, save_slices
from hetpipe.checkpoint.layout import PartLabel, StoredSlice
from hetpipe.checkpoint.stage_part import PartWriter, StageContent
from hetpipe.errors import CheckpointError, CheckpointNotWritten
from hetpipe.values.ids import Clock, JobId
from tests.checkpoints import JOB, shard_part, stage_part
from tests.test_durable import files_up_to

SHAPE = (2, 3, 4)
WHOLE = torch.arange(24, dtype=torch.bfloat16)


def shard(
    folder: Path, index: int, *ranges: tuple[int, int], shape: tuple[int, ...] = SHAPE, of: Tensor = WHOLE
) -> Path:
    """A shard's file with these ranges of one parameter."""
    label = PartLabel(JOB, Clock(1), f"shard-{index}.safetensors")
    pieces = [(StoredSlice("0.weight", start, stop, shape), of[start:stop]) for start, stop in ranges]
    return save_slices(folder, label, pieces)


def test_a_stage_part_is_read_as_it_was_written(tmp_path: Path) -> None:
    shared = torch.rand(4, 6)
    stage_part(
        tmp_path,
        3,
        0,
        0,
        weights={"a": shared[:2], "b": shared[1:].t()},
        buffers={"mean": torch.rand(3), "count": torch.tensor(7)},
        optimizer={"a": {"step": torch.tensor(3.0), "num_updates": 3, "beta": 0.1}, "c": {}},
    )
    (path,) = tmp_path.glob("checkpoints/*/*")
    reader = CheckpointReader([path])
    assert torch.equal(reader.tensor("weights/a"), shared[:2])
    assert torch.equal(reader.tensor("weights/b"), shared[1:].t())
    assert reader.keys("buffers/") == ["buffers/count", "buffers/mean"]
    state = reader.optimizer_state(["a", "b", "c"])
    assert state == {"a": {"step": torch.tensor(3.0), "num_updates": 3, "beta": 0.1}, "b": {}, "c": {}}
    with pytest.raises(CheckpointError, match="has no weights/c; it may belong to another model"):
        reader.tensor("weights/c")


def test_the_same_content_is_the_same_bytes(tmp_path: Path) -> None:
    first = stage_part(tmp_path / "a", 3, 0, 0)
    assert all(stage_part(tmp_path / str(i), 3, 0, 0) == first for i in range(5))
    assert shard_part(tmp_path / "c", 3, 0) == shard_part(tmp_path / "d", 3, 0)


def test_a_whole_parameter_has_its_shape_and_no_pieces(tmp_path: Path) -> None:
    path = shard(tmp_path, 0, (0, 24))
    assert torch.equal(load_file(path)["weights/0.weight"], WHOLE.view(SHAPE))
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["hetpipe"])["slices"] == {}
    empty = shard(tmp_path, 1, (0, 0), shape=(0, 5), of=torch.empty(0))
    assert CheckpointReader([empty]).tensor("weights/0.weight").shape == (0, 5)


def test_views_of_one_buffer_are_written_without_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every dtype and shape; only what is not contiguous, an alias or empty is copied."""
    flat = torch.arange(128, dtype=torch.uint8).remainder(2)
    views = {
        "a": flat[:32].view(torch.float32).view(2, 4),
        "b": flat[32:40].view(torch.bool),
        "c": flat[64:80].view(torch.bfloat16),
        "d": flat[80:88].view(torch.int64).view(()),
        "empty": flat[:0].view(torch.float32),
        "alias": flat[:32].view(torch.float32),
        "turned": torch.rand(3, 4).t(),
    }
    given: dict[str, Tensor] = {}

    def saved(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        given.update(tensors)
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr("hetpipe.checkpoint.format.save_file", saved)
    path = save_part(tmp_path, PartLabel(JOB, Clock(1), "part"), views, {})
    found = load_file(path)
    assert all(torch.equal(found[name], view) and found[name].dtype == view.dtype for name, view in views.items())
    is_copied = {name: given[name].data_ptr() != view.data_ptr() for name, view in views.items() if view.nbytes}
    assert is_copied == {"a": False, "b": False, "c": False, "d": False, "alias": True, "turned": True}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pieces_are_put_together(tmp_path: Path, order: tuple[int, int]) -> None:
    paths = [shard(tmp_path, 0, (12, 13), (0, 5)), shard(tmp_path, 1, (13, 24), (5, 12))]
    reader = CheckpointReader(paths[index] for index in order)
    assert torch.equal(reader.tensor("weights/0.weight"), WHOLE.view(SHAPE))
    assert reader.keys("weights/") == ["weights/0.weight"]


@pytest.mark.parametrize(
    ("ranges", "reason"),
    [
        ([(0, 12)], "only up to element 12 of 24"),
        ([(1, 24)], r"\[1:24\] .* does not match"),
        ([(0, 12), (13, 24)], r"\[13:24\] .* does not match"),
        ([(0, 12), (11, 24)], r"\[11:24\] .* does not match"),
    ],
)
def test_pieces_that_make_no_whole_are_refused(tmp_path: Path, ranges: list[tuple[int, int]], reason: str) -> None:
    reader = CheckpointReader(shard(tmp_path, index, one) for index, one in enumerate(ranges))
    with pytest.raises(CheckpointError, match=reason):
        reader.tensor("weights/0.weight")


@pytest.mark.parametrize(
    ("shape", "of"), [((24,), WHOLE), ((2, 3, 5), WHOLE), (SHAPE, WHOLE.float())], ids=["flat", "larger", "dtype"]
)
def test_pieces_of_two_models_are_refused(tmp_path: Path, shape: tuple[int, ...], of: Tensor) -> None:
    reader = CheckpointReader([shard(tmp_path, 0, (0, 12)), shard(tmp_path, 1, (12, 24), shape=shape, of=of)])
    with pytest.raises(CheckpointError, match="does not match"):
        reader.tensor("weights/0.weight")


def test_a_file_is_checked_once_before_anything_of_it_is_used(tmp_path: Path) -> None:
    checked: list[str] = []
    paths = [shard(tmp_path, 0, (0, 12)), shard(tmp_path, 1, (12, 24))]
    stage_part(tmp_path, 1, 0, 0)
    paths += tmp_path.glob("checkpoints/*/*")
    reader = CheckpointReader(paths, lambda path: checked.append(path.name))
    assert not checked
    for _ in range(2):
        reader.tensor("weights/0.weight")
    assert checked == ["shard-0.safetensors", "shard-1.safetensors"]
    reader.optimizer_state(["0.weight"])
    assert checked[2:] == ["vw-0-stage-0.safetensors"]


def test_what_is_no_file_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vw-0-stage-0.safetensors"
    for content in (b"", b"no safetensors file"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"vw-0-stage-0\.safetensors cannot be read"):
            CheckpointReader([path])
    for said in ("[]", '{"slices": {"weights/a[0:2]": {"parameter": "b", "start": 0, "stop": 2, "shape": [4]}}}'):
        save_file({"weights/a": torch.zeros(1)}, path, metadata={"hetpipe": said})
        with pytest.raises(CheckpointError, match="cannot be read"):
            CheckpointReader([path])


def test_scalars_of_version_1_are_found(tmp_path: Path) -> None:
    path = tmp_path / "vw-0-stage-0.safetensors"
    save_file({"weights/a": torch.zeros(1)}, path, metadata={"optimizer_scalars": '{"a": {"step": 4}}'})
    assert CheckpointReader([path]).optimizer_state(["a"]) == {"a": {"step": 4}}


def test_a_tensor_of_another_model_is_not_taken() -> None:
    for other in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64)):
        with pytest.raises(CheckpointError, match=r"0\.weight is \[.*\] torch\.float.* in the checkpoint, \[2, 2\]"):
            copy_exactly(torch.zeros(2, 2), other, "0.weight")


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    writer = PartWriter(lambda clock: tmp_path / str(clock), JobId("job"), "vw-0-stage-0.safetensors")
    content = StageContent(weights={"a": torch.zeros(1000)}, buffers={}, optimizer={})
    with files_up_to(2000), pytest.raises(CheckpointNotWritten, match=r"cannot be written: .*free disk space there"):
        writer.write(Clock(3), content, is_keeper=True)
    with files_up_to(2000), pytest.raises(CheckpointNotWritten):
        shard(tmp_path / "3", 0, (0, 2000), shape=(2000,), of=torch.zeros(2000))
    assert list((tmp_path / "3").iterdir()) == []
    (tmp_path / "4").write_bytes(b"no folder")
    with pytest.raises(CheckpointNotWritten, match="cannot be written"):
        writer.write(Clock(4), content, is_keeper=True)
