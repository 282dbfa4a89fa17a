"""The logs of containers by line, as a snapshot or a stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hetpipe.deploy import labels
from hetpipe.deploy.docker_port import ContainerPort
from hetpipe.observe.log import get_logger

_log = get_logger(__name__)

Line = tuple[str, str]
"""Name of the container, and its line."""


def read_lines(containers: Sequence[ContainerPort], *, tail: int | None) -> Iterator[Line]:
    """Yield their current logs, container by container."""
    for container in containers:
        written = container.logs(stdout=True, stderr=True, tail="all" if tail is None else tail)
        yield from ((_name(container), line) for line in written.decode(errors="replace").splitlines())


def follow_lines(containers: Sequence[ContainerPort], *, tail: int | None) -> Iterator[Line]:
    """Yield their logs as a stream, until all have ended."""
    lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
    for container in containers:
        threading.Thread(
            target=_follow, args=(container, tail, lines), name=f"logs-{_name(container)}", daemon=True
        ).start()
    open_ends = len(containers)
    while open_ends:
        line = lines.get()
        if line is None:
            open_ends -= 1
        else:
            yield line


def save_logs(containers: Sequence[ContainerPort], folder: Path) -> None:
    """Save the log of each container in `folder`. A file that cannot be written is skipped."""
    for container in containers:
        path = folder / f"{_name(container)}.log"
        try:
            path.write_bytes(container.logs(stdout=True, stderr=True))
        except OSError as error:
            _log.warning("logs_not_saved", path=str(path), reason=error.strerror)


def _follow(container: ContainerPort, tail: int | None, lines: queue.SimpleQueue[Line | None]) -> None:
    try:
        pieces = container.logs(
            stdout=True, stderr=True, stream=True, follow=True, tail="all" if tail is None else tail
        )
        for line in _lines(pieces):
            lines.put((_name(container), line))
    finally:
        lines.put(None)


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Complete lines from a stream of pieces."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def _name(container: ContainerPort) -> str:
    return container.labels.get(labels.NAME, container.name)
