"""Looks at the user's code before anything is planned: does it import, does it fit together, how large is it?

For a job that is planned without a profile it also measures the model, as `hetpipe profile` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from hetpipe.agent.inspection_order import InspectionAnswer, InspectionOrder
from hetpipe.clock import Clock
from hetpipe.errors import CallableError
from hetpipe.phases import report_phase
from hetpipe.pipeline.callables import build_eval_data, call_loss, load_metrics
from hetpipe.pipeline.chain import Layer, Values, run_layers, tensor_spec
from hetpipe.pipeline.data import Batch
from hetpipe.profiler.order import ProfileOrder
from hetpipe.profiler.profiling import measured, targets_of
from hetpipe.profiler.subject import Subject, load_subject
from hetpipe.spec.job import Job
from hetpipe.spec.measurement import CPU_TYPE, ProfileStep
from hetpipe.spec.plan import LayerReport, ModelReport


def carry_out(order: InspectionOrder, clock: Clock, on_step: Callable[[ProfileStep], None]) -> InspectionAnswer:
    """Import everything the job names, and report and measure what is asked for.

    Args:
        order: what to look at.
        clock: takes the times.
        on_step: hears of each layer before it is measured.

    Raises:
        CallableError, JobError: what cannot be used, by its path in the job.
    """
    import_path = Path(order.import_path)
    report_phase("importing the user's code and building model and data")
    subject = load_subject(Job.model_validate(order.job), import_path)
    profile = ProfileOrder(
        job=order.job,
        import_path=order.import_path,
        cache_folder=order.cache_folder,
        with_cpu=CPU_TYPE in order.measure,
        types=order.measure,
    )
    # Before more of the user's modules is imported: so `hetpipe profile` and a run find each other's measurements.
    targets = targets_of(subject, profile) if order.measure else {}
    report_phase("running one minibatch through the model")
    model = inspect_subject(subject, import_path) if order.with_model else None
    report_phase("measuring the layers")
    return InspectionAnswer(model, measured(subject, targets, profile, clock, on_step).measurements)


def inspect_job(job: Job, import_path: Path) -> ModelReport:
    """Import everything the job names, run one minibatch through it, and report sizes.

    Raises:
        CallableError, JobError: what cannot be used, by its path in the job.
    """
    return inspect_subject(load_subject(job, import_path), import_path)


def inspect_subject(subject: Subject, import_path: Path) -> ModelReport:
    """Import what else the job names, run the minibatch through the model, and report sizes.

    Raises:
        CallableError, JobError: what cannot be used, by its path in the job.
    """
    evaluation = build_eval_data(subject.job, import_path)
    load_metrics(subject.job, import_path)
    sizes: list[int] = []
    with torch.enable_grad():
        outputs = _run(subject.chain, subject.batch, sizes)
        call_loss(subject.loss, outputs[0] if len(outputs) == 1 else outputs, subject.batch.target)
    reports = tuple(_report(layer, size) for layer, size in zip(subject.chain, sizes, strict=True))
    return ModelReport(reports, len(subject.train), None if evaluation is None else len(evaluation))


def _run(chain: tuple[Layer, ...], batch: Batch, sizes: list[int]) -> Values:
    """Run one minibatch layer by layer, noting how many elements each one returns."""
    # The first layer may work in place, and the minibatch may be needed again.
    values = tuple(value.clone() for value in batch.inputs)
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
