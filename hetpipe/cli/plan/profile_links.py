"""`hetpipe profile --links`: the speed of links, measured, as a cluster file for planning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from hetpipe.cli.plan.link_profiling import LinkProfileOptions, ProfiledLinks, profile_links
from hetpipe.cli.plan.profile_view import view_for
from hetpipe.decide.lifecycle.known_cluster import KnownLinks, LinkOrigin, cluster_of, known_links, together
from hetpipe.errors import DeadlineExceeded, UserError
from hetpipe.report.text import columns, duration, shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import CoordinatorPort, Shell
from hetpipe.values import wire
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import to_plain, to_yaml
from hetpipe.values.ids import AgentId
from hetpipe.values.link_measurement import MeasuredLinks, TransferSpeed, still_valid
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.members import MemberRole
from hetpipe.values.quantities import bytes_text
from hetpipe.values.run import AgentInfo
from hetpipe.wire.calls import MEASURE_LINKS, MeasureLinksRequest
from hetpipe.wire.coordinator_client import all_members, new_request_id

#: Polling interval for the agents' progress, in seconds.
_POLL_SECONDS = 0.5

#: Timeout per link, longer than the coordinator's.
_PATIENCE_SECONDS = 120.0


def profile_links_of(wish: LinkProfileOptions, output: Output, shell: Shell, *, out: Path | None) -> ExitStatus:
    """Measure the links of this machine, and print the result.

    Args:
        wish: parameters of the measurement.
        output: prints the result.
        shell: the command's environment.
        out: path of the cluster file to write, if any.

    Raises:
        UserError: the file cannot be written.
    """
    with view_for(output, shell, unit="parts", beginning="starting processes") as view:
        profiled = profile_links(wish, shell, view.show)
    known = known_links([wish.node], profiled.measured, now=shell.clock.wall())
    agent = AgentInfo(AgentId(wish.node), host="", pid=0, devices=tuple(wish.devices))
    cluster = cluster_of([agent], known.links)
    if out is not None:
        _write(_file_text(cluster, known), out)
    output.say(*lines(profiled.measured), "", *_remarks(profiled, out, shell))
    if output.machine is not None:
        measured = wire.plain(MeasuredLinks, profiled.measured)
        output.answer({"cluster": to_plain(cluster), "measured": measured, "cached": profiled.cached})
    return ExitStatus.OK


def profile_cluster_links(
    coordinator: str, output: Output, shell: Shell, *, out: Path | None, fresh: bool
) -> ExitStatus:
    """Measure the links between the nodes of a coordinator's agents, and print all known links.

    Args:
        coordinator: `HOST:PORT`.
        output: prints the result.
        shell: the command's environment.
        out: path of the cluster file to write, if any.
        fresh: ignore earlier measurements.

    Raises:
        UserError: no agent is registered, or the file cannot be written.
        DeadlineExceeded: the coordinator reports no progress for too long.
        ResourceExhausted: another measurement of links is running.
    """
    with closing(shell.connect(coordinator)) as client:
        with view_for(output, shell, unit="links", beginning="waiting for agents") as view:
            remark = _survey(client, coordinator, shell, view.show, fresh=fresh)
        members = all_members(client)
        agents = [member.info.agent_info for member in members if member.info.role is MemberRole.AGENT]
    if not agents:
        raise UserError(f"no agent is registered with the coordinator at {coordinator}; start agents first")
    now = shell.clock.wall()
    measured = still_valid(together(agent.links for agent in agents), now=now)
    known = known_links([agent.agent for agent in agents], measured, now=now)
    cluster = cluster_of(agents, known.links)
    if out is not None:
        _write(_cluster_text(cluster, known), out)
    newest = {frozenset(link.between): link for link in sorted(measured.links, key=lambda link: link.measured_at)}
    shown = MeasuredLinks(links=tuple(newest.values()), copies=measured.copies)
    written = [] if out is None else [f"written to {shown_path(out.absolute(), shell.current)}"]
    output.say(*lines(shown), "", *filter(None, [remark]), *links_sentences(known, now), *written)
    if output.machine is not None:
        plain = wire.plain(MeasuredLinks, shown)
        output.answer({"cluster": to_plain(cluster), "measured": plain, "remark": remark})
    return ExitStatus.OK


def _survey(
    client: CoordinatorPort,
    coordinator: str,
    shell: Shell,
    on_step: Callable[[ProfileStep], None],
    *,
    fresh: bool,
) -> str:
    """Wait until the links are measured; returns the failed ones with reasons."""
    until, before = 0.0, -1
    request = MeasureLinksRequest(new_request_id(), fresh)
    while not (progress := client.invoke(MEASURE_LINKS, request)).is_over:
        now = shell.clock.monotonic()
        if progress.done > before:
            before, until = progress.done, now + _PATIENCE_SECONDS
            on_step(ProfileStep(coordinator, progress.awaited, progress.done, progress.total))
        if now >= until:
            raise DeadlineExceeded(
                f"the coordinator at {coordinator} has waited over {_PATIENCE_SECONDS:.0f} s for {progress.awaited}"
            )
        shell.clock.sleep(_POLL_SECONDS)
    return progress.remark


def lines(measured: MeasuredLinks) -> list[str]:
    """Measurements as text for people, one row each."""
    heading = ["measured", "by", "GB/s", "latency µs", "messages of", "samples"]
    links = [
        [f"link {LinkOrigin(link.between, 'measured').words}", link.transport, *_figures(link.speed)]
        for link in measured.links
    ]
    copies = [
        [f"memory of {copy.node} to {copy.device_type} and back", copy.method, *_figures(copy.speed)]
        for copy in measured.copies
    ]
    return columns([heading, *links, *copies])


def links_sentences(known: KnownLinks, now: float) -> tuple[str, ...]:
    """The sources of a plan's links (stated, measured or assumed), one sentence each.

    >>> from hetpipe.decide.lifecycle.known_cluster import ASSUMED_LINKS
    >>> links_sentences(KnownLinks(ASSUMED_LINKS, (LinkOrigin(("a", "a"), "measured", 0.0),)), 7384.0)
    ('links: measured within a, 2 h 03 min ago',)
    """
    if known.sources == ("stated",):
        return ("links: stated in the cluster file",)
    found = []
    measured = [origin for origin in known.origins if origin.source == "measured"]
    if measured:
        age = duration(now - min(origin.measured_at or 0.0 for origin in measured))
        found.append(f"links: measured {known.words('measured')}, {'up to ' if len(measured) > 1 else ''}{age} ago")
    if assumed := known.words("assumed"):
        found.append(
            f"links: assumed {assumed}; `hetpipe profile --links` measures those of a machine, and a cluster "
            "file states them"
        )
    return tuple(found)


def _figures(speed: TransferSpeed) -> Iterable[str]:
    sizes = f"{bytes_text(speed.small_bytes)}, {bytes_text(speed.large_bytes)}"
    return (
        f"{speed.bytes_per_second / 1e9:.3g}",
        f"{speed.latency_seconds * 1e6:.3g}",
        sizes,
        f"{speed.repeats} or more",
    )


def _remarks(profiled: ProfiledLinks, out: Path | None, shell: Shell) -> list[str]:
    found = ["the slower of both directions; latency is half the round trip of small messages"]
    if any(copy.method == "memcpy" for copy in profiled.measured.copies):
        found.append("memcpy: without a GPU a copy stays in memory; stages on CPUs make none, and plans ignore it")
    if profiled.cached:
        age = duration(shell.clock.wall() - profiled.measured.links[0].measured_at)
        found.append(f"measured {age} ago; measure again with --fresh")
    if out is None:
        found.append("`hetpipe plan JOB` on this machine uses it; --out cluster.yaml writes a cluster file")
    else:
        found.append(f"written to {shown_path(out.absolute(), shell.current)}")
    return found


def _file_text(cluster: Cluster, known: KnownLinks) -> str:
    (origin,) = known.origins
    measured_at = datetime.fromtimestamp(origin.measured_at or 0.0, UTC)
    return "\n".join(
        [
            f"# The devices of this machine. intra_node was measured on {measured_at:%Y-%m-%d}, with copies to",
            "# GPUs and back; inter_node is assumed, 10 Gbit/s Ethernet. Add the other nodes, edit the differences.",
            to_yaml(cluster),
            "",
        ]
    )


def _cluster_text(cluster: Cluster, known: KnownLinks) -> str:
    head = ["# The devices of the cluster's agents. Edit the differences.", f"# {known.sentence}"]
    return "\n".join([*head, to_yaml(cluster), ""])


def _write(text: str, path: Path) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give --out a file in a folder that exists") from error
