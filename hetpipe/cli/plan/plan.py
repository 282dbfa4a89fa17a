"""`hetpipe plan`: the fastest plan that fits, its predicted speed, and the reasons."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, get_args

import typer

from hetpipe.cli.options import Json
from hetpipe.cli.plan.activity import active_phase_lines
from hetpipe.cli.plan.link_profiling import LinkProfileOptions, cached_links
from hetpipe.cli.plan.profile_links import links_sentences
from hetpipe.cli.plan.profile_view import ProfileView, view_for
from hetpipe.cli.plan.profiling import ProfileOptions, profile_job
from hetpipe.cli.plan.simulate import simulation_options, staleness_of
from hetpipe.decide.elastic.activation import activations_of
from hetpipe.decide.elastic.active_phases import active_phases
from hetpipe.decide.elastic.freezing import frozen_layers_of
from hetpipe.decide.lifecycle.known_cluster import KnownLinks, cluster_of, known_links, stated_links
from hetpipe.decide.lifecycle.planning import options_of
from hetpipe.decide.planner.allocation.parallel import PLANNED_POLICY
from hetpipe.decide.planner.cuts import Recompute
from hetpipe.decide.planner.optimizer_slots import slots_of
from hetpipe.decide.planner.options import SCHEDULE_CHOICES, AllocationName, PlanOptions, ScheduleChoice
from hetpipe.decide.simulator.documents import costs_of
from hetpipe.errors import UserError
from hetpipe.job.file import Job, load_job
from hetpipe.report.plan_view import PlanFacts, view_of
from hetpipe.report.text import columns, percent, rate, shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.server.agent.devices import discover_devices
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import read_document, to_plain, write_document
from hetpipe.values.fit import check_fits, read_fitting
from hetpipe.values.ids import AgentId, DeviceId
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, PlacementName, WeightPolicy
from hetpipe.values.profile import Profile
from hetpipe.values.quantities import bytes_text, time_text
from hetpipe.values.run import AgentInfo
from hetpipe.values.suggest import did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

ALLOCATIONS: Mapping[str, AllocationName] = {name: name for name in get_args(AllocationName)}
PLACEMENTS: Mapping[str, PlacementName] = {name: name for name in get_args(PlacementName)}
WEIGHTS: Mapping[str, WeightPolicy] = {name: name for name in WEIGHT_POLICIES}
SCHEDULES: Mapping[str, ScheduleChoice] = {name: name for name in SCHEDULE_CHOICES}
RECOMPUTE: Mapping[str, Recompute] = {name: name for name in get_args(Recompute)}

AUTO = "auto"
PROPORTIONAL = "proportional"

#: Optimizer state per parameter that is assumed for an unknown optimizer, the maximum of most.
_MOST_SLOTS = 2

_WORKERS_EXAMPLE = """--workers '[["n0/0", "n1/0"], ["n0/1", "n1/1"]]'"""

ChoiceT = TypeVar("ChoiceT", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compute the fastest plan that fits, and predict its speed. Assigns layers to devices, with the reasons."""

    job: Annotated[Path | None, typer.Argument(metavar="JOB", help="Job file; not needed with two files.")] = None
    profile: Annotated[Path | None, typer.Option(metavar="P.json", help="Profile.  [default: measure the job]")] = None
    cluster: Annotated[Path | None, typer.Option(metavar="C.yaml", help="Cluster.  [default: this machine]")] = None
    allocation: Annotated[
        str | None, typer.Option(metavar="NAME", help="NP, ED, HD, auto, explicit or parallel.  [default: auto]")
    ] = None
    workers: Annotated[
        str | None, typer.Option(metavar="JSON", help='Devices by virtual worker: [["n0/0", "n1/0"], …]; for explicit.')
    ] = None
    minibatches_per_wave: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto|proportional",
            help="Minibatches per wave; proportional: in proportion to the speeds.  [default: the job's, else auto]",
        ),
    ] = None
    placement: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="balanced, round_robin, ed_local, or auto: the fastest.  [default: auto]"),
    ] = None
    staleness: Annotated[
        str | None, typer.Option("--D", metavar="N|auto", help="Staleness bound, inf, or auto.  [default: 0]")
    ] = None
    max_staleness: Annotated[
        int | None, typer.Option("--max-D", min=0, metavar="N", help="The largest D that --D auto may choose.")
    ] = None
    weights: Annotated[str | None, typer.Option(metavar="POLICY", help="Weight policy.  [default: wave]")] = None
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="1f1b, fifo or gpipe.  [default: the weight policy's own]")
    ] = None
    optimizer_slots: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Tensors of optimizer state per parameter.")
    ] = None
    recompute: Annotated[
        str | None, typer.Option(metavar="auto|on|off", help="Recompute activations.  [default: auto; a job's own]")
    ] = None
    freeze: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="F", help="Frozen layers with parameters, from the first on.  [default: 0; a job's own]"
        ),
    ] = None
    max_batch: Annotated[int | None, typer.Option(min=1, metavar="B", help="Largest global batch; for parallel.")] = (
        None
    )
    shards: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Parameter-server shards.  [default: one per node in use]")
    ] = None
    reserve_bytes: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Memory of the framework on every device.  [default: measured; 0 for files]"
        ),
    ] = None
    why: Annotated[bool, typer.Option("--why", help="Explain the plan: the alternatives, N, the cuts.")] = False
    fit: Annotated[
        bool,
        typer.Option(
            "--fit", help="Show which minibatch sizes fit, how fast they are, and what is swapped or recomputed."
        ),
    ] = False
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan as an HTML page with a picture.")
    ] = None
    out: Annotated[Path | None, typer.Option(metavar="PLAN.json", help="Write the plan.")] = None
    as_json: Json = False


def run(request: Options, output: Output, shell: Shell) -> ExitStatus:
    """Plan, and print the result.

    Raises:
        UserError: options, files or the job cannot be used, or no plan fits.
    """
    check_request(request, as_json=output.machine is not None)
    job = None if request.job is None else load_job(request.job)
    planning = planner_request_of(request, job)
    known = known_of(_inputs_of(request, job), shell, partial(view_for, output, shell))
    options = completed_options(planning.options, request, job, known)
    if request.fit:
        return _fit(known.profile, known.cluster, options, output)
    planned = plan_for(known, options, job)
    document = planned.document
    remarks = [*planning.remarks, *_links_remarks(known.links, shell)]
    if request.out is not None:
        _write("--out", request.out, lambda path: write_document(document, path))
        remarks.append(f"the plan is in {shown_path(request.out.absolute(), shell.current)}")
    if request.html is not None:
        text = page_text(planned.facts)
        _write("--html", request.html, lambda path: path.write_text(text, encoding="utf-8"))
        remarks.append(f"the page is in {shown_path(request.html.absolute(), shell.current)}")
    if output.machine is None:
        # rich is slow to import, and --json does not need it
        from rich.console import Console

        show_facts(planned.facts, Console(file=output.people, highlight=False), why="full" if request.why else "brief")
    remarks += active_phase_lines(document.active_phases, document.predicted.samples_per_second)
    output.say(*remarks)
    if output.machine is not None:
        output.answer(to_plain(document))
    return ExitStatus.OK


def with_active_phases(document: PlanDocument, job: Job, known: Known) -> PlanDocument:
    """The plan with its speed while not all layers of the job are active, if they ever are not.

    Raises:
        PlanError: the job names a layer that the profile does not have.
    """
    activations = activations_of(job, [layer.name for layer in known.profile.layers])
    how = simulation_options(document, staleness=document.staleness, stragglers={})
    phases = active_phases(document, known.profile, known.cluster, how, activations, recut=job.elastic.recut)
    return document.model_copy(update={"active_phases": phases})


def completed_options(options: PlanOptions, request: Options, job: Job | None, known: Known) -> PlanOptions:
    """The options of the planner with what depends on the profile: the memory of the framework and frozen layers.

    Raises:
        UserError: the model has too few layers with parameters to freeze that many.
    """
    if request.reserve_bytes is None:
        options = replace(options, reserve_bytes=known.reserve_bytes)
    frozen = request.freeze if request.freeze is not None or job is None else job.freeze.layers
    if not frozen:
        return options
    option = "--freeze" if request.freeze else "freeze.layers"
    return replace(options, frozen_layers=frozen_layers_of(known.profile, frozen, option))


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what explains it."""

    document: PlanDocument
    """With the origin of the links' speeds, and the phases in which not all layers of the job are active."""
    facts: PlanFacts


def plan_for(known: Known, options: PlanOptions, job: Job | None) -> Planned:
    """The fastest plan that fits.

    Raises:
        UserError: there is none, or the job names a layer that the profile does not have.
    """
    # slow to import
    from hetpipe.decide.planner.choose import choose_plan
    from hetpipe.decide.simulator.prediction import predicted

    document = choose_plan(known.profile, known.cluster, options, predict=predicted)
    facts = PlanFacts(document, costs_of(document, known.profile, known.cluster), options)
    document = known.links.noted_in(document, known.cluster)
    return Planned(document if job is None else with_active_phases(document, job, known), facts)


def _fit(profile: Profile, cluster: Cluster, options: PlanOptions, output: Output) -> ExitStatus:
    """Print minibatch sizes that fit and the first ones that do not."""
    # slow to import
    from hetpipe.decide.planner.batch_sizes import batch_sizes

    rows = batch_sizes(profile, cluster, options)
    head = ("samples per minibatch", "samples/s", "fullest device", "swapped", "recomputed")
    lines = [
        (
            str(row.batch_size),
            "does not fit" if row.samples_per_second is None else rate(row.samples_per_second),
            "" if row.fullest is None else percent(row.fullest),
            bytes_text(row.swapped_bytes) if row.swapped_bytes else "-",
            time_text(row.recomputed_ms) if row.recomputed_ms else "-",
        )
        for row in rows
    ]
    first_unfit = next((row for row in rows if row.samples_per_second is None), None)
    remarks = [] if first_unfit is None else [f"{first_unfit.batch_size} samples: {first_unfit.reason}"]
    output.answer({"batch_sizes": [asdict(row) for row in rows]}, *columns([head, *lines]), *remarks)
    return ExitStatus.OK


def _links_remarks(links: KnownLinks, shell: Shell) -> tuple[str, ...]:
    """The origin of link speeds, unless the user's cluster file states them."""
    return () if links.sources == ("stated",) else links_sentences(links, shell.clock.wall())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """The inputs of a plan: a job, or a profile and a cluster, or all of them."""

    job: Job | None = None
    profile: Profile | None = None
    cluster: Cluster | None = None
    cluster_name: str = "cluster"
    """Origin of the cluster, for messages."""


def _inputs_of(request: Options, job: Job | None) -> PlanInputs:
    """Read the files."""
    name = "cluster" if request.cluster is None else str(request.cluster)
    if request.profile is not None and request.cluster is not None:
        profile, cluster = read_fitting(request.profile, request.cluster)
        return PlanInputs(job=job, profile=profile, cluster=cluster, cluster_name=name)
    return PlanInputs(
        job=job,
        profile=None if request.profile is None else read_document(Profile, request.profile),
        cluster=None if request.cluster is None else read_document(Cluster, request.cluster),
        cluster_name=name,
    )


@dataclass(frozen=True, slots=True)
class Known:
    """The inputs of planning."""

    profile: Profile
    cluster: Cluster
    links: KnownLinks
    """Source of the cluster's links."""
    reserve_bytes: int = 0
    """Memory of the framework on every device; 0 if nothing was measured."""


def known_of(inputs: PlanInputs, shell: Shell, view: Callable[[], ProfileView]) -> Known:
    """The profile and the cluster to plan with.

    Given ones take precedence over those of the job, and these over this machine and a measurement.

    Args:
        inputs: a job, or a profile and a cluster.
        shell: the command's environment.
        view: makes the display of a measurement.

    Raises:
        UserError: they do not fit each other, or the job.
        HetpipeError: the measurement failed.
    """
    if inputs.cluster is not None:
        cluster, links = inputs.cluster, _stated(inputs.cluster)
    else:
        cluster, links = _cluster_of(_required(inputs.job), shell)
    if inputs.profile is not None:
        known = Known(inputs.profile, cluster, links)
    else:
        known = _with_profile(_required(inputs.job), cluster, links, shell, view)
    check_fits(known.profile, cluster, cluster_name=inputs.cluster_name)
    if inputs.job is not None:
        _check_measured_for(inputs.job, known.profile)
    return known


def _required(job: Job | None) -> Job:
    assert job is not None, "a job, or a profile and a cluster"
    return job


def _stated(cluster: Cluster) -> KnownLinks:
    return stated_links(cluster.links, [node.name for node in cluster.nodes])


def _check_measured_for(job: Job, profile: Profile) -> None:
    if profile.batch_size != job.batch_size:
        raise UserError(
            f"the profile has minibatches of {profile.batch_size} samples, the job has {job.batch_size}; "
            f"profile again, or set batch_size: {profile.batch_size}"
        )
    if profile.precision != job.precision:
        raise UserError(
            f"the profile was measured in {profile.precision}, the job computes in {job.precision}; profile "
            f"again, or set precision: {profile.precision}"
        )


def _cluster_of(job: Job, shell: Shell) -> tuple[Cluster, KnownLinks]:
    """The job's cluster, or else this machine, and the source of its links."""
    if job.cluster.file is not None:
        return job.cluster.file, _stated(job.cluster.file)
    # Like a run.
    node = socket.gethostname()
    devices = discover_devices(node)
    measured = cached_links(LinkProfileOptions(node=node, devices=devices), shell)
    known = known_links([node], measured, now=shell.clock.wall())
    return cluster_of([AgentInfo(AgentId(node), node, os.getpid(), devices)], known.links), known


def _with_profile(
    job: Job, cluster: Cluster, links: KnownLinks, shell: Shell, view: Callable[[], ProfileView]
) -> Known:
    if job.cluster.profile is not None:
        return Known(job.cluster.profile, cluster, links)
    types = tuple(dict.fromkeys(cluster.devices.values()))
    with view() as shown:
        profiled = profile_job(job, ProfileOptions(types=types), shell, shown.show)
    return Known(profiled.profile, cluster, links, profiled.reserve_bytes)


def _write(option: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; give {option} a file in a folder that exists"
        ) from error


def page_text(facts: PlanFacts) -> str:
    """A plan as an HTML page."""
    from hetpipe.report.plan_page import page_of, picture_of
    from hetpipe.report.plan_reasons import reasons_of

    return page_of(view_of(facts), reasons_of(facts), picture_of(facts))


def show_facts(facts: PlanFacts, console: Console, *, why: Literal["brief", "full"]) -> None:
    """Print a plan as text."""
    from hetpipe.report.plan_reasons import reasons_of
    from hetpipe.report.plan_screen import show_plan

    show_plan(view_of(facts), reasons_of(facts), console, why=why)


# -- the request to the planner ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannerRequest:
    """A request to the planner, and remarks for the user about its interpretation."""

    options: PlanOptions
    remarks: tuple[str, ...]


def check_request(request: Options, *, as_json: bool) -> None:
    """Reject options that contradict each other.

    Raises:
        UserError: naming the fix.
    """
    if request.job is None:
        absent = [name for name in ("profile", "cluster") if getattr(request, name) is None]
        if len(absent) > 1:
            raise UserError("there is nothing to plan; name a job file, or give --profile and --cluster")
        if absent:
            given = "cluster" if absent == ["profile"] else "profile"
            raise UserError(f"--{given} is given without --{absent[0]}; give both, or name a job file")
    if request.why and as_json:
        raise UserError("--json already includes every alternative with its reason; leave out --why")
    if (request.staleness == AUTO) != (request.max_staleness is not None):
        raise UserError(
            "--D auto and --max-D must be used together; give for example --D auto --max-D 8, or one number with --D"
        )
    if request.fit and (request.why or request.out or request.html or request.allocation == "parallel"):
        raise UserError(
            "--fit plans many minibatch sizes; leave out --why, --out, --html and --allocation parallel, and plan the "
            "size of your choice without --fit"
        )
    _check_belongs("--workers", request.workers, "explicit", request.allocation)
    _check_belongs("--max-batch", request.max_batch, "parallel", request.allocation)
    if request.allocation == "explicit" and request.workers is None:
        raise UserError(f"--allocation explicit needs the devices of each virtual worker: {_WORKERS_EXAMPLE}")
    if request.allocation == "parallel" and request.max_batch is None:
        raise UserError("--allocation parallel needs --max-batch: the largest global batch with acceptable convergence")


def _check_belongs(option: str, value: object, allocation: str, asked: str | None) -> None:
    if value is not None and asked != allocation:
        fix = f"add --allocation {allocation}" if asked is None else f"leave it out, or give {allocation}"
        raise UserError(f"{option} is for --allocation {allocation}{f', not {asked}' if asked else ''}; {fix}")


def planner_request_of(request: Options, job: Job | None) -> PlannerRequest:
    """The request to the planner: from the options, else the job, else the defaults.

    Raises:
        UserError: an option is malformed, or the job cannot be predicted.
    """
    if job is not None and job.sync.traits.averages_gradients:
        raise UserError(
            f"the planner does not predict the time of averaging gradients, and `sync: {job.sync.kind}` requires equal "
            "cuts, which are not planned; plan it with `sync: bsp`, which synchronizes weights as often"
        )
    given = request.minibatches_per_wave
    _check_waves(request, job)
    remarks: tuple[str, ...] = ()
    slots = request.optimizer_slots
    if job is not None and slots is None and slots_of(job.optimizer, job.weights) is None:
        slots = _MOST_SLOTS
        assumed = f"planned for {slots} tensors of the parameters' size; give --optimizer-slots for another number"
        remarks = (f"the state of {job.optimizer.name} is unknown; {assumed}",)
    base = PlanOptions(optimizer_slots=slots or 0) if job is None else options_of(job, slots=slots)
    if request.shards is not None and not base.with_shards:
        raise UserError("--shards is for parameter servers, which the job does not use; leave it out")
    if request.allocation == "parallel":
        # PipeDream-2BW's planner, which chooses N itself
        base = replace(_with_weights(PLANNED_POLICY, base), minibatches_per_wave=None, proportional=False)
    base = _with_weights(_choice("--weights", request.weights, WEIGHTS, base.weights), base)
    workers = base.workers if request.allocation is None else None
    options = replace(
        base,
        allocation=_choice("--allocation", request.allocation, ALLOCATIONS, base.allocation),
        workers=workers if request.workers is None else workers_of(request.workers),
        minibatches_per_wave=_minibatches_of(request.minibatches_per_wave, base.minibatches_per_wave),
        proportional=base.proportional if given is None else given == PROPORTIONAL,
        placement=_placement_of(request.placement, base.placement),
        staleness=base.staleness if request.staleness in (None, AUTO) else staleness_of(str(request.staleness)),
        max_staleness=request.max_staleness if request.staleness == AUTO else base.max_staleness,
        schedule=_choice("--schedule", request.schedule, SCHEDULES, base.schedule),
        recompute=_choice("--recompute", request.recompute, RECOMPUTE, base.recompute),
        reserve_bytes=request.reserve_bytes or 0,
        num_shards=base.num_shards if request.shards is None else request.shards,
        max_batch=request.max_batch,
    )
    return PlannerRequest(options, remarks)


def _check_waves(request: Options, job: Job | None) -> None:
    """Reject waves that are not possible in any plan."""
    given = request.minibatches_per_wave
    if given is None and job is not None and isinstance(job.sync.minibatches_per_wave, tuple):
        raise UserError(
            "sync.minibatches_per_wave has one number for each virtual worker of the job, but a plan defines new ones; "
            "give --minibatches-per-wave proportional, auto, or one number"
        )
    if given != PROPORTIONAL:
        return
    if request.allocation == "parallel":
        raise UserError(
            "--allocation parallel has equal virtual workers, whose waves take equally long; leave out "
            "--minibatches-per-wave proportional"
        )
    if job is not None and not job.has_shards:
        raise UserError(
            "--minibatches-per-wave proportional is for several virtual workers with parameter servers, which the job "
            "does not use; leave it out"
        )


def _with_weights(weights: WeightPolicy, base: PlanOptions) -> PlanOptions:
    """The options under a weight policy, which determines the schedule and possibly the accumulation."""
    if weights == base.weights:
        return base
    accumulate = 1 if POLICIES[weights].one_update_per_wave else base.accumulate
    return replace(base, weights=weights, schedule="auto", accumulate=accumulate)


def workers_of(text: str) -> tuple[tuple[DeviceId, ...], ...]:
    """Parse the value of `--workers`.

    Raises:
        UserError: it is not a JSON list of lists of device names.

    >>> workers_of('[["n0/0", "n1/0"], ["n0/1"]]')
    (('n0/0', 'n1/0'), ('n0/1',))
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"--workers is not JSON ({error}); give for example {_WORKERS_EXAMPLE}") from None
    match value:
        case [[*_], *_] if all(isinstance(name, str) for names in value for name in _entries(names)):
            return tuple(tuple(map(DeviceId, names)) for names in value)
        case _:
            raise UserError(f"--workers is a list of lists of device names, not {text}; for example {_WORKERS_EXAMPLE}")


def _entries(names: object) -> list[object]:
    return names if isinstance(names, list) else [None]


def _placement_of(text: str | None, default: PlacementName | None) -> PlacementName | None:
    if text is None or text == AUTO:
        return default if text is None else None
    return _choice("--placement", text, PLACEMENTS, "balanced")


def _minibatches_of(text: str | None, default: int | None) -> int | None:
    if text is None:
        return default
    if text in (AUTO, PROPORTIONAL):
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--minibatches-per-wave is {text!r}; give a whole number from 1 on, auto or proportional")
    return int(text)


def _choice(option: str, text: str | None, choices: Mapping[str, ChoiceT], default: ChoiceT) -> ChoiceT:
    if text is None:
        return default
    if text not in choices:
        raise UserError(f"{option} {text!r} is unknown; {did_you_mean(text, choices)}")
    return choices[text]
