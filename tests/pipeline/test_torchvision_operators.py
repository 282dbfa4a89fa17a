"""A torchvision of another build than torch, in processes of their own: what is imported stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe.pipeline.torchvision_operators import mismatch
from tests.support.forked import ROOT, run_forked

#: As `import torchvision` does: a fake of an operator that its library has, whether or not that is loaded.
_PACKAGE = """
import torch

@torch.library.register_fake("torchvision::nms")
def _(dets, scores, threshold):
    return dets
"""

_JOB_CODE = """
from hetpipe.pipeline.callables import load_callable
from pathlib import Path

load_callable("mine:build", Path("FOLDER"))()
import torch
try:
    torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
except NotImplementedError as error:
    print("not implemented")
"""


def test_a_torchvision_whose_operators_do_not_load_is_imported_and_its_operators_raise(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(_PACKAGE)
    (package / "_C.so").write_bytes(b"of another build")
    (tmp_path / "mine.py").write_text("def build():\n    import torchvision\n    return torchvision\n")
    alone, prepared, reason = run_forked(
        [
            "import torchvision",
            _JOB_CODE.replace("FOLDER", str(tmp_path)),
            "from hetpipe.pipeline.torchvision_operators import mismatch; print(mismatch())",
        ],
        imports=["torch"],
        environment={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )
    assert "operator torchvision::nms does not exist" in alone.stderr
    assert prepared.returncode == 0, prepared.stderr
    assert prepared.stdout.strip() == "not implemented"
    assert "_C.so" in reason.stdout


def test_without_torchvision_there_is_no_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.machinery.PathFinder.find_spec", lambda _: None)
    assert mismatch() is None
