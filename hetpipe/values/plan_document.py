"""What a planner decided and foresees: the plan as a public file (`docs/files.md`).

A running job's own `values.plan.Plan` follows from it once agents have offered the devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from hetpipe.values.document import Document, Section, entries, mapping
from hetpipe.values.ids import DeviceId
from hetpipe.values.policies import PullTiming
from hetpipe.values.problems import Path, Problem
from hetpipe.values.profile import AliveValue, ForbiddenCut

Bytes = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Index = Annotated[int, Field(ge=0)]

#: Bytes [start, stop) of a parameter (or of a layer's parameters together) on a shard: shard, start, stop.
SliceRange = tuple[Index, Bytes, Bytes]

#: Where the figures of a link are from.
LinkSource = Literal["stated", "measured", "assumed"]


def _placement_branch(value: object) -> str:
    return "<slices>" if isinstance(value, tuple | list) else "<shard>"


#: One shard, or the pieces on several.
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
    """Forward, backward and the transfers that count as this stage's, per minibatch."""
    memory_bytes: Bytes
    """What the stage keeps on its device."""
    receive_ms: NotNegative
    """The part of `time_ms` that is transfers: activations from the stage before, gradients from the stage behind."""
    recompute: bool = False
    """Whether activations are computed again before the backward instead of kept."""
    in_flight: Positive | None = None
    """S_i: minibatches between forward and backward at most. It follows from the rest of the plan; for people."""
    model_flops_utilisation: NotNegative | None = None
    """MFU of the device, in the steady state; null where operations or the type's peak are not known. For people."""


class PlannedWorker(Section):
    """One virtual worker's pipeline."""

    stages: tuple[PlannedStage, ...]
    """First stage first."""
    bottleneck_ms: NotNegative
    """The largest `time_ms`."""
    samples_per_second: NotNegative
    """By the closed form, running by itself."""


class BorderAlternative(Section):
    """Another place for a border of stages, all others kept."""

    cut: Positive
    """Layers before it."""
    before: str
    """The layer behind it."""
    forward_bytes: Bytes
    """What would move on, per minibatch."""
    backward_bytes: Bytes
    """What would come back."""
    bottleneck_ms: NotNegative | None = None
    """The largest stage time of the virtual worker then; null where it cannot be."""
    reason: str
    """Why it was not chosen."""


class PlannedBorder(Section):
    """Where one stage ends and the next one begins."""

    virtual_worker: Index
    """The first of those that are alike."""
    stage: Index
    """The stage that ends."""
    cut: Positive
    """Layers before it."""
    before: str
    """The layer behind it."""
    forward_bytes: Bytes
    """What moves on, per minibatch."""
    backward_bytes: Bytes
    """What comes back: gradients of what needs one."""
    tie_bytes: Bytes = 0
    """The part of both that is tied weights and their gradients."""
    forward_ms: NotNegative
    """The transfer forward."""
    backward_ms: NotNegative
    """The transfer back."""
    alive: tuple[AliveValue, ...] = ()
    """What crosses, tensor by tensor; empty where the profile does not say it."""
    alternatives: tuple[BorderAlternative, ...] = ()
    """The neighbouring cuts, and the one that moves least within both stages."""


class Predicted(Section):
    """What the simulator says of the whole job, in its steady state."""

    samples_per_second: NotNegative
    """Over all virtual workers."""
    cross_node_bytes_per_minibatch: NotNegative
    """Every byte that leaves a node, per minibatch of the job."""
    tokens_per_second: NotNegative | None = None
    """Over all virtual workers; null where samples are no sequences of tokens."""
    model_flops_utilisation: NotNegative | None = None
    """MFU: operations of the model per second, as a share of the peak of all devices in use; null where either is not
    known."""
    model_flops_utilisation_reason: str | None = None
    """Why there is no MFU; null where there is one, or nobody has looked."""


class RunForecast(Section):
    """What the simulator says of one run, of its own length: filling and draining between barriers count."""

    samples_per_second: NotNegative
    """Samples of the run by `seconds`."""
    seconds: NotNegative
    """Simulated, from the first forward of each segment to the publish that ends it, summed over the segments."""


class PlannedLink(Section):
    """A link that the plan was made with, and where its figures are from."""

    between: tuple[str, str]
    """Two nodes; one twice for the link within it."""
    source: LinkSource
    """`stated` in a cluster file, `measured`, or `assumed`."""
    bytes_per_second: Annotated[float, Field(gt=0)]
    """With the link's efficiency."""
    latency_seconds: NotNegative
    """Of one message."""
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


class PlanDocument(Document):
    """A whole plan. What a person need not write has a default; what a planner writes is complete."""

    WRITES_DEFAULTS = True

    version: Literal[1] = 1
    """Of the format."""
    model: str = ""
    """The profile's `model`; for people."""
    batch_size: Positive | None = None
    """Samples per minibatch; null: as many as the profile's."""
    allocation: str = "explicit"
    """`NP`, `ED`, `HD`, `auto`, `explicit` or `parallel`."""
    weights: str = "wave"
    """The weight policy."""
    schedule: str = "auto"
    """In which order a stage computes: `1f1b`, `fifo`, `gpipe`; `auto`: the weight policy's own."""
    staleness: Annotated[int, Field(ge=0)] | None = 0
    """D; null: no bound."""
    pull: PullTiming = "every_wave"
    """Whether weights are fetched for `every_wave`, or only where D has `required` it."""
    virtual_workers: tuple[PlannedWorker, ...]
    """All pipelines."""
    minibatches_per_wave: Positive
    """N."""
    max_minibatches_per_wave: tuple[Index, ...]
    """The largest feasible N of each virtual worker, the paper's Max_m; looked for up to 1024."""
    searched_minibatches_per_wave: Positive | None = None
    """The largest N that was tried for these virtual workers: the least of the figures above, or less where a larger N
    could not gain; null: N was given. For people."""
    has_shards: bool = True
    """Whether parameter servers hold the weights; if not, there is one virtual worker and nothing is placed."""
    shards: tuple[str, ...] = ()
    """The node of each parameter-server shard; empty: one on each node that computes, in the cluster's order, and in
    turn as far as `placement` names more."""
    placement: dict[str, ParameterPlacement]
    """Parameter → shard, or its pieces as (shard, first byte, end byte). Where the profile names no parameters, a
    layer's name stands for all of its parameters together."""
    placement_policy: str = ""
    """Which placement that is: `round_robin`, `balanced`, `ed_local`; empty: one by hand. For people."""
    idle_devices: tuple[DeviceId, ...] = ()
    """Devices of the cluster without a stage; for people."""
    predicted: Predicted
    """What to expect of it."""
    run: RunForecast | None = None
    """What to expect of the run that it was made for; null: it was made for none, or it is not known how long."""
    links: tuple[PlannedLink, ...] = ()
    """The links among the nodes that compute or hold shards, and where their figures are from; for people. Empty: not
    known."""
    alternatives: tuple[Alternative, ...] = ()
    """What else was looked at."""
    borders: tuple[PlannedBorder, ...] = ()
    """Why each stage ends where it does; of virtual workers that are alike, for the first. For people."""
    forbidden: tuple[ForbiddenCut, ...] = ()
    """Where the model cannot be cut, and why; for people."""

    @classmethod
    def contradictions(cls, value: Mapping[str, Any]) -> Iterator[Problem]:
        """Pipelines with gaps, devices used twice, shards that are not there."""
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
        if value.get("has_shards") is False:
            yield from _without_shards(value, len(workers))
            return
        shards = entries(value.get("shards"))
        if shards:
            yield from _missing_shards(mapping(value.get("placement")), len(shards))


def _gaps(workers: list[Mapping[str, Any]]) -> Iterator[Problem]:
    """Every pipeline goes through the layers without a gap, from layer 0, and all to the same end."""
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
                        yield Problem(path, f"is [{first}, {last}], no layer at all; the end is the one after the last")
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
                yield Problem(path, f"is {device}, which stands in the plan before; a device has one stage or none")
            seen.add(device)


def _without_shards(plan: Mapping[str, Any], num_workers: int) -> Iterator[Problem]:
    said = "but has_shards is false"
    for key in ("shards", "placement"):
        if plan.get(key):
            yield Problem((key,), f"is about parameter servers, {said}; empty it, or set has_shards: true")
    if num_workers > 1:
        yield Problem(
            ("virtual_workers",),
            f"are {num_workers}, {said}, and without shards nothing brings them together; keep one",
        )


def _missing_shards(placement: Mapping[str, Any], num_shards: int) -> Iterator[Problem]:
    for name, where in placement.items():
        pieces = entries(where) if isinstance(where, tuple) else ((where,),)
        for piece in pieces:
            match piece:
                case (int(shard), *_) if shard >= num_shards:
                    yield Problem(("placement", name), f"is on shard {shard}, but there are {num_shards} shards")
