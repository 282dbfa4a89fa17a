"""The formulas of `wsp.md` §2, §3 and §5 against their tables and against the text they were derived from."""

from __future__ import annotations

import itertools

import pytest

from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.values.ids import Clock
from hetpipe.values.policies import WEIGHT_POLICIES, WeightPolicy
from tests.decide.sync import oracle
from tests.support.gates import gate_of

SIZES = [1, 2, 3, 4, 5, 8]
BOUNDS = [0, 1, 2, 4, 9]


def is_switch(p: int, n: int, weights: WeightPolicy, start: int = 0) -> bool:
    return gate_of(n, start=start, weights=weights).is_switch_point(p)


def clocks(n: int, d: int, *, until: int, weights: WeightPolicy = "wave") -> list[int]:
    """The required clocks of p = 1 … until."""
    return [gate_of(n, d, weights=weights).required(p) for p in range(1, until + 1)]


class TestRequiredClock:
    @pytest.mark.parametrize(
        ("d", "n", "expected"),
        [
            (0, 1, [(1, 0), (2, 1), (3, 2), (4, 3)]),
            (0, 4, [(1, 0), (7, 0), (8, 1), (11, 1), (12, 2), (15, 2)]),
            (1, 4, [(1, 0), (11, 0), (12, 1), (15, 1), (16, 2), (19, 2)]),
            (4, 5, [(1, 0), (29, 0), (30, 1), (34, 1)]),
        ],
    )
    def test_the_table_of_the_specification(self, d: int, n: int, expected: list[tuple[int, int]]) -> None:
        assert [(p, gate_of(n, d).required(p)) for p, _ in expected] == expected

    @pytest.mark.parametrize("d", BOUNDS)
    @pytest.mark.parametrize("n", SIZES)
    def test_it_is_what_the_text_says(self, n: int, d: int) -> None:
        until = n * (d + 6)
        assert clocks(n, d, until=until) == [oracle.required_clock(p, n=n, d=d) for p in range(1, until + 1)]

    @pytest.mark.parametrize("d", BOUNDS)
    @pytest.mark.parametrize("n", SIZES)
    def test_flush_looks_back_whole_waves(self, n: int, d: int) -> None:
        expected = [max(0, wave - d) for wave in range(d + 5) for _ in range(n)]
        assert clocks(n, d, until=len(expected), weights="flush") == expected

    @pytest.mark.parametrize("d", BOUNDS)
    @pytest.mark.parametrize("n", SIZES)
    def test_double_buffer_is_one_wave_later_than_flush(self, n: int, d: int) -> None:
        flush = clocks(n, d + 1, until=6 * n, weights="flush")
        assert clocks(n, d, until=6 * n, weights="double_buffer") == flush

    @pytest.mark.parametrize("weights", ["wave", "flush", "double_buffer"])
    @pytest.mark.parametrize("n", SIZES)
    def test_it_rises_by_one_and_only_at_switch_points(self, n: int, weights: WeightPolicy) -> None:
        found = clocks(n, 1, until=8 * n, weights=weights)
        for p, (before, after) in enumerate(itertools.pairwise(found), start=2):
            assert after - before in {0, 1}
            assert after == before or gate_of(n, weights=weights).is_switch_point(p)

    @pytest.mark.parametrize("weights", ["wave", "flush", "double_buffer"])
    def test_a_barrier_is_the_least(self, weights: WeightPolicy) -> None:
        found = [gate_of(3, 1, start=5, weights=weights).required(p) for p in range(16, 40)]
        free = clocks(3, 1, until=39, weights=weights)[15:]
        assert found == [max(5, clock) for clock in free]
        assert min(found) == 5

    def test_without_a_bound_nothing_but_the_barrier_is_required(self) -> None:
        assert gate_of(4, None).required(10**9) == 0
        assert gate_of(4, None, start=7).required(10**9) == 7

    @pytest.mark.parametrize("d", BOUNDS)
    @pytest.mark.parametrize("n", SIZES)
    def test_distance_d_plus_one_blocks_and_d_proceeds(self, n: int, d: int) -> None:
        """The off-by-one on both sides: with clock W published, the last minibatch that closes wave W + D may start."""
        for published in range(4):
            last_of_wave = (published + d + 1) * n
            assert gate_of(n, d).required(last_of_wave) == published
            following = gate_of(n, d).required(last_of_wave + n)
            assert following == published + 1
            assert gate_of(4, d).may_commit(published + d, published=published)
            assert not gate_of(4, d).may_commit(published + d + 1, published=published)


class TestLocalVersions:
    def test_v_of_p_is_one_wave_back_but_never_before_the_barrier(self) -> None:
        assert [gate_of(3).local_through(p) for p in range(1, 8)] == [0, 0, 0, 1, 2, 3, 4]
        assert [gate_of(3, start=2).local_through(p) for p in range(7, 12)] == [6, 6, 6, 7, 8]

    def test_switch_points(self) -> None:
        assert [p for p in range(1, 14) if gate_of(4).is_switch_point(p)] == [1, 4, 8, 12]
        assert [p for p in range(13, 22) if gate_of(4, start=3).is_switch_point(p)] == [13, 16, 20]
        assert all(gate_of(1).is_switch_point(p) for p in range(1, 9))

    def test_policies_that_update_by_wave_switch_where_a_wave_starts(self) -> None:
        expected: dict[WeightPolicy, list[int]] = {
            "flush": [3, 3, 3, 4, 4, 4, 5],
            "double_buffer": [3, 3, 3, 3, 3, 3, 4],
        }
        for weights, newest in expected.items():
            switches = [p for p in range(10, 17) if gate_of(3, start=3, weights=weights).is_switch_point(p)]
            assert switches == [10, 13, 16]
            usable = [gate_of(3, start=3, weights=weights).newest_usable(p) for p in range(10, 17)]
            assert usable == newest

    @pytest.mark.parametrize("weights", WEIGHT_POLICIES)
    @pytest.mark.parametrize("n", SIZES)
    def test_switch_points_are_numbered(self, n: int, weights: WeightPolicy) -> None:
        """By waves: number s is the first minibatch after s whole waves, or for most policies the last one in them."""
        points = [s * n + (weights in ("flush", "double_buffer")) for s in range(1, 9)]
        assert all(is_switch(p, n, weights) for p in points)
        assert [gate_of(n, weights=weights).switch_minibatch(s) for s in range(1, 9)] == points
        for s, p in enumerate(points, start=1):
            numbers = [gate_of(n, weights=weights).switch_number(q) for q in range(p, p + n + 1)]
            assert numbers == [s] * n + [s + 1]

    def test_only_flush_drains(self) -> None:
        assert [p for p in range(1, 8) if gate_of(3, weights="flush").starts_drained(p)] == [1, 4, 7]
        assert not any(gate_of(3, weights="double_buffer").starts_drained(p) for p in range(1, 8))

    @pytest.mark.parametrize("n", SIZES)
    @pytest.mark.parametrize("weights", WEIGHT_POLICIES)
    def test_the_required_clock_is_always_usable(self, weights: WeightPolicy, n: int) -> None:
        """W*·N ≤ v(p): the version never holds an update of its own twice, and a clock that is allowed exists.

        Policies that see more of their own updates than `wave` choose their clocks as it does.
        """
        table = VersionTable("wave" if weights not in ("flush", "double_buffer") else weights, 0, 1, n)
        for start, p in ((c, p) for c in (0, 3) for p in range(c * n + 1, (c + 12) * n)):
            newest = gate_of(n, start=start, weights=weights).newest_usable(p)
            for d in BOUNDS:
                required = gate_of(n, d, start=start, weights=weights).required(p)
                assert required == max(start, newest - d)
            assert newest * n <= table.forward_through(p, start=start) < (newest + 1) * n
            assert VersionTable(weights, 0, min(n, 3), n).forward_through(p, start=start) >= newest * n
            before = gate_of(n, start=start, weights=weights).newest_usable(p - 1)
            assert newest == before or is_switch(p, n, weights, start)

    def test_waves(self) -> None:
        assert [gate_of(3).wave_of(p) for p in range(1, 8)] == [0, 0, 0, 1, 1, 1, 2]


class TestCommitAndBarrier:
    def test_without_a_bound_everything_may_be_committed(self) -> None:
        assert gate_of(4, None).may_commit(10**9, published=0)

    @pytest.mark.parametrize("d", BOUNDS)
    @pytest.mark.parametrize("n", SIZES)
    @pytest.mark.parametrize(("weights", "ahead"), [("wave", 2), ("stash", 2), ("flush", 1), ("double_buffer", 2)])
    def test_nobody_can_have_started_beyond_an_unplanned_barrier(
        self, weights: WeightPolicy, ahead: int, n: int, d: int
    ) -> None:
        """And of no earlier one would that be true, where a wave has several minibatches."""
        for published in range(5):
            barrier = gate_of(4, d, weights=weights).unplanned_barrier(
                committed=0, published=published, last_switch=0, planned=10**6
            )
            needs = [gate_of(n, d, weights=weights).required(p) for p in ((barrier - 1) * n + 1, barrier * n + 1)]
            assert needs[1] > published
            assert needs[0] <= published or n == 1
            assert barrier == published + d + ahead

    @pytest.mark.parametrize("n", SIZES)
    @pytest.mark.parametrize("weights", WEIGHT_POLICIES)
    def test_without_a_bound_the_questions_tell_who_has_started_what(self, weights: WeightPolicy, n: int) -> None:
        for asked in range(1, 6):
            barrier = gate_of(4, None, weights=weights).unplanned_barrier(
                committed=0, published=0, last_switch=asked, planned=10**6
            )
            following = gate_of(n, weights=weights).switch_minibatch(asked + 1)
            assert following <= barrier * n + 1, "whoever goes beyond it asks again before"
            assert barrier == asked + 1

    @pytest.mark.parametrize(
        ("committed", "published", "staleness", "last_switch", "planned", "expected"),
        [
            (3, 2, 1, 0, 100, 5),
            (9, 2, 1, 0, 100, 9),
            (3, 2, 1, 0, 4, 4),
            (3, 3, 0, 0, 4, 4),
            (3, 2, None, 6, 100, 7),
            (9, 2, None, 6, 100, 9),
            (3, 2, None, 6, 5, 5),
            (0, 0, None, 0, 100, 1),
            (0, -1, 0, 0, 100, 1),
        ],
    )
    def test_unplanned_barriers(
        self, *, committed: int, published: int, staleness: int | None, last_switch: int, planned: int, expected: int
    ) -> None:
        found = gate_of(4, staleness).unplanned_barrier(
            committed=committed, published=published, last_switch=last_switch, planned=planned
        )
        assert found == Clock(expected)
