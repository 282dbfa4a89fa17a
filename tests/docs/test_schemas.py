"""The schemas in `docs/schemas` are those of the models, and the examples in the documentation are real."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hetpipe.decide.planner.costs import Costs, MemoryModel, milliseconds, minibatches_per_tick, ticks
from hetpipe.job.schema import DESCRIBED, schema_text
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import DocumentT, parse_document
from hetpipe.values.fit import check_fits
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile
from tests.docs.pages import blocks
from tests.docs.schemas import FOLDER, path_of, undescribed

GIB = 1 << 30


def example(kind: type[DocumentT], language: str) -> DocumentT:
    (block,) = blocks(language)
    return parse_document(kind, block.text, what=str(block))


@pytest.mark.parametrize("name", DESCRIBED)
def test_the_schema_is_fresh(name: str) -> None:
    assert path_of(name).read_text(encoding="utf-8") == schema_text(name), "say: python -m tests.docs.schemas"


def test_no_schema_is_left_over() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(DESCRIBED)


@pytest.mark.parametrize("kind", DESCRIBED.values())
def test_every_key_says_what_it_means(kind: Any) -> None:
    assert undescribed(kind) == []


def test_what_the_catalogue_knows_need_not_be_given() -> None:
    schema = json.loads(schema_text("cluster"))
    assert "required" not in schema["$defs"]["DeviceType"]
    assert schema["required"] == ["device_types", "nodes", "links"]


def test_the_examples_fit_each_other() -> None:
    profile, cluster = example(Profile, "json profile"), example(Cluster, "yaml cluster")
    check_fits(profile, cluster)
    assert {name: kind.memory_bytes for name, kind in cluster.device_types.items()} == {
        "TITAN_V": 12 * GIB,
        "RTX_2060": 6 * GIB,
    }
    assert cluster.link("n1", "n1").bandwidth_bytes_per_second == 7.88e9


def test_the_cluster_for_a_first_run_is_one() -> None:
    assert len(example(Cluster, "yaml cluster of migrating").devices) == 2


def test_the_figures_of_the_example_plan_are_right() -> None:
    costs = Costs(example(Profile, "json profile"), example(Cluster, "yaml cluster"))
    plan = example(PlanDocument, "json plan")
    memory = MemoryModel(minibatches_per_wave=plan.waves[0])
    (worker,) = plan.virtual_workers
    between = costs.cluster.link("n0", "n1")
    for index, stage in enumerate(worker.stages):
        first, last = stage.layers
        receive = costs.receive_ticks(first, last, between if index else None, None if index else between)
        assert stage.receive_ms == milliseconds(receive)
        assert stage.time_ms == milliseconds(costs.compute_ticks(stage.type, first, last) + receive)
        assert stage.memory_bytes == costs.stage_bytes(first, last, stage=index, num_stages=2, memory=memory)
        assert stage.in_flight == memory.in_flight(index, 2)
    times = [ticks(stage.time_ms) for stage in worker.stages]
    samples_per_second = costs.profile.batch_size * minibatches_per_tick(times, memory) * 1e12
    assert worker.samples_per_second == pytest.approx(samples_per_second, rel=1e-6)
    assert plan.predicted.cross_node_bytes_per_minibatch == 2 * costs.profile.layers[1].output_bytes
    (single,) = plan.alternatives
    whole = milliseconds(costs.compute_ticks("TITAN_V", 0, costs.num_layers))
    assert single.samples_per_second == pytest.approx(1000 * costs.profile.batch_size / whole, rel=1e-6)
