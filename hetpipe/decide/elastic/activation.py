"""The active layers that a job decides, and the checks of a job whose layers are not all active.

Pure (dynamic-models.md §2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetpipe.errors import PlanError
from hetpipe.job.elastic import ActivateLine
from hetpipe.job.file import Job
from hetpipe.values.activation import Activation, layers_text
from hetpipe.values.ids import Clock
from hetpipe.values.memory import concerns
from hetpipe.values.plan import LayerReport, Plan
from hetpipe.values.suggest import join_names
from hetpipe.values.sync import Progress

#: Layers named in a sentence.
_MOST_NAMED = 8


def given_activations(job: Job) -> Iterator[tuple[str, Clock, tuple[int | str, ...]]]:
    """(key in the job file, clock, active layers as they are given there), in order of the clocks."""
    if job.elastic.active is not None:
        yield "elastic.active", Clock(0), job.elastic.active
    for number, line in enumerate(job.elastic.script):
        if isinstance(line, ActivateLine):
            yield f"elastic.script[{number}].active", Clock(line.at.clock), line.active


def activations_of(job: Job, names: Sequence[str]) -> tuple[Activation, ...]:
    """Which layers are inactive from when on, in order of the clocks.

    Args:
        job: with its script.
        names: of the model's layers, in order.

    Raises:
        PlanError: an entry means no layer; the message names it.
    """
    return tuple(
        Activation(clock, inactive_layers(active, names, key)) for key, clock, active in given_activations(job)
    )


def inactive_layers(active: Sequence[int | str], names: Sequence[str], key: str) -> tuple[int, ...]:
    """The layers that none of `active` means, ascending.

    Raises:
        PlanError: an entry means no layer; the message begins with `key`.

    >>> inactive_layers((0, "b*", "head"), ["stem", "a", "b1", "b2", "head"], "elastic.active")
    (1,)
    """
    meant: set[int] = set()
    for entry in active:
        found = {index for index, name in enumerate(names) if concerns(entry, index, name)}
        if not found and isinstance(entry, int):
            raise PlanError(f"{key}: there is no layer {entry}; the model has the layers 0 to {len(names) - 1}")
        if not found:
            known = join_names(list(names[:_MOST_NAMED]), "and")
            more = f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            raise PlanError(f"{key}: `{entry}` matches no layer; the model's are {known}{more}")
        meant |= found
    return tuple(index for index in range(len(names)) if index not in meant)


def with_activations(plan: Plan, job: Job, layers: Sequence[LayerReport], start: Progress) -> Plan:
    """The plan of a job, with the layers that are inactive from when on.

    Raises:
        PlanError: layers cannot be inactive as the job, or its checkpoint, states; the message names the key.
    """
    found = activations_of(job, [layer.name for layer in layers])
    wrong = next(_mistakes(job, found, layers, start), None)
    if wrong is not None:
        raise PlanError(wrong)
    return replace(plan, activations=found)


def _mistakes(job: Job, found: Sequence[Activation], layers: Sequence[LayerReport], start: Progress) -> Iterator[str]:
    for (key, _, _), activation in zip(given_activations(job), found, strict=True):
        if not any(layer.parameters for layer in layers if layer.index not in activation.inactive):
            yield (
                f"{key}: leaves no layer with trainable parameters active ({layers_text(activation.inactive)} are "
                "off), so that nothing would be trained; add one"
            )
    if start.inactive and start.inactive[-1] >= len(layers):
        yield (
            f"the checkpoint has layer {start.inactive[-1]} inactive, but the model has {len(layers)} layers; it is of "
            "another model"
        )
    if start.inactive and job.freezes:
        yield (
            f"freeze: {layers_text(start.inactive)} of the checkpoint are inactive, and frozen layers and inactive "
            "ones are not combined; remove `freeze`"
        )
    if start.inactive and job.elastic.live_moves:
        number, _ = job.elastic.live_moves[0]
        yield (
            f"elastic.script[{number}]: is a minibatch, but {layers_text(start.inactive)} of the checkpoint are "
            "inactive, and that and moves between barriers are not combined; give a `clock`"
        )
    if start.frozen and found:
        yield (
            f"elastic: {start.frozen} layers of the checkpoint are frozen, and frozen layers and inactive ones are not "
            "combined; remove the lines `activate`, or resume from an earlier checkpoint"
        )
