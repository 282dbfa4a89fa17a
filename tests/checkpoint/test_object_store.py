"""Checkpoints in an object store that tears, refuses, forgets and delays: none of it passes for a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hetpipe.checkpoint.keeper import CheckpointKeeper
from hetpipe.checkpoint.layout import PartLabel
from hetpipe.checkpoint.locations import (
    StoredCheckpoint,
    manifest_at,
    newest_complete_at,
    newest_listed_at,
    opened,
    search_at,
    stored_rewinds,
    verified_at,
)
from hetpipe.checkpoint.manifest import MANIFEST, read_complete
from hetpipe.checkpoint.store import StoredCheckpoints
from hetpipe.checkpoint.stored_run import claim_run, fetch_documents
from hetpipe.checkpoint.uploads import PartUploads
from hetpipe.conditions import Conditions
from hetpipe.errors import CheckpointError, CheckpointNotWritten, UserError
from hetpipe.storage.objects import ObjectStore
from hetpipe.values.ids import Clock, JobId, ShardIndex, VirtualWorkerIndex
from hetpipe.values.requests import CheckpointFile
from tests.checkpoints import JOB, progress_at, shard_part, stage_part
from tests.polling import wait_until
from tests.server.shard.builders import requester
from tests.storage.faulty_objects import FaultyFiles
from tests.support.fake_clock import FakeClock

URL = "s3://bucket/run"
SECONDS = 20.0


class World:
    """A clock shard's keeper, one shard and one stage, over a store with faults."""

    def __init__(self, folder: Path, files: FaultyFiles | None = None, keep: int = 2) -> None:
        self.folder = folder
        self.files = files or FaultyFiles()
        self.clock = FakeClock(auto_advance=True)
        self.store = StoredCheckpoints(self.objects(URL), folder)
        self.conditions = Conditions()
        self.keeper = CheckpointKeeper(
            job_id=JOB, store=self.store, num_shards=1, keep=keep, conditions=self.conditions, time=self.clock
        )

    def objects(self, url: str) -> ObjectStore:
        return ObjectStore(url, filesystem=self.files, clock=self.clock)

    def write(self, clock: int) -> list[CheckpointFile]:
        return [shard_part(self.folder, clock, 0, num_shards=1), stage_part(self.folder, clock, 0, 0)]

    def begin(self, clock: int) -> None:
        self.keeper.begin(progress_at(clock), {VirtualWorkerIndex(0): 1})

    def report(self, clock: int, files: list[CheckpointFile]) -> bool:
        self.keeper.report_shard(ShardIndex(0), Clock(clock), files[:1])
        return self.keeper.report(requester(0, 0), Clock(clock), files[1:])

    def save(self, clock: int) -> None:
        """One whole checkpoint, as far as the store lets it come."""
        self.begin(clock)
        files = self.write(clock)
        for file in files:
            self.store.deliver(Clock(clock), file)
        self.report(clock, files)
        self.settle()

    def settle(self) -> None:
        """Until the keeper's thread has done what there is."""
        done = threading.Event()
        self.keeper._work(done.set)
        assert done.wait(SECONDS)

    def manifest(self, where: str) -> object:
        with opened(where, objects=self.objects) as checkpoint:
            return checkpoint.manifest()

    def complete(self) -> str | None:
        """The newest checkpoint of which everything was read."""

        def check(where: str) -> object:
            with opened(where, objects=self.objects) as checkpoint:
                manifest = checkpoint.manifest()
                folder = checkpoint.folder(manifest.files)
                (folder / MANIFEST).write_bytes(self.objects(where).get(MANIFEST, max_bytes=1 << 20))
                return read_complete(folder)

        return search_at(URL, check, objects=self.objects).folder  # type: ignore[arg-type]

    @property
    def kept(self) -> list[int]:
        return sorted(clock for clock, done in self.store.clocks().items() if done)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("os.fsync", lambda _: None)
    return World(tmp_path)


def place(clock: int) -> str:
    return f"{URL}/checkpoints/clock-{clock:08d}"


def test_it_is_complete_with_its_manifest_and_older_ones_go(world: World) -> None:
    for clock in (2, 4, 6):
        world.save(clock)
    assert world.kept == [4, 6]
    assert world.complete() == place(6)
    assert world.keeper.newest_complete == 6
    assert world.report(6, world.write(6)), "a repeated report hears of it"
    names = sorted(path.name for path in (world.folder / "checkpoints").rglob("*.safetensors"))
    assert names == ["shard-0.safetensors", "vw-0-stage-0.safetensors"], "on this machine only the newest parts stay"


def test_the_manifest_goes_first_when_one_is_deleted(world: World) -> None:
    world.save(2)
    stored: list[set[str]] = []

    def look(name: str, _: int) -> None:
        if name == "delete":
            stored.append({key.rpartition("/")[2] for key in world.files.store})

    world.files.fault = look
    world.store.remove(Clock(2))
    assert MANIFEST in stored[0]
    assert all(MANIFEST not in names for names in stored[1:])
    assert len(stored) == 3
    assert world.store.clocks() == {}


def _puts(world: World) -> int:
    """How many objects a checkpoint is made of."""
    before = len(world.files.calls)
    world.save(2)
    return world.files.calls[before:].count("put")


def test_an_upload_torn_at_any_point_is_never_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer dies in the middle of every object in turn, with every number of bytes stored that matters."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    num_puts = _puts(World(tmp_path / "count"))
    assert num_puts == 3
    for torn in range(num_puts):
        for num_bytes in (0, 1, 100):
            world = World(tmp_path / f"{torn}-{num_bytes}")
            world.save(2)
            puts = 0

            def tear(name: str, _: int, torn: int = torn, num_bytes: int = num_bytes) -> int | None:
                nonlocal puts
                if name != "put":
                    return None
                puts += 1
                if puts > torn + 1:
                    raise PermissionError("its process is dead")
                return num_bytes if puts == torn + 1 else None

            world.files.fault = tear
            try:
                world.save(4)
            except CheckpointNotWritten:
                assert torn < 2, "the manifest is the keeper's"
            world.files.fault = lambda *_: None
            assert world.complete() == place(2), (torn, num_bytes)


def test_an_upload_that_is_torn_once_is_repeated(world: World) -> None:
    seen: set[int] = set()

    def tear(name: str, number: int) -> int | None:
        if name == "put" and len(seen) < 3 and number % 2 == 0:
            seen.add(number)
            return 7
        return None

    world.files.fault = tear
    world.save(2)
    assert seen
    assert world.complete() == place(2)


@pytest.mark.parametrize("what", ["shorter", "other bytes", "gone"])
def test_parts_that_are_not_what_the_manifest_lists_are_found_out(world: World, what: str) -> None:
    world.save(2)
    world.save(4)
    key = next(key for key in world.files.store if "clock-00000004/shard" in key)
    data = world.files.cat_file(key)
    world.files.store.pop(key)
    if what != "gone":
        world.files.pipe_file(key, data[:-1] if what == "shorter" else data[:-1] + bytes([data[-1] ^ 1]))
    assert world.complete() == place(2)
    if what != "other bytes":
        with pytest.raises(CheckpointError, match=r"is missing|has \d+ bytes, but the manifest lists"):
            world.manifest(place(4))


def test_a_manifest_that_is_torn_is_none(world: World) -> None:
    world.save(2)
    world.save(4)
    key = next(key for key in world.files.store if key.endswith("clock-00000004/manifest.json"))
    text = world.files.cat_file(key)
    for length in (0, 1, len(text) // 2, len(text) - 1):
        world.files.pipe_file(key, text[:length])
        assert world.complete() == place(2)
        with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
            world.manifest(place(4))


def test_a_manifest_of_another_clock_is_refused(world: World) -> None:
    world.save(2)
    text = world.objects(place(2)).get(MANIFEST, max_bytes=1 << 20)
    world.objects(place(4)).put(MANIFEST, text)
    with pytest.raises(CheckpointError, match="is of clock 2, not of 4"):
        world.manifest(place(4))
    with pytest.raises(CheckpointError, match=r"is not a complete checkpoint: it has no manifest\.json"):
        world.manifest(place(6))


def test_a_store_that_refuses_raises_the_condition_and_the_next_checkpoint_clears_it(world: World) -> None:
    def refuse(name: str, _: int) -> None:
        if name == "put":
            raise PermissionError("Access Denied")

    world.begin(2)
    files = world.write(2)
    world.files.fault = refuse
    with pytest.raises(CheckpointNotWritten, match=r"storage: s3://bucket/run/.*Access Denied; give the processes"):
        world.store.deliver(Clock(2), files[0])
    world.files.fault = lambda *_: None
    for file in files:
        world.store.deliver(Clock(2), file)
    world.files.fault = refuse
    world.report(2, files)
    world.settle()
    (condition,) = world.conditions.active()
    assert "its manifest could not be written" in condition.sentence
    assert "Access Denied" in condition.sentence
    world.files.fault = lambda *_: None
    cleared_by_deletions: list[bool] = []

    def look(name: str, _: int) -> None:
        if name == "list":
            cleared_by_deletions.append(world.conditions.active()[0].cleared is not None)

    world.begin(4)
    files = world.write(4)
    for file in files:
        world.store.deliver(Clock(4), file)
    world.settle()
    world.files.fault = look
    world.report(4, files)
    world.settle()
    assert cleared_by_deletions
    assert all(cleared_by_deletions), "a run may end while older checkpoints are being deleted"


def test_nobody_waits_for_a_store_that_hangs(world: World) -> None:
    """Reports and evictions answer while the manifest is being written."""
    release = threading.Event()

    def hang(name: str, _: int) -> None:
        if name == "put":
            release.wait(SECONDS)

    world.begin(2)
    files = world.write(2)
    for file in files:
        world.store.deliver(Clock(2), file)
    world.files.fault = hang
    try:
        assert not world.report(2, files), "not complete yet"
        world.keeper.evict(VirtualWorkerIndex(5))
        world.begin(4)
    finally:
        release.set()
    wait_until(lambda: world.keeper.newest_complete == 2, timeout_seconds=SECONDS, what="checkpoint")


def test_a_restarted_keeper_adopts_whole_parts_and_complete_checkpoints(world: World) -> None:
    world.begin(2)
    files = world.write(2)
    for file in files:
        world.store.deliver(Clock(2), file)
    torn = files[0].sha256[::-1]
    world.files.pipe_file(f"/bucket/run/checkpoints/clock-00000002/shard-0.{torn}.safetensors", b"torn")
    again = World(world.folder, world.files)
    again.begin(2)
    again.keeper.adopt()
    again.settle()
    assert again.complete() == place(2)
    third = World(world.folder, world.files)
    third.begin(2)
    third.keeper.adopt()
    assert third.keeper.newest_complete == 2
    assert third.report(2, files)


def test_a_part_of_another_job_is_not_adopted(world: World) -> None:
    world.begin(2)
    file = shard_part(world.folder, 2, 0, num_shards=1, job_id=JobId("other"))
    world.store.deliver(Clock(2), file)
    assert world.store.delivered(PartLabel(JOB, Clock(2), file.name)) is None


# -- uploads of a stage ------------------------------------------------------------------------------------------------


class Reports:
    def __init__(self) -> None:
        self.told: list[tuple[int, bool, str]] = []

    def __call__(self, clock: Clock, path: Path | None, *, failure: str = "") -> bool:
        self.told.append((clock, path is not None, failure))
        return True


def upload(uploads: PartUploads, world: World, clock: int, *, is_last: bool = False) -> Callable[[], None]:
    file = stage_part(world.folder, clock, 0, 0)
    path = world.store.folder(Clock(clock)) / file.name
    future = uploads.begin(Clock(clock), path, retry_seconds=1.0, is_last=is_last)
    return lambda: future.result(SECONDS)


def test_uploads_are_reported_when_they_are_done(world: World) -> None:
    reports = Reports()
    upload(PartUploads(world.store, reports), world, 2)()
    assert reports.told == [(2, True, "")]
    assert any("vw-0-stage-0" in key for key in world.files.store)


def test_an_upload_that_fails_is_reported_as_a_failure(world: World) -> None:
    reports = Reports()
    world.files.fault = lambda *_: 0
    with pytest.raises(CheckpointNotWritten, match="the connection was reset"):
        upload(PartUploads(world.store, reports), world, 2)()
    ((clock, is_part, failure),) = reports.told
    assert (clock, is_part) == (2, False)
    assert "see that the store can be reached from here" in failure


def test_a_store_that_is_too_slow_costs_a_checkpoint_and_never_the_last_one(world: World) -> None:
    reports, release = Reports(), threading.Event()

    def hang(name: str, _: int) -> None:
        if name == "put":
            release.wait(SECONDS)

    world.files.fault = hang
    uploads = PartUploads(world.store, reports)
    results = [upload(uploads, world, clock) for clock in (2, 4, 6)]
    last = upload(uploads, world, 8, is_last=True)
    release.set()
    for result in results[:2]:
        result()
    with pytest.raises(CheckpointNotWritten, match="the object store is too slow"):
        results[2]()
    last()
    assert [(clock, is_part) for clock, is_part, _ in reports.told] == [(2, True), (4, True), (6, False), (8, True)]


def _has_completed(keeper: CheckpointKeeper, clock: int) -> bool:
    return keeper.newest_complete == clock


# -- readers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A run's URL with checkpoints at clocks 2 and 4, and a rewind's at clock 3; and the store's folder."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    url = f"file://{tmp_path}/store/run"
    for run, clocks in ((url, (2, 4)), (f"{url}/rewind-1", (3,))):
        store = StoredCheckpoints(ObjectStore(run), tmp_path / "own")
        keeper = CheckpointKeeper(job_id=JOB, store=store, num_shards=1, keep=5)
        for clock in clocks:
            files = [shard_part(tmp_path / "own", clock, 0, num_shards=1), stage_part(tmp_path / "own", clock, 0, 0)]
            keeper.begin(progress_at(clock), {VirtualWorkerIndex(0): 1})
            for file in files:
                store.deliver(Clock(clock), file)
            keeper.report_shard(ShardIndex(0), Clock(clock), files[:1])
            keeper.report(requester(0, 0), Clock(clock), files[1:])
            wait_until(partial(_has_completed, keeper, clock), timeout_seconds=SECONDS, what="checkpoint")
    return url, tmp_path / "store" / "run"


def test_the_newest_rewind_comes_first(stored: tuple[str, Path]) -> None:
    url, folder = stored
    newest = f"{url}/rewind-1/checkpoints/clock-00000003"
    assert newest_complete_at(url) == newest_listed_at(url) == newest
    assert verified_at(newest) == manifest_at(newest)
    assert stored_rewinds(url) == 1
    (folder / "rewind-1" / "checkpoints" / "clock-00000003" / MANIFEST).unlink()
    found = search_at(url)
    assert found.folder == f"{url}/checkpoints/clock-00000004"
    assert found.passed_over == (f"{newest} was never completed",)


def test_a_damaged_one_is_passed_over_only_by_who_reads_it(stored: tuple[str, Path]) -> None:
    url, folder = stored
    part = next((folder / "rewind-1" / "checkpoints" / "clock-00000003").glob("shard-0.*"))
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert newest_listed_at(url) == f"{url}/rewind-1/checkpoints/clock-00000003"
    assert newest_complete_at(url) == f"{url}/checkpoints/clock-00000004"
    assert "is corrupted" in search_at(url).damaged[0]


def test_older_ones_are_there_for_who_was_absent(stored: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = stored
    with opened(f"{url}/checkpoints/clock-00000004", cache=tmp_path / "cache") as checkpoint:
        (older,) = checkpoint.older()
        assert isinstance(older, StoredCheckpoint)
        assert older.clock == 2
        assert [path.name for path in older.paths(older.manifest().files)] == [
            "shard-0.safetensors",
            "vw-0-stage-0.safetensors",
        ]
    assert not list((tmp_path / "cache").iterdir()), "what was fetched is gone"


def test_what_is_no_checkpoints_url_is_refused() -> None:
    cases = {"s3://bucket/run": "is not the URL of a checkpoint", "ftp://x/y": "is not the URL of an object store"}
    for where, words in cases.items():
        with pytest.raises(CheckpointError, match=words), opened(where):
            pass
    with pytest.raises(CheckpointError, match="is not the URL of an object store"):
        search_at("ftp://x/y")


# -- the documents of a run --------------------------------------------------------------------------------------------


def test_a_run_belongs_to_one_job_and_tells_what_a_resume_needs(tmp_path: Path, world: World) -> None:
    documents = {"job.json": "{}", "facts.json": '{"num_samples": 3}'}
    store = world.objects(URL)
    claim_run(URL, JOB, documents, store=store)
    claim_run(URL, JOB, documents, store=store)
    with pytest.raises(UserError, match=r"is the run of another job, job; train in a folder of another name"):
        claim_run(URL, JobId("second"), documents, store=store)
    fetch_documents(URL, tmp_path, store=store)
    assert (tmp_path / "facts.json").read_text() == documents["facts.json"]
    with pytest.raises(UserError, match=r"s3://bucket/none is not a run: it has no job.json"):
        fetch_documents("s3://bucket/none", tmp_path, store=world.objects("s3://bucket/none"))
    with pytest.raises(CheckpointError, match="is not the URL of an object store"):
        fetch_documents("http://bucket/none", tmp_path)
    store.put("run.json", b"[]")
    with pytest.raises(UserError, match=r"run.json is not the document of a run"):
        claim_run(URL, JOB, documents, store=store)


def test_a_store_that_refuses_is_told_before_anyone_trains(world: World) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("Access Denied")

    world.files.fault = refuse
    with pytest.raises(UserError, match=r"storage: s3://bucket/run/run.json cannot be read: Access Denied"):
        claim_run(URL, JOB, {}, store=world.objects(URL))
    with pytest.raises(UserError, match=r"s3://bucket/run cannot be read: .*Access Denied"):
        fetch_documents(URL, world.folder, store=world.objects(URL))
