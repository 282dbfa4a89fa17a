"""What pyproject.toml cannot say: files of the top level that a wheel holds copies of (`hetpipe/bundled.py`)."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_ROOT = Path(__file__).resolve().parent


def bundled() -> tuple[str, ...]:
    """The paths, from the source: a build has none of what hetpipe imports."""
    tree = ast.parse((_ROOT / "hetpipe" / "bundled.py").read_text(encoding="utf-8"))
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["BUNDLED"]
    )
    found: tuple[str, ...] = ast.literal_eval(value)
    return found


class BuildWithFiles(build_py):
    """Copies them beside the modules; an editable installation reads them where they stand."""

    def run(self) -> None:
        """Build, then copy what is there now and nothing of an earlier build."""
        super().run()
        if self.editable_mode:
            return
        copies = Path(self.build_lib) / "hetpipe" / "bundled_files"
        shutil.rmtree(copies, ignore_errors=True)
        for path in bundled():
            source, target = _ROOT / path, copies / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            else:
                shutil.copy(source, target)


setup(cmdclass={"build_py": BuildWithFiles})
