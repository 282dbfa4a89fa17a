"""Calls of the user's data sets, with their errors converted to one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hetpipe.errors import CallableError
from hetpipe.model.user_errors import raised_text
from hetpipe.observe.log import get_logger, log_path

_log = get_logger(__name__)

ReadT = TypeVar("ReadT")


def read_user_data(read: Callable[[], ReadT], key: str, what: str) -> ReadT:
    """Call user code that reads.

    Args:
        read: the call.
        key: job key of the data set.
        what: what is read; completes "reading …".

    Raises:
        CallableError: it raised, with the line and the cause.
    """
    try:
        return read()
    except CallableError:
        raise  # already converted by a stream
    except (Exception, SystemExit) as error:
        log = log_path()
        _log.exception("dataset_raised", key=key, read=what)
        traceback = f"; the traceback is in {log}" if log is not None else ""
        raise CallableError(f"{key}: reading {what} raised {raised_text(error)}{traceback}") from error
