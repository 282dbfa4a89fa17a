"""The sentences of docs/upgrading.md are those with which data of another version are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checkpoint.manifest import VERSION, newest_checkpoint, parse_manifest
from hetpipe.comparison.record import ComparisonFolder
from hetpipe.errors import HetpipeError
from hetpipe.job.file import load_job
from hetpipe.server.shard.job_storage import old_jobs
from hetpipe.storage.wal.record import MAGIC
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import Document, document_of, to_plain
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile
from hetpipe.wire.calls import GET_STATUS, GetStatusRequest
from hetpipe.wire.codec import PACKAGE
from tests.cli import plans
from tests.docs.job_keys import SMALLEST
from tests.docs.pages import ROOT, code_spans, table_after
from tests.server.coordinator.test_network import Network
from tests.server.shard import test_chunks
from tests.support.fake_clock import FakeClock

ROWS = {row[0]: row for row in table_after(ROOT / "docs" / "upgrading.md", "## What is read")}
RECORDED = ROOT / "tests" / "recorded"


def _call(folder: Path) -> None:
    network = Network(folder / "run")
    try:
        network.client.invoke(replace(GET_STATUS, service="hetpipe.proto.v1.CoordinatorService"), GetStatusRequest())
    finally:
        network.close()


def _chunk(_folder: Path) -> None:
    malformed = test_chunks.TestMalformed()
    receiver, _ = malformed.receiver()
    receiver.write(bytes(24 + malformed.NUM_BYTES))


def _log(folder: Path) -> None:
    [(_, refusal)] = old_jobs(Path(shutil.copytree(RECORDED / "hpF2-killed" / "state" / "shard-0", folder / "state")))
    assert isinstance(refusal, HetpipeError)
    raise refusal


def _checkpoint(_folder: Path) -> None:
    manifest = json.loads((newest_checkpoint(RECORDED / "0.1-finished") / "manifest.json").read_bytes())
    parse_manifest(json.dumps({**manifest, "version": VERSION + 1}).encode())


def _comparison(folder: Path) -> None:
    (folder / "compare.json").write_text('{"version": 9, "name": "small", "runs": []}')
    ComparisonFolder.open(folder, name="small", clock=FakeClock())


def _document(kind: type[Document], values: dict[str, Any]) -> None:
    document_of(kind, {**values, "version": 9}, what="it")


REFUSALS: dict[str, Callable[[Path], object]] = {
    "calls between processes": _call,
    "chunks of weights and updates": _chunk,
    "write-ahead log of a parameter server": _log,
    "checkpoint": _checkpoint,
    "profile": lambda _: _document(Profile, to_plain(plans.profile(2))),
    "plan": lambda _: _document(PlanDocument, to_plain(plans.equal_mix().plan)),
    "cluster file": lambda _: _document(Cluster, to_plain(plans.cluster(1))),
    "job file": lambda _: load_job({**SMALLEST, "of_the_future": 1}),
    "comparison": _comparison,
}


def test_every_format_of_the_page_is_tried() -> None:
    assert ROWS.keys() - REFUSALS.keys() == {"ACL file of Redis"}, "which tests/storage tries with a real Redis"
    assert REFUSALS.keys() <= ROWS.keys()


@pytest.mark.parametrize("name", REFUSALS)
def test_another_version_is_refused_with_the_sentence_of_the_page(name: str, tmp_path: Path) -> None:
    (sentence,) = code_spans(ROWS[name][2])
    with pytest.raises(HetpipeError) as caught:
        REFUSALS[name](tmp_path)
    assert sentence in str(caught.value)


def test_the_versions_of_the_page_are_those_that_are_read() -> None:
    assert ROWS["calls between processes"][1] == f"`{PACKAGE}`"
    assert ROWS["write-ahead log of a parameter server"][1] == f"`{MAGIC.decode()}`"
    assert ROWS["checkpoint"][1] == ", ".join(map(str, range(1, VERSION + 1)))
