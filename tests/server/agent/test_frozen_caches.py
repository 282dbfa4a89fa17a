"""The folders that an agent makes for the caches of jobs, and removes."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from hetpipe.decide.elastic.caching import CacheBytes, allowed_bytes
from hetpipe.job.file import Job
from hetpipe.server.agent.frozen_caches import CACHE_VARIABLE, FrozenCaches, cache_folders
from hetpipe.values.ids import JobId

FREEZING: dict[str, Any] = {"freeze": {"layers": 1, "cache": "auto"}}
ONE, OTHER = JobId("one"), JobId("other")


def roots(parent: Path) -> tuple[Path, Path]:
    found = parent / "memory", parent / "disk"
    for folder in found:
        folder.mkdir()
    return found


def test_stages_of_a_job_share_folders_until_it_ends(tmp_path: Path) -> None:
    memory, disk = roots(tmp_path)
    caches = FrozenCaches(memory, disk)
    given = caches.environment(ONE, FREEZING)
    assert caches.environment(ONE, FREEZING) == given
    assert caches.environment(OTHER, FREEZING) != given
    folders = [Path(text) for text in json.loads(given[CACHE_VARIABLE])]
    assert [folder.parent for folder in folders] == [memory, disk]
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in folders)
    caches.remove(ONE)
    caches.remove(ONE)
    assert not any(folder.exists() for folder in folders)
    assert caches.environment(ONE, FREEZING) != given, "another cache has another name"
    caches.close()
    assert [*memory.iterdir(), *disk.iterdir()] == []


@pytest.mark.parametrize(
    "job", [{}, {"freeze": {"layers": 0, "cache": "auto"}}, {"freeze": {"layers": 1, "cache": "off"}}]
)
def test_a_job_that_caches_nothing_gets_no_folders(job: dict[str, Any], tmp_path: Path) -> None:
    memory, disk = roots(tmp_path)
    assert FrozenCaches(memory, disk).environment(ONE, job) == {}
    assert [*memory.iterdir(), *disk.iterdir()] == []


def test_a_script_that_freezes_gets_them(tmp_path: Path) -> None:
    job = {"freeze": {"cache": "on"}, "elastic": {"script": [{"at": {"clock": 2}, "do": "freeze", "layers": 1}]}}
    assert FrozenCaches(*roots(tmp_path)).environment(ONE, job)


def test_a_folder_that_cannot_be_made_leaves_the_other_one(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    job = Job(model="m:build", data={"train": "m:data"}, optimizer={"name": "SGD", "lr": 0.1}, epochs=1)
    for memory, disk in ((tmp_path, absent), (absent, tmp_path)):
        caches = FrozenCaches(memory, disk)
        folders = cache_folders(caches.environment(ONE, FREEZING), job)
        assert folders is not None
        assert folders.memory == folders.disk
        assert folders.memory.parent == tmp_path
        allowed = allowed_bytes(job)
        assert folders.allowed == CacheBytes(*((allowed.memory, 0) if memory == tmp_path else (0, allowed.disk)))
        caches.close()
    assert FrozenCaches(absent, absent).environment(ONE, FREEZING) == {}
    assert [*tmp_path.iterdir()] == []


def test_a_stage_has_the_folders_of_its_agent_and_the_limits_of_its_job(tmp_path: Path) -> None:
    job = Job(
        model="m:build",
        data={"train": "m:data"},
        optimizer={"name": "SGD", "lr": 0.1},
        epochs=1,
        freeze={"cache_memory_bytes": 5, "cache_disk_bytes": 7},
    )
    folders = cache_folders(FrozenCaches(*roots(tmp_path)).environment(ONE, FREEZING), job)
    assert folders is not None
    assert folders.allowed == CacheBytes(5, 7)
    assert folders.memory.is_dir()
    assert cache_folders({}, job) is None
