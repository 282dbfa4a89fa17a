"""The bound on the minibatches between forward and backward at a stage, for the runtime and the planner."""

from __future__ import annotations

from hetpipe.values.policies import POLICIES, PerStage, Schedule, WeightPolicy


def in_flight(
    *,
    stage: int,
    num_stages: int,
    minibatches_per_wave: int,
    weights: WeightPolicy = "wave",
    schedule: Schedule = "1f1b",
) -> int:
    """S_i of `policies.md`: the runtime's credits and the planner's memory model.

    Args:
        stage: i, 0-based.
        num_stages: K.
        minibatches_per_wave: N.
        weights: the policy.
        schedule: the order; under `gpipe` a whole wave is in flight.

    >>> [in_flight(stage=i, num_stages=4, minibatches_per_wave=4) for i in range(4)]
    [4, 3, 2, 1]
    >>> [in_flight(stage=i, num_stages=4, minibatches_per_wave=2) for i in range(4)]
    [2, 2, 2, 1]
    >>> [in_flight(stage=i, num_stages=3, minibatches_per_wave=8) for i in range(3)]
    [8, 4, 1]
    >>> [in_flight(stage=i, num_stages=3, minibatches_per_wave=8, weights="stash") for i in range(3)]
    [3, 2, 1]
    >>> [in_flight(stage=i, num_stages=3, minibatches_per_wave=2, weights="flush") for i in range(3)]
    [2, 2, 1]
    >>> in_flight(stage=2, num_stages=3, minibatches_per_wave=8, weights="flush", schedule="gpipe")
    8
    """
    return bound_of(weights, schedule)(stage, num_stages, minibatches_per_wave)


def bound_of(weights: WeightPolicy, schedule: Schedule) -> PerStage:
    """S_i as a function of (i, K, N), for repeated calls."""
    return _whole_wave if schedule == "gpipe" else POLICIES[weights].in_flight


def _whole_wave(_stage: int, _num_stages: int, minibatches_per_wave: int) -> int:
    return minibatches_per_wave


def weight_buffers(*, stage: int, num_stages: int, minibatches_per_wave: int, weights: WeightPolicy = "wave") -> int:
    """Parameter-sized tensors alive at rest at a stage: the last column of `policies.md`.

    With shards two more are alive (anchor and running sum). Arguments as `in_flight`.

    >>> [weight_buffers(stage=i, num_stages=3, minibatches_per_wave=5, weights="stash") for i in range(3)]
    [3, 2, 1]
    >>> weight_buffers(stage=0, num_stages=3, minibatches_per_wave=5)
    5
    """
    return POLICIES[weights].weight_buffers(stage, num_stages, minibatches_per_wave)
