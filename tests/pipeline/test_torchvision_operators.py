"""A torchvision of another build than torch, in processes of their own: what is imported stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hetpipe.pipeline.torchvision_operators import mismatch

ROOT = Path(__file__).resolve().parents[2]

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


def _run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_torchvision_whose_operators_do_not_load_is_imported_and_its_operators_raise(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(_PACKAGE)
    (package / "_C.so").write_bytes(b"of another build")
    (tmp_path / "mine.py").write_text("def build():\n    import torchvision\n    return torchvision\n")
    alone = _run("import torchvision", tmp_path)
    assert "operator torchvision::nms does not exist" in alone.stderr
    prepared = _run(_JOB_CODE.replace("FOLDER", str(tmp_path)), tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    assert prepared.stdout.strip() == "not implemented"
    reason = _run("from hetpipe.pipeline.torchvision_operators import mismatch; print(mismatch())", tmp_path)
    assert "_C.so" in reason.stdout


def test_without_torchvision_there_is_no_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.machinery.PathFinder.find_spec", lambda _: None)
    assert mismatch() is None
