"""What is known while and after measuring a model: what leaves the measuring process, and what lies in the cache.

Measurements hold more than the public profile: how much work each layer is, from which times on other types are
estimated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from hetpipe.values.bounds import Count, Name, Seconds
from hetpipe.values.plan import ForbiddenPlaces, TensorSpec, compute_dtype

#: The device type of CPUs, in profiles and of agents' devices.
CPU_TYPE = "cpu"


@dataclass(frozen=True, slots=True)
class Work:
    """What a computation amounts to, wherever it runs."""

    flops: Count
    """Of matrix products, convolutions and attention; one multiply-add counts as two."""
    operations: Count
    """Operations that compute or move something (no views): on a GPU about one kernel each."""
    recomputed_flops: Count = 0
    """Those of `flops` that only repeat what was computed before."""

    @property
    def model_flops(self) -> int:
        """Those of `flops` that the model needs."""
        return self.flops - self.recomputed_flops


@dataclass(frozen=True, slots=True)
class AliveTensor:
    """A tensor that crosses a cut, in one minibatch."""

    name: Name
    num_bytes: Count
    has_gradient: bool
    """Whether its gradient comes back."""


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """One layer on one device, for one minibatch. On the last layer times and bytes include the loss."""

    name: Name
    parameters: tuple[TensorSpec, ...]
    """The trainable ones."""
    activation_bytes: Count
    """What it keeps from forward to backward; a tensor that two layers keep counts at the first of them."""
    output_bytes: Count
    forward_ms: Seconds
    backward_ms: Seconds
    forward: Work
    backward: Work
    alive: tuple[AliveTensor, ...] = ()
    """What crosses a cut after it; nothing after the last one."""
    forbidden: tuple[ForbiddenPlaces, ...] = ()
    """Where it cannot be cut itself."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the trainable parameters."""
        return sum(parameter.num_bytes for parameter in self.parameters)


@dataclass(frozen=True, slots=True)
class Measurement:
    """A whole model on one device type."""

    device_type: Name
    layers: tuple[LayerMeasurement, ...]
    input_bytes: Count
    """What the first layer gets."""
    repeats: Count
    """Times that every layer ran at least."""
    measured_at: Seconds
    """Seconds since 1970-01-01 UTC."""
    reserve_bytes: Count = 0
    """What the framework takes of the device beside the tensors of the model."""
    tokens_per_sample: Annotated[int, Field(ge=1)] | None = None
    """None where the minibatch is no sequences of ids."""

    @property
    def compute_dtype(self) -> str:
        """The dtype of most of the parameters, by bytes."""
        return compute_dtype((p.dtype, p.num_elements) for layer in self.layers for p in layer.parameters)


@dataclass(frozen=True, slots=True)
class ProfileStep:
    """How far a measuring process is."""

    device_type: Name
    layer: Name
    """The one it measures now."""
    done: Count
    """Layers measured, over all device types."""
    total: Count
