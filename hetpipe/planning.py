"""`hetpipe.profile`, `hetpipe.plan` and `hetpipe.simulate`: how fast a job would train, from a Python program."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from hetpipe.cli.plan import plan as command
from hetpipe.cli.plan.activity import activation_at, active_phase_lines
from hetpipe.cli.plan.profiling import ProfileOptions, profile_job
from hetpipe.cli.plan.simulate import check_alone, phases_of, simulation_options
from hetpipe.decide.elastic.active_phases import active_phases
from hetpipe.decide.elastic.compressing import planned_for_freezing
from hetpipe.decide.planner.cuts import Recompute
from hetpipe.decide.planner.options import AllocationName, ScheduleChoice
from hetpipe.decide.simulator.documents import costs_of, simulated_plan
from hetpipe.decide.simulator.result import SimulationResult
from hetpipe.errors import UserError
from hetpipe.runs.requests import JobSource, given_job
from hetpipe.runs.shell import Shell
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import DocumentT, read_document, write_document
from hetpipe.values.fit import check_fits
from hetpipe.values.ids import DeviceId
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.policies import PlacementName, WeightPolicy
from hetpipe.values.profile import Profile

#: Called before each layer is measured.
OnStep = Callable[[ProfileStep], None]

#: An option of a command within a sentence.
_OPTION = re.compile(r"(?<![\w-])--([A-Za-z][A-Za-z-]*)")

#: Options whose keyword has another name.
_KEYWORDS = {"D": "staleness", "max-D": "max_staleness", "workers": "devices"}

_COLUMNS = 120


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan and what it was made from. `print(plan)` shows what `hetpipe plan` does."""

    planned: command.Planned
    profile: Profile
    cluster: Cluster
    remarks: tuple[str, ...] = ()
    """What was assumed."""

    @property
    def document(self) -> PlanDocument:
        """Layers, devices and virtual workers, predictions, and alternatives with the reasons why they are slower."""
        return self.planned.document

    @property
    def samples_per_second(self) -> float:
        """The predicted throughput of all virtual workers together."""
        return self.document.predicted.samples_per_second

    def __str__(self) -> str:
        """The plan as text, with the bottleneck."""
        return self.text()

    def text(self, *, why: Literal["brief", "full"] = "brief") -> str:
        """The plan as text; `full`: with every reason (`hetpipe plan --why`)."""
        from rich.console import Console  # slow to import

        found = StringIO()
        # As plain text also in notebooks, which rich would take for a terminal with colours.
        console = Console(file=found, width=_COLUMNS, highlight=False, color_system=None, force_jupyter=False)
        command.show_facts(self.planned.facts, console, why=why)
        phases = active_phase_lines(self.document.active_phases, self.samples_per_second)
        return "\n".join([found.getvalue().rstrip("\n"), *phases])

    def html(self) -> str:
        """The plan as a page with a picture of its pipelines."""
        return command.page_text(self.planned.facts)

    def write(self, folder: str | Path) -> None:
        """Write `plan.json`, `profile.json` and `cluster.yaml` into `folder`, made if necessary.

        Raises:
            UserError: it cannot be written to.
        """
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_document(self.document, path / "plan.json")
            write_document(self.profile, path / "profile.json")
            write_document(self.cluster, path / "cluster.yaml")
        except OSError as error:
            raise UserError(f"cannot write to {path}: {error.strerror}; name another folder") from error


def profile(
    job: JobSource | None = None,
    *,
    types: Sequence[str] = (),
    fresh: bool = False,
    repeats: int | None = None,
    on_step: OnStep | None = None,
    **overrides: object,
) -> Profile:
    """Measure every layer of a job's model on each type of device of this machine, as `hetpipe profile` does.

    Measurements are cached until the model, the data or the software change. User code runs in another process.

    Args:
        job: a job file, a mapping with its content, or a `Job`; may be given by keys alone (`hetpipe.train`).
        types: more types of devices, estimated by the catalogue if this machine has none; `cpu` measures the CPU too.
        fresh: ignore the cache.
        repeats: measurements per layer; None: until the medians are stable.
        on_step: called before each layer is measured, in this thread.
        overrides: keys of the job, or those of `job` to change.

    Raises:
        UserError: the job, something it refers to, or a type is invalid.
        JobFailed: the process that measures died.
    """
    wish = ProfileOptions(types=tuple(types), fresh=fresh, repeats=repeats)
    with given_job(job, overrides, Shell()) as (loaded, shell):
        return profile_job(loaded, wish, shell, on_step or _ignored).profile


def plan(  # noqa: PLR0913 - the options of the command
    job: JobSource | None = None,
    *,
    profile: Profile | str | Path | None = None,
    cluster: Cluster | str | Path | Mapping[str, object] | None = None,
    allocation: AllocationName | None = None,
    devices: Sequence[Sequence[str]] | None = None,
    minibatches_per_wave: int | Literal["auto", "proportional"] | None = None,
    placement: PlacementName | Literal["auto"] | None = None,
    staleness: int | Literal["auto", "inf"] | None = None,
    max_staleness: int | None = None,
    weights: WeightPolicy | None = None,
    schedule: ScheduleChoice | None = None,
    optimizer_slots: int | None = None,
    recompute: Recompute | None = None,
    freeze: int | Mapping[str, object] | None = None,
    max_batch: int | None = None,
    shards: int | None = None,
    reserve_bytes: int | None = None,
    on_step: OnStep | None = None,
    **overrides: object,
) -> Plan:
    """The fastest plan that fits, as `hetpipe plan` makes it; nothing is trained.

    A job is measured first, on this machine, unless a profile is given; with a profile and a cluster no job is needed.

    Args:
        job: a job file, a mapping with its content, or a `Job`; may be given by keys alone (`hetpipe.train`).
        profile: of the model, or its file; default: a measurement.
        cluster: to plan for, or its file; a mapping is the job's section `cluster`; default: the job's, or else this
            machine.
        allocation: how devices are divided among virtual workers; default: the fastest.
        devices: those of each virtual worker, for `allocation="explicit"`.
        minibatches_per_wave: N.
        placement: of parameters on shards.
        staleness: D; `auto`: the fastest of at most `max_staleness`.
        max_staleness: for `staleness="auto"`.
        weights: weight policy.
        schedule: order of forwards and backwards.
        optimizer_slots: tensors of optimizer state per parameter.
        recompute: whether activations are computed again.
        freeze: F, the number of frozen layers with parameters, from the first on; a mapping is the job's section
            `freeze`; default: `freeze.layers` of the job.
        max_batch: the largest global batch, for `allocation="parallel"`.
        shards: number of parameter-server shards.
        reserve_bytes: memory of the framework on every device.
        on_step: called before each layer is measured, in this thread.
        overrides: keys of the job, or those of `job` to change.

    Raises:
        UserError: the job, a file or an argument is invalid, or no plan fits.
        JobFailed: the process that measures died.
    """
    given_profile = _document(Profile, profile)
    section = cluster if isinstance(cluster, Mapping) else None
    given_cluster = None if isinstance(cluster, Mapping) else _document(Cluster, cluster)
    if section is not None:
        overrides["cluster"] = section
    if isinstance(freeze, Mapping):
        overrides["freeze"] = freeze
    has_job = job is not None or bool(overrides)
    request = command.Options(  # of the files it only says which there are
        job=Path() if has_job else None,
        profile=None if given_profile is None else Path(),
        cluster=None if given_cluster is None else Path(),
        allocation=allocation,
        workers=None if devices is None else json.dumps([list(names) for names in devices]),
        minibatches_per_wave=_text(minibatches_per_wave),
        placement=placement,
        staleness=_text(staleness),
        max_staleness=max_staleness,
        weights=weights,
        schedule=schedule,
        optimizer_slots=optimizer_slots,
        recompute=recompute,
        freeze=freeze if isinstance(freeze, int) else None,
        max_batch=max_batch,
        shards=shards,
        reserve_bytes=reserve_bytes,
    )
    with naming_keywords():
        command.check_request(request, as_json=False)
        with given_job(job, overrides, Shell()) if has_job else _without_job() as (loaded, shell):
            planning = command.planner_request_of(request, loaded)
            inputs = command.PlanInputs(
                job=loaded, profile=given_profile, cluster=given_cluster, cluster_name=_name(cluster)
            )
            known = command.known_of(inputs, shell, lambda: _Steps(on_step or _ignored))
        planned = command.plan_for(known, command.completed_options(planning.options, request, loaded, known), loaded)
    return Plan(planned, known.profile, known.cluster, planning.remarks)


def simulate(  # noqa: PLR0913 - the options of the command
    plan: Plan | PlanDocument | str | Path,
    *,
    profile: Profile | str | Path | None = None,
    cluster: Cluster | str | Path | None = None,
    staleness: int | Literal["inf"] | None = None,
    minibatches: int | None = None,
    jitter_cv: float = 0.0,
    seed: int = 0,
    stragglers: Mapping[str, float] | None = None,
    freeze: Mapping[int, int] | None = None,
    freeze_changes: Literal["recut", "compress"] | None = None,
    cache: bool = False,
    active: Mapping[int, Sequence[int | str]] | None = None,
    active_recut: bool = False,
    optimizer_slots: int = 0,
    contention: bool = True,
) -> SimulationResult:
    """Run a plan in simulated time, as `hetpipe simulate` does; nothing is trained.

    Args:
        plan: a plan, or its file.
        profile: of the model, or its file; default: that of `plan`.
        cluster: with the plan's devices, or its file; default: that of `plan`.
        staleness: D; default: the plan's.
        minibatches: of each virtual worker; default: 64 waves or more.
        jitter_cv: coefficient of variation of computing times.
        seed: of that variation.
        stragglers: devices with the factors by which they are slower.
        freeze: clock → F, the number of layers with parameters that are frozen from there on: `result.phases`.
        freeze_changes: how pipelines change there, as under these keys of a job's `freeze`; default: they stay those of
            the plan.
        cache: frozen layers are read from a cache, as under `freeze.cache`.
        active: clock → the layers that alone are active from there on, by numbers, names or patterns:
            `result.active_phases`.
        active_recut: layers move there, as under `elastic.recut`.
        optimizer_slots: tensors of optimizer state per parameter, for `freeze_changes="compress"`.
        contention: transfers share network cards.

    Raises:
        UserError: a file or an argument is invalid.
    """
    of_plan = plan if isinstance(plan, Plan) else None
    document = plan.document if isinstance(plan, Plan) else _required(PlanDocument, plan)
    found_profile = _document(Profile, profile) or (None if of_plan is None else of_plan.profile)
    found_cluster = _document(Cluster, cluster) or (None if of_plan is None else of_plan.cluster)
    if found_profile is None or found_cluster is None:
        raise UserError("simulate needs the profile and the cluster of the plan: profile=…, cluster=…")
    check_fits(found_profile, found_cluster, cluster_name=_name(cluster))
    costs = costs_of(document, found_profile, found_cluster)
    how = simulation_options(
        document,
        staleness=document.staleness if staleness is None else None if staleness == "inf" else staleness,
        minibatches=minibatches,
        jitter_cv=jitter_cv,
        seed=seed,
        stragglers={DeviceId(name): factor for name, factor in (stragglers or {}).items()},
        contention=contention,
    )
    from hetpipe.decide.simulator.simulate import simulate as run

    with naming_keywords():
        check_alone(freezes=bool(freeze or freeze_changes or cache), activates=bool(active))
        changes = None
        if freeze_changes is not None:
            changes = planned_for_freezing(
                document,
                found_profile,
                found_cluster,
                compress=freeze_changes == "compress",
                optimizer_slots=optimizer_slots,
                is_cached=cache,
            )
        freezes = sorted((freeze or {}).items())
        phases = phases_of(freezes, document, found_profile, found_cluster, how, changes=changes, is_cached=cache)
        activations = [
            activation_at(clock, layers, found_profile, key="active")
            for clock, layers in sorted((active or {}).items())
        ]
        without = active_phases(document, found_profile, found_cluster, how, activations, recut=active_recut)
    return replace(run(simulated_plan(document, costs), costs, how), phases=phases, active_phases=without)


# -- what is given ----------------------------------------------------------------------------------------------------


@contextmanager
def _without_job() -> Iterator[tuple[None, Shell]]:
    yield None, Shell()


def _document(kind: type[DocumentT], given: DocumentT | str | Path | None) -> DocumentT | None:
    return read_document(kind, Path(given)) if isinstance(given, str | Path) else given


def _required(kind: type[DocumentT], given: DocumentT | str | Path) -> DocumentT:
    return read_document(kind, Path(given)) if isinstance(given, str | Path) else given


def _name(cluster: object) -> str:
    """Origin of a cluster, for messages."""
    return str(cluster) if isinstance(cluster, str | Path) else "cluster"


def _text(value: int | str | None) -> str | None:
    return None if value is None else str(value)


def _ignored(_step: ProfileStep) -> None:
    """The progress of a measurement is not shown."""


class _Steps:
    """Passes steps on; no display to open or close."""

    def __init__(self, on_step: OnStep) -> None:
        self.show = on_step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """No-op."""


@contextmanager
def naming_keywords() -> Iterator[None]:
    """Name the keywords of functions in messages that name a command's options."""
    try:
        yield
    except UserError as error:
        if type(error) is not UserError:
            raise
        raise UserError(in_python(str(error))) from error


def in_python(message: str) -> str:
    """A command's message with keywords in place of options.

    >>> in_python("--D auto and --max-D must be used together; leave out --minibatches-per-wave proportional")
    'staleness auto and max_staleness must be used together; leave out minibatches_per_wave proportional'
    """
    return _OPTION.sub(lambda found: _KEYWORDS.get(found[1], found[1].replace("-", "_")), message)
