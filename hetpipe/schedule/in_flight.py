"""How many minibatches are between forward and backward at a stage? One bound, for the runtime and the planner."""

from __future__ import annotations

from typing import Literal

#: The weight policies of `policies.md`.
WeightPolicy = Literal["wave", "stash", "vertical", "double_buffer", "flush", "predict", "spectrain"]

#: Policies whose versions are defined by the strict 1F1B order of a pipeline that never drains.
_NEEDS_FULL_WAVES = ("stash", "vertical", "double_buffer", "predict", "spectrain")


def in_flight(*, stage: int, num_stages: int, minibatches_per_wave: int, weights: WeightPolicy = "wave") -> int:
    """S_i of `policies.md`: the runtime's credits and the planner's memory model.

    Args:
        stage: i, 0-based.
        num_stages: K.
        minibatches_per_wave: N.
        weights: the policy; `flush` in 1F1B order.

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
    """
    n, k = minibatches_per_wave, num_stages
    if weights == "flush":
        return min(n, k - stage)
    if weights != "wave":
        return k - stage
    if k == 1:
        return 1
    if n <= k:
        return min(n, k - stage)
    return (k - stage) + (n - k) * (k - 1 - stage) // (k - 1)


def least_minibatches_per_wave(weights: WeightPolicy, num_stages: int) -> int:
    """The smallest N under which a policy is defined (`policies.md`).

    >>> least_minibatches_per_wave("stash", 4), least_minibatches_per_wave("wave", 4)
    (4, 1)
    """
    return num_stages if weights in _NEEDS_FULL_WAVES else 1


def weight_buffers(*, stage: int, num_stages: int, minibatches_per_wave: int, weights: WeightPolicy = "wave") -> int:
    """Parameter-sized tensors alive at rest at a stage: the last column of `policies.md`.

    With shards two more are alive (anchor and running sum). Arguments as `in_flight`.

    >>> [weight_buffers(stage=i, num_stages=3, minibatches_per_wave=5, weights="stash") for i in range(3)]
    [3, 2, 1]
    >>> weight_buffers(stage=0, num_stages=3, minibatches_per_wave=5)
    5
    """
    match weights:
        case "wave":
            return minibatches_per_wave
        case "stash":
            return num_stages - stage
        case "vertical":
            return num_stages
        case "flush":
            return 1
        case "double_buffer" | "predict" | "spectrain":
            return 2
