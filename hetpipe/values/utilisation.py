"""How fast a model trains beside samples/s: tokens/s, and model FLOP utilisation. Pure; the one definition of both.

    MFU = model FLOPs / (peak FLOP/s of all devices in use · time)

after Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), appendix B: the observed throughput over
that of a system that computes the model at its peak all the time. Model FLOPs are what the model's forward and backward
need and nothing else: what is computed a second time, to save memory, does not count, so a way to train is never better
by this measure for computing more. Plans, runs, metrics and screens take both figures from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hetpipe.values.catalogue import CATALOGUE, type_of_device_name
from hetpipe.values.cluster import DeviceType
from hetpipe.values.plan import ModelWork
from hetpipe.values.suggest import join_names

#: Digits behind the point, of figures that are told.
_TOKENS_DIGITS, _SHARE_DIGITS = 3, 6


def model_flops_utilisation(model_flops: float, *, seconds: float, peak_flops: float) -> float:
    """The share of the peak that the model's own operations make, as in the module's equation.

    Args:
        model_flops: of the forward and backward of what was trained in that time, without what is computed twice.
        seconds: the time, more than 0.
        peak_flops: operations per second of all devices in use together at most, more than 0.

    >>> model_flops_utilisation(6e12, seconds=2.0, peak_flops=10e12)
    0.3
    """
    return model_flops / (peak_flops * seconds)


@dataclass(frozen=True, slots=True)
class Peak:
    """What devices can do at most together."""

    flops: float | None
    """Operations per second; None where it is not known of one of them."""
    unknown: str = ""
    """Why it is not, and what to do about it; empty where it is."""


@dataclass(frozen=True, slots=True)
class ModelSpeed:
    """Samples/s in other units."""

    tokens_per_second: float | None
    """None where samples are no sequences of tokens."""
    model_flops_utilisation: float | None
    model_flops_utilisation_reason: str | None
    """Why there is no utilisation; None where there is one."""


def peak_of_type(kind: str, types: Mapping[str, DeviceType], dtype: str) -> float | None:
    """Operations per second of one device at most: what the cluster says of its type, else what the catalogue does.

    Args:
        kind: the device's type.
        types: of the cluster; empty where nobody has described it.
        dtype: that the model computes in, which the catalogue's figure depends on.
    """
    given = types[kind].peak_flops if kind in types else None
    if given is not None:
        return given
    known = type_of_device_name(kind)
    return None if known is None else CATALOGUE[known].peak_flops(dtype)


def peak_of_types(kinds: Iterable[str], types: Mapping[str, DeviceType], dtype: str) -> Peak:
    """Operations per second of all these devices together at most; see `peak_of_type`."""
    total = 0.0
    unknown: dict[str, None] = {}
    for kind in kinds:
        peak = peak_of_type(kind, types, dtype)
        if peak is None:
            unknown[kind] = None
        else:
            total += peak
    if not unknown:
        return Peak(total)
    names, first = join_names(unknown, "and"), next(iter(unknown))
    return Peak(
        None,
        f"no peak is known of {names}, which the catalogue of device types lacks; give device_types.{first}.peak_flops "
        "in the cluster file",
    )


def model_speed(samples_per_second: float, work: ModelWork | None, peak: Peak) -> ModelSpeed:
    """A rate in tokens, and as the share of the peak; None where what they need is not known.

    Args:
        samples_per_second: of all devices that `peak` is of.
        work: what a sample takes; None if nobody has counted.
        peak: of the devices.
    """
    tokens = None if work is None else work.tokens_per_sample
    share, reason = None, None
    if work is None:
        reason = "the operations of the model were not counted"
    elif work.flops_per_sample is None:
        reason = "torch counts no operations in this model: it has no matrix products, convolutions or attention"
    elif peak.flops is None:
        reason = peak.unknown
    else:
        flops_per_second = work.flops_per_sample * samples_per_second
        share = model_flops_utilisation(flops_per_second, seconds=1.0, peak_flops=peak.flops)
    return ModelSpeed(
        None if tokens is None else round(tokens * samples_per_second, _TOKENS_DIGITS),
        None if share is None else round(share, _SHARE_DIGITS),
        reason,
    )
