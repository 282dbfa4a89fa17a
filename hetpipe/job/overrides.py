"""Overrides: what a command line or a Python call changes in a job file.

An override goes to a leaf: `sync.D=4` and `{"sync": {"D": 4}}` say the same and leave the rest of `sync` alone, and so
does `sync=none`, which is `sync.kind=none`. A list or an empty mapping replaces what was there; no value (`null`, None)
removes the key, so that its default holds.

Some keys exclude each other. A user who sets one of them does not want an error about the other one in the file, so
the file gives way (`_settle`); between two overrides nothing gives way and the contradiction is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetpipe.errors import JobError
from hetpipe.job.model import Job, normalised
from hetpipe.job.sections import DeviceEmulation
from hetpipe.values.policies import POLICIES
from hetpipe.values.problems import Path, Problem, field_at, model_at, unknown_key
from hetpipe.values.sync import SYNC_KINDS
from hetpipe.values.yaml_text import YamlSyntaxError, parse_yaml

#: A mapping (nested, dotted or both), or `path=value` texts.
Overrides = Mapping[str, object] | Sequence[str]

_FREE_KEYS = ("metrics", "optimizer", "lr_schedule")
"""Sections whose keys the schema does not list."""


def parse_set(text: str) -> tuple[str, object]:
    """Take `path=value` apart; the value is read as YAML.

    >>> parse_set("sync.D=4")
    ('sync.D', 4)
    >>> parse_set("optimizer.lr=1e-3")
    ('optimizer.lr', 0.001)

    Raises:
        JobError: no `=`, a value that is no YAML, or a path that no job has.
    """
    path, equals, value_text = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise JobError(f"{text!r}: must be path=value, for example sync.D=4")
    problem = _unknown_part(tuple(path.split(".")))
    if problem is not None:
        raise JobError(str(problem))
    try:
        value, problems = parse_yaml(value_text)
    except YamlSyntaxError as error:
        raise JobError(f"{path}: the value {value_text!r} is not valid YAML: {error}; put text in quotes") from error
    if problems:
        raise JobError([f"{path}: {problem}" for problem in problems])
    return path, value


def _unknown_part(path: Path) -> Problem | None:
    """The first part of `path` that no job has, or None. A short form of `cluster` counts as known."""
    for length in range(1, len(path) + 1):
        part = path[:length]
        if field_at(Job, part) is not None:
            continue
        is_free = path[0] in _FREE_KEYS or (path[0] == "cluster" and path[1] in DeviceEmulation.model_fields)
        if length == len(path) == 2 and is_free:  # noqa: PLR2004 - a section and a key in it
            return None
        parent = path[length - 1] if is_free and length == 2 else path[length - 2]  # noqa: PLR2004
        if is_free or length > 2 or model_at(Job, part[:-1]) is None:  # noqa: PLR2004
            return Problem(path, f"`{parent}` has no keys inside; set it as a whole")
        return unknown_key(Job, part)
    return None


def _leaves(values: Mapping[str, object], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    for key, value in values.items():
        path = (*prefix, *str(key).split("."))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        elif path == ("sync",) and isinstance(value, str):
            yield ("sync", "kind"), value
        else:
            yield path, value


def _at(values: Mapping[str, Any], *path: str) -> Any:
    found: Any = values
    for part in path:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _put(values: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    *parents, last = path
    inner = values
    for part in parents:
        below = inner.get(part)
        if not isinstance(below, dict):
            below = inner[part] = {}
        inner = below
    if value is None:
        inner.pop(last, None)
    else:
        inner[last] = value


def merged(base: Mapping[str, Any], overrides: Overrides) -> tuple[dict[str, Any], list[str]]:
    """`base` with `overrides` laid over it, not yet checked, and what is wrong with the overrides' own text."""
    problems: list[str] = []
    if isinstance(overrides, Mapping):
        leaves = dict(_leaves(overrides))
    else:
        leaves = {}
        # A lone text is a sequence of texts too, of its letters.
        for text in [overrides] if isinstance(overrides, str) else overrides:
            try:
                path, value = parse_set(text)
            except JobError as error:
                problems += error.problems
            else:
                leaves.update(_leaves({path: value}))
    values = normalised(base)
    _settle(values, leaves)
    for leaf_path, leaf in leaves.items():
        _put(values, leaf_path, leaf)
    return normalised(values), problems


def _settle(values: dict[str, Any], given: Mapping[tuple[str, ...], object]) -> None:
    """Take out of `values`, the file's, what contradicts the `given` overrides."""
    for one, other in (("epochs", "minibatches"), ("minibatches", "epochs")):
        if given.get((one,)) is not None:
            values.pop(other, None)
    _settle_sync(values, given)
    _settle_stages(values, given)
    _settle_cluster(values, given)
    if ("weights",) in given:
        policy = POLICIES.get(str(given["weights",]))
        if policy is None or policy.predicts != "update":
            values.pop("prediction", None)
    for section in ("optimizer", "lr_schedule"):
        name = given.get((section, "name"))
        if name is not None and name != _at(values, section, "name"):
            # Arguments belong to their class: SGD's lr under Adam would be a quiet mistake.
            values[section] = {}


def _settle_sync(values: dict[str, Any], given: Mapping[tuple[str, ...], object]) -> None:
    kind, staleness = given.get(("sync", "kind")), given.get(("sync", "D"))
    if isinstance(values.get("sync"), str) and any(path[0] == "sync" and len(path) > 1 for path in given):
        values["sync"] = {"kind": values["sync"]}
    traits = SYNC_KINDS.get(str(kind))
    has_own_bound = traits is not None and traits.bound != "given"
    if has_own_bound:
        _put(values, ("sync", "D"), None)
    if has_own_bound or (staleness is not None and staleness != "auto"):
        _put(values, ("sync", "max_D"), None)
    if traits is not None and not traits.has_shards:
        _put(values, ("sync", "combine"), None)
        values.pop("parameter_servers", None)
    if kind is None and staleness is not None and not (_has_bound_zero(values) and staleness == 0):
        # A bound makes it wsp, whatever the file's kind was.
        _put(values, ("sync", "kind"), None)


def _has_bound_zero(values: Mapping[str, Any]) -> bool:
    traits = SYNC_KINDS.get(str(_at(values, "sync", "kind")))
    return traits is not None and traits.bound == "zero"


def _settle_stages(values: dict[str, Any], given: Mapping[tuple[str, ...], object]) -> None:
    stages, listed = given.get(("workers", "stages")), _at(values, "workers", "stages")
    if stages is None and listed == "auto" and given.get(("workers", "count")) is not None:
        _put(values, ("workers", "stages"), None)
    if isinstance(stages, list | tuple) or stages == "auto":
        _put(values, ("workers", "count"), None)
    elif stages is not None and isinstance(listed, tuple) and _at(values, "workers", "count") is None:
        # The file said V by the length of its list.
        _put(values, ("workers", "count"), len(listed))


def _settle_cluster(values: dict[str, Any], given: Mapping[tuple[str, ...], object]) -> None:
    keys = {path[1] for path in given if path[0] == "cluster" and len(path) > 1 and given[path] is not None}
    cluster = _at(values, "cluster")
    if keys & set(DeviceEmulation.model_fields) and not isinstance(cluster, dict):
        values.pop("cluster", None)
    for key, excluded in (
        ("devices", ("slowdown", "emulate_as", "jitter")),
        ("slowdown", ("devices", "emulate_as")),
        ("emulate_as", ("devices", "slowdown")),
        ("jitter", ("devices",)),
    ):
        if key in keys and isinstance(cluster, dict):
            for other in excluded:
                cluster.pop(other, None)
