"""What this machine and its software call themselves, for the keys of measurements. Without torch."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import hetpipe


def processor_name() -> str:
    """The processor's model, from the kernel where it says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "cpu"


def versions() -> tuple[str, ...]:
    """Of hetpipe and torch, as measurements of links name them."""
    return (hetpipe.__version__, version("torch"))
