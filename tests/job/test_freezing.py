"""The section `freeze` of a job: what it accepts, and the sentence for what it does not."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import yaml

from hetpipe.decide.elastic.caching import wants_cache
from hetpipe.errors import JobError
from hetpipe.job.model import Job

LEAST: dict[str, Any] = {
    "model": "m:build",
    "data": {"train": "m:data"},
    "optimizer": {"name": "SGD", "lr": 0.1},
    "epochs": 9,
}


def job(freeze: dict[str, Any], **more: Any) -> Job:
    return Job(**LEAST, freeze=freeze, **more)


def reading(freeze: dict[str, Any], **data: Any) -> Job:
    return Job(**{**LEAST, "data": {**LEAST["data"], **data}}, freeze=freeze)


@pytest.mark.parametrize(
    ("given", "exact"),
    [("1/3", Fraction(1, 3)), (0.1, Fraction(1, 10)), ("0.25", Fraction(1, 4)), ("2/6", Fraction(1, 3))],
)
def test_alpha_is_an_exact_fraction(given: object, exact: Fraction) -> None:
    section = job({"every": "epoch", "alpha": given}).freeze
    assert section.alpha is not None and Fraction(section.alpha) == exact


@pytest.mark.parametrize(("given", "mode"), [("on", "on"), ("off", "off"), ("'on'", "on"), ("auto", "auto")])
def test_the_mode_of_the_cache_needs_no_quotation_marks(given: str, mode: str) -> None:
    assert job({"layers": 1, **yaml.safe_load(f"cache: {given}")}).freeze.cache == mode


def test_a_script_decides_the_moves_as_well() -> None:
    script = {"script": [{"at": {"clock": 2}, "do": "freeze", "layers": 1}]}
    with pytest.raises(JobError, match=r"freeze.recut: changes plans where layers freeze, but `elastic.script`"):
        job({"recut": True}, elastic=script)
    assert job({"recut": True, "layers": 1}).freeze.recut


@pytest.mark.parametrize(
    ("freeze", "words"),
    [
        ({"every": "epoch", "alpha": "1/1"}, "freeze.alpha: is 1/1; it must be above 0 and below 1"),
        ({"every": "epoch", "alpha": 0}, "freeze.alpha: is 0; it must be above 0 and below 1"),
        ({"every": "epoch", "alpha": 1.5}, "freeze.alpha: is 1.5; it must be above 0 and below 1"),
        ({"every": "epoch", "alpha": "1/0"}, "freeze.alpha: must be a number or a fraction between 0 and 1"),
        ({"every": "epoch", "alpha": "-1/3"}, "freeze.alpha: must be a number or a fraction between 0 and 1"),
        ({"every": "epoch", "alpha": "1e-999999999"}, "freeze.alpha: must be a number or a fraction between 0 and 1"),
        ({"every": "epoch", "alpha": "a third"}, "freeze.alpha: must be a number or a fraction between 0 and 1"),
        ({"alpha": "1/3"}, "freeze.alpha: and one of `every` and `waves` go together"),
        ({"waves": 50}, "freeze.alpha: and one of `every` and `waves` go together"),
        ({"every": "epoch", "waves": 5, "alpha": "1/3"}, "freeze.waves: is 5, but `every` is epoch"),
        (
            {"every": "epoch", "alpha": "1/3", "schedule": [{"epoch": 1, "layers": 2}]},
            "freeze.alpha: lets the norms of gradients decide, but `freeze.schedule` does",
        ),
        (
            {"schedule": [{"epoch": 2, "layers": 2}, {"epoch": 2, "layers": 3}]},
            "freeze.schedule: entry 2 is at epoch 2, after one at epoch 2; give them in order",
        ),
        (
            {"schedule": [{"epoch": 1, "layers": 2}, {"epoch": 2, "layers": 2}]},
            "freeze.schedule: entry 2 freezes 2 layers, after one that freezes 2: frozen layers stay frozen",
        ),
        (
            {"layers": 2, "schedule": [{"epoch": 1, "layers": 2}]},
            "freeze.schedule: entry 1 freezes 2 layers, but `layers` freezes 2 from the start",
        ),
        ({"layers": -1}, "freeze.layers: "),
        ({"compress": True}, "freeze.compress: needs layers that freeze"),
        ({"layers": 1, "mode": "off"}, "freeze.mode: "),
    ],
)
def test_what_cannot_be(freeze: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        job(freeze)
    assert any(problem.startswith(words) for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sync": {"kind": "none"}}, "freeze.compress: makes several virtual workers of one"),
        ({"sync": {"minibatches_per_wave": "proportional"}}, "freeze.compress: needs one number of minibatches"),
        ({"memory": "auto"}, "freeze.compress: keeps the memory policies of layers"),
        ({"storage": "s3://bucket"}, "freeze.compress: takes over states from files"),
        (
            {"elastic": {"script": [{"at": {"clock": 2}, "do": "freeze", "layers": 1}]}},
            "freeze.compress: changes plans where layers freeze, but `elastic.script` decides all changes",
        ),
    ],
)
def test_pipelines_that_cannot_be_compressed(more: dict[str, Any], words: str) -> None:
    freeze: dict[str, Any] = {"compress": True, "every": "epoch", "alpha": "1/3"}
    with pytest.raises(JobError) as caught:
        job(freeze, **more)
    assert any(problem.startswith(words) for problem in caught.value.problems), caught.value.problems


def test_norms_do_not_decide_beside_a_script() -> None:
    script = [{"at": {"clock": 4}, "do": "freeze", "layers": 2}]
    with pytest.raises(JobError, match=r"freeze\.alpha: lets the norms .* but `elastic\.script` does"):
        job({"every": "epoch", "alpha": "1/3"}, elastic={"script": script})
    with pytest.raises(JobError, match=r"freeze\.schedule: cannot be combined with `elastic\.script`"):
        job({"schedule": [{"epoch": 1, "layers": 1}]}, elastic={"script": script})


@pytest.mark.parametrize(
    ("freeze", "data", "message"),
    [
        ({}, {"shuffle": False}, "no layer freezes"),
        ({"layers": 1, "mode": "train"}, {"shuffle": False}, r"`freeze\.mode: train`"),
    ],
)
def test_a_cache_that_would_be_of_no_use(freeze: dict[str, Any], data: dict[str, Any], message: str) -> None:
    """Is rejected if it is on; `auto`, the default, is off."""
    with pytest.raises(JobError, match=rf"freeze\.cache: is on, but .*{message}"):
        reading({**freeze, "cache": "on"}, **data)
    assert not wants_cache(reading(freeze, **data), ["n0"])


def test_where_a_cache_is_asked() -> None:
    nodes = ["n0", "n1"]
    assert wants_cache(reading({"layers": 1}, shuffle=False), nodes)
    assert wants_cache(reading({"layers": 1, "cache": "on"}, shuffle=False), nodes)
    assert not wants_cache(reading({"layers": 1, "cache": "off"}, shuffle=False), nodes)
    assert wants_cache(reading({"layers": 1}, sampler="model:in_batches"), nodes)


def test_shuffled_samples_come_back_on_any_node() -> None:
    """So few minibatches have all of theirs on one; `auto` asks for no cache there."""
    assert wants_cache(reading({"layers": 1}), ["n0", "n0"])
    assert not wants_cache(reading({"layers": 1}), ["n0", "n1"])
    assert wants_cache(reading({"layers": 1, "cache": "on"}), ["n0", "n1"])
