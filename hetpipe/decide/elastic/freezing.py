"""The layers that freeze with each F, and the checks of a job that freezes layers. Pure (freezing.md §1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hetpipe.errors import PlanError, UserError
from hetpipe.job.elastic import FreezeLine
from hetpipe.job.file import Job
from hetpipe.values.freezing import FreezeChange, Freezing
from hetpipe.values.ids import Clock
from hetpipe.values.plan import LayerReport, Plan
from hetpipe.values.profile import Profile
from hetpipe.values.sync import Progress

#: Modules named in a sentence.
_MOST_NAMED = 5


def freeze_levels(layers: Sequence[LayerReport], *, ignores_ties: bool) -> tuple[int, ...]:
    """`Freezing.levels` of a model.

    Args:
        layers: of the model.
        ignores_ties: a parameter may be frozen while later layers that use it are trained.
    """
    trained = [int(layer.index) for layer in layers if layer.parameters]
    return _levels(trained, lambda behind: not ignores_ties and layers[behind].is_tied)


def freeze_levels_of(profile: Profile) -> tuple[int, ...]:
    """`Freezing.levels` of a model by its profile; ties are those that the profile lists."""
    trained = [index for index, layer in enumerate(profile.layers) if layer.parameter_bytes]
    return _levels(trained, lambda behind: profile.layers[behind - 1].tie_bytes > 0)


def _levels(trained: Sequence[int], is_tied: Callable[[int], bool]) -> tuple[int, ...]:
    """Levels of a model.

    Args:
        trained: the layers with trainable parameters, ascending.
        is_tied: whether a layer, or one behind it, uses a parameter of those before it.
    """
    levels = [0]
    for behind in trained[1:]:
        levels.append(levels[-1] if is_tied(behind) else behind)
    return tuple(levels)


def frozen_layers_of(profile: Profile, frozen: int, option: str) -> int:
    """The leading layers of the chain that are frozen with F = `frozen`, which a user gave as `option`.

    Raises:
        UserError: there are not more layers with trainable parameters.
    """
    levels = freeze_levels_of(profile)
    if frozen >= len(levels):
        raise UserError(
            f"{option} freezes {frozen} layers, but the model has {len(levels)} with trainable parameters, of which "
            f"one must remain; freeze at most {len(levels) - 1}"
        )
    return levels[frozen]


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


def lowered(freezing: Freezing) -> tuple[str, ...]:
    """Sentences about layers that do not freeze, because they share parameters with trained ones."""
    asked = dict.fromkeys(change.frozen for change in freezing.changes)
    return tuple(
        f"{freezing.allowed(frozen)} layers are frozen instead of {frozen}: trained layers use a parameter of those "
        "left out (freeze.tied: everywhere freezes it for them, too)"
        for frozen in asked
        if freezing.allowed(frozen) != frozen
    )


def kept_statistics(freezing: Freezing, job: Job, layers: Sequence[LayerReport]) -> str:
    """Sentence about BatchNorm in layers that may freeze in evaluation mode; empty if there is none."""
    most = max([change.frozen for change in freezing.changes], default=0)
    if freezing.alpha is not None:
        most = len(freezing.levels) - 1
    frozen = layers[: freezing.levels[freezing.allowed(most)]] if job.freeze.mode == "eval" else ()
    names = [spec.name.rpartition(".")[0] for layer in frozen for spec in layer.buffers if _is_statistics(spec.name)]
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (
        f"BatchNorm in layers that freeze ({', '.join(names[:_MOST_NAMED])}{more}) uses its running statistics from "
        "there on, and changes them no more; `freeze.mode: train` lets it use those of minibatches, as before"
    )


def _is_statistics(buffer: str) -> bool:
    return buffer.rpartition(".")[2] == "running_mean"


def freezing_of(job: Job, plan: Plan) -> Freezing | None:
    """The rule by which the layers of a job freeze; None if none do."""
    if not plan.freeze_levels:
        return None
    at_start = [FreezeChange(job.freeze.layers, epoch=0)] if job.freeze.layers else []
    at_epochs = [FreezeChange(point.layers, epoch=point.epoch) for point in job.freeze.schedule]
    at_clocks = [FreezeChange(line.layers, clock=Clock(line.at.clock)) for line in job.elastic.freezes]
    changes = (*at_start, *at_epochs, *at_clocks)
    return Freezing(
        plan.freeze_levels, changes, job.freeze.alpha, job.freeze.waves, plan.freeze_cuts, plan.freeze_lineups
    )


def _mistakes(job: Job, layers: Sequence[LayerReport], start: Progress) -> Iterator[str]:
    num_trained = sum(bool(layer.parameters) for layer in layers)
    given = [("freeze.layers", job.freeze.layers)]
    given += [(f"freeze.schedule[{number}]", point.layers) for number, point in enumerate(job.freeze.schedule)]
    script = [(n, line) for n, line in enumerate(job.elastic.script) if isinstance(line, FreezeLine)]
    given += [(f"elastic.script[{number}]", line.layers) for number, line in script]
    for key, frozen in given:
        if frozen and frozen >= num_trained:
            yield (
                f"{key}: freezes {frozen} layers, but the model has {num_trained} with trainable parameters, of which "
                f"one must remain; freeze at most {max(num_trained - 1, 0)}"
            )
    ahead = [
        (f"freeze.schedule[{number}]", point.layers)
        for number, point in enumerate(job.freeze.schedule)
        if start.epoch < point.epoch
    ]
    ahead += [(f"elastic.script[{number}]", line.layers) for number, line in script if start.clock < line.at.clock]
    for key, frozen in ahead:
        if frozen < start.frozen:
            yield (
                f"{key}: freezes {frozen} layers, but {start.frozen} are frozen in the "
                "checkpoint already, and frozen layers stay frozen; remove it, or resume from an earlier checkpoint"
            )
    if start.frozen >= max(num_trained, 1):
        yield (
            f"the checkpoint has {start.frozen} frozen layers, but the model has {num_trained} with trainable "
            "parameters; it is of another model"
        )
