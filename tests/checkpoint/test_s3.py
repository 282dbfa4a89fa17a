"""Checkpoints in a store that speaks S3, over connections that break: a torn upload is never taken for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetpipe.checkpoint.keeper import CheckpointKeeper
from hetpipe.checkpoint.locations import newest_complete_at, verified_at
from hetpipe.checkpoint.store import StoredCheckpoints
from hetpipe.checkpoint.stored_run import claim_run
from hetpipe.errors import CheckpointNotWritten, UserError
from hetpipe.storage.objects import ObjectStore
from hetpipe.values.ids import Clock, ShardIndex, VirtualWorkerIndex
from hetpipe.values.requests import CheckpointFile
from hetpipe.values.storage_url import checkpoint_key, part_key
from tests.checkpoints import JOB, progress_at, shard_part, stage_part
from tests.polling import wait_until
from tests.server.shard.builders import requester
from tests.storage.s3_server import BUCKET, S3Server, TearingProxy, environment_of, s3_server

pytestmark = pytest.mark.exhaustive

SECONDS = 20.0

#: A part is larger than this many bytes, and larger than the requests around it.
NUM_ELEMENTS, TORN_AFTER = 40_000, 100_000


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[TearingProxy]:
    """Between every client of this process and the server."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    with TearingProxy(s3.port).running() as proxy:
        for name, value in environment_of(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield proxy


class World:
    """The writers of a run's checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"s3://{BUCKET}/{folder.name}"
        self.store = StoredCheckpoints(ObjectStore(self.url), folder)
        self.keeper = CheckpointKeeper(job_id=JOB, store=self.store, num_shards=1, keep=5)

    def parts(self, clock: int) -> list[CheckpointFile]:
        self.keeper.begin(progress_at(clock), {VirtualWorkerIndex(0): 1})
        shard = shard_part(self.folder, clock, 0, num_shards=1, num_elements=NUM_ELEMENTS)
        return [shard, stage_part(self.folder, clock, 0, 0)]

    def report(self, clock: int, parts: list[CheckpointFile]) -> None:
        self.keeper.report_shard(ShardIndex(0), Clock(clock), parts[:1])
        self.keeper.report(requester(0, 0), Clock(clock), parts[1:])

    def save(self, clock: int) -> None:
        parts = self.parts(clock)
        for part in parts:
            self.store.deliver(Clock(clock), part)
        self.report(clock, parts)
        wait_until(lambda: self.keeper.newest_complete == clock, timeout_seconds=SECONDS, what="checkpoint")

    def place(self, clock: int) -> str:
        return f"{self.url}/{checkpoint_key(Clock(clock))}"


@pytest.fixture
def world(proxy: TearingProxy, tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_upload_that_is_torn_is_repeated_when_the_connection_is_whole_again(
    world: World, proxy: TearingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = proxy.torn_after = TORN_AFTER

    def recovers(_: object, seconds: float) -> None:
        assert 0 < seconds < SECONDS
        proxy.torn_after = None

    monkeypatch.setattr("hetpipe.clock.SystemClock.sleep", recovers)
    world.save(2)
    assert proxy.num_torn >= 1
    assert torn < (world.store.folder(Clock(2)) / "shard-0.safetensors").stat().st_size
    assert newest_complete_at(world.url) == world.place(2)
    assert [file.name for file in verified_at(world.place(2)).files] == [
        "shard-0.safetensors",
        "vw-0-stage-0.safetensors",
    ]


def test_an_upload_that_stays_torn_is_no_part_and_the_checkpoint_before_it_is_used(
    world: World, proxy: TearingProxy
) -> None:
    world.save(2)
    parts = world.parts(4)
    proxy.torn_after = TORN_AFTER
    with pytest.raises(CheckpointNotWritten, match=rf"storage: {world.place(4)}/shard-0\..* see that the store can be"):
        world.store.deliver(Clock(4), parts[0], retry_seconds=0.1)
    world.store.deliver(Clock(4), parts[1])
    assert proxy.num_torn >= 1
    assert newest_complete_at(world.url) == world.place(2)


@pytest.mark.parametrize("how", ["half an object", "a multipart upload without its end"])
def test_what_a_process_left_behind_in_mid_upload_is_no_part(how: str, world: World, s3: S3Server) -> None:
    """Also not for a keeper that starts again and looks for what was delivered."""
    world.save(2)
    parts = world.parts(4)
    data = (world.store.folder(Clock(4)) / parts[0].name).read_bytes()
    key = f"{world.folder.name}/{checkpoint_key(Clock(4))}/{part_key(parts[0].name, parts[0].sha256)}"
    client = s3.client()
    if how == "half an object":
        client.pipe_file(f"{BUCKET}/{key}", data[: len(data) // 2])
    else:
        upload = client.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)
        named = {"Bucket": BUCKET, "Key": key, "UploadId": upload["UploadId"]}
        client.call_s3("upload_part", **named, PartNumber=1, Body=data)
    world.store.deliver(Clock(4), parts[1])

    again = World(world.folder)
    again.keeper.begin(progress_at(4), {VirtualWorkerIndex(0): 1})
    again.keeper.adopt()
    again.keeper.report(requester(0, 0), Clock(4), parts[1:])
    assert newest_complete_at(world.url) == world.place(2)
    assert again.keeper.newest_complete != 4

    for part in parts:  # whoever delivers it again completes it
        again.store.deliver(Clock(4), part)
    again.report(4, parts)
    wait_until(lambda: again.keeper.newest_complete == 4, timeout_seconds=SECONDS, what="checkpoint")
    assert newest_complete_at(world.url) == world.place(4)


def test_a_bucket_without_permission_ends_the_job_before_it_trains(s3: S3Server, proxy: TearingProxy) -> None:
    s3.make_bucket("refuses", "s3:PutObject", "s3:GetObject")
    with pytest.raises(UserError, match=r"^storage: s3://refuses/run/run.json cannot be read: .*; give the processes"):
        claim_run("s3://refuses/run", JOB, {})
    s3.make_bucket("shows", "s3:PutObject")
    with pytest.raises(UserError, match=r"^storage: s3://shows/run/job.json cannot be written: .*; give the processes"):
        claim_run("s3://shows/run", JOB, {"job.json": "{}"})
