"""The schema of job files: it accepts every job file there is, and an editor that has it finds mistakes of one key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from hetpipe.job.schema import DESCRIBED, schema_of
from tests.docs.pages import ROOT, blocks
from tests.numerics.compare import Case

VALIDATOR = jsonschema.Draft202012Validator(schema_of("job"))
KEYS = VALIDATOR.schema["properties"]

LEAST: Mapping[str, Any] = {"model": "m:build", "data": {"train": "m:data"}, "optimizer": {"name": "SGD", "lr": 0.1}}

FILES = [
    path
    for folder in ("examples", "hetpipe/cli/templates", "k8s", "docs", "tests")
    for path in sorted((ROOT / folder).rglob("job*.yaml"))
    if "model:" in path.read_text(encoding="utf-8") and "kind: Job" not in path.read_text(encoding="utf-8")
]
#: Excerpts of job files: blocks of YAML whose keys are keys of jobs.
EXCERPTS = [
    (str(block), found)
    for block in blocks("yaml")
    if isinstance(found := yaml.safe_load(re.sub(r"…", "x", block.text)), dict) and found.keys() <= KEYS.keys()
]


def mistakes(job: Mapping[str, Any]) -> list[str]:
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in VALIDATOR.iter_errors(job)]


def test_the_schemas_are_valid() -> None:
    for name in DESCRIBED:
        jsonschema.Draft202012Validator.check_schema(schema_of(name))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_job_file_is_accepted(path: Any) -> None:
    assert mistakes(yaml.safe_load(path.read_text(encoding="utf-8"))) == []


def test_there_are_files_and_excerpts() -> None:
    assert len(FILES) >= 8
    assert len(EXCERPTS) >= 25


@pytest.mark.parametrize(("where", "excerpt"), EXCERPTS, ids=[where for where, _ in EXCERPTS])
def test_every_excerpt_of_the_documentation_is_accepted(where: str, excerpt: Mapping[str, Any]) -> None:
    assert mistakes({**LEAST, **excerpt}) == [], where


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kind": "none", "workers": 1},
        {"weights": "wave", "accumulate": 2, "waves": (2, 4), "max_norm": 1.0},
        {"groups": ({"parameters": ["*.bias"], "lr": 0.5},), "moves": ((4, 0, (1, 3)),), "memory": {"*": "recompute"}},
        {"lr_schedule": {"name": "StepLR", "step_size": 2}, "metrics": {"accuracy": "tests.models:accuracy"}},
    ],
)
def test_validated_jobs_are_accepted_as_they_are_stored(changes: Mapping[str, Any]) -> None:
    assert mistakes(Case(epochs=2, **changes).job().model_dump(mode="json")) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epoch": 3}, "'epoch' was unexpected"),
        ({"batch_size": "32"}, "batch_size: '32' is not of type 'integer'"),
        ({"batch_size": 0}, "batch_size: 0 is less than the minimum of 1"),
        ({"weights": "stach"}, "weights: 'stach' is not one of"),
        ({"sync": "wps"}, "sync: 'wps' is not valid"),
        ({"sync": {"kind": "wsp", "d": 1}}, "sync: {'kind': 'wsp', 'd': 1} is not valid"),
        ({"metrics": ["acuracy"]}, "metrics: ['acuracy'] is not valid"),
        ({"survive": {"stall": "PT5S"}}, "survive.stall: 'PT5S' does not match"),
        ({"survive": {"stall": 5}}, "survive.stall: 5 is not of type 'string'"),
        ({"data": {}}, "data: 'train' is a required property"),
        ({"loss": {"main": {"cal": "m:loss"}}}, "loss: {'main': {'cal': 'm:loss'}} is not valid"),
        ({"memory": "rekompute"}, "memory: 'rekompute' is not valid"),
        ({"cluster": {"slowdwn": 2.0}}, "cluster: {'slowdwn': 2.0} is not valid"),
    ],
)
def test_mistakes_of_one_key_are_found(changes: Mapping[str, Any], words: str) -> None:
    (mistake,) = mistakes({**LEAST, **changes})
    assert words in mistake


@pytest.mark.parametrize("key", LEAST)
def test_keys_without_a_default_are_required(key: str) -> None:
    job = {name: value for name, value in LEAST.items() if name != key}
    assert mistakes(job) == [f": '{key}' is a required property"]
