"""`hetpipe cluster`: tables for people, documents for programs, this machine as a file to begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.cli.plan.cluster import show
from hetpipe.cli.plan.cluster.show import cluster_of
from hetpipe.values.catalogue import CATALOGUE
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import document_of, parse_document
from hetpipe.values.run import AgentDevice

CLUSTER = """\
device_types: {TITAN_V: {}, Q: {memory_bytes: 8589934592}}
nodes:
  - {name: n0, devices: [TITAN_V, TITAN_V, Q]}
  - {name: n1, devices: [Q]}
links:
  intra_node: {bandwidth_bytes_per_second: 15.75e9, efficiency: 0.8}
  inter_node: {bandwidth_bytes_per_second: 1.25e9, latency_seconds: 5e-5}
  overrides:
    - {between: [n0, n1], bandwidth_bytes_per_second: 7e9}
    - {between: [n1, n1], bandwidth_bytes_per_second: 8e9}
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cluster", *arguments])


def answer(result: Result) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return value


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return str(path)


def device(index: int, kind: str, memory_bytes: int) -> AgentDevice:
    return AgentDevice(f"n0/{index}", kind, memory_bytes, f"cuda:{index}")


class TestShow:
    def test_a_file_as_tables(self, file: str) -> None:
        assert invoke("show", file).stdout == (
            "node  devices   type     GiB each\n"
            "n0    n0/0 … 1  TITAN_V      12.0\n"
            "n0    n0/2      Q             8.0\n"
            "n1    n1/0      Q             8.0\n"
            "\n"
            "link            GB/s  efficiency  latency µs\n"
            "within a node  15.75         0.8           0\n"
            "between nodes   1.25           1          50\n"
            "n0 - n1            7           1           0\n"
            "within n1          8           1           0\n"
            "\n"
            "4 devices of 2 types on 2 nodes\n"
        )

    def test_a_file_as_json_is_the_document_with_all_memory_in_it(self, file: str) -> None:
        cluster = document_of(Cluster, answer(invoke("show", file, "--json")), what="answer")
        assert cluster == parse_document(Cluster, CLUSTER, what="file")
        assert answer(invoke("show", file, "--json"))["device_types"]["TITAN_V"] == {"memory_bytes": 12 << 30}

    def test_every_mistake_of_a_file_is_told(self, file: str) -> None:
        Path(file).write_text(CLUSTER.replace("0.8", "80").replace("name: n1", "name: n0"))
        result = invoke("show", file, "--json")
        assert result.exit_code == 2
        told = answer(result)["errors"]
        assert [error.removeprefix(f"{file}: ").split(":")[0] for error in told] == [
            "links.intra_node.efficiency",
            "nodes[1].name",
            "links.overrides[0].between[1]",
            "links.overrides[1].between[0]",
            "links.overrides[1].between[1]",
        ]
        assert all(f"error: {error}" in result.stderr for error in told)

    def test_this_machine_is_a_file_to_save(self, monkeypatch: pytest.MonkeyPatch) -> None:
        devices = (device(0, "NVIDIA GeForce RTX 3090", 25_438_126_080), device(1, "Tesla T4", 15_843_721_216))
        monkeypatch.setattr(show, "discover_devices", lambda _: devices)
        result = invoke("show")
        assert result.exit_code == 0, result.output
        assert parse_document(Cluster, result.stdout, what="printed") == cluster_of(devices)
        assert document_of(Cluster, answer(invoke("show", "--json")), what="json") == cluster_of(devices)

    def test_without_any_gpu_it_has_cpus(self) -> None:
        cluster = parse_document(Cluster, invoke("show").stdout, what="printed")
        assert cluster.devices
        assert all(kind.memory_bytes > 1 << 20 for kind in cluster.device_types.values())


class TestThisMachine:
    def test_types_are_those_of_the_catalogue_with_the_memory_that_is_there(self) -> None:
        cluster = cluster_of(
            [
                device(0, "NVIDIA A100-SXM4-40GB", 42_505_273_344),
                device(1, "NVIDIA A100-SXM4-40GB", 42_405_273_344),
                device(2, "Curious 9000", 8 << 30),
            ]
        )
        assert cluster.devices == {"n0/0": "A100_40GB", "n0/1": "A100_40GB", "n0/2": "Curious 9000"}
        assert cluster.device_types["A100_40GB"].memory_bytes == 42_405_273_344

    def test_the_link_is_the_slowest_that_is_known(self) -> None:
        fast = cluster_of([device(0, "NVIDIA A100-SXM4-40GB", 42_505_273_344)])
        mixed = cluster_of([device(0, "NVIDIA A100-SXM4-40GB", 42_505_273_344), device(1, "Tesla T4", 15_843_721_216)])
        assert fast.links.intra_node.bandwidth_bytes_per_second == 300e9
        assert mixed.links.intra_node.bandwidth_bytes_per_second == pytest.approx(15.75e9, rel=1e-3)


class TestCatalogue:
    def test_a_table_with_sources(self) -> None:
        lines = invoke("catalogue", "titan").stdout.splitlines()
        assert lines[0].split()[:6] == ["type", "GiB", "fp32", "tf32", "bf16", "fp16"]
        assert lines[1].split() == [
            *("TITAN_RTX", "24", "16.3", "-", "-", "130.5", "672"),
            *("PCIe", "3.0", "x16", "15.75", "1"),
        ]
        assert lines[-1].startswith("source 1: NVIDIA TITAN")

    def test_all_of_it_as_json(self) -> None:
        types = answer(invoke("catalogue", "--json"))["types"]
        assert [entry["name"] for entry in types] == list(CATALOGUE)
        assert set(types[0]) == {
            *("name", "memory_bytes", "memory_bytes_per_second", "link", "source"),
            *(f"{precision}_flops_per_second" for precision in ("fp32", "tf32", "bf16", "fp16")),
        }

    def test_the_filter_forgives_case_and_punctuation(self) -> None:
        names = [entry["name"] for entry in answer(invoke("catalogue", "rtx-2080", "--json"))["types"]]
        assert names == ["RTX_2080", "RTX_2080_SUPER", "RTX_2080_TI"]

    def test_nothing_found(self) -> None:
        result = invoke("catalogue", "RTX_2O60", "--json")
        assert result.exit_code == 2
        assert "did you mean `RTX_2060`?" in answer(result)["errors"][0]
