"""Construction of the public profile from measurements and estimates. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetpipe.decide.planner.estimates import estimated
from hetpipe.errors import UserError
from hetpipe.job.file import Job
from hetpipe.values.catalogue import CATALOGUE
from hetpipe.values.measurement import LayerMeasurement, Measurement
from hetpipe.values.profile import AliveValue, ForbiddenCut, LayerProfile, ParameterProfile, Profile
from hetpipe.values.suggest import did_you_mean


def profile_of(
    model: str,
    batch_size: int,
    *,
    measured: Sequence[Measurement],
    estimated: Sequence[Measurement] = (),
    tokens_per_sample: int | None = None,
) -> Profile:
    """The profile of a model.

    If device types keep different amounts of activations, because they choose different kernels, the largest counts.

    Args:
        model: name of the model in the job.
        batch_size: samples per minibatch.
        measured: one measurement per available type, at least one, all of the same model.
        estimated: one estimate per further type.
        tokens_per_sample: value of the job; None for the measured value.
    """
    every = [*measured, *estimated]
    columns = zip(*(measurement.layers for measurement in every), strict=True)
    types = [measurement.device_type for measurement in every]
    return Profile(
        version=2,
        model=model,
        batch_size=batch_size,
        input_bytes=measured[0].input_bytes,
        layers=tuple(_layer(types, column) for column in columns),
        tokens_per_sample=tokens_per_sample or measured[0].tokens_per_sample,
        precision=measured[0].precision,
        estimated=tuple(measurement.device_type for measurement in estimated),
    )


def profile_for(job: Job, measured: Sequence[Measurement], types: Iterable[str]) -> Profile:
    """The profile of a job's model on all measured types, and, by estimate, on those of `types` that were not measured.

    Raises:
        UserError: a type was not measured and is not in the catalogue.
    """
    here = [measurement.device_type for measurement in measured]
    others = [kind for kind in dict.fromkeys(types) if kind not in here]
    for kind in others:
        if kind not in CATALOGUE:
            raise UserError(
                f"device type {kind} is not among those here ({', '.join(here)}), and is not in the catalogue; "
                f"{did_you_mean(kind, [*CATALOGUE, *here])}"
            )
    return profile_of(
        str(job.model),
        job.batch_size,
        measured=measured,
        estimated=[estimated(measured, kind) for kind in others],
        tokens_per_sample=job.tokens_per_sample,
    )


def reserve_for(measured: Sequence[Measurement], types: Iterable[str]) -> int:
    """Memory to reserve for the framework on every device: the maximum measured on any of `types`; 0 without any."""
    wanted = set(types)
    return max((one.reserve_bytes for one in measured if one.device_type in wanted), default=0)


def _layer(types: Sequence[str], by_type: Sequence[LayerMeasurement]) -> LayerProfile:
    one = by_type[0]
    return LayerProfile(
        name=one.name,
        parameter_bytes=one.parameter_bytes,
        activation_bytes=max(layer.activation_bytes for layer in by_type),
        output_bytes=one.output_bytes,
        gradient_bytes=sum(value.num_bytes for value in one.alive if value.has_gradient) if one.alive else None,
        alive=tuple(
            AliveValue(name=value.name, num_bytes=value.num_bytes, has_gradient=value.has_gradient)
            for value in one.alive
        ),
        forbidden=tuple(
            ForbiddenCut(before=each.before, upto=each.upto, places=each.places, reason=each.reason)
            for each in one.forbidden
        ),
        forward_ms={kind: layer.forward_ms for kind, layer in zip(types, by_type, strict=True)},
        backward_ms={kind: layer.backward_ms for kind, layer in zip(types, by_type, strict=True)},
        forward_flops=one.forward.model_flops,
        backward_flops=one.backward.model_flops,
        parameters=tuple(ParameterProfile(name=p.name, shape=p.shape, dtype=p.dtype) for p in one.parameters),
    )
