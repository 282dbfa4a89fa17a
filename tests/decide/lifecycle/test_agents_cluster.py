"""The cluster that registered agents make."""

from __future__ import annotations

from hetpipe.decide.lifecycle.known_cluster import ASSUMED_LINKS, cluster_of
from hetpipe.values.cluster import Cluster, Links, LinkSpec
from hetpipe.values.document import parse_document, to_yaml
from hetpipe.values.ids import AgentId
from hetpipe.values.run import AgentDevice, AgentInfo, type_of
from tests.server.coordinator.builders import agent_info

T4_BYTES = 15_843_721_216


def agent(name: str, *devices: AgentDevice) -> AgentInfo:
    return AgentInfo(AgentId(name), f"{name}.host", 1, devices)


def t4(name: str, memory_bytes: int = T4_BYTES) -> AgentDevice:
    return AgentDevice(name, "Tesla T4", memory_bytes, "cuda:0")


def test_a_type_has_the_catalogues_name_where_there_is_one() -> None:
    assert type_of(t4("a/0")) == "T4"
    assert type_of(AgentDevice("a/0", "Curious 9000", 8 << 30, "cuda:0")) == "Curious 9000"
    assert type_of(agent_info().devices[0]) == "cpu"


def test_every_agent_is_a_node_with_its_devices_in_order() -> None:
    cluster = cluster_of([agent("b", t4("b/0"), t4("b/1")), agent_info("a", devices=1)])
    assert cluster.devices == {"b/0": "T4", "b/1": "T4", "a/0": "cpu"}
    assert cluster.links == ASSUMED_LINKS
    assert cluster.link("a", "b").bandwidth_bytes_per_second < cluster.link("a", "a").bandwidth_bytes_per_second


def test_a_type_has_the_memory_of_its_smallest_device() -> None:
    cluster = cluster_of([agent("a", t4("a/0")), agent("b", t4("b/0", T4_BYTES - 7))])
    assert cluster.device_types["T4"].memory_bytes == T4_BYTES - 7


def test_devices_are_named_by_their_place_among_the_free_ones() -> None:
    assert list(cluster_of([agent("a", t4("a/1"), t4("a/3"))]).devices) == ["a/0", "a/1"]


def test_it_may_be_written_read_and_given_other_links() -> None:
    links = Links(intra_node=LinkSpec(bandwidth_bytes_per_second=3e9), inter_node=ASSUMED_LINKS.inter_node)
    cluster = cluster_of([agent_info()], links)
    assert cluster.links == links
    assert parse_document(Cluster, to_yaml(cluster), what="written") == cluster
