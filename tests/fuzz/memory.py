"""How much memory this process has, for tests that bound it."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")

#: What an object of Python's own allocator takes on average, generously.
_BLOCK_BYTES = 128


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def resident_bytes() -> int:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def bytes_in_use() -> int:
    """What is allocated and not freed, by C and by Python.

    Unlike the resident size it does not depend on what the allocators keep for later, or on which of their arenas a
    thread came upon.
    """
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo
    found = mallinfo2()
    return int(found.uordblks) + int(found.hblkhd) + sys.getallocatedblocks() * _BLOCK_BYTES
