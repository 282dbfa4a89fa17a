"""The profile of a model some of whose layers are inactive (docs/semantics/dynamic-models.md)."""

from __future__ import annotations

from collections.abc import Collection

from hetpipe.values.profile import LayerProfile, Profile


def active_profile(profile: Profile, inactive: Collection[int]) -> Profile:
    """The profile without the computations of the `inactive` layers.

    They take no time, save nothing, and keep their parameters. What crosses a cut behind one is what crosses it before.
    """
    if not inactive:
        return profile
    layers: list[LayerProfile] = []
    for index, layer in enumerate(profile.layers):
        if index not in inactive:
            layers.append(layer)
            continue
        crossing: dict[str, object] = {"output_bytes": profile.input_bytes, "gradient_bytes": 0, "alive": ()}
        if layers:
            crossing = {name: getattr(layers[-1], name) for name in crossing}
        nothing: dict[str, object] = {
            "forward_ms": dict.fromkeys(layer.forward_ms, 0.0),
            "backward_ms": dict.fromkeys(layer.backward_ms, 0.0),
            "forward_flops": None if layer.forward_flops is None else 0,
            "backward_flops": None if layer.backward_flops is None else 0,
            "activation_bytes": 0,
        }
        layers.append(layer.model_copy(update={**nothing, **crossing}))
    return profile.model_copy(update={"layers": tuple(layers)})
