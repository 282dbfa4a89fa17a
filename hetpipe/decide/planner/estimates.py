"""Roofline estimates of layer times on device types that were not measured. Pure.

A computation with F floating-point operations that moves B bytes cannot end before

    roofline(type) = max(F / peak(type), B / bandwidth(type))

so the larger bound applies: its arithmetic intensity F / B, compared with peak / bandwidth, decides, layer by layer.
From a type that was measured and is in the catalogue, another type's time follows by the ratio of the two:

    time(other) = time(measured) · roofline(other) / roofline(measured)

which preserves the measured device's efficiency. CPUs have no entry in the catalogue; from their measurements only the
work is used, and the time is computed from the bounds and typical efficiencies:

    time(other) = F / (COMPUTE_EFFICIENCY · peak) + B / bandwidth + OPERATION_SECONDS · operations

B is the parameters, the kept activations and the output: each is read or written about once in the forward, and twice
in the backward, together with gradients of the same size.

Limits: peaks do not account for caches, kernels that do not suit a generation, or clocks that drop under load. Between
GPUs of neighbouring generations expect errors of tens of percent, from a CPU only the order of magnitude. Layers too
small to fill a GPU are bound by kernel launches, which differ less between types than the ratio suggests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpipe.values.catalogue import CATALOGUE, CatalogueEntry
from hetpipe.values.measurement import LayerMeasurement, Measurement, Work

#: Share of a GPU's peak that large matrix products and convolutions achieve.
COMPUTE_EFFICIENCY = 0.5
#: Launch overhead of one operation in eager PyTorch.
OPERATION_SECONDS = 5e-6

_MS = 1000.0
#: Traffic of a backward relative to the forward: it also reads and writes gradients.
_BACKWARD_TRAFFIC = 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """The performance bounds of a device type."""

    flops_per_second: float
    bytes_per_second: float

    def roofline_seconds(self, flops: int, num_bytes: int) -> float:
        """Lower bound on the time of a computation.

        >>> Bounds(flops_per_second=100.0, bytes_per_second=10.0).roofline_seconds(1000, 50)
        10.0
        """
        return max(flops / self.flops_per_second, num_bytes / self.bytes_per_second)


def bounds_of(entry: CatalogueEntry, dtype: str) -> Bounds:
    """Bounds of a catalogue type for arithmetic in `dtype`."""
    return Bounds(entry.peak_flops(dtype), entry.memory_bytes_per_second)


def estimated(measurements: Sequence[Measurement], kind: str) -> Measurement:
    """Estimate the measurement of catalogue type `kind`, from the first measured type in the catalogue, if any.

    Args:
        measurements: measurements of the same model, at least one.
        kind: a name of the catalogue.
    """
    source = next((found for found in measurements if found.device_type in CATALOGUE), measurements[0])
    target = bounds_of(CATALOGUE[kind], source.compute_dtype)
    if source.device_type in CATALOGUE:
        measured = bounds_of(CATALOGUE[source.device_type], source.compute_dtype)
        layers = tuple(scaled(layer, measured, target) for layer in source.layers)
    else:
        layers = tuple(built_up(layer, target) for layer in source.layers)
    return replace(source, device_type=kind, layers=layers)


def scaled(layer: LayerMeasurement, measured: Bounds, target: Bounds) -> LayerMeasurement:
    """`layer` on a device with bounds `target`, from its times on one with bounds `measured`."""

    def ratio(work: Work, num_bytes: int) -> float:
        before = measured.roofline_seconds(work.flops, num_bytes)
        if before == 0.0:
            return measured.bytes_per_second / target.bytes_per_second
        return target.roofline_seconds(work.flops, num_bytes) / before

    traffic = traffic_bytes(layer)
    return replace(
        layer,
        forward_ms=layer.forward_ms * ratio(layer.forward, traffic),
        backward_ms=layer.backward_ms * ratio(layer.backward, _BACKWARD_TRAFFIC * traffic),
    )


def built_up(layer: LayerMeasurement, target: Bounds) -> LayerMeasurement:
    """`layer` on a device with bounds `target`, from its work alone."""

    def time_ms(work: Work, num_bytes: int) -> float:
        compute = work.flops / (COMPUTE_EFFICIENCY * target.flops_per_second)
        return _MS * (compute + num_bytes / target.bytes_per_second + OPERATION_SECONDS * work.operations)

    traffic = traffic_bytes(layer)
    return replace(
        layer,
        forward_ms=time_ms(layer.forward, traffic),
        backward_ms=time_ms(layer.backward, _BACKWARD_TRAFFIC * traffic),
    )


def traffic_bytes(layer: LayerMeasurement) -> int:
    """B of a forward, in bytes."""
    return layer.parameter_bytes + layer.activation_bytes + layer.output_bytes
