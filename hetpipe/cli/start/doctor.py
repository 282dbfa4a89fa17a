"""`hetpipe doctor`: check the requirements of a run on this machine. Each check has a result and a fix."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from hetpipe.cli.options import Json
from hetpipe.report.text import columns, count
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.values.quantities import bytes_text

#: Minimum versions, equal to the package's requirements.
_NEEDED = {"torch": (2, 9), "grpcio": (1, 80), "protobuf": (6, 31)}
_OLDEST_PYTHON = (3, 11)

#: Memory of a stage process with a small model, in bytes, mostly for torch itself.
_PROCESS_BYTES = 350 * 1024 * 1024
_FEWEST_PROCESSES = 4

_GLOO_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Check whether this machine meets the requirements of a run. Prints a fix for each problem."""

    as_json: Json = False


def run(_: Options, output: Output, shell: Shell) -> ExitStatus:
    """Check this machine."""
    checks = examine(shell.current)
    output.answer(to_json(checks), *lines(checks))
    return ExitStatus.FAILED if has_failed(checks) else ExitStatus.OK


class Health(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    """Some runs do not work, or not well."""
    FAIL = "fail"
    """Runs do not work."""


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check."""

    name: str
    health: Health
    found: str
    fix: str = ""
    """The fix; empty if there is no problem."""


def examine(current: Path) -> list[Check]:
    """Check this machine and the folder `current`. Takes a few seconds, most of them to import torch."""
    checks: Sequence[tuple[str, Callable[[], Check]]] = (
        ("python", _python),
        *((name, lambda name=name: _package(name)) for name in _NEEDED),
        ("torchvision", _torchvision),
        ("devices", _devices),
        ("cores", _cores),
        ("memory", _memory),
        ("loopback", _loopback),
        ("gloo", _gloo),
        ("redis-server", _redis),
        ("folder", lambda: _folder(current)),
    )
    return [_examined(name, check) for name, check in checks]


def _examined(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - any failure is a finding
        return Check(name, Health.FAIL, f"{type(error).__name__}: {error}", "see the message; it is not hetpipe's own")


def lines(checks: Sequence[Check]) -> list[str]:
    """The checks as text for people, the verdict last."""
    table = columns([[check.name, check.health.value, check.found] for check in checks])
    shown = []
    for line, check in zip(table, checks, strict=True):
        shown.append(line)
        if check.fix:
            shown.append(f"    fix: {check.fix}")
    failed = sum(check.health is Health.FAIL for check in checks)
    warned = sum(check.health is Health.WARN for check in checks)
    if failed:
        shown.append(f"verdict: {count(failed, 'problem')} to fix before a run can work")
    else:
        shown.append("verdict: ready" + (f", with {count(warned, 'remark')}" if warned else ""))
    return shown


def to_json(checks: Sequence[Check]) -> dict[str, Any]:
    """The object of `doctor --json`."""
    return {"ok": not has_failed(checks), "checks": [asdict(check) for check in checks]}


def has_failed(checks: Sequence[Check]) -> bool:
    """Whether runs are impossible on this machine."""
    return any(check.health is Health.FAIL for check in checks)


def _python() -> Check:
    found = platform.python_version()
    if sys.version_info < _OLDEST_PYTHON:
        return Check("python", Health.FAIL, found, f"install Python {_dotted(_OLDEST_PYTHON)} or newer")
    if not Path("/proc/self/cmdline").exists():
        return Check("python", Health.FAIL, f"{found} on {platform.system()}", "run it on Linux")
    return Check("python", Health.OK, found)


def _package(name: str) -> Check:
    needed = _NEEDED[name]
    fix = f"pip install '{name}>={_dotted(needed)}'"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, Health.FAIL, "not installed", fix)
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    return Check(name, Health.OK, found) if numbers >= needed else Check(name, Health.FAIL, found, fix)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _torchvision() -> Check:
    """Check torchvision. It is optional, but much of transformers and timm imports it, so a broken one matters."""
    from hetpipe.pipeline.torchvision_operators import mismatch

    try:
        found = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return Check("torchvision", Health.OK, "not installed; only some models need it")
    reason = mismatch()
    if reason is None:
        return Check("torchvision", Health.OK, found)
    torch = importlib.metadata.version("torch")
    found = f"{found}, built for another torch than {torch}: models work unless they use its operators ({reason})"
    return Check("torchvision", Health.WARN, found, "install torchvision from the same index as torch")


def _devices() -> Check:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Check("devices", Health.OK, f"{count(len(names), 'CUDA device')}: {', '.join(names)}")
    if shutil.which("nvidia-smi"):
        fix = "install a build of torch with CUDA, or use CPU devices"
        return Check("devices", Health.WARN, "an NVIDIA driver, but torch sees no CUDA device", fix)
    return Check("devices", Health.OK, "CPU devices, any number")


def _cores() -> Check:
    import torch

    usable = len(os.sched_getaffinity(0))
    found = f"{count(usable, 'core')} usable, {count(torch.get_num_threads(), 'thread')} for linear algebra"
    if usable < 2:  # noqa: PLR2004 - a pipeline of two stages
        return Check("cores", Health.WARN, found, "stages will take turns; give the machine two cores or more")
    return Check("cores", Health.OK, f"{found} (1 in each process of a run)")


def _memory() -> Check:
    pages = {line.split(":")[0]: line.split()[1] for line in Path("/proc/meminfo").read_text("ascii").splitlines()}
    available = int(pages["MemAvailable"]) * 1024
    found = f"{bytes_text(available)} available"
    if available < _FEWEST_PROCESSES * _PROCESS_BYTES:
        each = f"each stage and shard takes about {bytes_text(_PROCESS_BYTES)} and its share of the model"
        fix = f"{each}; free some memory"
        return Check("memory", Health.WARN, found, fix)
    return Check("memory", Health.OK, found)


def _loopback() -> Check:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=_GLOO_SECONDS):
            return Check("loopback", Health.OK, f"127.0.0.1 connects, port {port} was free")


def _gloo() -> Check:
    """Connect two ends of a gloo link, in two threads."""
    import torch

    from hetpipe.link.cut import Cut
    from hetpipe.link.gloo import GlooListener, call_gloo
    from hetpipe.link.policy import Frame, FrameKind, LinkLimits
    from hetpipe.values.requests import Requester

    stages = [
        Requester(JobId("doctor"), Term(0), VirtualWorkerIndex(0), Incarnation(0), StageIndex(index))
        for index in range(2)
    ]
    cut = Cut(own=stages[0], neighbour=stages[1], limits=LinkLimits())
    listener = GlooListener(cut, host="127.0.0.1")
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listener.accept, deadline_seconds=_GLOO_SECONDS)
        second = call_gloo(cut.seen_from_there(), listener.address, host="127.0.0.1", deadline_seconds=_GLOO_SECONDS)
    first = accepted.result()
    first.send(Frame(FrameKind.FORWARD, 1, 0, 0, (torch.arange(4),)), deadline_seconds=_GLOO_SECONDS)
    arrived = second.receive(timeout_seconds=_GLOO_SECONDS).tensors[0]
    first.close()
    second.close()
    if arrived is None or arrived.tolist() != [0, 1, 2, 3]:
        return Check("gloo", Health.FAIL, f"sent 0 to 3, received {arrived}", "reinstall torch")
    return Check("gloo", Health.OK, "stages can send each other tensors")


def _redis() -> Check:
    path = shutil.which("redis-server")
    if path is None:
        fix = "install redis-server if a coordinator is to keep its state in Redis; else nothing"
        return Check("redis-server", Health.WARN, "not found", fix)
    return Check("redis-server", Health.OK, path)


def _folder(current: Path) -> Check:
    try:
        with tempfile.NamedTemporaryFile(dir=current):
            pass
    except OSError as error:
        fix = "change to a writable folder, or name one with --run-dir"
        return Check("folder", Health.WARN, f"{current} cannot be written to: {error.strerror}", fix)
    free = shutil.disk_usage(current).free
    return Check("folder", Health.OK, f"{current}, {bytes_text(free)} free for runs")
