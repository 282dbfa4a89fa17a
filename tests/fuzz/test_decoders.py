"""Whatever a peer sends, a decoder answers with a value or with one of the package's own errors.

A run is one mutation of a valid example, decoded once. Hypothesis draws seeds; each seed makes a batch of mutations
(`mutations.mutated`), because Hypothesis itself would take longer than the decoders. `make fuzz` makes 100,000 runs per
decoder; `make test` a few, which keeps the table alive.
"""

from __future__ import annotations

import json
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.errors import ClockNotPublished, HetpipeError, JobError, ProtocolViolation
from hetpipe.job.as_json import MAX_JOB_CHARACTERS, MAX_JOB_VALUES, job_from_json
from hetpipe.values.ids import Clock
from hetpipe.values.plan import ModelReport
from hetpipe.values.requests import BuffersHeader, PushHeader, SliceHeader
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.wire import from_json, plain
from hetpipe.values.yaml_text import YamlSyntaxError, parse_yaml
from hetpipe.wire.codec import to_bytes
from tests.fuzz.conftest import MUTATIONS_PER_EXAMPLE
from tests.fuzz.decoder import SHARD_CONFIG, Decoder
from tests.fuzz.decoders import DECODERS
from tests.fuzz.memory import resident_bytes
from tests.fuzz.mutations import mutated
from tests.server.shard.builders import requester

FUZZING = settings.get_current_profile_name() == "fuzz"
BATCH = MUTATIONS_PER_EXAMPLE if FUZZING else 20


def decode(decoder: Decoder, data: bytes) -> None:
    try:
        decoder.decode(data)
    except HetpipeError:
        return
    except BaseException as error:
        error.add_note(f"{decoder.name} was given {data[:2_000]!r} ({len(data)} bytes)")
        raise


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_only_typed_errors_leave(decoder: Decoder) -> None:
    @settings(max_examples=settings().max_examples if FUZZING else 1, database=None)
    @given(st.integers(0, 2**64 - 1))
    def batch(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(BATCH):
            decode(decoder, mutated(source, decoder.examples, decoder.message))

    batch()


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_the_examples_are_valid(decoder: Decoder) -> None:
    for example in decoder.examples:
        if decoder.name == "message PullHeader":  # in order, but of a clock that nothing is published for
            with pytest.raises(ClockNotPublished):
                decoder.decode(example)
        else:
            decoder.decode(example)


#: Where a frame says the size of its first tensor: behind its prefix, and the tensor's dtype, rank and place.
_SIZES_OFFSET = 49 + 3


def claims() -> list[tuple[str, bytes]]:
    """Small inputs that announce 2 GiB and more, by the name of the decoder."""
    two_gib = 1 << 31
    (frame,) = (each.examples[0] for each in DECODERS if each.name == "link frame")
    huge_frame = frame[:_SIZES_OFFSET] + (two_gib * 2).to_bytes(8, "little") + frame[_SIZES_OFFSET + 8 :]
    slices = (SliceHeader("p0", 0, two_gib, "float32"),)
    buffers = (SliceHeader("mean", 0, two_gib, "float64"),)
    config = plain(ShardConfig, SHARD_CONFIG)
    config["slices"][0]["parameter"]["shape"] = [two_gib]
    config["slices"][0]["stop"] = two_gib
    return [
        ("link frame", huge_frame),
        ("message PushHeader", to_bytes(PushHeader(requester(), None, slices))),
        ("message BuffersHeader", to_bytes(BuffersHeader(requester(), Clock(0), buffers))),
        ("json ShardConfig", json.dumps(config).encode()),
        ("tensor chunks", (65_000).to_bytes(2, "little") + two_gib.to_bytes(8, "little") + bytes(1_000)),
        ("message ReportRequest", b"\x22\xff\xff\xff\xff\x07"),  # a list entry of 2 GiB - 1
    ]


@pytest.mark.parametrize(("name", "data"), claims(), ids=lambda value: value if isinstance(value, str) else "")
def test_nothing_is_allocated_by_what_is_claimed(name: str, data: bytes) -> None:
    (decoder,) = (each for each in DECODERS if each.name == name)
    decode(decoder, decoder.examples[0])
    resident = resident_bytes()
    tracemalloc.start()
    try:
        with pytest.raises(HetpipeError):
            decoder.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert resident_bytes() - resident < 8 << 20


def test_a_million_mistakes_are_told_as_one() -> None:
    text = b'{"layers": [' + b"0," * 1_000_000 + b'0], "train_samples": 1, "eval_samples": 1}'
    with pytest.raises(ProtocolViolation) as caught:
        from_json(ModelReport, text)
    assert len(str(caught.value)) < 1_000


def test_a_job_is_bounded_before_it_is_looked_at() -> None:
    with pytest.raises(JobError, match="the limit is 1048576"):
        job_from_json("[" * (MAX_JOB_CHARACTERS + 1))
    with pytest.raises(JobError, match="more than 50000 values"):
        job_from_json(json.dumps({"data": [0] * MAX_JOB_VALUES}))
    with pytest.raises(JobError, match="nested too deeply"):
        job_from_json("[" * 100_000)


def test_aliases_that_stand_for_a_billion_values() -> None:
    lines = ["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10))]
    with pytest.raises(YamlSyntaxError, match="more than 200000 values"):
        parse_yaml("\n".join(lines))
