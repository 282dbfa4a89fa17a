"""The command `hetpipe plan`: what fits, how fast it will be, and why."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hetpipe.cli.plan.link_profiling import LinkWish, cached_links
from hetpipe.cli.plan.profile import view_for
from hetpipe.cli.plan.profile_links import links_sentences
from hetpipe.cli.plan.profiling import ProfileWish, profile_job
from hetpipe.cli.plan.request import PlanRequest, check_request, wishes_of
from hetpipe.decide.lifecycle.known_cluster import KnownLinks, cluster_of, known_links, stated_links
from hetpipe.decide.simulator.documents import costs_of
from hetpipe.errors import UserError
from hetpipe.job.file import Job, load_job
from hetpipe.report.plan_view import PlanFacts, view_of
from hetpipe.report.text import shown_path
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.server.agent.devices import discover_devices
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import read_document, to_plain, write_document
from hetpipe.values.fit import check_fits, read_fitting
from hetpipe.values.ids import AgentId
from hetpipe.values.profile import Profile
from hetpipe.values.run import AgentInfo


def plan(request: PlanRequest, output: Output, shell: Shell) -> ExitStatus:
    """Plan, and tell.

    Raises:
        UserError: options, files or the job cannot be used, or nothing fits.
    """
    check_request(request, as_json=output.machine is not None)
    job = None if request.job is None else load_job(request.job)
    wishes = wishes_of(request, job)
    known = _given(request) if job is None else _for_job(request, job, output, shell)
    profile, cluster = known.profile, known.cluster
    options = wishes.options
    if request.reserve_bytes is None:
        options = replace(options, reserve_bytes=known.reserve_bytes)
    # the searches take a while to import
    from hetpipe.decide.planner.choose import choose_plan
    from hetpipe.decide.simulator.prediction import predicted

    document = choose_plan(profile, cluster, options, predict=predicted)
    facts = PlanFacts(document, costs_of(document, profile, cluster), options)
    document = known.links.noted_in(document, cluster)
    remarks = [*wishes.remarks, *_links_remarks(known.links, shell)]
    if request.out is not None:
        _write("--out", request.out, lambda path: write_document(document, path))
        remarks.append(f"the plan is in {shown_path(request.out.absolute(), shell.current)}")
    if request.html is not None:
        text = _page(facts)
        _write("--html", request.html, lambda path: path.write_text(text, encoding="utf-8"))
        remarks.append(f"the page is in {shown_path(request.html.absolute(), shell.current)}")
    if output.machine is None:
        _show(facts, request, output)
    output.say(*remarks)
    if output.machine is not None:
        output.answer(to_plain(document))
    return ExitStatus.OK


def _links_remarks(links: KnownLinks, shell: Shell) -> tuple[str, ...]:
    """Where links are from; of a file that states them, whoever has named it knows that."""
    return () if links.sources == ("stated",) else links_sentences(links, shell.clock.wall())


@dataclass(frozen=True, slots=True)
class _Known:
    """What is planned with."""

    profile: Profile
    cluster: Cluster
    links: KnownLinks
    """Where the links of the cluster are from."""
    reserve_bytes: int = 0
    """What the framework takes of every device; 0 if nothing was measured."""


def _given(request: PlanRequest) -> _Known:
    assert request.profile is not None
    assert request.cluster is not None
    profile, cluster = read_fitting(request.profile, request.cluster)
    return _Known(profile, cluster, _stated(cluster))


def _stated(cluster: Cluster) -> KnownLinks:
    return stated_links(cluster.links, [node.name for node in cluster.nodes])


def _for_job(request: PlanRequest, job: Job, output: Output, shell: Shell) -> _Known:
    """Files that were named go before those of the job, and these before this machine and a measurement."""
    if request.profile is not None and request.cluster is not None:
        known = _given(request)
    else:
        cluster, links = _cluster(request, job, shell)
        known = _with_profile(request, job, (cluster, links), output, shell)
        check_fits(known.profile, cluster, cluster_name="cluster" if request.cluster is None else str(request.cluster))
    if known.profile.batch_size != job.batch_size:
        raise UserError(
            f"the profile is of minibatches of {known.profile.batch_size} samples, the job's have {job.batch_size}; "
            f"profile again, or set batch_size: {known.profile.batch_size}"
        )
    return known


def _cluster(request: PlanRequest, job: Job, shell: Shell) -> tuple[Cluster, KnownLinks]:
    """The cluster, and where its links are from."""
    named = job.cluster.file if request.cluster is None else read_document(Cluster, request.cluster)
    if named is not None:
        return named, _stated(named)
    # As a run would do it.
    node = socket.gethostname()
    devices = discover_devices(node)
    measured = cached_links(LinkWish(node=node, devices=devices), shell)
    known = known_links([node], measured, now=shell.clock.wall())
    return cluster_of([AgentInfo(AgentId(node), node, os.getpid(), devices)], known.links), known


def _with_profile(
    request: PlanRequest, job: Job, among: tuple[Cluster, KnownLinks], output: Output, shell: Shell
) -> _Known:
    cluster, links = among
    if request.profile is not None:
        return _Known(read_document(Profile, request.profile), cluster, links)
    if job.cluster.profile is not None:
        return _Known(job.cluster.profile, cluster, links)
    types = tuple(dict.fromkeys(cluster.devices.values()))
    with view_for(output, shell) as view:
        profiled = profile_job(job, ProfileWish(types=types), shell, view.show)
    return _Known(profiled.profile, cluster, links, profiled.reserve_bytes)


def _write(option: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; give {option} a file in a folder that exists"
        ) from error


def _page(facts: PlanFacts) -> str:
    from hetpipe.report.plan_page import page_of, picture_of
    from hetpipe.report.plan_reasons import reasons_of

    return page_of(view_of(facts), reasons_of(facts), picture_of(facts))


def _show(facts: PlanFacts, request: PlanRequest, output: Output) -> None:
    # rich takes a while to import, and --json does without
    from rich.console import Console

    from hetpipe.report.plan_reasons import reasons_of
    from hetpipe.report.plan_screen import show_plan

    console = Console(file=output.people, highlight=False)
    show_plan(view_of(facts), reasons_of(facts), console, why="full" if request.why else "brief")
