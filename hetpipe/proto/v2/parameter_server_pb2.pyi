from hetpipe.proto.v2 import values_pb2 as _values_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunDocument(_message.Message):
    __slots__ = ("job", "submission", "plan", "agents", "shards", "emulations", "data", "start", "eval_samples", "submitted_wall", "out", "proof")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    EMULATIONS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    EVAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_WALL_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    job: _values_pb2.Document
    submission: _values_pb2.Submission
    plan: _values_pb2.Plan
    agents: _containers.RepeatedCompositeFieldContainer[_values_pb2.AgentInfo]
    shards: _containers.RepeatedCompositeFieldContainer[_values_pb2.MemberInfo]
    emulations: _containers.RepeatedCompositeFieldContainer[_values_pb2.WorkerEmulation]
    data: _values_pb2.DataSpec
    start: _values_pb2.Progress
    eval_samples: int
    submitted_wall: float
    out: _containers.RepeatedScalarFieldContainer[int]
    proof: _values_pb2.ProofReport
    def __init__(self, job: _Optional[_Union[_values_pb2.Document, _Mapping]] = ..., submission: _Optional[_Union[_values_pb2.Submission, _Mapping]] = ..., plan: _Optional[_Union[_values_pb2.Plan, _Mapping]] = ..., agents: _Optional[_Iterable[_Union[_values_pb2.AgentInfo, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[_values_pb2.MemberInfo, _Mapping]]] = ..., emulations: _Optional[_Iterable[_Union[_values_pb2.WorkerEmulation, _Mapping]]] = ..., data: _Optional[_Union[_values_pb2.DataSpec, _Mapping]] = ..., start: _Optional[_Union[_values_pb2.Progress, _Mapping]] = ..., eval_samples: _Optional[int] = ..., submitted_wall: _Optional[float] = ..., out: _Optional[_Iterable[int]] = ..., proof: _Optional[_Union[_values_pb2.ProofReport, _Mapping]] = ...) -> None: ...

class ShardConfig(_message.Message):
    __slots__ = ("job_id", "term", "shard", "num_shards", "clock_shard_address", "membership", "slices", "sync", "data", "checkpoint_every_waves", "checkpoint_keep", "run_dir", "progress", "run", "clock_shard_id", "last_checkpoint_seconds", "keeps_history", "storage", "plan_changes", "freezing", "wave_changes", "member_changes", "activations")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_SHARD_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_EVERY_WAVES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_KEEP_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CLOCK_SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_CHECKPOINT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_HISTORY_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    PLAN_CHANGES_FIELD_NUMBER: _ClassVar[int]
    FREEZING_FIELD_NUMBER: _ClassVar[int]
    WAVE_CHANGES_FIELD_NUMBER: _ClassVar[int]
    MEMBER_CHANGES_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    shard: int
    num_shards: int
    clock_shard_address: str
    membership: _values_pb2.Membership
    slices: _containers.RepeatedCompositeFieldContainer[_values_pb2.SlicePlan]
    sync: _values_pb2.SyncSpec
    data: _values_pb2.DataSpec
    checkpoint_every_waves: int
    checkpoint_keep: int
    run_dir: str
    progress: _values_pb2.Progress
    run: RunDocument
    clock_shard_id: str
    last_checkpoint_seconds: float
    keeps_history: bool
    storage: str
    plan_changes: _containers.RepeatedCompositeFieldContainer[PlanChange]
    freezing: Freezing
    wave_changes: _containers.RepeatedCompositeFieldContainer[WaveChange]
    member_changes: _containers.RepeatedCompositeFieldContainer[MemberChange]
    activations: _containers.RepeatedCompositeFieldContainer[_values_pb2.Activation]
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., shard: _Optional[int] = ..., num_shards: _Optional[int] = ..., clock_shard_address: _Optional[str] = ..., membership: _Optional[_Union[_values_pb2.Membership, _Mapping]] = ..., slices: _Optional[_Iterable[_Union[_values_pb2.SlicePlan, _Mapping]]] = ..., sync: _Optional[_Union[_values_pb2.SyncSpec, _Mapping]] = ..., data: _Optional[_Union[_values_pb2.DataSpec, _Mapping]] = ..., checkpoint_every_waves: _Optional[int] = ..., checkpoint_keep: _Optional[int] = ..., run_dir: _Optional[str] = ..., progress: _Optional[_Union[_values_pb2.Progress, _Mapping]] = ..., run: _Optional[_Union[RunDocument, _Mapping]] = ..., clock_shard_id: _Optional[str] = ..., last_checkpoint_seconds: _Optional[float] = ..., keeps_history: bool = ..., storage: _Optional[str] = ..., plan_changes: _Optional[_Iterable[_Union[PlanChange, _Mapping]]] = ..., freezing: _Optional[_Union[Freezing, _Mapping]] = ..., wave_changes: _Optional[_Iterable[_Union[WaveChange, _Mapping]]] = ..., member_changes: _Optional[_Iterable[_Union[MemberChange, _Mapping]]] = ..., activations: _Optional[_Iterable[_Union[_values_pb2.Activation, _Mapping]]] = ...) -> None: ...

class Freezing(_message.Message):
    __slots__ = ("levels", "changes", "alpha", "every_waves", "cuts", "lineups")
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    EVERY_WAVES_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    LINEUPS_FIELD_NUMBER: _ClassVar[int]
    levels: _containers.RepeatedScalarFieldContainer[int]
    changes: _containers.RepeatedCompositeFieldContainer[FreezeChange]
    alpha: str
    every_waves: int
    cuts: _containers.RepeatedCompositeFieldContainer[_values_pb2.FreezeCut]
    lineups: _containers.RepeatedCompositeFieldContainer[_values_pb2.FreezeLineup]
    def __init__(self, levels: _Optional[_Iterable[int]] = ..., changes: _Optional[_Iterable[_Union[FreezeChange, _Mapping]]] = ..., alpha: _Optional[str] = ..., every_waves: _Optional[int] = ..., cuts: _Optional[_Iterable[_Union[_values_pb2.FreezeCut, _Mapping]]] = ..., lineups: _Optional[_Iterable[_Union[_values_pb2.FreezeLineup, _Mapping]]] = ...) -> None: ...

class FreezeChange(_message.Message):
    __slots__ = ("frozen", "clock", "epoch")
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    frozen: int
    clock: int
    epoch: int
    def __init__(self, frozen: _Optional[int] = ..., clock: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class MemberChange(_message.Message):
    __slots__ = ("clock", "vw", "joins")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    clock: int
    vw: int
    joins: bool
    def __init__(self, clock: _Optional[int] = ..., vw: _Optional[int] = ..., joins: bool = ...) -> None: ...

class WaveChange(_message.Message):
    __slots__ = ("clock", "minibatches_per_wave")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_PER_WAVE_FIELD_NUMBER: _ClassVar[int]
    clock: int
    minibatches_per_wave: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, clock: _Optional[int] = ..., minibatches_per_wave: _Optional[_Iterable[int]] = ...) -> None: ...

class PlanChange(_message.Message):
    __slots__ = ("clock", "vw", "bounds", "live")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    clock: int
    vw: int
    bounds: _containers.RepeatedScalarFieldContainer[int]
    live: bool
    def __init__(self, clock: _Optional[int] = ..., vw: _Optional[int] = ..., bounds: _Optional[_Iterable[int]] = ..., live: bool = ...) -> None: ...

class LifeSeen(_message.Message):
    __slots__ = ("vw", "incarnation", "num_stages", "standing", "leaving")
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    vw: int
    incarnation: int
    num_stages: int
    standing: str
    leaving: bool
    def __init__(self, vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., num_stages: _Optional[int] = ..., standing: _Optional[str] = ..., leaving: bool = ...) -> None: ...

class RunDescription(_message.Message):
    __slots__ = ("term", "run", "lives", "clocks", "reasons", "is_over")
    TERM_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LIVES_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    term: int
    run: RunDocument
    lives: _containers.RepeatedCompositeFieldContainer[LifeSeen]
    clocks: _values_pb2.ClockSnapshot
    reasons: _containers.RepeatedScalarFieldContainer[str]
    is_over: bool
    def __init__(self, term: _Optional[int] = ..., run: _Optional[_Union[RunDocument, _Mapping]] = ..., lives: _Optional[_Iterable[_Union[LifeSeen, _Mapping]]] = ..., clocks: _Optional[_Union[_values_pb2.ClockSnapshot, _Mapping]] = ..., reasons: _Optional[_Iterable[str]] = ..., is_over: bool = ...) -> None: ...

class SliceHeader(_message.Message):
    __slots__ = ("parameter", "start", "stop", "dtype")
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    parameter: str
    start: int
    stop: int
    dtype: str
    def __init__(self, parameter: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("requester", "wave", "slices", "fresh")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    requester: _values_pb2.Requester
    wave: int
    slices: _containers.RepeatedCompositeFieldContainer[SliceHeader]
    fresh: bool
    def __init__(self, requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ..., wave: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[SliceHeader, _Mapping]]] = ..., fresh: bool = ...) -> None: ...

class Watermarks(_message.Message):
    __slots__ = ("staged", "committed", "durable")
    STAGED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    staged: int
    committed: int
    durable: int
    def __init__(self, staged: _Optional[int] = ..., committed: _Optional[int] = ..., durable: _Optional[int] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("duplicate", "marks")
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    duplicate: bool
    marks: Watermarks
    def __init__(self, duplicate: bool = ..., marks: _Optional[_Union[Watermarks, _Mapping]] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("requester", "clock", "slices")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    requester: _values_pb2.Requester
    clock: int
    slices: _containers.RepeatedCompositeFieldContainer[SliceHeader]
    def __init__(self, requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ..., clock: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[SliceHeader, _Mapping]]] = ...) -> None: ...

class BuffersHeader(_message.Message):
    __slots__ = ("requester", "clock", "buffers")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    requester: _values_pb2.Requester
    clock: int
    buffers: _containers.RepeatedCompositeFieldContainer[SliceHeader]
    def __init__(self, requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ..., clock: _Optional[int] = ..., buffers: _Optional[_Iterable[_Union[SliceHeader, _Mapping]]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("requester", "link_address", "replicas_address", "only_meets")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    LINK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ONLY_MEETS_FIELD_NUMBER: _ClassVar[int]
    requester: _values_pb2.Requester
    link_address: str
    replicas_address: str
    only_meets: bool
    def __init__(self, requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ..., link_address: _Optional[str] = ..., replicas_address: _Optional[str] = ..., only_meets: bool = ...) -> None: ...

class Meeting(_message.Message):
    __slots__ = ("link", "replicas", "joined", "makes_weights")
    LINK_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    MAKES_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    link: str
    replicas: str
    joined: _containers.RepeatedScalarFieldContainer[int]
    makes_weights: bool
    def __init__(self, link: _Optional[str] = ..., replicas: _Optional[str] = ..., joined: _Optional[_Iterable[int]] = ..., makes_weights: bool = ...) -> None: ...

class ReportInitializedRequest(_message.Message):
    __slots__ = ("requester",)
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    requester: _values_pb2.Requester
    def __init__(self, requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("indices",)
    INDICES_FIELD_NUMBER: _ClassVar[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, indices: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportStagedRequest(_message.Message):
    __slots__ = ("requester", "wave", "blocks", "segment", "squares")
    class SquaresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    requester: _values_pb2.Requester
    wave: int
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    segment: int
    squares: _containers.ScalarMap[int, float]
    def __init__(self, requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ..., wave: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., segment: _Optional[int] = ..., squares: _Optional[_Mapping[int, float]] = ...) -> None: ...

class HoldClockRequest(_message.Message):
    __slots__ = ("requester", "switch")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    requester: _values_pb2.Requester
    switch: int
    def __init__(self, requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ..., switch: _Optional[int] = ...) -> None: ...

class HeldClock(_message.Message):
    __slots__ = ("clock", "barrier", "moves")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    clock: int
    barrier: int
    moves: int
    def __init__(self, clock: _Optional[int] = ..., barrier: _Optional[int] = ..., moves: _Optional[int] = ...) -> None: ...

class ReportPreparedRequest(_message.Message):
    __slots__ = ("requester", "index", "can")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CAN_FIELD_NUMBER: _ClassVar[int]
    requester: _values_pb2.Requester
    index: int
    can: bool
    def __init__(self, requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ..., index: _Optional[int] = ..., can: bool = ...) -> None: ...

class RequestBarrierRequest(_message.Message):
    __slots__ = ("job_id", "term", "reason")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    reason: str
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Barrier(_message.Message):
    __slots__ = ("clock",)
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    clock: int
    def __init__(self, clock: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("job_id", "term", "vw", "incarnation")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    vw: int
    incarnation: int
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., vw: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("job_id", "term", "vw", "incarnation")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    vw: int
    incarnation: int
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., vw: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class PlanMove(_message.Message):
    __slots__ = ("incarnation", "bounds", "by", "reason", "predicted_gain", "live")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_GAIN_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    bounds: _containers.RepeatedScalarFieldContainer[int]
    by: str
    reason: str
    predicted_gain: float
    live: bool
    def __init__(self, incarnation: _Optional[int] = ..., bounds: _Optional[_Iterable[int]] = ..., by: _Optional[str] = ..., reason: _Optional[str] = ..., predicted_gain: _Optional[float] = ..., live: bool = ...) -> None: ...

class MoveRequest(_message.Message):
    __slots__ = ("job_id", "term", "vw", "move")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    vw: int
    move: PlanMove
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., vw: _Optional[int] = ..., move: _Optional[_Union[PlanMove, _Mapping]] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("job_id", "term", "vw", "incarnation", "num_stages", "minibatches_per_wave", "bounds")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_PER_WAVE_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    vw: int
    incarnation: int
    num_stages: int
    minibatches_per_wave: int
    bounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., num_stages: _Optional[int] = ..., minibatches_per_wave: _Optional[int] = ..., bounds: _Optional[_Iterable[int]] = ...) -> None: ...

class KeepRunRequest(_message.Message):
    __slots__ = ("job_id", "term", "run")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    run: RunDocument
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., run: _Optional[_Union[RunDocument, _Mapping]] = ...) -> None: ...

class DescribeRunRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetShardClocksRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetProgressRequest(_message.Message):
    __slots__ = ("requester",)
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    requester: _values_pb2.Requester
    def __init__(self, requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ...) -> None: ...

class ShareMemoryRequest(_message.Message):
    __slots__ = ("requester", "call")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    requester: _values_pb2.Requester
    call: str
    def __init__(self, requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ..., call: _Optional[str] = ...) -> None: ...

class CheckpointFile(_message.Message):
    __slots__ = ("name", "sha256", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: str
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ReportCheckpointRequest(_message.Message):
    __slots__ = ("requester", "clock", "files", "failure")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    requester: _values_pb2.Requester
    clock: int
    files: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    failure: str
    def __init__(self, requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ..., clock: _Optional[int] = ..., files: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., failure: _Optional[str] = ...) -> None: ...

class ReportShardCheckpointRequest(_message.Message):
    __slots__ = ("job_id", "term", "shard", "clock", "files", "failure")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    shard: int
    clock: int
    files: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    failure: str
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., shard: _Optional[int] = ..., clock: _Optional[int] = ..., files: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., failure: _Optional[str] = ...) -> None: ...

class CheckpointParts(_message.Message):
    __slots__ = ("complete",)
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    def __init__(self, complete: bool = ...) -> None: ...

class FollowLogRequest(_message.Message):
    __slots__ = ("job_id", "term", "start", "gathered", "requester")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    GATHERED_FIELD_NUMBER: _ClassVar[int]
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    start: int
    gathered: bool
    requester: _values_pb2.Requester
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., start: _Optional[int] = ..., gathered: bool = ..., requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ...) -> None: ...

class TermRecord(_message.Message):
    __slots__ = ("index", "term")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    index: int
    term: int
    def __init__(self, index: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class InitializeRecord(_message.Message):
    __slots__ = ("index", "clock", "vw", "incarnation")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    index: int
    clock: int
    vw: int
    incarnation: int
    def __init__(self, index: _Optional[int] = ..., clock: _Optional[int] = ..., vw: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class CommitRecord(_message.Message):
    __slots__ = ("index", "vw", "incarnation", "wave", "samples")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    index: int
    vw: int
    incarnation: int
    wave: int
    samples: int
    def __init__(self, index: _Optional[int] = ..., vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., wave: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...

class EvictRecord(_message.Message):
    __slots__ = ("index", "vw", "incarnation", "clock")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    index: int
    vw: int
    incarnation: int
    clock: int
    def __init__(self, index: _Optional[int] = ..., vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., clock: _Optional[int] = ...) -> None: ...

class BarrierRecord(_message.Message):
    __slots__ = ("index", "clock", "reason", "epoch", "cuts")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    clock: int
    reason: str
    epoch: int
    cuts: _containers.RepeatedCompositeFieldContainer[NewCut]
    def __init__(self, index: _Optional[int] = ..., clock: _Optional[int] = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ..., cuts: _Optional[_Iterable[_Union[NewCut, _Mapping]]] = ...) -> None: ...

class NewCut(_message.Message):
    __slots__ = ("vw", "bounds")
    VW_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    vw: int
    bounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, vw: _Optional[int] = ..., bounds: _Optional[_Iterable[int]] = ...) -> None: ...

class PublishRecord(_message.Message):
    __slots__ = ("index", "clock", "retained")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    index: int
    clock: int
    retained: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., clock: _Optional[int] = ..., retained: _Optional[_Iterable[int]] = ...) -> None: ...

class SegmentMember(_message.Message):
    __slots__ = ("vw", "incarnation", "num_stages", "joined", "minibatches_per_wave", "version", "bounds", "moved", "origin")
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_PER_WAVE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    vw: int
    incarnation: int
    num_stages: int
    joined: bool
    minibatches_per_wave: int
    version: int
    bounds: _containers.RepeatedScalarFieldContainer[int]
    moved: bool
    origin: int
    def __init__(self, vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., num_stages: _Optional[int] = ..., joined: bool = ..., minibatches_per_wave: _Optional[int] = ..., version: _Optional[int] = ..., bounds: _Optional[_Iterable[int]] = ..., moved: bool = ..., origin: _Optional[int] = ...) -> None: ...

class SegmentRecord(_message.Message):
    __slots__ = ("index", "start", "reasons", "epoch", "members", "left", "frozen", "frozen_layers", "inactive", "inactive_before", "fresh")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    FROZEN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    INACTIVE_FIELD_NUMBER: _ClassVar[int]
    INACTIVE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    index: int
    start: int
    reasons: _containers.RepeatedScalarFieldContainer[str]
    epoch: int
    members: _containers.RepeatedCompositeFieldContainer[SegmentMember]
    left: _containers.RepeatedCompositeFieldContainer[SegmentMember]
    frozen: int
    frozen_layers: int
    inactive: _containers.RepeatedScalarFieldContainer[int]
    inactive_before: _containers.RepeatedScalarFieldContainer[int]
    fresh: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., start: _Optional[int] = ..., reasons: _Optional[_Iterable[str]] = ..., epoch: _Optional[int] = ..., members: _Optional[_Iterable[_Union[SegmentMember, _Mapping]]] = ..., left: _Optional[_Iterable[_Union[SegmentMember, _Mapping]]] = ..., frozen: _Optional[int] = ..., frozen_layers: _Optional[int] = ..., inactive: _Optional[_Iterable[int]] = ..., inactive_before: _Optional[_Iterable[int]] = ..., fresh: _Optional[_Iterable[int]] = ...) -> None: ...

class PlanRecord(_message.Message):
    __slots__ = ("index", "vw", "incarnation", "clock", "version", "bounds")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    vw: int
    incarnation: int
    clock: int
    version: int
    bounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., clock: _Optional[int] = ..., version: _Optional[int] = ..., bounds: _Optional[_Iterable[int]] = ...) -> None: ...

class PrepareRecord(_message.Message):
    __slots__ = ("index", "vw", "incarnation", "bounds")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    vw: int
    incarnation: int
    bounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., bounds: _Optional[_Iterable[int]] = ...) -> None: ...

class HandoverRecord(_message.Message):
    __slots__ = ("index", "vw", "incarnation", "clock", "whole")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    index: int
    vw: int
    incarnation: int
    clock: int
    whole: bool
    def __init__(self, index: _Optional[int] = ..., vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., clock: _Optional[int] = ..., whole: bool = ...) -> None: ...

class LogRecord(_message.Message):
    __slots__ = ("term_record", "initialize_record", "commit_record", "evict_record", "barrier_record", "publish_record", "segment_record", "plan_record", "prepare_record", "handover_record")
    TERM_RECORD_FIELD_NUMBER: _ClassVar[int]
    INITIALIZE_RECORD_FIELD_NUMBER: _ClassVar[int]
    COMMIT_RECORD_FIELD_NUMBER: _ClassVar[int]
    EVICT_RECORD_FIELD_NUMBER: _ClassVar[int]
    BARRIER_RECORD_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_RECORD_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_RECORD_FIELD_NUMBER: _ClassVar[int]
    PLAN_RECORD_FIELD_NUMBER: _ClassVar[int]
    PREPARE_RECORD_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_RECORD_FIELD_NUMBER: _ClassVar[int]
    term_record: TermRecord
    initialize_record: InitializeRecord
    commit_record: CommitRecord
    evict_record: EvictRecord
    barrier_record: BarrierRecord
    publish_record: PublishRecord
    segment_record: SegmentRecord
    plan_record: PlanRecord
    prepare_record: PrepareRecord
    handover_record: HandoverRecord
    def __init__(self, term_record: _Optional[_Union[TermRecord, _Mapping]] = ..., initialize_record: _Optional[_Union[InitializeRecord, _Mapping]] = ..., commit_record: _Optional[_Union[CommitRecord, _Mapping]] = ..., evict_record: _Optional[_Union[EvictRecord, _Mapping]] = ..., barrier_record: _Optional[_Union[BarrierRecord, _Mapping]] = ..., publish_record: _Optional[_Union[PublishRecord, _Mapping]] = ..., segment_record: _Optional[_Union[SegmentRecord, _Mapping]] = ..., plan_record: _Optional[_Union[PlanRecord, _Mapping]] = ..., prepare_record: _Optional[_Union[PrepareRecord, _Mapping]] = ..., handover_record: _Optional[_Union[HandoverRecord, _Mapping]] = ...) -> None: ...

class LogRecords(_message.Message):
    __slots__ = ("records", "acknowledge_later")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_LATER_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[LogRecord]
    acknowledge_later: bool
    def __init__(self, records: _Optional[_Iterable[_Union[LogRecord, _Mapping]]] = ..., acknowledge_later: bool = ...) -> None: ...

class AcknowledgeRequest(_message.Message):
    __slots__ = ("job_id", "term", "shard", "num_records", "durable", "applied")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_RECORDS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    shard: int
    num_records: int
    durable: int
    applied: bool
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., shard: _Optional[int] = ..., num_records: _Optional[int] = ..., durable: _Optional[int] = ..., applied: bool = ...) -> None: ...
