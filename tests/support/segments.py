"""What a process has of segments of shared memory."""

from __future__ import annotations

from pathlib import Path


def segments_of(pid: int | str = "self") -> int:
    """Descriptors and mappings of segments that a process has."""
    folder = Path(f"/proc/{pid}")
    count = (folder / "maps").read_text().count("hetpipe-segment")
    for each in (folder / "fd").iterdir():
        try:
            count += "hetpipe-segment" in str(each.readlink())
        except FileNotFoundError:
            continue
    return count
