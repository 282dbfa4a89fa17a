"""The switch points of a run are those of the gate."""

from __future__ import annotations

import pytest

from hetpipe.simulator.rules import Rules
from hetpipe.spec.policies import WEIGHT_POLICIES, WeightPolicy
from hetpipe.sync.gate import is_switch_point, required_clock


def _rules(weights: WeightPolicy, n: int, staleness: int | None, *, deterministic: bool = False) -> Rules:
    return Rules(weights=weights, minibatches_per_wave=n, staleness=staleness, deterministic=deterministic)


@pytest.mark.parametrize("n", range(1, 6))
def test_every_nth_minibatch_from_the_first_switch_on(n: int) -> None:
    first = _rules("wave", n, 0).first_switch
    switches = [p for p in range(n + 1, 10 * n) if is_switch_point(p, minibatches_per_wave=n)]
    assert switches == list(range(first, 10 * n, n))


@pytest.mark.parametrize("weights", ["wave", "flush", "double_buffer", "stash"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_required_clock_rises_at_switch_points_only(weights: WeightPolicy, staleness: int, n: int) -> None:
    rules = _rules(weights, n, staleness)
    for p in range(2, 12 * n):
        rises = rules.required(p) > rules.required(p - 1)
        assert not rises or (p >= rules.first_switch and (p - rules.first_switch) % n == 0), p
        assert rules.required(p) == required_clock(p, minibatches_per_wave=n, staleness=staleness, weights=weights)


@pytest.mark.parametrize("weights", ["wave", "flush", "double_buffer", "vertical"])
def test_a_minibatch_uses_what_it_needs_and_no_update_of_its_own_twice(weights: WeightPolicy) -> None:
    for n in (1, 3):
        rules = _rules(weights, n, 1)
        for p in range(rules.first_switch, 10 * n, n):
            assert rules.chosen(p, rules.required(p) - 1) is None
            for published in range(rules.required(p), 20):
                chosen = rules.chosen(p, published)
                assert chosen is not None
                assert rules.required(p) <= chosen <= rules.newest_usable(p)
                assert _rules(weights, n, 1, deterministic=True).chosen(p, published) == rules.required(p)


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("last", [1, 5, 6])
def test_the_pipeline_drains_where_the_next_minibatch_starts_drained(weights: WeightPolicy, n: int, last: int) -> None:
    rules = _rules(weights, n, 0)
    for p in range(1, last + 1):
        found = rules.drains_after(p, last)
        assert found == last or rules.starts_drained(found + 1)
        assert not any(rules.starts_drained(q) for q in range(p + 1, found + 1))


def test_a_stage_fetches_ahead_what_it_will_use() -> None:
    newest = _rules("wave", 4, 1)
    assert [newest.fetched_ahead(16, published) for published in (1, 2, 3, 9)] == [1, 2, 3, 3]
    required = _rules("wave", 4, 1, deterministic=True)
    assert [required.fetched_ahead(16, published) for published in (1, 2, 3, 9)] == [0, 2, 2, 2]
