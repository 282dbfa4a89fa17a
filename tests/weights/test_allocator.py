"""What a process settles about its memory once."""

from __future__ import annotations

import gc

from hetpipe.weights.allocator import settle_memory


def test_what_is_there_is_no_longer_looked_at() -> None:
    before = gc.get_freeze_count()
    try:
        settle_memory(one_heap=True)
        assert gc.get_freeze_count() > before
        assert not gc.get_objects()[1000:], "all that was imported is out of sight"
    finally:
        gc.unfreeze()
        gc.freeze()
