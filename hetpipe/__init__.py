"""Train one PyTorch model on the unequal GPUs you already have.

The public names are loaded on first use, so that processes without torch do not import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetpipe.api import minibatch as minibatch
    from hetpipe.api import train as train
    from hetpipe.client import Client as Client
    from hetpipe.errors import HetpipeError as HetpipeError
    from hetpipe.job.file import Job as Job
    from hetpipe.runs.run import Run as Run

__version__ = "0.1.0"

__all__ = ["Client", "HetpipeError", "Job", "Run", "minibatch", "train"]

_HOMES = {
    "Client": "hetpipe.client",
    "HetpipeError": "hetpipe.errors",
    "Job": "hetpipe.job.file",
    "Run": "hetpipe.runs.run",
    "minibatch": "hetpipe.api",
    "train": "hetpipe.api",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hetpipe' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
