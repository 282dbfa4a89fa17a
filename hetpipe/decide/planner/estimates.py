"""How long would a layer take on a device that is not here? The roofline, pure.

A computation with F floating-point operations that moves B bytes cannot end before

    roofline(type) = max(F / peak(type), B / bandwidth(type))

so it is bound by whichever is larger: its arithmetic intensity F / B against peak / bandwidth decides, layer by layer.
From a type that was measured and is in the catalogue, another type's time follows by the ratio of the two:

    time(other) = time(measured) · roofline(other) / roofline(measured)

which keeps what the measured device really reaches of its bounds. A CPU has no entry in the catalogue; from it only the
work is taken, and the time is built up from the bounds and from what is known of reaching them:

    time(other) = F / (COMPUTE_EFFICIENCY · peak) + B / bandwidth + OPERATION_SECONDS · operations

B is the parameters, the activations kept and the output: each is read or written about once forward, and twice
backward, where gradients of the same size stand beside them.

Limits: peaks say nothing of caches, of kernels that do not fit a generation, of clocks that fall under load. Between
GPUs of neighbouring generations expect errors of tens of per cent, from a CPU no more than the order of magnitude.
Layers too small to fill a GPU are bound by its launches, which differ less between types than the ratio says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpipe.values.catalogue import CATALOGUE, CatalogueEntry
from hetpipe.values.measurement import LayerMeasurement, Measurement, Work

#: The share of a GPU's peak that large matrix products and convolutions reach.
COMPUTE_EFFICIENCY = 0.5
#: The time in which eager PyTorch launches one operation.
OPERATION_SECONDS = 5e-6

_MS = 1000.0
#: Backward reads and writes gradients beside what forward moved.
_BACKWARD_TRAFFIC = 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """The two bounds of a device type."""

    flops_per_second: float
    bytes_per_second: float

    def roofline_seconds(self, flops: int, num_bytes: int) -> float:
        """The least time of a computation.

        >>> Bounds(flops_per_second=100.0, bytes_per_second=10.0).roofline_seconds(1000, 50)
        10.0
        """
        return max(flops / self.flops_per_second, num_bytes / self.bytes_per_second)


def bounds_of(entry: CatalogueEntry, dtype: str) -> Bounds:
    """What bounds arithmetic in `dtype` on a type of the catalogue."""
    return Bounds(entry.peak_flops(dtype), entry.memory_bytes_per_second)


def estimated(measurements: Sequence[Measurement], kind: str) -> Measurement:
    """What the catalogue's type `kind` would measure; from the first measured type that the catalogue has, if any.

    Args:
        measurements: of the same model, at least one.
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
    """`layer` as a device within `target` would take it, from the times of one within `measured`."""

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
    """`layer` as a device within `target` would take it, from its work alone."""

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
    """B of a forward."""
    return layer.parameter_bytes + layer.activation_bytes + layer.output_bytes
