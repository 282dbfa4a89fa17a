"""What a stage hears when it joins: where the previous stage and its first replica await it."""

from __future__ import annotations

import pytest

from hetpipe.errors import StaleIncarnation
from hetpipe.values.ids import Incarnation, StageIndex, VirtualWorkerIndex
from hetpipe.values.requests import Meeting
from tests.server.shard.builders import OneShard, requester, shard_config


def test_each_stage_hears_of_the_one_before_it() -> None:
    clock = OneShard(shard_config((), stages=(3, 3))).clock
    for vw in range(2):
        for stage in range(2):
            clock.join(requester(vw, stage), f"vw{vw}:{stage}")
    assert [clock.join(requester(1, stage)).link for stage in range(3)] == ["", "vw1:0", "vw1:1"]
    assert clock.join(requester(0, 2)) == Meeting("vw0:1", "", tuple(map(StageIndex, range(3))), makes_weights=True)


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


def test_the_lowest_that_is_to_come_makes_the_initial_weights() -> None:
    clock = OneShard(shard_config((), stages=(1, 1, 1))).clock

    def makers() -> list[int]:
        found = []
        for vw in range(3):
            try:
                found += [vw] * clock.join(requester(vw)).makes_weights
            except StaleIncarnation:
                continue
        return found

    assert makers() == [0]
    clock.evict(VirtualWorkerIndex(0), Incarnation(0))
    assert makers() == [1]
    clock.admit(VirtualWorkerIndex(0), Incarnation(1), 1)
    assert makers() == []
    assert clock.join(requester(0, incarnation=1)).makes_weights
    clock.initialized(requester(2))
    assert not clock.join(requester(0, incarnation=1)).makes_weights


def test_nobody_is_sent_to_an_earlier_life() -> None:
    clock = OneShard(shard_config((), stages=(2, 1))).clock
    clock.join(requester(0, 0), "old:1")
    clock.evict(VirtualWorkerIndex(0), Incarnation(0))
    clock.admit(VirtualWorkerIndex(0), Incarnation(1), 2)
    with pytest.raises(StaleIncarnation):
        clock.join(requester(0, 0), "old:2")
    assert clock.join(requester(0, 1, incarnation=1)).link == ""
    clock.join(requester(0, 0, incarnation=1), "new:1")
    clock.admit(VirtualWorkerIndex(0), Incarnation(1), 2)
    assert clock.join(requester(0, 1, incarnation=1)).link == "new:1"
