"""Who went down with a fault that was not meant for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.chaos.keeper import Kept, Life, Spec
from tests.chaos.soak import VICTIMS, _order
from tests.chaos.watch import Sight


def sight(*lives: Life) -> Sight:
    kept = Kept(Spec(key="shard-0", command=(), environment={}, ready=""), Path("nowhere"), lives=list(lives))
    return Sight(kept={"shard-0": kept}, lives={"shard-0": 1}, members={0: 0, 1: 3}, term=2)


def bystanders(before: Sight, later: Sight, **may: frozenset[str]) -> list[str]:
    return list(before.bystanders(later, may_end=may.get("end", frozenset()), may_leave={1}))


def test_whoever_was_hit_may_be_gone() -> None:
    before = sight(Life(0, 11, 0.0, ended=1.0, code=-9, expected=True), Life(1, 12, 2.0))
    assert bystanders(before, before) == []


def test_whoever_ended_unasked_is_named_unless_it_may() -> None:
    before = sight(Life(0, 11, 0.0, ended=1.0, code=1), Life(1, 12, 2.0))
    assert bystanders(before, before) == ["shard-0 ended, too: 2 lives (pid 11 1, pid 12 lives); "]
    assert bystanders(before, before, end=frozenset({"shard-0"})) == []


def test_lives_of_virtual_workers_that_nobody_hit_go_on() -> None:
    before = sight(Life(0, 11, 0.0))
    assert bystanders(before, replace(before, members={0: 0, 1: 4})) == []
    (told,) = bystanders(before, replace(before, members={0: 1, 1: 3}))
    assert told == "virtual worker 0, which nobody hit, was life 0 and is 1"


def test_the_term_must_not_fall() -> None:
    before = sight(Life(0, 11, 0.0))
    assert bystanders(before, replace(before, term=3)) == []
    assert bystanders(before, replace(before, term=1)) == ["the term fell from 2 to 1"]


def test_a_soak_begins_with_a_fault_of_each_victim() -> None:
    cells = _order(seed=5)
    assert {cell.victim for cell in cells[: len(VICTIMS)]} == VICTIMS
    assert len(set(cells)) == len(cells)
