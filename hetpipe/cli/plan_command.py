"""The command `hetpipe plan`: what fits, how fast it will be, and why."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from hetpipe.agent.devices import discover_devices
from hetpipe.cli.outcome import ExitStatus, Output
from hetpipe.cli.plan_request import PlanRequest, check_request, wishes_of
from hetpipe.cli.plan_view import PlanFacts, view_of
from hetpipe.cli.profile_command import view_for
from hetpipe.cli.profiling import ProfileWish, profile_job
from hetpipe.cli.shell import Shell
from hetpipe.cli.text import shown_path
from hetpipe.coordinator.agents_cluster import cluster_of
from hetpipe.errors import UserError
from hetpipe.simulator.documents import costs_of
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.document import read_document, to_plain, write_document
from hetpipe.spec.fit import check_fits, read_fitting
from hetpipe.spec.ids import AgentId
from hetpipe.spec.job import Job, load_job
from hetpipe.spec.profile import Profile
from hetpipe.spec.run import AgentInfo


def plan(request: PlanRequest, output: Output, shell: Shell) -> ExitStatus:
    """Plan, and tell.

    Raises:
        UserError: options, files or the job cannot be used, or nothing fits.
    """
    check_request(request, as_json=output.machine is not None)
    job = None if request.job is None else load_job(request.job)
    wishes = wishes_of(request, job)
    profile, cluster = _given(request) if job is None else _for_job(request, job, output, shell)
    # the searches take a while to import
    from hetpipe.planner.choose import choose_plan
    from hetpipe.simulator.prediction import predicted

    document = choose_plan(profile, cluster, wishes.options, predict=predicted)
    facts = PlanFacts(document, costs_of(document, profile, cluster), wishes.options)
    remarks = list(wishes.remarks)
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


def _given(request: PlanRequest) -> tuple[Profile, Cluster]:
    assert request.profile is not None
    assert request.cluster is not None
    return read_fitting(request.profile, request.cluster)


def _for_job(request: PlanRequest, job: Job, output: Output, shell: Shell) -> tuple[Profile, Cluster]:
    """Files that were named go before those of the job, and these before this machine and a measurement."""
    if request.profile is not None and request.cluster is not None:
        profile, cluster = read_fitting(request.profile, request.cluster)
    else:
        cluster = _cluster(request, job)
        profile = _profile(request, job, cluster, output, shell)
        check_fits(profile, cluster, cluster_name="cluster" if request.cluster is None else str(request.cluster))
    if profile.batch_size != job.batch_size:
        raise UserError(
            f"the profile is of minibatches of {profile.batch_size} samples, the job's have {job.batch_size}; "
            f"profile again, or set batch_size: {profile.batch_size}"
        )
    return profile, cluster


def _cluster(request: PlanRequest, job: Job) -> Cluster:
    if request.cluster is not None:
        return read_document(Cluster, request.cluster)
    # As a run would do it.
    node = socket.gethostname()
    return job.cluster.file or cluster_of([AgentInfo(AgentId(node), node, os.getpid(), discover_devices(node))])


def _profile(request: PlanRequest, job: Job, cluster: Cluster, output: Output, shell: Shell) -> Profile:
    if request.profile is not None:
        return read_document(Profile, request.profile)
    if job.cluster.profile is not None:
        return job.cluster.profile
    types = tuple(dict.fromkeys(cluster.devices.values()))
    with view_for(output, shell) as view:
        return profile_job(job, ProfileWish(types=types), shell, view.show).profile


def _write(option: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; give {option} a file in a folder that exists"
        ) from error


def _page(facts: PlanFacts) -> str:
    from hetpipe.cli.plan_page import page_of, picture_of
    from hetpipe.cli.plan_reasons import reasons_of

    return page_of(view_of(facts), reasons_of(facts), picture_of(facts))


def _show(facts: PlanFacts, request: PlanRequest, output: Output) -> None:
    # rich takes a while to import, and --json does without
    from rich.console import Console

    from hetpipe.cli.plan_reasons import reasons_of
    from hetpipe.cli.plan_screen import show_plan

    console = Console(file=output.people, highlight=False)
    show_plan(view_of(facts), reasons_of(facts), console, why="full" if request.why else "brief")
