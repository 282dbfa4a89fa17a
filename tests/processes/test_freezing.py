"""Layers freeze and pipelines are compressed with real processes; the run goes on with other devices."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checker import check_run
from hetpipe.checkpoint.format import CheckpointReader
from hetpipe.checkpoint.manifest import newest_checkpoint, read_manifest
from tests.processes.harness import Train, write_job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def lines(run_dir: Path, event: str) -> list[dict[str, Any]]:
    found = map(json.loads, (run_dir / "history" / "shard-0.jsonl").read_text().splitlines())
    return [line for line in found if line["event"] == event]


@pytest.mark.exhaustive
def test_a_resume_in_the_middle_on_fewer_devices_goes_on_with_the_same_frozen_layers(tmp_path: Path) -> None:
    """Two virtual workers of two stages became four of one; from the middle of a pass on two of one train."""
    job = write_job(
        tmp_path,
        epochs=4,
        checkpoint={"every_waves": 1, "keep": 100},
        freeze={"schedule": [{"epoch": 1, "layers": 2}], "compress": True, "compress_by": "parameters"},
    )
    first = Train(tmp_path, job)
    outcome = first.finish(150.0)
    assert outcome.returncode == 0, outcome.stderr
    assert check_run(first.run_dir, require_complete=True).ok
    assert {line["vw"] for line in lines(first.run_dir, "join")} == set(range(6))

    manifests = {path.parent: read_manifest(path.parent).progress for path in first.run_dir.glob("*/*/manifest.json")}
    middle, progress = next(
        (folder, progress) for folder, progress in sorted(manifests.items()) if progress.lineup and any(progress.used)
    )
    for folder, later in manifests.items():
        if later.clock > progress.clock:
            shutil.rmtree(folder)
    second = Train(tmp_path, "--resume", first.run_dir, "--set", "workers.count=1")
    outcome = second.finish(150.0)
    assert outcome.returncode == 0, outcome.stderr
    assert check_run(second.run_dir, require_complete=True).ok
    began = lines(second.run_dir, "freeze")[0]
    assert (began["clock"], began["frozen"]) == (progress.clock, progress.frozen)
    assert {line["vw"] for line in lines(second.run_dir, "join")} == {1, 2}, "those of one stage train at once"
    end = newest_checkpoint(second.run_dir)
    assert read_manifest(end).progress.epoch == 4
    before, after = (CheckpointReader(folder.glob("*.safetensors")) for folder in (middle, end))
    same = {
        name for layer in (0, 2, 4) if torch.equal(before.tensor(name := f"weights/{layer}.weight"), after.tensor(name))
    }
    assert same == {"weights/0.weight", "weights/2.weight"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder for temporary files on a file system of a few pages."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"NOT TESTED: a full disk, because no small one can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.exhaustive
def test_a_run_goes_on_where_the_disk_of_its_cache_is_full(tmp_path: Path, small_disk: Path) -> None:
    """What was kept before is read. The log says once that no more is, the status says why; all bits are the same."""
    trains = {}
    for cache in ("on", "off"):
        job = write_job(
            tmp_path,
            data={"train": "tests.models:data32", "shuffle": False},
            workers={"count": 1, "stages": [[2, 3]]},
            epochs=3,
            freeze={"layers": 2, "cache": cache, "cache_memory_bytes": 0, "cache_disk_bytes": 1 << 30},
        )
        train = trains[cache] = Train(tmp_path, job, environment={"TMPDIR": str(small_disk)})
        outcome = train.finish(150.0)
        assert outcome.returncode == 0, outcome.stderr
        assert check_run(train.run_dir, require_complete=True).ok
    run_dirs = [train.run_dir for train in trains.values()]
    with_cache, without = (CheckpointReader(newest_checkpoint(run_dir).glob("*.safetensors")) for run_dir in run_dirs)
    names = without.keys("weights/")
    assert len(names) == 6
    assert all(torch.equal(with_cache.tensor(name), without.tensor(name)) for name in names)

    status = trains["on"].status()["cache"]
    minibatches = 12
    assert 0 < status["reads"] < 2 * minibatches, "some are kept, and others are not"
    assert status["stopped"] == f"stage 1 of virtual worker 0: {small_disk}: No space left on device"
    logged = [path.read_text().count("frozen_cache_full") for path in (run_dirs[0] / "logs").iterdir()]
    assert sum(logged) == 1
