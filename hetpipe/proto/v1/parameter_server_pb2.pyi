from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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

class Slice(_message.Message):
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
    __slots__ = ("requester", "wave", "slices")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    requester: Requester
    wave: int
    slices: _containers.RepeatedCompositeFieldContainer[Slice]
    def __init__(self, requester: _Optional[_Union[Requester, _Mapping]] = ..., wave: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[Slice, _Mapping]]] = ...) -> None: ...

class PushAcknowledgement(_message.Message):
    __slots__ = ("duplicate", "staged", "committed", "durable")
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    duplicate: bool
    staged: int
    committed: int
    durable: int
    def __init__(self, duplicate: bool = ..., staged: _Optional[int] = ..., committed: _Optional[int] = ..., durable: _Optional[int] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("requester", "clock", "slices")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    requester: Requester
    clock: int
    slices: _containers.RepeatedCompositeFieldContainer[Slice]
    def __init__(self, requester: _Optional[_Union[Requester, _Mapping]] = ..., clock: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[Slice, _Mapping]]] = ...) -> None: ...

class BuffersHeader(_message.Message):
    __slots__ = ("requester", "clock", "buffers")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    requester: Requester
    clock: int
    buffers: _containers.RepeatedCompositeFieldContainer[Slice]
    def __init__(self, requester: _Optional[_Union[Requester, _Mapping]] = ..., clock: _Optional[int] = ..., buffers: _Optional[_Iterable[_Union[Slice, _Mapping]]] = ...) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("config",)
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    config: str
    def __init__(self, config: _Optional[str] = ...) -> None: ...

class ConfigureResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("requester", "link_address", "replicas_address", "only_meets")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    LINK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ONLY_MEETS_FIELD_NUMBER: _ClassVar[int]
    requester: Requester
    link_address: str
    replicas_address: str
    only_meets: bool
    def __init__(self, requester: _Optional[_Union[Requester, _Mapping]] = ..., link_address: _Optional[str] = ..., replicas_address: _Optional[str] = ..., only_meets: bool = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("link_address", "joined", "replicas_address", "makes_weights")
    LINK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAKES_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    link_address: str
    joined: _containers.RepeatedScalarFieldContainer[int]
    replicas_address: str
    makes_weights: bool
    def __init__(self, link_address: _Optional[str] = ..., joined: _Optional[_Iterable[int]] = ..., replicas_address: _Optional[str] = ..., makes_weights: bool = ...) -> None: ...

class ReportInitializedRequest(_message.Message):
    __slots__ = ("requester",)
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    requester: Requester
    def __init__(self, requester: _Optional[_Union[Requester, _Mapping]] = ...) -> None: ...

class ReportInitializedResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Block(_message.Message):
    __slots__ = ("indices",)
    INDICES_FIELD_NUMBER: _ClassVar[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, indices: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportStagedRequest(_message.Message):
    __slots__ = ("requester", "wave", "blocks", "segment")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    requester: Requester
    wave: int
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    segment: int
    def __init__(self, requester: _Optional[_Union[Requester, _Mapping]] = ..., wave: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., segment: _Optional[int] = ...) -> None: ...

class ReportStagedResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldClockRequest(_message.Message):
    __slots__ = ("requester", "switch")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    requester: Requester
    switch: int
    def __init__(self, requester: _Optional[_Union[Requester, _Mapping]] = ..., switch: _Optional[int] = ...) -> None: ...

class HoldClockResponse(_message.Message):
    __slots__ = ("clock", "barrier")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    clock: int
    barrier: int
    def __init__(self, clock: _Optional[int] = ..., barrier: _Optional[int] = ...) -> None: ...

class RequestBarrierRequest(_message.Message):
    __slots__ = ("job_id", "term", "reason")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    reason: str
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RequestBarrierResponse(_message.Message):
    __slots__ = ("clock",)
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    clock: int
    def __init__(self, clock: _Optional[int] = ...) -> None: ...

class KeepRunRequest(_message.Message):
    __slots__ = ("job_id", "term", "run")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    run: str
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., run: _Optional[str] = ...) -> None: ...

class KeepRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRunRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class DescribeRunResponse(_message.Message):
    __slots__ = ("description",)
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    description: str
    def __init__(self, description: _Optional[str] = ...) -> None: ...

class GetShardClocksRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetShardClocksResponse(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: str
    def __init__(self, snapshot: _Optional[str] = ...) -> None: ...

class GetProgressRequest(_message.Message):
    __slots__ = ("requester",)
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    requester: Requester
    def __init__(self, requester: _Optional[_Union[Requester, _Mapping]] = ...) -> None: ...

class GetProgressResponse(_message.Message):
    __slots__ = ("clock", "epoch", "used", "minibatches", "samples")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    clock: int
    epoch: int
    used: bytes
    minibatches: int
    samples: int
    def __init__(self, clock: _Optional[int] = ..., epoch: _Optional[int] = ..., used: _Optional[bytes] = ..., minibatches: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...

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
    requester: Requester
    clock: int
    files: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    failure: str
    def __init__(self, requester: _Optional[_Union[Requester, _Mapping]] = ..., clock: _Optional[int] = ..., files: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., failure: _Optional[str] = ...) -> None: ...

class ReportCheckpointResponse(_message.Message):
    __slots__ = ("complete",)
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    def __init__(self, complete: bool = ...) -> None: ...

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

class ReportShardCheckpointResponse(_message.Message):
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
    requester: Requester
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., start: _Optional[int] = ..., gathered: bool = ..., requester: _Optional[_Union[Requester, _Mapping]] = ...) -> None: ...

class FollowLogResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[LogRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[LogRecord, _Mapping]]] = ...) -> None: ...

class LogRecord(_message.Message):
    __slots__ = ("index", "term", "initialize", "commit", "evict", "barrier", "publish", "segment")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    INITIALIZE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    index: int
    term: TermDecision
    initialize: MemberDecision
    commit: CommitDecision
    evict: MemberDecision
    barrier: BarrierDecision
    publish: PublishDecision
    segment: SegmentDecision
    def __init__(self, index: _Optional[int] = ..., term: _Optional[_Union[TermDecision, _Mapping]] = ..., initialize: _Optional[_Union[MemberDecision, _Mapping]] = ..., commit: _Optional[_Union[CommitDecision, _Mapping]] = ..., evict: _Optional[_Union[MemberDecision, _Mapping]] = ..., barrier: _Optional[_Union[BarrierDecision, _Mapping]] = ..., publish: _Optional[_Union[PublishDecision, _Mapping]] = ..., segment: _Optional[_Union[SegmentDecision, _Mapping]] = ...) -> None: ...

class TermDecision(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    def __init__(self, term: _Optional[int] = ...) -> None: ...

class MemberDecision(_message.Message):
    __slots__ = ("vw", "incarnation", "clock")
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    vw: int
    incarnation: int
    clock: int
    def __init__(self, vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., clock: _Optional[int] = ...) -> None: ...

class CommitDecision(_message.Message):
    __slots__ = ("vw", "incarnation", "wave", "samples")
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    vw: int
    incarnation: int
    wave: int
    samples: int
    def __init__(self, vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., wave: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...

class BarrierDecision(_message.Message):
    __slots__ = ("clock", "reason", "epoch")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    clock: int
    reason: str
    epoch: int
    def __init__(self, clock: _Optional[int] = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class PublishDecision(_message.Message):
    __slots__ = ("clock", "retained")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    clock: int
    retained: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, clock: _Optional[int] = ..., retained: _Optional[_Iterable[int]] = ...) -> None: ...

class SegmentDecision(_message.Message):
    __slots__ = ("start", "reasons", "epoch", "members", "left")
    START_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    start: int
    reasons: _containers.RepeatedScalarFieldContainer[str]
    epoch: int
    members: _containers.RepeatedCompositeFieldContainer[SegmentMember]
    left: _containers.RepeatedCompositeFieldContainer[SegmentMember]
    def __init__(self, start: _Optional[int] = ..., reasons: _Optional[_Iterable[str]] = ..., epoch: _Optional[int] = ..., members: _Optional[_Iterable[_Union[SegmentMember, _Mapping]]] = ..., left: _Optional[_Iterable[_Union[SegmentMember, _Mapping]]] = ...) -> None: ...

class SegmentMember(_message.Message):
    __slots__ = ("vw", "incarnation", "num_stages", "joined")
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    vw: int
    incarnation: int
    num_stages: int
    joined: bool
    def __init__(self, vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., num_stages: _Optional[int] = ..., joined: bool = ...) -> None: ...

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

class EvictResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

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

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("job_id", "term", "vw", "incarnation", "num_stages")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    vw: int
    incarnation: int
    num_stages: int
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., vw: _Optional[int] = ..., incarnation: _Optional[int] = ..., num_stages: _Optional[int] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

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

class AcknowledgeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
