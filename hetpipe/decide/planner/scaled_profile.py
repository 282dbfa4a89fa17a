"""Scaling of a profile to another minibatch size."""

from __future__ import annotations

from hetpipe.values.profile import LayerProfile, Profile


def scaled_profile(profile: Profile, batch_size: int) -> Profile:
    """The profile scaled to minibatches of `batch_size` samples, in proportion; parameters and ties are unchanged."""

    def scaled(number: int) -> int:
        return -(-number * batch_size // profile.batch_size)

    def scaled_if_known(number: int | None) -> int | None:
        return None if number is None else scaled(number)

    def scaled_cut(layer: LayerProfile) -> dict[str, object]:
        alive = tuple(
            value if value.is_tie else value.model_copy(update={"num_bytes": scaled(value.num_bytes)})
            for value in layer.alive
        )
        if alive:
            return {
                "alive": alive,
                "output_bytes": sum(value.num_bytes for value in alive),
                "gradient_bytes": sum(value.num_bytes for value in alive if value.has_gradient),
            }
        return {
            "output_bytes": scaled(layer.output_bytes),
            "gradient_bytes": scaled_if_known(layer.gradient_bytes),
        }

    if batch_size == profile.batch_size:
        return profile
    layers = tuple(
        layer.model_copy(
            update={
                "activation_bytes": scaled(layer.activation_bytes),
                **scaled_cut(layer),
                "forward_flops": scaled_if_known(layer.forward_flops),
                "backward_flops": scaled_if_known(layer.backward_flops),
                "forward_ms": {k: ms * batch_size / profile.batch_size for k, ms in layer.forward_ms.items()},
                "backward_ms": {k: ms * batch_size / profile.batch_size for k, ms in layer.backward_ms.items()},
            }
        )
        for layer in profile.layers
    )
    changes = {"batch_size": batch_size, "input_bytes": scaled(profile.input_bytes), "layers": layers}
    return profile.model_copy(update=changes)
