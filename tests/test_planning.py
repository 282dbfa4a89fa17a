"""`hetpipe.plan`, `profile` and `simulate` from a Python program."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import hetpipe
from hetpipe import planning
from hetpipe.cli.app import app
from hetpipe.cli.plan import plan as plan_command
from hetpipe.cli.plan.profiling import Profiled, ProfileOptions
from hetpipe.errors import DocumentError, JobError, PlanError, UserError
from hetpipe.job.file import Job
from hetpipe.runs.shell import Shell
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import document_of, to_plain, write_document
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.plan_document import PlanDocument
from tests.cli import plans
from tests.cli.fakes import FakeCoordinator, shell_with, small_job
from tests.models import data32, loss, mlp32

PROFILE, CLUSTER = plans.profile(6), plans.cluster(1)


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def files() -> tuple[Path, Path]:
    write_document(PROFILE, Path("profile.json"))
    Path("cluster.yaml").write_text(yaml.safe_dump(to_plain(CLUSTER)))
    return Path("profile.json"), Path("cluster.yaml")


def quick(**options: Any) -> hetpipe.Plan:
    """With a given N, which is what takes the planner most of its time to find."""
    return hetpipe.plan(profile=PROFILE, cluster=CLUSTER, **{"minibatches_per_wave": 2, **options})


class TestPlan:
    def test_it_is_the_plan_of_the_command(self) -> None:
        profile, cluster = files()
        arguments = ["--profile", str(profile), "--cluster", str(cluster), "--minibatches-per-wave", "2", "--D", "3"]
        shell = shell_with(FakeCoordinator(), Path.cwd())
        told = CliRunner().invoke(app, ["plan", *arguments, "--json"], obj=shell)
        expected = document_of(PlanDocument, json.loads(told.stdout), what="stdout")

        plan = hetpipe.plan(profile=PROFILE, cluster=str(cluster), minibatches_per_wave=2, staleness=3)
        assert plan.document == expected
        assert plan.samples_per_second == expected.predicted.samples_per_second
        assert (plan.profile, plan.cluster) == (PROFILE, CLUSTER)

    def test_it_can_be_looked_at_and_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = quick()
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert str(plan).startswith("vgg-like: ")
        assert "\x1b" not in plan.text(why="full")
        assert "why this N" not in str(plan)
        assert "why this N" in plan.text(why="full")
        assert "<svg" in plan.html()
        plan.write("kept")
        again = hetpipe.simulate("kept/plan.json", profile="kept/profile.json", cluster="kept/cluster.yaml")
        assert again == hetpipe.simulate(plan)
        Path("file").touch()
        with pytest.raises(UserError, match="cannot write to file: "):
            plan.write("file")

    def test_devices_of_virtual_workers(self) -> None:
        plan = quick(allocation="explicit", devices=[["n1/0", "n0/0"]])
        (worker,) = plan.document.virtual_workers
        assert {stage.device for stage in worker.stages} == {"n0/0", "n1/0"}

    def test_frozen_layers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert quick(freeze=3).document.frozen_layers == 3
        with pytest.raises(UserError, match=r"^freeze freezes 6 layers, but the model has 6 with trainable parameters"):
            quick(freeze=6)

        monkeypatch.setattr(plan_command, "profile_job", lambda *_: Profiled(PROFILE, {}))
        job = {
            "model": mlp32, "data": data32, "loss": loss, "optimizer": {"name": "SGD", "lr": 0.1}, "epochs": 1,
            "batch_size": 32, "sync": {"minibatches_per_wave": 2}, "freeze": {"layers": 2},
        }  # fmt: skip
        assert hetpipe.plan(job, cluster=CLUSTER).document.frozen_layers == 2
        assert hetpipe.plan(job, cluster=CLUSTER, freeze={"layers": 1}).document.frozen_layers == 1
        assert not hetpipe.plan(job, cluster=CLUSTER, freeze=0).document.frozen_layers

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"staleness": "auto"}, "staleness auto and max_staleness must be used together"),
            ({"allocation": "explicit"}, "allocation explicit needs the devices of each virtual worker: devices '"),
            ({"allocation": "NQ"}, "allocation 'NQ' is unknown; "),
            ({"minibatches_per_wave": 0}, "minibatches_per_wave is '0'; give a whole number"),
        ],
    )
    def test_messages_name_keywords(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            quick(**options)

    def test_what_cannot_be_planned(self) -> None:
        with pytest.raises(UserError, match="there is nothing to plan; name a job file, or give profile and cluster"):
            hetpipe.plan()
        with pytest.raises(UserError, match="profile is given without cluster"):
            hetpipe.plan(profile=PROFILE)
        with pytest.raises(JobError, match="epochs"):
            hetpipe.plan(small_job(), profile=PROFILE, cluster=CLUSTER, epochs=-1)
        with pytest.raises(UserError, match="the profile has minibatches of 32 samples, the job has 4"):
            hetpipe.plan(small_job(), profile=PROFILE, cluster=CLUSTER)
        other = _cluster_with("RTX_9")
        with pytest.raises(DocumentError, match="RTX_9"):
            hetpipe.plan(profile=PROFILE, cluster=other)

    def test_a_job_of_functions_is_measured_where_they_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[Job, ProfileOptions, Path]] = []

        def measured(job: Job, wish: ProfileOptions, shell: Shell, on_step: object) -> Profiled:
            asked.append((job, wish, shell.current))
            assert callable(on_step)
            on_step(ProfileStep("TITAN_V", "0", 0, 1))
            return Profiled(PROFILE, {}, reserve_bytes=1000)

        monkeypatch.setattr(plan_command, "profile_job", measured)
        monkeypatch.setattr(planning, "profile_job", measured)
        steps: list[ProfileStep] = []
        keys: dict[str, Any] = {
            "model": mlp32, "data": data32, "loss": loss, "optimizer": {"name": "SGD", "lr": 0.1}, "epochs": 1,
            "batch_size": 32, "sync": {"minibatches_per_wave": 2, "D": 1},
        }  # fmt: skip
        plan = hetpipe.plan(cluster=CLUSTER, on_step=steps.append, **keys)
        assert (plan.document.staleness, plan.document.minibatches_per_wave, len(steps)) == (1, 2, 1)
        assert hetpipe.profile(types=["T4"], fresh=True, **keys) == PROFILE
        (planned, wish, where), (profiled, own_wish, _) = asked
        assert planned == profiled
        assert planned.model == "tests.models:mlp32"
        assert set(wish.types) == set(plans.SLOWNESS)
        assert own_wish == ProfileOptions(types=("T4",), fresh=True)
        assert where == Path(__file__).parents[1]


def _cluster_with(kind: str) -> Cluster:
    values = to_plain(CLUSTER)
    values["nodes"][0]["devices"] = [kind]
    values["device_types"][kind] = {"memory_bytes": plans.GIB}
    return document_of(Cluster, values, what="cluster")


class TestSimulate:
    def test_it_agrees_with_the_prediction(self) -> None:
        plan = quick(staleness=1)
        assert hetpipe.simulate(plan).samples_per_second == plan.samples_per_second

    def test_a_straggler_slows_it_down(self) -> None:
        plan = quick(staleness=0)
        device = plan.document.virtual_workers[0].stages[0].device
        slow = hetpipe.simulate(plan, stragglers={device: 4.0}, minibatches=16)
        assert slow.samples_per_second < 0.5 * plan.samples_per_second
        assert hetpipe.simulate(plan, staleness="inf").max_clock_distance >= 0
        with pytest.raises(PlanError, match="the plan uses no device 'n9/0'"):
            hetpipe.simulate(plan, stragglers={"n9/0": 2.0})

    def test_layers_freeze_as_for_the_command(self) -> None:
        plan = quick()
        files()
        plan.write(".")
        paths = ["--plan", "plan.json", "--profile", "profile.json", "--cluster", "cluster.yaml", "--minibatches", "80"]
        shell = shell_with(FakeCoordinator(), Path.cwd())
        told = CliRunner().invoke(
            app, ["simulate", *paths, "--freeze", "20=1", "--freeze", "30=2", "--json"], obj=shell
        )

        found = hetpipe.simulate(plan, minibatches=80, freeze={30: 2, 20: 1})
        assert [asdict(phase) | {"stages": list(phase.stages)} for phase in found.phases] == json.loads(told.stdout)[
            "phases"
        ]
        assert [phase.frozen for phase in found.phases] == [0, 1, 2]
        assert replace(found, phases=()) == hetpipe.simulate(plan, minibatches=80)
        changes = ["--freeze", "20=1", "--compress", "--optimizer-slots", "2"]
        told = CliRunner().invoke(app, ["simulate", *paths, *changes, "--json"], obj=shell)
        found = hetpipe.simulate(plan, minibatches=80, freeze={20: 1}, freeze_changes="compress", optimizer_slots=2)
        assert [asdict(phase) | {"stages": list(phase.stages)} for phase in found.phases] == json.loads(told.stdout)[
            "phases"
        ]
        with pytest.raises(UserError, match=r"^freeze is 20=2, 30=1; give clocks in order"):
            hetpipe.simulate(plan, minibatches=80, freeze={20: 2, 30: 1})

    def test_active_layers_change_as_for_the_command(self) -> None:
        plan = quick()
        files()
        plan.write(".")
        paths = ["--plan", "plan.json", "--profile", "profile.json", "--cluster", "cluster.yaml", "--minibatches", "80"]
        shell = shell_with(FakeCoordinator(), Path.cwd())
        first, *_, last = (layer.name for layer in PROFILE.layers)
        given = ["--active", "20=0,1,2", "--active", f"30={first},{last}"]
        for recut in (False, True):
            asked = ["simulate", *paths, *given, *(["--recut"] if recut else []), "--json"]
            told = json.loads(CliRunner().invoke(app, asked, obj=shell).stdout)["active_phases"]

            active: dict[int, list[int | str]] = {30: [first, last], 20: [0, 1, 2]}
            found = hetpipe.simulate(plan, minibatches=80, active=active, active_recut=recut)
            assert [phase.model_dump(mode="json") for phase in found.active_phases] == told
            assert [phase.inactive for phase in found.active_phases] == [(3, 4, 5), (1, 2, 3, 4)]
        assert replace(found, active_phases=()) == hetpipe.simulate(plan, minibatches=80)
        with pytest.raises(UserError, match=r"^active: there is no layer 9; the model has the layers 0 to 5"):
            hetpipe.simulate(plan, active={4: [9]})
        with pytest.raises(UserError, match=r"not combined; give freeze or active$"):
            hetpipe.simulate(plan, freeze={4: 1}, active={4: [0]})

    def test_a_plan_alone_is_not_enough(self) -> None:
        with pytest.raises(UserError, match="simulate needs the profile and the cluster of the plan"):
            hetpipe.simulate(quick().document)
