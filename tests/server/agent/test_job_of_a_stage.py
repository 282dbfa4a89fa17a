"""A stage reads the job once: nobody below its entry looks into the document, which has no type."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import ROOT


def test_no_module_of_a_stage_looks_into_the_document_of_its_job() -> None:
    looked = re.compile(r"config\.job\[|config\.job\.get\(")
    found = [
        str(path) for path in Path(ROOT, "hetpipe").rglob("*.py") if looked.search(path.read_text(encoding="utf-8"))
    ]
    assert not found, "pass the `Job` that `server/agent/stage_process.py` has validated"


def test_a_stage_validates_its_job_once() -> None:
    modules = Path(ROOT, "hetpipe", "server", "agent").glob("*.py")
    readers = [path.name for path in modules if "model_validate(config.job)" in path.read_text(encoding="utf-8")]
    assert readers == ["stage_process.py"]
