"""Attribution of what layers keep: each storage once, at the first layer that saves it."""

from __future__ import annotations

from hetpipe.profiler.kept import Saved, kept_bytes


def saved(storages: dict[int, int], *outputs: int) -> Saved:
    return Saved(storages, frozenset(outputs))


def test_an_output_that_only_the_next_layer_saves_counts_there() -> None:
    assert kept_bytes([saved({7: 3}, 1), saved({1: 100}, 2)]) == (3, 100)


def test_a_storage_that_passes_through_a_view_counts_once() -> None:
    relu, flatten, linear = saved({1: 100}, 1), saved({}, 1), saved({1: 100}, 2)
    assert kept_bytes([relu, flatten, linear]) == (100, 0, 0)


def test_an_identity_used_again_is_another_storage() -> None:
    # Storage 5 of the first layer never leaves it, so the second layer's 5 is a new one.
    assert kept_bytes([saved({5: 10, 1: 100}, 1), saved({5: 20}, 2), saved({1: 30}, 3)]) == (110, 20, 30)
