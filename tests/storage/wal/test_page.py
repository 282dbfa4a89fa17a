"""`docs/semantics/storage.md`: a decoder written from its table reads what the engine writes."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hetpipe.storage.wal import SnapshottedLog, StorageOptions
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "semantics" / "storage.md").read_text(encoding="utf-8")

_MIB = 1 << 20


def place(field: str) -> slice:
    """The bytes of a field of the head, by the page."""
    (found,) = re.findall(rf"^\| (\d+)–(\d+) \| {field}\b", PAGE, re.MULTILINE)
    return slice(int(found[0]), int(found[1]) + 1)


def number(data: bytes, field: str) -> int:
    return int.from_bytes(data[place(field)], "little")


@dataclass
class Decoded:
    lsn: int
    durable_below: int
    header: bytes
    payload: bytes


def decode(data: bytes) -> list[Decoded]:
    """All records of a file."""
    (magic,) = re.findall(r"^\| 0–3 \| magic \| `(.+?)`", PAGE, re.MULTILINE)
    (start,) = re.findall(r"^\| (\d+) … \|", PAGE, re.MULTILINE)
    records = []
    while data:
        assert data[place("magic")] == magic.encode()
        header_bytes, payload_bytes = number(data, "h, unsigned"), number(data, "p, unsigned")
        num_sums = -(-payload_bytes // _MIB)
        sums = data[int(start) : int(start) + 8 * num_sums]
        rest = data[int(start) + 8 * num_sums :]
        header, payload = rest[:header_bytes], rest[header_bytes : header_bytes + payload_bytes]
        crc = place("CRC-32")
        assert zlib.crc32(data[: crc.start] + sums + header) == number(data, "CRC-32")
        for index in range(num_sums):
            block = payload[_MIB * index : _MIB * (index + 1)]
            assert sums[8 * index : 8 * index + 8] == xxhash.xxh3_64_digest(block, _MIB * index)
        records.append(Decoded(number(data, "LSN"), number(data, "durable below"), header, payload))
        data = rest[header_bytes + payload_bytes :]
    return records


def test_a_decoder_made_from_the_page_reads_log_and_snapshot(tmp_path: Path) -> None:
    payload = bytes(range(256)) * 5_000
    storage = SnapshottedLog(tmp_path, StorageOptions(identity="whose", fsync=False))
    storage.log.append(b"header", [payload])
    storage.append(b"event")
    (segment,) = tmp_path.glob("*.log")
    found = decode(segment.read_bytes())

    assert segment.name == f"{0:016d}.log"
    assert [(each.lsn, each.durable_below) for each in found] == [(0, 0), (1, 1), (2, 2)]
    assert [each.header for each in found] == [b"whose", b"header", b"event"]
    assert [each.payload for each in found] == [b"", payload, b""]

    assert storage.snapshot(7, "content", [payload[:9], payload[9:]], since=storage.log.rotate(), history=5)
    (snapshot,) = decode((tmp_path / f"snapshot-{7:016d}").read_bytes())
    assert (snapshot.lsn, snapshot.payload) == (7, payload)
    assert snapshot.header == b'{"identity": "whose", "since": 3, "history": 5, "content": "content"}'
