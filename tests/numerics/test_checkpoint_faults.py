"""Deaths and broken disks while a checkpoint is made: it is there or it is not, and training goes on exactly."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from safetensors.torch import save_file

from hetpipe.checkpoint.manifest import checkpoint_dir, newest_complete, read_complete
from hetpipe.errors import CheckpointNotWritten
from hetpipe.values.ids import Clock
from tests.numerics.compare import MOMENTUM, Case, assert_same_bits, run, trained
from tests.pairwise import every_nth
from tests.reference.executor import run_reference
from tests.support.lives import Death

pytestmark = pytest.mark.matrix

#: Barriers, all with checkpoints, at clocks 2, 4 and, at the end, 6.
CASE = Case(minibatches=12, every_waves=2, servers=2)
LAST = 6


def complete(folder: Path) -> list[int]:
    """Clocks of the complete checkpoints; every byte of them is looked at."""
    found = sorted((folder / "checkpoints").glob("*/manifest.json"))
    return [read_complete(path.parent).progress.clock for path in found]


@pytest.mark.parametrize(
    ("vw", "clock", "moment"),
    every_nth(
        2,
        (
            (vw, clock, f"{when} report_checkpoint")
            for vw, clock in ((0, 2), (1, 2), (0, 3))
            for when in (("before", "after") if vw == 0 else ("after", "before"))
        ),
    ),
)
def test_who_dies_while_it_is_made_spoils_no_checkpoint(vw: int, clock: int, moment: str, tmp_path: Path) -> None:
    """It has written its file, and one stage has reported it, or none; at clock 2, or at the end of the run."""
    case = Case(model="dropout_batch_norm", data="data32", batch_size=4, epochs=1, every_waves=2, optimizer=MOMENTUM)
    run(case, tmp_path / "a", deaths=(Death(vw=vw, at=moment, number=clock, comes_back=False),), stall_seconds=20.0)
    assert clock in complete(tmp_path / "a")
    manifest = read_complete(checkpoint_dir(tmp_path / "a", Clock(clock)))
    assert set(manifest.members) >= {1 - vw}
    if clock == 2:
        run(case, tmp_path / "b", restore=checkpoint_dir(tmp_path / "a", Clock(clock)))


Fault = Callable[[pytest.MonkeyPatch, Callable[[Path], bool]], None]


def no_space(monkeypatch: pytest.MonkeyPatch, concerns: Callable[[Path], bool]) -> None:
    def full(tensors: Any, path: Path, **options: Any) -> None:
        if concerns(path):
            path.write_bytes(b"some of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, **options)

    monkeypatch.setattr("hetpipe.checkpoint.format.save_file", full)


def no_sync(monkeypatch: pytest.MonkeyPatch, concerns: Callable[[Path], bool]) -> None:
    sync = os.fsync

    def broken(descriptor: int) -> None:
        if concerns(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.EIO, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", broken)


FAULTS: dict[str, Fault] = {"full": no_space, "unsynced": no_sync}
WRITERS = {"a shard": "shard-1", "a stage": "vw-1-stage-0"}


def breaks(monkeypatch: pytest.MonkeyPatch, fault: Fault, writer: str, clock: int) -> None:
    """One writer's disk fails it at one clock."""
    fault(monkeypatch, lambda path: path.parent.name == f"clock-{clock:08d}" and path.name.startswith(writer))


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_broken_disk_costs_a_checkpoint_and_nothing_else(
    fault: Fault, writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch, fault, writer, 4)
    with structlog.testing.capture_logs() as logs:
        run(CASE, tmp_path, delay_seconds=0.0)
    assert complete(tmp_path) == [2, LAST]
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints").iterdir()) == ["2", str(LAST)]
    assert_same_bits(trained(tmp_path), run_reference(CASE.reference()))
    alarms = [line for line in logs if line["event"] == "checkpoint_given_up"]
    assert [(line["log_level"], line["error"], line["clock"]) for line in alarms] == [
        ("error", "CheckpointNotWritten", 4)
    ]
    assert f"{writer}.safetensors cannot be written" in alarms[0]["reason"]


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_a_run_whose_last_checkpoint_is_lost_fails(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch, no_space, writer, LAST)
    with pytest.raises(CheckpointNotWritten, match="No space left on device"):
        run(CASE, tmp_path, delay_seconds=0.0)
    assert newest_complete(tmp_path) == checkpoint_dir(tmp_path, Clock(4))
