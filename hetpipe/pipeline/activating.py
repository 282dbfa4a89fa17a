"""Whether active layers fit each other (`dynamic-models.md` §2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetpipe.decide.elastic.activation import activations_of, given_activations
from hetpipe.errors import CallableError
from hetpipe.job.file import Job
from hetpipe.pipeline.callables import LossFunction, call_loss
from hetpipe.pipeline.chain import Layer, active_layers, copied_buffers, device_of, run_layers
from hetpipe.pipeline.data import Batch
from hetpipe.pipeline.precision import autocast
from hetpipe.pipeline.seeds import preserved_generators


def check_activations(job: Job, chain: Sequence[Layer], batch: Batch, loss: LossFunction) -> None:
    """Run the active layers of each line of a job on one minibatch, without gradients.

    Args:
        job: with its script.
        chain: all layers of the model.
        batch: a minibatch.
        loss: of the job.

    Raises:
        CallableError: the model does not state its layers, or the output of a layer does not fit the next active one.
        PlanError: a line means no layer.
    """
    if not job.elastic.activates:
        return
    names = [layer.name for layer in chain]
    if chain[0].cut is not None:
        given = next(given_activations(job))
        raise CallableError(
            f"{given.key}: the layers of this model are those between the cuts of its own forward, which cannot be "
            "left out; return an `nn.Sequential`, or a module with a method `layers()`"
        )
    for given, activation in zip(given_activations(job), activations_of(job, names), strict=True):
        _check(given.key, active_layers(chain, activation.inactive), batch, loss)


def _check(key: str, layers: Sequence[Layer], batch: Batch, loss: LossFunction) -> None:
    """Run a chain of active layers and the loss.

    Raises:
        CallableError: they do not fit; names the layers.
    """
    weights = {name: layer.module.get_parameter(local) for layer in layers for local, name in layer.parameters.items()}
    values = batch.inputs
    with torch.no_grad(), preserved_generators(), copied_buffers(layers):
        for before, layer in zip((None, *layers), layers, strict=False):
            try:
                values = run_layers((layer,), weights, tuple(value.clone() for value in values))
            except Exception as error:
                whence = (
                    "what enters the model" if before is None else f"the output of layer {before.index} ({before.name})"
                )
                raise CallableError(
                    f"{key}: layer {layer.index} ({layer.name}) cannot follow there: {whence} does not fit it "
                    f"({_first_line(error)}); activate layers that fit, or a layer between them"
                ) from error
        try:
            with autocast(layers[0].precision, device_of(values)):
                call_loss(loss, values[0] if len(values) == 1 else values, batch.target)
        except Exception as error:
            last = layers[-1]
            raise CallableError(
                f"{key}: the loss cannot be computed of the output of layer {last.index} ({last.name}), the last "
                f"active one ({_first_line(error)}); activate the layer that the loss needs"
            ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
