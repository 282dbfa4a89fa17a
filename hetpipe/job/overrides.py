"""Overrides of a job file from a command line or a Python call.

An override sets a leaf: `sync.D=4` and `{"sync": {"D": 4}}` are equivalent and leave the rest of `sync` unchanged, as
does `sync=none`, short for `sync.kind=none`. A list or an empty mapping replaces the previous value; no value (`null`,
None) removes the key, so that its default applies.

Some keys exclude each other. An override of one of them removes the other one from the file instead of causing an error
(`_settle`); contradictions between two overrides are reported.
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
"""Sections with keys that are not in the schema."""


def parse_set(text: str) -> tuple[str, object]:
    """Split `path=value`; the value is parsed as YAML.

    >>> parse_set("sync.D=4")
    ('sync.D', 4)
    >>> parse_set("optimizer.lr=1e-3")
    ('optimizer.lr', 0.001)

    Raises:
        JobError: there is no `=`, the value is not YAML, or the path does not exist in a job.
    """
    path, equals, value_text = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise JobError(f"{text!r}: expected path=value, for example sync.D=4")
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
    """The first unknown part of `path`, or None. A short form of `cluster` counts as known."""
    for length in range(1, len(path) + 1):
        part = path[:length]
        if field_at(Job, part) is not None:
            continue
        is_free = path[0] in _FREE_KEYS or (path[0] == "cluster" and path[1] in DeviceEmulation.model_fields)
        if length == len(path) == 2 and is_free:  # noqa: PLR2004 - a section and a key in it
            return None
        parent = path[length - 1] if is_free and length == 2 else path[length - 2]  # noqa: PLR2004
        if is_free or length > 2 or model_at(Job, part[:-1]) is None:  # noqa: PLR2004
            return Problem(path, f"`{parent}` has no nested keys; set it as a whole")
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
    """Apply `overrides` to `base`, without validation; returns the result and mistakes in the text of the overrides."""
    problems: list[str] = []
    if isinstance(overrides, Mapping):
        leaves = dict(_leaves(overrides))
    else:
        leaves = {}
        # A single text is a sequence of texts, too: of its characters.
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
    """Remove from the file's `values` the keys that contradict the `given` overrides."""
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
            # Arguments belong to their class: lr of SGD used for Adam would be a silent mistake.
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
        # A bound implies wsp, whatever the kind in the file.
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
        # The file gives V by the length of its list.
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
