"""Clusters: what they answer, which are refused, and where they say it."""

from __future__ import annotations

from typing import Any

import pytest

from hetpipe.values.cluster import Cluster, node_of
from hetpipe.values.document import document_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.problems import format_path
from tests.values.document_cases import ABSENT, CLUSTER, GIB, changed, problems

GOOD = document_of(Cluster, CLUSTER, what="c")


def refused(changes: dict[tuple[str | int, ...], Any]) -> list[str]:
    return problems(Cluster, changed(CLUSTER, changes))


class TestAnswers:
    def test_devices_are_named_by_node_and_position(self) -> None:
        assert GOOD.devices == {"n0/0": "V", "n0/1": "V", "n1/0": "Q", "n1/1": "V"}
        assert node_of(DeviceId("n0/3")) == "n0"

    def test_links_and_overrides(self) -> None:
        assert GOOD.link("n0", "n0") == GOOD.links.intra_node
        assert GOOD.link("n0", "n1").bandwidth_bytes_per_second == 7e9
        assert GOOD.link("n1", "n0") == GOOD.link("n0", "n1")
        assert GOOD.link("n1", "n1").bandwidth_bytes_per_second == 3e9
        assert GOOD.network_card("n1") == 7e9

    def test_a_transfer_takes_latency_and_bytes(self) -> None:
        link = GOOD.links.intra_node
        assert link.transfer_ms(0) == pytest.approx(0.01)
        assert link.transfer_ms(12_600_000) == pytest.approx(0.01 + 1.0)

    def test_what_the_catalogue_knows_need_not_be_given(self) -> None:
        types: dict[str, Any] = {"rtx_2060": None, "Tesla T4": {}, "RTX_3090": {"memory_bytes": 25438126080}}
        nodes = [{"name": "n", "devices": list(types)}]
        links = {**CLUSTER["links"], "overrides": []}
        cluster = document_of(Cluster, {"device_types": types, "nodes": nodes, "links": links}, what="c")
        memory = {name: kind.memory_bytes for name, kind in cluster.device_types.items()}
        assert memory == {"rtx_2060": 6 * GIB, "Tesla T4": 16 * GIB, "RTX_3090": 25438126080}
        assert cluster.version == 1


class TestMistakes:
    def test_many_at_once(self) -> None:
        found = refused(
            {
                ("device_types", "V", "memory_bytes"): -1,
                ("device_types", "RTX3080"): {},
                ("nodes", 0, "devices", 1): "R",
                ("nodes", 1, "name"): "n0",
                ("links", "inter_node", "latency"): 5,
                ("links", "inter_node", "latency_seconds"): 50,
                ("links", "overrides", 0, "between"): ["n0", "n7"],
            }
        )
        assert sorted(found) == [
            "device_types.V.memory_bytes: must be at least 1, not -1",
            "links.inter_node.latency: unknown key; did you mean `latency_seconds`?",
            ("links.inter_node.latency_seconds: is 50 seconds; for microseconds write 5e-05, for milliseconds 0.05"),
            "links.overrides[0].between[1]: is the text 'n7', which is not a node; use n0",
            "links.overrides[1].between[0]: is the text 'n1', which is not a node; use n0",
            "links.overrides[1].between[1]: is the text 'n1', which is not a node; use n0",
            "nodes[0].devices[1]: is of type the text 'R', which is not in device_types; use Q, RTX3080, RTX_3090 or V",
            "nodes[1].name: is the text 'n0', as that of nodes[0]; rename one",
        ]

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (
                ("device_types", "V", "memory_bytes"),
                12,
                f"is 12 bytes; for 12 GiB write {12 * GIB}",
            ),
            (
                ("device_types", "V", "memory_bytes"),
                12288,
                f"is 12288 bytes; for 12288 MiB write {12 * GIB}",
            ),
            (
                ("device_types", "RTX_3090", "memory_bytes"),
                24_000_000_000,
                "is 24000000000, counting in GB; the catalogue has 25769803776 (24 GiB)",
            ),
            (
                ("device_types", "V", "peak_flops"),
                14.9,
                "is 14.9 operations per second; for teraFLOP/s write 1.49e+13",
            ),
            (
                ("device_types", "V", "peak_flops"),
                14900,
                "is 14900 operations per second; for gigaFLOP/s write 1.49e+13",
            ),
            (
                ("device_types", "V", "peak_flops"),
                0,
                "must be more than 0, not 0",
            ),
            (
                ("device_types", "RTX_3090", "peak_flops"),
                142e12,
                (
                    "is 1.42e+14, which includes sparsity: the catalogue's dense peak is 7.1e+13; write 7.1e+13, or "
                    "the peak of the format that the model computes in"
                ),
            ),
            (
                ("links", "intra_node", "bandwidth_bytes_per_second"),
                100,
                "is 100 bytes per second; for gigabytes write 1e+11, for gigabits 1.25e+10",
            ),
            (
                ("links", "intra_node", "bandwidth_bytes_per_second"),
                10000.0,
                "is 10000 bytes per second; for megabytes write 1e+10, for megabits 1.25e+09",
            ),
            (
                ("links", "intra_node", "efficiency"),
                80,
                "is 80, but a share is at most 1; for 80 % write 0.8",
            ),
            (
                ("links", "intra_node", "efficiency"),
                0,
                "must be more than 0, not 0",
            ),
            (
                ("links", "overrides", 1, "between"),
                ["n1", "n0"],
                "duplicates the link of overrides[0]; remove one",
            ),
            (
                ("links", "overrides", 0, "between"),
                ["n1", "n0", "n0"],
                "must have 2 entries, not 3",
            ),
            (
                ("nodes", 0, "name"),
                "n/0",
                "begins device names, so it has no slash and no blanks around it, unlike the text 'n/0'",
            ),
            (("nodes",), [], "have no devices; give at least one"),
            (("links",), ABSENT, "is missing; add it"),
        ],
    )
    def test_one_by_one(self, path: tuple[str | int, ...], value: object, message: str) -> None:
        assert f"{format_path(path)}: {message}" in refused({path: value})

    def test_memory_that_nobody_knows(self) -> None:
        assert refused({("device_types", "RTX3080X"): {}, ("device_types", "loom"): None}) == [
            (
                "device_types.RTX3080X.memory_bytes: is missing, and RTX3080X is not in the catalogue (did you mean "
                "`RTX_3080`?); add it"
            ),
            (
                "device_types.loom.memory_bytes: is missing, and loom is not in the catalogue (`hetpipe cluster "
                "catalogue` lists the known types); add it"
            ),
        ]
