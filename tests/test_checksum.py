"""The checksum of bulk bytes: the documented one, and what it finds."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpipe.checksum import BLOCK_BYTES, Bytes, checksum, checksums, num_checksums
from tests.server.shard.builders import plain_checksum

ROW = 257 * 8
TABLE = 127 * ROW

#: Around words, rows, tables and blocks.
LENGTHS = [0, 1, 7, 8, 9, ROW - 1, ROW, ROW + 8, TABLE - 1, TABLE, TABLE + 1, TABLE + ROW + 3, BLOCK_BYTES]


def content(num_bytes: int, seed: int = 0) -> bytearray:
    return bytearray(random.Random(seed).randbytes(num_bytes))


class TestTheSum:
    def test_it_is_xxh3_as_published(self) -> None:
        """The test vector of the algorithm's specification: the hash of nothing, with seed 0."""
        assert checksum(b"", place=0).hex() == "2d06800538d394c2"

    @pytest.mark.parametrize("num_bytes", LENGTHS)
    def test_it_is_the_documented_one(self, num_bytes: int) -> None:
        data = bytes(content(num_bytes))
        assert checksum(data, place=3) == plain_checksum(3, data)

    @given(st.integers(0, 3 * ROW), st.integers(0, 20), st.integers(0, 2**64 - 1))
    @settings(max_examples=50)
    def test_wherever_the_bytes_lie(self, num_bytes: int, skip: int, place: int) -> None:
        """At any address, in what may be written and in what may not."""
        data = content(skip + num_bytes)
        wanted = plain_checksum(place, bytes(data[skip:]))

        assert checksum(bytes(data), place=place, skip=skip) == wanted
        assert checksum(memoryview(data), place=place, skip=skip) == wanted
        assert checksum(memoryview(data)[skip:], place=place) == wanted
        assert checksum(memoryview(bytes(data))[skip:], place=place) == wanted

    @pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 100])
    def test_of_a_payload_in_pieces(self, num_bytes: int) -> None:
        payload = memoryview(content(num_bytes))
        cuts = [0, 1, 5_000, BLOCK_BYTES, BLOCK_BYTES + 64, num_bytes]
        pieces: list[Bytes] = [payload[first:last] for first, last in pairwise(cuts)]

        blocks = [payload[first : first + BLOCK_BYTES] for first in range(0, num_bytes, BLOCK_BYTES)]
        wanted = tuple(checksum(block, place=i * BLOCK_BYTES) for i, block in enumerate(blocks))
        if num_bytes >= cuts[-2]:
            assert checksums(pieces) == wanted
        assert checksums([payload]) == wanted
        assert num_checksums(num_bytes) == len(wanted)


class TestWhatItFinds:
    """In bytes that may lie in several tables and end anywhere."""

    SIZES = st.sampled_from([40, ROW + 5, 5 * ROW + 13, TABLE + 3 * ROW + 4])

    @given(SIZES, st.data())
    def test_a_flipped_bit(self, size: int, data: st.DataObject) -> None:
        changed = content(size)
        before = checksum(memoryview(changed), place=0)
        bit = data.draw(st.integers(0, 8 * size - 1))
        changed[bit // 8] ^= 1 << bit % 8
        assert checksum(memoryview(changed), place=0) != before

    @given(SIZES, st.data())
    def test_a_changed_word(self, size: int, data: st.DataObject) -> None:
        changed = content(size)
        before = checksum(memoryview(changed), place=0)
        at = 8 * data.draw(st.integers(0, size // 8 - 1))
        word = data.draw(st.binary(min_size=8, max_size=8))
        assume(word != changed[at : at + 8])
        changed[at : at + 8] = word
        assert checksum(memoryview(changed), place=0) != before

    @given(st.integers(0, TABLE // 512 + 4), st.integers(0, 255), st.integers(0, 63))
    def test_a_zeroed_sector(self, sector: int, value: int, place: int) -> None:
        """Of any content but zeros, even of a single word."""
        changed = bytearray(TABLE + 3 * ROW + 4)
        changed[512 * sector + 8 * place] = value or 1
        changed[512 * sector + 8 * (63 - place) + 7] = value
        before = checksum(memoryview(changed), place=0)
        changed[512 * sector : 512 * (sector + 1)] = bytes(512)
        assert checksum(memoryview(changed), place=0) != before

    @given(st.data())
    @settings(max_examples=200)
    def test_two_words_that_changed_places(self, data: st.DataObject) -> None:
        """Also those that differ in their highest or lowest bits only, or lie in one row or one column."""
        size = TABLE + 3 * ROW
        first = data.draw(st.integers(0, size // 8 - 1))
        step = data.draw(st.sampled_from([1, 2, 64, 256, 257, 512, 514, 127 * 257]) | st.integers(1, size // 8 - 1))
        second = (first + step) % (size // 8)
        difference = data.draw(st.sampled_from([1, 2**32, 2**62, 2**63]) | st.integers(1, 2**64 - 1))
        word = data.draw(st.integers(0, 2**64 - 1))
        assume(first != second)

        totals = []
        for one, other in ((word, word + difference), (word + difference, word)):
            changed = bytearray(size)
            changed[8 * first : 8 * first + 8] = (one % 2**64).to_bytes(8, "little")
            changed[8 * second : 8 * second + 8] = (other % 2**64).to_bytes(8, "little")
            totals.append(checksum(memoryview(changed), place=0))
        assert totals[0] != totals[1]

    @given(SIZES, st.integers(1, 5_000))
    def test_bytes_that_are_cut_off(self, size: int, missing: int) -> None:
        """Also zeros, which change no sum of words."""
        assume(missing <= size)
        assert checksum(bytes(size), place=0) != checksum(bytes(size - missing), place=0)

    def test_blocks_that_changed_places(self) -> None:
        assert checksum(bytes(64), place=0) != checksum(bytes(64), place=BLOCK_BYTES)

    def test_two_sectors_that_changed_places(self) -> None:
        data = content(TABLE)
        before = checksum(memoryview(data), place=0)
        for other in range(1, TABLE // 512):
            here, there = slice(0, 512), slice(512 * other, 512 * (other + 1))
            data[here], data[there] = data[there], data[here]
            assert checksum(memoryview(data), place=0) != before
            data[here], data[there] = data[there], data[here]
