"""Made-up measurements."""

from __future__ import annotations

from hetpipe.values.measurement import LayerMeasurement, Measurement, Work
from hetpipe.values.plan import TensorSpec


def layer(name: str = "a", *, flops: int = 0, parameters: int = 0, dtype: str = "float32") -> LayerMeasurement:
    """A layer with `parameters` elements that keeps 300 bytes and returns 100; 2 ms forward, 5 ms backward."""
    return LayerMeasurement(
        name=name,
        parameters=(TensorSpec(f"{name}.weight", (parameters,), dtype),) if parameters else (),
        activation_bytes=300,
        output_bytes=100,
        forward_ms=2.0,
        backward_ms=5.0,
        forward=Work(flops, 3),
        backward=Work(2 * flops, 4),
    )


def measurement(device_type: str, *layers: LayerMeasurement, repeats: int = 20, reserve_bytes: int = 0) -> Measurement:
    """Of a model with these layers."""
    return Measurement(device_type, layers or (layer(),), 64, repeats, 1000.0, reserve_bytes)
