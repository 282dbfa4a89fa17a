"""The switch points of a run are those of the gate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.decide.simulator.rules import Rules
from hetpipe.decide.sync.gate import is_switch_point, required_clock
from hetpipe.values.policies import WEIGHT_POLICIES, WeightPolicy


def _rules(weights: WeightPolicy, n: int, staleness: int | None, *, deterministic: bool = False) -> Rules:
    return Rules(weights=weights, minibatches_per_wave=n, staleness=staleness, deterministic=deterministic)


def _kept(rules: Rules) -> Rules:
    """The same, with weights pulled when required only."""
    return replace(rules, pull="required")


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
            assert rules.chosen(p, in_use=0, published=rules.required(p) - 1) is None
            for published in range(rules.required(p), 20):
                chosen = rules.chosen(p, in_use=0, published=published)
                assert chosen is not None
                assert rules.required(p) <= chosen <= rules.newest_usable(p)
                deterministic = _rules(weights, n, 1, deterministic=True)
                assert deterministic.chosen(p, in_use=0, published=published) == rules.required(p)


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
    assert [newest.fetched_ahead(16, in_use=0, published=published) for published in (1, 2, 3, 9)] == [1, 2, 3, 3]
    assert newest.fetched_ahead(16, in_use=3, published=9) is None
    required = _rules("wave", 4, 1, deterministic=True)
    found = [required.fetched_ahead(16, in_use=0, published=published) for published in (1, 2, 3, 9)]
    assert found == [None, 2, 2, 2]


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_weights_that_the_bound_allows_are_kept(weights: WeightPolicy, deterministic: bool) -> None:  # noqa: FBT001 - pytest's parameter
    rules = _kept(_rules(weights, 3, 2, deterministic=deterministic))
    for p in range(rules.first_switch, 60, 3):
        for in_use in range(rules.newest_usable(p)):
            for published in range(in_use, 22):
                chosen = rules.chosen(p, in_use=in_use, published=published)
                if in_use >= rules.required(p):
                    assert chosen == in_use, "whatever is published"
                elif deterministic:
                    assert chosen == (rules.newest_usable(p) if published >= rules.newest_usable(p) else None)
                else:
                    newest = min(published, rules.newest_usable(p))
                    assert chosen == (newest if published >= rules.required(p) else None)


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_deterministic_run_pulls_once_in_d_plus_one_waves(weights: WeightPolicy, staleness: int) -> None:
    rules, in_use, pulls, last = _kept(_rules(weights, 3, staleness, deterministic=True)), 0, [], 3 * 24
    for p in range(rules.first_switch, last, 3):
        chosen = rules.chosen(p, in_use=in_use, published=100)
        assert chosen is not None
        if chosen != in_use:
            pulls.append(chosen)
        in_use = chosen
    assert pulls == list(range(staleness + 1, rules.newest_usable(last - 1) + 1, staleness + 1))


@pytest.mark.parametrize("deterministic", [False, True])
def test_with_pulls_when_required_only_the_newest_usable_clock_is_fetched_ahead(deterministic: bool) -> None:  # noqa: FBT001 - pytest's parameter
    """Every wave fetches 1, then 2, then 3 as they are published; pulls when required make one transfer of these."""
    rules = _kept(_rules("wave", 4, 1, deterministic=deterministic))
    assert [rules.fetched_ahead(16, in_use=0, published=published) for published in (1, 2, 3, 9)] == [None, None, 3, 3]
    assert rules.fetched_ahead(16, in_use=2, published=9) is None, "2 will do"
