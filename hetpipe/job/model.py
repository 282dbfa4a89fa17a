"""The job model: the content of `job.yaml`, validated and frozen.

Constructing a `Job`, from Python or from a file, reports every mistake at once as a `JobError`. A key without a value
(`eval:` in YAML, None in Python) counts as not given. The effect of the keys on training is defined in
docs/semantics/wsp.md; terms are those of docs/glossary.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import PydanticCustomError

from hetpipe.errors import JobError
from hetpipe.job.early import EarlyStoppingSection, TrainingTime
from hetpipe.job.elastic import ElasticSection
from hetpipe.job.freezing import FreezeSection
from hetpipe.job.live_moves import Obstacle, obstacle_to_live_moves
from hetpipe.job.log import LogSection
from hetpipe.job.patience import PatienceSection
from hetpipe.job.rules import contradictions
from hetpipe.job.sections import (
    DEFAULT_MINIBATCHES_PER_WAVE,
    Call,
    CheckpointSection,
    ClusterSection,
    DataSection,
    DeviceEmulation,
    EnvironmentSection,
    EvaluateSection,
    LayerCounts,
    Losses,
    MeanOver,
    Memory,
    ParameterServersSection,
    PositiveInt,
    Reference,
    Section,
    SyncSection,
    WorkersSection,
    checked_value_name,
)
from hetpipe.job.survive import SurviveSection
from hetpipe.job.training import GradientsSection, LrScheduleSpec, OptimizerSpec, PredictionSection
from hetpipe.values.catalogue import CATALOGUE
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.plan import VirtualWorkerPlan
from hetpipe.values.policies import POLICIES, HistoryDetail, LinkKind, Schedule, WeightPolicy
from hetpipe.values.precision import Precision
from hetpipe.values.problems import Path, Problem, problems_of, refusal, shown
from hetpipe.values.run import DeviceConfig
from hetpipe.values.storage_url import checked_url
from hetpipe.values.suggest import did_you_mean
from hetpipe.values.sync import DataSpec, SyncKind, SyncSpec

MAX_SEED = (1 << 63) - 1
"""Seeds are encoded as signed 64-bit integers."""

_FILE_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def _checked_job_name(name: str) -> str:
    if not _FILE_SAFE_NAME.fullmatch(name):
        raise ValueError(
            "is part of the name of the run's folder: use 1 to 64 letters, digits, dots, dashes or "
            f"underscores, beginning with a letter or digit, not {shown(name)}"
        )
    return name


#: Names of the metrics in `hetpipe.pipeline.metrics`.
SHIPPED_METRICS = ("accuracy", "f1", "f1_binary", "next_token_perplexity", "perplexity")
_ShippedMetric = Annotated[str, Field(json_schema_extra={"enum": list(SHIPPED_METRICS)})]


def shipped_metric(name: str) -> str:
    """The reference of a shipped metric."""
    return f"hetpipe.pipeline.metrics:{name}"


def _among_shipped(name: object) -> str:
    return did_you_mean(str(name), SHIPPED_METRICS)


class Job(Section):
    """The complete specification of a run. Equal jobs on equal data give equal runs.

    `Job(model=…, sync={"D": 4}, …)` accepts sections as mappings, like the file.
    """

    name: Annotated[str, AfterValidator(_checked_job_name)] = Field(default="job", examples=["digits"])
    """Prefix of the name of the run's folder."""
    model: Call = Field(examples=["model:build"])
    """Callable that returns the `nn.Module`; with arguments as `{call: module:callable, args: {…}}`. An
    `nn.Sequential`, or a module with a method `layers()`, is cut between its entries; any other model is cut within its
    own forward.
    """
    init_from: str | None = Field(default=None, min_length=1, examples=["runs/digits-20261120-122640"])
    """Initial weights, instead of those that `model` returns: a run (its folder or URL; its newest checkpoint), the
    folder of a checkpoint, or a file `*.safetensors`, by a path relative to the folder from which code is imported.
    Weights and buffers only, all of them: the optimizer and the counts begin anew, unlike with `--resume`.
    """
    loss: Losses | None = Field(default=None, examples=["torch.nn.functional:cross_entropy"])
    """Called with (output, target) of a minibatch, or with (output, batch) where a sample is a mapping; returns the
    mean over its samples as a scalar. None: computed by the model, whose output has it as `.loss` or `["loss"]`. Or
    several by name, `{main: {call: …, weight: 1.0}, aux: …}`: their weighted sum is trained.
    """
    metrics: dict[Annotated[str, AfterValidator(checked_value_name)], Reference] = Field(default_factory=dict)
    """Name → callable with the signature of `loss`, or the name of a shipped metric; or a list of these names.
    Evaluated together with the loss.
    """
    mean_over: MeanOver = "samples"
    """Weight of a minibatch in a mean over several: its `samples`, its `tokens` (targets that are not −100), its
    `next_tokens` (those without the first of each sequence), or the number that a `module:callable` returns for the
    target or batch.
    """
    data: DataSection = Field(examples=["{train: model:train_data}"])
    batch_size: PositiveInt = Field(default=32, examples=[32])
    """Samples per minibatch, the unit that enters a pipeline."""
    tokens_per_sample: PositiveInt | None = Field(default=None, examples=[1024])
    """Tokens per sample, to report tokens/s beside samples/s; None: the length of the samples, if it is the same for
    all and their first input is a tensor of integers (ids).
    """
    minibatches: PositiveInt | None = Field(default=None, examples=[1000])
    """Length of the run in minibatches per virtual worker, instead of `epochs`."""
    epochs: PositiveInt | None = Field(default=None, validate_default=True, examples=[3])
    """Length of the run in passes over the training data, instead of `minibatches`."""
    max_time: TrainingTime | None = Field(default=None, examples=["8h"])
    """Time of training after which the run ends at the next barrier, with a checkpoint, as finished; None: no limit."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Place in the queue of a cluster: of the waiting jobs those with a higher one go first. Running jobs continue."""
    early_stopping: EarlyStoppingSection | None = Field(default=None, examples=["{metric: loss, patience: 3}"])
    """End the run, as finished, when evaluations no longer get better; None: at its planned end."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """Seed of initialization, dropout and the order of the samples."""
    optimizer: OptimizerSpec = Field(examples=["{name: SGD, lr: 0.1}"])
    workers: WorkersSection = WorkersSection()
    sync: SyncSection = SyncSection()
    weights: WeightPolicy = "wave"
    """The weight policy: the weights a minibatch uses, and the number of minibatches per update."""
    precision: Precision = "fp32"
    """Number format of forward and backward passes: `fp32`, that of the model's own tensors; `bf16`, torch's autocast
    to bfloat16 with fp32 weights and updates; `fp16`, the same to float16, with a dynamic scale of the loss.
    """
    memory: Memory = "keep"
    """What becomes of the tensors that a layer's backward needs, from its forward on: `keep`, `recompute` them in a
    second forward before the backward, all layers of a stage in one run, or `swap` them to host memory; `auto`, which
    requires a plan or emulated devices: for each stage the fastest that fits in its device's memory. Or by pattern
    (`*`, `?`) of the layers' names, of which the first that matches decides, else `keep`: `{h.0: keep, 'h.*':
    recompute}`; there `recompute-new-run` also begins a run. No result changes, except by `recompute` under `weights:
    predict` and `spectrain`.
    """
    schedule: Literal["auto", Schedule] = "auto"
    """The order in which a stage computes; `auto` is the default of the weight policy."""
    gradients: GradientsSection = GradientsSection()
    lr_schedule: LrScheduleSpec | None = Field(default=None, examples=["{name: CosineAnnealingLR, T_max: 1000}"])
    """Schedule of the learning rate, stepped per update; None: constant."""
    prediction: PredictionSection = PredictionSection()
    parameter_servers: ParameterServersSection = ParameterServersSection()
    link: Literal["auto", LinkKind] = "auto"
    """Transport of activations and gradients between stages; `auto` is `shared_memory` within a node, `grpc` between
    nodes with TLS, else `gloo`, which is not encrypted.
    """
    cluster: ClusterSection = ClusterSection()
    environment: EnvironmentSection = EnvironmentSection()
    history: HistoryDetail = "full"
    """Histories written for `hetpipe check`: `full` every minibatch's passes, weights and updates; `summary` one line
    per wave and stage, which suffices to verify the staleness bound, exactly-once application and sample accounting,
    but neither each minibatch's weights nor the order of its work; `off` nothing, so nothing can be verified.
    """
    evaluate: EvaluateSection = EvaluateSection()
    log: LogSection = LogSection()
    storage: Annotated[str, AfterValidator(checked_url)] | None = Field(default=None, examples=["s3://bucket/runs"])
    """URL of an object store (`s3://`, `gs://`, `abfs://`, `file:///`) below which each run keeps its checkpoints, so
    that its processes need not share a file system; None: in the folder of the run.
    """
    survive: SurviveSection = SurviveSection()
    patience: PatienceSection = PatienceSection()
    elastic: ElasticSection = ElasticSection()
    freeze: FreezeSection = FreezeSection()
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), validate_default=True)

    def __init__(self, **values: Any) -> None:
        """Validate `values`, with sections as mappings.

        Raises:
            JobError: lists every mistake.
        """
        given = normalised(values)
        try:
            super().__init__(**given)
        except ValidationError as error:
            problems = problems_of(error, type(self))
            raise JobError([str(Problem(_as_written(p.path, given), p.message)) for p in problems]) from None
        if self.is_planned and self.sync.minibatches_per_wave == "auto":
            self.__dict__["sync"] = self.sync.model_copy(update={"minibatches_per_wave": DEFAULT_MINIBATCHES_PER_WAVE})

    @classmethod
    def model_validate(cls, obj: Any, **_: Any) -> Self:
        """Create a job from a mapping, for example the result of `model_dump`.

        Raises:
            JobError: lists every mistake.
        """
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise JobError(f"a job is a mapping of keys, not {shown(obj)}")
        values = {str(key): value for key, value in obj.items()}
        if "self" in values:
            raise JobError("self: unknown key; remove it")  # Python's own name of the first argument
        return cls(**values)

    @field_validator("history", mode="before", json_schema_input_type=HistoryDetail | Literal[False])
    @classmethod
    def _off_is_a_word(cls, history: object) -> object:
        """YAML parses `off` as false."""
        return "off" if history is False else history

    @field_validator("metrics", mode="before", json_schema_input_type=tuple[_ShippedMetric, ...] | dict[str, str])
    @classmethod
    def _shipped_metrics(cls, metrics: object) -> object:
        """A list names shipped metrics; in a mapping their names stand for their references."""
        if isinstance(metrics, tuple):
            unknown = [name for name in metrics if name not in SHIPPED_METRICS]
            if unknown:
                raise ValueError(
                    f"a list names shipped metrics, and {shown(unknown[0])} is not one; {_among_shipped(unknown[0])}, "
                    "or name your own: `metrics: {mine: model:mine}`"
                )
            return {name: shipped_metric(name) for name in metrics}
        if isinstance(metrics, Mapping):
            return {
                name: shipped_metric(value) if isinstance(value, str) and value in SHIPPED_METRICS else value
                for name, value in metrics.items()
            }
        return metrics

    @field_validator("sync", mode="before", json_schema_input_type=SyncKind | SyncSection)
    @classmethod
    def _kind_from_shorthand(cls, sync: object) -> object:
        return {"kind": sync} if isinstance(sync, str) else sync

    @field_validator(
        "cluster",
        mode="before",
        json_schema_input_type=ClusterSection | DeviceEmulation | tuple[DeviceEmulation, ...],
    )
    @classmethod
    def _devices_from_shorthand(cls, cluster: object) -> object:
        if isinstance(cluster, tuple):
            return {"devices": cluster}
        if isinstance(cluster, Mapping) and cluster and not cluster.keys() & ClusterSection.model_fields.keys():
            return {"devices": (cluster,)}
        return cluster

    @field_validator("epochs")
    @classmethod
    def _one_length(cls, epochs: int | None, info: ValidationInfo) -> int | None:
        if "minibatches" not in info.data:
            return epochs
        minibatches = info.data["minibatches"]
        if epochs is None and minibatches is None:
            raise PydanticCustomError(
                "absent", "neither epochs nor minibatches is given; add one, for example `epochs: 3`"
            )
        if epochs is not None and minibatches is not None:
            raise ValueError(f"both epochs ({epochs}) and minibatches ({minibatches}) are given; remove one")
        return epochs

    @field_validator("checkpoint", mode="wrap")
    @classmethod
    def _keys_go_together(
        cls, checkpoint: object, check: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> CheckpointSection:
        """Cross-key checks run at the last key, when all individually valid keys are available."""
        try:
            checked: CheckpointSection = check(checkpoint)
        except ValidationError as error:
            own = problems_of(error, CheckpointSection)
            problems = list(contradictions(info.data))
            problems += [Problem(("checkpoint", *problem.path), problem.message) for problem in own]
            raise refusal(problems) from None
        problems = list(contradictions({**info.data, "checkpoint": checked}))
        if problems:
            raise refusal(problems)
        return checked

    @property
    def freezes(self) -> bool:
        """Whether layers freeze."""
        return self.freeze.is_used or bool(self.elastic.freezes)

    @property
    def is_planned(self) -> bool:
        """Whether the number of virtual workers and of their stages is known; always true after `with_plan`."""
        return self.workers.stages != "auto"

    @property
    def num_workers(self) -> int:
        """V.

        Raises:
            JobError: it is not planned yet.
        """
        if self.workers.count is None:
            raise JobError(
                "workers.stages: is `auto`, so the virtual workers are unknown before the run is planned; use "
                "the job.json in the folder of a run"
            )
        return self.workers.count

    @property
    def num_ever(self) -> int:
        """The number of virtual workers, with those that only the script adds.

        Raises:
            JobError: it is not planned yet.
        """
        return self.num_workers + len(self.elastic.added)

    @property
    def num_devices(self) -> int:
        """Devices used by the whole run: one per stage of every virtual worker, and those that only the script uses."""
        return max([self.num_initial_devices, *(1 + max(line.devices or (-1,)) for _, line in self.elastic.added)])

    @property
    def num_initial_devices(self) -> int:
        """One per stage of every virtual worker that the job has without its script."""
        return sum(self.num_stages(VirtualWorkerIndex(vw)) for vw in range(self.num_workers))

    @property
    def total_minibatches(self) -> int | None:
        """Minibatches of the whole run over all virtual workers, or None when `epochs` bounds it."""
        return None if self.minibatches is None else self.minibatches * self.num_workers

    def layer_counts(self, vw: VirtualWorkerIndex) -> LayerCounts | None:
        """Layers of each stage of `vw`, first to last, or None if the cut is chosen by hetpipe."""
        stages = self.workers.stages
        given = dict(enumerate(stages)) if isinstance(stages, tuple) else {}
        return (given | {line.vw: line.stages for _, line in self.elastic.added}).get(vw)

    def num_stages(self, vw: VirtualWorkerIndex) -> int:
        """K of virtual worker `vw`."""
        counts, stages = self.layer_counts(vw), self.workers.stages
        if counts is not None:
            return len(counts)
        assert not isinstance(stages, tuple), "lists of layers are those of every virtual worker"
        return int(stages)

    @property
    def minibatches_per_wave(self) -> int | tuple[int, ...]:
        """N, or that of each virtual worker.

        Raises:
            JobError: it is not planned yet.
        """
        given = self.sync.minibatches_per_wave
        if isinstance(given, str):
            raise JobError(f"sync.minibatches_per_wave: is `{given}`, so it is unknown before the run is planned")
        return given

    def minibatches_of(self, vw: VirtualWorkerIndex) -> int:
        """N_v of virtual worker `vw`, which the job has.

        Raises:
            JobError: it is not planned yet.
        """
        given = self.minibatches_per_wave
        return given if isinstance(given, int) else given[vw]

    def minibatches_in(self, worker: VirtualWorkerPlan) -> int:
        """N_v of a virtual worker of the job's plan, possibly added to the run later.

        Raises:
            JobError: it is not planned yet.
        """
        return worker.minibatches_per_wave or self.minibatches_of(worker.index)

    def minibatches_by_worker(self, workers: Sequence[VirtualWorkerPlan]) -> dict[VirtualWorkerIndex, int]:
        """N_v of each virtual worker of a plan; empty if the job has one N for all.

        Raises:
            JobError: it is not planned yet.
        """
        if isinstance(self.minibatches_per_wave, int):
            return {}
        return {worker.index: self.minibatches_in(worker) for worker in workers}

    @property
    def staleness(self) -> int | None:
        """D; None: unbounded.

        Raises:
            JobError: it is not planned yet.
        """
        if self.sync.D == "auto":
            raise JobError("sync.D: is `auto`, so it is unknown before the run is planned")
        return self.sync.D

    def with_plan(
        self,
        layer_counts: Sequence[Sequence[int]],
        minibatches_per_wave: int | Sequence[int],
        staleness: int | None,
    ) -> Job:
        """A copy with a plan in place of `stages: auto`.

        Args:
            layer_counts: of each stage of each virtual worker.
            minibatches_per_wave: N, or that of each virtual worker.
            staleness: the chosen D, for a job with `D: auto`.
        """
        values = self.model_dump()
        if self.sync.D == "auto":
            values["sync"] |= {"D": staleness, "max_D": None}
        stages = tuple(tuple(counts) for counts in layer_counts)
        values["workers"] = {"stages": stages}
        values["sync"]["minibatches_per_wave"] = (
            minibatches_per_wave if isinstance(minibatches_per_wave, int) else tuple(minibatches_per_wave)
        )
        return Job(**values)

    def sync_spec(self, worker: VirtualWorkerPlan | None = None) -> SyncSpec:
        """The synchronization rule in the form used by shards and stages.

        Args:
            worker: the virtual worker whose N it has; None: the rule of the whole job, with the smallest N.
        """
        given = self.minibatches_per_wave
        least = given if isinstance(given, int) else min(given)
        return SyncSpec(
            minibatches_per_wave=least if worker is None else self.minibatches_in(worker),
            staleness=self.staleness,
            combine=self.sync.combine or "sum",
            deterministic=self.sync.deterministic and self.has_shards,
            weights=self.weights,
            pull=self.sync.pull,
            compress_pushes=self.sync.compress_pushes,
        )

    @property
    def order(self) -> Schedule:
        """The schedule, with `auto` resolved."""
        return POLICIES[self.weights].schedule_of(self.schedule)

    @property
    def obstacle_to_live_moves(self) -> Obstacle | None:
        """Why layers move at barriers only; None: they also do between them."""
        return obstacle_to_live_moves(
            self.weights, self.sync, self.gradients, self.precision, self.evaluate, self.freeze, self.elastic
        )

    @property
    def has_shards(self) -> bool:
        """Whether parameter servers hold the weights; under `none` and `allreduce` only the stages do."""
        return self.sync.traits.has_shards

    def data_spec(self, num_samples: int, homes: tuple[int, ...] = ()) -> DataSpec:
        """The data specification for a training set of `num_samples` samples, which may belong to nodes."""
        return DataSpec(num_samples, self.batch_size, self.seed, self.epochs, self.total_minibatches, homes)

    def emulated_devices(self, num_more: int = 0) -> tuple[DeviceConfig, ...]:
        """The emulated device of every stage of the run, in the order of assignment.

        Empty without emulation. `num_more` stages added to the job later come last; none of these is faster than the
        fastest initial one.
        """
        entries = self.cluster.devices
        if not entries:
            return ()
        used = [entries[index % len(entries)] for index in range(self.num_devices + num_more)]
        peaks = [CATALOGUE[entry.emulate_as].fp32_flops_per_second if entry.emulate_as else None for entry in used]
        fastest = max((peak for peak in peaks[: self.num_devices] if peak is not None), default=1.0)
        return tuple(
            DeviceConfig(
                "cpu", slowdown=max(1.0, fastest / peak) if peak else entry.slowdown or 1.0, jitter=entry.jitter
            )
            for entry, peak in zip(used, peaks, strict=True)
        )


def normalised(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with text keys, without keys that have no value, and with tuples for lists.

    In the arguments of a call, `null` is a value: that of an argument whose default is another one.
    """

    def walk(value: Any, *, is_argument: bool) -> Any:
        if isinstance(value, Mapping):
            return {
                str(key): walk(entry, is_argument=is_argument or (key == "args" and "call" in value))
                for key, entry in value.items()
                if entry is not None or is_argument
            }
        if isinstance(value, list | tuple):
            return tuple(walk(entry, is_argument=is_argument) for entry in value)
        return value

    result: dict[str, Any] = walk(values, is_argument=False)
    return result


def _as_written(path: Path, given: Mapping[str, Any]) -> Path:
    """Map the path of a problem back to the short form that the user wrote."""
    if path[:1] == ("sync",) and isinstance(given.get("sync"), str):
        return ("sync",)
    cluster = given.get("cluster")
    if path[:2] == ("cluster", "devices"):
        if isinstance(cluster, tuple):
            return ("cluster", *path[2:])
        if isinstance(cluster, Mapping) and not cluster.keys() & ClusterSection.model_fields.keys():
            return ("cluster", *path[3:])
    return path
