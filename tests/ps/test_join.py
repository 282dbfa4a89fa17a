"""What a stage hears when it joins: where the previous stage and its first replica await it."""

from __future__ import annotations

from .builders import OneShard, requester, shard_config


def test_each_stage_hears_of_the_one_before_it() -> None:
    clock = OneShard(shard_config((), stages=(3, 3))).clock
    for vw in range(2):
        for stage in range(2):
            clock.join(requester(vw, stage), f"vw{vw}:{stage}")
    assert [clock.join(requester(1, stage)).link for stage in range(3)] == ["", "vw1:0", "vw1:1"]
    assert clock.join(requester(0, 2)) == ("vw0:1", "", (0, 1, 2))


def test_each_stage_hears_of_its_own_first_replica() -> None:
    clock = OneShard(shard_config((), stages=(2, 2))).clock
    assert clock.join(requester(1, 1), "", "nobody:1").replicas == ""
    for stage in range(2):
        clock.join(requester(0, stage), "", f"first:{stage}")
    assert [clock.join(requester(1, stage)).replicas for stage in range(2)] == ["first:0", "first:1"]


def test_an_address_may_change_and_is_not_forgotten() -> None:
    clock = OneShard(shard_config((), stages=(2, 1))).clock
    for said, heard in (("a:1", "a:1"), ("", "a:1"), ("a:2", "a:2")):
        clock.join(requester(0, 0), said)
        assert clock.join(requester(0, 1)).link == heard
