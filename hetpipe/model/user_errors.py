"""Descriptions of exceptions in user code: what was raised and where, in one format for all messages."""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.errors import CallableError, HetpipeError
from hetpipe.model.packed import entries_text

#: Folder of hetpipe itself.
_OWN_FOLDER = str(Path(__file__).parents[1]) + os.sep
_TORCH_FOLDER = str(Path(torch.__file__).parent) + os.sep
#: Folders of Python and of installed packages.
_PYTHON_FOLDERS = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")})


def place_of(error: BaseException) -> str:
    """` (FILE line N)`: the innermost line of user code in the traceback, else of an installed package.

    Lines of hetpipe and torch do not count; without any other the text is empty.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", _OWN_FOLDER, _TORCH_FOLDER))
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_PYTHON_FOLDERS)] or frames
    return f" ({own[-1].filename} line {own[-1].lineno})" if own else ""


def place_of_call(frame: FrameType | None) -> str:
    """` (FILE line N)` of the innermost caller outside hetpipe and torch, from `frame` outwards."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(("<", _OWN_FOLDER, _TORCH_FOLDER)):
            return f" ({name} line {frame.f_lineno})"
        frame = frame.f_back
    return ""


def place_of_function(function: Callable[..., Any]) -> str:
    """` (FILE line N)` of a function's definition; empty for a function not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename} line {code.co_firstlineno})" if code is not None else ""


def raised_text(error: BaseException) -> str:
    """An exception of user code, its place, and its root cause: `ValueError: no image (data.py line 12)`.

    The root cause is the last of `raise … from …`: packages with lazy imports, like transformers, raise one that says
    only which of their names could not be imported.
    """
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename} line {error.lineno})"
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    cause = f", caused by {_type_and_text(root)}" if root is not error else ""
    return f"{_type_and_text(error)}{place_of(error)}{cause}"


def _type_and_text(error: BaseException) -> str:
    return f"{type(error).__name__}{': ' if str(error) else ''}{error}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory, which is not an error of the user's code."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def forward_failure(model: nn.Module, tensors: Mapping[str, Tensor], error: Exception) -> str:
    """Message for a model that fails on its first minibatch."""
    return (
        f"model: {type(model).__name__}'s forward failed on a minibatch of {entries_text(tensors)}: "
        f"{raised_text(error)}; call the model on these samples of `data.train` by hand, and fix the model or the data"
    )


_KEEPS_STATE = (
    "it keeps state between minibatches or depends on the data: fix that there, or exclude such samples from "
    "`data.train`"
)


@contextmanager
def failures_after_cut(what: str, fix: str = _KEEPS_STATE) -> Iterator[None]:
    """Report errors of user code in this block as failures that did not occur on its first minibatch.

    Args:
        what: the computation: `the forward of minibatch 2 on stage 1`.
        fix: what may cause it, and the fix.

    Raises:
        CallableError: for any error except hetpipe's own and out-of-memory errors.
    """
    try:
        yield
    except HetpipeError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CallableError(
            f"model: {what} failed, although the model ran on the minibatch on which it was cut: "
            f"{raised_text(error)}; {fix}"
        ) from error
