"""What user code raised, and where: one phrase for every message about it."""

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

#: Where hetpipe itself is.
_OWN_FOLDER = str(Path(__file__).parents[1]) + os.sep
_TORCH_FOLDER = str(Path(torch.__file__).parent) + os.sep
#: Where Python and installed packages are.
_PYTHON_FOLDERS = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")})


def place_of(error: BaseException) -> str:
    """` (FILE line N)`: the innermost line of user code that took part in `error`, or else of an installed package.

    Lines of hetpipe and torch are nobody's mistake; without any other, the text is empty.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", _OWN_FOLDER, _TORCH_FOLDER))
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_PYTHON_FOLDERS)] or frames
    return f" ({own[-1].filename} line {own[-1].lineno})" if own else ""


def place_of_call(frame: FrameType | None) -> str:
    """` (FILE line N)` of the innermost caller outside of hetpipe and torch, from `frame` outwards."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(("<", _OWN_FOLDER, _TORCH_FOLDER)):
            return f" ({name} line {frame.f_lineno})"
        frame = frame.f_back
    return ""


def place_of_function(function: Callable[..., Any]) -> str:
    """` (FILE line N)`: where a function is defined; empty for one that is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename} line {code.co_firstlineno})" if code is not None else ""


def raised_text(error: BaseException) -> str:
    """What user code raised, and where: `ValueError: no image (data.py line 12)`."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename} line {error.lineno})"
    text = str(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}{place_of(error)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host did not have enough memory: no mistake of the user's code."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def shapes_text(tensors: Mapping[str, Tensor]) -> str:
    """`input_ids [4, 9], labels [4, 9]`."""
    return ", ".join(f"{name} {list(value.shape)}" for name, value in tensors.items())


def forward_failure(model: nn.Module, tensors: Mapping[str, Tensor], error: Exception) -> str:
    """The sentence on a model that does not run on a minibatch at all."""
    return (
        f"model: {type(model).__name__}'s forward failed on a minibatch of {shapes_text(tensors)}: "
        f"{raised_text(error)}; call the model on these samples of `data.train` by hand, and mend the one or the other"
    )


@contextmanager
def later_failures_told(what: str) -> Iterator[None]:
    """In this block, what user code raises is told as a mistake that its first minibatch did not have.

    Args:
        what: was computed, and where: `the forward of minibatch 2 on stage 1`.

    Raises:
        CallableError: instead of any error that is neither hetpipe's own nor a lack of memory.
    """
    try:
        yield
    except HetpipeError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CallableError(
            f"model: {what} failed, although the model ran on the minibatch that it was cut on: {raised_text(error)}; "
            "it keeps something between minibatches or depends on the data: mend it there, or keep such samples out of "
            "`data.train`"
        ) from error
