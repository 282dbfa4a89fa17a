"""The parameters of a stage's layers in one flat buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetpipe.pipeline.chain import Layer, dtype_name
from hetpipe.values.alignment import alignment_on
from hetpipe.weights.flat import FlatBuffer, FlatLayout


def layout_of(layers: Sequence[Layer], device: torch.device) -> FlatLayout:
    """Layout on `device` of every parameter, in the order of the chain, by names in the model."""
    tensors = []
    for layer in layers:
        for local, name in layer.parameters.items():
            parameter = layer.module.get_parameter(local)
            tensors.append((name, tuple(parameter.shape), dtype_name(parameter.dtype)))
    return FlatLayout(tensors, alignment=alignment_on(device.type))


def filled(buffer: FlatBuffer, layers: Sequence[Layer]) -> FlatBuffer:
    """Copy the modules' initial or restored weights into `buffer`; returns it."""
    for layer in layers:
        for local, name in layer.parameters.items():
            buffer.views[name].copy_(layer.module.get_parameter(local).detach())
    return buffer
