"""The reasons for a plan: its bottleneck, the losses of alternatives, the effect of another N or cut. Pure.

All reasons follow from the plan by the planner's own formulas, by changing one thing and keeping the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hetpipe.decide.planner.borders import place_text
from hetpipe.decide.planner.costs import Costs, MemoryModel, milliseconds, minibatches_per_tick, ticks
from hetpipe.decide.planner.job_rate import JobRate, bytes_moved, job_rate
from hetpipe.decide.planner.own_waves import rate_of_own_waves
from hetpipe.decide.planner.round_trip import round_trip
from hetpipe.decide.simulator.plan import SimulatedStage
from hetpipe.report.plan_view import SAME, PlanFacts, view_of
from hetpipe.report.text import count, rate
from hetpipe.values.cluster import LinkSpec, node_of
from hetpipe.values.plan_document import Alternative, PlanDocument, PlannedBorder
from hetpipe.values.profile import AliveValue
from hetpipe.values.quantities import bytes_text, time_text

#: Relative difference up to which closed form and simulation are considered equal.
_CLOSE = 0.02

#: Maximum number listed: live values at a border, and groups of forbidden cuts.
_MOST_ALIVE = 5
_MOST_FORBIDDEN = 40


@dataclass(frozen=True, slots=True)
class Reasons:
    """The reasons for a plan, in sentences."""

    bound: str
    """The bottleneck of the job."""
    rejected: tuple[Alternative, ...]
    """Fastest first; impossible ones last. Each has its loss and the reason."""
    waves: tuple[str, ...]
    """The reasons for N."""
    cuts: tuple[str, ...]
    """The reasons for the cuts."""
    borders: tuple[BorderReasons, ...] = ()
    """The reasons for each border of stages."""
    forbidden: tuple[str, ...] = ()
    """Places where the model cannot be cut, with reasons."""


@dataclass(frozen=True, slots=True)
class BorderReasons:
    """The reasons for the end of one stage."""

    heading: str
    """`virtual worker 0, stage 0 | 1: before layer 3 (h.2)`."""
    crossing: str
    """The live values, and the bytes in each direction."""
    alternatives: tuple[str, ...]
    """Alternative borders, their bytes, and why they were not chosen."""


def reasons_of(facts: PlanFacts) -> Reasons:
    """The reasons for this plan."""
    forecast = _forecast(facts, facts.plan.waves)
    others = sorted(facts.plan.alternatives, key=lambda one: -(one.samples_per_second or -1.0))
    predicted = facts.plan.predicted.samples_per_second
    several = frozenset(one.workers[0] for one in view_of(facts).pipelines if len(one.workers) > 1)
    return Reasons(
        bound=f"{_bound(facts, forecast)} {_simulated(forecast, predicted)}",
        rejected=tuple(others),
        waves=tuple(_why_waves(facts, forecast)),
        cuts=tuple(_why_cuts(facts, forecast)),
        borders=tuple(_border(border, several) for border in facts.plan.borders),
        forbidden=tuple(f"no cut {place_text(each)}: {each.reason}" for each in facts.plan.forbidden[:_MOST_FORBIDDEN])
        + _further(len(facts.plan.forbidden) - _MOST_FORBIDDEN),
    )


def _further(left: int) -> tuple[str, ...]:
    return (f"and {left} more; --json has them",) if left > 0 else ()


def _border(border: PlannedBorder, several: Collection[int]) -> BorderReasons:
    """A border in words; `several`: the virtual workers that represent others."""
    whose = f"virtual worker {border.virtual_worker}{' and its equals' if border.virtual_worker in several else ''}"
    forward, backward = bytes_text(border.forward_bytes), bytes_text(border.backward_bytes)
    moves = f"{forward} forward ({time_text(border.forward_ms)}), {backward} back ({time_text(border.backward_ms)})"
    if border.tie_bytes:
        moves += f", of both {bytes_text(border.tie_bytes)} tied weights"
    alive = [alive_text(value) for value in sorted(border.alive, key=lambda value: -value.num_bytes)]
    more = f" and {len(alive) - _MOST_ALIVE} more" if len(alive) > _MOST_ALIVE else ""
    what = f"; alive: {', '.join(alive[:_MOST_ALIVE])}{more}" if alive else ""
    return BorderReasons(
        f"{whose}, stage {border.stage} | {border.stage + 1}: before layer {border.cut} ({border.before})",
        f"{moves}{what}",
        tuple(
            f"before layer {one.cut} ({one.before}): {bytes_text(one.forward_bytes)} forward, "
            f"{bytes_text(one.backward_bytes)} back; {one.reason}"
            for one in border.alternatives
        ),
    )


def alive_text(value: AliveValue) -> str:
    """A value that crosses the border, with its size.

    >>> alive_text(AliveValue(name="h.0:0", num_bytes=4096, has_gradient=True))
    'h.0:0 4 KiB'
    >>> alive_text(AliveValue(name="input:mask", num_bytes=4096))
    'input:mask 4 KiB (no gradient)'
    """
    return f"{value.name} {bytes_text(value.num_bytes)}{'' if value.has_gradient else ' (no gradient)'}"


@dataclass(frozen=True, slots=True)
class _Forecast:
    """The closed form for the plan's cuts under some N."""

    memory: MemoryModel
    slowest: int
    """The slowest virtual worker."""
    stages: tuple[int, ...]
    """Its stage times in ticks."""
    rate: JobRate

    @property
    def network_binds(self) -> bool:
        return self.rate.network_binds

    @property
    def longest(self) -> int:
        """The bottleneck stage."""
        return max(range(len(self.stages)), key=self.stages.__getitem__)

    @property
    def waits_for_flight(self) -> bool:
        """Whether the limit of minibatches in flight is the bottleneck, not the longest stage."""
        return minibatches_per_tick(self.stages, self.memory) * max(self.stages) < 1 - SAME


def _forecast(facts: PlanFacts, waves: Sequence[int]) -> _Forecast:
    if len(set(waves)) > 1:
        return _forecast_of_own_waves(facts, waves)
    costs, memory, minibatches_per_wave = facts.costs, facts.memory(waves[0]), waves[0]
    times = [tuple(ticks(stage.time_ms) for stage in worker.stages) for worker in facts.plan.virtual_workers]
    rates = [minibatches_per_tick(stage_ticks, memory) for stage_ticks in times]
    slowest = min(range(len(rates)), key=rates.__getitem__)
    moved = [
        bytes_moved(stages, costs=costs, placed=facts.simulated.placed, minibatches_per_wave=minibatches_per_wave)
        for stages in facts.simulated.workers
    ]
    cards = {node.name: costs.cluster.network_card(node.name) for node in costs.cluster.nodes}
    trip = round_trip(
        facts.simulated.workers,
        costs=costs,
        placed=facts.simulated.placed,
        memory=memory,
        staleness=facts.plan.staleness,
        network_cards=cards,
        pull=facts.plan.pull,
    )
    whole = job_rate(
        rates[slowest], moved, costs=costs, minibatches_per_wave=minibatches_per_wave, network_cards=cards, trip=trip
    )
    return _Forecast(memory, slowest, times[slowest], whole)


def _forecast_of_own_waves(facts: PlanFacts, waves: Sequence[int]) -> _Forecast:
    costs, memories = facts.costs, list(map(facts.memory, waves))
    times = [tuple(ticks(stage.time_ms) for stage in worker.stages) for worker in facts.plan.virtual_workers]
    rates = [minibatches_per_tick(*each) for each in zip(times, memories, strict=True)]
    slowest = min(range(len(rates)), key=lambda vw: rates[vw] / waves[vw])
    whole = rate_of_own_waves(
        facts.simulated.workers,
        rates,
        waves,
        costs=costs,
        placed=facts.simulated.placed,
        options=replace(facts.options, staleness=facts.plan.staleness, max_staleness=None),
        network_cards={node.name: costs.cluster.network_card(node.name) for node in costs.cluster.nodes},
    )
    return _Forecast(memories[slowest], slowest, times[slowest], whole)


def _bound(facts: PlanFacts, forecast: _Forecast) -> str:
    if forecast.network_binds:
        return (
            f"The network card of {forecast.rate.busiest_node} is the bottleneck: it allows "
            f"{rate(forecast.rate.network_samples_per_second)} samples/s, the stages alone "
            f"{rate(forecast.rate.compute_samples_per_second)}."
        )
    if forecast.rate.round_trip_binds:
        bound = facts.plan.staleness
        return (
            f"The round trip of weights (push, sum, publish, pull) is the bottleneck, with D = {bound} and N = "
            f"{forecast.memory.minibatches_per_wave}: it allows "
            f"{rate(forecast.rate.round_trip_samples_per_second)} samples/s, the stages alone "
            f"{rate(forecast.rate.compute_samples_per_second)}; a larger D or N raises the limit."
        )
    if forecast.waits_for_flight:
        return _flight_binds(forecast)
    index = forecast.longest
    stage = facts.plan.virtual_workers[forecast.slowest].stages[index]
    compute_ms = stage.time_ms - stage.receive_ms
    share = f", {time_text(compute_ms)} compute and {time_text(stage.receive_ms)} transfers" if stage.receive_ms else ""
    what = "its compute" if compute_ms >= stage.receive_ms else "its links"
    return (
        f"Stage {index} of virtual worker {forecast.slowest} on {stage.device} ({stage.type}) binds, by {what}: "
        f"{time_text(stage.time_ms)} per minibatch{share}."
    )


def _simulated(forecast: _Forecast, predicted: float) -> str:
    closed_form = forecast.rate.samples_per_second
    if abs(predicted / closed_form - 1) < _CLOSE:
        return f"That allows {rate(closed_form)} samples/s, and the simulation agrees."
    return (
        f"That allows {rate(closed_form)} samples/s; the simulation, in which stages send while they compute, share "
        f"links and wait for weights, gives {rate(predicted)}."
    )


def _flight_binds(forecast: _Forecast) -> str:
    n, whole_ms = forecast.memory.minibatches_per_wave, milliseconds(sum(forecast.stages))
    longest = time_text(milliseconds(max(forecast.stages)))
    if forecast.memory.policy.drains:
        return (
            f"Draining is the bottleneck: virtual worker {forecast.slowest} drains a pipeline of {time_text(whole_ms)} "
            f"after every wave of {n}; its longest stage alone, {longest}, would allow more."
        )
    k = len(forecast.stages)
    behind, held = min(
        ((sum(forecast.stages[index:]), forecast.memory.in_flight(index, k)) for index in range(k)),
        key=lambda entry: entry[1] / entry[0] if entry[0] else float("inf"),
    )
    return (
        f"The minibatches in flight are the bottleneck: virtual worker {forecast.slowest} has at most {held} in a "
        f"pipeline of {time_text(milliseconds(behind))}; its longest stage alone, {longest}, would allow more."
    )


# -- why this N ------------------------------------------------------------------------------------------------------


def _why_waves(facts: PlanFacts, forecast: _Forecast) -> list[str]:
    plan = facts.plan
    n = plan.minibatches_per_wave
    if not isinstance(n, int):
        return [_why_proportional(plan)]
    if plan.allocation == "parallel":
        v, b = len(plan.virtual_workers), facts.costs.profile.batch_size
        return [f"N = {n} gives the global batch: {count(v, 'virtual worker')} × {n} × {b} samples = {v * n * b}."]
    if facts.options.minibatches_per_wave is not None:
        sentences = [f"N = {n} was given."]
    else:
        sentences = [f"N = {n} is the smallest within 2 % of the fastest; larger waves delay weights for longer."]
    most_stages = max(len(worker.stages) for worker in plan.virtual_workers)
    step = facts.options.accumulate
    if n - step >= forecast.memory.policy.least_minibatches_per_wave(most_stages):
        sentences.append(_with_waves_of(facts, forecast, n - step))
    sentences.append(_with_waves_of(facts, forecast, n + step))
    return sentences


def _why_proportional(plan: PlanDocument) -> str:
    """The durations of the virtual workers' waves, by the closed form."""
    batch_size = plan.batch_size or 1
    lengths = [
        1000 * n * batch_size / worker.samples_per_second
        for n, worker in zip(plan.waves, plan.virtual_workers, strict=True)
    ]
    return (
        "N is in proportion to the speeds of the virtual workers, as far as whole minibatches and memory allow: their "
        f"waves take {time_text(min(lengths))} to {time_text(max(lengths))} by the closed form."
    )


def _with_waves_of(facts: PlanFacts, forecast: _Forecast, minibatches_per_wave: int) -> str:
    start = f"With these cuts N = {minibatches_per_wave}"
    shortage = _largest_shortage(facts, minibatches_per_wave)
    if shortage is not None:
        return f"{start} does not fit: {shortage}."
    there = _forecast(facts, (minibatches_per_wave,) * len(facts.plan.waves)).rate.samples_per_second
    change = there / forecast.rate.samples_per_second - 1
    by = "by the closed form"
    if abs(change) < SAME:
        return f"{start} is as fast {by}, {rate(there)} samples/s."
    gain = f"{rate(there)} samples/s {by}, {100 * abs(change):.1f} % {'more' if change > 0 else 'less'}"
    most = facts.plan.searched_minibatches_per_wave
    beyond = f"; the search stopped at {most}" if change > 0 and most and minibatches_per_wave > most else ""
    return f"{start} gives {gain}{beyond}."


def _largest_shortage(facts: PlanFacts, minibatches_per_wave: int) -> str | None:
    """The largest shortage of memory among the plan's stages under another N."""
    costs, memory = facts.costs, facts.memory(minibatches_per_wave)
    worst, sentence = 0, None
    for vw, stages in enumerate(facts.simulated.workers):
        for index, stage in enumerate(stages):
            missing = _bytes_of(stage, index, len(stages), costs, memory) - costs.memory_bytes[stage.kind]
            if missing > worst:
                worst = missing
                sentence = f"stage {index} of virtual worker {vw} would lack {bytes_text(missing)} on {stage.device}"
    return sentence


def _bytes_of(stage: SimulatedStage, index: int, num_stages: int, costs: Costs, memory: MemoryModel) -> int:
    return costs.bytes_of(stage, (index, num_stages), memory)


# -- why these cuts --------------------------------------------------------------------------------------------------


def _why_cuts(facts: PlanFacts, forecast: _Forecast) -> list[str]:
    stages = facts.simulated.workers[forecast.slowest]
    index = forecast.longest
    stage = stages[index]
    longest = time_text(milliseconds(forecast.stages[index]))
    where = f"stage {index} on {stage.device}"
    num_layers = count(stage.last - stage.first, "layer")
    sentences = [f"The longest stage of virtual worker {forecast.slowest} is {where}, {longest} for {num_layers}."]
    if len(stages) == 1:
        return [*sentences, "It is the only one, so there is no cut to move."]
    if any(set(each.memory) - {"keep"} for each in stages):
        return [*sentences, "Cuts and memory policies were searched together."]
    stages = tuple(replace(each, memory=()) for each in stages)
    if stage.last - stage.first == 1:
        return [*sentences, "A single layer cannot be cut further."]
    if index:
        sentences.append(_moved(facts, forecast, stages, _Move(index, index - 1, stage.first)))
    if index + 1 < len(stages):
        sentences.append(_moved(facts, forecast, stages, _Move(index, index + 1, stage.last - 1)))
    return sentences


@dataclass(frozen=True, slots=True)
class _Move:
    """The move of a stage's first or last layer to its neighbour."""

    source: int
    target: int
    layer: int


def _moved(facts: PlanFacts, forecast: _Forecast, stages: Sequence[SimulatedStage], move: _Move) -> str:
    changed = list(stages)
    source, target = stages[move.source], stages[move.target]
    if move.target < move.source:
        changed[move.source] = replace(source, first=move.layer + 1)
        changed[move.target] = replace(target, last=move.layer + 1)
    else:
        changed[move.source] = replace(source, last=move.layer)
        changed[move.target] = replace(target, first=move.layer)
    name = facts.costs.profile.layers[move.layer].name
    start = (
        f"With its {'first' if move.target < move.source else 'last'} layer, {name}, on stage {move.target} instead,"
    )
    needed = _bytes_of(changed[move.target], move.target, len(stages), facts.costs, forecast.memory)
    missing = needed - facts.costs.memory_bytes[target.kind]
    if missing > 0:
        return f"{start} {target.device} would lack {bytes_text(missing)}."
    times = _stage_ticks(changed, facts.costs)
    slowest = max(range(len(times)), key=times.__getitem__)
    now = f"the longest would be stage {slowest} with {time_text(milliseconds(times[slowest]))}"
    better = ", but the job no faster" if times[slowest] < max(forecast.stages) else ""
    return f"{start} {now}{better}."


def _stage_ticks(stages: Sequence[SimulatedStage], costs: Costs) -> list[int]:
    links: list[LinkSpec | None] = [
        costs.cluster.link(node_of(here.device), node_of(behind.device)) for here, behind in pairwise(stages)
    ]
    return [
        costs.computed_ticks(stage) + costs.receive_ticks(stage.first, stage.last, before, behind)
        for stage, before, behind in zip(stages, [None, *links], [*links, None], strict=True)
    ]
