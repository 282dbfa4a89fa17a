"""Decoders of JSON that becomes a dataclass, and of documents of people and of other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import yaml

from hetpipe.checkpoint.manifest import VERSION, Manifest, manifest_bytes, parse_manifest
from hetpipe.job.as_json import job_from_json
from hetpipe.job.file import load_job
from hetpipe.observe.history import MemoryHistory
from hetpipe.profiler.link_order import LinkAnswer, LinkOrder
from hetpipe.profiler.order import ProfileAnswer, ProfileOrder
from hetpipe.server.agent.inspection_order import InspectionAnswer, InspectionOrder
from hetpipe.server.shard.clock_shard import ClockShard
from hetpipe.server.shard.config_check import check_config, check_run
from hetpipe.server.shard.shard import Shard
from hetpipe.storage.store import JobRecord
from hetpipe.values import wire
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import Document, parse_document
from hetpipe.values.events import (
    Evaluated,
    JobEvent,
    JobState,
    StateChanged,
    Waiting,
    WorkerLost,
)
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.measurement import Measurement, ProfileStep
from hetpipe.values.members import MemberInfo
from hetpipe.values.plan import ModelReport
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile
from hetpipe.values.requests import CheckpointFile
from hetpipe.values.run import ClockSnapshot, StageConfig, StageReport
from hetpipe.values.run_document import RunDescription, RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import Progress
from hetpipe.values.yaml_text import YamlSyntaxError, parse_yaml
from tests.decide.lifecycle.test_known_links import copies, link
from tests.fuzz.decoder import LIVES, RUN, SHARD_CONFIG, Decode, Decoder
from tests.profiler.builders import layer, measurement
from tests.server.coordinator.builders import (
    BASE,
    JOB_ID,
    agent_member,
    clocks,
    job,
    model,
    shard_member,
    submission,
)
from tests.values.document_cases import CLUSTER, PLAN, PROFILE
from tests.wire.examples import REPORTS, START


def _values() -> Iterator[tuple[Any, list[Any]]]:
    """Types that travel as JSON, with examples."""
    yield StageConfig, [START.config]
    yield ClockSnapshot, [clocks(1, 2)]
    yield StageReport, list(REPORTS)
    yield ModelReport, [model()]
    yield Measurement, [measurement("cpu", layer(parameters=3))]
    yield ProfileStep, [ProfileStep("cpu", "head", 2, 8)]
    yield InspectionAnswer, [InspectionAnswer(model(), (measurement("cpu"),))]
    yield (
        InspectionOrder,
        [InspectionOrder(job={"a": 1}, import_path="/", with_model=True, measure=("cpu",), cache_folder="/c")],
    )
    yield ProfileOrder, [ProfileOrder(job={"a": 1}, import_path="/", cache_folder="/c")]
    yield ProfileAnswer, [ProfileAnswer((measurement("cpu"),), ())]
    measured = MeasuredLinks(links=(link("a", "b", 1e9),), copies=(copies("a", 1e9),))
    yield MeasuredLinks, [measured]
    yield LinkOrder, [LinkOrder(role="call", node="a", other="b", address="h:1")]
    yield LinkAnswer, [LinkAnswer(link=measured.links[0], copies=measured.copies)]
    yield MemberInfo, [agent_member(), shard_member(0)]
    yield JobRecord, [JobRecord(job_id=JOB_ID, name="a", state=JobState.RUNNING, run_dir="/r", submitted_wall=1.0)]
    yield RunDescription, [RunDescription(SHARD_CONFIG.term, RUN, LIVES, clocks(1, 2), ("stop",), is_over=False)]
    events = [StateChanged(JobState.RUNNING), Waiting("a", 1.0), Evaluated(Clock(1), 0, 1, {"loss": 0.5})]
    yield JobEvent, [*events, WorkerLost(VirtualWorkerIndex(1), Incarnation(2), "it was killed")]


def _json_decoder(kind: Any) -> Decode:
    return lambda data: wire.from_json(kind, data)


def _keep_run(data: bytes) -> None:
    check_run(SHARD_CONFIG, wire.from_json(RunDocument, data))


def _configure(data: bytes) -> object:
    config: ShardConfig = wire.from_json(ShardConfig, data)
    check_config(config, memory_bytes=1 << 20)
    return ClockShard(config, MemoryHistory()), Shard(config, MemoryHistory())


MANIFEST = Manifest(
    VERSION,
    "job",
    Progress(Clock(2), 0, b"\x03", 2, 4),
    {VirtualWorkerIndex(0): 1},
    tuple(CheckpointFile(f"{part}.safetensors", "00" * 32, 10) for part in ("shard-0", "vw-0-stage-0")),
    num_shards=1,
)


def json_decoders() -> Iterator[Decoder]:
    for kind, examples in _values():
        texts = tuple(wire.to_json(kind, example).encode() for example in examples)
        yield Decoder(f"json {getattr(kind, '__name__', 'union')} {len(texts)}", _json_decoder(kind), texts)
    configs = (SHARD_CONFIG, replace(SHARD_CONFIG, run=RUN))
    yield Decoder("json ShardConfig", _configure, tuple(wire.to_json(ShardConfig, c).encode() for c in configs))
    yield Decoder("json RunDocument", _keep_run, (wire.to_json(RunDocument, RUN).encode(),))
    yield Decoder("checkpoint manifest", parse_manifest, (manifest_bytes(MANIFEST),))
    yield Decoder("submitted job", job_from_json, (submission(job()).job_json.encode(),))


def _document_decoder(kind: type[Document]) -> Decode:
    return lambda data: parse_document(kind, data.decode(errors="replace"), what="document")


def _job_yaml(data: bytes) -> object:
    try:
        value, _ = parse_yaml(data.decode(errors="replace"))
    except YamlSyntaxError:  # whoever reads the file makes its own error from it
        return None
    return load_job(value if isinstance(value, dict) else {})


def document_decoders() -> Iterator[Decoder]:
    for kind, example in ((Cluster, CLUSTER), (Profile, PROFILE), (PlanDocument, PLAN)):
        yield Decoder(f"document {kind.__name__}", _document_decoder(kind), (json.dumps(example).encode(),))
    text = yaml.safe_dump({**BASE, "seed": 0}, sort_keys=False)
    yield Decoder("job file", _job_yaml, (text.encode(), text.replace("seed: 0", "seed: &zero 0").encode()))
