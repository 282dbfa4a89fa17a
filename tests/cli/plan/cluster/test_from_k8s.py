"""`hetpipe cluster from-k8s`: a cluster file from what `kubectl get nodes -o json` prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import document_of, parse_document

RECORDED = Path(__file__).parent / "kubernetes_nodes" / "heterogeneous.json"

Json = dict[str, Any]


def invoke(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, ["cluster", "from-k8s", *arguments], input=given)


def cluster_in(result: Result) -> Cluster:
    assert result.exit_code == 0, result.stderr
    return parse_document(Cluster, result.stdout, what="printed")


def recorded(*names: str) -> list[Json]:
    nodes: list[Json] = json.loads(RECORDED.read_text())["items"]
    return [node for node in nodes if not names or node["metadata"]["name"] in names]


def as_list(*nodes: Json) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": nodes})


def changed(name: str, change: Callable[[Json], object]) -> str:
    (node,) = recorded(name)
    change(node)
    return as_list(node)


class TestACluster:
    def test_gpus_that_pods_can_be_given_by_their_types_in_the_catalogue(self) -> None:
        cluster = cluster_in(invoke(str(RECORDED)))
        assert {node.name: node.devices for node in cluster.nodes} == {
            "gpu-a100-0": ("A100_40GB",) * 8,
            "gpu-3090-0": ("RTX_3090",) * 4,
            "gpu-3090-1": ("RTX_3090",) * 4,
            "gpu-3090-2": ("RTX_3090",) * 3,
            "gpu-t4-0": ("T4",),
            "gpu-a10g-0": ("NVIDIA A10G",),
            "gpu-l4-0": ("L4",),
        }

    def test_memory_is_the_label_s_and_without_one_the_catalogue_s(self) -> None:
        types = cluster_in(invoke(str(RECORDED))).device_types
        assert types["T4"].memory_bytes == 15_360 << 20
        assert types["L4"].memory_bytes == 24 << 30

    def test_nodes_left_out_are_named_with_the_reason(self) -> None:
        told = invoke(str(RECORDED)).stderr.splitlines()
        assert [(line.split(":")[0], line.split(": ")[1].split(";")[0].split(",")[0]) for line in told[:6]] == [
            ("left out control-0", "it has no GPU"),
            ("left out gpu-3090-3", "it is cordoned"),
            ("left out gpu-3090-4", "it is not ready"),
            ("left out gpu-t4-1", "its GPUs (Tesla-T4-SHARED) are shared by several pods"),
            (
                "left out gpu-mig-0",
                "its GPUs are cut into slices (NVIDIA-A100-SXM4-40GB-MIG-1g.5gb)",
            ),
            ("left out gpu-bare-0", "it has GPUs and no label nvidia.com/gpu.product"),
        ]

    def test_a_product_that_the_catalogue_lacks_says_what_to_add(self) -> None:
        (told,) = [line for line in invoke(str(RECORDED)).stderr.splitlines() if "A10G" in line]
        assert told.startswith("the catalogue has no NVIDIA A10G, so its memory is the label's; add it to the profile")

    def test_from_standard_input_and_as_json(self) -> None:
        printed = invoke("--json", given=RECORDED.read_text())
        cluster = document_of(Cluster, json.loads(printed.stdout.splitlines()[-1]), what="answer")
        assert cluster == cluster_in(invoke("-", given=RECORDED.read_text())) == cluster_in(invoke(str(RECORDED)))

    def test_one_node_alone(self) -> None:
        assert cluster_in(invoke(given=json.dumps(recorded("gpu-t4-0")[0]))).devices == {"gpu-t4-0/0": "T4"}

    def test_named_as_the_agents_are(self) -> None:
        cluster = cluster_in(invoke(str(RECORDED), "--as-agents"))
        assert [node.name for node in cluster.nodes] == [
            "a100-40gb-0",
            *("rtx-3090-x4-0", "rtx-3090-x4-1", "rtx-3090-x3-0"),
            *("t4-0", "nvidia-a10g-0", "l4-0"),
        ]

    def test_groups_stay_together_in_the_order_of_their_first_nodes(self) -> None:
        nodes = as_list(*recorded("gpu-3090-0"), *recorded("gpu-t4-0"), *recorded("gpu-3090-1"))
        cluster = cluster_in(invoke("--as-agents", given=nodes))
        assert [node.name for node in cluster.nodes] == ["rtx-3090-0", "rtx-3090-1", "t4-0"]


class TestNothingToWrite:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (
                lambda node: node["status"]["allocatable"].update({"nvidia.com/gpu": "0"}),
                "can be allocated as nvidia.com/gpu",
            ),
            (lambda node: node["status"]["conditions"].clear(), "it is not ready"),
            (
                lambda node: (
                    node["status"]["allocatable"].pop("nvidia.com/gpu"),
                    node["metadata"]["labels"].pop("nvidia.com/gpu.count"),
                ),
                "can be allocated as nvidia.com/gpu",
            ),
            (lambda node: node["metadata"]["labels"].update({"nvidia.com/gpu.replicas": "2"}), "are shared by several"),
            (
                lambda node: node["metadata"]["labels"].pop("nvidia.com/gpu.memory"),
                "the catalogue has no NVIDIA-A10G, and there is no label nvidia.com/gpu.memory",
            ),
        ],
    )
    def test_a_node_that_cannot_be_used(self, change: Callable[[Json], object], reason: str) -> None:
        result = invoke(given=changed("gpu-a10g-0", change))
        assert result.exit_code == 2
        assert reason in result.stderr
        assert result.stderr.splitlines()[-1].startswith("error: no node in standard input has a GPU")
        assert result.stdout == ""

    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            ("", "is not JSON (Expecting value"),
            ("NAME STATUS\n", "is not JSON (Expecting value"),
            ("[]", "Input should be a valid dictionary"),
            ("{}", "items: Field required"),
            ('{"items": 3}', "items: Input should be a valid tuple"),
            ('{"items": [{"kind": "Pod", "metadata": {"name": "x"}}]}', "items[0].kind: Input should be 'Node'"),
            ('{"items": [{"kind": "Node", "metadata": {}}]}', "items[0].metadata.name: Field required"),
        ],
    )
    def test_what_is_no_list_of_nodes(self, given: str, sentence: str) -> None:
        result = invoke("--json", given=given)
        assert result.exit_code == 2
        (told,) = json.loads(result.stdout)["errors"]
        assert told.startswith(f"standard input: {sentence}")
        assert told.endswith("it must be the output of `kubectl get nodes -o json`")

    @pytest.mark.parametrize("number", ["-1", "4.5", "four", "9" * 30])
    def test_numbers_that_are_none(self, number: str) -> None:
        def label(node: Json) -> None:
            node["metadata"]["labels"]["nvidia.com/gpu.memory"] = number

        result = invoke(given=changed("gpu-t4-0", label))
        assert result.exit_code == 2
        assert "nvidia.com/gpu.memory of node gpu-t4-0 is" in result.stderr

    def test_a_node_twice(self) -> None:
        result = invoke(given=as_list(*recorded("gpu-t4-0"), *recorded("gpu-t4-0")))
        assert result.exit_code == 2
        assert "items has node gpu-t4-0 more than once" in result.stderr

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        result = invoke(str(tmp_path / "none.json"))
        assert result.exit_code == 2
        assert "cannot be read (No such file or directory)" in result.stderr
