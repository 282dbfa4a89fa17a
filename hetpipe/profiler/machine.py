"""Names of this machine and its software, for measurement keys. Without torch."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import hetpipe


def processor_name() -> str:
    """Model name of the processor, from the kernel where available."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "cpu"


def versions() -> tuple[str, ...]:
    """Versions of hetpipe and torch, as recorded in link measurements."""
    return (hetpipe.__version__, version("torch"))
