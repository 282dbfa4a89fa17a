"""Training speed as tokens/s and as model FLOP utilisation. Pure; the only definition of both.

    MFU = model FLOPs / (peak FLOP/s of all devices in use · time)

after Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), appendix B: the observed throughput over
that of a system that computes the model at its peak all the time. Model FLOPs are those that the model's forward and
backward require: recomputation to save memory does not count, so no strategy scores better by computing more. Plans,
runs, metrics and displays take both figures from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hetpipe.values.catalogue import CATALOGUE, type_of_device_name
from hetpipe.values.cluster import DeviceType
from hetpipe.values.plan import ModelWork
from hetpipe.values.suggest import join_names

#: Decimal places of displayed figures.
_TOKENS_DIGITS, _SHARE_DIGITS = 3, 6


def model_flops_utilisation(model_flops: float, *, seconds: float, peak_flops: float) -> float:
    """Model FLOP utilisation as in the module's equation.

    Args:
        model_flops: of forward and backward of the samples trained in that time, without recomputation.
        seconds: the time, more than 0.
        peak_flops: peak operations per second of all devices in use together, more than 0.

    >>> model_flops_utilisation(6e12, seconds=2.0, peak_flops=10e12)
    0.3
    """
    return model_flops / (peak_flops * seconds)


@dataclass(frozen=True, slots=True)
class Peak:
    """Combined peak of a set of devices."""

    flops: float | None
    """Operations per second; None if unknown for one of them."""
    unknown: str = ""
    """Why it is unknown, with the fix; empty if it is known."""


@dataclass(frozen=True, slots=True)
class ModelSpeed:
    """Training speed in units other than samples/s."""

    tokens_per_second: float | None
    """None where samples are not token sequences."""
    model_flops_utilisation: float | None
    model_flops_utilisation_reason: str | None
    """Why there is no utilisation; None if there is one."""


def peak_of_type(kind: str, types: Mapping[str, DeviceType], dtype: str) -> float | None:
    """Peak operations per second of one device: the cluster's figure for its type, else the catalogue's.

    Args:
        kind: the device's type.
        types: of the cluster; empty if there is no cluster file.
        dtype: the model's compute dtype, on which the catalogue's figure depends.
    """
    given = types[kind].peak_flops if kind in types else None
    if given is not None:
        return given
    known = type_of_device_name(kind)
    return None if known is None else CATALOGUE[known].peak_flops(dtype)


def peak_of_types(kinds: Iterable[str], types: Mapping[str, DeviceType], dtype: str) -> Peak:
    """Combined peak operations per second of these devices; see `peak_of_type`."""
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
        f"no peak is known for {names}, not listed in the catalogue of device types; give "
        f"device_types.{first}.peak_flops in the cluster file",
    )


def model_speed(samples_per_second: float, work: ModelWork | None, peak: Peak) -> ModelSpeed:
    """Convert a rate to tokens/s and a share of the peak; None where the inputs are unknown.

    Args:
        samples_per_second: over all devices of `peak`.
        work: work of a sample; None if not counted.
        peak: combined peak of the devices.
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
