from hetpipe.proto.v2 import values_pb2 as _values_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_SUBMITTED: _ClassVar[JobState]
    JOB_STATE_INSPECTING: _ClassVar[JobState]
    JOB_STATE_PLANNING: _ClassVar[JobState]
    JOB_STATE_STARTING: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_STOPPING: _ClassVar[JobState]
    JOB_STATE_FINISHED: _ClassVar[JobState]
    JOB_STATE_STOPPED: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_PENDING: _ClassVar[JobState]

class StopMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_MODE_UNSPECIFIED: _ClassVar[StopMode]
    STOP_MODE_CHECKPOINT: _ClassVar[StopMode]
    STOP_MODE_NOW: _ClassVar[StopMode]
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_SUBMITTED: JobState
JOB_STATE_INSPECTING: JobState
JOB_STATE_PLANNING: JobState
JOB_STATE_STARTING: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_STOPPING: JobState
JOB_STATE_FINISHED: JobState
JOB_STATE_STOPPED: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_PENDING: JobState
STOP_MODE_UNSPECIFIED: StopMode
STOP_MODE_CHECKPOINT: StopMode
STOP_MODE_NOW: StopMode

class RegisterRequest(_message.Message):
    __slots__ = ("member", "version")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    member: _values_pb2.MemberInfo
    version: str
    def __init__(self, member: _Optional[_Union[_values_pb2.MemberInfo, _Mapping]] = ..., version: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("registration", "lease_seconds", "order", "fence")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    registration: str
    lease_seconds: float
    order: int
    fence: int
    def __init__(self, registration: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., order: _Optional[int] = ..., fence: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("member_id", "registration", "clocks", "jobs", "last_command", "lost", "conditions")
    class ClocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _values_pb2.ClockSnapshot
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_values_pb2.ClockSnapshot, _Mapping]] = ...) -> None: ...
    class LostEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ConditionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _values_pb2.Conditions
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_values_pb2.Conditions, _Mapping]] = ...) -> None: ...
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMAND_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    registration: str
    clocks: _containers.MessageMap[str, _values_pb2.ClockSnapshot]
    jobs: _containers.RepeatedScalarFieldContainer[str]
    last_command: int
    lost: _containers.ScalarMap[str, str]
    conditions: _containers.MessageMap[str, _values_pb2.Conditions]
    def __init__(self, member_id: _Optional[str] = ..., registration: _Optional[str] = ..., clocks: _Optional[_Mapping[str, _values_pb2.ClockSnapshot]] = ..., jobs: _Optional[_Iterable[str]] = ..., last_command: _Optional[int] = ..., lost: _Optional[_Mapping[str, str]] = ..., conditions: _Optional[_Mapping[str, _values_pb2.Conditions]] = ...) -> None: ...

class Renewal(_message.Message):
    __slots__ = ("lease_seconds", "ended_jobs", "fence")
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_JOBS_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    ended_jobs: _containers.RepeatedScalarFieldContainer[str]
    fence: int
    def __init__(self, lease_seconds: _Optional[float] = ..., ended_jobs: _Optional[_Iterable[str]] = ..., fence: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("member_id", "registration")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    registration: str
    def __init__(self, member_id: _Optional[str] = ..., registration: _Optional[str] = ...) -> None: ...

class WatchCommandsRequest(_message.Message):
    __slots__ = ("agent_id", "registration", "after")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    registration: str
    after: int
    def __init__(self, agent_id: _Optional[str] = ..., registration: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class InspectCommand(_message.Message):
    __slots__ = ("job_id", "job_json", "import_path", "run_dir", "with_model", "measure", "code")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_JSON_FIELD_NUMBER: _ClassVar[int]
    IMPORT_PATH_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    WITH_MODEL_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    job_json: _values_pb2.Document
    import_path: str
    run_dir: str
    with_model: bool
    measure: _containers.RepeatedScalarFieldContainer[str]
    code: str
    def __init__(self, job_id: _Optional[str] = ..., job_json: _Optional[_Union[_values_pb2.Document, _Mapping]] = ..., import_path: _Optional[str] = ..., run_dir: _Optional[str] = ..., with_model: bool = ..., measure: _Optional[_Iterable[str]] = ..., code: _Optional[str] = ...) -> None: ...

class StageConfig(_message.Message):
    __slots__ = ("job", "plan", "vw", "stage", "incarnation", "device", "shard_addresses", "run_dir", "import_path", "host", "restore", "shard_ids", "emulation", "homes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SHARD_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    IMPORT_PATH_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    SHARD_IDS_FIELD_NUMBER: _ClassVar[int]
    EMULATION_FIELD_NUMBER: _ClassVar[int]
    HOMES_FIELD_NUMBER: _ClassVar[int]
    job: _values_pb2.Document
    plan: _values_pb2.Plan
    vw: int
    stage: int
    incarnation: int
    device: _values_pb2.DeviceConfig
    shard_addresses: _containers.RepeatedScalarFieldContainer[str]
    run_dir: str
    import_path: str
    host: str
    restore: str
    shard_ids: _containers.RepeatedScalarFieldContainer[str]
    emulation: _values_pb2.StageEmulation
    homes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job: _Optional[_Union[_values_pb2.Document, _Mapping]] = ..., plan: _Optional[_Union[_values_pb2.Plan, _Mapping]] = ..., vw: _Optional[int] = ..., stage: _Optional[int] = ..., incarnation: _Optional[int] = ..., device: _Optional[_Union[_values_pb2.DeviceConfig, _Mapping]] = ..., shard_addresses: _Optional[_Iterable[str]] = ..., run_dir: _Optional[str] = ..., import_path: _Optional[str] = ..., host: _Optional[str] = ..., restore: _Optional[str] = ..., shard_ids: _Optional[_Iterable[str]] = ..., emulation: _Optional[_Union[_values_pb2.StageEmulation, _Mapping]] = ..., homes: _Optional[_Iterable[int]] = ...) -> None: ...

class StartStageCommand(_message.Message):
    __slots__ = ("job_id", "config", "code")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    config: StageConfig
    code: str
    def __init__(self, job_id: _Optional[str] = ..., config: _Optional[_Union[StageConfig, _Mapping]] = ..., code: _Optional[str] = ...) -> None: ...

class StopJobCommand(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class StopVirtualWorkerCommand(_message.Message):
    __slots__ = ("job_id", "vw", "incarnation", "term")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    vw: int
    incarnation: int
    term: int
    def __init__(self, job_id: _Optional[str] = ..., vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class LinkTask(_message.Message):
    __slots__ = ("number", "other", "run_dir", "link", "address", "with_copies")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WITH_COPIES_FIELD_NUMBER: _ClassVar[int]
    number: int
    other: str
    run_dir: str
    link: str
    address: str
    with_copies: bool
    def __init__(self, number: _Optional[int] = ..., other: _Optional[str] = ..., run_dir: _Optional[str] = ..., link: _Optional[str] = ..., address: _Optional[str] = ..., with_copies: bool = ...) -> None: ...

class MeasureLinkCommand(_message.Message):
    __slots__ = ("job_id", "task")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    task: LinkTask
    def __init__(self, job_id: _Optional[str] = ..., task: _Optional[_Union[LinkTask, _Mapping]] = ...) -> None: ...

class KeepLinksCommand(_message.Message):
    __slots__ = ("job_id", "measured")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    measured: _values_pb2.MeasuredLinks
    def __init__(self, job_id: _Optional[str] = ..., measured: _Optional[_Union[_values_pb2.MeasuredLinks, _Mapping]] = ...) -> None: ...

class NumberedCommand(_message.Message):
    __slots__ = ("sequence", "inspect_command", "start_stage_command", "stop_job_command", "stop_virtual_worker_command", "measure_link_command", "keep_links_command")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INSPECT_COMMAND_FIELD_NUMBER: _ClassVar[int]
    START_STAGE_COMMAND_FIELD_NUMBER: _ClassVar[int]
    STOP_JOB_COMMAND_FIELD_NUMBER: _ClassVar[int]
    STOP_VIRTUAL_WORKER_COMMAND_FIELD_NUMBER: _ClassVar[int]
    MEASURE_LINK_COMMAND_FIELD_NUMBER: _ClassVar[int]
    KEEP_LINKS_COMMAND_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    inspect_command: InspectCommand
    start_stage_command: StartStageCommand
    stop_job_command: StopJobCommand
    stop_virtual_worker_command: StopVirtualWorkerCommand
    measure_link_command: MeasureLinkCommand
    keep_links_command: KeepLinksCommand
    def __init__(self, sequence: _Optional[int] = ..., inspect_command: _Optional[_Union[InspectCommand, _Mapping]] = ..., start_stage_command: _Optional[_Union[StartStageCommand, _Mapping]] = ..., stop_job_command: _Optional[_Union[StopJobCommand, _Mapping]] = ..., stop_virtual_worker_command: _Optional[_Union[StopVirtualWorkerCommand, _Mapping]] = ..., measure_link_command: _Optional[_Union[MeasureLinkCommand, _Mapping]] = ..., keep_links_command: _Optional[_Union[KeepLinksCommand, _Mapping]] = ...) -> None: ...

class StagePhase(_message.Message):
    __slots__ = ("phase", "seconds")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    phase: str
    seconds: float
    def __init__(self, phase: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class StageReady(_message.Message):
    __slots__ = ("pid", "link")
    PID_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    pid: int
    link: str
    def __init__(self, pid: _Optional[int] = ..., link: _Optional[str] = ...) -> None: ...

class StageProgress(_message.Message):
    __slots__ = ("minibatches", "samples", "clock", "published", "loss", "first_loss", "waiting_seconds", "idle_seconds", "compute_seconds", "pushed_bytes", "pulled_bytes", "weight_bytes", "activation_bytes", "gradient_norm", "learning_rate", "losses", "first_losses", "loss_scale", "skipped_updates", "memory", "cache")
    class LossesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class FirstLossesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOSS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PUSHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOSSES_FIELD_NUMBER: _ClassVar[int]
    LOSS_SCALE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_UPDATES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    minibatches: int
    samples: int
    clock: int
    published: int
    loss: float
    first_loss: float
    waiting_seconds: float
    idle_seconds: float
    compute_seconds: float
    pushed_bytes: int
    pulled_bytes: int
    weight_bytes: int
    activation_bytes: int
    gradient_norm: float
    learning_rate: float
    losses: _containers.ScalarMap[str, float]
    first_losses: _containers.ScalarMap[str, float]
    loss_scale: float
    skipped_updates: int
    memory: _containers.RepeatedScalarFieldContainer[str]
    cache: CacheUse
    def __init__(self, minibatches: _Optional[int] = ..., samples: _Optional[int] = ..., clock: _Optional[int] = ..., published: _Optional[int] = ..., loss: _Optional[float] = ..., first_loss: _Optional[float] = ..., waiting_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., pushed_bytes: _Optional[int] = ..., pulled_bytes: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., activation_bytes: _Optional[int] = ..., gradient_norm: _Optional[float] = ..., learning_rate: _Optional[float] = ..., losses: _Optional[_Mapping[str, float]] = ..., first_losses: _Optional[_Mapping[str, float]] = ..., loss_scale: _Optional[float] = ..., skipped_updates: _Optional[int] = ..., memory: _Optional[_Iterable[str]] = ..., cache: _Optional[_Union[CacheUse, _Mapping]] = ...) -> None: ...

class CacheUse(_message.Message):
    __slots__ = ("reads", "computed", "read_bytes", "kept_bytes", "stopped")
    READS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    reads: int
    computed: int
    read_bytes: int
    kept_bytes: int
    stopped: str
    def __init__(self, reads: _Optional[int] = ..., computed: _Optional[int] = ..., read_bytes: _Optional[int] = ..., kept_bytes: _Optional[int] = ..., stopped: _Optional[str] = ...) -> None: ...

class StageWaiting(_message.Message):
    __slots__ = ("sentence", "seconds")
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    sentence: str
    seconds: float
    def __init__(self, sentence: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class StageEvaluation(_message.Message):
    __slots__ = ("clock", "epoch", "samples", "sums", "minibatches", "within_epoch", "whole", "weight", "ratios")
    class SumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class RatiosEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: RatioSums
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[RatioSums, _Mapping]] = ...) -> None: ...
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    WITHIN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    RATIOS_FIELD_NUMBER: _ClassVar[int]
    clock: int
    epoch: int
    samples: int
    sums: _containers.ScalarMap[str, float]
    minibatches: int
    within_epoch: bool
    whole: bool
    weight: int
    ratios: _containers.MessageMap[str, RatioSums]
    def __init__(self, clock: _Optional[int] = ..., epoch: _Optional[int] = ..., samples: _Optional[int] = ..., sums: _Optional[_Mapping[str, float]] = ..., minibatches: _Optional[int] = ..., within_epoch: bool = ..., whole: bool = ..., weight: _Optional[int] = ..., ratios: _Optional[_Mapping[str, RatioSums]] = ...) -> None: ...

class RatioSums(_message.Message):
    __slots__ = ("numerators", "denominators", "exponential")
    NUMERATORS_FIELD_NUMBER: _ClassVar[int]
    DENOMINATORS_FIELD_NUMBER: _ClassVar[int]
    EXPONENTIAL_FIELD_NUMBER: _ClassVar[int]
    numerators: _containers.RepeatedScalarFieldContainer[float]
    denominators: _containers.RepeatedScalarFieldContainer[float]
    exponential: bool
    def __init__(self, numerators: _Optional[_Iterable[float]] = ..., denominators: _Optional[_Iterable[float]] = ..., exponential: bool = ...) -> None: ...

class StageConditions(_message.Message):
    __slots__ = ("conditions",)
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    conditions: _containers.RepeatedCompositeFieldContainer[_values_pb2.Condition]
    def __init__(self, conditions: _Optional[_Iterable[_Union[_values_pb2.Condition, _Mapping]]] = ...) -> None: ...

class StageFailed(_message.Message):
    __slots__ = ("error", "sentence", "secondary")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    SECONDARY_FIELD_NUMBER: _ClassVar[int]
    error: str
    sentence: str
    secondary: bool
    def __init__(self, error: _Optional[str] = ..., sentence: _Optional[str] = ..., secondary: bool = ...) -> None: ...

class StageDone(_message.Message):
    __slots__ = ("clock", "reason")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    clock: int
    reason: str
    def __init__(self, clock: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class KeyedStageReport(_message.Message):
    __slots__ = ("key", "stage_phase", "stage_ready", "stage_progress", "stage_waiting", "stage_evaluation", "stage_conditions", "stage_failed", "stage_done")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STAGE_PHASE_FIELD_NUMBER: _ClassVar[int]
    STAGE_READY_FIELD_NUMBER: _ClassVar[int]
    STAGE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    STAGE_WAITING_FIELD_NUMBER: _ClassVar[int]
    STAGE_EVALUATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FAILED_FIELD_NUMBER: _ClassVar[int]
    STAGE_DONE_FIELD_NUMBER: _ClassVar[int]
    key: _values_pb2.StageKey
    stage_phase: StagePhase
    stage_ready: StageReady
    stage_progress: StageProgress
    stage_waiting: StageWaiting
    stage_evaluation: StageEvaluation
    stage_conditions: StageConditions
    stage_failed: StageFailed
    stage_done: StageDone
    def __init__(self, key: _Optional[_Union[_values_pb2.StageKey, _Mapping]] = ..., stage_phase: _Optional[_Union[StagePhase, _Mapping]] = ..., stage_ready: _Optional[_Union[StageReady, _Mapping]] = ..., stage_progress: _Optional[_Union[StageProgress, _Mapping]] = ..., stage_waiting: _Optional[_Union[StageWaiting, _Mapping]] = ..., stage_evaluation: _Optional[_Union[StageEvaluation, _Mapping]] = ..., stage_conditions: _Optional[_Union[StageConditions, _Mapping]] = ..., stage_failed: _Optional[_Union[StageFailed, _Mapping]] = ..., stage_done: _Optional[_Union[StageDone, _Mapping]] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("flops", "operations", "recomputed_flops")
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FLOPS_FIELD_NUMBER: _ClassVar[int]
    flops: int
    operations: int
    recomputed_flops: int
    def __init__(self, flops: _Optional[int] = ..., operations: _Optional[int] = ..., recomputed_flops: _Optional[int] = ...) -> None: ...

class LayerMeasurement(_message.Message):
    __slots__ = ("name", "parameters", "activation_bytes", "output_bytes", "forward_ms", "backward_ms", "forward", "backward", "alive", "forbidden")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MS_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_MS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    FORBIDDEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: _containers.RepeatedCompositeFieldContainer[_values_pb2.TensorSpec]
    activation_bytes: int
    output_bytes: int
    forward_ms: float
    backward_ms: float
    forward: Work
    backward: Work
    alive: _containers.RepeatedCompositeFieldContainer[AliveTensor]
    forbidden: _containers.RepeatedCompositeFieldContainer[_values_pb2.ForbiddenPlaces]
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[_Iterable[_Union[_values_pb2.TensorSpec, _Mapping]]] = ..., activation_bytes: _Optional[int] = ..., output_bytes: _Optional[int] = ..., forward_ms: _Optional[float] = ..., backward_ms: _Optional[float] = ..., forward: _Optional[_Union[Work, _Mapping]] = ..., backward: _Optional[_Union[Work, _Mapping]] = ..., alive: _Optional[_Iterable[_Union[AliveTensor, _Mapping]]] = ..., forbidden: _Optional[_Iterable[_Union[_values_pb2.ForbiddenPlaces, _Mapping]]] = ...) -> None: ...

class AliveTensor(_message.Message):
    __slots__ = ("name", "num_bytes", "has_gradient")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAS_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_bytes: int
    has_gradient: bool
    def __init__(self, name: _Optional[str] = ..., num_bytes: _Optional[int] = ..., has_gradient: bool = ...) -> None: ...

class Measurement(_message.Message):
    __slots__ = ("device_type", "layers", "input_bytes", "repeats", "measured_at", "reserve_bytes", "tokens_per_sample", "precision")
    DEVICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    INPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_AT_FIELD_NUMBER: _ClassVar[int]
    RESERVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    device_type: str
    layers: _containers.RepeatedCompositeFieldContainer[LayerMeasurement]
    input_bytes: int
    repeats: int
    measured_at: float
    reserve_bytes: int
    tokens_per_sample: int
    precision: str
    def __init__(self, device_type: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LayerMeasurement, _Mapping]]] = ..., input_bytes: _Optional[int] = ..., repeats: _Optional[int] = ..., measured_at: _Optional[float] = ..., reserve_bytes: _Optional[int] = ..., tokens_per_sample: _Optional[int] = ..., precision: _Optional[str] = ...) -> None: ...

class ProfileStep(_message.Message):
    __slots__ = ("device_type", "layer", "done", "total")
    DEVICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    device_type: str
    layer: str
    done: int
    total: int
    def __init__(self, device_type: _Optional[str] = ..., layer: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class InspectionStep(_message.Message):
    __slots__ = ("job_id", "step")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    step: ProfileStep
    def __init__(self, job_id: _Optional[str] = ..., step: _Optional[_Union[ProfileStep, _Mapping]] = ...) -> None: ...

class InspectionPhase(_message.Message):
    __slots__ = ("job_id", "phase", "seconds")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    phase: str
    seconds: float
    def __init__(self, job_id: _Optional[str] = ..., phase: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class InspectionResult(_message.Message):
    __slots__ = ("job_id", "model", "error", "problems", "measurements")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    MEASUREMENTS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    model: _values_pb2.ModelReport
    error: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    measurements: _containers.RepeatedCompositeFieldContainer[Measurement]
    def __init__(self, job_id: _Optional[str] = ..., model: _Optional[_Union[_values_pb2.ModelReport, _Mapping]] = ..., error: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ..., measurements: _Optional[_Iterable[_Union[Measurement, _Mapping]]] = ...) -> None: ...

class LinkAwaited(_message.Message):
    __slots__ = ("job_id", "number", "address")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    number: int
    address: str
    def __init__(self, job_id: _Optional[str] = ..., number: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class LinkResult(_message.Message):
    __slots__ = ("job_id", "number", "measured", "problem")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    number: int
    measured: _values_pb2.MeasuredLinks
    problem: str
    def __init__(self, job_id: _Optional[str] = ..., number: _Optional[int] = ..., measured: _Optional[_Union[_values_pb2.MeasuredLinks, _Mapping]] = ..., problem: _Optional[str] = ...) -> None: ...

class ChildExit(_message.Message):
    __slots__ = ("key", "pid", "exit_code", "last_output", "ordered")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    LAST_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    key: _values_pb2.StageKey
    pid: int
    exit_code: int
    last_output: str
    ordered: bool
    def __init__(self, key: _Optional[_Union[_values_pb2.StageKey, _Mapping]] = ..., pid: _Optional[int] = ..., exit_code: _Optional[int] = ..., last_output: _Optional[str] = ..., ordered: bool = ...) -> None: ...

class AgentReport(_message.Message):
    __slots__ = ("stage_report", "inspection_step", "inspection_phase", "inspection_result", "link_awaited", "link_result", "child_exit")
    STAGE_REPORT_FIELD_NUMBER: _ClassVar[int]
    INSPECTION_STEP_FIELD_NUMBER: _ClassVar[int]
    INSPECTION_PHASE_FIELD_NUMBER: _ClassVar[int]
    INSPECTION_RESULT_FIELD_NUMBER: _ClassVar[int]
    LINK_AWAITED_FIELD_NUMBER: _ClassVar[int]
    LINK_RESULT_FIELD_NUMBER: _ClassVar[int]
    CHILD_EXIT_FIELD_NUMBER: _ClassVar[int]
    stage_report: KeyedStageReport
    inspection_step: InspectionStep
    inspection_phase: InspectionPhase
    inspection_result: InspectionResult
    link_awaited: LinkAwaited
    link_result: LinkResult
    child_exit: ChildExit
    def __init__(self, stage_report: _Optional[_Union[KeyedStageReport, _Mapping]] = ..., inspection_step: _Optional[_Union[InspectionStep, _Mapping]] = ..., inspection_phase: _Optional[_Union[InspectionPhase, _Mapping]] = ..., inspection_result: _Optional[_Union[InspectionResult, _Mapping]] = ..., link_awaited: _Optional[_Union[LinkAwaited, _Mapping]] = ..., link_result: _Optional[_Union[LinkResult, _Mapping]] = ..., child_exit: _Optional[_Union[ChildExit, _Mapping]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("agent_id", "registration", "batch", "reports")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    registration: str
    batch: int
    reports: _containers.RepeatedCompositeFieldContainer[AgentReport]
    def __init__(self, agent_id: _Optional[str] = ..., registration: _Optional[str] = ..., batch: _Optional[int] = ..., reports: _Optional[_Iterable[_Union[AgentReport, _Mapping]]] = ...) -> None: ...

class SubmitJobRequest(_message.Message):
    __slots__ = ("submission",)
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    submission: _values_pb2.Submission
    def __init__(self, submission: _Optional[_Union[_values_pb2.Submission, _Mapping]] = ...) -> None: ...

class SubmittedJob(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class StopJobRequest(_message.Message):
    __slots__ = ("mode", "job_id")
    MODE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    mode: StopMode
    job_id: str
    def __init__(self, mode: _Optional[_Union[StopMode, str]] = ..., job_id: _Optional[str] = ...) -> None: ...

class StoppingJob(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: JobState
    def __init__(self, state: _Optional[_Union[JobState, str]] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("vw", "job_id")
    VW_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    vw: int
    job_id: str
    def __init__(self, vw: _Optional[int] = ..., job_id: _Optional[str] = ...) -> None: ...

class AddWorkerRequest(_message.Message):
    __slots__ = ("vw", "job_id")
    VW_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    vw: int
    job_id: str
    def __init__(self, vw: _Optional[int] = ..., job_id: _Optional[str] = ...) -> None: ...

class MoveWorkerRequest(_message.Message):
    __slots__ = ("vw", "layers", "job_id")
    VW_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    vw: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    job_id: str
    def __init__(self, vw: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., job_id: _Optional[str] = ...) -> None: ...

class MovingWorker(_message.Message):
    __slots__ = ("worker", "layers")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerStatus
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[_Union[WorkerStatus, _Mapping]] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class Workers(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

class DepartRequest(_message.Message):
    __slots__ = ("agent_id", "registration")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    registration: str
    def __init__(self, agent_id: _Optional[str] = ..., registration: _Optional[str] = ...) -> None: ...

class MeasureLinksRequest(_message.Message):
    __slots__ = ("request_id", "fresh")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    fresh: bool
    def __init__(self, request_id: _Optional[str] = ..., fresh: bool = ...) -> None: ...

class LinksProgress(_message.Message):
    __slots__ = ("done", "total", "awaited", "remark")
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    REMARK_FIELD_NUMBER: _ClassVar[int]
    done: int
    total: int
    awaited: str
    remark: str
    def __init__(self, done: _Optional[int] = ..., total: _Optional[int] = ..., awaited: _Optional[str] = ..., remark: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class ProcessStatus(_message.Message):
    __slots__ = ("role", "index", "vw", "host", "pid", "state")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    role: str
    index: int
    vw: int
    host: str
    pid: int
    state: str
    def __init__(self, role: _Optional[str] = ..., index: _Optional[int] = ..., vw: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("vw", "incarnation", "deaths", "state", "devices")
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEATHS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    vw: int
    incarnation: int
    deaths: int
    state: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., deaths: _Optional[int] = ..., state: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ...) -> None: ...

class QueuePlace(_message.Message):
    __slots__ = ("position", "reason", "priority")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    position: int
    reason: str
    priority: int
    def __init__(self, position: _Optional[int] = ..., reason: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class StateChanged(_message.Message):
    __slots__ = ("state", "remark")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REMARK_FIELD_NUMBER: _ClassVar[int]
    state: JobState
    remark: str
    def __init__(self, state: _Optional[_Union[JobState, str]] = ..., remark: _Optional[str] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("sentence", "seconds")
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    sentence: str
    seconds: float
    def __init__(self, sentence: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Measuring(_message.Message):
    __slots__ = ("step", "agent")
    STEP_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    step: ProfileStep
    agent: str
    def __init__(self, step: _Optional[_Union[ProfileStep, _Mapping]] = ..., agent: _Optional[str] = ...) -> None: ...

class Evaluated(_message.Message):
    __slots__ = ("clock", "epoch", "samples", "values", "minibatches", "rewinds", "within_epoch", "whole")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    REWINDS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    clock: int
    epoch: int
    samples: int
    values: _containers.ScalarMap[str, float]
    minibatches: int
    rewinds: int
    within_epoch: bool
    whole: bool
    def __init__(self, clock: _Optional[int] = ..., epoch: _Optional[int] = ..., samples: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ..., minibatches: _Optional[int] = ..., rewinds: _Optional[int] = ..., within_epoch: bool = ..., whole: bool = ...) -> None: ...

class EvaluationSummary(_message.Message):
    __slots__ = ("number", "best", "last")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    number: int
    best: Evaluated
    last: Evaluated
    def __init__(self, number: _Optional[int] = ..., best: _Optional[_Union[Evaluated, _Mapping]] = ..., last: _Optional[_Union[Evaluated, _Mapping]] = ...) -> None: ...

class WorkerLost(_message.Message):
    __slots__ = ("vw", "incarnation", "sentence")
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    vw: int
    incarnation: int
    sentence: str
    def __init__(self, vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., sentence: _Optional[str] = ...) -> None: ...

class WorkerRejoined(_message.Message):
    __slots__ = ("vw", "incarnation")
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    vw: int
    incarnation: int
    def __init__(self, vw: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class WorkerLeft(_message.Message):
    __slots__ = ("vw", "incarnation", "returns")
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    vw: int
    incarnation: int
    returns: bool
    def __init__(self, vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., returns: bool = ...) -> None: ...

class WorkerQuarantined(_message.Message):
    __slots__ = ("vw", "sentence")
    VW_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    vw: int
    sentence: str
    def __init__(self, vw: _Optional[int] = ..., sentence: _Optional[str] = ...) -> None: ...

class WorkerReplanned(_message.Message):
    __slots__ = ("vw", "incarnation", "before", "after", "foreseen", "version")
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FORESEEN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    vw: int
    incarnation: int
    before: _containers.RepeatedScalarFieldContainer[int]
    after: _containers.RepeatedScalarFieldContainer[int]
    foreseen: float
    version: int
    def __init__(self, vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., before: _Optional[_Iterable[int]] = ..., after: _Optional[_Iterable[int]] = ..., foreseen: _Optional[float] = ..., version: _Optional[int] = ...) -> None: ...

class ReplanJudged(_message.Message):
    __slots__ = ("vw", "gained", "sentence")
    VW_FIELD_NUMBER: _ClassVar[int]
    GAINED_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    vw: int
    gained: float
    sentence: str
    def __init__(self, vw: _Optional[int] = ..., gained: _Optional[float] = ..., sentence: _Optional[str] = ...) -> None: ...

class Rewound(_message.Message):
    __slots__ = ("from_clock", "to_clock", "folder", "sentence")
    FROM_CLOCK_FIELD_NUMBER: _ClassVar[int]
    TO_CLOCK_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    from_clock: int
    to_clock: int
    folder: str
    sentence: str
    def __init__(self, from_clock: _Optional[int] = ..., to_clock: _Optional[int] = ..., folder: _Optional[str] = ..., sentence: _Optional[str] = ...) -> None: ...

class LoggerFailed(_message.Message):
    __slots__ = ("logger", "sentence")
    LOGGER_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    logger: str
    sentence: str
    def __init__(self, logger: _Optional[str] = ..., sentence: _Optional[str] = ...) -> None: ...

class ConditionRaised(_message.Message):
    __slots__ = ("condition", "who", "sentence", "since", "times")
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    condition: str
    who: _containers.RepeatedScalarFieldContainer[str]
    sentence: str
    since: float
    times: int
    def __init__(self, condition: _Optional[str] = ..., who: _Optional[_Iterable[str]] = ..., sentence: _Optional[str] = ..., since: _Optional[float] = ..., times: _Optional[int] = ...) -> None: ...

class ConditionCleared(_message.Message):
    __slots__ = ("condition", "who", "sentence", "cleared", "remaining")
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    condition: str
    who: _containers.RepeatedScalarFieldContainer[str]
    sentence: str
    cleared: float
    remaining: int
    def __init__(self, condition: _Optional[str] = ..., who: _Optional[_Iterable[str]] = ..., sentence: _Optional[str] = ..., cleared: _Optional[float] = ..., remaining: _Optional[int] = ...) -> None: ...

class StageRow(_message.Message):
    __slots__ = ("first_layer", "last_layer", "device", "memory", "memory_bytes", "device_bytes")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    last_layer: int
    device: str
    memory: _containers.RepeatedScalarFieldContainer[str]
    memory_bytes: int
    device_bytes: int
    def __init__(self, first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., device: _Optional[str] = ..., memory: _Optional[_Iterable[str]] = ..., memory_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ...) -> None: ...

class VirtualWorkerRow(_message.Message):
    __slots__ = ("vw", "stages", "clock", "distance", "samples_per_second", "loss", "waiting_share", "memory_bytes", "state", "losses", "version")
    class LossesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VW_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SHARE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    vw: int
    stages: _containers.RepeatedCompositeFieldContainer[StageRow]
    clock: int
    distance: int
    samples_per_second: float
    loss: float
    waiting_share: float
    memory_bytes: int
    state: str
    losses: _containers.ScalarMap[str, float]
    version: int
    def __init__(self, vw: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageRow, _Mapping]]] = ..., clock: _Optional[int] = ..., distance: _Optional[int] = ..., samples_per_second: _Optional[float] = ..., loss: _Optional[float] = ..., waiting_share: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., state: _Optional[str] = ..., losses: _Optional[_Mapping[str, float]] = ..., version: _Optional[int] = ...) -> None: ...

class Straggling(_message.Message):
    __slots__ = ("vw", "stage", "factor")
    VW_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    vw: int
    stage: int
    factor: float
    def __init__(self, vw: _Optional[int] = ..., stage: _Optional[int] = ..., factor: _Optional[float] = ...) -> None: ...

class ProgressTable(_message.Message):
    __slots__ = ("rows", "running_seconds", "epoch", "samples", "total_samples", "samples_per_second", "eta_seconds", "staleness", "global_clock", "straggler", "slow", "tokens_per_second", "model_flops_utilisation", "model_flops_utilisation_reason", "cache")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ETA_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_CLOCK_FIELD_NUMBER: _ClassVar[int]
    STRAGGLER_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FLOPS_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FLOPS_UTILISATION_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[VirtualWorkerRow]
    running_seconds: float
    epoch: int
    samples: int
    total_samples: int
    samples_per_second: float
    eta_seconds: float
    staleness: int
    global_clock: int
    straggler: int
    slow: _containers.RepeatedCompositeFieldContainer[Straggling]
    tokens_per_second: float
    model_flops_utilisation: float
    model_flops_utilisation_reason: str
    cache: CacheUse
    def __init__(self, rows: _Optional[_Iterable[_Union[VirtualWorkerRow, _Mapping]]] = ..., running_seconds: _Optional[float] = ..., epoch: _Optional[int] = ..., samples: _Optional[int] = ..., total_samples: _Optional[int] = ..., samples_per_second: _Optional[float] = ..., eta_seconds: _Optional[float] = ..., staleness: _Optional[int] = ..., global_clock: _Optional[int] = ..., straggler: _Optional[int] = ..., slow: _Optional[_Iterable[_Union[Straggling, _Mapping]]] = ..., tokens_per_second: _Optional[float] = ..., model_flops_utilisation: _Optional[float] = ..., model_flops_utilisation_reason: _Optional[str] = ..., cache: _Optional[_Union[CacheUse, _Mapping]] = ...) -> None: ...

class JobEnded(_message.Message):
    __slots__ = ("state", "sentence", "error", "problems", "result", "conditions")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    state: JobState
    sentence: str
    error: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    result: _values_pb2.Document
    conditions: _containers.RepeatedCompositeFieldContainer[_values_pb2.Condition]
    def __init__(self, state: _Optional[_Union[JobState, str]] = ..., sentence: _Optional[str] = ..., error: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ..., result: _Optional[_Union[_values_pb2.Document, _Mapping]] = ..., conditions: _Optional[_Iterable[_Union[_values_pb2.Condition, _Mapping]]] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job_id", "name", "state", "run_dir", "failure", "processes", "clocks", "progress", "workers", "rewinds", "queue", "conditions", "proof", "evaluations")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REWINDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    name: str
    state: JobState
    run_dir: str
    failure: str
    processes: _containers.RepeatedCompositeFieldContainer[ProcessStatus]
    clocks: _values_pb2.ClockSnapshot
    progress: ProgressTable
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    rewinds: int
    queue: QueuePlace
    conditions: _containers.RepeatedCompositeFieldContainer[_values_pb2.Condition]
    proof: _values_pb2.ProofReport
    evaluations: EvaluationSummary
    def __init__(self, job_id: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., run_dir: _Optional[str] = ..., failure: _Optional[str] = ..., processes: _Optional[_Iterable[_Union[ProcessStatus, _Mapping]]] = ..., clocks: _Optional[_Union[_values_pb2.ClockSnapshot, _Mapping]] = ..., progress: _Optional[_Union[ProgressTable, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., rewinds: _Optional[int] = ..., queue: _Optional[_Union[QueuePlace, _Mapping]] = ..., conditions: _Optional[_Iterable[_Union[_values_pb2.Condition, _Mapping]]] = ..., proof: _Optional[_Union[_values_pb2.ProofReport, _Mapping]] = ..., evaluations: _Optional[_Union[EvaluationSummary, _Mapping]] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ("job_id", "after")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    after: int
    def __init__(self, job_id: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class NumberedEvent(_message.Message):
    __slots__ = ("sequence", "state_changed", "waiting", "evaluated", "progress_table", "worker_lost", "worker_rejoined", "worker_left", "worker_quarantined", "worker_replanned", "replan_judged", "rewound", "condition_raised", "condition_cleared", "job_ended", "logger_failed", "measuring")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STATE_CHANGED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_TABLE_FIELD_NUMBER: _ClassVar[int]
    WORKER_LOST_FIELD_NUMBER: _ClassVar[int]
    WORKER_REJOINED_FIELD_NUMBER: _ClassVar[int]
    WORKER_LEFT_FIELD_NUMBER: _ClassVar[int]
    WORKER_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    WORKER_REPLANNED_FIELD_NUMBER: _ClassVar[int]
    REPLAN_JUDGED_FIELD_NUMBER: _ClassVar[int]
    REWOUND_FIELD_NUMBER: _ClassVar[int]
    CONDITION_RAISED_FIELD_NUMBER: _ClassVar[int]
    CONDITION_CLEARED_FIELD_NUMBER: _ClassVar[int]
    JOB_ENDED_FIELD_NUMBER: _ClassVar[int]
    LOGGER_FAILED_FIELD_NUMBER: _ClassVar[int]
    MEASURING_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    state_changed: StateChanged
    waiting: Waiting
    evaluated: Evaluated
    progress_table: ProgressTable
    worker_lost: WorkerLost
    worker_rejoined: WorkerRejoined
    worker_left: WorkerLeft
    worker_quarantined: WorkerQuarantined
    worker_replanned: WorkerReplanned
    replan_judged: ReplanJudged
    rewound: Rewound
    condition_raised: ConditionRaised
    condition_cleared: ConditionCleared
    job_ended: JobEnded
    logger_failed: LoggerFailed
    measuring: Measuring
    def __init__(self, sequence: _Optional[int] = ..., state_changed: _Optional[_Union[StateChanged, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., evaluated: _Optional[_Union[Evaluated, _Mapping]] = ..., progress_table: _Optional[_Union[ProgressTable, _Mapping]] = ..., worker_lost: _Optional[_Union[WorkerLost, _Mapping]] = ..., worker_rejoined: _Optional[_Union[WorkerRejoined, _Mapping]] = ..., worker_left: _Optional[_Union[WorkerLeft, _Mapping]] = ..., worker_quarantined: _Optional[_Union[WorkerQuarantined, _Mapping]] = ..., worker_replanned: _Optional[_Union[WorkerReplanned, _Mapping]] = ..., replan_judged: _Optional[_Union[ReplanJudged, _Mapping]] = ..., rewound: _Optional[_Union[Rewound, _Mapping]] = ..., condition_raised: _Optional[_Union[ConditionRaised, _Mapping]] = ..., condition_cleared: _Optional[_Union[ConditionCleared, _Mapping]] = ..., job_ended: _Optional[_Union[JobEnded, _Mapping]] = ..., logger_failed: _Optional[_Union[LoggerFailed, _Mapping]] = ..., measuring: _Optional[_Union[Measuring, _Mapping]] = ...) -> None: ...

class ListMembersRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class Members(_message.Message):
    __slots__ = ("members", "has_more")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[_values_pb2.Member]
    has_more: bool
    def __init__(self, members: _Optional[_Iterable[_Union[_values_pb2.Member, _Mapping]]] = ..., has_more: bool = ...) -> None: ...

class GetClocksRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class KnownClocks(_message.Message):
    __slots__ = ("clocks",)
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    clocks: _values_pb2.ClockSnapshot
    def __init__(self, clocks: _Optional[_Union[_values_pb2.ClockSnapshot, _Mapping]] = ...) -> None: ...

class WatchClocksRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CertifyStageRequest(_message.Message):
    __slots__ = ("agent_id", "registration", "stage", "request_pem")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_PEM_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    registration: str
    stage: _values_pb2.StageKey
    request_pem: bytes
    def __init__(self, agent_id: _Optional[str] = ..., registration: _Optional[str] = ..., stage: _Optional[_Union[_values_pb2.StageKey, _Mapping]] = ..., request_pem: _Optional[bytes] = ...) -> None: ...

class FetchCodeRequest(_message.Message):
    __slots__ = ("agent_id", "registration", "digest")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    registration: str
    digest: str
    def __init__(self, agent_id: _Optional[str] = ..., registration: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("pem",)
    PEM_FIELD_NUMBER: _ClassVar[int]
    pem: bytes
    def __init__(self, pem: _Optional[bytes] = ...) -> None: ...
