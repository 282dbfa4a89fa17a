"""Keys about updates, and what of a job does not go together: every mistake with its path, a reason and a way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.errors import JobError
from hetpipe.job.file import Job, LrScheduleSpec, load_job
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.plan import VirtualWorkerPlan
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, WeightPolicy, policies_where
from hetpipe.values.sync import SyncSpec

MINIMAL: dict[str, Any] = {
    "model": "model:build",
    "loss": "torch.nn.functional:cross_entropy",
    "data": {"train": "model:train_data"},
    "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
    "epochs": 3,
    "workers": {"stages": 2},
}


def job(**changes: Any) -> Job:
    return Job(**{**MINIMAL, **changes})


def problems(**changes: Any) -> tuple[str, ...]:
    """What a job that differs from MINIMAL by `changes` is refused with."""
    with pytest.raises(JobError) as caught:
        job(**changes)
    return caught.value.problems


def sgd(**arguments: Any) -> dict[str, Any]:
    return {"optimizer": {"name": "SGD", **arguments}}


class TestShortForms:
    @pytest.mark.parametrize("kind", ["wsp", "bsp", "asp", "none"])
    def test_a_word_is_the_kind(self, kind: str) -> None:
        assert job(sync=kind) == job(sync={"kind": kind})

    def test_allreduce(self) -> None:
        assert job(sync="allreduce", weights="flush").sync.kind == "allreduce"

    def test_none_is_text_in_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(MINIMAL) + "sync: none\n", encoding="utf-8")
        assert load_job(path) == job(sync={"kind": "none"})

    def test_a_mistake_stands_where_the_word_stands(self) -> None:
        assert problems(sync="nne")[0].startswith(
            "sync: must be wsp, bsp, asp, none or allreduce (did you mean `none`?"
        )
        assert problems(sync="none", workers={"count": 2})[0].startswith("sync: is none, which is for one virtual")


@pytest.mark.parametrize(("kind", "weights"), [("none", "wave"), ("allreduce", "flush")])
def test_without_shards_nothing_is_bounded_or_combined(kind: str, weights: str) -> None:
    made = job(sync={"kind": kind, "deterministic": True}, weights=weights)
    assert (made.sync.D, made.sync.combine, made.has_shards) == (None, None, False)
    assert made.sync_spec() == SyncSpec(4, staleness=None, combine="sum", deterministic=False, weights=weights)  # type: ignore[arg-type]
    assert job(weights=weights).has_shards


class TestAllowed:
    @pytest.mark.parametrize("weights", WEIGHT_POLICIES)
    def test_every_schedule_of_every_policy(self, weights: WeightPolicy) -> None:
        assert job(weights=weights).order == POLICIES[weights].schedules[0]
        for schedule in POLICIES[weights].schedules:
            assert job(weights=weights, schedule=schedule).order == schedule

    @pytest.mark.parametrize("weights", WEIGHT_POLICIES)
    @pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
    def test_as_many_minibatches_as_it_needs(self, weights: WeightPolicy, num_stages: int) -> None:
        least = POLICIES[weights].least_minibatches_per_wave(num_stages)
        for stages in (num_stages, [[2], [1] * num_stages]):
            job(weights=weights, workers={"stages": stages}, sync={"minibatches_per_wave": least})
            if least > 1:
                (problem,) = problems(
                    weights=weights, workers={"stages": stages}, sync={"minibatches_per_wave": least - 1}
                )
                assert problem.endswith(f"`sync.minibatches_per_wave` is {least - 1}; set it to {least} or more")

    @pytest.mark.parametrize("weights", WEIGHT_POLICIES)
    def test_the_planner_takes_no_more_stages_than_that(self, weights: WeightPolicy) -> None:
        assert not job(weights=weights, workers=None, sync={"minibatches_per_wave": 1}).is_planned

    def test_the_planner_makes_one_virtual_worker(self) -> None:
        assert not job(sync="none", workers=None).is_planned
        assert not job(sync="none", workers={"devices": [["n0/0", "n0/1"]]}).is_planned

    @pytest.mark.parametrize("weights", WEIGHT_POLICIES)
    def test_clipping(self, weights: WeightPolicy) -> None:
        job(weights=weights, gradients={"clip": "stage", "max_norm": 1})
        job(weights=weights, gradients={"clip": "global"})
        if POLICIES[weights].clips_globally:
            job(weights=weights, gradients={"max_norm": 1.5})

    @pytest.mark.parametrize("weights", policies_where(lambda policy: not policy.one_update_per_wave))
    def test_accumulation_of_every_divisor(self, weights: WeightPolicy) -> None:
        for accumulate in (1, 2, 3, 6):
            job(weights=weights, sync={"minibatches_per_wave": 6}, gradients={"accumulate": accumulate})

    @pytest.mark.parametrize("weights", policies_where(lambda policy: policy.one_update_per_wave))
    def test_allreduce(self, weights: WeightPolicy) -> None:
        for workers in ({"count": 3, "stages": 2}, {"stages": [[2, 1], [2, 1]]}, {"stages": 2}):
            job(sync="allreduce", weights=weights, workers=workers)

    def test_updates_of_whole_waves_may_be_summed(self) -> None:
        assert job(weights="flush", workers={"count": 2, "stages": 2}, sync={"combine": "sum"}).num_workers == 2

    def test_waves_of_their_own(self) -> None:
        made = job(workers={"count": 3, "stages": [[1, 1], [2], [1, 1]]}, sync={"minibatches_per_wave": [4, 1, 2]})
        assert [made.minibatches_of(VirtualWorkerIndex(vw)) for vw in range(3)] == [4, 1, 2]
        assert made.sync_spec().minibatches_per_wave == 1
        assert Job.model_validate(made.model_dump(mode="json")) == made
        added = VirtualWorkerPlan(VirtualWorkerIndex(3), (), 5)
        assert made.sync_spec(added).minibatches_per_wave == 5
        assert made.minibatches_by_worker([added]) == {3: 5}
        strict = {"count": 2, "stages": [[1, 1, 1], [3]]}
        assert job(weights="stash", workers=strict, sync={"minibatches_per_wave": [3, 1]}).is_planned

    def test_groups_and_schedules(self, tmp_path: Path) -> None:
        text = """
optimizer:
  name: AdamW
  lr: 1e-3
  groups:
    - {parameters: ["*.bias", "norm*"], weight_decay: 0.0}
    - {parameters: [embedding.weight], lr: 1e-4, betas: [0.8, 0.9]}
lr_schedule:
  name: SequentialLR
  milestones: [100]
  schedulers: [{name: LinearLR, total_iters: 100}, {name: CosineAnnealingLR, T_max: 900}]
"""
        values = {key: value for key, value in MINIMAL.items() if key != "optimizer"}
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(values) + text, encoding="utf-8")
        made = load_job(path)
        assert [(group.parameters, group.arguments) for group in made.optimizer.groups] == [
            (("*.bias", "norm*"), {"weight_decay": 0.0}),
            (("embedding.weight",), {"lr": 1e-4, "betas": (0.8, 0.9)}),
        ]
        assert made.optimizer.arguments == {"lr": 0.001}
        assert made.lr_schedule is not None
        assert made.lr_schedule.arguments == {"milestones": (100,)}
        assert [(inner.name, inner.arguments) for inner in made.lr_schedule.schedulers] == [
            ("LinearLR", {"total_iters": 100}),
            ("CosineAnnealingLR", {"T_max": 900}),
        ]


NO_SGD = "weights: is spectrain, which predicts with the momentum of SGD, but"

BAD_KEYS: list[tuple[dict[str, Any], str]] = [
    # Values.
    (
        {"weights": "pipedream"},
        "weights: must be wave, stash, vertical, double_buffer, flush, predict or spectrain, not",
    ),
    (
        {"weights": "doublebuffer"},
        "weights: must be wave, stash, vertical, double_buffer, flush, predict or spectrain (",
    ),
    ({"weights": 2}, "weights: must be wave, stash, vertical, double_buffer, flush, predict or spectrain, not 2"),
    ({"schedule": "gpip"}, "schedule: must be auto, 1f1b, fifo or gpipe (did you mean `gpipe`?), not the text 'gpip'"),
    ({"gradients": 2}, "gradients: must be a mapping, not 2"),
    ({"gradients": {"accumulate": 0}}, "gradients.accumulate: must be at least 1, not 0"),
    ({"gradients": {"max_norm": 0}}, "gradients.max_norm: must be more than 0, not 0"),
    ({"gradients": {"max_norm": float("inf")}}, "gradients.max_norm: must be a finite number, not inf"),
    ({"gradients": {"max_norm": "1"}}, "gradients.max_norm: must be a number, not the text '1'; remove the quotes"),
    ({"gradients": {"clip": "value"}}, "gradients.clip: must be global or stage, not the text 'value'"),
    ({"gradients": {"maxnorm": 1}}, "gradients.maxnorm: unknown key; did you mean `max_norm`?"),
    ({"prediction": {"decay": False}}, "prediction.decay: unknown key; did you mean `include_decay`?"),
    ({"prediction": {"include_decay": 1}}, "prediction.include_decay: must be true or false, not 1"),
    (
        {"lr_schedule": "StepLR"},
        "lr_schedule: must be a mapping, not the text 'StepLR'; write a mapping, for example `lr",
    ),
    ({"lr_schedule": {"T_max": 3}}, "lr_schedule.name: is missing; add it, for example `name: CosineAnnealingLR`"),
    ({"lr_schedule": {"name": "A", "T_max": float("nan")}}, "lr_schedule.T_max: must be a finite number, not nan"),
    ({"lr_schedule": {"name": "A", "after": {"name": "B"}}}, "lr_schedule.after: an argument is a number, text, true"),
    ({"lr_schedule": {"name": "A", "schedulers": {"name": "B"}}}, "lr_schedule.schedulers: must be a list, not a mapp"),
    ({"lr_schedule": {"name": "A", "schedulers": [{"T": 1}]}}, "lr_schedule.schedulers[0].name: is missing; add it"),
    ({"lr_schedule": {"name": "A", "schedulers": ["B"]}}, "lr_schedule.schedulers[0]: must be a mapping, not the text"),
    (
        {"lr_schedule": {"name": "A", "schedulers": [{"name": "B"}, {"name": "C", "gamma": float("inf")}]}},
        "lr_schedule.schedulers[1].gamma: must be a finite number, not inf",
    ),
    (
        sgd(groups={"parameters": ["a"]}),
        "optimizer.groups: must be a list, not a mapping; write a list, for example `gr",
    ),
    (
        sgd(groups=[{"lr": 0.1}]),
        'optimizer.groups[0].parameters: is missing; add it, for example `parameters: ["*.bias"]',
    ),
    (sgd(groups=[{"parameters": [], "lr": 1}]), "optimizer.groups[0].parameters: is an empty list; give at least one"),
    (sgd(groups=[{"parameters": "*.bias", "lr": 1}]), "optimizer.groups[0].parameters: must be a list, not the text"),
    (sgd(groups=[{"parameters": ["a", ""], "lr": 1}]), "optimizer.groups[0].parameters[1]: is an empty pattern, which"),
    (sgd(groups=[{"parameters": [3], "lr": 1}]), "optimizer.groups[0].parameters[0]: must be text, not 3; put it in q"),
    (sgd(groups=[{"parameters": ["a"]}]), "optimizer.groups[0]: changes nothing for its parameters; give an argument"),
    (sgd(groups=[{"parameters": ["a"], "lr": float("inf")}]), "optimizer.groups[0].lr: must be a finite number, not "),
    (sgd(groups=[{"parameters": ["a"], "lr": {"b": 1}}]), "optimizer.groups[0].lr: an argument is a number, text"),
    # Orders.
    (
        {"schedule": "gpipe"},
        (
            "schedule: is gpipe, but `gpipe` drains the pipeline after each wave, which is what `weights: "
            "flush` is for; use auto, 1f1b or fifo"
        ),
    ),
    (
        {"weights": "double_buffer", "schedule": "fifo"},
        (
            "schedule: is fifo, but the weight versions of `double_buffer` are defined by the strict 1F1B "
            "order; use auto or 1f1b"
        ),
    ),
    # Minibatches per wave.
    (
        {"weights": "stash", "workers": {"stages": 6}},
        (
            "weights: is stash, which needs as many minibatches per wave as `workers.stages` has stages, 6, but "
            "`sync.minibatches_per_wave` is 4 by default; set it to 6 or more"
        ),
    ),
    (
        {"weights": "predict", "workers": {"stages": [[1], [1, 1, 1]]}, "sync": {"minibatches_per_wave": 2}},
        (
            "weights: is predict, which needs as many minibatches per wave as `workers.stages` has stages, 3, "
            "but `sync.minibatches_per_wave` is 2; set it to 3 or more"
        ),
    ),
    # One virtual worker by itself.
    ({"sync": {"kind": "none", "D": 0}}, "sync.D: is 0, but `none` has no staleness bound; remove D or use kind: wsp"),
    (
        {"sync": {"kind": "none", "combine": "mean"}},
        "sync.combine: is mean, but under `none` there are no other virtual",
    ),
    (
        {"sync": "none", "workers": {"stages": [[1], [1]]}},
        (
            "sync: is none, which is for one virtual worker, but `workers.count` is 2; use wsp or allreduce, "
            "or one virtual worker"
        ),
    ),
    (
        {"sync": {"kind": "none"}, "workers": {"devices": [["n0/0"], ["n0/1"]]}},
        "sync.kind: is none, which is for one virtual worker, but `workers.devices` is 2; use wsp or allreduce",
    ),
    (
        {"sync": "none", "parameter_servers": {"count": 2}},
        (
            "parameter_servers.count: is 2, but under `none` only the stages hold the weights, and one process "
            "keeps the clock; remove it"
        ),
    ),
    (
        {"sync": "none", "parameter_servers": {"placement": "round_robin"}},
        "parameter_servers.placement: is round_robin, but under `none` only the stages hold the weights",
    ),
    # Equal replicas.
    (
        {"workers": {"count": 2, "stages": 2}, "sync": {"minibatches_per_wave": [4, 2, 1]}},
        (
            "sync.minibatches_per_wave: has 3 numbers, but there are 2 virtual workers; give one for each, or one "
            "number for all"
        ),
    ),
    (
        {"workers": {"stages": "auto"}, "sync": {"minibatches_per_wave": [4, 2]}},
        (
            "sync.minibatches_per_wave: has one number for each virtual worker, which requires `workers.stages` with "
            "the stages of each; give them, or one number, or auto, or proportional"
        ),
    ),
    (
        {"workers": {"count": 2, "stages": 2}, "sync": {"minibatches_per_wave": "proportional"}},
        (
            "sync.minibatches_per_wave: is proportional, which requires `workers.stages: auto`, as the planner "
            "predicts the speed of stages; give a list with one number for each virtual worker, or one number"
        ),
    ),
    (
        {"workers": {"stages": "auto"}, "sync": {"kind": "none", "minibatches_per_wave": "proportional"}},
        (
            "sync.minibatches_per_wave: is proportional, but `sync.kind` is none, under which no virtual workers of "
            "different speeds exchange waves; use auto or one number, or wsp, bsp or asp"
        ),
    ),
    (
        {"weights": "stash", "workers": {"stages": [[1, 1, 1], [1, 1]]}, "sync": {"minibatches_per_wave": [3, 1]}},
        (
            "weights: is stash, which needs as many minibatches per wave as `workers.stages` has stages, 2, but "
            "`sync.minibatches_per_wave` is 1; set it to 2 or more"
        ),
    ),
    (
        {
            "gradients": {"accumulate": 2},
            "workers": {"stages": [[1], [1]]},
            "sync": {"minibatches_per_wave": [4, 3]},
        },
        "gradients.accumulate: is 2, which does not divide `sync.minibatches_per_wave`, 3",
    ),
    (
        {"sync": "allreduce"},
        (
            "weights: is wave, which makes an update per minibatch, but `allreduce` averages the gradients of "
            "whole waves; use double_buffer or flush, or another `sync.kind`"
        ),
    ),
    ({"sync": "allreduce", "weights": "spectrain"}, "weights: is spectrain, which makes an update per minibatch, but"),
    (
        {"sync": {"kind": "allreduce", "D": 4}, "weights": "flush"},
        "sync.D: is 4, but `allreduce` has no staleness bound; remove D or use kind: wsp",
    ),
    (
        {"sync": {"kind": "allreduce", "combine": "sum"}, "weights": "flush"},
        "sync.combine: is sum, but `allreduce` averages gradients over all samples; remove it",
    ),
    (
        {"sync": "allreduce", "weights": "flush", "workers": None},
        (
            "sync: is allreduce, which requires equally cut virtual workers, but `workers.stages: auto` "
            "plans each one separately; give their number, for example `workers: {count: 2, stages: 2}`"
        ),
    ),
    (
        {"sync": "allreduce", "weights": "flush", "workers": {"stages": [[2, 1], [1, 2]]}},
        (
            "sync: is allreduce, which requires equally cut virtual workers, but the lists in "
            "`workers.stages` differ; give the same list for each, or use wsp"
        ),
    ),
    (
        {"sync": "allreduce", "weights": "flush", "parameter_servers": {"count": 3}},
        "parameter_servers.count: is 3, but under `allreduce` only the stages hold the weights",
    ),
    # Gradients.
    (
        {"weights": "flush", "gradients": {"accumulate": 2}},
        (
            "gradients.accumulate: is 2, but flush makes one update per wave and thus accumulates "
            "`sync.minibatches_per_wave`, 4, minibatches; remove it, or use another policy"
        ),
    ),
    (
        {"weights": "double_buffer", "gradients": {"accumulate": 3}},
        "gradients.accumulate: is 3, but double_buffer makes",
    ),
    (
        {"gradients": {"accumulate": 4}, "sync": {"minibatches_per_wave": 6}},
        (
            "gradients.accumulate: is 4, which does not divide `sync.minibatches_per_wave`, 6, and a wave "
            "contains whole updates; use 1, 2, 3 or 6, or another N"
        ),
    ),
    (
        {"weights": "stash", "gradients": {"max_norm": 1.0}},
        (
            "gradients.clip: is global, but under stash every step would wait for the norms of all stages, one "
            "minibatch at a time; use clip: stage, or weights: wave, vertical, double_buffer or flush"
        ),
    ),
    ({"weights": "predict", "gradients": {"max_norm": 1.0}}, "gradients.clip: is global, but under predict every step"),
    ({"weights": "spectrain", "gradients": {"max_norm": 1.0}}, "gradients.clip: is global, but under spectrain every"),
    # Precision.
    ({"precision": "bfloat16"}, "precision: must be fp32"),
    (
        {"weights": "predict", "precision": "bf16"},
        (
            "precision: is bf16, but under predict a backward reads other weights than its forward, and autocast keeps "
            "the forward's, cast to bfloat16; use fp32, or weights: wave, stash, vertical, double_buffer or flush"
        ),
    ),
    (
        {"weights": "stash", "precision": "fp16"},
        (
            "precision: is fp16, but under stash every step would wait until all stages know whether a gradient "
            "overflowed, one minibatch at a time; use bf16, or weights: wave, vertical, double_buffer or flush"
        ),
    ),
    ({"weights": "predict", "precision": "fp16"}, "precision: is fp16, but under predict a backward reads other"),
    ({"weights": "spectrain", "precision": "bf16"}, "precision: is bf16, but under spectrain a backward reads other"),
    # Prediction.
    (
        {"weights": "stash", "prediction": {"include_decay": False}},
        "prediction: applies to weights: predict, but `weights` is stash; remove it",
    ),
    (
        {"weights": "spectrain", "optimizer": {"name": "Adam"}},
        f"{NO_SGD} `optimizer.name` is Adam; use SGD with moment",
    ),
    (
        {"weights": "spectrain", **sgd()},
        f"{NO_SGD} `optimizer.momentum` is 0; set it, for example `momentum: 0.9`, or use weights: predict",
    ),
    (
        {"weights": "spectrain", **sgd(momentum=0.9, groups=[{"parameters": ["a"], "momentum": 0.0}])},
        f"{NO_SGD} `optimizer.groups[0].momentum` is 0; set it",
    ),
    (
        {"weights": "spectrain", **sgd(groups=[{"parameters": ["a"], "momentum": 0.9}])},
        f"{NO_SGD} `optimizer.momentum` is 0; set it",
    ),
]


@pytest.mark.parametrize(
    ("changes", "expected"), BAD_KEYS, ids=[expected.partition(": ")[0] for _, expected in BAD_KEYS]
)
def test_one_mistake_one_problem(changes: dict[str, Any], expected: str) -> None:
    found = problems(**changes)
    assert len(found) == 1, found
    assert found[0].startswith(expected), found[0]


class TestAllAtOnce:
    def test_every_contradiction_beside_every_other_mistake(self) -> None:
        found = problems(
            optimizer={"name": "Adam"},
            workers={"count": 2, "stages": 6},
            sync="none",
            weights="spectrain",
            schedule="gpipe",
            gradients={"accumulate": 3, "max_norm": 1},
            prediction={"include_decay": False},
            parameter_servers={"count": 2, "placement": "round_robin"},
            cluster=3,
            checkpoint={"keep": 0, "often": True},
        )
        assert [problem.partition(": ")[0] for problem in found] == [
            "cluster",
            "sync",
            "weights",
            "weights",
            "schedule",
            "gradients.accumulate",
            "gradients.clip",
            "prediction",
            "parameter_servers.count",
            "parameter_servers.placement",
            "checkpoint.keep",
            "checkpoint.often",
        ]

    def test_a_wrong_key_is_not_compared(self) -> None:
        assert [problem.partition(": ")[0] for problem in problems(sync="nne", weights="stash", batch_size=0)] == [
            "batch_size",
            "sync",
        ]

    def test_a_group_has_its_mistakes_beside_those_of_the_schedule(self) -> None:
        found = problems(
            **sgd(groups=[{"parameters": [], "lr": float("nan")}, {"parameters": ["a"]}]),
            lr_schedule={"name": "A", "T_max": float("inf"), "schedulers": [{}]},
        )
        assert [problem.partition(": ")[0] for problem in found] == [
            "optimizer.groups[0].parameters",
            "optimizer.groups[0].lr",
            "optimizer.groups[1]",
            "lr_schedule.schedulers[0].name",
            "lr_schedule.T_max",
        ]

    def test_the_last_key_sees_all_others(self) -> None:
        # Contradictions are looked for where the last key is checked.
        assert list(Job.model_fields)[-1] == "checkpoint"


def _workers(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    cut = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    count = 1 if kind == "none" else draw(st.integers(1, 3))
    return draw(st.sampled_from([{"count": count, "stages": len(cut)}, {"stages": [cut] * count}]))


@st.composite
def good_jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Jobs in which all keys about updates go together."""
    weights = draw(st.sampled_from(WEIGHT_POLICIES))
    kinds = ["wsp", "bsp", "asp", "none"] + ["allreduce"] * (POLICIES[weights].one_update_per_wave)
    kind = draw(st.sampled_from(kinds))
    n = draw(st.sampled_from([4, 6]))
    numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(), st.booleans())
    schedule = {"name": "StepLR", "gamma": draw(numbers)}
    group = {"parameters": draw(st.lists(st.text(min_size=1), min_size=1)), "lr": draw(numbers)}
    return {
        **MINIMAL,
        "workers": _workers(draw, kind),
        "optimizer": {**MINIMAL["optimizer"], "groups": draw(st.sampled_from([[], [group], [group, group]]))},
        "sync": kind if n == 4 and draw(st.booleans()) else {"kind": kind, "minibatches_per_wave": n},
        "weights": weights,
        "schedule": draw(st.sampled_from(["auto", *POLICIES[weights].schedules])),
        "gradients": {
            "accumulate": 1 if POLICIES[weights].one_update_per_wave else draw(st.sampled_from([1, 2])),
            "max_norm": draw(st.one_of(st.none(), st.floats(0.1, 9))),
            "clip": "stage" if not POLICIES[weights].clips_globally else draw(st.sampled_from(["global", "stage"])),
        },
        "lr_schedule": draw(st.sampled_from([None, schedule, {"name": "ChainedScheduler", "schedulers": [schedule]}])),
        "prediction": {"include_decay": weights != "predict" or draw(st.booleans())},
    }


@settings(max_examples=15)
@given(good_jobs())
def test_json_and_back(values: dict[str, Any]) -> None:
    made = Job(**values)
    dumped = json.loads(json.dumps(made.model_dump(mode="json")))
    assert Job.model_validate(dumped) == load_job(dumped) == load_job(made) == load_job(values) == made
    assert made.order == made.model_copy(update={"schedule": made.order}).order


def test_schedules_may_be_nested() -> None:
    spec = LrScheduleSpec.model_validate({"name": "A", "schedulers": ({"name": "B", "schedulers": ({"name": "C"},)},)})
    assert spec.schedulers[0].schedulers[0].name == "C"


class TestReadingAhead:
    def test_workers_read_two_minibatches_ahead_each(self) -> None:
        data = Job(**{**MINIMAL, "data": {**MINIMAL["data"], "num_workers": 4}}).data
        assert (data.num_workers, data.prefetch_factor, data.pin_memory) == (4, 2, False)
        assert Job(**MINIMAL).data.prefetch_factor is None

    def test_nobody_to_read_ahead(self) -> None:
        assert problems(data={**MINIMAL["data"], "prefetch_factor": 4}) == (
            (
                "data.prefetch_factor: is 4, but `num_workers` is 0, so nothing is read ahead; set `num_workers`, for "
                "example 4, or remove it"
            ),
        )

    def test_one_order_of_the_samples(self) -> None:
        assert problems(data={**MINIMAL["data"], "shuffle": False, "sampler": "model:by_length"}) == (
            "data.sampler: is given beside `shuffle: false`, and both state the order of the samples; remove one",
        )

    @pytest.mark.parametrize("order", [{"shuffle": False}, {"sampler": "model:by_length"}])
    def test_samples_of_nodes_are_shuffled(self, order: dict[str, Any]) -> None:
        (problem,) = problems(data={**MINIMAL["data"], **order, "division": "by_node"})
        assert problem.startswith("data.division: is by_node, which shuffles the samples of each node, but ")

    def test_too_many(self) -> None:
        (problem,) = problems(data={**MINIMAL["data"], "num_workers": 257, "prefetch_factor": 2})
        assert problem.startswith("data.num_workers: ")


class TestEvaluationsWithinEpochs:
    def test_they_need_data(self) -> None:
        assert problems(evaluate={"every_waves": 5}) == (
            (
                "evaluate.every_waves: is 5, but there is no evaluation data; add `data.eval`, for example "
                "`eval: model:eval_data`, or remove it"
            ),
        )

    def test_a_bound_needs_them(self) -> None:
        data = {**MINIMAL["data"], "eval": "model:eval_data"}
        assert problems(data=data, evaluate={"max_batches": 3}) == (
            (
                "evaluate.max_batches: is 3, which limits evaluations within epochs, but there are none; add "
                "`every_waves`, for example 50, or remove it"
            ),
        )

    @pytest.mark.parametrize("key", ["every_waves", "max_batches"])
    def test_counts_are_at_least_one(self, key: str) -> None:
        data = {**MINIMAL["data"], "eval": "model:eval_data"}
        (problem,) = problems(data=data, evaluate={"every_waves": 5, key: 0})
        assert problem.startswith(f"evaluate.{key}: ")

    def test_a_name_that_is_no_key_is_refused(self) -> None:
        (problem,) = problems(evaluate={"every_epochs": 1})
        assert problem.startswith("evaluate.every_epochs: unknown key")
