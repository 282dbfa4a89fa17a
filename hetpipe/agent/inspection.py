"""Looks at the user's code before anything is planned: does it import, does it fit together, how large is it?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from hetpipe.errors import CallableError
from hetpipe.pipeline.callables import build_datasets, build_model, call_loss, load_loss, load_metrics
from hetpipe.pipeline.chain import Layer, Values, chain_of, run_layers, tensor_spec
from hetpipe.pipeline.data import Batch, read_batch
from hetpipe.pipeline.optimizer_choice import check_optimizer_arguments
from hetpipe.spec.job import Job
from hetpipe.spec.plan import LayerReport, ModelReport


def inspect_job(job: Job, import_path: Path) -> ModelReport:
    """Import everything the job names, run one minibatch through it, and report sizes.

    Raises:
        CallableError, JobError: what cannot be used, by its path in the job.
    """
    check_optimizer_arguments(job.optimizer)
    torch.manual_seed(job.seed)
    model = build_model(job, import_path)
    chain = chain_of(model)
    train, evaluation = build_datasets(job, import_path)
    loss = load_loss(job, import_path)
    load_metrics(job, import_path)
    batch = read_batch(train, range(job.batch_size))
    sizes: list[int] = []
    with torch.enable_grad():
        outputs = _run(chain, batch, sizes)
        call_loss(loss, outputs[0] if len(outputs) == 1 else outputs, batch.target)
    reports = tuple(_report(layer, size) for layer, size in zip(chain, sizes, strict=True))
    return ModelReport(reports, len(train), None if evaluation is None else len(evaluation))


def _run(chain: tuple[Layer, ...], batch: Batch, sizes: list[int]) -> Values:
    """Run one minibatch layer by layer, noting how many elements each one returns."""
    values = batch.inputs
    for layer in chain:
        weights: Mapping[str, torch.Tensor] = {
            name: layer.module.get_parameter(local) for local, name in layer.parameters.items()
        }
        shapes = ", ".join(str(list(value.shape)) for value in values)
        try:
            values = run_layers((layer,), weights, values)
        except CallableError:
            raise
        except Exception as error:
            raise CallableError(
                f"model: layer {layer.index} ({layer.name}) failed on input of shape {shapes}: "
                f"{type(error).__name__}: {error}"
            ) from error
        sizes.append(sum(value.numel() for value in values))
    return values


def _report(layer: Layer, activation_elements: int) -> LayerReport:
    return LayerReport(
        layer.index,
        layer.name,
        tuple(tensor_spec(name, layer.module.get_parameter(local)) for local, name in layer.parameters.items()),
        tuple(tensor_spec(name, layer.module.get_buffer(local)) for local, name in layer.buffers.items()),
        activation_elements,
    )
