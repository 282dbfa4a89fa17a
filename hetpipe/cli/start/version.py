"""`hetpipe version`."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

import hetpipe
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the versions of hetpipe, Python, torch and gRPC."""


def run(_options: Options, output: Output, _shell: Shell) -> ExitStatus:
    """Print the versions."""
    others = ", ".join(f"{name} {_version(name)}" for name in ("torch", "grpcio"))
    output.say(f"hetpipe {hetpipe.__version__} (Python {platform.python_version()}, {others})")
    return ExitStatus.OK


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
