"""`hetpipe simulate`: run a plan in simulated time; throughput and waiting times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from hetpipe.cli.options import Json
from hetpipe.cli.plan.activity import activation_of, active_phase_lines, in_order
from hetpipe.cli.plan.simulated_trace import write_trace
from hetpipe.decide.elastic.active_phases import active_phases
from hetpipe.decide.elastic.compressing import Compressed, planned_for_freezing
from hetpipe.decide.elastic.freezing import frozen_layers_of
from hetpipe.decide.lifecycle.planning import cuts_at
from hetpipe.decide.planner.simulation_length import steady_waves
from hetpipe.decide.simulator.documents import (
    costs_of,
    frozen_plan,
    schedule_in,
    simulated_plan,
    weight_policy,
    with_lineup,
)
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.plan import SimulatedPlan
from hetpipe.decide.simulator.result import Phase, SimulationResult
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.decide.sync.division import mean_minibatches, shares
from hetpipe.errors import UserError
from hetpipe.report.text import columns, count, duration, percent, rate, shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import read_document
from hetpipe.values.fit import read_fitting
from hetpipe.values.freezing import FreezeLineup, lineup_for
from hetpipe.values.ids import DeviceId
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile
from hetpipe.values.quantities import bytes_text
from hetpipe.values.suggest import join_names

#: Number of activities in a trace above which viewers are slow.
_LARGE_TRACE = 500_000

#: Maximum number of virtual workers listed individually.
_MOST_SHOWN = 16

_BAR = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Run a plan in simulated time. Prints the predicted throughput and waiting times; nothing is trained."""

    plan: Annotated[Path, typer.Option(metavar="PLAN.json", help="Plan file.")]
    profile: Annotated[Path, typer.Option(metavar="P.json", help="Profile of the model.")]
    cluster: Annotated[Path, typer.Option(metavar="C.yaml", help="Cluster file.")]
    staleness: Annotated[
        str | None, typer.Option("--D", metavar="N", help="Staleness bound, or inf.  [default: the plan's]")
    ] = None
    minibatches: Annotated[
        int | None, typer.Option(metavar="N", help="Minibatches of each virtual worker.  [default: 64 waves or more]")
    ] = None
    jitter_cv: Annotated[
        float,
        typer.Option(
            "--jitter", metavar="CV", help="Coefficient of variation of computing times: standard deviation over mean."
        ),
    ] = 0.0
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the variation.")] = 0
    stragglers: Annotated[
        tuple[str, ...],
        typer.Option("--straggler", metavar="DEVICE=FACTOR", help="Slow a device down by a factor. Repeatable."),
    ] = ()
    freeze: Annotated[
        tuple[str, ...],
        typer.Option(metavar="CLOCK=F", help="From this clock on F layers with parameters are frozen. Repeatable."),
    ] = ()
    active: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="CLOCK=LAYERS",
            help="From this clock on only these layers are active: numbers, names or patterns. Repeatable.",
        ),
    ] = ()
    recut: Annotated[
        bool,
        typer.Option("--recut", help="With --freeze or --active: layers move as under freeze.recut or elastic.recut."),
    ] = False
    compress: Annotated[
        bool, typer.Option("--compress", help="With --freeze: pipelines are compressed as under freeze.compress.")
    ] = False
    cache: Annotated[
        bool, typer.Option("--cache", help="With --freeze: frozen layers are read from a cache, as under freeze.cache.")
    ] = False
    optimizer_slots: Annotated[
        int, typer.Option(min=0, metavar="N", help="With --compress: tensors of optimizer state per parameter.")
    ] = 0
    no_contention: Annotated[bool, typer.Option("--no-contention", help="Simulate transfers without contention.")] = (
        False
    )
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
    ] = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Simulate, and print the result.

    Raises:
        UserError: a file or an option cannot be used.
    """
    document = read_document(PlanDocument, options.plan)
    profile, cluster = read_fitting(options.profile, options.cluster)
    how = simulation_options(
        document,
        staleness=document.staleness if options.staleness is None else staleness_of(options.staleness),
        minibatches=options.minibatches,
        jitter_cv=options.jitter_cv,
        seed=options.seed,
        stragglers=dict(map(straggler_of, options.stragglers)),
        contention=not options.no_contention,
    )
    costs = costs_of(document, profile, cluster)
    plan = simulated_plan(document, costs)
    result = simulate(plan, costs, how, with_activities=options.trace is not None)
    changes = None
    check_alone(freezes=bool(options.freeze or options.compress or options.cache), activates=bool(options.active))
    if (options.recut or options.compress or options.cache) and not (options.freeze or options.active):
        raise UserError("--recut, --compress and --cache say what happens where layers freeze; give --freeze CLOCK=F")
    if (options.recut or options.compress) and not options.active:
        changes = planned_for_freezing(
            document,
            profile,
            cluster,
            compress=options.compress,
            optimizer_slots=options.optimizer_slots,
            is_cached=options.cache,
        )
    freezes = list(map(freeze_of, options.freeze))
    phases = phases_of(freezes, document, profile, cluster, how, changes=changes, is_cached=options.cache)
    active = active_phases(
        document,
        profile,
        cluster,
        how,
        in_order([activation_of(given, profile) for given in options.active]),
        recut=options.recut,
    )
    remarks: list[str] = []
    if costs.profile.batch_size != profile.batch_size:
        remarks.append(
            f"the plan's minibatches have {count(costs.profile.batch_size, 'sample')}, the profile's "
            f"{profile.batch_size}: times and bytes are scaled in proportion"
        )
    if options.trace is not None:
        _write_trace(result, options.trace)
        remarks.append(f"trace in {shown_path(options.trace.absolute(), shell.current)}; open it at ui.perfetto.dev")
        if len(result.activities) > _LARGE_TRACE:
            remarks.append(f"it has {len(result.activities)} activities; give fewer --minibatches for a smaller one")
    output.say(*remarks)
    told = to_json(result) | ({"phases": [asdict(phase) for phase in phases]} if phases else {})
    told |= {"active_phases": [phase.model_dump(mode="json") for phase in active]} if active else {}
    output.answer(
        told,
        *lines(result, plan, how),
        *phase_lines(phases, changes=changes is not None),
        *active_phase_lines(active, result.samples_per_second),
    )
    return ExitStatus.OK


def check_alone(*, freezes: bool, activates: bool) -> None:
    """Refuse a run whose layers freeze and whose active layers change.

    Raises:
        UserError: it does both.
    """
    if freezes and activates:
        raise UserError("frozen layers and inactive ones are not combined; give --freeze or --active")


def phases_of(
    freezes: Sequence[tuple[int, int]],
    document: PlanDocument,
    profile: Profile,
    cluster: Cluster,
    how: SimulationOptions,
    *,
    changes: Compressed | None = None,
    is_cached: bool = False,
) -> tuple[Phase, ...]:
    """The phases of a run whose layers freeze at given clocks, in order; the first one begins at clock 0.

    Args:
        freezes: clocks and F from there on; none: no phases.
        document: the plan, without them.
        profile: of the model.
        cluster: with the plan's devices.
        how: the simulation without them.
        changes: cuts and virtual workers for each F; None: those of the plan stay.
        is_cached: whether what enters the layer behind frozen ones is read from a cache.

    Raises:
        UserError: the clocks are not in order, or at or behind the end of the run, or F does not grow.
    """
    if not freezes:
        return ()
    waves = -(-how.minibatches // round(sum(document.waves) / len(document.waves)))
    steps = [(0, 0), *freezes]
    if any(a[0] > b[0] or a[1] >= b[1] for a, b in pairwise(steps)) or steps[-1][0] >= waves:
        raise UserError(
            f"--freeze is {', '.join(f'{clock}={frozen}' for clock, frozen in freezes)}; give clocks in order, below "
            f"the end of the run at {waves}, each with more layers than the one before"
        )
    found = []
    for (clock, frozen, before), end in _in_force(steps, waves, () if changes is None else changes.lineups):
        layers = frozen_layers_of(profile, frozen, "--freeze")
        plan, costs = frozen_plan(document, profile, cluster, layers, is_cached=is_cached)
        if changes is not None and layers != document.frozen_layers:  # for those it is made
            lineup = lineup_for(changes.lineups, before)
            bounds = cuts_at(frozen, () if lineup is None else changes.workers, changes.cuts)
            plan = with_lineup(plan, lineup, bounds)
        minibatches = mean_minibatches(end - clock, plan.minibatches_per_wave)
        samples = sum(shares(minibatches, plan.minibatches_per_wave)) * costs.profile.batch_size
        seconds = simulate(plan, costs, replace(how, minibatches=minibatches)).seconds
        found.append(Phase(clock, frozen, layers, samples / seconds, seconds, tuple(map(len, plan.workers))))
    return tuple(found)


def _in_force(
    steps: Sequence[tuple[int, int]], waves: int, lineups: Sequence[FreezeLineup]
) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Clock, F, and the F whose lineup trains from there on, with the clock of the next one.

    A lineup begins one clock after the barrier at which F grows.
    """
    whose = 0
    for (clock, frozen), end in zip(steps, [*(clock for clock, _ in steps[1:]), waves], strict=True):
        changes = lineup_for(lineups, frozen) is not lineup_for(lineups, whose)
        middle = min(clock + 1, end) if changes else end
        if clock < middle:  # otherwise frozen from the start
            yield (clock, frozen, whose), middle
        whose = frozen
        if middle < end:
            yield (middle, frozen, whose), end


def phase_lines(phases: Sequence[Phase], *, changes: bool = False) -> list[str]:
    """The phases as text for people.

    Args:
        phases: in order.
        changes: whether cuts, or virtual workers, change with F.
    """
    if not phases:
        return []
    whole = sum(phase.seconds for phase in phases)
    samples = sum(phase.seconds * phase.samples_per_second for phase in phases)
    rows = [
        [
            str(phase.clock),
            str(phase.frozen),
            str(phase.layers),
            _pipelines(phase.stages),
            rate(phase.samples_per_second),
            duration(phase.seconds),
        ]
        for phase in phases
    ]
    head = ["from clock", "F", "frozen layers", "virtual workers", "samples/s", "time"]
    together = f"together {rate(samples / whole)} samples/s in {duration(whole)}"
    stays = "pipelines and cuts are those of the plan all the time; --recut and --compress change them"
    return ["", *columns([head, *rows]), together, *([] if changes else [stays])]


def _pipelines(stages: Sequence[int]) -> str:
    """How many virtual workers there are, and of how many stages.

    >>> _pipelines([2, 2]), _pipelines([2, 1])
    ('2 × 2 stages', '2, of 2 and 1 stages')
    """
    if len(set(stages)) == 1:
        return f"{len(stages)} × {count(stages[0], 'stage')}"
    return f"{len(stages)}, of {join_names(map(str, stages), 'and')} stages"


def freeze_of(text: str) -> tuple[int, int]:
    """Parse the value of a `--freeze`.

    Raises:
        UserError: it is not `CLOCK=F`.

    >>> freeze_of("40=2")
    (40, 2)
    """
    clock, _, frozen = text.partition("=")
    if not (clock.isdecimal() and frozen.isdecimal() and int(frozen) > 0):
        raise UserError(f"--freeze is {text!r}; give a clock and a number of layers, for example 40=2")
    return int(clock), int(frozen)


def simulation_options(
    document: PlanDocument,
    *,
    staleness: int | None,
    minibatches: int | None = None,
    jitter_cv: float = 0.0,
    seed: int = 0,
    stragglers: Mapping[DeviceId, float],
    contention: bool = True,
) -> SimulationOptions:
    """The simulation of a plan as it would be trained; `minibatches`, None: enough for a steady state."""
    steady = mean_minibatches(steady_waves(staleness), document.waves)
    return SimulationOptions(
        staleness=staleness,
        pull=document.pull,
        minibatches=steady if minibatches is None else minibatches,
        weights=weight_policy(document.weights),
        schedule=schedule_in(document),
        jitter_cv=jitter_cv,
        seed=seed,
        stragglers=stragglers,
        staggered=True,
        contention=contention,
    )


def staleness_of(text: str) -> int | None:
    """Parse the value of `--D`; None: no bound.

    Raises:
        UserError: it is neither a number nor `inf`.

    >>> staleness_of("4"), staleness_of("inf")
    (4, None)
    """
    if text == "inf":
        return None
    if not text.isdecimal():
        raise UserError(f"--D is {text!r}; give a whole number of waves, or inf for no bound")
    return int(text)


def straggler_of(text: str) -> tuple[DeviceId, float]:
    """Parse the value of a `--straggler`.

    Raises:
        UserError: it is not `DEVICE=FACTOR`.

    >>> straggler_of("n0/1=2.5")
    ('n0/1', 2.5)
    """
    device, _, factor = text.partition("=")
    try:
        return DeviceId(device), float(factor)
    except ValueError:
        raise UserError(f"--straggler is {text!r}; give a device and its slowdown factor, for example n0/1=2") from None


def to_json(result: SimulationResult) -> dict[str, Any]:
    """The object of `--json`."""
    return {
        "samples_per_second": result.samples_per_second,
        "waiting_seconds": {str(vw): seconds for vw, seconds in enumerate(result.waiting_seconds)},
        "idle_seconds": {str(vw): seconds for vw, seconds in enumerate(result.idle_seconds)},
        "max_clock_distance": result.max_clock_distance,
        "cross_node_bytes_per_minibatch": result.cross_node_bytes_per_minibatch,
        "utilisation": dict(result.utilisation),
    }


def lines(result: SimulationResult, plan: SimulatedPlan, how: SimulationOptions) -> list[str]:
    """A simulation as text for people."""
    each, waves = f"{how.minibatches} minibatches of each virtual worker", plan.minibatches_per_wave
    per_wave = str(waves[0])
    if len(set(waves)) > 1:
        each = f"{sum(shares(how.minibatches, waves))} minibatches of all virtual workers"
        per_wave = f"{join_names(map(str, waves), 'and')} (virtual workers in order)"
    bound = "no bound" if how.staleness is None else f"D = {how.staleness}"
    if not plan.placed.shards:
        bound = "without parameter servers"
    return [
        f"{rate(result.samples_per_second)} samples/s in the steady state, {bound}",
        f"{duration(result.seconds)} simulated: {each}, {per_wave} per wave",
        "",
        *columns([["vw", "stage", "device", "type", "busy", ""], *_stage_rows(result, plan)]),
        "",
        *columns([["vw", "waiting", "idle"], *_worker_rows(result)]),
        *_rest(len(plan.workers)),
        "",
        f"most waves ahead: {result.max_clock_distance}; own waves beyond the published clock in use, by minibatches: "
        + ", ".join(f"{distance}: {number}" for distance, number in result.clock_distance_histogram.items()),
        f"between nodes: {bytes_text(result.cross_node_bytes_per_minibatch)} per minibatch",
    ]


def _stage_rows(result: SimulationResult, plan: SimulatedPlan) -> Iterator[Sequence[str]]:
    for vw, stages in enumerate(plan.workers[:_MOST_SHOWN]):
        for index, stage in enumerate(stages):
            busy = result.utilisation[stage.device]
            bar = "█" * round(_BAR * busy)
            yield [str(vw) if index == 0 else "", str(index), stage.device, stage.kind, percent(busy), bar]


def _worker_rows(result: SimulationResult) -> Iterator[Sequence[str]]:
    for vw, (waiting, idle) in enumerate(zip(result.waiting_seconds, result.idle_seconds, strict=True)):
        if vw < _MOST_SHOWN:
            yield [str(vw), *(f"{duration(part)}, {percent(part / result.seconds)}" for part in (waiting, idle))]


def _rest(num_workers: int) -> list[str]:
    hidden = num_workers - _MOST_SHOWN
    return [f"and {count(hidden, 'more virtual worker')}; --json has them all"] if hidden > 0 else []


def _write_trace(result: SimulationResult, out: Path) -> None:
    try:
        write_trace(result.activities, out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; give --trace a file in a folder that exists") from error
