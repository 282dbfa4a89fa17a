"""Slices of buffers as chunks and back."""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.checksum import checksums
from hetpipe.decide.planner.shard_bytes import halved_pushes, place_bytes
from hetpipe.errors import DamagedChunk, MalformedChunk
from hetpipe.server.shard import chunks as module
from hetpipe.server.shard.chunks import CHUNK_BYTES, ChunkReceiver, Chunks, RunMap, chunks, slice_bytes
from hetpipe.values.plan import DTYPE_BYTES
from hetpipe.values.profile import LayerProfile, ParameterProfile, Profile
from hetpipe.values.requests import SliceHeader
from hetpipe.weights.flat import FlatBuffer, FlatLayout, aligned
from hetpipe.wire.call import joined
from tests.server.shard.builders import chunk_of, decode, encode

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """Slices in stream order, and where they lie in a buffer of `layout`."""

    layout: FlatLayout
    headers: tuple[SliceHeader, ...]
    offsets: tuple[int, ...]

    @property
    def runs(self) -> RunMap:
        return RunMap(self.headers, self.offsets)

    def bytes_of_slices(self) -> dict[int, int]:
        """Stream position → buffer position, byte by byte."""
        places: dict[int, int] = {}
        position = 0
        for header, offset in zip(self.headers, self.offsets, strict=True):
            places |= {position + i: offset + i for i in range(slice_bytes(header))}
            position = aligned(position + slice_bytes(header))
        return places


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Some of the slices of some tensors, in any order; a slice begins at a multiple of 64 bytes, as parameters do."""
    sizes = draw(
        st.lists(
            st.tuples(st.integers(0, 100), st.sampled_from(["float32", "float64", "uint8"])), min_size=1, max_size=6
        )
    )
    layout = FlatLayout([(f"p{i}", (size,), dtype) for i, (size, dtype) in enumerate(sizes)])
    pieces: list[tuple[SliceHeader, int]] = []
    for slot in layout.slots:
        unit = 64 // DTYPE_BYTES[slot.dtype]
        total = slot.num_bytes // DTYPE_BYTES[slot.dtype]
        cuts = draw(st.sets(st.sampled_from(range(0, total + 1, unit)), max_size=2)) - {0, total}
        bounds = [0, *sorted(cuts), total]
        for start, stop in pairwise(bounds):
            offset = slot.offset + start * DTYPE_BYTES[slot.dtype]
            pieces.append((SliceHeader(slot.name, start, stop, slot.dtype), offset))
    chosen = draw(st.lists(st.sampled_from(pieces), unique=True))
    if draw(st.booleans()):
        chosen.sort(key=lambda piece: piece[1])
    return Case(layout, tuple(header for header, _ in chosen), tuple(offset for _, offset in chosen))


def random_buffer(layout: FlatLayout, seed: int = 0) -> FlatBuffer:
    """Random bytes in the tensors, zeros in the gaps."""
    buffer = FlatBuffer(layout, CPU)
    generator = torch.Generator().manual_seed(seed)
    for slot in layout.slots:
        raw = torch.randint(0, 256, (slot.num_bytes,), generator=generator, dtype=torch.uint8)
        buffer.data[slot.offset : slot.offset + slot.num_bytes] = raw
    return buffer


def rounded_buffer(layout: FlatLayout, seed: int = 0) -> FlatBuffer:
    """Random bytes, but `float32` tensors are rounded to `bfloat16`."""
    buffer = random_buffer(layout, seed)
    for slot in layout.slots:
        if slot.dtype == "float32":
            buffer.data[slot.offset : slot.offset + slot.num_bytes].view(-1, 4)[:, :2] = 0
    return buffer


class TestHalves:
    @given(cases(), st.sampled_from([64, 256, 1 << 20]))
    def test_no_bit_is_lost(self, case: Case, chunk_bytes: int) -> None:
        source, target = rounded_buffer(case.layout), FlatBuffer(case.layout, CPU)
        receiver = ChunkReceiver(target, case.runs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "CHUNK_BYTES", chunk_bytes)
            for chunk in chunks(source, case.runs, in_halves=True):
                receiver.write(joined(chunk))
        receiver.finish()
        for header, offset in zip(case.headers, case.offsets, strict=True):
            window = slice(offset, offset + slice_bytes(header))
            assert torch.equal(target.data[window], source.data[window])

    def test_rounded_tensors_take_half_and_others_stay_whole(self) -> None:
        layout = FlatLayout([("a", (1000,), "float32"), ("b", (1000,), "float64")])
        for dtype, factor in (("float32", 2), ("float64", 1)):
            slot = next(slot for slot in layout.slots if slot.dtype == dtype)
            runs = RunMap([SliceHeader(slot.name, 0, 1000, dtype)], [slot.offset])
            (chunk,) = chunks(rounded_buffer(layout), runs, in_halves=True)
            assert len(joined(chunk)) - 24 == runs.num_bytes // factor

    def test_they_are_the_bytes_that_a_plan_counts(self) -> None:
        """Of whole alignment units: the heads of chunks come on top."""
        sizes = {"float32": 700_000, "float64": 64_000}
        layers = tuple(
            LayerProfile(
                name=f"layer of {dtype}",
                parameter_bytes=size * DTYPE_BYTES[dtype],
                activation_bytes=0,
                output_bytes=0,
                forward_ms={"V": 1.0},
                backward_ms={"V": 1.0},
                parameters=(ParameterProfile(name=dtype, shape=(size,), dtype=dtype),),
            )
            for dtype, size in sizes.items()
        )
        profile = Profile(version=1, model="m", batch_size=1, input_bytes=0, layers=layers)
        halved = halved_pushes(profile, "bfloat16")
        placed = place_bytes(profile, shards=["a", "b"], placement="round_robin", halved=halved)
        for (dtype, size), sums, factor in zip(sizes.items(), placed.pushed.by_shard, (2, 1), strict=True):
            layout = FlatLayout([(dtype, (size,), dtype)])
            runs = RunMap([SliceHeader(dtype, 0, size, dtype)], [0])
            sent = Chunks(rounded_buffer(layout), runs, in_halves=True)
            assert len(list(sent)) == -(-runs.num_bytes // CHUNK_BYTES)
            assert sent.payload_bytes == sums[-1] == runs.num_bytes // factor

    def test_its_checksums_are_not_those_of_the_stream(self) -> None:
        """The log of pushes has the words, so it computes their checksums itself."""
        layout = FlatLayout([("a", (1000,), "float32")])
        runs = RunMap([SliceHeader("a", 0, 1000, "float32")], [0])
        receiver = ChunkReceiver(FlatBuffer(layout, CPU), runs)
        for chunk in chunks(rounded_buffer(layout), runs, in_halves=True):
            receiver.write(joined(chunk))
        assert receiver.sums is None

    def test_damage_is_told_and_nothing_is_written(self) -> None:
        layout = FlatLayout([("a", (64,), "float32")])
        runs = RunMap([SliceHeader("a", 0, 64, "float32")], [0])
        (chunk,) = (joined(each) for each in chunks(rounded_buffer(layout), runs, in_halves=True))
        for place in (4, 30, len(chunk) - 1):  # its form, and its payload
            damaged = bytearray(chunk)
            damaged[place] ^= 1
            target = FlatBuffer(layout, CPU)
            with pytest.raises(DamagedChunk):
                ChunkReceiver(target, runs).write(bytes(damaged))
            assert not target.data.any()

    def test_beyond_the_stream_is_refused(self) -> None:
        layout = FlatLayout([("a", (32,), "float32")])
        runs = RunMap([SliceHeader("a", 0, 32, "float32")], [0])
        with pytest.raises(MalformedChunk, match=r"covers bytes \[0, 256\) of 128"):
            ChunkReceiver(FlatBuffer(layout, CPU), runs).write(chunk_of(0, bytes(128), form=1))


class TestRunMap:
    @given(cases(), st.data())
    def test_pieces_lead_every_byte_of_a_window_to_its_place(self, case: Case, data: st.DataObject) -> None:
        runs, wanted = case.runs, case.bytes_of_slices()
        offset = data.draw(st.integers(0, runs.num_bytes + 10))
        length = data.draw(st.integers(0, runs.num_bytes + 10))

        found: dict[int, int] = {}
        end = offset
        for piece in runs.pieces(offset, length):
            assert piece.num_bytes > 0 and piece.stream >= end, "in order, without overlap"
            end = piece.stream + piece.num_bytes
            assert end <= offset + length
            found |= {piece.stream + i: piece.buffer + i for i in range(piece.num_bytes)}

        assert {s: b for s, b in wanted.items() if offset <= s < offset + length}.items() <= found.items()
        # A run may include gaps between slices, but no other slice's bytes.
        tensors = {i for slot in case.layout.slots for i in range(slot.offset, slot.offset + slot.num_bytes)}
        assert {found[s] for s in found.keys() - wanted.keys()}.isdisjoint(tensors)

    @given(cases())
    def test_the_stream_is_as_long_as_its_slices_and_gaps(self, case: Case) -> None:
        assert case.runs.num_bytes == sum(aligned(slice_bytes(header)) for header in case.headers)

    def test_neighbours_are_one_run(self) -> None:
        layout = FlatLayout([("a", (5,), "float32"), ("b", (16,), "float32"), ("c", (1,), "float64")])
        headers = [SliceHeader(s.name, 0, s.shape[0], s.dtype) for s in layout.slots]

        whole = RunMap(headers, [s.offset for s in layout.slots])
        swapped = RunMap(headers[::-1], [s.offset for s in layout.slots][::-1])

        assert [(r.stream, r.buffer, r.num_bytes) for r in whole.runs] == [(0, 0, 136)]
        assert len(swapped.runs) == 3

    def test_nothing(self) -> None:
        runs = RunMap([], [])
        assert (runs.num_bytes, list(runs.pieces(0, 64))) == (0, [])
        assert list(chunks(FlatBuffer(FlatLayout([]), CPU), runs)) == []
        ChunkReceiver(FlatBuffer(FlatLayout([]), CPU), runs).finish()


class TestRoundTrip:
    @given(cases(), st.sampled_from([64, 128, CHUNK_BYTES]))
    @settings(max_examples=60)
    def test_what_was_sent_arrives_and_nothing_else_changes(self, case: Case, chunk_bytes: int) -> None:
        sent, got = random_buffer(case.layout, 1), random_buffer(case.layout, 2)
        expected = bytearray(got.memory())
        for place in case.bytes_of_slices().values():
            expected[place] = sent.memory()[place]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "CHUNK_BYTES", chunk_bytes)
            stream = list(chunks(sent, case.runs))
        receiver = ChunkReceiver(got, case.runs)
        for chunk in stream:
            assert len(joined(chunk)) <= 24 + chunk_bytes
            receiver.write(chunk)
        receiver.finish()

        assert bytes(got.memory()) == bytes(expected)

    @given(cases())
    @settings(max_examples=40)
    def test_the_format_is_the_documented_one(self, case: Case) -> None:
        buffer = random_buffer(case.layout)
        for slot in case.layout.slots:
            if slot.dtype != "uint8":
                view = buffer.views[slot.name]
                view.copy_(torch.arange(view.numel()))
        flat = {slot.name: buffer.views[slot.name] for slot in case.layout.slots}
        tensors = [flat[h.parameter][h.start : h.stop] for h in case.headers]

        stream = list(chunks(buffer, case.runs))

        assert [joined(chunk) for chunk in stream] == encode(tensors)
        for found, tensor in zip(decode(stream, case.headers), tensors, strict=True):
            assert torch.equal(found, tensor)

    def test_several_chunks_of_full_size(self) -> None:
        layout = FlatLayout([("a", (CHUNK_BYTES // 4 + 5,), "float32"), ("b", (CHUNK_BYTES // 8,), "float64")])
        headers = tuple(SliceHeader(s.name, 0, s.shape[0], s.dtype) for s in layout.slots)
        case = Case(layout, headers, tuple(s.offset for s in layout.slots))
        sent, got = random_buffer(layout), FlatBuffer(layout, CPU)

        stream = list(chunks(sent, case.runs))
        receiver = ChunkReceiver(got, case.runs)
        for chunk in stream:
            receiver.write(chunk)
        receiver.finish()

        assert len(stream) == 3
        assert torch.equal(sent.data, got.data)
        assert receiver.sums == checksums([sent.memory()]), "what a log keeps of the same bytes"


class TestSums:
    """Those of the wire are for the log only if it would find the same."""

    LAYOUT = FlatLayout([("a", (3,), "float32"), ("b", (40,), "float32")])
    RUNS = RunMap([SliceHeader("b", 0, 40, "float32"), SliceHeader("a", 0, 3, "float32")], [64, 0])

    def sums(self, *stream: bytes) -> tuple[bytes, ...] | None:
        receiver = ChunkReceiver(FlatBuffer(self.LAYOUT, CPU), self.RUNS)
        for chunk in stream:
            receiver.write(chunk)
        receiver.finish()
        return receiver.sums

    def test_of_the_stream_with_its_gaps(self) -> None:
        payload = b"\x01" * 160 + bytes(32) + b"\x01" * 12 + bytes(52)
        assert self.sums(chunk_of(0, payload)) == checksums([payload])

    @pytest.mark.parametrize("place", [160, 191, 204, 255])
    def test_what_is_not_kept_is_not_summed(self, place: int) -> None:
        payload = bytearray(b"\x01" * 160 + bytes(32) + b"\x01" * 12 + bytes(52))
        payload[place] = 1
        assert self.sums(chunk_of(0, bytes(payload))) is None

    def test_other_chunks_than_blocks(self) -> None:
        assert self.sums(chunk_of(0, bytes(64)), chunk_of(64, bytes(192))) is None

    def test_a_stream_that_begins_anew(self) -> None:
        receiver = ChunkReceiver(FlatBuffer(self.LAYOUT, CPU), self.RUNS, restarts=True)
        for _ in range(2):
            receiver.write(chunk_of(0, bytes(256)))
        assert receiver.sums == checksums([bytes(256)])


class TestMalformed:
    LAYOUT = FlatLayout([("a", (100,), "float32"), ("b", (40,), "float32")])
    NUM_BYTES = 448 + 192

    def receiver(self) -> tuple[ChunkReceiver, FlatBuffer]:
        headers = [SliceHeader("a", 0, 100, "float32"), SliceHeader("b", 0, 40, "float32")]
        buffer = FlatBuffer(self.LAYOUT, CPU)
        return ChunkReceiver(buffer, RunMap(headers, [0, 448])), buffer

    @staticmethod
    def chunk(offset: int, length: int) -> bytes:
        return chunk_of(offset, b"\x01" * length)

    @pytest.mark.parametrize(
        ("offset", "length"),
        [
            (0, 0),  # no payload
            (64, 64),  # not the first
            (0, NUM_BYTES + 64),  # beyond the end
            (0, NUM_BYTES + 1),
            (0, 65),  # ends inside an alignment unit
            (0, 63),
            (2**64 - 64, 64),  # an offset that would wrap
            (2**63, 64),
        ],
    )
    def test_a_first_chunk_that_is_refused_writes_nothing(self, offset: int, length: int) -> None:
        receiver, buffer = self.receiver()
        with pytest.raises(MalformedChunk):
            receiver.write(self.chunk(offset, length))

        assert not any(buffer.memory())
        receiver.write(self.chunk(0, self.NUM_BYTES))  # the receiver lives on
        receiver.finish()

    def test_any_flipped_bit_is_found_and_the_chunk_can_be_sent_again(self) -> None:
        whole = self.chunk(0, self.NUM_BYTES)
        for bit in range(0, 8 * len(whole), 37):
            receiver, buffer = self.receiver()
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DamagedChunk):
                receiver.write(bytes(flipped))
            assert not any(buffer.memory())
            receiver.write(whole)
            receiver.finish()

    @pytest.mark.parametrize("at", ["before", "after"])
    def test_of_memory_that_another_process_changes_the_copy_counts(
        self, monkeypatch: pytest.MonkeyPatch, at: str
    ) -> None:
        receiver, buffer = self.receiver()
        shared = memoryview(bytearray(self.chunk(0, self.NUM_BYTES)))

        def copied_while_changed(target: int, source: int, num_bytes: int) -> None:
            if at == "before":
                shared[24:] = b"\x02" * self.NUM_BYTES
            ctypes_memmove(target, source, num_bytes)
            ctypes.memset(source, 0, num_bytes)

        ctypes_memmove = ctypes.memmove
        monkeypatch.setattr(ctypes, "memmove", copied_while_changed)
        if at == "before":
            with pytest.raises(DamagedChunk):
                receiver.write(shared)
            assert not any(buffer.memory())
        else:
            receiver.write(shared)
            receiver.finish()
            assert all(byte == 1 for view in buffer.views.values() for byte in view.view(torch.uint8))

    @pytest.mark.parametrize("length", range(25))
    def test_a_chunk_that_is_too_short_for_its_offset(self, length: int) -> None:
        receiver, _ = self.receiver()
        with pytest.raises(MalformedChunk, match="too short"):
            receiver.write(bytes(length))

    def test_a_chunk_of_the_version_before_is_refused_by_name(self) -> None:
        receiver, _ = self.receiver()
        old = bytes(8) + zlib.crc32(bytes(8 + self.NUM_BYTES)).to_bytes(4, "little") + bytes(self.NUM_BYTES)
        with pytest.raises(MalformedChunk, match="another version of hetpipe sent it"):
            receiver.write(old)

    @pytest.mark.parametrize("offset", [0, 64, 256, 640])
    def test_a_second_chunk_out_of_order(self, offset: int) -> None:
        receiver, buffer = self.receiver()
        receiver.write(self.chunk(0, 128))
        before = bytes(buffer.memory())
        with pytest.raises(MalformedChunk, match="must start at 128"):
            receiver.write(self.chunk(offset, 64))

        assert bytes(buffer.memory()) == before

    def test_an_end_that_comes_too_early(self) -> None:
        receiver, _ = self.receiver()
        receiver.write(self.chunk(0, 576))
        with pytest.raises(MalformedChunk, match="after 576 of 640 bytes"):
            receiver.finish()

    def test_anything_after_the_end(self) -> None:
        receiver, _ = self.receiver()
        receiver.write(self.chunk(0, self.NUM_BYTES))
        with pytest.raises(MalformedChunk):
            receiver.write(self.chunk(self.NUM_BYTES, 64))
