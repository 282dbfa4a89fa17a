"""Consistency rules between the sections of a job file; each mistake is reported at the later section.

A rule is a function whose parameters are named like the job keys it compares. It receives only individually valid
values, and is skipped if one of its keys is invalid.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hetpipe.job.early import EarlyStoppingSection
from hetpipe.job.elastic import (
    ActivateLine,
    AddLine,
    BarrierLine,
    DropLine,
    ElasticSection,
    FreezeLine,
    MemoryLine,
    MinibatchMoment,
    MoveLine,
    ScriptLine,
    WavesLine,
)
from hetpipe.job.freezing import FreezeSection
from hetpipe.job.live_moves import Obstacle, obstacle_to_live_moves
from hetpipe.job.sections import (
    DEFAULT_MINIBATCHES_PER_WAVE,
    CheckpointSection,
    ClusterSection,
    DataSection,
    EvaluateSection,
    LossTerm,
    Memory,
    ParameterServersSection,
    SyncSection,
    WorkersSection,
)
from hetpipe.job.training import GradientsSection, OptimizerSpec, PredictionSection
from hetpipe.values.policies import POLICIES, WeightPolicy, policies_where
from hetpipe.values.precision import AUTOCAST_DTYPES, Precision
from hetpipe.values.problems import Problem
from hetpipe.values.suggest import did_you_mean, join_names


def contradictions(keys: Mapping[str, Any]) -> Iterator[Problem]:
    """The mistakes found by all rules.

    Args:
        keys: the individually valid keys of the job, by name.
    """
    for rule in _RULES:
        needed = inspect.signature(rule).parameters
        if needed.keys() <= keys.keys():
            yield from rule(**{name: keys[name] for name in needed})


def _values_have_one_name(loss: str | Mapping[str, LossTerm] | None, metrics: Mapping[str, str]) -> Iterator[Problem]:
    names = loss.keys() if isinstance(loss, Mapping) else ()
    for name in metrics:
        if name in names:
            yield Problem(
                ("metrics", name),
                "is the name of a loss as well, and evaluations report both by name; rename one of the two",
            )


def _stops_by_what_is_evaluated(
    early_stopping: EarlyStoppingSection | None,
    data: DataSection,
    loss: str | Mapping[str, LossTerm] | None,
    metrics: Mapping[str, str],
) -> Iterator[Problem]:
    if early_stopping is None:
        return
    if data.eval is None:
        yield Problem(("early_stopping",), "needs evaluations, which need `data.eval`")
    known = _evaluated(loss, metrics)
    if early_stopping.metric not in known:
        hint = did_you_mean(early_stopping.metric, known)
        yield Problem(("early_stopping", "metric"), f"is {early_stopping.metric}, which is not evaluated; {hint}")


def _keeps_the_best_of_what_is_evaluated(
    checkpoint: CheckpointSection,
    data: DataSection,
    loss: str | Mapping[str, LossTerm] | None,
    metrics: Mapping[str, str],
    storage: str | None,
) -> Iterator[Problem]:
    if checkpoint.best is None:
        return
    if data.eval is None:
        yield Problem(("checkpoint", "best"), "needs evaluations, which need `data.eval`")
    known = _evaluated(loss, metrics)
    if checkpoint.best not in known:
        hint = did_you_mean(checkpoint.best, known)
        yield Problem(("checkpoint", "best"), f"is {checkpoint.best}, which is not evaluated; {hint}")
    if storage is not None:
        yield Problem(
            ("checkpoint", "best"),
            "is for checkpoints in the folder of the run; with `storage`, only the newest are kept: leave one out",
        )


def _evaluated(loss: str | Mapping[str, LossTerm] | None, metrics: Mapping[str, str]) -> list[str]:
    """Names of the values of an evaluation."""
    return ["loss", *(loss if isinstance(loss, Mapping) else ()), *metrics]


def _one_virtual_worker(workers: WorkersSection, sync: SyncSection) -> Iterator[Problem]:
    """Planning creates only one virtual worker, unless more are requested."""
    key, count = ("count", workers.count) if workers.devices is None else ("devices", len(workers.devices))
    if sync.traits.single_worker and (count or 1) > 1:
        yield _kind(
            f"is {sync.kind}, which is for one virtual worker, but `workers.{key}` is {count}; use wsp or "
            "allreduce, or one virtual worker"
        )


def _waves(sync: SyncSection) -> tuple[int, ...]:
    """N of each virtual worker, or one N for all."""
    given = sync.minibatches_per_wave
    given = DEFAULT_MINIBATCHES_PER_WAVE if isinstance(given, str) else given
    return (given,) if isinstance(given, int) else given


def _a_wave_for_each(workers: WorkersSection, sync: SyncSection, elastic: ElasticSection) -> Iterator[Problem]:
    """A list of N has one entry per virtual worker of the job; with `proportional` the planner computes the list."""
    given = sync.minibatches_per_wave
    if given == "proportional":
        yield from _proportional(workers, sync)
    if not isinstance(given, tuple):
        return
    path = ("sync", "minibatches_per_wave")
    if workers.stages == "auto":
        yield Problem(
            path,
            "has one number for each virtual worker, which requires `workers.stages` with the stages of each; give "
            "them, or one number, or auto, or proportional",
        )
    elif workers.count is not None and len(given) != (num_workers := workers.count + len(elastic.added)):
        yield Problem(
            path,
            f"has {len(given)} numbers, but there are {num_workers} virtual workers; give one for each, or one "
            "number for all",
        )


def _proportional(workers: WorkersSection, sync: SyncSection) -> Iterator[Problem]:
    path = ("sync", "minibatches_per_wave")
    if not sync.traits.has_shards:
        yield Problem(
            path,
            f"is proportional, but `sync.kind` is {sync.kind}, under which no virtual workers of different speeds "
            "exchange waves; use auto or one number, or wsp, bsp or asp",
        )
    elif workers.stages != "auto":
        yield Problem(
            path,
            "is proportional, which requires `workers.stages: auto`, as the planner predicts the speed of stages; give "
            "a list with one number for each virtual worker, or one number",
        )


def _bound_is_planned(workers: WorkersSection, sync: SyncSection) -> Iterator[Problem]:
    if sync.D == "auto" and workers.stages != "auto":
        yield Problem(("sync", "D"), "is auto, which requires `workers.stages: auto`; give a number, for example 0")


def _equal_replicas(workers: WorkersSection, sync: SyncSection) -> Iterator[Problem]:
    if not sync.traits.averages_gradients:
        return
    if workers.stages == "auto":
        yield _kind(
            f"is {sync.kind}, which requires equally cut virtual workers, but `workers.stages: auto` plans each "
            "one separately; give their number, for example `workers: {count: 2, stages: 2}`"
        )
    elif isinstance(workers.stages, tuple) and len(set(workers.stages)) > 1:
        yield _kind(
            f"is {sync.kind}, which requires equally cut virtual workers, but the lists in `workers.stages` "
            "differ; give the same list for each, or use wsp"
        )


def _averages_under_allreduce(sync: SyncSection, weights: WeightPolicy) -> Iterator[Problem]:
    if sync.traits.averages_gradients and not POLICIES[weights].one_update_per_wave:
        yield Problem(
            ("weights",),
            f"is {weights}, which makes an update per minibatch, but `{sync.kind}` averages the gradients of whole "
            f"waves; use {join_names(policies_where(lambda row: row.one_update_per_wave))}, or another `sync.kind`",
        )


def _enough_minibatches(workers: WorkersSection, sync: SyncSection, weights: WeightPolicy) -> Iterator[Problem]:
    stages = workers.stages
    if stages == "auto":
        return
    each, waves = [len(counts) for counts in stages] if isinstance(stages, tuple) else [stages], _waves(sync)
    num = max(len(each), len(waves))
    pairs = zip(each * num if len(each) == 1 else each, waves * num if len(waves) == 1 else waves, strict=False)
    needs = [(POLICIES[weights].least_minibatches_per_wave(num_stages), given) for num_stages, given in pairs]
    least, given = max(needs, key=lambda need: need[0] - need[1])
    num_stages = least
    if given < least:
        by_default = " by default" if sync.minibatches_per_wave == "auto" else ""
        yield Problem(
            ("weights",),
            f"is {weights}, which needs as many minibatches per wave as `workers.stages` has stages, {num_stages}, but "
            f"`sync.minibatches_per_wave` is {given}{by_default}; set it to {least} or more",
        )


def _momentum_to_predict_with(optimizer: OptimizerSpec, weights: WeightPolicy) -> Iterator[Problem]:
    if POLICIES[weights].predicts != "momentum":
        return
    need = f"is {weights}, which predicts with the momentum of SGD, but"
    if optimizer.name != "SGD":
        yield Problem(
            ("weights",), f"{need} `optimizer.name` is {optimizer.name}; use SGD with momentum, or weights: predict"
        )
        return
    momentum = optimizer.arguments.get("momentum", 0)
    given = {"optimizer": momentum} | {
        f"optimizer.groups[{index}]": group.arguments.get("momentum", momentum)
        for index, group in enumerate(optimizer.groups)
    }
    for path, value in given.items():
        if not value:
            yield Problem(
                ("weights",),
                f"{need} `{path}.momentum` is 0; set it, for example `momentum: 0.9`, or use weights: predict",
            )
            return


def _order_of_the_policy(weights: WeightPolicy, schedule: str) -> Iterator[Problem]:
    try:
        POLICIES[weights].schedule_of(schedule)
    except ValueError as error:
        yield Problem(("schedule",), str(error))


#: Largest divisor suggested: the number of minibatches per wave may have up to 16 digits.
_MAX_NAMED_DIVISOR = 64


def _whole_accumulations(
    workers: WorkersSection, sync: SyncSection, weights: WeightPolicy, gradients: GradientsSection
) -> Iterator[Problem]:
    accumulate, waves = gradients.accumulate, _waves(sync)
    n = next((each for each in waves if each % accumulate), waves[0])
    is_open = workers.stages == "auto" and isinstance(sync.minibatches_per_wave, str)
    if accumulate == 1 or (is_open and not POLICIES[weights].one_update_per_wave):
        return
    if POLICIES[weights].one_update_per_wave:
        yield Problem(
            ("gradients", "accumulate"),
            f"is {accumulate}, but {weights} makes one update per wave and thus accumulates "
            f"`sync.minibatches_per_wave`, {n}, minibatches; remove it, or use another policy",
        )
    elif n % accumulate:
        divisors = [str(count) for count in range(1, min(n, _MAX_NAMED_DIVISOR) + 1) if n % count == 0]
        yield Problem(
            ("gradients", "accumulate"),
            f"is {accumulate}, which does not divide `sync.minibatches_per_wave`, {n}, and a wave contains "
            f"whole updates; use {join_names(divisors)}, or another N",
        )


def _norm_in_time(weights: WeightPolicy, gradients: GradientsSection) -> Iterator[Problem]:
    if gradients.max_norm is not None and gradients.clip == "global" and not POLICIES[weights].clips_globally:
        yield Problem(
            ("gradients", "clip"),
            f"is global, but under {weights} every step would wait for the norms of all stages, one minibatch at a "
            f"time; use clip: stage, or weights: {join_names(policies_where(lambda policy: policy.clips_globally))}",
        )


def _weights_of_the_cast(weights: WeightPolicy, precision: Precision) -> Iterator[Problem]:
    """Under autocast, an operation's backward reads the cast of its weight that the forward saved as an activation."""
    if precision in AUTOCAST_DTYPES and POLICIES[weights].predicts is not None:
        others = join_names(policies_where(lambda policy: policy.predicts is None))
        yield Problem(
            ("precision",),
            f"is {precision}, but under {weights} a backward reads other weights than its forward, and autocast keeps "
            f"the forward's, cast to {AUTOCAST_DTYPES[precision]}; use fp32, or weights: {others}",
        )


def _verdict_in_time(weights: WeightPolicy, precision: Precision) -> Iterator[Problem]:
    """The verdict on an overflow combines all stages, like the norm over all stages."""
    policy = POLICIES[weights]
    if precision == "fp16" and policy.predicts is None and not policy.clips_globally:
        others = join_names(policies_where(lambda policy: policy.clips_globally))
        yield Problem(
            ("precision",),
            f"is fp16, but under {weights} every step would wait until all stages know whether a gradient overflowed, "
            f"one minibatch at a time; use bf16, or weights: {others}",
        )


def _precision_of_the_profile(precision: Precision, cluster: ClusterSection) -> Iterator[Problem]:
    if cluster.profile is not None and cluster.profile.precision != precision:
        yield Problem(
            ("cluster", "profile"),
            f"was measured in {cluster.profile.precision}, but `precision` is {precision}, with other times and bytes; "
            "measure it again with `hetpipe profile`, or remove it",
        )


def _something_predicted(weights: WeightPolicy, prediction: PredictionSection) -> Iterator[Problem]:
    if POLICIES[weights].predicts != "update" and prediction != PredictionSection():
        yield Problem(("prediction",), f"applies to weights: predict, but `weights` is {weights}; remove it")


def _something_on_the_shards(sync: SyncSection, parameter_servers: ParameterServersSection) -> Iterator[Problem]:
    for name, field in ParameterServersSection.model_fields.items():
        value = getattr(parameter_servers, name)
        if not sync.traits.has_shards and value != field.default:
            yield Problem(
                ("parameter_servers", name),
                f"is {value}, but under `{sync.kind}` only the stages hold the weights, and one process keeps "
                "the clock; remove it",
            )


def _no_unknown_speeds(workers: WorkersSection, cluster: ClusterSection) -> Iterator[Problem]:
    if cluster.devices and workers.stages == "auto":
        yield Problem(
            ("cluster",),
            "slows devices down, which planning does not take into account; give `workers.stages`, or use "
            "`emulate: true` with a `file`",
        )


def _something_to_evaluate(data: DataSection, evaluate: EvaluateSection) -> Iterator[Problem]:
    if evaluate.every_waves is not None and data.eval is None:
        yield Problem(
            ("evaluate", "every_waves"),
            f"is {evaluate.every_waves}, but there is no evaluation data; add `data.eval`, for example `eval: "
            "model:eval_data`, or remove it",
        )
    if evaluate.max_batches is not None and evaluate.every_waves is None:
        yield Problem(
            ("evaluate", "max_batches"),
            f"is {evaluate.max_batches}, which limits evaluations within epochs, but there are none; add "
            "`every_waves`, for example 50, or remove it",
        )


def _script_for_the_stages(workers: WorkersSection, elastic: ElasticSection) -> Iterator[Problem]:
    """Lines about virtual workers and stages that the job states; of planned ones they are checked once planned."""
    stages = workers.stages
    if stages == "auto" or workers.count is None:
        return
    for number, line in enumerate(elastic.script):
        path = ("elastic", "script", number)
        if isinstance(line, WavesLine | FreezeLine | ActivateLine | BarrierLine):
            continue
        known = [len(stages[vw]) if isinstance(stages, tuple) else int(stages) for vw in range(workers.count)]
        known += [len(added.devices or ()) for before, added in elastic.added if before <= number]
        if line.vw >= len(known):
            yield Problem((*path, "vw"), f"is {line.vw}, but the virtual workers are 0 to {len(known) - 1}")
            continue
        if isinstance(line, AddLine) and line.devices is not None and line.vw < workers.count:
            yield Problem(
                (*path, "devices"),
                f"are those of virtual worker {line.vw}, which the job has with devices of its own; remove them, or "
                f"use index {workers.count} for another one",
            )
        if isinstance(line, MoveLine | AddLine) and line.stages and len(line.stages) != known[line.vw]:
            yield Problem(
                (*path, "stages"),
                f"has {len(line.stages)} stages, but virtual worker {line.vw} has {known[line.vw]}; a move keeps their "
                "number: give the layers of each; for another number, drop it, and add another virtual worker on its "
                "`devices` at the same clock",
            )


def _script_of_replicas(sync: SyncSection, workers: WorkersSection, elastic: ElasticSection) -> Iterator[Problem]:
    """Replicas average their gradients stage by stage, so all are cut alike."""
    if not sync.traits.averages_gradients or workers.count is None:
        return
    by_clock: dict[int, list[MoveLine]] = {}
    for line in elastic.moves:
        if not isinstance(line.at, MinibatchMoment):
            by_clock.setdefault(line.at.clock, []).append(line)
    for clock, lines in by_clock.items():
        present = [vw for vw in range(workers.count + len(elastic.added)) if not elastic.is_absent(vw, clock)]
        if len({line.stages for line in lines}) > 1 or {line.vw for line in lines} != set(present):
            yield Problem(
                ("elastic", "script"),
                f"does not move all {len(present)} virtual workers alike at clock {clock}, but under {sync.kind} all "
                "are cut equally; give one line for each, with the same `stages`",
            )


def _waves_of_the_script(
    workers: WorkersSection,
    sync: SyncSection,
    weights: WeightPolicy,
    gradients: GradientsSection,
    elastic: ElasticSection,
) -> Iterator[Problem]:
    """As of N itself, except for what the number of stages requires, which is checked with the plan."""
    for number, line in enumerate(elastic.script):
        if not isinstance(line, WavesLine):
            continue
        path, given = ("elastic", "script", number, "minibatches_per_wave"), line.counts
        if isinstance(line.minibatches_per_wave, tuple):
            if workers.count is not None and len(given) != (num_workers := workers.count + len(elastic.added)):
                yield Problem(
                    path,
                    f"has {len(given)} numbers, but there are {num_workers} virtual workers; give one for each, or "
                    "one number for all",
                )
            elif sync.traits.averages_gradients and len(set(given)) > 1:
                yield Problem(
                    path, f"differ, but under {sync.kind} all virtual workers have equal waves; give one number"
                )
        if not POLICIES[weights].one_update_per_wave and any(each % gradients.accumulate for each in given):
            yield Problem(
                path,
                f"is not a multiple of `gradients.accumulate`, {gradients.accumulate}, and a wave contains whole "
                "updates; use a multiple",
            )


def _members_of_the_script(sync: SyncSection, workers: WorkersSection, elastic: ElasticSection) -> Iterator[Problem]:
    """One virtual worker must remain; without shards, which keep the weights, one that joins takes over another's."""
    for number, line in enumerate(elastic.script):
        if isinstance(line, AddLine) and line.devices is None and not sync.traits.has_shards:
            yield Problem(
                ("elastic", "script", number),
                f"adds virtual worker {line.vw}, but under `{sync.kind}` only the stages hold the weights: use wsp, "
                "bsp or asp, or add another one on the `devices` of one that is dropped at the same clock",
            )
    if workers.count is None:
        return
    everybody = range(workers.count + len(elastic.added))
    drops = [(number, line.at.clock) for number, line in enumerate(elastic.script) if isinstance(line, DropLine)]
    empty = [clock for _, clock in drops if all(elastic.is_absent(vw, clock) for vw in everybody)]
    if empty:
        last = max(number for number, clock in drops if clock == empty[0])
        yield Problem(("elastic", "script", last, "vw"), "is the last virtual worker that trains; keep one")


def _one_decides_what_freezes(elastic: ElasticSection, freeze: FreezeSection) -> Iterator[Problem]:
    if elastic.script and freeze.schedule:
        yield Problem(
            ("freeze", "schedule"),
            "cannot be combined with `elastic.script`, which decides all changes of a run; write it as lines "
            "`{at: {clock: …}, do: freeze, layers: …}` of the script",
        )
    if (freeze.alpha is None) != (freeze.every is None and freeze.waves is None):
        yield Problem(
            ("freeze", "alpha"),
            "and one of `every` and `waves` go together: α is how much may freeze where norms decide; give "
            "both, for example `{every: epoch, alpha: 1/3}`",
        )
    if freeze.every is not None and freeze.waves is not None:
        yield Problem(("freeze", "waves"), f"is {freeze.waves}, but `every` is {freeze.every}; remove one of the two")
    if freeze.alpha is not None and (freeze.schedule or elastic.script):
        other = "freeze.schedule" if freeze.schedule else "elastic.script"
        yield Problem(
            ("freeze", "alpha"), f"lets the norms of gradients decide, but `{other}` does; remove one of them"
        )
    for key in ("recut", "compress"):
        if getattr(freeze, key) and elastic.script:
            yield Problem(
                ("freeze", key),
                "changes plans where layers freeze, but `elastic.script` decides all changes of a run; remove it, and "
                "write the changes as lines of the script, with `do: move`, `drop`, `add` and `waves`",
            )
    for number, line in enumerate(elastic.script):
        if isinstance(line, FreezeLine) and line.layers <= freeze.layers:
            yield Problem(
                ("elastic", "script", number, "layers"),
                f"is {line.layers}, but `freeze.layers` freezes {freeze.layers} from the start: frozen layers stay "
                "frozen; give a larger number, or remove the line",
            )


def _compressible(sync: SyncSection, freeze: FreezeSection, memory: Memory, storage: str | None) -> Iterator[Problem]:
    """What a job cannot have whose pipelines are compressed as layers freeze."""
    if not freeze.compress:
        return
    because = None
    if sync.traits.single_worker:
        because = f"makes several virtual workers of one, which `sync.kind: {sync.kind}` does not have; use allreduce"
    elif isinstance(sync.minibatches_per_wave, tuple) or sync.minibatches_per_wave == "proportional":
        because = "needs one number of minibatches for the waves of all; set `sync.minibatches_per_wave` to one"
    elif memory == "auto":
        because = "keeps the memory policies of layers, but `memory: auto` chooses them for one cut; name the policies"
    elif storage is not None:
        because = "takes over states from files of the run's folder, but `storage` is set; remove one of them"
    elif not freeze.is_used:
        because = "needs layers that freeze; give `freeze.schedule`, or `freeze.alpha` with `every` or `waves`"
    if because is not None:
        yield Problem(("freeze", "compress"), because)


def _moves_between_barriers(
    weights: WeightPolicy,
    sync: SyncSection,
    gradients: GradientsSection,
    precision: Precision,
    evaluate: EvaluateSection,
    freeze: FreezeSection,
    elastic: ElasticSection,
) -> Iterator[Problem]:
    """Without a barrier layers move only where the weights of a minibatch depend on neither the cut nor the time."""
    others = sorted({line.do for line in elastic.script if not _goes_with_live_moves(line, elastic)})
    because = obstacle_to_live_moves(weights, sync, gradients, precision, evaluate, freeze, elastic)
    if because is None and others:
        because = Obstacle(f"lines `{others[0]}` of the script and moves between barriers are not combined", "")
    for number, line in elastic.live_moves if because is not None else ():
        yield Problem(
            ("elastic", "script", number, "at"),
            f"is a minibatch of virtual worker {line.vw}, but {because}; or give a `clock`: at a barrier layers "
            "move in every job",
        )


def _goes_with_live_moves(line: ScriptLine, elastic: ElasticSection) -> bool:
    """Whether neither N changes by a line nor the cut of a virtual worker that the job has."""
    if isinstance(line, AddLine):
        return not elastic.keep_global_batch and (line.stages is None or line.devices is not None)
    return isinstance(line, MoveLine | BarrierLine) or (isinstance(line, DropLine) and not elastic.keep_global_batch)


def _frozen_or_inactive(freeze: FreezeSection, elastic: ElasticSection) -> Iterator[Problem]:
    if elastic.activates and (freeze.is_used or elastic.freezes):
        path = ("freeze",) if freeze.is_used else ("elastic", "script")
        yield Problem(
            path,
            "freezes layers, but `elastic` says which layers are active, and frozen layers and inactive ones are not "
            "combined; remove one of them",
        )


def _nobody_is_away(elastic: ElasticSection) -> Iterator[Problem]:
    """Who is away would come back with an optimizer's state of layers that have been built anew meanwhile."""
    for number, line in enumerate(elastic.script if elastic.members else ()):
        if isinstance(line, ActivateLine) and line.fresh:
            yield Problem(
                ("elastic", "script", number, "fresh"),
                "builds layers anew, and other lines drop or add virtual workers, which is not combined; remove one of "
                "them",
            )


def _one_decides_cuts(elastic: ElasticSection) -> Iterator[Problem]:
    for number, line in enumerate(elastic.script if elastic.recut else ()):
        if isinstance(line, MoveLine) or (isinstance(line, AddLine) and line.stages and line.devices is None):
            yield Problem(
                ("elastic", "script", number),
                f"moves layers of virtual worker {line.vw}, but with `elastic.recut` the active layers decide how "
                "it is cut; remove one of them",
            )


def _cache_of_constants(freeze: FreezeSection, elastic: ElasticSection) -> Iterator[Problem]:
    if freeze.cache != "on":
        return
    if not freeze.is_used and not elastic.freezes:
        yield _cache("is on, but no layer freezes, so that nothing is computed twice; say what freezes, or remove it")
    if freeze.mode == "train":
        yield _cache(
            "is on, but with `freeze.mode: train` frozen layers compute something else each time; remove one of them"
        )


def _cache(message: str) -> Problem:
    return Problem(("freeze", "cache"), message)


def _memory_between_barriers(weights: WeightPolicy, elastic: ElasticSection) -> Iterator[Problem]:
    """A recomputation on predicted weights is another computation, which begins at a barrier."""
    if POLICIES[weights].predicts is None:
        return
    for number, line in enumerate(elastic.script):
        if isinstance(line, MemoryLine) and isinstance(line.at, MinibatchMoment):
            yield Problem(
                ("elastic", "script", number, "at"),
                f"is minibatch {line.at.p}, but under `{weights}` policies change at barriers only, as recomputed "
                "layers use the backward's weights; give a `clock`",
            )


def _kind(message: str) -> Problem:
    return Problem(("sync", "kind"), message)


_RULES: tuple[Callable[..., Iterator[Problem]], ...] = (
    _values_have_one_name,
    _stops_by_what_is_evaluated,
    _keeps_the_best_of_what_is_evaluated,
    _one_virtual_worker,
    _bound_is_planned,
    _equal_replicas,
    _averages_under_allreduce,
    _a_wave_for_each,
    _enough_minibatches,
    _momentum_to_predict_with,
    _order_of_the_policy,
    _whole_accumulations,
    _norm_in_time,
    _weights_of_the_cast,
    _verdict_in_time,
    _precision_of_the_profile,
    _something_predicted,
    _something_on_the_shards,
    _no_unknown_speeds,
    _something_to_evaluate,
    _script_for_the_stages,
    _script_of_replicas,
    _waves_of_the_script,
    _members_of_the_script,
    _one_decides_what_freezes,
    _compressible,
    _frozen_or_inactive,
    _nobody_is_away,
    _one_decides_cuts,
    _cache_of_constants,
    _memory_between_barriers,
    _moves_between_barriers,
)
