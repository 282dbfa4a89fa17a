"""Measurements of a model: progress and results of the measuring process, and the content of the cache.

Measurements contain more than the public profile: the work of each layer, from which times on other device types are
estimated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from hetpipe.values.bounds import Count, Name, Seconds
from hetpipe.values.plan import ForbiddenPlaces, TensorSpec, compute_dtype
from hetpipe.values.precision import Precision

#: The device type of CPUs, in profiles and in agents' devices.
CPU_TYPE = "cpu"


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a computation, independent of the device."""

    flops: Count
    """Operations of matrix products, convolutions and attention; a multiply-add counts as two."""
    operations: Count
    """Operations that compute or move data (no views): on a GPU about one kernel each."""
    recomputed_flops: Count = 0
    """The part of `flops` that recomputes earlier results."""

    @property
    def model_flops(self) -> int:
        """The part of `flops` that the model itself requires."""
        return self.flops - self.recomputed_flops


@dataclass(frozen=True, slots=True)
class AliveTensor:
    """A tensor that crosses a cut, in one minibatch."""

    name: Name
    num_bytes: Count
    has_gradient: bool
    """Whether its gradient is sent back."""


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """One layer on one device, for one minibatch. Times and bytes of the last layer include the loss."""

    name: Name
    parameters: tuple[TensorSpec, ...]
    """The trainable parameters."""
    activation_bytes: Count
    """Bytes saved from forward to backward; a tensor saved by two layers counts for the first of them."""
    output_bytes: Count
    forward_ms: Seconds
    backward_ms: Seconds
    forward: Work
    backward: Work
    alive: tuple[AliveTensor, ...] = ()
    """Tensors that cross a cut after this layer; empty for the last one."""
    forbidden: tuple[ForbiddenPlaces, ...] = ()
    """Places within the layer where it cannot be cut."""

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
    """Input of the first layer."""
    repeats: Count
    """Minimum number of runs per layer."""
    measured_at: Seconds
    """Seconds since 1970-01-01 UTC."""
    reserve_bytes: Count = 0
    """Device memory used by the framework besides the model's tensors."""
    tokens_per_sample: Annotated[int, Field(ge=1)] | None = None
    """None where the minibatch is not a sequence of ids."""
    precision: Precision = "fp32"
    """Precision in which times and bytes were measured."""

    @property
    def compute_dtype(self) -> str:
        """The dtype that most of the work is computed in."""
        sizes = ((p.dtype, p.num_elements) for layer in self.layers for p in layer.parameters)
        return compute_dtype(sizes, self.precision)


@dataclass(frozen=True, slots=True)
class ProfileStep:
    """Progress of a measuring process."""

    device_type: Name
    layer: Name
    """The layer being measured."""
    done: Count
    """Layers measured, over all device types."""
    total: Count
