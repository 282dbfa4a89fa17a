"""The table of versions and buffers, against orders that are played while somebody counts the updates."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

import pytest

from hetpipe.decide.schedule.in_flight import weight_buffers
from hetpipe.decide.schedule.policy import Action, Kind
from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, WeightPolicy
from tests.decide.schedule.clockwork import Setting, every_setting, play
from tests.pairwise import all_pairs

STEPS_WITH_THE_NEWEST = ("stash", "predict", "spectrain")
WAVES = 4
SEEDS = range(3)


@dataclass(frozen=True, slots=True)
class Moment:
    """An action of a stage, and the updates that it has made until then."""

    action: Action
    newest: int
    """The last minibatch in an update; `start`·N before the first."""


def moments(
    setting: Setting, stage: int, *, accumulate: int = 1, start: int = 0, rng: random.Random | None = None
) -> list[Moment]:
    """What stage `stage` does in the segment that begins at the barrier at clock `start`.

    An update follows the backward of every `accumulate`-th minibatch, or of every N-th if the policy makes one a wave.
    """
    n = setting.wave
    every = n if setting.weights in {"flush", "double_buffer"} else accumulate
    newest, found = start * n, []
    for text in play(setting, WAVES * n, rng)[stage]:
        played = Action.parse(text)
        action = Action(played.kind, played.p + start * n)  # type: ignore[arg-type]
        found.append(Moment(action, newest))
        if action.kind is Kind.BACKWARD and action.p % every == 0:
            newest = action.p
    return found


def table_of(setting: Setting, stage: int, accumulate: int = 1) -> VersionTable:
    return VersionTable(setting.weights, stage, setting.num_stages, setting.wave, accumulate)


#: Each policy under each of its schedules, with each number of minibatches per update that divides N.
CASES = [
    (setting, accumulate)
    for setting in every_setting(waves=(1, 4, 6))
    for accumulate in ((1,) if setting.weights in {"flush", "double_buffer"} else (1, 2, 3))
    if setting.wave % accumulate == 0
]


def each_from(*starts: int) -> list[tuple[Setting, int, int]]:
    """The cases, in the segments that begin at these clocks."""
    return [(*case, start) for case in CASES for start in starts]


def values(setting: Setting, *others: int) -> tuple[object, ...]:
    return (*astuple(setting), *others)


def named(*point: object) -> str:
    return "-".join(map(str, point))


def timings(setting: Setting) -> Sequence[random.Random | None]:
    """In step, and at random where that makes a difference."""
    return (None,) if setting.is_fixed else (None, *map(random.Random, SEEDS))


@pytest.mark.parametrize(("setting", "accumulate", "start"), all_pairs(each_from(0, 3), by=values, name=named))
def test_the_table_is_what_was_played(setting: Setting, accumulate: int, start: int) -> None:
    for stage in range(setting.num_stages):
        table = table_of(setting, stage, accumulate)
        for rng in timings(setting):
            for moment in moments(setting, stage, accumulate=accumulate, start=start, rng=rng):
                p = moment.action.p
                forward, backward = table.forward_through(p, start=start), table.backward_through(p, start=start)
                if moment.action.kind is Kind.BACKWARD:
                    assert backward == (moment.newest if POLICIES[setting.weights].predicts is not None else forward)
                elif setting.weights in STEPS_WITH_THE_NEWEST:
                    assert forward == moment.newest
                else:
                    assert forward == expected(setting, accumulate, p, start)
                    assert forward <= moment.newest, "it is there when it is needed"


def expected(setting: Setting, accumulate: int, p: int, start: int) -> int:
    """The first column of `policies.md`'s table; at least what was there at the barrier."""
    n, k = setting.wave, setting.num_stages
    wave = (p - 1) // n
    match setting.weights:
        case "flush":
            through = wave * n
        case "double_buffer":
            through = max(wave - 1, 0) * n
        case _:
            through = p - (n if setting.weights == "wave" else k)
            through -= through % accumulate
    return max(through, start * n)


@pytest.mark.parametrize(("setting", "accumulate"), all_pairs(CASES, by=values, name=named))
def test_steps_ahead_are_the_updates_between_forward_and_backward(setting: Setting, accumulate: int) -> None:
    for stage in range(setting.num_stages):
        table = table_of(setting, stage, accumulate)
        forwards = {}
        more = stage // 2 if setting.weights == "spectrain" else 0
        assert table.backward_steps_ahead() == more
        for moment in moments(setting, stage, accumulate=accumulate):
            if moment.action.kind is Kind.FORWARD:
                forwards[moment.action.p] = moment.newest
            elif POLICIES[setting.weights].predicts is not None:
                updates = len(range(forwards[moment.action.p], moment.newest, accumulate))
                assert table.forward_steps_ahead(moment.action.p) == updates + more
            else:
                assert table.forward_steps_ahead(moment.action.p) == 0


@pytest.mark.parametrize(("setting", "accumulate", "start"), all_pairs(each_from(0, 2), by=values, name=named))
def test_the_last_user_of_a_version(setting: Setting, accumulate: int, start: int) -> None:
    n = setting.wave
    for stage in range(setting.num_stages):
        table = table_of(setting, stage, accumulate)
        segment = range(start * n + 1, (start + 2 * WAVES) * n + 1)
        last: dict[int, int] = {}
        for p in segment:
            for through in (table.forward_through(p, start=start), table.backward_through(p, start=start)):
                last[through] = p
        whole = [through for through in last if table.last_user(through) in segment]
        assert len(whole) >= WAVES
        assert {through: last[through] for through in whole} == {through: table.last_user(through) for through in whole}


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_which_minibatches_end_an_update(weights: WeightPolicy) -> None:
    by_wave = weights in {"flush", "double_buffer"}
    assert [p for p in range(1, 13) if VersionTable(weights, 0, 2, 4).is_update(p)] == (
        [4, 8, 12] if by_wave else list(range(1, 13))
    )
    assert [p for p in range(1, 13) if VersionTable(weights, 0, 2, 4, 2).is_update(p)] == (
        [4, 8, 12] if by_wave else [2, 4, 6, 8, 10, 12]
    )


def buffers_at_rest(setting: Setting, stage: int, accumulate: int, rng: random.Random | None) -> Iterator[int]:
    """After each action: the versions that something to come needs, and the newest.

    A forward to come needs the version it computes with, if that was made; a backward that of its forward, unless the
    policy has it compute with the newest.
    """
    table = table_of(setting, stage, accumulate)
    used = {p: table.forward_through(p) for p in range(1, WAVES * setting.wave + 1)}
    played = moments(setting, stage, accumulate=accumulate, rng=rng)
    waiting, flying = set(used), set[int]()
    for moment, following in pairwise(played):
        p, newest = moment.action.p, following.newest
        if moment.action.kind is Kind.FORWARD:
            waiting.remove(p)
            flying.add(p)
        else:
            flying.remove(p)
        needed = {newest} | {used[q] for q in waiting if used[q] <= newest}
        if POLICIES[setting.weights].predicts is None:
            needed |= {used[q] for q in flying}
        yield len(needed)


@pytest.mark.parametrize(("setting", "accumulate"), all_pairs(CASES, by=values, name=named))
def test_weight_buffers_are_what_is_needed_at_rest(setting: Setting, accumulate: int) -> None:
    for stage in range(setting.num_stages):
        column = weight_buffers(
            stage=stage,
            num_stages=setting.num_stages,
            minibatches_per_wave=setting.wave,
            weights=setting.weights,
        )
        # The column counts the predicted weights, too, which are there during an action only.
        at_rest = column - (POLICIES[setting.weights].predicts is not None)
        for rng in timings(setting):
            most = max(buffers_at_rest(setting, stage, accumulate, rng))
            assert most == at_rest if accumulate == 1 else most <= at_rest


def test_least_n_is_where_the_versions_are_there_in_time() -> None:
    """`double_buffer` with fewer minibatches per wave than stages would want updates that are not made yet."""
    assert [POLICIES[weights].least_minibatches_per_wave(4) for weights in ("double_buffer", "wave")] == [4, 1]
    too_few = Setting(weights="double_buffer", schedule="1f1b", num_stages=4, wave=2)
    table = table_of(too_few, 0)
    late = [
        m for m in moments(too_few, 0) if m.action.kind is Kind.FORWARD and m.newest < table.forward_through(m.action.p)
    ]
    assert late
