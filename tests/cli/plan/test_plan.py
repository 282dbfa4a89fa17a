"""`hetpipe plan` as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.cli.plan import plan as plan_command
from hetpipe.cli.plan.profiling import Profiled, ProfileOptions
from hetpipe.job.file import Job
from hetpipe.runs.shell import Shell
from hetpipe.values.document import document_of, read_document, to_plain, write_document
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile
from tests.cli import plans
from tests.cli.fakes import FakeCoordinator, shell_with, small_job

FILES = ("--profile", "profile.json", "--cluster", "cluster.yaml")

#: With a given N, which is what takes the planner most of its time to find.
QUICK = (*FILES, "--minibatches-per-wave", "2")


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    write_document(plans.profile(6), Path("profile.json"))
    Path("cluster.yaml").write_text(yaml.safe_dump(to_plain(plans.cluster(1))))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], obj=shell_with(FakeCoordinator(), Path.cwd()))


def last_line(result: Result) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return value


def change(name: str, edit: Callable[[Any], object]) -> None:
    """Edit a file of the test, which is YAML or JSON."""
    value = yaml.safe_load(Path(name).read_text())
    edit(value)
    Path(name).write_text(json.dumps(value))


def test_a_plan_from_two_files() -> None:
    result = invoke(*FILES)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert result.stdout.startswith("vgg-like: ")
    assert "this plan" in result.stdout
    assert "all-reduce" in result.stdout
    assert "why this N" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_why() -> None:
    result = invoke(*FILES, "--why")
    assert result.exit_code == 0, result.output
    for heading in ("alternatives, compared with this plan", "why this N", "why these cuts"):
        assert heading in result.stdout
    assert "single:TITAN_V" in result.stdout


def test_json_is_the_plan_on_one_line() -> None:
    result = invoke(*QUICK, "--json", "--out", "plan.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    document = document_of(PlanDocument, last_line(result), what="stdout")
    assert document == read_document(PlanDocument, Path("plan.json"))
    assert last_line(result)["version"] == 1
    assert "the plan is in plan.json" in result.stderr
    used = {stage.device for worker in document.virtual_workers for stage in worker.stages}
    assert used | set(document.idle_devices) == set(plans.cluster(1).devices)


def test_the_same_call_gives_the_same_plan() -> None:
    assert invoke(*QUICK, "--json").stdout == invoke(*QUICK, "--json").stdout


def test_simulate_agrees_with_what_was_predicted() -> None:
    assert invoke(*QUICK, "--out", "plan.json").exit_code == 0
    shell = shell_with(FakeCoordinator(), Path.cwd())
    simulated = CliRunner().invoke(app, ["simulate", "--plan", "plan.json", *FILES, "--json"], obj=shell)
    assert simulated.exit_code == 0, simulated.output
    predicted = read_document(PlanDocument, Path("plan.json")).predicted
    told = last_line(simulated)
    assert told["samples_per_second"] == predicted.samples_per_second
    assert told["cross_node_bytes_per_minibatch"] == pytest.approx(predicted.cross_node_bytes_per_minibatch)


def test_frozen_layers_are_planned_simulated_and_kept_in_the_file() -> None:
    whole = last_line(invoke(*QUICK, "--json"))
    assert invoke(*QUICK, "--freeze", "3", "--out", "plan.json").exit_code == 0
    plan = read_document(PlanDocument, Path("plan.json"))
    assert (whole["frozen_layers"], plan.frozen_layers) == (0, 3)
    assert plan.predicted.samples_per_second > 1.2 * whole["predicted"]["samples_per_second"]
    shell = shell_with(FakeCoordinator(), Path.cwd())
    simulated = CliRunner().invoke(app, ["simulate", "--plan", "plan.json", *FILES, "--json"], obj=shell)
    assert last_line(simulated)["samples_per_second"] == plan.predicted.samples_per_second
    refused = invoke(*QUICK, "--freeze", "6", "--json")
    assert refused.exit_code == 2
    (sentence,) = last_line(refused)["errors"]
    assert "--freeze freezes 6 layers, but the model has 6 with trainable parameters" in sentence


def test_explicit_virtual_workers() -> None:
    workers = '[["n1/0","n0/0"]]'
    result = invoke(
        *FILES, "--allocation", "explicit", "--workers", workers, "--minibatches-per-wave", "3", "--D", "2", "--json"
    )
    assert result.exit_code == 0, result.output
    document = document_of(PlanDocument, last_line(result), what="stdout")
    assert (document.allocation, document.minibatches_per_wave, document.staleness) == ("explicit", 3, 2)
    (worker,) = document.virtual_workers
    assert {stage.device for stage in worker.stages} == {"n0/0", "n1/0"}
    assert set(document.idle_devices) == {"n2/0", "n3/0"}


def test_the_page() -> None:
    result = invoke(*QUICK, "--html", "page.html", "--json")
    assert result.exit_code == 0, result.output
    page = Path("page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "<svg" in page
    assert "the page is in page.html" in result.stderr


@pytest.mark.parametrize("option", ["--html", "--out"])
def test_a_file_that_cannot_be_written(option: str) -> None:
    result = invoke(*QUICK, option, "absent/file")
    assert result.exit_code == 2
    assert f"give {option} a file in a folder that exists" in result.stderr


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    change("profile.json", lambda profile: profile["layers"][3].update(parameter_bytes=60 * plans.GIB))
    result = invoke(*FILES, "--json")
    assert result.exit_code != 0
    (sentence,) = last_line(result)["errors"]
    assert "block3.conv" in sentence or "layer 3" in sentence
    assert "bytes" in sentence or "GiB" in sentence
    assert "Traceback" not in result.output


def test_every_mistake_of_both_files_is_told() -> None:
    change("profile.json", lambda profile: profile["layers"][1]["forward_ms"].pop("TITAN_V"))
    change("cluster.yaml", lambda cluster: cluster["nodes"][2].update(devices=["RTX_2061"]))
    change("cluster.yaml", lambda cluster: cluster["device_types"]["TITAN_V"].update(memory_bytes=12))
    result = invoke(*FILES, "--json")
    assert result.exit_code == 2
    errors = last_line(result)["errors"]
    assert any("layers[1].forward_ms" in error or "layers.1.forward_ms" in error for error in errors)
    assert any("RTX_2061" in error for error in errors)
    assert any("12884901888" in error for error in errors)
    assert all(error.startswith(("profile.json: layers", "cluster.yaml: ")) for error in errors)


def test_one_file_alone() -> None:
    result = invoke("--profile", "profile.json", "--json")
    assert result.exit_code == 2
    assert last_line(result) == {"errors": ["--profile is given without --cluster; give both, or name a job file"]}


def write_job(**changes: Any) -> Job:
    job = small_job(**changes)
    Path("job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json", exclude_none=True)))
    return job


def test_a_job_says_how_it_synchronises() -> None:
    job = write_job(batch_size=32, sync={"D": 3, "minibatches_per_wave": 2})
    result = invoke("job.yaml", *FILES, "--json")
    assert result.exit_code == 0, result.output
    document = document_of(PlanDocument, last_line(result), what="stdout")
    assert (document.staleness, document.minibatches_per_wave) == (3, 2)
    assert document.batch_size == job.batch_size


def test_a_job_with_inactive_layers_is_forecast_with_and_without_them() -> None:
    write_job(
        batch_size=32,
        elastic={"active": [0, 1, 2], "script": [{"at": {"clock": 4}, "do": "activate", "active": [0, "*"]}]},
    )
    result = invoke("job.yaml", *QUICK)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "from clock inactive virtual workers samples/s 0 layers 3-5 " in words
    assert "4 none " in words
    assert "with all layers active " in words
    document = document_of(PlanDocument, last_line(invoke("job.yaml", *QUICK, "--json")), what="stdout")
    start, later = document.active_phases
    assert [(phase.clock, phase.inactive) for phase in (start, later)] == [(0, (3, 4, 5)), (4, ())]
    own = tuple(stage.layers[1] - stage.layers[0] for stage in document.virtual_workers[0].stages)
    assert start.cuts[0] == own, "no layers move without elastic.recut"
    assert start.samples_per_second > 1.2 * later.samples_per_second
    assert later.samples_per_second == pytest.approx(document.predicted.samples_per_second, rel=0.01)


def test_a_profile_of_other_minibatches_is_refused() -> None:
    write_job(batch_size=8)
    result = invoke("job.yaml", *FILES)
    assert result.exit_code == 2
    assert "the profile has minibatches of 32 samples, the job has 8; profile again" in result.stderr


def test_a_profile_of_another_precision_is_refused() -> None:
    write_job(batch_size=32, precision="bf16")
    result = invoke("job.yaml", *FILES)
    assert result.exit_code == 2
    assert "the profile was measured in fp32, the job computes in bf16; profile again" in result.stderr


def test_without_a_profile_the_job_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(batch_size=32, sync={"minibatches_per_wave": 2})
    requested: list[ProfileOptions] = []

    def measured(job: Job, options: ProfileOptions, shell: Shell, on_step: object) -> Profiled:
        requested.append(options)
        return Profiled(read_document(Profile, Path("profile.json")), {}, reserve_bytes=1000)

    monkeypatch.setattr(plan_command, "profile_job", measured)
    result = invoke("job.yaml", "--cluster", "cluster.yaml", "--json")
    assert result.exit_code == 0, result.output
    assert sorted(requested[0].types) == sorted(plans.SLOWNESS)
    given = invoke("job.yaml", "--cluster", "cluster.yaml", "--reserve-bytes", "3000", "--json")
    files = invoke("job.yaml", *FILES, "--json")
    measured_bytes, given_bytes, file_bytes = (
        json.loads(one.stdout)["virtual_workers"][0]["stages"][0]["memory_bytes"] for one in (result, given, files)
    )
    assert (measured_bytes - file_bytes, given_bytes - file_bytes) == (1000, 3000)


def test_an_optimizer_that_is_not_known_is_remarked_on() -> None:
    write_job(batch_size=32, optimizer={"name": "Sophia", "lr": 0.1}, sync={"minibatches_per_wave": 2})
    result = invoke("job.yaml", *FILES)
    assert result.exit_code == 0, result.output
    assert "the state of Sophia is unknown" in result.stdout
    assert "Sophia" not in invoke("job.yaml", *FILES, "--optimizer-slots", "1").output


def test_sizes_of_minibatches_that_fit_are_listed() -> None:
    change("cluster.yaml", lambda cluster: cluster["device_types"].update(_smaller(cluster["device_types"])))
    result = invoke(*QUICK, "--allocation", "NP", "--fit", "--json")
    assert result.exit_code == 0, result.output
    rows = last_line(result)["batch_sizes"]
    fitting = [row["batch_size"] for row in rows if row["samples_per_second"] is not None]
    assert 0 < len(fitting) < len(rows)
    assert max(fitting) < min(row["batch_size"] for row in rows if row["reason"])
    text = invoke(*QUICK, "--allocation", "NP", "--fit")
    assert "samples per minibatch" in text.stdout
    assert "does not fit" in text.stdout
    refused = invoke(*QUICK, "--fit", "--why")
    assert "--fit plans many minibatch sizes; leave out --why" in refused.output


def _smaller(types: dict[str, Any]) -> dict[str, Any]:
    return {name: {**kind, "memory_bytes": 2 << 30} for name, kind in types.items()}
