from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_ROLE_UNSPECIFIED: _ClassVar[MemberRole]
    MEMBER_ROLE_AGENT: _ClassVar[MemberRole]
    MEMBER_ROLE_PARAMETER_SERVER: _ClassVar[MemberRole]
    MEMBER_ROLE_WORKER: _ClassVar[MemberRole]
MEMBER_ROLE_UNSPECIFIED: MemberRole
MEMBER_ROLE_AGENT: MemberRole
MEMBER_ROLE_PARAMETER_SERVER: MemberRole
MEMBER_ROLE_WORKER: MemberRole

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Document(_message.Message):
    __slots__ = ("version", "sha256", "json")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    version: int
    sha256: str
    json: str
    def __init__(self, version: _Optional[int] = ..., sha256: _Optional[str] = ..., json: _Optional[str] = ...) -> None: ...

class LinkTime(_message.Message):
    __slots__ = ("latency_seconds", "bytes_per_second")
    LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    latency_seconds: float
    bytes_per_second: float
    def __init__(self, latency_seconds: _Optional[float] = ..., bytes_per_second: _Optional[float] = ...) -> None: ...

class DeviceConfig(_message.Message):
    __slots__ = ("torch_device", "slowdown", "jitter")
    TORCH_DEVICE_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_FIELD_NUMBER: _ClassVar[int]
    JITTER_FIELD_NUMBER: _ClassVar[int]
    torch_device: str
    slowdown: float
    jitter: float
    def __init__(self, torch_device: _Optional[str] = ..., slowdown: _Optional[float] = ..., jitter: _Optional[float] = ...) -> None: ...

class ShardLinkTime(_message.Message):
    __slots__ = ("time",)
    TIME_FIELD_NUMBER: _ClassVar[int]
    time: LinkTime
    def __init__(self, time: _Optional[_Union[LinkTime, _Mapping]] = ...) -> None: ...

class StageEmulation(_message.Message):
    __slots__ = ("forward_seconds", "backward_seconds", "upstream", "downstream", "shards", "replicas")
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    DOWNSTREAM_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    forward_seconds: _containers.RepeatedScalarFieldContainer[float]
    backward_seconds: _containers.RepeatedScalarFieldContainer[float]
    upstream: LinkTime
    downstream: LinkTime
    shards: _containers.RepeatedCompositeFieldContainer[ShardLinkTime]
    replicas: LinkTime
    def __init__(self, forward_seconds: _Optional[_Iterable[float]] = ..., backward_seconds: _Optional[_Iterable[float]] = ..., upstream: _Optional[_Union[LinkTime, _Mapping]] = ..., downstream: _Optional[_Union[LinkTime, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[ShardLinkTime, _Mapping]]] = ..., replicas: _Optional[_Union[LinkTime, _Mapping]] = ...) -> None: ...

class WorkerEmulation(_message.Message):
    __slots__ = ("stages",)
    STAGES_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[StageEmulation]
    def __init__(self, stages: _Optional[_Iterable[_Union[StageEmulation, _Mapping]]] = ...) -> None: ...

class AgentDevice(_message.Message):
    __slots__ = ("device", "type", "memory_bytes", "torch_device")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TORCH_DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: str
    type: str
    memory_bytes: int
    torch_device: str
    def __init__(self, device: _Optional[str] = ..., type: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., torch_device: _Optional[str] = ...) -> None: ...

class TransferSpeed(_message.Message):
    __slots__ = ("latency_seconds", "bytes_per_second", "small_bytes", "large_bytes", "repeats")
    LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SMALL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LARGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    latency_seconds: float
    bytes_per_second: float
    small_bytes: int
    large_bytes: int
    repeats: int
    def __init__(self, latency_seconds: _Optional[float] = ..., bytes_per_second: _Optional[float] = ..., small_bytes: _Optional[int] = ..., large_bytes: _Optional[int] = ..., repeats: _Optional[int] = ...) -> None: ...

class LinkMeasurement(_message.Message):
    __slots__ = ("between", "transport", "speed", "measured_at", "versions")
    BETWEEN_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_AT_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    between: _containers.RepeatedScalarFieldContainer[str]
    transport: str
    speed: TransferSpeed
    measured_at: float
    versions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, between: _Optional[_Iterable[str]] = ..., transport: _Optional[str] = ..., speed: _Optional[_Union[TransferSpeed, _Mapping]] = ..., measured_at: _Optional[float] = ..., versions: _Optional[_Iterable[str]] = ...) -> None: ...

class CopyMeasurement(_message.Message):
    __slots__ = ("node", "device_type", "method", "speed", "measured_at", "versions")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_AT_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    node: str
    device_type: str
    method: str
    speed: TransferSpeed
    measured_at: float
    versions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[str] = ..., device_type: _Optional[str] = ..., method: _Optional[str] = ..., speed: _Optional[_Union[TransferSpeed, _Mapping]] = ..., measured_at: _Optional[float] = ..., versions: _Optional[_Iterable[str]] = ...) -> None: ...

class MeasuredLinks(_message.Message):
    __slots__ = ("links", "copies")
    LINKS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedCompositeFieldContainer[LinkMeasurement]
    copies: _containers.RepeatedCompositeFieldContainer[CopyMeasurement]
    def __init__(self, links: _Optional[_Iterable[_Union[LinkMeasurement, _Mapping]]] = ..., copies: _Optional[_Iterable[_Union[CopyMeasurement, _Mapping]]] = ...) -> None: ...

class AgentInfo(_message.Message):
    __slots__ = ("agent", "host", "pid", "devices", "links")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    agent: str
    host: str
    pid: int
    devices: _containers.RepeatedCompositeFieldContainer[AgentDevice]
    links: MeasuredLinks
    def __init__(self, agent: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[AgentDevice, _Mapping]]] = ..., links: _Optional[_Union[MeasuredLinks, _Mapping]] = ...) -> None: ...

class StageKey(_message.Message):
    __slots__ = ("job_id", "vw", "stage", "incarnation", "term")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    vw: int
    stage: int
    incarnation: int
    term: int
    def __init__(self, job_id: _Optional[str] = ..., vw: _Optional[int] = ..., stage: _Optional[int] = ..., incarnation: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class MemberInfo(_message.Message):
    __slots__ = ("role", "id", "host", "pid", "address", "devices", "shard_index", "highest_term", "highest_fence", "stages", "links")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_TERM_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FENCE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    role: MemberRole
    id: str
    host: str
    pid: int
    address: str
    devices: _containers.RepeatedCompositeFieldContainer[AgentDevice]
    shard_index: int
    highest_term: int
    highest_fence: int
    stages: _containers.RepeatedCompositeFieldContainer[StageKey]
    links: MeasuredLinks
    def __init__(self, role: _Optional[_Union[MemberRole, str]] = ..., id: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[AgentDevice, _Mapping]]] = ..., shard_index: _Optional[int] = ..., highest_term: _Optional[int] = ..., highest_fence: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageKey, _Mapping]]] = ..., links: _Optional[_Union[MeasuredLinks, _Mapping]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("info", "order", "lease_seconds_left")
    INFO_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    info: MemberInfo
    order: int
    lease_seconds_left: float
    def __init__(self, info: _Optional[_Union[MemberInfo, _Mapping]] = ..., order: _Optional[int] = ..., lease_seconds_left: _Optional[float] = ...) -> None: ...

class ClockSnapshot(_message.Message):
    __slots__ = ("term", "published", "global_clock", "local", "max_distance", "epoch", "minibatches", "samples", "barrier", "barrier_reason", "waves", "staged", "durable", "applied", "plans", "frozen", "lineup")
    class LocalEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class StagedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class DurableEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class PlansEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: PlanVersion
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[PlanVersion, _Mapping]] = ...) -> None: ...
    TERM_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_CLOCK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    MAX_DISTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    BARRIER_REASON_FIELD_NUMBER: _ClassVar[int]
    WAVES_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    LINEUP_FIELD_NUMBER: _ClassVar[int]
    term: int
    published: int
    global_clock: int
    local: _containers.ScalarMap[int, int]
    max_distance: int
    epoch: int
    minibatches: int
    samples: int
    barrier: int
    barrier_reason: str
    waves: int
    staged: _containers.ScalarMap[int, int]
    durable: _containers.ScalarMap[int, int]
    applied: _containers.RepeatedScalarFieldContainer[int]
    plans: _containers.MessageMap[int, PlanVersion]
    frozen: _containers.RepeatedCompositeFieldContainer[FrozenSince]
    lineup: int
    def __init__(self, term: _Optional[int] = ..., published: _Optional[int] = ..., global_clock: _Optional[int] = ..., local: _Optional[_Mapping[int, int]] = ..., max_distance: _Optional[int] = ..., epoch: _Optional[int] = ..., minibatches: _Optional[int] = ..., samples: _Optional[int] = ..., barrier: _Optional[int] = ..., barrier_reason: _Optional[str] = ..., waves: _Optional[int] = ..., staged: _Optional[_Mapping[int, int]] = ..., durable: _Optional[_Mapping[int, int]] = ..., applied: _Optional[_Iterable[int]] = ..., plans: _Optional[_Mapping[int, PlanVersion]] = ..., frozen: _Optional[_Iterable[_Union[FrozenSince, _Mapping]]] = ..., lineup: _Optional[int] = ...) -> None: ...

class FrozenSince(_message.Message):
    __slots__ = ("clock", "frozen", "layers")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    clock: int
    frozen: int
    layers: int
    def __init__(self, clock: _Optional[int] = ..., frozen: _Optional[int] = ..., layers: _Optional[int] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ("kind", "who", "sentence", "since", "cleared", "clearance", "times")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    CLEARANCE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    who: str
    sentence: str
    since: float
    cleared: float
    clearance: str
    times: int
    def __init__(self, kind: _Optional[str] = ..., who: _Optional[str] = ..., sentence: _Optional[str] = ..., since: _Optional[float] = ..., cleared: _Optional[float] = ..., clearance: _Optional[str] = ..., times: _Optional[int] = ...) -> None: ...

class Conditions(_message.Message):
    __slots__ = ("conditions",)
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    def __init__(self, conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class LayerReport(_message.Message):
    __slots__ = ("index", "name", "parameters", "buffers", "activation_elements", "forbidden", "is_tied")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    FORBIDDEN_FIELD_NUMBER: _ClassVar[int]
    IS_TIED_FIELD_NUMBER: _ClassVar[int]
    index: int
    name: str
    parameters: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    buffers: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    activation_elements: int
    forbidden: _containers.RepeatedCompositeFieldContainer[ForbiddenPlaces]
    is_tied: bool
    def __init__(self, index: _Optional[int] = ..., name: _Optional[str] = ..., parameters: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., buffers: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., activation_elements: _Optional[int] = ..., forbidden: _Optional[_Iterable[_Union[ForbiddenPlaces, _Mapping]]] = ..., is_tied: bool = ...) -> None: ...

class ForbiddenPlaces(_message.Message):
    __slots__ = ("before", "upto", "places", "reason")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    before: str
    upto: str
    places: int
    reason: str
    def __init__(self, before: _Optional[str] = ..., upto: _Optional[str] = ..., places: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ModelWork(_message.Message):
    __slots__ = ("tokens_per_sample", "flops_per_sample", "compute_dtype")
    TOKENS_PER_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    tokens_per_sample: int
    flops_per_sample: float
    compute_dtype: str
    def __init__(self, tokens_per_sample: _Optional[int] = ..., flops_per_sample: _Optional[float] = ..., compute_dtype: _Optional[str] = ...) -> None: ...

class ProofReport(_message.Message):
    __slots__ = ("scope", "equality", "samples", "seconds", "checked", "notices", "work")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    EQUALITY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    scope: str
    equality: str
    samples: int
    seconds: float
    checked: _containers.RepeatedScalarFieldContainer[str]
    notices: _containers.RepeatedScalarFieldContainer[str]
    work: ModelWork
    def __init__(self, scope: _Optional[str] = ..., equality: _Optional[str] = ..., samples: _Optional[int] = ..., seconds: _Optional[float] = ..., checked: _Optional[_Iterable[str]] = ..., notices: _Optional[_Iterable[str]] = ..., work: _Optional[_Union[ModelWork, _Mapping]] = ...) -> None: ...

class ModelReport(_message.Message):
    __slots__ = ("layers", "train_samples", "eval_samples", "proof", "digest")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TRAIN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EVAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerReport]
    train_samples: int
    eval_samples: int
    proof: ProofReport
    digest: str
    def __init__(self, layers: _Optional[_Iterable[_Union[LayerReport, _Mapping]]] = ..., train_samples: _Optional[int] = ..., eval_samples: _Optional[int] = ..., proof: _Optional[_Union[ProofReport, _Mapping]] = ..., digest: _Optional[str] = ...) -> None: ...

class SlicePlan(_message.Message):
    __slots__ = ("parameter", "layer", "shard", "start", "stop")
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    parameter: TensorSpec
    layer: int
    shard: int
    start: int
    stop: int
    def __init__(self, parameter: _Optional[_Union[TensorSpec, _Mapping]] = ..., layer: _Optional[int] = ..., shard: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class StagePlan(_message.Message):
    __slots__ = ("agent", "device", "first_layer", "last_layer", "memory")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    agent: str
    device: str
    first_layer: int
    last_layer: int
    memory: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, agent: _Optional[str] = ..., device: _Optional[str] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., memory: _Optional[_Iterable[str]] = ...) -> None: ...

class VirtualWorkerPlan(_message.Message):
    __slots__ = ("index", "stages", "minibatches_per_wave")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_PER_WAVE_FIELD_NUMBER: _ClassVar[int]
    index: int
    stages: _containers.RepeatedCompositeFieldContainer[StagePlan]
    minibatches_per_wave: int
    def __init__(self, index: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StagePlan, _Mapping]]] = ..., minibatches_per_wave: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("job_id", "term", "virtual_workers", "slices", "num_shards", "model_digest", "freeze_levels", "freeze_cuts", "freeze_lineups", "activations", "activation_cuts")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VIRTUAL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FREEZE_LEVELS_FIELD_NUMBER: _ClassVar[int]
    FREEZE_CUTS_FIELD_NUMBER: _ClassVar[int]
    FREEZE_LINEUPS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_CUTS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    virtual_workers: _containers.RepeatedCompositeFieldContainer[VirtualWorkerPlan]
    slices: _containers.RepeatedCompositeFieldContainer[SlicePlan]
    num_shards: int
    model_digest: str
    freeze_levels: _containers.RepeatedScalarFieldContainer[int]
    freeze_cuts: _containers.RepeatedCompositeFieldContainer[FreezeCut]
    freeze_lineups: _containers.RepeatedCompositeFieldContainer[FreezeLineup]
    activations: _containers.RepeatedCompositeFieldContainer[Activation]
    activation_cuts: _containers.RepeatedCompositeFieldContainer[ActivationCut]
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., virtual_workers: _Optional[_Iterable[_Union[VirtualWorkerPlan, _Mapping]]] = ..., slices: _Optional[_Iterable[_Union[SlicePlan, _Mapping]]] = ..., num_shards: _Optional[int] = ..., model_digest: _Optional[str] = ..., freeze_levels: _Optional[_Iterable[int]] = ..., freeze_cuts: _Optional[_Iterable[_Union[FreezeCut, _Mapping]]] = ..., freeze_lineups: _Optional[_Iterable[_Union[FreezeLineup, _Mapping]]] = ..., activations: _Optional[_Iterable[_Union[Activation, _Mapping]]] = ..., activation_cuts: _Optional[_Iterable[_Union[ActivationCut, _Mapping]]] = ...) -> None: ...

class ActivationCut(_message.Message):
    __slots__ = ("clock", "vw", "bounds")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    clock: int
    vw: int
    bounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, clock: _Optional[int] = ..., vw: _Optional[int] = ..., bounds: _Optional[_Iterable[int]] = ...) -> None: ...

class Activation(_message.Message):
    __slots__ = ("clock", "inactive", "fresh")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    INACTIVE_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    clock: int
    inactive: _containers.RepeatedScalarFieldContainer[int]
    fresh: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, clock: _Optional[int] = ..., inactive: _Optional[_Iterable[int]] = ..., fresh: _Optional[_Iterable[int]] = ...) -> None: ...

class FreezeLineup(_message.Message):
    __slots__ = ("frozen", "workers", "minibatches_per_wave")
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_PER_WAVE_FIELD_NUMBER: _ClassVar[int]
    frozen: int
    workers: _containers.RepeatedCompositeFieldContainer[LineupWorker]
    minibatches_per_wave: int
    def __init__(self, frozen: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[LineupWorker, _Mapping]]] = ..., minibatches_per_wave: _Optional[int] = ...) -> None: ...

class LineupWorker(_message.Message):
    __slots__ = ("vw", "devices")
    VW_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    vw: int
    devices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, vw: _Optional[int] = ..., devices: _Optional[_Iterable[int]] = ...) -> None: ...

class FreezeCut(_message.Message):
    __slots__ = ("frozen", "vw", "bounds")
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    frozen: int
    vw: int
    bounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, frozen: _Optional[int] = ..., vw: _Optional[int] = ..., bounds: _Optional[_Iterable[int]] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("request_id", "job_json", "run_dir", "import_path", "restore", "rewinds", "has_begun", "model", "code")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_JSON_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    IMPORT_PATH_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    REWINDS_FIELD_NUMBER: _ClassVar[int]
    HAS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    job_json: Document
    run_dir: str
    import_path: str
    restore: str
    rewinds: int
    has_begun: bool
    model: ModelReport
    code: CodeArchive
    def __init__(self, request_id: _Optional[str] = ..., job_json: _Optional[_Union[Document, _Mapping]] = ..., run_dir: _Optional[str] = ..., import_path: _Optional[str] = ..., restore: _Optional[str] = ..., rewinds: _Optional[int] = ..., has_begun: bool = ..., model: _Optional[_Union[ModelReport, _Mapping]] = ..., code: _Optional[_Union[CodeArchive, _Mapping]] = ...) -> None: ...

class CodeArchive(_message.Message):
    __slots__ = ("digest", "archive")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARCHIVE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    archive: bytes
    def __init__(self, digest: _Optional[str] = ..., archive: _Optional[bytes] = ...) -> None: ...

class PlanVersion(_message.Message):
    __slots__ = ("version", "bounds", "planned")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    version: int
    bounds: _containers.RepeatedScalarFieldContainer[int]
    planned: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., bounds: _Optional[_Iterable[int]] = ..., planned: _Optional[_Iterable[int]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("clock", "epoch", "used", "minibatches", "samples", "plans", "frozen", "waves", "lineup", "inactive", "fresh")
    class PlansEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: PlanVersion
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[PlanVersion, _Mapping]] = ...) -> None: ...
    class WavesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: WaveNumbers
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[WaveNumbers, _Mapping]] = ...) -> None: ...
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    WAVES_FIELD_NUMBER: _ClassVar[int]
    LINEUP_FIELD_NUMBER: _ClassVar[int]
    INACTIVE_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    clock: int
    epoch: int
    used: bytes
    minibatches: int
    samples: int
    plans: _containers.MessageMap[int, PlanVersion]
    frozen: int
    waves: _containers.MessageMap[int, WaveNumbers]
    lineup: int
    inactive: _containers.RepeatedScalarFieldContainer[int]
    fresh: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, clock: _Optional[int] = ..., epoch: _Optional[int] = ..., used: _Optional[bytes] = ..., minibatches: _Optional[int] = ..., samples: _Optional[int] = ..., plans: _Optional[_Mapping[int, PlanVersion]] = ..., frozen: _Optional[int] = ..., waves: _Optional[_Mapping[int, WaveNumbers]] = ..., lineup: _Optional[int] = ..., inactive: _Optional[_Iterable[int]] = ..., fresh: _Optional[_Iterable[int]] = ...) -> None: ...

class WaveNumbers(_message.Message):
    __slots__ = ("minibatches_per_wave", "origin")
    MINIBATCHES_PER_WAVE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    minibatches_per_wave: int
    origin: int
    def __init__(self, minibatches_per_wave: _Optional[int] = ..., origin: _Optional[int] = ...) -> None: ...

class DataSpec(_message.Message):
    __slots__ = ("num_samples", "batch_size", "seed", "epochs", "total_minibatches", "homes")
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    HOMES_FIELD_NUMBER: _ClassVar[int]
    num_samples: int
    batch_size: int
    seed: int
    epochs: int
    total_minibatches: int
    homes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_samples: _Optional[int] = ..., batch_size: _Optional[int] = ..., seed: _Optional[int] = ..., epochs: _Optional[int] = ..., total_minibatches: _Optional[int] = ..., homes: _Optional[_Iterable[int]] = ...) -> None: ...

class SyncSpec(_message.Message):
    __slots__ = ("minibatches_per_wave", "staleness", "combine", "deterministic", "weights", "pull", "compress_pushes")
    MINIBATCHES_PER_WAVE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    COMBINE_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    COMPRESS_PUSHES_FIELD_NUMBER: _ClassVar[int]
    minibatches_per_wave: int
    staleness: int
    combine: str
    deterministic: bool
    weights: str
    pull: str
    compress_pushes: str
    def __init__(self, minibatches_per_wave: _Optional[int] = ..., staleness: _Optional[int] = ..., combine: _Optional[str] = ..., deterministic: bool = ..., weights: _Optional[str] = ..., pull: _Optional[str] = ..., compress_pushes: _Optional[str] = ...) -> None: ...

class Membership(_message.Message):
    __slots__ = ("num_stages", "minibatches_per_wave", "plans")
    class NumStagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class MinibatchesPerWaveEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class PlansEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: PlanVersion
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[PlanVersion, _Mapping]] = ...) -> None: ...
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_PER_WAVE_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    num_stages: _containers.ScalarMap[int, int]
    minibatches_per_wave: _containers.ScalarMap[int, int]
    plans: _containers.MessageMap[int, PlanVersion]
    def __init__(self, num_stages: _Optional[_Mapping[int, int]] = ..., minibatches_per_wave: _Optional[_Mapping[int, int]] = ..., plans: _Optional[_Mapping[int, PlanVersion]] = ...) -> None: ...

class Requester(_message.Message):
    __slots__ = ("job_id", "term", "vw", "incarnation", "stage")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    vw: int
    incarnation: int
    stage: int
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., stage: _Optional[int] = ...) -> None: ...

class MemoryOffer(_message.Message):
    __slots__ = ("socket", "token", "segment", "reason")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    socket: str
    token: str
    segment: str
    reason: str
    def __init__(self, socket: _Optional[str] = ..., token: _Optional[str] = ..., segment: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
