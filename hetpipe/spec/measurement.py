"""What is known while and after measuring a model: what leaves the measuring process, and what lies in the cache.

Measurements hold more than the public profile: how much work each layer is, from which times on other types are
estimated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hetpipe.spec.bounds import Count, Name, Seconds
from hetpipe.spec.plan import DTYPE_BYTES, TensorSpec

#: The device type of CPUs, in profiles and of agents' devices.
CPU_TYPE = "cpu"

#: What a model computes in that has no trainable parameter.
_DEFAULT_DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class Work:
    """What a computation amounts to, wherever it runs."""

    flops: Count
    """Of matrix products, convolutions and attention; one multiply-add counts as two."""
    operations: Count
    """Operations that compute or move something (no views): on a GPU about one kernel each."""


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

    @property
    def compute_dtype(self) -> str:
        """The dtype of most of the parameters, by bytes."""
        bytes_by_dtype = Counter[str]()
        for layer in self.layers:
            for parameter in layer.parameters:
                bytes_by_dtype[parameter.dtype] += parameter.num_elements * DTYPE_BYTES[parameter.dtype]
        return bytes_by_dtype.most_common(1)[0][0] if bytes_by_dtype else _DEFAULT_DTYPE


@dataclass(frozen=True, slots=True)
class ProfileStep:
    """How far a measuring process is."""

    device_type: Name
    layer: Name
    """The one it measures now."""
    done: Count
    """Layers measured, over all device types."""
    total: Count
