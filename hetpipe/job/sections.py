"""The sections of a job file, one frozen model each; those about updates are in `job.training`, the job in `job.model`.

The docstring below each key is its contract. Checks between keys of a section are validators of the later key, never of
the whole section: pydantic runs those even when another key is invalid, so all mistakes are found in one pass. Checks
between sections are in `job.rules`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hetpipe.values.bounds import MAX_COUNT, MAX_DATA_WORKERS, MAX_LISTED, MAX_SHARDS, MAX_STAGES
from hetpipe.values.catalogue import CATALOGUE, catalogue_hint
from hetpipe.values.cluster import Cluster
from hetpipe.values.memory import LayerPolicy
from hetpipe.values.policies import PlacementName, PullTiming
from hetpipe.values.problems import shown
from hetpipe.values.profile import Profile
from hetpipe.values.suggest import did_you_mean, join_names
from hetpipe.values.sync import SYNC_KINDS, PushCompression, SyncKind, SyncTraits

Combine = Literal["sum", "mean"]
Placement = Literal["auto", PlacementName]
Allocation = Literal["auto", "NP", "ED", "HD"]

T = TypeVar("T")

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def checked_reference(text: str) -> str:
    """Validate a `module:callable`; returns it unchanged.

    Raises:
        ValueError: it is not one.
    """
    if not _REFERENCE.fullmatch(text):
        path_like = "; give the module, not its file" if ".py" in text or "/" in text else ""
        raise ValueError(f"must be `module:callable`, for example `model:build`, not {shown(text)}{path_like}")
    return text


def _checked_device_type(name: str) -> str:
    if name not in CATALOGUE:
        raise ValueError(f"{shown(name)} is not in the catalogue of device types; {catalogue_hint(name)}")
    return name


def _checked_not_empty(entries: tuple[T, ...]) -> tuple[T, ...]:
    if not entries:
        raise ValueError("is an empty list; give at least one entry, for example `stages: [[2, 2]]`")
    return entries


Reference = Annotated[str, AfterValidator(checked_reference)]
"""`module:callable`, imported from the current folder first."""
PositiveInt = Annotated[int, Field(ge=1, le=MAX_COUNT - 1)]
StageCount = Annotated[int, Field(ge=1, le=MAX_STAGES)]
"""A number of virtual workers, or of stages of each."""
LayerCounts = Annotated[tuple[PositiveInt, ...], AfterValidator(_checked_not_empty)]
"""Layers of each stage of one virtual worker."""


#: Default number of minibatches that each data worker reads ahead, as in torch.
DEFAULT_PREFETCH_FACTOR = 2


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys rejected, no type coercion."""

    # Strict: `batch_size: "32"` and `seed: true` are mistakes, not numbers.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class CallSpec(Section):
    """A callable with arguments, usable wherever a callable is named."""

    call: Reference = Field(examples=["transformers:AutoModelForCausalLM.from_config"])
    """The callable."""
    args: dict[str, Any] = Field(default_factory=dict, examples=["{num_classes: 10}"])
    """Its keyword arguments. A nested mapping with a key `call` is called first and replaced by its result."""

    def __str__(self) -> str:
        """The form used in messages."""
        return self.call


def _call_branch(value: object) -> str:
    return "<text>" if isinstance(value, str) else "<call>"


Call = Annotated[
    Annotated[Reference, Tag("<text>")] | Annotated[CallSpec, Tag("<call>")],
    Discriminator(_call_branch),
]
"""A `module:callable`, or one with arguments."""


def _loss_branch(value: object) -> str:
    return "<losses>" if isinstance(value, Mapping) else "<text>"


class LossTerm(Section):
    """One of several losses."""

    call: Reference | None = Field(default=None, examples=["model:loss"])
    """Called like a single loss; None: the loss that the model computes itself."""
    weight: float = Field(default=1.0, allow_inf_nan=False, examples=[0.1])
    """Factor of its value in the sum."""


def _term_of(given: object) -> object:
    return {"call": given} if isinstance(given, str) else given


_VALUE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def checked_value_name(name: str) -> str:
    """Validate the name of a metric, or of one of several losses; returns it unchanged.

    Raises:
        ValueError: it is not one.
    """
    if name == "loss" or not _VALUE_NAME.fullmatch(name):
        raise ValueError(
            "the name of a metric or of a loss consists of letters, digits and underscores; `loss` is reserved, "
            "because it is always reported"
        )
    return name


def _checked_losses(losses: object) -> object:
    if not losses:
        raise ValueError(
            "is an empty mapping; name at least one loss, or remove the key: then the model computes its own"
        )
    if isinstance(losses, Mapping) and losses.keys() & {"call", "args", "weight"}:
        raise ValueError(
            "a mapping of losses has a name for each; write for example `loss: {main: {call: model:loss, weight: 1.0}}`"
        )
    return losses


Losses = Annotated[
    Annotated[Reference, Tag("<text>")]
    | Annotated[
        Annotated[
            dict[
                Annotated[str, AfterValidator(checked_value_name)],
                Annotated[LossTerm, BeforeValidator(_term_of, json_schema_input_type=Reference | LossTerm)],
            ],
            BeforeValidator(_checked_losses, json_schema_input_type=dict[str, Reference | LossTerm]),
        ],
        Tag("<losses>"),
    ],
    Discriminator(_loss_branch),
]
"""One loss, or several by name."""

MEAN_OVER = ("samples", "tokens", "next_tokens")
"""The words of `mean_over`."""


def _checked_mean_over(text: str) -> str:
    if text in MEAN_OVER:
        return text
    if ":" not in text:
        raise ValueError(f"must be one of {join_names(MEAN_OVER)}, or `module:callable`, not {shown(text)}")
    return checked_reference(text)


MeanOver = Annotated[str, AfterValidator(_checked_mean_over)]


def _memory_branch(value: object) -> str:
    return "<patterns>" if isinstance(value, Mapping) else "<word>"


def _checked_patterns(patterns: dict[str, LayerPolicy]) -> dict[str, LayerPolicy]:
    if not patterns:
        raise ValueError("is an empty mapping; give a pattern of layers, for example `{'h.*': recompute}`, or a word")
    return patterns


Memory = Annotated[
    Annotated[Literal["keep", "recompute", "swap", "auto"], Tag("<word>")]
    | Annotated[
        Annotated[dict[str, LayerPolicy], Field(max_length=MAX_LISTED), AfterValidator(_checked_patterns)],
        Tag("<patterns>"),
    ],
    Discriminator(_memory_branch),
]
"""One memory policy, or one by pattern of layers' names."""


class DataSection(Section):
    """The data sets, and how they are read; the keys are those of torch's `DataLoader`."""

    train: Call = Field(examples=["model:train_data"])
    """Training data: a callable that returns a map-style dataset of `len()` samples, or with `shuffle: false` a stream,
    which is iterated; each sample is an (input, target) pair, or a mapping of the model's arguments.
    """
    eval: Call | None = Field(default=None, examples=["model:eval_data"])
    """Evaluation data, used at the end of each epoch, and within epochs if `evaluate` is set; None: no evaluation."""
    length: PositiveInt | None = Field(default=None, examples=[100000])
    """Samples of an epoch, if `train` returns a stream, which is then read from its start up to there in each epoch;
    None: the length of the data set.
    """
    eval_length: PositiveInt | None = Field(default=None, examples=[1000])
    """The same of `eval`."""
    shuffle: bool = True
    """Deal the samples of an epoch in a random order; false: in the order of their indices."""
    sampler: Call | None = Field(default=None, examples=["model:by_length"])
    """Instead of `shuffle`, the order of the samples: called with the data set (and the number of the `epoch`, from 0,
    if it has a parameter of that name) once per epoch, under a seed of (seed, epoch); returns or yields the index of
    every sample once. Arguments of `{call: module:callable, args: {…}}` are passed beside the data set.
    """
    collate_fn: Call | None = Field(default=None, examples=["model:pad"])
    """Takes the list of a minibatch's samples, which may then be anything, and returns the minibatch: a pair (inputs,
    target), or a mapping of the model's arguments, which may be lists, such as images or boxes of different sizes, and
    texts. With arguments, `{call: module:callable, args: {…}}` is called once and returns that function. None: the
    samples are stacked.
    """
    division: Literal["any_node", "by_node"] = "any_node"
    """Whether a sample is dealt to any virtual worker in each epoch, or, `by_node`, to those whose first stages are on
    one node, always the same: for a cache behind frozen layers (`freeze.cache`), which each node has for itself. Needs
    `shuffle`.
    """
    num_workers: Annotated[int, Field(ge=0, le=MAX_DATA_WORKERS)] = Field(default=0, examples=[4])
    """Worker processes that read ahead, for each of the first and the last stage of a virtual worker; 0: these stages
    read a minibatch themselves when they need it. The number does not change what is computed.
    """
    prefetch_factor: PositiveInt | None = Field(default=None, validate_default=True, examples=[2])
    """Minibatches that each worker reads ahead; None: 2, if there are workers."""
    pin_memory: bool = False
    """Copy minibatches into page-locked memory, from which copies to a CUDA device are faster; no effect without such
    a device.
    """

    @property
    def is_shuffled(self) -> bool:
        """Whether samples are dealt in a random order, rather than in one that the job states."""
        return self.shuffle and self.sampler is None

    @field_validator("division")
    @classmethod
    def _of_shuffled(cls, division: str, info: ValidationInfo) -> str:
        if division == "by_node" and (info.data.get("shuffle") is False or info.data.get("sampler") is not None):
            raise ValueError(
                "is by_node, which shuffles the samples of each node, but `shuffle: false` or `sampler` states their "
                "order; remove one of the two"
            )
        return division

    @field_validator("eval_length")
    @classmethod
    def _of_something(cls, eval_length: int | None, info: ValidationInfo) -> object:
        if eval_length is not None and "eval" in info.data and info.data["eval"] is None:
            raise ValueError(
                f"is {eval_length}, but there is no `eval` whose samples it counts; name `eval`, or remove it"
            )
        return eval_length

    @field_validator("sampler")
    @classmethod
    def _one_order(cls, sampler: str | CallSpec | None, info: ValidationInfo) -> object:
        if sampler is not None and info.data.get("shuffle") is False:
            raise ValueError("is given beside `shuffle: false`, and both state the order of the samples; remove one")
        return sampler

    @field_validator("prefetch_factor")
    @classmethod
    def _somebody_reads_ahead(cls, prefetch_factor: int | None, info: ValidationInfo) -> int | None:
        num_workers = info.data.get("num_workers")
        if num_workers == 0 and prefetch_factor is not None:
            raise ValueError(
                f"is {prefetch_factor}, but `num_workers` is 0, so nothing is read ahead; set `num_workers`, for "
                "example 4, or remove it"
            )
        return DEFAULT_PREFETCH_FACTOR if num_workers and prefetch_factor is None else prefetch_factor


class EvaluateSection(Section):
    """Evaluations within epochs, in addition to those at the end of each epoch and of the run."""

    every_waves: PositiveInt | None = Field(default=None, examples=[50])
    """Interval in waves: the virtual worker with the lowest index evaluates, while the others continue training; None:
    evaluation only at the ends of epochs.
    """
    max_batches: PositiveInt | None = Field(default=None, examples=[20])
    """Number of minibatches of `data.eval`, from the first, used by an evaluation within an epoch; None: all."""


def _stages_branch(value: object) -> str:
    if isinstance(value, tuple | list):
        return "<lists>"
    return "<word>" if value == "auto" else "<number>"


class WorkersSection(Section):
    """The virtual workers: their number, and the depth of their pipelines."""

    stages: Annotated[
        Annotated[StageCount, Tag("<number>")]
        | Annotated[Literal["auto"], Tag("<word>")]
        | Annotated[Annotated[tuple[LayerCounts, ...], AfterValidator(_checked_not_empty)], Tag("<lists>")],
        Discriminator(_stages_branch),
    ] = Field(default="auto", examples=[2])
    """Stages per virtual worker, cut at equal cost; or one list per virtual worker with the number of layers of each of
    its stages, for example `[[2, 2], [3, 1]]`; or `auto`: planned for the available devices. 1 if only `count` is
    given.
    """
    count: StageCount | None = Field(default=None, validate_default=True, examples=[2])
    """Number of virtual workers V; by default 1, or the number of lists in `stages`. Planned if `stages` is `auto`."""
    allocation: Allocation = Field(default="auto", validate_default=True)
    """With `stages: auto`, the grouping of devices: `NP` one node per virtual worker, `ED` the same mix for each, `HD`
    mixes of similar speed, `auto` the fastest of these.
    """
    devices: tuple[tuple[str, ...], ...] | None = Field(default=None, examples=["[[n0/0, n1/0], [n0/1, n1/1]]"])
    """With `stages: auto`, the devices of each virtual worker by name, instead of `allocation`."""

    @model_validator(mode="before")
    @classmethod
    def _stages_from_count(cls, given: object) -> object:
        """A given number of virtual workers, without other keys, implies that no planning is wanted."""
        if not isinstance(given, Mapping) or "stages" in given or given.get("count") is None:
            return given
        asks_the_planner = given.get("devices") is not None or given.get("allocation", "auto") != "auto"
        return given if asks_the_planner else {**given, "stages": 1}

    @field_validator("count", mode="before")
    @classmethod
    def _count_from_stages(cls, count: object, info: ValidationInfo) -> object:
        stages = info.data.get("stages")
        if stages == "auto" and count is None:
            return None
        return (len(stages) if isinstance(stages, tuple) else 1) if count is None else count

    @field_validator("count")
    @classmethod
    def _one_list_each(cls, count: int | None, info: ValidationInfo) -> int | None:
        stages = info.data.get("stages")
        if stages == "auto" and count is not None:
            raise ValueError(f"is {count}, but `stages: auto` plans the number as well; remove one of the two")
        if isinstance(stages, tuple) and len(stages) != count:
            raise ValueError(
                f"is {count}, but `stages` lists {len(stages)} virtual worker{'s' if len(stages) > 1 else ''}; give "
                "one list per virtual worker, or a single number of stages for all"
            )
        return count

    @field_validator("allocation")
    @classmethod
    def _only_planned(cls, allocation: Allocation, info: ValidationInfo) -> Allocation:
        if allocation != "auto" and info.data.get("stages", "auto") != "auto":
            raise ValueError(f"is {allocation}, but `stages` already assigns the layers; remove one of the two")
        return allocation

    @field_validator("devices")
    @classmethod
    def _alone(cls, devices: tuple[tuple[str, ...], ...] | None, info: ValidationInfo) -> object:
        if devices is not None and info.data.get("stages", "auto") != "auto":
            raise ValueError("is given, but `stages` already assigns the layers; use `stages: auto`")
        if devices is not None and info.data.get("allocation", "auto") != "auto":
            raise ValueError("is given beside `allocation`; keep one of the two")
        return devices


def _number_branch(value: object) -> str:
    return "<word>" if isinstance(value, str) else "<number>"


def _wave_branch(value: object) -> str:
    return "<list>" if isinstance(value, list | tuple) else _number_branch(value)


#: Default N of a job with a given cut.
DEFAULT_MINIBATCHES_PER_WAVE = 4


class SyncSection(Section):
    """Synchronization of the virtual workers (docs/semantics/wsp.md, sections 2 and 3)."""

    kind: SyncKind = "wsp"
    """`wsp`: bounded by D · `bsp`: D = 0 · `asp`: D = ∞, no bound · `none`: one virtual worker, no shards ·
    `allreduce`: equal virtual workers average their gradients, no shards. `sync: none` is short for `sync: {kind:
    none}`, and so on.
    """
    max_D: Annotated[int, Field(ge=0)] | None = Field(default=None, examples=[8])  # noqa: N815 - as the paper has it
    """Upper limit of `D: auto`."""
    D: (
        Annotated[
            Annotated[Annotated[int, Field(ge=0)], Tag("<number>")] | Annotated[Literal["auto"], Tag("<word>")],
            Discriminator(_number_branch),
        ]
        | None
    ) = Field(default=None, validate_default=True, examples=[1])
    """Staleness bound in waves, by default 0: no virtual worker gets more than D + 1 waves ahead. None under `asp`,
    `none` and `allreduce`. With `stages: auto` also `auto`: the smallest D up to `max_D` whose predicted throughput is
    within 2 % of the best.
    """
    minibatches_per_wave: Annotated[
        Annotated[PositiveInt, Tag("<number>")]
        | Annotated[Literal["auto", "proportional"], Tag("<word>")]
        | Annotated[Annotated[tuple[PositiveInt, ...], Field(min_length=1)], Tag("<list>")],
        Discriminator(_wave_branch),
    ] = Field(default="auto", examples=[4])
    """N: minibatches whose updates are pushed together; also the maximum number in a pipeline at once. `auto` with
    `stages: auto`: the smallest N whose predicted throughput is within 2 % of the best; otherwise 4. A list has the N
    of each virtual worker: in proportion to their speeds, their waves take equally long (docs/semantics/wsp.md,
    section 10). `proportional` with `stages: auto`: the planner makes that list.
    """
    combine: Combine | None = Field(default=None, validate_default=True)
    """`sum`, the default, adds the updates of all virtual workers unscaled, `mean` divides them by V first. None under
    `none` and `allreduce`. Where N differs, `mean` weights every sample equally.
    """
    deterministic: bool = Field(default=False, validate_default=True)
    """Always use the required clock, never a newer one, so that the same seed gives the same bits. With `pull:
    required` always use the newest permitted clock, once every D + 1 waves.
    """
    pull: PullTiming = Field(default="every_wave", validate_default=True)
    """Rule for pulling weights: `every_wave`, or only when `required`, where D forbids the current ones. Between two
    pulls a virtual worker applies only its own updates, so a larger D saves traffic, but updates of the others arrive
    later.
    """
    compress_pushes: PushCompression = Field(default="none", validate_default=True)
    """`bfloat16` rounds the update of every `float32` parameter on its way to the shards, which halves the bytes that
    are pushed (docs/semantics/wsp.md, section 12). Weights and what is pulled keep their precision.
    """

    @property
    def traits(self) -> SyncTraits:
        """Properties of this kind."""
        return SYNC_KINDS[self.kind]

    @field_validator("D")
    @classmethod
    def _bound_fits_kind(
        cls, staleness: int | Literal["auto"] | None, info: ValidationInfo
    ) -> int | Literal["auto"] | None:
        traits = _traits_of(info)
        if (staleness == "auto") != (info.data.get("max_D") is not None):
            raise ValueError("`D: auto` and `max_D` must be used together; give for example `D: auto, max_D: 8`")
        unbounded = traits is not None and traits.bound == "none"
        if traits is not None and unbounded and staleness is not None:
            raise ValueError(f"is {staleness}, but `{traits.name}` has no staleness bound; remove D or use kind: wsp")
        if traits is not None and traits.bound == "zero" and staleness:
            raise ValueError(f"is {staleness}, but `{traits.name}` means D = 0; remove D or use kind: wsp")
        return 0 if not unbounded and staleness is None else staleness

    @field_validator("combine")
    @classmethod
    def _something_to_combine(cls, combine: Combine | None, info: ValidationInfo) -> Combine | None:
        traits = _traits_of(info)
        why_not = None if traits is None else traits.why_not_combined
        if why_not is not None and combine is not None:
            raise ValueError(f"is {combine}, but {why_not}; remove it")
        return "sum" if why_not is None and combine is None else combine

    @field_validator("pull")
    @classmethod
    def _bound_requires_pulls(cls, pull: PullTiming, info: ValidationInfo) -> PullTiming:
        traits = _traits_of(info)
        if traits is None or pull != "required":
            return pull
        if not traits.has_shards:
            raise ValueError(
                f"is required, but under `{traits.name}` only the stages hold the weights, and none are pulled"
            )
        if traits.bound == "none":
            raise ValueError(
                f"is required, but `{traits.name}` has no staleness bound that could require a pull; use kind: "
                "wsp with a D, or pull: every_wave"
            )
        return pull

    @field_validator("compress_pushes")
    @classmethod
    def _something_to_push(cls, compress: PushCompression, info: ValidationInfo) -> PushCompression:
        traits = _traits_of(info)
        if compress != "none" and traits is not None and not traits.has_shards:
            raise ValueError(
                f"is {compress}, but under `{traits.name}` only the stages hold the weights, and none push; remove it"
            )
        return compress

    @field_validator("deterministic")
    @classmethod
    def _bounded_if_deterministic(cls, deterministic: bool, info: ValidationInfo) -> bool:  # noqa: FBT001 - a validator's signature
        traits = _traits_of(info)
        if deterministic and traits is not None and traits.has_shards and traits.bound == "none":
            raise ValueError(
                f"`{traits.name}` has no required clock, so it cannot be deterministic; use kind: wsp with a D, "
                "or deterministic: false"
            )
        return deterministic


def _traits_of(info: ValidationInfo) -> SyncTraits | None:
    """Properties of the kind given before a key of `sync`; None for an unknown kind."""
    return SYNC_KINDS.get(info.data.get("kind", ""))


class ParameterServersSection(Section):
    """The shards that hold the global weights."""

    count: Annotated[int, Field(ge=1, le=MAX_SHARDS)] = 1
    """Number of shards, one process each."""
    placement: Placement = "auto"
    """Placement of parameters: `auto`: the fastest with `stages: auto`, else `balanced` · `balanced` assigns equally
    many bytes to every shard and slices large parameters where necessary; `round_robin` deals whole layers in turn, as
    in the paper; `ed_local` puts each layer on the node that computes it, for `stages: auto` where virtual workers
    agree on that node.
    """
    transport: Literal["auto", "grpc"] = "auto"
    """Transport of pushes and pulls: `auto` is shared memory between processes of one host and user, else gRPC; `grpc`
    is always gRPC.
    """


class DeviceEmulation(Section):
    """A local CPU device that emulates a slower one."""

    emulate_as: Annotated[str, AfterValidator(_checked_device_type)] | None = Field(default=None, examples=["RTX_2060"])
    """A type of the catalogue. The fastest type among the devices in use runs at full speed, the others are slowed down
    in proportion to their peak FLOP/s.
    """
    slowdown: float | None = Field(default=None, ge=1, allow_inf_nan=False, examples=[2.0])
    """A computation of t seconds takes slowdown·t; None: 1, or the factor given by `emulate_as`."""
    jitter: float = Field(default=0.0, ge=0, allow_inf_nan=False, examples=[0.1])
    """Each computation is stretched further by a random factor from [1, 1 + jitter]."""

    @field_validator("slowdown")
    @classmethod
    def _one_speed(cls, slowdown: float | None, info: ValidationInfo) -> float | None:
        if slowdown is not None and info.data.get("emulate_as") is not None:
            raise ValueError("given beside `emulate_as`, which also sets the speed; keep one of the two")
        return slowdown


def _as_it_is(value: object) -> object:
    """A path is replaced by the file's content before validation, which schemas for editors do not know."""
    return value


class ClusterSection(Section):
    """The cluster used for planning, and emulated devices on this machine.

    Without emulation the devices found by the agents are used at full speed.
    """

    devices: tuple[DeviceEmulation, ...] = ()
    """Assigned in order, virtual worker by virtual worker, stage by stage; when there are more stages than entries, the
    list is repeated; virtual workers that join later continue it. `cluster: {slowdown: 2.0}` is short for a list with
    this one entry, so that all devices are alike.
    """
    file: Annotated[Cluster | None, BeforeValidator(_as_it_is, json_schema_input_type=str | Cluster | None)] = Field(
        default=None, examples=["cluster.yaml"]
    )
    """Nodes, devices and links: the path of a cluster file, relative to the job file, or its content. None: the devices
    that the agents offer, with links as measured, else assumed.
    """
    profile: Annotated[Profile | None, BeforeValidator(_as_it_is, json_schema_input_type=str | Profile | None)] = Field(
        default=None, examples=["profile.json"]
    )
    """The cost of each layer on each device type: the path of a profile, or its content. None: measured when the run
    needs it, and estimated for unavailable types.
    """
    emulate: bool = Field(default=False, validate_default=True)
    """Emulate the devices of `file` on CPU devices of this machine: a stage takes the time given by the profile, and
    must fit into that type's memory according to the planner's memory model.
    """
    emulate_links: bool = Field(default=False, validate_default=True)
    """With `emulate`: transfers between stages and to shards take the time of their link in `file`, and an all-reduce
    that of a ring over the slowest link of its devices; flows do not share bandwidth.
    """
    host_bytes_per_second: float | None = Field(default=None, gt=0, allow_inf_nan=False, examples=[16e9])
    """Emulated speed of the link between each CPU device and host memory, both directions together, over which
    swapped tensors move (`memory: swap`); None: as fast as this machine copies.
    """
    stragglers: dict[str, Annotated[float, Field(ge=1, allow_inf_nan=False)]] = Field(default_factory=dict)
    """With `emulate`: device → slowdown factor relative to its profile, to emulate a straggler."""

    @field_validator("emulate")
    @classmethod
    def _has_what_it_plays(cls, emulate: bool, info: ValidationInfo) -> bool:  # noqa: FBT001 - a validator's signature
        if not emulate:
            return emulate
        if info.data.get("devices"):
            raise ValueError("and `devices` exclude each other; keep one of the two emulations")
        if info.data.get("file", "mentioned elsewhere") is None:
            raise ValueError("needs `cluster.file`, which defines the emulated devices; give its path")
        return emulate

    @field_validator("emulate_links")
    @classmethod
    def _of_emulated_devices(cls, links: bool, info: ValidationInfo) -> bool:  # noqa: FBT001 - a validator's signature
        if links and info.data.get("emulate") is False:
            raise ValueError("needs `emulate: true`, which maps the links to stages")
        return links

    @field_validator("stragglers")
    @classmethod
    def _of_known_devices(cls, stragglers: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        if stragglers and info.data.get("emulate") is False:
            raise ValueError("need `emulate: true`")
        cluster: Cluster | None = info.data.get("file")
        known = list(cluster.devices) if cluster is not None else list(stragglers)
        for device in stragglers:
            if device not in known:
                raise ValueError(f"name {shown(device)}; {did_you_mean(device, known)}")
        return stragglers


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_VARIABLE_PATTERN = re.compile(r"[A-Za-z_*?][A-Za-z0-9_*?]*", re.ASCII)

#: Variables that a job cannot set, with the reason.
_NOT_SETTABLE: Mapping[str, tuple[str, ...]] = {
    "hetpipe sets it itself": ("HETPIPE_*", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    "it determines which programs and libraries run, which is up to the operator": (
        *("PATH", "HOME", "SHELL", "IFS", "ENV", "BASH_ENV", "LD_*", "PYTHON*", "GCONV_PATH", "GLIBC_TUNABLES"),
        *("MALLOC_*", "VIRTUAL_ENV", "CONDA_PREFIX", "NVIDIA_*", "GRPC_*", "SSL_CERT_*"),
    ),
}


class EnvironmentSection(Section):
    """Environment variables of the processes that run your code, in addition to those that every program needs."""

    inherit: tuple[str, ...] | None = Field(default=None, examples=["[HF_HOME, 'WANDB_*']"])
    """Names or patterns (`*`, `?`) of variables that each agent passes on from its own environment; their values are
    not stored anywhere. None: all of them, or none if the agent serves other machines. There, inherited and set
    variables must be permitted by the operator's `--allow-environment`.
    """
    set: dict[str, str] = Field(default_factory=dict, examples=["{WANDB_MODE: offline}"])
    """Name → value. They are part of the job, in its files and at the coordinator: do not use them for secrets."""

    @field_validator("inherit")
    @classmethod
    def _names(cls, inherit: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in inherit or ():
            if not _VARIABLE_PATTERN.fullmatch(name):
                raise ValueError(
                    f"{shown(name)} is neither the name of a variable nor a pattern of names; write for example HF_HOME"
                )
            if name.startswith("HETPIPE_"):
                raise ValueError(f"{name} cannot be inherited: hetpipe sets it itself; remove it")
        return inherit

    @field_validator("set")
    @classmethod
    def _may_be_set(cls, given: dict[str, str]) -> dict[str, str]:
        for name, value in given.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{shown(name)} is not the name of a variable; write for example HF_HOME")
            for why, patterns in _NOT_SETTABLE.items():
                if any(fnmatchcase(name, pattern) for pattern in patterns):
                    raise ValueError(f"{name} cannot be set by a job: {why}; remove it")
            if "\0" in value:
                raise ValueError(f"{name} has a NUL character, which variables cannot contain; remove it")
        return given


class CheckpointSection(Section):
    """Checkpoints in addition to those at the end of each epoch and of the run."""

    every_waves: PositiveInt | None = Field(default=None, examples=[50])
    """Interval in waves of barriers with a checkpoint; None: only where a barrier is due anyway."""
    keep: PositiveInt = 3
    """Number of newest checkpoints kept; older ones are deleted, except the newest one with the state of an absent
    virtual worker, and the best one.
    """
    best: str | None = Field(default=None, min_length=1, examples=["accuracy"])
    """Metric of evaluations by which the best checkpoint is kept as well; smaller is better for losses and
    perplexities, larger for others. None: that of `early_stopping`, if it is set.
    """
