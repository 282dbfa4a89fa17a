"""From measurements and estimates to the public profile. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.profiler.measurement import LayerMeasurement, Measurement
from hetpipe.spec.profile import LayerProfile, ParameterProfile, Profile


def profile_of(
    model: str, batch_size: int, *, measured: Sequence[Measurement], estimated: Sequence[Measurement] = ()
) -> Profile:
    """The profile of a model.

    Where types keep different amounts of activations, because they choose other kernels, the largest counts.

    Args:
        model: what the job calls it.
        batch_size: samples per minibatch.
        measured: one per type that is here, at least one, all of the same model.
        estimated: one per further type.
    """
    every = [*measured, *estimated]
    columns = zip(*(measurement.layers for measurement in every), strict=True)
    types = [measurement.device_type for measurement in every]
    return Profile(
        version=1,
        model=model,
        batch_size=batch_size,
        input_bytes=measured[0].input_bytes,
        layers=tuple(_layer(types, column) for column in columns),
        estimated=tuple(measurement.device_type for measurement in estimated),
    )


def _layer(types: Sequence[str], by_type: Sequence[LayerMeasurement]) -> LayerProfile:
    one = by_type[0]
    return LayerProfile(
        name=one.name,
        parameter_bytes=one.parameter_bytes,
        activation_bytes=max(layer.activation_bytes for layer in by_type),
        output_bytes=one.output_bytes,
        forward_ms={kind: layer.forward_ms for kind, layer in zip(types, by_type, strict=True)},
        backward_ms={kind: layer.backward_ms for kind, layer in zip(types, by_type, strict=True)},
        parameters=tuple(ParameterProfile(name=p.name, shape=p.shape, dtype=p.dtype) for p in one.parameters),
    )
