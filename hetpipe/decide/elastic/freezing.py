"""Which layers freeze with which F, and whether a job's layers can freeze. Pure (freezing.md §1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetpipe.errors import PlanError
from hetpipe.job.file import Job
from hetpipe.values.freezing import FreezeChange, Freezing
from hetpipe.values.plan import LayerReport, Plan
from hetpipe.values.sync import Progress


def freeze_levels(layers: Sequence[LayerReport], *, ignores_ties: bool) -> tuple[int, ...]:
    """`Freezing.levels` of a model.

    Args:
        layers: of the model.
        ignores_ties: a parameter may be frozen while later layers that use it are trained.
    """
    trained = [layer.index for layer in layers if layer.parameters]
    levels = [0]
    for behind in trained[1:]:
        is_allowed = ignores_ties or not layers[behind].is_tied
        levels.append(int(behind) if is_allowed else levels[-1])
    return tuple(levels)


def with_freeze_levels(plan: Plan, job: Job, layers: Sequence[LayerReport], start: Progress) -> Plan:
    """The plan of a job, with the levels of its model if layers freeze, or are frozen where it begins.

    Raises:
        PlanError: they cannot freeze as the job states; the message names the key.
    """
    wrong = next(_mistakes(job, layers, start), None)
    if wrong is not None:
        raise PlanError(wrong)
    if not job.freezes and not start.frozen:
        return plan
    return replace(plan, freeze_levels=freeze_levels(layers, ignores_ties=job.freeze.tied == "everywhere"))


def freezing_of(job: Job, plan: Plan) -> Freezing | None:
    """How the layers of a job freeze; None if none do."""
    if not plan.freeze_levels:
        return None
    at_start = [FreezeChange(job.freeze.layers, epoch=0)] if job.freeze.layers else []
    at_epochs = [FreezeChange(point.layers, epoch=point.epoch) for point in job.freeze.schedule]
    return Freezing(plan.freeze_levels, (*at_start, *at_epochs))


def _mistakes(job: Job, layers: Sequence[LayerReport], start: Progress) -> Iterator[str]:
    num_trained = sum(bool(layer.parameters) for layer in layers)
    given = [("freeze.layers", job.freeze.layers)]
    given += [(f"freeze.schedule[{number}]", point.layers) for number, point in enumerate(job.freeze.schedule)]
    for key, frozen in given:
        if frozen and frozen >= num_trained:
            yield (
                f"{key}: freezes {frozen} layers, but the model has {num_trained} with trainable parameters, of which "
                f"one must remain; freeze at most {max(num_trained - 1, 0)}"
            )
    for number, point in enumerate(job.freeze.schedule):
        if start.epoch < point.epoch and point.layers < start.frozen:
            yield (
                f"freeze.schedule[{number}]: freezes {point.layers} layers, but {start.frozen} are frozen in the "
                "checkpoint already, and frozen layers stay frozen; remove it, or resume from an earlier checkpoint"
            )
    if start.frozen >= max(num_trained, 1):
        yield (
            f"the checkpoint has {start.frozen} frozen layers, but the model has {num_trained} with trainable "
            "parameters; it is of another model"
        )
