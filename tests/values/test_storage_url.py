"""Which URLs a job may name, and what is below one."""

from __future__ import annotations

import pytest

from hetpipe.errors import JobError
from hetpipe.job.file import Job
from hetpipe.values.ids import Clock
from hetpipe.values.storage_url import checked_url, place_of_run, split_checkpoint, split_part

MINIMAL = {"model": "m:build", "loss": "m:loss", "data": {"train": "m:data"}, "epochs": 1}
MINIMAL |= {"optimizer": {"name": "SGD", "lr": 0.1}}


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://b/some/prefix/", "gs://b-1/x", "abfs://c/y", "file:///data/store"]
)
def test_places_in_stores(url: str) -> None:
    assert checked_url(url) == url.rstrip("/")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("/data/store", "is not the URL of an object store; it must begin with one of s3://, gs://, abfs://, file://"),
        ("http://host/x", "is not the URL of an object store"),
        ("memory://x", "is not the URL of an object store"),
        ("simplecache::s3://b/x", "is not the URL of an object store"),
        ("s3://key:secret@bucket/x", "credentials and options belong to the environment of each node's processes"),
        ("s3://bucket/x?token=secret", "has more than a place in it"),
        ("s3:///x", "names no bucket; write s3://BUCKET/PREFIX"),
        ("file://host/x", "names a host; write a folder as file:///folder"),
        ("file:///", "names no folder"),
        ("s3://bucket/a/../b", "has a path that stores read differently"),
        ("s3://bucket/a//b", "has a path that stores read differently"),
        ("s3://bucket/a\x00", "has a path that stores read differently"),
        ("s3://bucket/" + "x" * 2_000, "is a URL of 2012 characters; the limit is 1024"),
    ],
)
def test_others_are_refused_and_no_secret_is_told(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"[a-z]") as caught:
        checked_url(url)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_job_says_which_key_is_wrong() -> None:
    assert Job(**MINIMAL, storage="s3://bucket/runs/").storage == "s3://bucket/runs"
    with pytest.raises(JobError, match=r"storage: .*`?/data`? is no URL|storage: .*is not the URL of an object store"):
        Job(**MINIMAL, storage="/data")


def test_a_checkpoints_place_is_read_back() -> None:
    assert split_checkpoint("s3://b/x/checkpoints/clock-00000003") == ("s3://b/x", Clock(3))
    for url in ("s3://b/x", "s3://b/x/checkpoints/other", "s3://b/x/checkpoints/clock-3"):
        assert split_checkpoint(url) is None
    assert split_part("shard-0.safetensors") is None
    assert place_of_run("/runs/a/rewind-1", None) == "/runs/a/rewind-1"
