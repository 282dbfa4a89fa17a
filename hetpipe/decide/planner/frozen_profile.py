"""The profile of a model whose first layers are frozen (docs/semantics/freezing.md)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from hetpipe.values.profile import LayerProfile, Profile


def frozen_profile(profile: Profile, frozen_layers: int) -> Profile:
    """The profile without what the training of the first `frozen_layers` layers costs.

    They have no backward, save nothing for it, and no trainable parameters. No gradients return to them, neither of
    their last outputs nor of those that later layers use.
    """
    if not frozen_layers:
        return profile
    constants = frozenset(value.name for value in profile.layers[frozen_layers - 1].alive)
    layers = [
        _frozen(layer) if index < frozen_layers else _trained(layer, constants)
        for index, layer in enumerate(profile.layers)
    ]
    # Version 1 cannot state that nothing returns over a cut.
    return profile.model_copy(update={"version": 2, "layers": tuple(layers)})


def cached_profile(profile: Profile, frozen_layers: int) -> Profile:
    """The profile where what enters the layer behind the first `frozen_layers` is read from a cache.

    Their forward takes no time, as in every pass over the data but the first one with them (caching.md).
    """
    layers = [
        layer.model_copy(update={"forward_ms": dict.fromkeys(layer.forward_ms, 0.0)})
        if index < frozen_layers
        else layer
        for index, layer in enumerate(profile.layers)
    ]
    return profile.model_copy(update={"layers": tuple(layers)})


def _frozen(layer: LayerProfile) -> LayerProfile:
    without = {
        "backward_ms": dict.fromkeys(layer.backward_ms, 0.0),
        "backward_flops": None if layer.backward_flops is None else 0,
        "activation_bytes": 0,
        "parameter_bytes": 0,
        "parameters": (),
        "gradient_bytes": 0,
        "alive": tuple(value.model_copy(update={"has_gradient": False}) for value in layer.alive),
    }
    return layer.model_copy(update=without)


def _trained(layer: LayerProfile, constants: AbstractSet[str]) -> LayerProfile:
    """A layer of which frozen ones have computed what is alive behind it under the names `constants`."""
    if not any(value.name in constants and value.has_gradient for value in layer.alive):
        return layer
    alive = tuple(
        value.model_copy(update={"has_gradient": False}) if value.name in constants else value for value in layer.alive
    )
    gradient_bytes = sum(value.num_bytes for value in alive if value.has_gradient)
    return layer.model_copy(update={"alive": alive, "gradient_bytes": gradient_bytes})
