"""The command `hetpipe profile --links`: how fast the links of this machine are, as a cluster file for plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hetpipe.cli.link_profiling import LinkWish, ProfiledLinks, profile_links
from hetpipe.cli.outcome import ExitStatus, Output
from hetpipe.cli.profile_command import view_for
from hetpipe.cli.quantities import bytes_text
from hetpipe.cli.shell import Shell
from hetpipe.cli.text import columns, duration, shown_path
from hetpipe.coordinator.agents_cluster import cluster_of
from hetpipe.coordinator.known_links import KnownLinks, LinkOrigin, known_links
from hetpipe.errors import UserError
from hetpipe.spec import wire
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.document import to_plain, to_yaml
from hetpipe.spec.ids import AgentId
from hetpipe.spec.link_measurement import MeasuredLinks, TransferSpeed
from hetpipe.spec.run import AgentInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLinksOptions:
    """The options of the command."""

    out: Path | None = None
    """Where to write the cluster file."""
    wish: LinkWish


def check_alone(others: Sequence[str]) -> None:
    """Refuse what says how to measure a model.

    Raises:
        UserError: naming `others`, which were given beside --links.
    """
    if others:
        raise UserError(f"--links measures no model; leave out {', '.join(others)}, or --links")


def profile_links_of(options: ProfileLinksOptions, output: Output, shell: Shell) -> ExitStatus:
    """Measure, and tell what was found.

    Raises:
        UserError: the file cannot be written.
    """
    wish = options.wish
    with view_for(output, shell, unit="parts", beginning="starting processes") as view:
        profiled = profile_links(wish, shell, view.show)
    known = known_links([wish.node], profiled.measured, now=shell.clock.wall())
    agent = AgentInfo(AgentId(wish.node), host="", pid=0, devices=tuple(wish.devices))
    cluster = cluster_of([agent], known.links)
    if options.out is not None:
        _write(_file_text(cluster, known), options.out)
    output.say(*lines(profiled.measured), "", *_remarks(profiled, options, shell))
    if output.machine is not None:
        measured = wire.plain(MeasuredLinks, profiled.measured)
        output.answer({"cluster": to_plain(cluster), "measured": measured, "cached": profiled.cached})
    return ExitStatus.OK


def lines(measured: MeasuredLinks) -> list[str]:
    """Measurements for people: a row each."""
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
    """What the links of a plan are: stated, measured or assumed, a sentence for each of these.

    >>> from hetpipe.coordinator.agents_cluster import ASSUMED_LINKS
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


def _remarks(profiled: ProfiledLinks, options: ProfileLinksOptions, shell: Shell) -> list[str]:
    found = ["of both directions the slower one; latency is half a round trip of small messages"]
    if any(copy.method == "memcpy" for copy in profiled.measured.copies):
        found.append(
            "memcpy: without a GPU a copy stays in memory; a stage on a CPU makes none, and plans leave it out"
        )
    if profiled.cached:
        age = duration(shell.clock.wall() - profiled.measured.links[0].measured_at)
        found.append(f"measured {age} ago; measure again with --fresh")
    if options.out is None:
        found.append("`hetpipe plan JOB` on this machine plans with it; --out cluster.yaml writes a cluster file")
    else:
        found.append(f"written to {shown_path(options.out.absolute(), shell.current)}")
    return found


def _file_text(cluster: Cluster, known: KnownLinks) -> str:
    (origin,) = known.origins
    measured_at = datetime.fromtimestamp(origin.measured_at or 0.0, UTC)
    return "\n".join(
        [
            f"# The devices of this machine. intra_node was measured on {measured_at:%Y-%m-%d}, with copies to",
            "# GPUs and back; inter_node is assumed, 10 Gbit/s Ethernet. Add the other nodes, edit what differs.",
            to_yaml(cluster),
            "",
        ]
    )


def _write(text: str, path: Path) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give --out a file in a folder that exists") from error
