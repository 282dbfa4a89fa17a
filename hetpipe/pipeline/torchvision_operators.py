"""torchvision whose compiled operators do not load beside this torch, as wheels of different builds (CPU, CUDA) are.

Importing it then fails, and so does importing most of transformers and timm, which import it if it is installed; the
errors name neither cause nor fix. Few models need the operators (detection: non-maximum suppression, RoI pooling), so
the two that the import refers to are declared without an implementation. Calling one still raises.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hetpipe.observe.log import get_logger

_log = get_logger(__name__)

_PACKAGE = "torchvision"

#: Operators whose fakes are registered by `import torchvision`, whether or not they exist.
_DECLARED = ("nms", "qnms")

#: Owner of the declarations: they end with it.
_library: torch.library.Library | None = None


class _Finder(MetaPathFinder):
    """Runs before the first import of torchvision, and finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Declare missing operators before the package is imported."""
        del path, target
        if fullname == _PACKAGE:
            declare_missing()
        return None


def prepare_import() -> None:
    """Have missing operators declared before torchvision is imported in this process. Idempotent; imports nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def mismatch() -> str | None:
    """The reason why torchvision's operators do not load beside this torch; None if they do, or without torchvision.

    Loads the operators.
    """
    spec = importlib.machinery.PathFinder.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    for file in sorted(Path(spec.origin).parent.glob("_C*.so")):
        try:
            torch.ops.load_library(str(file))  # type: ignore[no-untyped-call]  # torch ships it untyped
        except OSError as error:
            return str(error.__cause__ or error)
    return None


def declare_missing() -> None:
    """Declare the operators that `import torchvision` refers to, if the compiled ones do not load."""
    global _library  # noqa: PLW0603  # torch keeps operators per process
    reason = mismatch() if _library is None else None
    if reason is None:
        return
    library: Any = torch.library.Library(_PACKAGE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch ships it untyped
    for name in _DECLARED:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library = library
    _log.warning("torchvision_operators_missing", torch=torch.__version__, reason=reason)
