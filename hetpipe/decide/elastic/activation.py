"""The active layers that a job decides, and the checks of a job whose layers are not all active.

Pure (dynamic-models.md §2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class GivenActivation:
    """What a job file says about active layers in one place."""

    place: str
    """Where: `elastic`, or a line of the script."""
    clock: Clock
    active: tuple[int | str, ...]
    """As they are given there: indices, names or patterns."""
    fresh: tuple[int | str, ...] = ()
    """Those that are built anew, likewise."""

    @property
    def key(self) -> str:
        """The key of the active layers, for messages."""
        return f"{self.place}.active"

    def on(self, names: Sequence[str]) -> Activation:
        """What it means for a model whose layers have these names.

        Raises:
            PlanError: an entry means no layer, or an inactive one is to be built anew; the message names the key.
        """
        inactive, key = inactive_layers(self.active, names, self.key), f"{self.place}.fresh"
        kept = inactive_layers(self.fresh, names, key) if self.fresh else range(len(names))
        fresh = tuple(sorted(set(range(len(names))).difference(kept)))
        off = sorted({*fresh} & {*inactive})
        if off:
            raise PlanError(
                f"{key}: layer {off[0]} ({names[off[0]]}) is not active there, and only active layers are built anew; "
                "add it to `active`, or remove it here"
            )
        return Activation(self.clock, inactive, fresh)


def given_activations(job: Job) -> Iterator[GivenActivation]:
    """What a job file says about active layers, in order of the clocks."""
    if job.elastic.active is not None:
        yield GivenActivation("elastic", Clock(0), job.elastic.active)
    for number, line in enumerate(job.elastic.script):
        if isinstance(line, ActivateLine):
            yield GivenActivation(f"elastic.script[{number}]", Clock(line.at.clock), line.active, line.fresh or ())


def activations_of(job: Job, names: Sequence[str]) -> tuple[Activation, ...]:
    """Which layers are inactive from when on, and which are built anew then, in order of the clocks.

    Args:
        job: with its script.
        names: of the model's layers, in order.

    Raises:
        PlanError: as `GivenActivation.on`.
    """
    return tuple(given.on(names) for given in given_activations(job))


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
    for given, activation in zip(given_activations(job), found, strict=True):
        if not any(layer.parameters for layer in layers if layer.index not in activation.inactive):
            yield (
                f"{given.key}: leaves no layer with trainable parameters active "
                f"({layers_text(activation.inactive)} are off), so that nothing would be trained; add one"
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
