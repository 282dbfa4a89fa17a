"""A profile for another minibatch size than it was measured with."""

from __future__ import annotations

from hetpipe.spec.profile import Profile


def scaled_profile(profile: Profile, batch_size: int) -> Profile:
    """The profile of minibatches of `batch_size` samples, in proportion; parameters stay."""

    def scaled(num_bytes: int) -> int:
        return -(-num_bytes * batch_size // profile.batch_size)

    if batch_size == profile.batch_size:
        return profile
    layers = tuple(
        layer.model_copy(
            update={
                "activation_bytes": scaled(layer.activation_bytes),
                "output_bytes": scaled(layer.output_bytes),
                "forward_ms": {k: ms * batch_size / profile.batch_size for k, ms in layer.forward_ms.items()},
                "backward_ms": {k: ms * batch_size / profile.batch_size for k, ms in layer.backward_ms.items()},
            }
        )
        for layer in profile.layers
    )
    changes = {"batch_size": batch_size, "input_bytes": scaled(profile.input_bytes), "layers": layers}
    return profile.model_copy(update=changes)
