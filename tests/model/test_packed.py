"""Entries of a minibatch that are not one tensor: lists of boxes and images, texts, None."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetpipe.errors import CallableError
from hetpipe.job.file import Job
from hetpipe.model.packed import entries_text, pack, unpack
from hetpipe.pipeline.callables import CollatedDataset, build_model
from hetpipe.pipeline.data import read_batch
from tests.model.harness import Subject, assert_cut_anywhere
from tests.numerics.compare import ROOT, trained
from tests.support.in_process import InProcessRun, run_in_process

SAMPLES = 8
ROW = torch.tensor(1.0)
LEARNING_RATE = 0.1


class Detector(nn.Module):
    """Takes images of several sizes as a list, and per image a mapping with any number of boxes; has its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.classes = nn.Linear(4, 3)
        self.boxes = nn.Linear(4, 4)

    def forward(
        self, images: list[Tensor], targets: list[dict[str, Tensor]], names: list[str], scale: float | None = None
    ) -> dict[str, Tensor]:
        assert len(names) == len(images)
        assert scale is None
        height, width = (max(image.shape[d] for image in images) for d in (1, 2))
        batch = images[0].new_zeros(len(images), 3, height, width)
        for place, image in zip(batch, images, strict=True):
            place[:, : image.shape[1], : image.shape[2]] = image
        found = self.body(batch).mean((2, 3))
        classes, boxes = self.classes(found), self.boxes(found)
        losses = []
        for each, box, target in zip(classes, boxes, targets, strict=True):
            wanted = target["labels"]
            losses.append(nn.functional.cross_entropy(each.expand(len(wanted), -1), wanted))
            losses.append((box - target["boxes"]).abs().mean())
        return {"loss": torch.stack(losses).mean()}


class Scenes:
    """Images of several sizes, with one to three boxes each."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        own = torch.Generator().manual_seed(index)
        count = 1 + index % 3
        target = {"boxes": torch.rand(count, 4, generator=own), "labels": torch.randint(0, 3, (count,), generator=own)}
        return torch.rand(3, 6 + index % 2, 7, generator=own), target


def collate(samples: list[tuple[Tensor, dict[str, Tensor]]]) -> dict[str, Any]:
    images, targets = zip(*samples, strict=True)
    return {"images": list(images), "targets": list(targets), "names": [f"image {i}" for i in range(len(images))],
            "scale": None}  # fmt: skip


def job_of(stages: int) -> Job:
    return Job(
        name="boxes",
        model=f"{__name__}:Detector",
        data={"train": f"{__name__}:Scenes", "collate_fn": f"{__name__}:collate", "shuffle": False},
        batch_size=2,
        minibatches=SAMPLES // 2,
        seed=3,
        optimizer={"name": "SGD", "lr": LEARNING_RATE},
        weights="flush",
        workers={"count": 1, "stages": stages},
        sync={"kind": "none", "minibatches_per_wave": 1},
        patience={"last_checkpoint": "1s"},
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_a_model_that_takes_lists_trains_to_the_bits_of_a_plain_loop(stages: int, tmp_path: Path) -> None:
    job = job_of(stages)
    model = build_model(job, ROOT)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    scenes = Scenes()
    for start in range(0, SAMPLES, 2):
        optimizer.zero_grad()
        model(**collate([scenes[start], scenes[start + 1]]))["loss"].backward()
        optimizer.step()
    run_in_process(InProcessRun(job=job, run_dir=tmp_path, import_path=ROOT, stall_seconds=60.0))
    found = trained(tmp_path)
    assert not [name for name, weight in model.named_parameters() if not torch.equal(found[name], weight)]


def test_lists_have_the_uncut_models_bits_at_every_cut() -> None:
    batch = read_batch(CollatedDataset(Scenes(), collate), range(3))
    assert batch.keys is not None
    made = dict(zip(batch.keys, batch.inputs, strict=True))
    assert_cut_anywhere(Subject(Detector, made), made)


def test_what_is_unpacked_is_what_was_packed() -> None:
    tensors = {"boxes": torch.rand(2, 4), "none": torch.zeros(0, 4), "half": torch.rand(3).bfloat16(), "one": ROW > 0}
    others = (1, 2.5, float("inf"), True, None, "text", b"bytes", torch.int64)
    value = [tensors, others]
    found = unpack(pack(value))
    assert found[1] == others
    assert [type(each) for each in found] == [dict, tuple]
    for name, tensor in tensors.items():
        assert found[0][name].dtype == tensor.dtype
        assert torch.equal(found[0][name], tensor)
    plain = torch.arange(40, dtype=torch.uint8)
    assert unpack(plain) is plain
    assert entries_text({"bytes": plain, "boxes": pack(value)}) == "bytes [40], boxes (list)"
    assert entries_text({"0": plain, "1": pack(value)}) == "input 0 [40], input 1 (list)", (
        "of a model called with a pair"
    )


def test_a_packed_entry_that_is_cut_off() -> None:
    with pytest.raises(CallableError, match=r"^model: a packed entry of a minibatch cannot be unpacked: "):
        unpack(pack([torch.rand(40)])[:-3])
