"""The overlay of a job: what Kustomize makes of it is tested where there is kubectl."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetpipe.deploy.kubernetes import MOST_JOB_BYTES, AgentNodes, Overlay, groups_of_options, overlay_files
from hetpipe.errors import UserError
from hetpipe.job.file import load_job
from tests.deploy.deployments import job
from tests.docs.pages import ROOT
from tests.job.test_job_cluster import CLUSTER

GROUPS = (AgentNodes("NVIDIA-TITAN-V", 2, 4), AgentNodes("cpu", 1, 3))
OVERLAY = Overlay(
    job=job(workers={"count": 2, "stages": 2}, parameter_servers={"count": 3}),
    code={"mine/model.py": "def build(): ...\n"},
    groups=GROUPS,
    image="registry.example:5000/me/hetpipe:7",
    k8s="../k8s",
    modules=("mine.model",),
)


def parsed(overlay: Overlay = OVERLAY) -> dict[str, Any]:
    return {path: yaml.safe_load(text) for path, text in overlay_files(overlay).items() if path.endswith(".yaml")}


def operations(kustomization: dict[str, Any], **target: str) -> list[dict[str, Any]]:
    found = [patch for patch in kustomization["patches"] if target.items() <= patch["target"].items()]
    return [operation for patch in found for operation in yaml.safe_load(patch["patch"])]


def test_files() -> None:
    files = overlay_files(OVERLAY)
    assert set(files) == {
        "kustomization.yaml",
        "titan-v/kustomization.yaml",
        "cpu/kustomization.yaml",
        "job/job.yaml",
        "job/mine/model.py",
    }
    assert files["job/mine/model.py"] == "def build(): ...\n"


def test_the_job_comes_through_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(overlay_files(OVERLAY)["job/job.yaml"])
    assert load_job(path) == OVERLAY.job


def test_the_whole() -> None:
    whole = parsed()["kustomization.yaml"]
    assert whole["resources"] == ["../k8s/base", "titan-v", "cpu"]
    assert whole["components"] == ["../k8s/components/mtls"]
    assert whole["images"] == [{"name": "hetpipe", "newName": "registry.example:5000/me/hetpipe", "newTag": "7"}]
    assert operations(whole, kind="StatefulSet") == [{"op": "replace", "path": "/spec/replicas", "value": 3}]
    insecure = parsed(replace(OVERLAY, tls=False))["kustomization.yaml"]
    assert insecure["components"] == ["../k8s/components/insecure"]


def test_code_keeps_its_folders() -> None:
    whole = parsed()["kustomization.yaml"]
    (generated,) = whole["configMapGenerator"]
    assert generated["behavior"] == "replace"
    assert generated["files"] == ["job.yaml=job/job.yaml", "mine.model.py=job/mine/model.py"]
    (volume,) = operations(whole, name="submit")
    assert volume["value"]["items"][1] == {"key": "mine.model.py", "path": "mine/model.py"}
    of_agents = operations(whole, labelSelector="app.kubernetes.io/component=agent")
    assert of_agents[0] == volume
    assert of_agents[1]["value"] == "--allow-modules=mine.model"


def test_agents_of_an_overlay_pass_on_the_variables_that_are_named() -> None:
    def added(overlay: Overlay) -> list[str]:
        whole = parsed(overlay)["kustomization.yaml"]
        found = operations(whole, labelSelector="app.kubernetes.io/component=agent")[1:]
        return [operation["value"] for operation in found]

    allowing = replace(OVERLAY, allowed_environment=("HF_HOME", "WANDB_*"))
    assert added(allowing) == [*added(OVERLAY), "--allow-environment=HF_HOME", "--allow-environment=WANDB_*"]


def test_a_group_of_gpu_nodes() -> None:
    group = parsed()["titan-v/kustomization.yaml"]
    assert group["resources"] == ["../../k8s/base/agents"]
    assert group["nameSuffix"] == "-titan-v"
    assert group["labels"] == [{"pairs": {"hetpipe/agents": "titan-v"}, "includeTemplates": True}]
    values = {operation["path"].rpartition("/")[2]: operation["value"] for operation in operations(group)}
    assert values == {
        "completions": 2,
        "parallelism": 2,
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-TITAN-V"},
        "nvidia.com~1gpu": 4,
    }


def test_a_group_without_gpus() -> None:
    group = parsed()["cpu/kustomization.yaml"]
    assert "nodeSelector" not in str(group)
    assert operations(group)[-1]["value"] == "--cpu-devices=3"


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA-GeForce-RTX-2060", "rtx-2060"),
        ("Quadro-P4000", "quadro-p4000"),
        ("NVIDIA-H100-80GB-HBM3", "h100-80gb-hbm3"),
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "a100-sxm4-40gb-mig-1g-5gb"),
        ("NVIDIA", "nvidia"),
    ],
)
def test_names_of_groups(product: str, name: str) -> None:
    assert AgentNodes(product, 1, 1).name == name


def test_options() -> None:
    assert groups_of_options(["NVIDIA-TITAN-V=2x4", "cpu=1x3"]) == GROUPS
    for wrong in ("NVIDIA-TITAN-V", "a=0x1", "a=1x0", "a=1", "=1x1", "a b=1x1"):
        with pytest.raises(UserError, match="is not PRODUCT=NODESxDEVICES"):
            groups_of_options([wrong])
    with pytest.raises(UserError, match="several groups the name titan-v"):
        groups_of_options(["NVIDIA-TITAN-V=1x1", "TITAN-V=1x1"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"groups": (AgentNodes("cpu", 1, 3),)}, "needs 4 devices, one per stage, and --agents have 3"),
        ({"job": job(workers={"stages": 1}, parameter_servers={"placement": "ed_local"})}, "multi-node-heterogeneous"),
        (
            {"job": job(cluster={"file": {"version": 1, **CLUSTER}})},
            "has the node n0, but --agents gives cpu-0, titan-v",
        ),
        ({"code": {"model.py": "x" * MOST_JOB_BYTES}}, "limit of a ConfigMap"),
    ],
)
def test_what_cannot_be_rendered(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        overlay_files(replace(OVERLAY, **changes))


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here: what Kustomize makes of it is not tested")
def test_what_kustomize_makes_of_it(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    for path, text in overlay_files(OVERLAY).items():
        (tmp_path / "mine" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / path).write_text(text)
    built = subprocess.run(["kubectl", "kustomize", "mine"], cwd=tmp_path, capture_output=True, check=False, text=True)
    assert built.returncode == 0, built.stderr
    made = {(part["kind"], part["metadata"]["name"]): part for part in yaml.safe_load_all(built.stdout)}
    agents = made["Job", "agents-titan-v"]["spec"]
    assert agents["completions"] == 2
    pod = agents["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-TITAN-V"}
    assert "--allow-modules=mine.model" in pod["containers"][0]["args"]
    assert pod["containers"][0]["image"] == "registry.example:5000/me/hetpipe:7"
    for name in ("agents-titan-v", "agents-cpu", "submit"):
        volumes = {volume["name"]: volume for volume in made["Job", name]["spec"]["template"]["spec"]["volumes"]}
        assert {item["path"] for item in volumes["job"]["configMap"]["items"]} == {"job.yaml", "mine/model.py"}
    shards = made["StatefulSet", "parameter-server"]["spec"]
    assert shards["replicas"] == 3
    assert [claim["metadata"]["name"] for claim in shards["volumeClaimTemplates"]] == ["state"]
    assert "podAntiAffinity" in made["Deployment", "coordinator"]["spec"]["template"]["spec"]["affinity"]
    assert set(made["ConfigMap", "job"]["data"]) == {"job.yaml", "mine.model.py"}
