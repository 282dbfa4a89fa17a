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
MEMBER_ROLE_UNSPECIFIED: MemberRole
MEMBER_ROLE_AGENT: MemberRole
MEMBER_ROLE_PARAMETER_SERVER: MemberRole
MEMBER_ROLE_WORKER: MemberRole
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

class Device(_message.Message):
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

class MemberInfo(_message.Message):
    __slots__ = ("role", "id", "host", "pid", "address", "devices", "shard_index", "highest_term", "stages", "highest_fence", "links_json")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_TERM_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FENCE_FIELD_NUMBER: _ClassVar[int]
    LINKS_JSON_FIELD_NUMBER: _ClassVar[int]
    role: MemberRole
    id: str
    host: str
    pid: int
    address: str
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    shard_index: int
    highest_term: int
    stages: _containers.RepeatedCompositeFieldContainer[StageKey]
    highest_fence: int
    links_json: str
    def __init__(self, role: _Optional[_Union[MemberRole, str]] = ..., id: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., shard_index: _Optional[int] = ..., highest_term: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageKey, _Mapping]]] = ..., highest_fence: _Optional[int] = ..., links_json: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("term", "published", "global_clock", "local", "max_distance", "epoch", "minibatches", "samples", "barrier", "barrier_reason", "waves", "staged", "durable", "applied")
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
    def __init__(self, term: _Optional[int] = ..., published: _Optional[int] = ..., global_clock: _Optional[int] = ..., local: _Optional[_Mapping[int, int]] = ..., max_distance: _Optional[int] = ..., epoch: _Optional[int] = ..., minibatches: _Optional[int] = ..., samples: _Optional[int] = ..., barrier: _Optional[int] = ..., barrier_reason: _Optional[str] = ..., waves: _Optional[int] = ..., staged: _Optional[_Mapping[int, int]] = ..., durable: _Optional[_Mapping[int, int]] = ..., applied: _Optional[_Iterable[int]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("member",)
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    member: MemberInfo
    def __init__(self, member: _Optional[_Union[MemberInfo, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
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
    __slots__ = ("member_id", "registration", "clocks", "job_ids", "last_command", "lost_jobs", "conditions")
    class ClocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ClockSnapshot
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ClockSnapshot, _Mapping]] = ...) -> None: ...
    class LostJobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMAND_FIELD_NUMBER: _ClassVar[int]
    LOST_JOBS_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    registration: str
    clocks: _containers.MessageMap[str, ClockSnapshot]
    job_ids: _containers.RepeatedScalarFieldContainer[str]
    last_command: int
    lost_jobs: _containers.ScalarMap[str, str]
    conditions: _containers.RepeatedCompositeFieldContainer[JobCondition]
    def __init__(self, member_id: _Optional[str] = ..., registration: _Optional[str] = ..., clocks: _Optional[_Mapping[str, ClockSnapshot]] = ..., job_ids: _Optional[_Iterable[str]] = ..., last_command: _Optional[int] = ..., lost_jobs: _Optional[_Mapping[str, str]] = ..., conditions: _Optional[_Iterable[_Union[JobCondition, _Mapping]]] = ...) -> None: ...

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

class JobCondition(_message.Message):
    __slots__ = ("job_id", "condition")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    condition: Condition
    def __init__(self, job_id: _Optional[str] = ..., condition: _Optional[_Union[Condition, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("lease_seconds", "ended_job_ids", "fence")
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    ended_job_ids: _containers.RepeatedScalarFieldContainer[str]
    fence: int
    def __init__(self, lease_seconds: _Optional[float] = ..., ended_job_ids: _Optional[_Iterable[str]] = ..., fence: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("member_id", "registration")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    registration: str
    def __init__(self, member_id: _Optional[str] = ..., registration: _Optional[str] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchCommandsRequest(_message.Message):
    __slots__ = ("agent_id", "registration", "after_sequence")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    registration: str
    after_sequence: int
    def __init__(self, agent_id: _Optional[str] = ..., registration: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class InspectCommand(_message.Message):
    __slots__ = ("job_id", "job_json", "import_path", "run_dir", "with_model", "measure")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_JSON_FIELD_NUMBER: _ClassVar[int]
    IMPORT_PATH_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    WITH_MODEL_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    job_json: str
    import_path: str
    run_dir: str
    with_model: bool
    measure: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job_id: _Optional[str] = ..., job_json: _Optional[str] = ..., import_path: _Optional[str] = ..., run_dir: _Optional[str] = ..., with_model: bool = ..., measure: _Optional[_Iterable[str]] = ...) -> None: ...

class StartStageCommand(_message.Message):
    __slots__ = ("job_id", "config_json")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    config_json: str
    def __init__(self, job_id: _Optional[str] = ..., config_json: _Optional[str] = ...) -> None: ...

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

class MeasureLinkCommand(_message.Message):
    __slots__ = ("job_id", "task_json")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_JSON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    task_json: str
    def __init__(self, job_id: _Optional[str] = ..., task_json: _Optional[str] = ...) -> None: ...

class KeepLinksCommand(_message.Message):
    __slots__ = ("job_id", "measured_json")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEASURED_JSON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    measured_json: str
    def __init__(self, job_id: _Optional[str] = ..., measured_json: _Optional[str] = ...) -> None: ...

class WatchCommandsResponse(_message.Message):
    __slots__ = ("sequence", "inspect", "start_stage", "stop_job", "stop_virtual_worker", "measure_link", "keep_links")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INSPECT_FIELD_NUMBER: _ClassVar[int]
    START_STAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_JOB_FIELD_NUMBER: _ClassVar[int]
    STOP_VIRTUAL_WORKER_FIELD_NUMBER: _ClassVar[int]
    MEASURE_LINK_FIELD_NUMBER: _ClassVar[int]
    KEEP_LINKS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    inspect: InspectCommand
    start_stage: StartStageCommand
    stop_job: StopJobCommand
    stop_virtual_worker: StopVirtualWorkerCommand
    measure_link: MeasureLinkCommand
    keep_links: KeepLinksCommand
    def __init__(self, sequence: _Optional[int] = ..., inspect: _Optional[_Union[InspectCommand, _Mapping]] = ..., start_stage: _Optional[_Union[StartStageCommand, _Mapping]] = ..., stop_job: _Optional[_Union[StopJobCommand, _Mapping]] = ..., stop_virtual_worker: _Optional[_Union[StopVirtualWorkerCommand, _Mapping]] = ..., measure_link: _Optional[_Union[MeasureLinkCommand, _Mapping]] = ..., keep_links: _Optional[_Union[KeepLinksCommand, _Mapping]] = ...) -> None: ...

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

class StageNews(_message.Message):
    __slots__ = ("key", "report_json")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    key: StageKey
    report_json: str
    def __init__(self, key: _Optional[_Union[StageKey, _Mapping]] = ..., report_json: _Optional[str] = ...) -> None: ...

class InspectionResult(_message.Message):
    __slots__ = ("job_id", "model_report_json", "error", "problems", "measurements_json")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_REPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    MEASUREMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    model_report_json: str
    error: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    measurements_json: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job_id: _Optional[str] = ..., model_report_json: _Optional[str] = ..., error: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ..., measurements_json: _Optional[_Iterable[str]] = ...) -> None: ...

class InspectionStep(_message.Message):
    __slots__ = ("job_id", "device_type", "layer", "done", "total")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    device_type: str
    layer: str
    done: int
    total: int
    def __init__(self, job_id: _Optional[str] = ..., device_type: _Optional[str] = ..., layer: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class InspectionPhase(_message.Message):
    __slots__ = ("job_id", "phase", "seconds")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    phase: str
    seconds: float
    def __init__(self, job_id: _Optional[str] = ..., phase: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

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
    __slots__ = ("job_id", "number", "measured_json", "problem")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MEASURED_JSON_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    number: int
    measured_json: str
    problem: str
    def __init__(self, job_id: _Optional[str] = ..., number: _Optional[int] = ..., measured_json: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class ChildExit(_message.Message):
    __slots__ = ("key", "pid", "exit_code", "last_output", "ordered")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    LAST_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    key: StageKey
    pid: int
    exit_code: int
    last_output: str
    ordered: bool
    def __init__(self, key: _Optional[_Union[StageKey, _Mapping]] = ..., pid: _Optional[int] = ..., exit_code: _Optional[int] = ..., last_output: _Optional[str] = ..., ordered: bool = ...) -> None: ...

class AgentNews(_message.Message):
    __slots__ = ("stage", "inspection", "exit", "inspection_step", "inspection_phase", "link_awaited", "link_result")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INSPECTION_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    INSPECTION_STEP_FIELD_NUMBER: _ClassVar[int]
    INSPECTION_PHASE_FIELD_NUMBER: _ClassVar[int]
    LINK_AWAITED_FIELD_NUMBER: _ClassVar[int]
    LINK_RESULT_FIELD_NUMBER: _ClassVar[int]
    stage: StageNews
    inspection: InspectionResult
    exit: ChildExit
    inspection_step: InspectionStep
    inspection_phase: InspectionPhase
    link_awaited: LinkAwaited
    link_result: LinkResult
    def __init__(self, stage: _Optional[_Union[StageNews, _Mapping]] = ..., inspection: _Optional[_Union[InspectionResult, _Mapping]] = ..., exit: _Optional[_Union[ChildExit, _Mapping]] = ..., inspection_step: _Optional[_Union[InspectionStep, _Mapping]] = ..., inspection_phase: _Optional[_Union[InspectionPhase, _Mapping]] = ..., link_awaited: _Optional[_Union[LinkAwaited, _Mapping]] = ..., link_result: _Optional[_Union[LinkResult, _Mapping]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("agent_id", "registration", "batch", "news")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    registration: str
    batch: int
    news: _containers.RepeatedCompositeFieldContainer[AgentNews]
    def __init__(self, agent_id: _Optional[str] = ..., registration: _Optional[str] = ..., batch: _Optional[int] = ..., news: _Optional[_Iterable[_Union[AgentNews, _Mapping]]] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubmitJobRequest(_message.Message):
    __slots__ = ("request_id", "job_json", "run_dir", "import_path", "restore", "has_begun", "model_report_json")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_JSON_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    IMPORT_PATH_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    HAS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    MODEL_REPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    job_json: str
    run_dir: str
    import_path: str
    restore: str
    has_begun: bool
    model_report_json: str
    def __init__(self, request_id: _Optional[str] = ..., job_json: _Optional[str] = ..., run_dir: _Optional[str] = ..., import_path: _Optional[str] = ..., restore: _Optional[str] = ..., has_begun: bool = ..., model_report_json: _Optional[str] = ...) -> None: ...

class SubmitJobResponse(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class StopJobRequest(_message.Message):
    __slots__ = ("job_id", "mode")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    mode: StopMode
    def __init__(self, job_id: _Optional[str] = ..., mode: _Optional[_Union[StopMode, str]] = ...) -> None: ...

class StopJobResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: JobState
    def __init__(self, state: _Optional[_Union[JobState, str]] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("job_id", "vw")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    vw: int
    def __init__(self, job_id: _Optional[str] = ..., vw: _Optional[int] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerStatus
    def __init__(self, worker: _Optional[_Union[WorkerStatus, _Mapping]] = ...) -> None: ...

class AddWorkerRequest(_message.Message):
    __slots__ = ("job_id", "vw")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    vw: int
    def __init__(self, job_id: _Optional[str] = ..., vw: _Optional[int] = ...) -> None: ...

class AddWorkerResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

class MeasureLinksRequest(_message.Message):
    __slots__ = ("request_id", "fresh")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    fresh: bool
    def __init__(self, request_id: _Optional[str] = ..., fresh: bool = ...) -> None: ...

class MeasureLinksResponse(_message.Message):
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

class DepartRequest(_message.Message):
    __slots__ = ("agent_id", "registration")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    registration: str
    def __init__(self, agent_id: _Optional[str] = ..., registration: _Optional[str] = ...) -> None: ...

class DepartResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class Process(_message.Message):
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
    __slots__ = ("position", "reason")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    position: int
    reason: str
    def __init__(self, position: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job_id", "name", "state", "run_dir", "failure", "processes", "clocks", "progress", "workers", "rewinds", "queue", "conditions", "proof_json", "evaluations")
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
    PROOF_JSON_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    name: str
    state: JobState
    run_dir: str
    failure: str
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    clocks: ClockSnapshot
    progress: ProgressTable
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    rewinds: int
    queue: QueuePlace
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    proof_json: str
    evaluations: Evaluations
    def __init__(self, job_id: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., run_dir: _Optional[str] = ..., failure: _Optional[str] = ..., processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ..., clocks: _Optional[_Union[ClockSnapshot, _Mapping]] = ..., progress: _Optional[_Union[ProgressTable, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., rewinds: _Optional[int] = ..., queue: _Optional[_Union[QueuePlace, _Mapping]] = ..., conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ..., proof_json: _Optional[str] = ..., evaluations: _Optional[_Union[Evaluations, _Mapping]] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: JobStatus
    def __init__(self, status: _Optional[_Union[JobStatus, _Mapping]] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ("job_id", "after_sequence")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    after_sequence: int
    def __init__(self, job_id: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

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

class Evaluated(_message.Message):
    __slots__ = ("clock", "epoch", "samples", "values", "minibatches", "rewinds", "within_epoch", "partial")
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
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    clock: int
    epoch: int
    samples: int
    values: _containers.ScalarMap[str, float]
    minibatches: int
    rewinds: int
    within_epoch: bool
    partial: bool
    def __init__(self, clock: _Optional[int] = ..., epoch: _Optional[int] = ..., samples: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ..., minibatches: _Optional[int] = ..., rewinds: _Optional[int] = ..., within_epoch: bool = ..., partial: bool = ...) -> None: ...

class Evaluations(_message.Message):
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

class WorkerReplanned(_message.Message):
    __slots__ = ("vw", "incarnation", "before", "after", "foreseen")
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FORESEEN_FIELD_NUMBER: _ClassVar[int]
    vw: int
    incarnation: int
    before: _containers.RepeatedScalarFieldContainer[int]
    after: _containers.RepeatedScalarFieldContainer[int]
    foreseen: float
    def __init__(self, vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., before: _Optional[_Iterable[int]] = ..., after: _Optional[_Iterable[int]] = ..., foreseen: _Optional[float] = ...) -> None: ...

class ReplanJudged(_message.Message):
    __slots__ = ("vw", "gained", "sentence")
    VW_FIELD_NUMBER: _ClassVar[int]
    GAINED_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    vw: int
    gained: float
    sentence: str
    def __init__(self, vw: _Optional[int] = ..., gained: _Optional[float] = ..., sentence: _Optional[str] = ...) -> None: ...

class Straggling(_message.Message):
    __slots__ = ("vw", "stage", "factor")
    VW_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    vw: int
    stage: int
    factor: float
    def __init__(self, vw: _Optional[int] = ..., stage: _Optional[int] = ..., factor: _Optional[float] = ...) -> None: ...

class StageRow(_message.Message):
    __slots__ = ("first_layer", "last_layer", "device")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    last_layer: int
    device: str
    def __init__(self, first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class VirtualWorkerRow(_message.Message):
    __slots__ = ("vw", "stages", "clock", "distance", "samples_per_second", "loss", "waiting_share", "memory_bytes", "state")
    VW_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SHARE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    vw: int
    stages: _containers.RepeatedCompositeFieldContainer[StageRow]
    clock: int
    distance: int
    samples_per_second: float
    loss: float
    waiting_share: float
    memory_bytes: int
    state: str
    def __init__(self, vw: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageRow, _Mapping]]] = ..., clock: _Optional[int] = ..., distance: _Optional[int] = ..., samples_per_second: _Optional[float] = ..., loss: _Optional[float] = ..., waiting_share: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class ProgressTable(_message.Message):
    __slots__ = ("rows", "running_seconds", "epoch", "samples", "total_samples", "samples_per_second", "eta_seconds", "staleness", "global_clock", "straggler", "slow", "tokens_per_second", "model_flops_utilisation", "model_flops_utilisation_reason")
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
    def __init__(self, rows: _Optional[_Iterable[_Union[VirtualWorkerRow, _Mapping]]] = ..., running_seconds: _Optional[float] = ..., epoch: _Optional[int] = ..., samples: _Optional[int] = ..., total_samples: _Optional[int] = ..., samples_per_second: _Optional[float] = ..., eta_seconds: _Optional[float] = ..., staleness: _Optional[int] = ..., global_clock: _Optional[int] = ..., straggler: _Optional[int] = ..., slow: _Optional[_Iterable[_Union[Straggling, _Mapping]]] = ..., tokens_per_second: _Optional[float] = ..., model_flops_utilisation: _Optional[float] = ..., model_flops_utilisation_reason: _Optional[str] = ...) -> None: ...

class JobEnded(_message.Message):
    __slots__ = ("state", "sentence", "error", "problems", "result_json", "conditions")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    RESULT_JSON_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    state: JobState
    sentence: str
    error: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    result_json: str
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    def __init__(self, state: _Optional[_Union[JobState, str]] = ..., sentence: _Optional[str] = ..., error: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ..., result_json: _Optional[str] = ..., conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ...) -> None: ...

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

class WatchJobResponse(_message.Message):
    __slots__ = ("sequence", "state_changed", "waiting", "evaluated", "progress", "ended", "worker_lost", "worker_rejoined", "worker_quarantined", "worker_left", "worker_replanned", "replan_judged", "rewound", "condition_raised", "condition_cleared")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STATE_CHANGED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    WORKER_LOST_FIELD_NUMBER: _ClassVar[int]
    WORKER_REJOINED_FIELD_NUMBER: _ClassVar[int]
    WORKER_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    WORKER_LEFT_FIELD_NUMBER: _ClassVar[int]
    WORKER_REPLANNED_FIELD_NUMBER: _ClassVar[int]
    REPLAN_JUDGED_FIELD_NUMBER: _ClassVar[int]
    REWOUND_FIELD_NUMBER: _ClassVar[int]
    CONDITION_RAISED_FIELD_NUMBER: _ClassVar[int]
    CONDITION_CLEARED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    state_changed: StateChanged
    waiting: Waiting
    evaluated: Evaluated
    progress: ProgressTable
    ended: JobEnded
    worker_lost: WorkerLost
    worker_rejoined: WorkerRejoined
    worker_quarantined: WorkerQuarantined
    worker_left: WorkerLeft
    worker_replanned: WorkerReplanned
    replan_judged: ReplanJudged
    rewound: Rewound
    condition_raised: ConditionRaised
    condition_cleared: ConditionCleared
    def __init__(self, sequence: _Optional[int] = ..., state_changed: _Optional[_Union[StateChanged, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., evaluated: _Optional[_Union[Evaluated, _Mapping]] = ..., progress: _Optional[_Union[ProgressTable, _Mapping]] = ..., ended: _Optional[_Union[JobEnded, _Mapping]] = ..., worker_lost: _Optional[_Union[WorkerLost, _Mapping]] = ..., worker_rejoined: _Optional[_Union[WorkerRejoined, _Mapping]] = ..., worker_quarantined: _Optional[_Union[WorkerQuarantined, _Mapping]] = ..., worker_left: _Optional[_Union[WorkerLeft, _Mapping]] = ..., worker_replanned: _Optional[_Union[WorkerReplanned, _Mapping]] = ..., replan_judged: _Optional[_Union[ReplanJudged, _Mapping]] = ..., rewound: _Optional[_Union[Rewound, _Mapping]] = ..., condition_raised: _Optional[_Union[ConditionRaised, _Mapping]] = ..., condition_cleared: _Optional[_Union[ConditionCleared, _Mapping]] = ...) -> None: ...

class ListMembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListMembersResponse(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class GetClocksRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetClocksResponse(_message.Message):
    __slots__ = ("clocks",)
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    clocks: ClockSnapshot
    def __init__(self, clocks: _Optional[_Union[ClockSnapshot, _Mapping]] = ...) -> None: ...

class WatchClocksRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class WatchClocksResponse(_message.Message):
    __slots__ = ("clocks",)
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    clocks: ClockSnapshot
    def __init__(self, clocks: _Optional[_Union[ClockSnapshot, _Mapping]] = ...) -> None: ...

class CertifyStageRequest(_message.Message):
    __slots__ = ("agent_id", "registration", "stage", "request_pem")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_PEM_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    registration: str
    stage: StageKey
    request_pem: bytes
    def __init__(self, agent_id: _Optional[str] = ..., registration: _Optional[str] = ..., stage: _Optional[_Union[StageKey, _Mapping]] = ..., request_pem: _Optional[bytes] = ...) -> None: ...

class CertifyStageResponse(_message.Message):
    __slots__ = ("certificate_pem",)
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    def __init__(self, certificate_pem: _Optional[bytes] = ...) -> None: ...
