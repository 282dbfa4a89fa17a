"""One layer on its device, repeatable: executed exactly as a stage consisting of this layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hetpipe.errors import CallableError, HetpipeError
from hetpipe.pipeline.chain import Layer, Values
from hetpipe.pipeline.compute import StageCompute
from hetpipe.profiler.subject import MINIBATCH, VIRTUAL_WORKER, Subject


class LayerRun:
    """Runs one layer forward and backward; the last layer includes the loss."""

    def __init__(self, subject: Subject, layer: Layer, device: torch.device) -> None:
        """Move `layer` to `device`."""
        is_last = layer is subject.chain[-1]
        self.layer = layer
        self._compute = StageCompute(
            (layer,),
            vw=VIRTUAL_WORKER,
            seed=subject.job.seed,
            device=device,
            loss=subject.loss if is_last else None,
            watches_activations=False,
        )
        self._target: Any = self._compute.to_device(subject.batch.target) if is_last else None
        self._has_loss = is_last
        #: The model's parameter name → a leaf that requires a gradient, like a weight version of a stage.
        self.weights = {
            name: layer.module.get_parameter(local).detach().requires_grad_()
            for local, name in layer.parameters.items()
        }

    def forward(self, inputs: Values) -> Values:
        """Return the layer's outputs, detached; `inputs` are on the device and may be modified in place."""
        outputs = self._compute.forward(MINIBATCH, self.weights, inputs)
        if self._has_loss:
            self._compute.loss(MINIBATCH, outputs, self._target)
        return outputs

    def gradients_for(self, outputs: Values) -> Values | None:
        """Synthetic gradients of `outputs`, as from a next stage; None where the backward starts at the loss."""
        if self._has_loss:
            return None
        return tuple(torch.randn_like(output) if output.requires_grad else output for output in outputs)

    def backward(self, gradients: Values | None) -> None:
        """Run the backward of the last forward."""
        self._compute.backward(MINIBATCH, self.weights, gradients)

    def leave(self) -> None:
        """Free the layer's memory on the device."""
        self.layer.module.to("cpu")


@contextmanager
def as_user_errors(layer: Layer, inputs: Values) -> Iterator[None]:
    """Convert any exception of the layer's own code to a `CallableError`.

    Raises:
        CallableError: it raised.
    """
    try:
        yield
    except HetpipeError:
        raise
    except Exception as error:
        shapes = ", ".join(str(list(value.shape)) for value in inputs)
        raise CallableError(
            f"model: layer {layer.index} ({layer.name}) failed on input of shape {shapes}: "
            f"{type(error).__name__}: {error}"
        ) from error
