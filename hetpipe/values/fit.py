"""Consistency checks between a profile and a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hetpipe.errors import DocumentError
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import read_document
from hetpipe.values.problems import Problem
from hetpipe.values.profile import Profile
from hetpipe.values.suggest import closest, join_names


def read_fitting(profile_path: Path, cluster_path: Path) -> tuple[Profile, Cluster]:
    """Read a profile and a cluster that fit each other.

    Raises:
        DocumentError: lists every mistake of both files, or every mismatch between them.
    """
    problems: list[str] = []
    profile = cluster = None
    try:
        profile = read_document(Profile, profile_path)
    except DocumentError as error:
        problems += error.sentences
    try:
        cluster = read_document(Cluster, cluster_path)
    except DocumentError as error:
        problems += error.sentences
    if profile is None or cluster is None:
        raise DocumentError("", problems)
    check_fits(profile, cluster, cluster_name=str(cluster_path))
    return profile, cluster


def check_fits(profile: Profile, cluster: Cluster, *, cluster_name: str = "cluster") -> None:
    """Check that the profile has times for every device of the cluster.

    Args:
        profile: the layers on each type.
        cluster: the devices.
        cluster_name: origin of the cluster; prefix of every message.

    Raises:
        DocumentError: lists the types without times; paths refer to the cluster.
    """
    problems = [str(problem) for problem in _types_without_times(profile, cluster)]
    if problems:
        raise DocumentError(cluster_name, problems)


def _types_without_times(profile: Profile, cluster: Cluster) -> Iterator[Problem]:
    timed = profile.device_types
    for kind in dict.fromkeys(cluster.devices.values()):
        if kind in timed:
            continue
        likely = closest(kind, timed)
        fix = (
            f"did you mean `{likely}`?"
            if likely
            else f"its times are for {join_names(timed, 'and')}; profile this type too, or remove its devices"
        )
        yield Problem(("device_types", kind), f"the profile has no times for this type; {fix}")
