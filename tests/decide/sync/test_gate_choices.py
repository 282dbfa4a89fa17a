"""Which clocks the gate chooses at the switch points of a run, and which are fetched before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.decide.sync.gate import Gate
from hetpipe.values.policies import WEIGHT_POLICIES, WeightPolicy
from tests.decide.sync import oracle
from tests.support.gates import gate_of


def _kept(gate: Gate) -> Gate:
    """The same, with weights pulled when required only."""
    return replace(gate, sync=replace(gate.sync, pull="required"))


@pytest.mark.parametrize("n", range(1, 6))
def test_every_nth_minibatch_from_the_first_switch_on(n: int) -> None:
    first = gate_of(n, 0, weights="wave").first_switch
    switches = [p for p in range(n + 1, 10 * n) if gate_of(n).is_switch_point(p)]
    assert switches == list(range(first, 10 * n, n))


@pytest.mark.parametrize("weights", ["wave", "flush", "double_buffer", "stash"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_required_clock_rises_at_switch_points_only(weights: WeightPolicy, staleness: int, n: int) -> None:
    gate = gate_of(n, staleness, weights=weights)
    for p in range(2, 12 * n):
        rises = gate.required(p) > gate.required(p - 1)
        assert not rises or (p >= gate.first_switch and (p - gate.first_switch) % n == 0), p
        assert gate.required(p) == oracle.required_clock(p, n=n, d=staleness, weights=weights)


@pytest.mark.parametrize("weights", ["wave", "flush", "double_buffer", "vertical"])
def test_a_minibatch_uses_what_it_needs_and_no_update_of_its_own_twice(weights: WeightPolicy) -> None:
    for n in (1, 3):
        gate = gate_of(n, 1, weights=weights)
        for p in range(gate.first_switch, 10 * n, n):
            assert gate.chosen(p, in_use=0, published=gate.required(p) - 1) is None
            for published in range(gate.required(p), 20):
                chosen = gate.chosen(p, in_use=0, published=published)
                assert chosen is not None
                assert gate.required(p) <= chosen <= gate.newest_usable(p)
                deterministic = gate_of(n, 1, weights=weights, deterministic=True)
                assert deterministic.chosen(p, in_use=0, published=published) == gate.required(p)


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("last", [1, 5, 6])
def test_the_pipeline_drains_where_the_next_minibatch_starts_drained(weights: WeightPolicy, n: int, last: int) -> None:
    gate = gate_of(n, 0, weights=weights)
    for p in range(1, last + 1):
        found = gate.drains_after(p, last)
        assert found == last or gate.starts_drained(found + 1)
        assert not any(gate.starts_drained(q) for q in range(p + 1, found + 1))


def test_a_stage_fetches_ahead_what_it_will_use() -> None:
    newest = gate_of(4, 1, weights="wave")
    assert [newest.fetched_ahead(16, in_use=0, published=published) for published in (1, 2, 3, 9)] == [1, 2, 3, 3]
    assert newest.fetched_ahead(16, in_use=3, published=9) is None
    required = gate_of(4, 1, weights="wave", deterministic=True)
    found = [required.fetched_ahead(16, in_use=0, published=published) for published in (1, 2, 3, 9)]
    assert found == [None, 2, 2, 2]


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_weights_that_the_bound_allows_are_kept(weights: WeightPolicy, deterministic: bool) -> None:  # noqa: FBT001 - pytest's parameter
    gate = _kept(gate_of(3, 2, weights=weights, deterministic=deterministic))
    for p in range(gate.first_switch, 60, 3):
        for in_use in range(gate.newest_usable(p)):
            for published in range(in_use, 22):
                chosen = gate.chosen(p, in_use=in_use, published=published)
                if in_use >= gate.required(p):
                    assert chosen == in_use, "whatever is published"
                elif deterministic:
                    assert chosen == (gate.newest_usable(p) if published >= gate.newest_usable(p) else None)
                else:
                    newest = min(published, gate.newest_usable(p))
                    assert chosen == (newest if published >= gate.required(p) else None)


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_deterministic_run_pulls_once_in_d_plus_one_waves(weights: WeightPolicy, staleness: int) -> None:
    gate, in_use, pulls, last = _kept(gate_of(3, staleness, weights=weights, deterministic=True)), 0, [], 3 * 24
    for p in range(gate.first_switch, last, 3):
        chosen = gate.chosen(p, in_use=in_use, published=100)
        assert chosen is not None
        if chosen != in_use:
            pulls.append(chosen)
        in_use = chosen
    assert pulls == list(range(staleness + 1, gate.newest_usable(last - 1) + 1, staleness + 1))


@pytest.mark.parametrize("deterministic", [False, True])
def test_with_pulls_when_required_only_the_newest_usable_clock_is_fetched_ahead(deterministic: bool) -> None:  # noqa: FBT001 - pytest's parameter
    """Every wave fetches 1, then 2, then 3 as they are published; pulls when required make one transfer of these."""
    gate = _kept(gate_of(4, 1, weights="wave", deterministic=deterministic))
    assert [gate.fetched_ahead(16, in_use=0, published=published) for published in (1, 2, 3, 9)] == [None, None, 3, 3]
    assert gate.fetched_ahead(16, in_use=2, published=9) is None, "2 will do"
