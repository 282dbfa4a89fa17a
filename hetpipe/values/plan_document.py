"""A planner's decision and forecast: the plan as a public file (`docs/files.md`).

The plan of a running job, `values.plan.Plan`, is derived from it once agents have offered their devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from hetpipe.values.document import Document, Section, entries, mapping
from hetpipe.values.ids import DeviceId
from hetpipe.values.memory import LayerPolicy
from hetpipe.values.policies import PullTiming
from hetpipe.values.problems import Path, Problem
from hetpipe.values.profile import AliveValue, ForbiddenCut
from hetpipe.values.sync import PushCompression

Bytes = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Index = Annotated[int, Field(ge=0)]

#: Bytes [start, stop) of a parameter (or of all parameters of a layer) on a shard: shard, start, stop.
SliceRange = tuple[Index, Bytes, Bytes]

#: Source of a link's figures.
LinkSource = Literal["stated", "measured", "assumed"]


def _placement_branch(value: object) -> str:
    return "<slices>" if isinstance(value, tuple | list) else "<shard>"


#: One shard, or slices on several.
ParameterPlacement = Annotated[
    Annotated[Index, Tag("<shard>")] | Annotated[tuple[SliceRange, ...], Tag("<slices>")],
    Discriminator(_placement_branch),
]


class PlannedStage(Section):
    """Consecutive layers on one device."""

    device: DeviceId
    """`NODE/INDEX`."""
    type: str
    """Its device type."""
    layers: tuple[Index, Positive]
    """First layer, and the one after the last."""
    time_ms: NotNegative
    """Forward, backward and the transfers attributed to this stage, per minibatch."""
    memory_bytes: Bytes
    """Device memory of the stage."""
    receive_ms: NotNegative
    """The part of `time_ms` spent in transfers: activations from the previous stage, gradients from the next one."""
    recompute: bool = False
    """Whether activations are recomputed in the backward pass instead of stored."""
    memory: tuple[LayerPolicy, ...] = ()
    """Memory policy of each layer, chosen for a job with `memory: auto`; empty: as `recompute` says."""
    in_flight: Positive | None = None
    """S_i: maximum number of minibatches between forward and backward. Derived from the rest of the plan;
    informational.
    """
    model_flops_utilisation: NotNegative | None = None
    """MFU of the device, in the steady state; null where operations or the type's peak are unknown. Informational."""


class PlannedWorker(Section):
    """One virtual worker's pipeline."""

    stages: tuple[PlannedStage, ...]
    """First stage first."""
    bottleneck_ms: NotNegative
    """The largest `time_ms`."""
    samples_per_second: NotNegative
    """By the closed form, without other virtual workers."""


class BorderAlternative(Section):
    """Another place for a border of stages, all others kept."""

    cut: Positive
    """Layers before it."""
    before: str
    """The first layer after it."""
    forward_bytes: Bytes
    """Bytes sent forward over it, per minibatch."""
    backward_bytes: Bytes
    """Bytes sent backward over it, per minibatch."""
    bottleneck_ms: NotNegative | None = None
    """The largest stage time of the virtual worker with it; null where the model cannot be cut."""
    reason: str
    """Why it was not chosen."""


class PlannedBorder(Section):
    """The border between two stages."""

    virtual_worker: Index
    """The first of the virtual workers with equal pipelines."""
    stage: Index
    """The stage that ends."""
    cut: Positive
    """Layers before it."""
    before: str
    """The first layer after it."""
    forward_bytes: Bytes
    """Bytes sent forward over it, per minibatch."""
    backward_bytes: Bytes
    """Bytes sent backward over it, per minibatch: gradients of the tensors that require one."""
    tie_bytes: Bytes = 0
    """The part of both that is tied weights and their gradients."""
    forward_ms: NotNegative
    """The transfer forward."""
    backward_ms: NotNegative
    """The transfer back."""
    alive: tuple[AliveValue, ...] = ()
    """The tensors that cross it; empty where the profile does not list them."""
    alternatives: tuple[BorderAlternative, ...] = ()
    """The neighbouring cuts, and the one with the least traffic within both stages."""


class Predicted(Section):
    """The simulator's prediction for the whole job, in its steady state."""

    samples_per_second: NotNegative
    """Over all virtual workers."""
    cross_node_bytes_per_minibatch: NotNegative
    """All bytes that leave a node, per minibatch of the job."""
    tokens_per_second: NotNegative | None = None
    """Over all virtual workers; null where samples are not token sequences."""
    model_flops_utilisation: NotNegative | None = None
    """MFU: operations of the model per second, as a share of the peak of all devices in use; null where either is
    unknown.
    """
    model_flops_utilisation_reason: str | None = None
    """Why there is no MFU; null if there is one, or if it was not computed."""


class RunForecast(Section):
    """The simulator's prediction for one run of its actual length, including filling and draining between barriers."""

    samples_per_second: NotNegative
    """Samples of the run divided by `seconds`."""
    seconds: NotNegative
    """Simulated time, from the first forward of each segment to the publish that ends it, summed over the segments."""


class ActivePhase(Section):
    """The part of a run in which the same layers are active (`docs/semantics/dynamic-models.md`)."""

    clock: Index
    """Its first clock."""
    inactive: tuple[Index, ...]
    """The layers that are left out."""
    samples_per_second: NotNegative
    """Of all virtual workers, with full pipelines."""
    cuts: tuple[tuple[Index, ...], ...]
    """Layers of each stage, per virtual worker."""


class PlannedProcess(Section):
    """A process, or two that are counted together."""

    name: str
    """Its name for people: `stage 0 of virtual worker 1`, `parameter server 0`, `coordinator`, …"""
    bytes: Bytes
    """Peak of its host memory while the model is trained, with memory that it shares counted in parts (PSS)."""


class PlannedNode(Section):
    """Host memory of a node, including the memory of CPU devices, excluding that of GPUs."""

    node: str
    """Its name."""
    peak_bytes: Bytes
    """The larger of `training_bytes` and `inspection_bytes`."""
    training_bytes: Bytes
    """The sum over the processes of the run."""
    inspection_bytes: Bytes
    """During the model's inspection, before the stages are started; 0 on all nodes but one."""
    processes: tuple[PlannedProcess, ...]
    """The parts of `training_bytes`."""


class PlannedLink(Section):
    """A link used for the plan, with the source of its figures."""

    between: tuple[str, str]
    """Two nodes; the same one twice for the link within it."""
    source: LinkSource
    """`stated` in a cluster file, `measured`, or `assumed`."""
    bytes_per_second: Annotated[float, Field(gt=0)]
    """Including the link's efficiency."""
    latency_seconds: NotNegative
    """Latency of one message."""
    measured_at: NotNegative | None = None
    """Seconds since 1970-01-01 UTC; null unless it was measured."""


class Alternative(Section):
    """Another way to use the cluster, and why it was not chosen."""

    name: str
    """`NP`, `ED`, `HD`, `auto`, `allreduce`, `single:TYPE`, …"""
    samples_per_second: NotNegative | None
    """None if it is not feasible."""
    reason: str
    """Why it was not chosen."""


def _wave_branch(value: object) -> str:
    return "<list>" if isinstance(value, tuple | list) else "<number>"


class PlanDocument(Document):
    """A complete plan. Fields that a person may omit have a default; plans written by a planner are complete."""

    WRITES_DEFAULTS = True

    version: Literal[1] = 1
    """Of the format."""
    model: str = ""
    """The profile's `model`; informational."""
    batch_size: Positive | None = None
    """Samples per minibatch; null: that of the profile."""
    allocation: str = "explicit"
    """`NP`, `ED`, `HD`, `auto`, `explicit` or `parallel`."""
    weights: str = "wave"
    """The weight policy."""
    schedule: str = "auto"
    """The schedule of a stage: `1f1b`, `fifo`, `gpipe`; `auto`: the weight policy's default."""
    staleness: Annotated[int, Field(ge=0)] | None = 0
    """D; null: unbounded."""
    pull: PullTiming = "every_wave"
    """Whether weights are pulled for `every_wave`, or only where D has `required` it."""
    compress_pushes: PushCompression = "none"
    """`bfloat16`: pushes of `float32` parameters have half their bytes (`docs/semantics/wsp.md` §12)."""
    virtual_workers: tuple[PlannedWorker, ...]
    """All pipelines."""
    minibatches_per_wave: Annotated[
        Annotated[Positive, Tag("<number>")] | Annotated[tuple[Positive, ...], Tag("<list>")],
        Discriminator(_wave_branch),
    ]
    """N, or N_v of each virtual worker."""
    max_minibatches_per_wave: tuple[Index, ...]
    """The largest feasible N of each virtual worker, the paper's Max_m; searched up to 1024."""
    searched_minibatches_per_wave: Positive | None = None
    """The largest N tried for these virtual workers: the minimum of the figures above, or less where a larger N could
    not improve the plan; null: N was given. Informational.
    """
    frozen_layers: Index = 0
    """The first so many layers of the model are frozen (`docs/semantics/freezing.md`): all figures are those with them.
    """
    has_shards: bool = True
    """Whether parameter servers hold the weights; if not, there is one virtual worker and no placement."""
    shards: tuple[str, ...] = ()
    """The node of each parameter-server shard; empty: one on each computing node, in the cluster's order, repeated if
    `placement` names more shards.
    """
    placement: dict[str, ParameterPlacement]
    """Parameter → shard, or its slices as (shard, first byte, end byte). Where the profile names no parameters, a
    layer's name stands for all of its parameters.
    """
    placement_policy: str = ""
    """Name of the placement: `round_robin`, `balanced`, `ed_local`; empty: written by hand. Informational."""
    idle_devices: tuple[DeviceId, ...] = ()
    """Devices of the cluster without a stage; informational."""
    predicted: Predicted
    """Prediction for the steady state."""
    run: RunForecast | None = None
    """Prediction for the run it was made for; null: no particular run, or one of unknown length."""
    active_phases: tuple[ActivePhase, ...] = ()
    """Prediction for the active layers of the job it was made for, from clock to clock; informational. Empty: all of
    them are always active.
    """
    host_memory: tuple[PlannedNode, ...] = ()
    """Host memory of the nodes that compute or hold shards, at its peak; informational. Empty: not predicted."""
    links: tuple[PlannedLink, ...] = ()
    """The links among nodes that compute or hold shards, with the sources of their figures; informational. Empty:
    unknown.
    """
    alternatives: tuple[Alternative, ...] = ()
    """The alternatives considered."""
    borders: tuple[PlannedBorder, ...] = ()
    """Why each stage ends where it does; of virtual workers that are alike, for the first. For people."""
    forbidden: tuple[ForbiddenCut, ...] = ()
    """Where the model cannot be cut, and why; for people."""

    @property
    def waves(self) -> tuple[int, ...]:
        """N_v of each virtual worker."""
        given = self.minibatches_per_wave
        return (given,) * len(self.virtual_workers) if isinstance(given, int) else given

    @classmethod
    def contradictions(cls, value: Mapping[str, Any]) -> Iterator[Problem]:
        """Pipelines with gaps, devices used twice, references to missing shards."""
        workers = [mapping(worker) for worker in entries(value.get("virtual_workers"))]
        if value.get("virtual_workers") == ():
            yield Problem(("virtual_workers",), "is an empty list; a plan has at least one virtual worker")
        yield from _gaps(workers)
        yield from _devices_used_twice(workers, value)
        limits = value.get("max_minibatches_per_wave")
        if isinstance(limits, tuple) and workers and len(limits) != len(workers):
            yield Problem(
                ("max_minibatches_per_wave",), f"has {len(limits)} entries for {len(workers)} virtual workers"
            )
        waves = value.get("minibatches_per_wave")
        if isinstance(waves, tuple) and workers and len(waves) != len(workers):
            yield Problem(
                ("minibatches_per_wave",),
                f"has {len(waves)} numbers for {len(workers)} virtual workers; give one for each, or one number for "
                "all",
            )
        if value.get("has_shards") is False:
            yield from _without_shards(value, len(workers))
            return
        shards = entries(value.get("shards"))
        if shards:
            yield from _missing_shards(mapping(value.get("placement")), len(shards))


def _gaps(workers: list[Mapping[str, Any]]) -> Iterator[Problem]:
    """Check that every pipeline covers the layers without a gap, from layer 0, and all end at the same layer."""
    ends: set[int] = set()
    for vw, worker in enumerate(workers):
        stages = worker.get("stages")
        if stages == ():
            yield Problem(("virtual_workers", vw, "stages"), "is an empty list; give at least one stage")
        expected: int | None = 0
        for index, stage in enumerate(entries(stages)):
            path = ("virtual_workers", vw, "stages", index, "layers")
            match mapping(stage).get("layers"):
                case (int(first), int(last)):
                    if expected is not None and first != expected:
                        yield Problem(path, f"begins with layer {first}, but the next one is {expected}")
                    elif last <= first:
                        yield Problem(
                            path, f"is [{first}, {last}], which contains no layer; the end is the one after the last"
                        )
                    expected = last
                case _:
                    expected = None
        if expected:
            ends.add(expected)
    if len(ends) > 1:
        shown = " and ".join(str(end) for end in sorted(ends))
        yield Problem(("virtual_workers",), f"end after {shown} layers; all train the same model")


def _devices_used_twice(workers: list[Mapping[str, Any]], plan: Mapping[str, Any]) -> Iterator[Problem]:
    places: list[tuple[object, Path]] = [
        (mapping(stage).get("device"), ("virtual_workers", vw, "stages", index, "device"))
        for vw, worker in enumerate(workers)
        for index, stage in enumerate(entries(worker.get("stages")))
    ]
    places += [(device, ("idle_devices", index)) for index, device in enumerate(entries(plan.get("idle_devices")))]
    seen: set[str] = set()
    for device, path in places:
        if isinstance(device, str):
            if device in seen:
                yield Problem(path, f"is {device}, which is used twice in the plan; a device has at most one stage")
            seen.add(device)


def _without_shards(plan: Mapping[str, Any], num_workers: int) -> Iterator[Problem]:
    reason = "but has_shards is false"
    for key in ("shards", "placement"):
        if plan.get(key):
            yield Problem((key,), f"is about parameter servers, {reason}; empty it, or set has_shards: true")
    if num_workers > 1:
        yield Problem(
            ("virtual_workers",),
            f"are {num_workers}, {reason}, and without shards they cannot be synchronized; keep one",
        )


def _missing_shards(placement: Mapping[str, Any], num_shards: int) -> Iterator[Problem]:
    for name, where in placement.items():
        pieces = entries(where) if isinstance(where, tuple) else ((where,),)
        for piece in pieces:
            match piece:
                case (int(shard), *_) if shard >= num_shards:
                    yield Problem(("placement", name), f"is on shard {shard}, but there are {num_shards} shards")
