"""Loading a job: every mistake is reported at once, under the path at which the user finds it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from hetpipe.errors import JobError, UserError
from hetpipe.job import sections as job_sections
from hetpipe.job import training as job_training
from hetpipe.job.file import Job, load_job
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.run import DeviceConfig
from hetpipe.values.sync import DataSpec, SyncSpec

MINIMAL: dict[str, Any] = {
    "model": "model:build",
    "loss": "torch.nn.functional:cross_entropy",
    "data": {"train": "model:train_data"},
    "optimizer": {"name": "SGD", "lr": 0.1},
    "epochs": 3,
}

YAML = """\
name: digits
model: model:build
loss: losses:mean
data: {train: model:train_data, eval: model:eval_data}
batch_size: 16
epochs: 2
seed: 7
optimizer: {name: AdamW, lr: 1e-3, betas: [0.9, 0.99]}
metrics: {accuracy: hetpipe.pipeline.metrics:accuracy}
workers: {count: 2, stages: [[2, 2], [3, 1]]}
sync: {kind: wsp, D: 1, minibatches_per_wave: 3, combine: mean, deterministic: true}
weights: wave
schedule: 1f1b
parameter_servers: {count: 2, placement: round_robin}
cluster:
  devices: [{slowdown: 2}, {emulate_as: RTX_2060}]
checkpoint: {every_waves: 5, keep: 2}
"""


def problems(**changes: Any) -> tuple[str, ...]:
    """What a job that differs from MINIMAL by `changes` (None removes a key) is refused with."""
    with pytest.raises(JobError) as caught:
        Job(**{**MINIMAL, **changes})
    return caught.value.problems


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


class TestGoodJobs:
    def test_defaults(self) -> None:
        job = Job(**MINIMAL)
        assert (job.name, job.batch_size, job.seed, job.metrics) == ("job", 32, 0, {})
        assert (job.workers.count, job.workers.stages) == (None, "auto")
        assert (job.sync.kind, job.sync.D, job.sync.combine, job.sync.deterministic) == ("wsp", 0, "sum", False)
        assert (job.weights, job.schedule) == ("wave", "auto")
        assert (job.parameter_servers.count, job.parameter_servers.placement) == (1, "auto")
        assert (job.cluster.devices, job.checkpoint.every_waves, job.checkpoint.keep) == ((), None, 3)

    def test_every_key_from_a_file(self, tmp_path: Path) -> None:
        job = load_job(write(tmp_path, YAML))
        assert job.optimizer.name == "AdamW"
        assert job.optimizer.arguments == {"lr": 0.001, "betas": (0.9, 0.99)}
        assert job.workers.stages == ((2, 2), (3, 1))
        assert job.data.eval == "model:eval_data"
        assert job.sync_spec() == SyncSpec(minibatches_per_wave=3, staleness=1, combine="mean", deterministic=True)
        assert job.data_spec(100) == DataSpec(100, 16, 7, 2, None)
        assert [entry.emulate_as for entry in job.cluster.devices] == [None, "RTX_2060"]

    def test_dump_and_load_give_the_same_job(self, tmp_path: Path) -> None:
        job = load_job(write(tmp_path, YAML))
        dumped = job.model_dump(mode="json")
        assert Job(**dumped) == Job.model_validate(dumped) == load_job(dumped) == load_job(job) == job
        assert Job.model_validate(job) is job

    @pytest.mark.parametrize("kind", ["wsp", "bsp", "asp"])
    def test_dump_and_load_of_every_kind(self, kind: str) -> None:
        job = Job(**MINIMAL, sync={"kind": kind})
        assert load_job(job.model_dump(mode="json")) == job

    def test_asp_has_no_bound(self) -> None:
        assert Job(**MINIMAL, sync={"kind": "asp"}).staleness is None

    def test_what_is_left_to_the_planner_stays_open_until_there_is_a_plan(self) -> None:
        job = Job(**MINIMAL, sync={"D": "auto", "max_D": 8})
        assert (job.sync.D, job.sync.minibatches_per_wave) == ("auto", "auto")
        assert load_job(job.model_dump(mode="json")) == job
        planned = job.with_plan([[2]], minibatches_per_wave=6, staleness=2)
        assert (planned.staleness, planned.minibatches_per_wave) == (2, 6)
        assert load_job(job, ["sync.D=1"]).staleness == 1

    def test_waves_of_a_given_cut_are_of_four(self) -> None:
        assert Job(**MINIMAL, workers={"stages": 2}).sync.minibatches_per_wave == 4

    def test_auto_needs_a_limit_and_a_planner(self) -> None:
        for sync, workers in (({"D": "auto"}, {}), ({"max_D": 2}, {}), ({"D": "auto", "max_D": 2}, {"stages": 2})):
            with pytest.raises(JobError, match=r"sync\.D: .*auto"):
                Job(**MINIMAL, sync=sync, workers=workers)

    def test_bsp_is_bound_zero(self) -> None:
        assert Job(**MINIMAL, sync={"kind": "bsp"}).staleness == 0
        assert Job(**MINIMAL, sync={"kind": "bsp", "D": 0}).sync.D == 0

    def test_keys_without_a_value_are_not_given(self, tmp_path: Path) -> None:
        text = YAML.replace("eval: model:eval_data", "eval: ").replace("seed: 7", "seed:") + "\n"
        job = load_job(write(tmp_path, text))
        assert (job.data.eval, job.seed) == (None, 0)

    def test_a_job_is_frozen(self) -> None:
        job = Job(**MINIMAL)
        with pytest.raises(ValidationError):
            job.seed = 3

    def test_count_follows_explicit_stages(self) -> None:
        job = Job(**MINIMAL, workers={"stages": [[1, 2], [1, 1, 1], [3]]})
        assert job.workers.count == 3
        assert [job.num_stages(VirtualWorkerIndex(vw)) for vw in range(3)] == [2, 3, 1]
        assert job.num_devices == 6
        assert job.layer_counts(VirtualWorkerIndex(1)) == (1, 1, 1)

    def test_a_number_of_virtual_workers_alone_means_one_stage_each(self) -> None:
        assert Job(**MINIMAL, workers={"count": 3}).workers.stages == 1
        assert load_job(MINIMAL, ["workers.count=3"]).num_devices == 3
        assert not Job(**MINIMAL, workers={"allocation": "NP"}).is_planned

    def test_equal_stages(self) -> None:
        job = Job(**MINIMAL, workers={"stages": 3, "count": 2})
        assert (job.num_devices, job.layer_counts(VirtualWorkerIndex(0))) == (6, None)

    def test_minibatches_are_per_virtual_worker(self) -> None:
        job = load_job(MINIMAL, {"minibatches": 50, "workers.count": 3})
        assert (job.epochs, job.total_minibatches) == (None, 150)
        assert job.data_spec(10).total_minibatches == 150

    def test_every_key_has_a_contract(self) -> None:
        models: list[type[BaseModel]] = [
            value
            for module in (job_sections, job_training)
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, BaseModel)
        ]
        models.append(Job)
        for section in models:
            assert section.__doc__
            undocumented = [
                name
                for name, field in section.model_fields.items()
                if not field.description and not (isinstance(field.annotation, type) and field.annotation.__doc__)
            ]
            assert not undocumented, section


class TestEmulatedDevices:
    def test_none_without_a_cluster(self) -> None:
        assert Job(**MINIMAL).emulated_devices() == ()
        assert Job(**MINIMAL, cluster={}).emulated_devices() == ()

    def test_one_mapping_means_every_device(self) -> None:
        job = Job(**MINIMAL, workers={"count": 2, "stages": 2}, cluster={"slowdown": 2.0, "jitter": 0.1})
        assert job.emulated_devices() == (DeviceConfig("cpu", 2.0, 0.1),) * 4

    def test_a_bare_list_and_an_integer_slowdown(self) -> None:
        job = Job(**MINIMAL, workers={"stages": 2}, cluster=[{}, {"slowdown": 3}])
        assert job.emulated_devices() == (DeviceConfig("cpu", 1.0), DeviceConfig("cpu", 3.0))

    def test_the_list_starts_again(self) -> None:
        devices = [{"slowdown": 1.0}, {"slowdown": 1.5}]
        job = Job(**MINIMAL, workers={"count": 1, "stages": 3}, cluster={"devices": devices})
        assert [device.slowdown for device in job.emulated_devices()] == [1.0, 1.5, 1.0]

    def test_types_are_relative_to_the_fastest_in_use(self) -> None:
        devices = [{"emulate_as": "QUADRO_P4000"}, {"emulate_as": "TITAN_V"}, {"emulate_as": "H100_80GB"}]
        job = Job(**MINIMAL, workers={"stages": 2}, cluster={"devices": devices})
        slow, fast = (device.slowdown for device in job.emulated_devices())
        assert fast == 1.0
        assert math.isclose(slow, 14.9 / 5.3)

    def test_one_type_alone_runs_at_full_speed(self) -> None:
        job = Job(**MINIMAL, workers={"stages": 1}, cluster={"emulate_as": "T4"})
        assert [device.slowdown for device in job.emulated_devices()] == [1.0]


BAD_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"modle": "a:b", "model": None}, "modle: unknown key; did you mean `model`?"),
    ({"zebra": 1}, "zebra: unknown key; use batch_size, checkpoint, "),
    ({"sync": {"d": 4}}, "sync.d: unknown key; did you mean `D`?"),
    ({"workers": {"stage": 2}}, "workers.stage: unknown key; did you mean `stages`?"),
    ({"data": {"train": "a:b", "test": "a:b"}}, "data.test: unknown key; use collate_fn, division, "),
    ({"cluster": {"slowdwn": 2.0}}, "cluster.slowdwn: unknown key; did you mean `slowdown`?"),
    (
        {"cluster": {"devices": [{"slow_down": 2.0}]}},
        "cluster.devices[0].slow_down: unknown key; did you mean `slowdown`?",
    ),
    ({"cluster": {"devices": [{}], "slowdown": 2.0}}, "cluster.slowdown: unknown key; use devices"),
    ({"epochs": None, "epoch": 3}, "epoch: unknown key; did you mean `epochs`?"),
    ({"model": None}, "model: is missing; add it, for example `model: model:build`"),
    ({"data": {}}, "data.train: is missing; add it, for example `train: model:train_data`"),
    ({"data": None}, "data: is missing; add it, for example `data: {train: model:train_data}`"),
    (
        {"data": {"train": "a:b", "eval_length": 3}},
        "data.eval_length: is 3, but there is no `eval` whose samples it counts; name `eval`, or remove it",
    ),
    ({"data": {"train": "a:b", "length": 0}}, "data.length: must be"),
    ({"optimizer": {"lr": 0.1}}, "optimizer.name: is missing; add it, for example `name: SGD`"),
    ({"optimizer": "SGD"}, "optimizer: must be a mapping, not the text 'SGD'; write a mapping, for example "),
    ({"data": "a:b"}, "data: must be a mapping, not the text 'a:b'"),
    ({"epochs": None}, "epochs: neither epochs nor minibatches is given; add one, for example `epochs: 3`"),
    ({"minibatches": 5}, "epochs: both epochs (3) and minibatches (5) are given; remove one"),
    ({"batch_size": "x"}, "batch_size: must be a whole number, not the text 'x'; write a number without quotes, for"),
    ({"batch_size": "32"}, "batch_size: must be a whole number, not the text '32'; remove the quotes"),
    ({"batch_size": 2.5}, "batch_size: must be a whole number, not 2.5"),
    ({"batch_size": 0}, "batch_size: must be at least 1, not 0"),
    ({"batch_size": True}, "batch_size: must be a whole number, not true"),
    ({"batch_size": [16]}, "batch_size: must be a whole number, not a list"),
    ({"epochs": 0}, "epochs: must be at least 1, not 0"),
    ({"epochs": None, "minibatches": -3}, "minibatches: must be at least 1, not -3"),
    ({"seed": -1}, "seed: must be at least 0, not -1"),
    ({"seed": 1 << 63}, "seed: must be at most"),
    ({"name": "a/b"}, "name: is part of the name of the run's folder"),
    ({"name": ".."}, "name: is part of the name of the run's folder"),
    ({"name": 5}, "name: must be text, not 5; put it in quotes"),
    (
        {"model": "model.py"},
        "model: must be `module:callable`, for example `model:build`, not the text 'model.py'; give the",
    ),
    ({"loss": "a b:c"}, "loss: must be `module:callable`"),
    ({"metrics": {"f2": "f2"}}, "metrics.f2: must be `module:callable`"),
    ({"metrics": {"loss": "a:b"}}, "metrics.loss: the name of a metric"),
    (
        {"metrics": ["acuracy"]},
        "metrics: a list names shipped metrics, and the text 'acuracy' is not one; did you mean `accuracy`?",
    ),
    ({"loss": {"loss": "a:b"}}, "loss.loss: the name of a metric or of a loss consists of letters"),
    ({"loss": {"call": "a:b", "weight": 2.0}}, "loss: a mapping of losses has a name for each"),
    ({"loss": {}}, "loss: is an empty mapping; name at least one loss"),
    ({"loss": {"main": {"call": "ab"}}}, "loss.main.call: must be `module:callable`"),
    ({"loss": {"main": "ab"}}, "loss.main.call: must be `module:callable`"),
    ({"loss": {"main": {"call": "a:b", "wieght": 1.0}}}, "loss.main.wieght: unknown key; did you mean `weight`?"),
    ({"loss": {"main": {"weight": float("inf")}}}, "loss.main.weight: must be a finite number"),
    ({"loss": {"main": 3}}, "loss.main: must be a mapping, not 3"),
    ({"loss": {"f1": {"call": "a:b"}}, "metrics": ["f1"]}, "metrics.f1: is the name of a loss as well"),
    ({"mean_over": "token"}, "mean_over: must be one of samples, tokens or next_tokens, or `module:callable`"),
    ({"mean_over": 3}, "mean_over: must be text, not 3"),
    ({"optimizer": {"name": "SGD", "lr": math.inf}}, "optimizer.lr: must be a finite number, not inf"),
    ({"optimizer": {"name": "SGD", "lr": {"a": 1}}}, "optimizer.lr: an argument is a number, text, true, false or a"),
    ({"optimizer": {"name": "SGD", "betas": [[1]]}}, "optimizer.betas: an argument is a number, text, true, false or "),
    ({"optimizer": {"name": 5}}, "optimizer.name: must be text, not 5; put it in quotes"),
    ({"workers": {"count": 0}}, "workers.count: must be at least 1, not 0"),
    ({"workers": {"stages": 0}}, "workers.stages: must be at least 1, not 0"),
    ({"workers": {"stages": "two"}}, "workers.stages: must be a whole number, not the text 'two'"),
    ({"workers": {"stages": [[2, 0]]}}, "workers.stages[0][1]: must be at least 1, not 0"),
    ({"workers": {"stages": [2]}}, "workers.stages[0]: must be a list, not 2"),
    ({"workers": {"stages": [[]]}}, "workers.stages[0]: is an empty list; give at least one entry"),
    ({"workers": {"stages": []}}, "workers.stages: is an empty list; give at least one entry"),
    (
        {"workers": {"count": 3, "stages": [[2], [2]]}},
        "workers.count: is 3, but `stages` lists 2 virtual workers; give one list per virtual worker",
    ),
    ({"sync": {"kind": "bps"}}, "sync.kind: must be wsp, bsp, asp, none or allreduce (did you mean `bsp`?), "),
    ({"sync": {"D": -1}}, "sync.D: must be at least 0, not -1"),
    ({"sync": {"D": 1.5}}, "sync.D: must be a whole number, not 1.5"),
    ({"sync": {"kind": "asp", "D": 2}}, "sync.D: is 2, but `asp` has no staleness bound; remove D or use kind: wsp"),
    ({"sync": {"kind": "asp", "D": 0}}, "sync.D: is 0, but `asp` has no staleness bound; remove D or use kind: wsp"),
    ({"sync": {"kind": "bsp", "D": 2}}, "sync.D: is 2, but `bsp` means D = 0; remove D or use kind: wsp"),
    ({"sync": {"kind": "asp", "deterministic": True}}, "sync.deterministic: `asp` has no required clock"),
    ({"sync": {"kind": "asp", "pull": "required"}}, "sync.pull: is required, but `asp` has no staleness bound that"),
    ({"sync": {"kind": "allreduce", "compress_pushes": "bfloat16"}}, "sync.compress_pushes: is bfloat16, but under"),
    ({"sync": {"kind": "none", "pull": "required"}}, "sync.pull: is required, but under `none` only the stages hold"),
    ({"sync": {"deterministic": "yes"}}, "sync.deterministic: must be true or false, not the text 'yes'"),
    ({"sync": {"minibatches_per_wave": 0}}, "sync.minibatches_per_wave: must be at least 1, not 0"),
    ({"sync": {"combine": "avg"}}, "sync.combine: must be sum or mean, not the text 'avg'"),
    ({"weights": "stashed"}, "weights: must be wave, stash, vertical, double_buffer, flush, predict or spectrain (did"),
    ({"schedule": "1f1"}, "schedule: must be auto, 1f1b, fifo or gpipe (did you mean `1f1b`?), not the text '1f1'"),
    ({"parameter_servers": {"count": 0}}, "parameter_servers.count: must be at least 1, not 0"),
    (
        {"parameter_servers": {"placement": "even"}},
        "parameter_servers.placement: must be auto, balanced, round_robin or ed_local",
    ),
    ({"cluster": {"slowdown": 0.5}}, "cluster.slowdown: must be at least 1, not 0.5"),
    ({"cluster": {"slowdown": "2"}}, "cluster.slowdown: must be a number, not the text '2'; remove the quotes"),
    ({"cluster": {"slowdown": math.nan}}, "cluster.slowdown: must be"),
    ({"cluster": [{}, {"jitter": -1}]}, "cluster[1].jitter: must be at least 0, not -1"),
    (
        {"cluster": {"emulate_as": "RTX2060"}},
        "cluster.emulate_as: the text 'RTX2060' is not in the catalogue of device",
    ),
    ({"cluster": {"devices": [{}, {"emulate_as": "TPU"}]}}, "cluster.devices[1].emulate_as: the text 'TPU' is not in"),
    (
        {"cluster": {"emulate_as": "T4", "slowdown": 2.0}},
        "cluster.slowdown: given beside `emulate_as`, which also sets the speed; keep one of the two",
    ),
    ({"cluster": 3}, "cluster: must be a mapping, not 3"),
    ({"checkpoint": {"every_waves": 0}}, "checkpoint.every_waves: must be at least 1, not 0"),
    ({"checkpoint": {"keep": 0}}, "checkpoint.keep: must be at least 1, not 0"),
]


@pytest.mark.parametrize(
    ("changes", "expected"), BAD_KEYS, ids=[expected.partition(":")[0] for _, expected in BAD_KEYS]
)
def test_one_mistake_one_problem(changes: dict[str, Any], expected: str) -> None:
    found = problems(**changes)
    assert len(found) == 1, found
    assert found[0].startswith(expected), found[0]


def test_suggestions_for_device_types() -> None:
    assert problems(cluster={"emulate_as": "RTX2060"})[0].endswith("did you mean `RTX_2060`?")


def test_all_mistakes_at_once() -> None:
    found = problems(
        model=None,
        batch_size="x",
        minibatches=4,
        name="a b",
        sync={"kind": "asp", "D": 3, "deterministic": True, "wave": 2},
        workers={"stages": [[1, 0]], "count": 2},
        cluster=[{"slowdown": 0}],
        optimiser={"name": "SGD"},
    )
    assert [problem.partition(": ")[0] for problem in found] == [
        "name",
        "model",
        "batch_size",
        "epochs",
        "workers.stages[0][1]",
        "sync.D",
        "sync.deterministic",
        "cluster[0].slowdown",
        "sync.wave",
        "optimiser",
    ]


def test_a_job_error_is_a_value_error_and_lists_everything() -> None:
    with pytest.raises(ValueError, match=r"seed: .*; zebra: ") as caught:
        Job(**MINIMAL, seed=-1, zebra=1)
    assert isinstance(caught.value, UserError)


def test_validating_something_else() -> None:
    with pytest.raises(JobError, match="a job is a mapping of keys, not a list"):
        Job.model_validate([1])
    with pytest.raises(JobError, match="1: unknown key"):
        Job.model_validate({**MINIMAL, 1: 2})


class TestFiles:
    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(JobError, match=r"jop\.yaml: no such file; looked in "):
            load_job(tmp_path / "jop.yaml")

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(JobError, match=r": is a folder; give the job file in it, for example .*job\.yaml"):
            load_job(str(tmp_path))

    def test_an_empty_file(self, tmp_path: Path) -> None:
        with pytest.raises(JobError, match="is empty; `hetpipe init` writes a job file"):
            load_job(write(tmp_path, "# nothing here\n"))

    @pytest.mark.parametrize(("text", "kind"), [("[1, 2]", "a list"), ("hello", "the text 'hello'"), ("5", "5")])
    def test_no_mapping(self, tmp_path: Path, text: str, kind: str) -> None:
        with pytest.raises(JobError, match=f"a job is a mapping of keys, not {kind}; write for example"):
            load_job(write(tmp_path, text))

    def test_binary(self, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(JobError, match="is not UTF-8 text"):
            load_job(path)

    @pytest.mark.parametrize(
        ("text", "where"),
        [
            ("name: a\nmodel: b: c\n", "line 2: not valid YAML: mapping values are not allowed here"),
            ("name: a\nsync: {D: 1\nseed: 2\n", "line 3: not valid YAML"),
            ("name: a\n\tseed: 2\n", "line 2: not valid YAML"),
            ("name: a\n---\nname: b\n", "line 2: not valid YAML: but found another document"),
            ("name: !!python/name:os.system\n", "line 1: not valid YAML"),
            ("name: a\n? [1, 2]\n: 3\n", "line 2: not valid YAML: a key must be text"),
            ("name: &a [*a]\n", "line 1: not valid YAML: a value contains itself"),
            ("name: 2024-99-99\n", "not valid YAML: month must be in 1..12"),
        ],
    )
    def test_broken_yaml_names_its_line(self, tmp_path: Path, text: str, where: str) -> None:
        with pytest.raises(JobError) as caught:
            load_job(write(tmp_path, text))
        assert where in caught.value.problems[0]

    def test_duplicate_keys_are_reported_with_everything_else(self, tmp_path: Path) -> None:
        text = YAML.replace("kind: wsp, D: 1", "D: 1, kind: wsp,\n  D: 2").replace("seed: 7", "seed: x\nname: again")
        with pytest.raises(JobError) as caught:
            load_job(write(tmp_path, text))
        assert caught.value.problems == (
            "name: is given twice, on lines 1 and 8; keep one of them",
            "sync.D: is given twice, on lines 12 and 13; keep one of them",
            "seed: must be a whole number, not the text 'x'; write a number without quotes",
        )

    def test_keys_twice_on_one_line(self, tmp_path: Path) -> None:
        text = YAML.replace("kind: wsp, D: 1", "kind: wsp, D: 1, D: 2")
        with pytest.raises(JobError, match=r"sync\.D: is given twice, on lines 11 and 11; keep one"):
            load_job(write(tmp_path, text))

    @pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("1.5E+2", 150.0), (".5e-1", 0.05), ("1_0e2", 1000.0)])
    def test_scientific_notation_is_a_number(self, tmp_path: Path, text: str, value: float) -> None:
        job = load_job(write(tmp_path, YAML.replace("lr: 1e-3", f"lr: {text}")))
        assert job.optimizer.arguments["lr"] == value

    def test_anchors_are_fine(self, tmp_path: Path) -> None:
        text = YAML.replace(
            "[{slowdown: 2}, {emulate_as: RTX_2060}]", "[&slow {slowdown: 2}, {<<: *slow, jitter: 0.5}]"
        )
        devices = load_job(write(tmp_path, text)).cluster.devices
        assert [(device.slowdown, device.jitter) for device in devices] == [(2.0, 0.0), (2.0, 0.5)]
