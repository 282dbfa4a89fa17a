"""When a parameter server that was told of a job has lost it."""

from __future__ import annotations

from hetpipe.decide.lifecycle.shard_watch import LostDisks
from tests.server.coordinator.builders import shard_member

SHARD = shard_member(1)
LOST = "parameter server ps1 (pid 201 on shards.host:7001) has lost its state of the job: "


def heard(disks: LostDisks, *, serves: bool = False, reason: str = "") -> str:
    return disks.on_heartbeat(SHARD, serves=serves, reason=reason)


def test_one_heartbeat_without_the_job_proves_nothing() -> None:
    disks = LostDisks()
    told = [heard(disks), heard(disks, serves=True), heard(disks), heard(disks, serves=True)]

    assert told == ["", "", "", ""]


def test_two_in_a_row_do() -> None:
    disks = LostDisks()

    assert heard(disks) == ""
    assert heard(disks) == f"{LOST}its state folder does not contain it"


def test_it_may_say_why() -> None:
    disks = LostDisks()

    assert heard(disks, reason="the disk failed") == ""
    assert heard(disks, reason="the disk failed") == f"{LOST}the disk failed"


def test_each_parameter_server_counts_for_itself() -> None:
    disks = LostDisks()

    assert heard(disks) == ""
    assert disks.on_heartbeat(shard_member(0), serves=False, reason="") == ""
    assert heard(disks) != ""
