"""Train one PyTorch model on the unequal GPUs you already have.

The public names are loaded on first use, so that processes without torch do not import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetpipe.api import check as check
    from hetpipe.api import compare as compare
    from hetpipe.api import export as export
    from hetpipe.api import minibatch as minibatch
    from hetpipe.api import replay as replay
    from hetpipe.api import train as train
    from hetpipe.client import AsyncClient as AsyncClient
    from hetpipe.client import Client as Client
    from hetpipe.errors import HetpipeError as HetpipeError
    from hetpipe.job.file import Job as Job
    from hetpipe.planning import Plan as Plan
    from hetpipe.planning import plan as plan
    from hetpipe.planning import profile as profile
    from hetpipe.planning import simulate as simulate
    from hetpipe.runs.callbacks import Callback as Callback
    from hetpipe.runs.run import Run as Run

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "hetpipe.client",
    "Callback": "hetpipe.runs.callbacks",
    "Client": "hetpipe.client",
    "HetpipeError": "hetpipe.errors",
    "Job": "hetpipe.job.file",
    "Plan": "hetpipe.planning",
    "Run": "hetpipe.runs.run",
    "check": "hetpipe.api",
    "compare": "hetpipe.api",
    "export": "hetpipe.api",
    "minibatch": "hetpipe.api",
    "plan": "hetpipe.planning",
    "profile": "hetpipe.planning",
    "replay": "hetpipe.api",
    "simulate": "hetpipe.planning",
    "train": "hetpipe.api",
}

__all__ = [
    "AsyncClient", "Callback", "Client", "HetpipeError", "Job", "Plan", "Run", "check", "compare", "export",
    "minibatch", "plan", "profile", "replay", "simulate", "train",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hetpipe' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
