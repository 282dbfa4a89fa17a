"""Which links a cluster is planned with: stated before measured before assumed, pair by pair."""

from __future__ import annotations

import pytest

from hetpipe.decide.lifecycle.known_cluster import (
    ASSUMED_LINKS,
    BETWEEN_NODES,
    WITHIN_NODE,
    KnownLinks,
    cluster_of,
    known_links,
    stated_links,
)
from hetpipe.errors import UserError
from hetpipe.values.cluster import Cluster, Links, LinkSpec
from hetpipe.values.document import parse_document, to_yaml
from hetpipe.values.link_measurement import (
    VALID_SECONDS,
    CopyMeasurement,
    CopyMethod,
    LinkMeasurement,
    LinksFingerprint,
    MeasuredLinks,
    TransferSpeed,
)
from tests.server.coordinator.builders import agent_info

NOW = 1_700_000_000.0


def speed(bytes_per_second: float, latency_seconds: float = 1e-4) -> TransferSpeed:
    return TransferSpeed(
        latency_seconds=latency_seconds,
        bytes_per_second=bytes_per_second,
        small_bytes=256,
        large_bytes=1 << 22,
        repeats=20,
    )


def link(a: str, b: str, bytes_per_second: float, *, latency: float = 1e-4, age: float = 0.0) -> LinkMeasurement:
    return LinkMeasurement(
        between=(a, b),
        transport="gloo",
        speed=speed(bytes_per_second, latency),
        measured_at=NOW - age,
        versions=("0.1.0", "2.9"),
    )


def copies(
    node: str, bytes_per_second: float, *, method: CopyMethod = "cuda", latency: float = 1e-5, age: float = 0.0
) -> CopyMeasurement:
    return CopyMeasurement(
        node=node,
        device_type="T4",
        method=method,
        speed=speed(bytes_per_second, latency),
        measured_at=NOW - age,
        versions=("0.1.0", "2.9"),
    )


def known(nodes: str, *links: LinkMeasurement, copied: tuple[CopyMeasurement, ...] = ()) -> KnownLinks:
    return known_links(nodes.split(), MeasuredLinks(links=links, copies=copied), now=NOW)


def sources(found: KnownLinks) -> dict[tuple[str, str], str]:
    return {origin.between: origin.source for origin in found.origins}


def cluster_with(found: KnownLinks, *nodes: str) -> Cluster:
    cluster = cluster_of([agent_info(node, devices=1) for node in nodes], found.links)
    return parse_document(Cluster, to_yaml(cluster), what="written")


def test_without_a_measurement_all_is_assumed_and_said_to_be() -> None:
    found = known("a b")
    assert found.links == ASSUMED_LINKS
    assert sources(found) == {("a", "a"): "assumed", ("b", "b"): "assumed", ("a", "b"): "assumed"}
    assert found.sources == ("assumed",)


def test_a_measured_pair_has_its_own_link_and_the_others_what_is_assumed() -> None:
    found = known("a b c", link("b", "a", 3e8), link("c", "c", 5e9))
    cluster = cluster_with(found, "a", "b", "c")
    assert cluster.link("a", "b").bandwidth_bytes_per_second == 3e8
    assert cluster.link("c", "c").bandwidth_bytes_per_second == 5e9
    assert cluster.link("a", "c") == BETWEEN_NODES
    assert cluster.link("a", "a") == WITHIN_NODE
    assert found.sources == ("measured", "assumed")
    assert [origin.words for origin in found.origins if origin.source == "measured"] == ["within c", "between a and b"]


def test_where_all_is_measured_the_slowest_is_the_common_one() -> None:
    pairs = [link("a", "b", 4e8), link("a", "c", 2e8), link("b", "c", 4e8)]
    found = known("a b c", *pairs, link("a", "a", 5e9), link("b", "b", 5e9), link("c", "c", 5e9))
    assert found.links.inter_node.bandwidth_bytes_per_second == 2e8
    assert found.links.intra_node.bandwidth_bytes_per_second == 5e9
    assert [override.between for override in found.links.overrides] == [("a", "b"), ("b", "c")]
    assert cluster_with(found, "a", "b", "c").link("c", "b").bandwidth_bytes_per_second == 4e8
    assert found.sources == ("measured",)


def test_an_old_measurement_is_none_and_of_two_the_newer_counts() -> None:
    assert known("a", link("a", "a", 5e9, age=VALID_SECONDS + 1)).links == ASSUMED_LINKS
    assert known("a", link("a", "a", 5e9, age=-1)).links == ASSUMED_LINKS, "of the future"
    found = known("a", link("a", "a", 5e9, age=5), link("a", "a", 6e9, age=9))
    assert found.links.intra_node.bandwidth_bytes_per_second == 5e9
    assert found.origins[0].measured_at == NOW - 5


def test_a_link_of_other_nodes_does_not_count() -> None:
    assert known("a", link("z", "z", 5e9), link("a", "z", 5e9)).links == ASSUMED_LINKS


def test_copies_to_and_from_devices_take_their_time_on_both_sides() -> None:
    """Both directions of a frame: 1/2 + 1/4 + 1/4 = 1 second per GB; of two kinds of devices the slower."""
    found = known(
        "a b", link("a", "b", 2e9, latency=1e-4), copied=(copies("a", 4e9), copies("b", 9e9), copies("b", 4e9))
    )
    spec = cluster_with(found, "a", "b").link("a", "b")
    assert spec.bandwidth_bytes_per_second == pytest.approx(1e9)
    assert spec.latency_seconds == pytest.approx(1.2e-4)


def test_a_stage_on_a_cpu_copies_nothing() -> None:
    found = known("a", link("a", "a", 2e9), copied=(copies("a", 4e9, method="memcpy"),))
    assert found.links.intra_node.bandwidth_bytes_per_second == 2e9
    old = known("a", link("a", "a", 2e9), copied=(copies("a", 4e9, age=VALID_SECONDS + 1),))
    assert old.links.intra_node.bandwidth_bytes_per_second == 2e9


def test_what_a_file_states_holds_whatever_was_measured() -> None:
    links = Links(intra_node=LinkSpec(bandwidth_bytes_per_second=3e9), inter_node=BETWEEN_NODES)
    found = stated_links(links, ["a", "b"])
    assert found.links == links
    assert found.sources == ("stated",)


def test_a_link_too_slow_for_a_cluster_is_told_by_its_name() -> None:
    with pytest.raises(UserError, match=r"the link between a and b was measured at 48.8 KiB/s"):
        known("a b", link("a", "b", 5e4))


def fingerprint(**values: object) -> LinksFingerprint:
    given = {"nodes": ("a", "b"), "transport": "gloo", "processor": "p", "devices": (), "versions": ("1", "2")}
    return LinksFingerprint(**{**given, **values})  # type: ignore[arg-type]


def test_what_a_measurement_depends_on_is_in_its_key_and_the_order_of_nodes_is_not() -> None:
    assert fingerprint().key == fingerprint(nodes=("b", "a")).key
    others = [
        fingerprint(nodes=("a", "c")),
        fingerprint(transport="grpc"),
        fingerprint(processor="q"),
        fingerprint(devices=("T4",)),
        fingerprint(versions=("1", "3")),
        fingerprint(method=2),
    ]
    assert len({fingerprint().key, *(other.key for other in others)}) == 7
