"""Overrides of a job: texts as `--set` takes them, and mappings as Python callers write them."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from hetpipe.errors import JobError
from hetpipe.job.file import Job, load_job, parse_set

FILE: dict[str, Any] = {
    "name": "digits",
    "model": "model:build",
    "loss": "losses:mean",
    "data": {"train": "model:train_data", "eval": "model:eval_data"},
    "metrics": {"accuracy": "metrics:accuracy"},
    "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
    "epochs": 3,
    "sync": {"kind": "wsp", "D": 1, "minibatches_per_wave": 4},
    "workers": {"count": 2, "stages": 2},
    "cluster": {"devices": [{"slowdown": 1.0}, {"slowdown": 1.5}]},
}


def with_changes(**changes: Any) -> dict[str, Any]:
    return {**FILE, **changes}


class TestParseSet:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("sync.D=4", ("sync.D", 4)),
            (" epochs = 2", ("epochs", 2)),
            ("optimizer.lr=1e-3", ("optimizer.lr", 0.001)),
            ("optimizer.betas=[0.9, 0.95]", ("optimizer.betas", [0.9, 0.95])),
            ("sync.deterministic=true", ("sync.deterministic", True)),
            ("workers.stages=[[2, 2], [3, 1]]", ("workers.stages", [[2, 2], [3, 1]])),
            ("data.eval=null", ("data.eval", None)),
            ("data.eval=", ("data.eval", None)),
            ("model=a:b=c", ("model", "a:b=c")),
            ("metrics.f1=metrics:f1", ("metrics.f1", "metrics:f1")),
            ("cluster={slowdown: 2.0}", ("cluster", {"slowdown": 2.0})),
            ("cluster.emulate_as=T4", ("cluster.emulate_as", "T4")),
            ("sync=none", ("sync", "none")),
            ("lr_schedule.T_max=9", ("lr_schedule.T_max", 9)),
            ("gradients.max_norm=1", ("gradients.max_norm", 1)),
        ],
    )
    def test_good(self, text: str, expected: tuple[str, object]) -> None:
        assert parse_set(text) == expected

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("sync.D", "'sync.D': expected path=value, for example sync.D=4"),
            ("=4", "'=4': expected path=value"),
            ("sync.d=4", "sync.d: unknown key; did you mean `D`?"),
            ("snyc.D=4", "snyc: unknown key; did you mean `sync`?"),
            ("sync..D=4", "sync.: unknown key; use D"),
            ("seed.x=4", "seed.x: `seed` has no nested keys; set it as a whole"),
            ("workers.stages.0=4", "workers.stages.0: `stages` has no nested keys; set it as a whole"),
            ("cluster.devices.0=4", "cluster.devices.0: `devices` has no nested keys; set it as a whole"),
            ("cluster.slow=4", "cluster.slow: unknown key"),
            ("optimizer.betas.x=1", "optimizer.betas.x: `betas` has no nested keys; set it as a whole"),
            ("optimizer.groups.0=1", "optimizer.groups.0: `groups` has no nested keys; set it as a whole"),
            ("lr_schedule.T_max.x=1", "lr_schedule.T_max.x: `T_max` has no nested keys; set it as a whole"),
            ("sync.D=[4", "sync.D: the value '[4' is not valid YAML"),
            ("sync={D: 1, D: 2}", "sync: D: is given twice"),
        ],
    )
    def test_bad(self, text: str, problem: str) -> None:
        with pytest.raises(JobError) as caught:
            parse_set(text)
        assert caught.value.problems[0].startswith(problem)


class TestMerging:
    def test_a_leaf_leaves_its_section_alone(self) -> None:
        job = load_job(FILE, ["sync.D=4", "optimizer.lr=1e-3"])
        assert (job.sync.D, job.sync.minibatches_per_wave) == (4, 4)
        assert job.optimizer.arguments == {"lr": 0.001, "momentum": 0.9}

    def test_nested_and_dotted_mappings_agree(self) -> None:
        assert load_job(FILE, {"sync": {"D": 4}, "epochs": 2}) == load_job(FILE, {"sync.D": 4, "epochs": 2})
        assert load_job(FILE, {"sync": {"D": 4}}) == load_job(FILE, ["sync.D=4"]) == load_job(FILE, ["sync={D: 4}"])

    def test_a_lone_text(self) -> None:
        assert load_job(FILE, "sync.D=4").sync.D == 4

    def test_the_last_one_counts(self) -> None:
        assert load_job(FILE, ["seed=1", "seed=2"]).seed == 2

    def test_null_goes_back_to_the_default(self) -> None:
        job = load_job(FILE, ["data.eval=null", "cluster=null", "sync.D=null"])
        assert (job.data.eval, job.cluster.devices, job.sync.D) == (None, (), 0)

    def test_an_empty_mapping_clears(self) -> None:
        assert load_job(FILE, {"metrics": {}}).metrics == {}
        assert set(load_job(FILE, {"metrics": {"f1": "m:f1"}}).metrics) == {"accuracy", "f1"}

    def test_the_source_is_untouched(self) -> None:
        before = repr(FILE)
        load_job(FILE, ["sync.kind=asp", "minibatches=5", "cluster.slowdown=2.0", "optimizer.name=Adam"])
        assert repr(FILE) == before

    def test_a_job_can_be_the_source(self) -> None:
        job = load_job(Job(**FILE), ["sync.kind=asp", "minibatches=7"])
        assert (job.sync.kind, job.sync.D, job.epochs, job.minibatches) == ("asp", None, None, 7)

    def test_all_mistakes_of_overrides_and_source_together(self) -> None:
        with pytest.raises(JobError) as caught:
            load_job(with_changes(batch_size="x"), ["snyc.D=4", "seed", "schedule=gpipe", "sync.D=-1"])
        assert [problem.partition(": ")[0] for problem in caught.value.problems] == [
            "snyc",
            "'seed'",
            "batch_size",
            "sync.D",
            "schedule",
        ]

    def test_unknown_keys_of_mappings(self) -> None:
        with pytest.raises(JobError, match=r"sync\.d: unknown key; did you mean `D`\?"):
            load_job(FILE, {"sync": {"d": 4}})
        with pytest.raises(JobError, match="epocs: unknown key; did you mean `epochs`"):
            load_job(FILE, {"epocs": 4})


class TestKindOfSynchronisation:
    ALONE: ClassVar = with_changes(workers={"stages": 2})

    @pytest.mark.parametrize("overrides", [["sync=none"], {"sync": "none"}, ["sync.kind=none"], {"sync.kind": "none"}])
    def test_a_word_is_the_kind_and_leaves_the_wave_alone(self, overrides: Any) -> None:
        source = {**self.ALONE, "sync": {"D": 2, "combine": "mean", "minibatches_per_wave": 6}}
        sync = load_job(source, overrides).sync
        assert (sync.kind, sync.D, sync.combine, sync.minibatches_per_wave) == ("none", None, None, 6)

    def test_without_shards_there_is_nothing_to_say_of_them(self) -> None:
        source = with_changes(parameter_servers={"count": 2, "placement": "round_robin"}, weights="flush")
        assert load_job(source, ["sync=allreduce"]).parameter_servers.count == 1
        assert load_job(load_job(source), ["sync=allreduce"]).parameter_servers.placement == "auto"
        with pytest.raises(JobError, match=r"parameter_servers\.count: is 2, but under `allreduce`"):
            load_job(source, ["sync=allreduce", "parameter_servers.count=2"])

    def test_and_back(self) -> None:
        alone = load_job(self.ALONE, ["sync=none"])
        assert load_job(alone, ["sync=wsp"]) == load_job({**self.ALONE, "sync": {"minibatches_per_wave": 4}})

    def test_a_word_in_the_file_stays_when_another_key_is_set(self) -> None:
        sync = load_job({**self.ALONE, "sync": "none"}, ["sync.minibatches_per_wave=3"]).sync
        assert (sync.kind, sync.minibatches_per_wave) == ("none", 3)
        assert load_job({**self.ALONE, "sync": "none"}, ["sync.D=3"]).sync.kind == "wsp"

    def test_several_virtual_workers_are_not_quietly_given_up(self) -> None:
        with pytest.raises(JobError, match=r"sync\.kind: is none, .* `workers.count` is 2; use wsp or allreduce"):
            load_job(FILE, ["sync=none"])

    def test_no_kind(self) -> None:
        with pytest.raises(JobError, match=r"sync\.kind: must be wsp, .*, not a list"):
            load_job(FILE, ["sync.kind=[none]"])


class TestKeysThatExcludeEachOther:
    def test_epochs_and_minibatches_replace_each_other(self) -> None:
        assert load_job(FILE, ["minibatches=9"]).epochs is None
        job = load_job(with_changes(epochs=None, minibatches=9), {"epochs": 2})
        assert (job.epochs, job.minibatches) == (2, None)

    def test_both_as_overrides_contradict(self) -> None:
        with pytest.raises(JobError, match=r"epochs: both epochs \(1\) and minibatches \(2\)"):
            load_job(FILE, ["epochs=1", "minibatches=2"])

    @pytest.mark.parametrize(("kind", "staleness"), [("bsp", 0), ("asp", None)])
    def test_another_kind_drops_the_bound_of_the_file(self, kind: str, staleness: int | None) -> None:
        job = load_job(FILE, [f"sync.kind={kind}"])
        assert (job.sync.kind, job.sync.D, job.sync.minibatches_per_wave) == (kind, staleness, 4)

    def test_but_not_one_that_was_given_too(self) -> None:
        with pytest.raises(JobError, match=r"sync\.D: is 3, but `asp`"):
            load_job(FILE, ["sync.kind=asp", "sync.D=3"])

    def test_wsp_again_keeps_the_bound(self) -> None:
        assert load_job(FILE, ["sync.kind=wsp"]).sync.D == 1

    @pytest.mark.parametrize("kind", ["bsp", "asp"])
    def test_a_bound_makes_it_wsp(self, kind: str) -> None:
        job = load_job(with_changes(sync={"kind": kind}), ["sync.D=3"])
        assert (job.sync.kind, job.sync.D) == ("wsp", 3)

    def test_bound_zero_leaves_bsp_alone(self) -> None:
        assert load_job(with_changes(sync={"kind": "bsp"}), ["sync.D=0"]).sync.kind == "bsp"

    def test_asp_does_not_quietly_give_up_determinism(self) -> None:
        with pytest.raises(JobError, match=r"sync\.deterministic"):
            load_job(with_changes(sync={"deterministic": True}), ["sync.kind=asp"])

    def test_a_policy_alone_picks_its_own_schedule(self) -> None:
        assert load_job(FILE, ["weights=stash"]).order == "1f1b"
        with pytest.raises(JobError, match=r"schedule: is fifo, but .* strict 1F1B order; use auto or 1f1b"):
            load_job(with_changes(schedule="fifo"), ["weights=stash"])
        assert load_job(with_changes(schedule="fifo"), ["weights=stash", "schedule=auto"]).order == "1f1b"

    def test_another_policy_drops_the_prediction_of_the_file(self) -> None:
        source = with_changes(weights="predict", prediction={"include_decay": False})
        assert load_job(source, ["weights=stash"]).prediction.include_decay
        assert load_job(source, ["weights=null"]).weights == "wave"
        assert not load_job(source, ["weights=predict"]).prediction.include_decay
        with pytest.raises(JobError, match="prediction: applies to weights: predict, but `weights` is stash"):
            load_job(source, ["weights=stash", "prediction.include_decay=false"])

    def test_another_schedule_of_the_rate_does_not_inherit_arguments(self) -> None:
        source = with_changes(lr_schedule={"name": "CosineAnnealingLR", "T_max": 9})
        other = load_job(source, ["lr_schedule.name=StepLR", "lr_schedule.step_size=3"]).lr_schedule
        assert other is not None
        assert (other.name, other.arguments) == ("StepLR", {"step_size": 3})
        assert load_job(source, ["lr_schedule.T_max=5"]).lr_schedule != load_job(source).lr_schedule
        assert load_job(source, ["lr_schedule=null"]).lr_schedule is None

    def test_groups_are_replaced_as_a_whole(self) -> None:
        source = with_changes(optimizer={**FILE["optimizer"], "groups": [{"parameters": ["a"], "lr": 1.0}]})
        groups = load_job(source, ["optimizer.groups=[{parameters: [b, c], lr: 0.5}]"]).optimizer.groups
        assert [(group.parameters, group.arguments) for group in groups] == [(("b", "c"), {"lr": 0.5})]
        assert load_job(source, ["optimizer.groups=[]"]).optimizer.groups == ()
        assert load_job(source, ["optimizer.lr=0.2"]).optimizer.groups == load_job(source).optimizer.groups

    def test_explicit_stages_replace_the_count(self) -> None:
        assert load_job(FILE, ["workers.stages=[[1, 3], [2, 2], [4]]"]).workers.count == 3
        assert load_job(FILE, {"workers": {"stages": [[1], [2], [4]]}}).workers.count == 3

    def test_a_number_of_stages_keeps_the_number_of_lists(self) -> None:
        job = load_job(with_changes(workers={"stages": [[2, 2], [3, 1]]}), ["workers.stages=1"])
        assert (job.workers.count, job.workers.stages) == (2, 1)

    def test_leaving_it_to_the_planner_and_back(self) -> None:
        assert load_job(with_changes(cluster=None), ["workers.stages=auto"]).workers.count is None
        planned = with_changes(workers={"stages": "auto"}, cluster=None)
        assert load_job(planned, ["workers.count=3"]).num_devices == 3
        assert load_job(load_job(planned), ["workers.count=3"]).num_devices == 3

    def test_a_count_beside_the_files_lists_is_refused(self) -> None:
        with pytest.raises(JobError, match=r"workers\.count: is 3, but `stages` lists 2"):
            load_job(with_changes(workers={"stages": [[2, 2], [3, 1]]}), ["workers.count=3"])

    def test_another_optimizer_does_not_inherit_arguments(self) -> None:
        assert load_job(FILE, ["optimizer.name=AdamW"]).optimizer.arguments == {}
        assert load_job(FILE, ["optimizer.name=SGD"]).optimizer.arguments == {"lr": 0.1, "momentum": 0.9}
        job = load_job(FILE, {"optimizer": {"name": "AdamW", "lr": 0.01}})
        assert (job.optimizer.name, job.optimizer.arguments) == ("AdamW", {"lr": 0.01})

    @pytest.mark.parametrize("cluster", [FILE["cluster"], FILE["cluster"]["devices"], {"emulate_as": "T4"}, None])
    def test_one_emulation_replaces_the_list(self, cluster: object) -> None:
        devices = load_job(with_changes(cluster=cluster), ["cluster.slowdown=2.0"]).cluster.devices
        assert [(device.slowdown, device.emulate_as) for device in devices] == [(2.0, None)]

    def test_a_list_replaces_one_emulation(self) -> None:
        job = load_job(with_changes(cluster={"slowdown": 2.0}), ["cluster.devices=[{emulate_as: T4}, {}]"])
        assert [device.emulate_as for device in job.cluster.devices] == ["T4", None]

    def test_a_type_replaces_a_slowdown(self) -> None:
        job = load_job(with_changes(cluster={"slowdown": 2.0, "jitter": 0.5}), ["cluster.emulate_as=T4"])
        assert [(d.emulate_as, d.slowdown, d.jitter) for d in job.cluster.devices] == [("T4", None, 0.5)]
