"""Keeps freed memory in the process, for processes that move large tensors again and again.

By default glibc takes every large block from the kernel and gives it back when freed; each use then begins with a page
fault per 4 KiB, which costs more than the copy itself (measured: gRPC transport of 4 MiB messages at half the speed).
"""

from __future__ import annotations

import ctypes

#: mallopt's parameters (malloc.h).
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

_LARGEST_INT = 2**31 - 1
_TOP_PAD_BYTES = 64 * 1024 * 1024


def keep_freed_memory() -> bool:
    """Have malloc serve large blocks from its heap and keep them; returns whether the C library took it.

    Call it once, early. Without glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, _LARGEST_INT), (_M_TRIM_THRESHOLD, _LARGEST_INT), (_M_TOP_PAD, _TOP_PAD_BYTES))
    taken = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(taken)
