"""Machines that share nothing but an object store: each process has a file system of its own where runs are."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetpipe.checkpoint.export import export_weights
from hetpipe.checkpoint.locations import newest_listed_at, verified_at
from hetpipe.checkpoint.manifest import Manifest
from tests.chaos.cluster import COORDINATOR, RUNS, Cluster, Layout, Place
from tests.chaos.keeper import Kept
from tests.numerics.compare import MOMENTUM, Case
from tests.polling import wait_until
from tests.processes.harness import Train, write_job
from tests.reference.executor import run_reference
from tests.storage.s3_server import BUCKET, s3_server

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(300)]

#: In the training set of `tests.models:data32`.
SAMPLES = 46

_UNSHARE = ("unshare", "--mount", "--propagation", "private")


def _own_mounts() -> bool:
    if os.geteuid() != 0:
        return False
    return subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode == 0


class Islands:
    """A cluster whose processes each see an own folder for runs, and a store that all of them see."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        runs = folder / "cluster" / "disks" / RUNS / "data"
        runs.mkdir(parents=True)
        names = (COORDINATOR, "shard-0", "shard-1", "agent-0", "agent-1")
        self.cluster = Cluster(
            folder / "cluster", Layout(places={name: Place(prefix=self._alone(name, runs)) for name in names})
        )

    def _alone(self, name: str, runs: Path) -> tuple[str, ...]:
        own = self.own(name)
        own.mkdir(parents=True)
        return (*_UNSHARE, "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', str(own), str(runs))

    def own(self, name: str) -> Path:
        """What a process sees as the folder of runs."""
        return self.folder / "own" / name

    def submit(self, run: str, *arguments: str) -> Kept:
        address = self.cluster.address(COORDINATOR)
        command = ["submit", *arguments, "--coordinator", address, "--run-dir", str(self.cluster.runs / run)]
        return self.cluster.run_command(run, command, ready="nothing it prints")

    def wait_for_checkpoint(self, run: str, kept: Kept) -> None:
        def is_there() -> bool:
            assert kept.exit_status is None, kept.story()
            return newest_listed_at(f"{self.url}/{run}") is not None

        wait_until(is_there, timeout_seconds=90.0, what=f"first checkpoint of {run}")

    def newest(self, run: str) -> Manifest:
        where = newest_listed_at(f"{self.url}/{run}")
        assert where is not None
        return verified_at(where)


@pytest.fixture(params=["file", "s3"])
def islands(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Islands]:
    if not _own_mounts():
        pytest.skip("this system lets nobody here mount")
    with ExitStack() as stack:
        url = f"file://{tmp_path}/objects"
        if request.param == "s3":
            for name, value in stack.enter_context(s3_server()).environment.items():
                monkeypatch.setenv(name, value)  # which the processes inherit
            url = f"s3://{BUCKET}/runs"
        islands = Islands(tmp_path, url)
        stack.enter_context(islands.cluster)
        yield islands


def _wait_done(kept: Kept) -> None:
    wait_until(lambda: kept.exit_status is not None, timeout_seconds=150.0, what=f"end of {kept.spec.key}")
    assert kept.exit_status == 0, kept.story()


def _parts(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.safetensors") if "checkpoints" in path.parts}


def test_a_run_survives_a_lost_node_and_is_resumed_elsewhere(islands: Islands) -> None:
    values: dict[str, Any] = {
        "storage": islands.url,
        "epochs": 30,
        "checkpoint": {"every_waves": 4, "keep": 2},
        "parameter_servers": {"count": 2},
        "cluster": {"devices": [{"slowdown": 20.0}]},
    }
    job = write_job(islands.folder, **values)
    first = islands.submit("first", str(job))
    islands.wait_for_checkpoint("first", first)
    islands.cluster.kept["agent-1"].kill()
    _wait_done(first)
    manifest = islands.newest("first")
    assert manifest.members == (0, 1)
    assert manifest.progress.epoch == 30
    assert manifest.progress.samples == 30 * SAMPLES
    told = (islands.folder / "cluster" / "processes" / "first.err").read_text() + first.output().read_text()
    assert "survived: virtual worker 1 died 1 time" in told
    assert f"stored:  {islands.url}/first" in told
    assert _parts(islands.own("agent-0")) == {"vw-0-stage-0.safetensors", "vw-0-stage-1.safetensors"}
    assert _parts(islands.own("shard-1")) == {"shard-1.safetensors"}
    assert not _parts(islands.own(COORDINATOR))

    second = islands.submit("second", "--resume", f"{islands.url}/first", "--set", "epochs=32")
    _wait_done(second)
    resumed = islands.newest("second")
    assert resumed.progress.epoch == 32
    assert resumed.progress.samples == 32 * SAMPLES


def test_a_run_that_goes_on_from_a_url_ends_with_the_bits_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    case = Case(batch_size=4, epochs=2, every_waves=3, data="data32", optimizer=MOMENTUM)
    job = case.job().model_dump(mode="json", exclude_defaults=True)
    url = f"file://{tmp_path}/objects"
    first = Train(tmp_path, write_job(tmp_path, **job), "--set", "epochs=1", "--set", f"storage={url}")
    outcome = first.finish()
    assert outcome.returncode == 0, outcome.stderr
    stored = f"{url}/{first.run_dir.name}"
    shutil.rmtree(first.run_dir)
    (tmp_path / "run-0").mkdir()  # its name stays taken
    second = Train(tmp_path, "--resume", stored, "--set", "epochs=2")
    outcome = second.finish()
    assert outcome.returncode == 0, outcome.stderr
    export_weights(f"{url}/{second.run_dir.name}", f"file://{tmp_path}/exported/model.safetensors")
    found = load_file(tmp_path / "exported" / "model.safetensors")
    for weight, expected in run_reference(case.reference()).weights.items():
        assert torch.equal(found[weight], expected), weight
