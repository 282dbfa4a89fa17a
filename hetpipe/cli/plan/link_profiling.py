"""Measurement of this machine's links, between two processes and between memory and devices, in child processes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetpipe.errors import DeadlineExceeded
from hetpipe.forking.environment import SINGLE_THREADED
from hetpipe.job.sections import EnvironmentSection
from hetpipe.profiler.link_cache import WITHIN_NODE_TRANSPORT, LinkCache
from hetpipe.profiler.link_order import LinkAnswer, LinkOrder
from hetpipe.runs.child_answer import ReportingChild, reporting_child
from hetpipe.runs.shell import Shell
from hetpipe.server.agent.child import ChildSpec
from hetpipe.server.agent.environment import child_environment
from hetpipe.values import wire
from hetpipe.values.link_measurement import LinkMeasurement, MeasuredLinks
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.run import AgentDevice

#: Program of the measuring process; `--report-fd N` is added.
PROGRAM: tuple[str, ...] = (sys.executable, "-m", "hetpipe.server.agent.link_process")

_TITLE = "the process that measures links"

#: Timeout for a report of the measuring process: importing torch, waiting for the other end, measuring.
_PATIENCE_SECONDS = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfileOptions:
    """The parameters of a link measurement."""

    node: str
    """Name of this machine's node."""
    devices: Sequence[AgentDevice]
    """Devices of this machine."""
    fresh: bool = False
    """Ignore the cache."""
    program: Sequence[str] = field(default=PROGRAM)


@dataclass(frozen=True, slots=True)
class ProfiledLinks:
    """The measurements of this machine's links."""

    measured: MeasuredLinks
    cached: bool
    """The measurements are from the cache."""


def cached_links(wish: LinkProfileOptions, shell: Shell) -> MeasuredLinks:
    """The valid cached measurements; empty without any."""
    return _cache(wish, shell).find(now=shell.clock.wall())


def profile_links(wish: LinkProfileOptions, shell: Shell, on_step: Callable[[ProfileStep], None]) -> ProfiledLinks:
    """Measure the links of this machine, or load cached measurements.

    Args:
        wish: parameters of the measurement.
        shell: the command's environment.
        on_step: called before each part is measured, in this thread.

    Raises:
        DeadlineExceeded: the measuring process is silent.
        JobFailed: the measuring process died.
    """
    known = MeasuredLinks() if wish.fresh else cached_links(wish, shell)
    if known.links and known.copies:
        return ProfiledLinks(known, cached=True)
    on_step(ProfileStep(wish.node, "the link between two processes", 0, 2))
    link = _link(wish, shell)
    on_step(ProfileStep(wish.node, "copies between memory and devices", 1, 2))
    with _process(wish, shell, LinkOrder(role="copies", node=wish.node)) as process:
        copies = _answer(process).copies
    measured = MeasuredLinks(links=(link,), copies=copies)
    _cache(wish, shell).keep(measured)
    return ProfiledLinks(measured, cached=False)


def _link(wish: LinkProfileOptions, shell: Shell) -> LinkMeasurement:
    order = LinkOrder(role="await", node=wish.node, other=wish.node, transport=WITHIN_NODE_TRANSPORT)
    with ExitStack() as both:
        first = both.enter_context(_process(wish, shell, order))
        address = str(_message(first).get("address"))
        both.enter_context(_process(wish, shell, replace(order, role="call", address=address)))
        link = _answer(first).link
    assert link is not None, "the end that listens measures"
    return link


@contextmanager
def _process(wish: LinkProfileOptions, shell: Shell, order: LinkOrder) -> Iterator[ReportingChild]:
    # The environment of stages of a job without `environment`.
    environment = child_environment(shell.environment, EnvironmentSection(), None)
    with tempfile.TemporaryDirectory(prefix="hetpipe-links-") as folder:
        spec = ChildSpec(
            name="links",
            command=wish.program,
            first_line=wire.to_json(LinkOrder, order),
            environment={**environment, **SINGLE_THREADED},
            log_path=Path(folder) / "links.out",
        )
        with reporting_child(spec, _TITLE) as child:
            yield child


def _answer(child: ReportingChild) -> LinkAnswer:
    answer: LinkAnswer = wire.revive(LinkAnswer, _message(child).get("ok"))
    return answer


def _message(child: ReportingChild) -> dict[str, Any]:
    message = child.next_message(timeout_seconds=_PATIENCE_SECONDS)
    if message is None:
        raise DeadlineExceeded(f"{_TITLE} has reported no progress for {_PATIENCE_SECONDS:.0f} s")
    return message


def _cache(wish: LinkProfileOptions, shell: Shell) -> LinkCache:
    return LinkCache(shell.environment, machine=wish.node, device_types=[device.type for device in wish.devices])
