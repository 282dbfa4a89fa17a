"""A shard writes its part of a checkpoint behind training's back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from hetpipe.checkpoint.format import CheckpointReader
from hetpipe.checkpoint.manifest import MANIFEST, checkpoint_dir, file_digest
from hetpipe.checkpoint.shard_part import _TOO_SLOW, ShardCheckpoints
from hetpipe.checkpoint.store import StoredCheckpoints
from hetpipe.decide.sync.records import Record, SegmentMember, SegmentRecord
from hetpipe.errors import Busy, CheckpointNotWritten, PeerUnreachable
from hetpipe.storage.objects import ObjectStore
from hetpipe.values.ids import Clock, Incarnation, LayerIndex, ShardIndex, VirtualWorkerIndex
from hetpipe.values.plan import SlicePlan, TensorSpec
from hetpipe.values.requests import CheckpointFile
from tests.polling import wait_until
from tests.server.shard.builders import OneShard, requester, shard_config
from tests.storage.faulty_objects import FaultyFiles
from tests.support.fake_clock import FakeClock

SECONDS = 10.0

#: A whole matrix, and the middle of another parameter.
SLICES = (
    SlicePlan(TensorSpec("whole", (2, 3), "float32"), LayerIndex(0), ShardIndex(0), 0, 6),
    SlicePlan(TensorSpec("cut", (9, 100), "float32"), LayerIndex(1), ShardIndex(0), 100, 800),
)


def segment(clock: int, *reasons: str) -> SegmentRecord:
    member = SegmentMember(VirtualWorkerIndex(0), Incarnation(0), 1, joined=False)
    return SegmentRecord(9, Clock(clock), reasons, 0, (member,))


class Rig:
    """One shard with weights at clock 0, and what it tells."""

    def __init__(self, run_dir: Path) -> None:
        self.one = OneShard(shard_config(SLICES, stages=(1,), run_dir=str(run_dir)))
        self.weights = [torch.rand(6), torch.rand(700)]
        self.one.clock.join(requester())
        self.one.push(requester(), None, self.weights)
        self.one.clock.initialized(requester())
        self.one.settle()
        self.told: list[tuple[int, list[CheckpointFile], str]] = []
        self.before_telling: Callable[[], None] = lambda: None
        self.clock = FakeClock()
        self.parts = ShardCheckpoints(self.one.shard, self.tell, self.clock)
        self.folder = checkpoint_dir(run_dir, Clock(0))
        self.path = self.folder / "shard-0.safetensors"

    def tell(self, shard: ShardIndex, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = "") -> bool:
        assert shard == 0
        self.before_telling()
        self.told.append((clock, list(files), failure))
        if failure:
            raise CheckpointNotWritten(failure)
        return False

    def heard(self, count: int = 1) -> tuple[int, list[CheckpointFile], str]:
        def has_heard() -> bool:
            self.clock.advance(1.0)
            return len(self.told) >= count

        wait_until(has_heard, timeout_seconds=SECONDS, what="report")
        return self.told[-1]

    @property
    def num_buffers(self) -> int:
        return self.one.buffers[0]


def _await(event: threading.Event) -> None:
    assert event.wait(SECONDS)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.parts.close()


def test_the_slices_are_written_under_the_models_names_and_told(rig: Rig) -> None:
    rig.parts.follow(segment(0, "checkpoint", "epoch"))
    assert rig.heard() == (0, [file_digest(rig.path)], "")
    reader = CheckpointReader([rig.path])
    assert torch.equal(reader.tensor("weights/whole"), rig.weights[0].view(2, 3))
    assert reader.keys("weights/") == ["weights/cut", "weights/whole"]
    with pytest.raises(Exception, match="does not match"):  # the rest is on other shards
        reader.tensor("weights/cut")


@pytest.mark.parametrize("record", [segment(0, "evict"), segment(0, "join"), segment(0)])
def test_other_barriers_have_nothing_written(rig: Rig, record: Record) -> None:
    rig.parts.follow(record)
    rig.parts.follow(segment(0, "end"))
    rig.heard()
    assert len(rig.told) == 1


def test_the_version_lives_while_it_is_written_and_training_goes_on(rig: Rig) -> None:
    release = threading.Event()
    rig.before_telling = partial(_await, release)
    before = rig.num_buffers
    rig.parts.follow(segment(0, "stop"))
    held = rig.one.shard.hold(Clock(0))  # while one thread writes, others may do the same
    wait_until(rig.path.exists, timeout_seconds=SECONDS, what="file")
    rig.one.shard.release(held)
    release.set()
    rig.heard()
    assert rig.num_buffers == before


def test_a_disk_that_is_too_slow_costs_a_checkpoint(rig: Rig) -> None:
    release = threading.Event()
    rig.before_telling = partial(_await, release)
    for _ in range(3):
        rig.parts.follow(segment(0, "checkpoint"))
    release.set()
    rig.heard(3)
    assert [failure for _, _, failure in rig.told] == ["", "", ""], "it lies there, so there is nothing to write"
    rig.parts.follow(segment(5, "checkpoint"))
    assert rig.heard(4)[2] == "w^(5) is not on shard 0"


def test_more_than_two_wait_for_nobody(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(ShardCheckpoints, "_is_written", staticmethod(lambda *_: not release.wait(SECONDS)))
    for _ in range(3):
        rig.parts.follow(segment(0, "checkpoint"))
    release.set()
    rig.heard(3)
    assert [failure for _, _, failure in rig.told] == ["", "", _TOO_SLOW]


def test_a_disk_that_cannot_be_written_to_is_told(rig: Rig) -> None:
    rig.folder.parent.write_bytes(b"no folder")
    rig.parts.follow(segment(0, "checkpoint"))
    clock, files, failure = rig.heard()
    assert (clock, files) == (0, [])
    assert "shard-0.safetensors cannot be written" in failure
    rig.folder.parent.unlink()
    rig.parts.follow(segment(0, "checkpoint"))
    assert rig.heard(2)[2] == ""


def test_the_part_that_ends_a_run_is_written_as_soon_as_there_is_room(rig: Rig) -> None:
    rig.folder.parent.write_bytes(b"no folder")
    rig.parts.follow(segment(0, "end"))
    for _ in range(5):
        assert rig.clock.wait_sleepers(1, timeout_seconds=SECONDS), "the writer does not try again"
        assert not rig.told
        rig.clock.advance(1.0)
    rig.folder.parent.unlink()
    assert rig.heard()[2] == ""
    assert rig.path.exists()


def test_but_not_for_ever(rig: Rig) -> None:
    rig.folder.parent.write_bytes(b"no folder")
    rig.parts.follow(segment(0, "end"))
    assert "shard-0.safetensors cannot be written" in rig.heard()[2]
    patience = rig.one.shard.config.last_checkpoint_seconds
    assert patience <= rig.clock.monotonic()


def test_it_is_told_until_the_clock_shard_hears(rig: Rig) -> None:
    absences = [PeerUnreachable("away"), Busy("back, and asked by everybody")]

    def be_away() -> None:
        if absences:
            raise absences.pop()

    rig.before_telling = be_away
    rig.parts.follow(segment(0, "checkpoint"))
    assert rig.heard()[2] == ""
    assert not absences


def test_after_a_restart_it_is_written_unless_it_lies_there(rig: Rig) -> None:
    adopted: list[int] = []
    rig.parts.take_up([segment(0, "checkpoint")], lambda: adopted.append(len(rig.told)))
    first = rig.heard()
    wait_until(lambda: adopted == [1], timeout_seconds=SECONDS, what="adoption, after the own part")
    written = rig.path.stat()
    rig.parts.take_up([segment(0, "checkpoint")])
    assert rig.heard(2) == first
    assert rig.path.stat().st_mtime_ns == written.st_mtime_ns, "it may be in the manifest already"

    rig.path.write_bytes(b"torn")
    rig.parts.take_up([segment(0, "checkpoint")])
    assert rig.heard(3) == first


def test_after_a_restart_a_complete_one_is_left_alone(rig: Rig) -> None:
    rig.folder.mkdir(parents=True)
    (rig.folder / MANIFEST).write_bytes(b"{}")
    rig.parts.take_up([segment(0, "checkpoint")])
    rig.parts.take_up([])
    rig.parts.follow(segment(0, "checkpoint"))
    rig.heard()
    assert len(rig.told) == 1


def test_a_part_that_an_object_store_does_not_take_is_told_and_the_weights_are_free(rig: Rig, tmp_path: Path) -> None:
    files = FaultyFiles()
    objects = ObjectStore("faulty://bucket/run", filesystem=files, clock=rig.clock)
    rig.parts = ShardCheckpoints(rig.one.shard, rig.tell, rig.clock, StoredCheckpoints(objects, tmp_path))
    before = rig.num_buffers

    def refuse(name: str, _: int) -> None:
        if name == "put":
            raise PermissionError("Access Denied")

    files.fault = refuse
    rig.parts.follow(segment(0, "checkpoint"))
    clock, parts, failure = rig.heard()
    assert (clock, parts) == (0, [])
    assert failure.startswith("storage: faulty://bucket/run/checkpoints/clock-00000000/shard-0.")
    assert "Access Denied" in failure
    assert rig.num_buffers == before
    files.fault = lambda *_: None
    rig.parts.follow(segment(0, "checkpoint"))
    assert rig.heard(2) == (0, [file_digest(rig.path)], "")
    assert [key for key in files.store if "shard-0" in key]
