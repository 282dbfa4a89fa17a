"""The glossary: every word of the design is an entry, and each once."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, prose

_ENTRY = re.compile(r"^\*\*.*", re.MULTILINE)
_WORD = re.compile(r"\*\*(.+?)\*\*")

#: The words of the design, then those that the code adds.
WORDS = """
device, node, agent, virtual worker, layer, stage, minibatch, wave, local clock, global clock, published clock, barrier,
shard, clock shard, slice, plan, term, incarnation, epoch,
acknowledge, anchor, apply, block, buffer, chain, checkpoint, chunk, clock distance, combine, commit, coordinator,
cut, decision log, division, evict, frame, gate, history, hold, in flight, inspection, job, join, lease, ledger, link,
local through, manifest, member, order, parameter server, placement, progress, publish, pull, push, record, reference
executor, registration, required clock, retained, run, running sum, segment, service, staged, stage process, staleness
bound, store, switch point, timeline, version, waiting, idle, wave update, weight policy, witness weights,
catalogue, cluster, device type, plan document, profile, tick,
accumulation, anchored, direct, drain, flush, gradient norm, prediction, replica, through q, update, update number,
fence, lead, credit, leave, MFU, watermark, level, run document, write-ahead log,
memory policy, memory search, precision, loss scale, data worker, stream, tied weight, initial weights, repartition,
plan version, frozen layer, script, early end, forecast, logger, page, proof, rewind, condition, straggler
"""


def entries() -> list[str]:
    text = prose(ROOT / "docs" / "glossary.md")
    return [word for line in _ENTRY.findall(text) for word in _WORD.findall(line)]


def test_every_word_is_an_entry() -> None:
    wanted = {" ".join(word.split()) for word in WORDS.split(",")}
    assert wanted - set(entries()) == set()


def test_one_entry_per_word() -> None:
    assert len(entries()) == len(set(entries()))
