"""What a machine remembers of its links, and under which name its agent tells of it."""

from __future__ import annotations

from pathlib import Path

from hetpipe.profiler.link_cache import LinkCache, NodeLinks
from hetpipe.values.link_measurement import VALID_SECONDS, MeasuredLinks
from tests.decide.lifecycle.test_known_links import NOW, copies, link


def cache(folder: Path, *types: str, machine: str = "here") -> LinkCache:
    return LinkCache({"XDG_CACHE_HOME": str(folder)}, machine=machine, device_types=types)


def node_links(folder: Path, *types: str, machine: str = "here", node: str = "n0") -> NodeLinks:
    return NodeLinks({"XDG_CACHE_HOME": str(folder)}, machine=machine, node=node, device_types=types)


def test_an_agent_tells_what_was_measured_on_its_machine_under_its_own_name(tmp_path: Path) -> None:
    """`hetpipe profile --links` knows the machine's name, an agent may have been given another one."""
    measured = MeasuredLinks(
        links=(link("here", "here", 7e8), link("there", "there", 1.0)), copies=(copies("here", 1e9),)
    )
    cache(tmp_path, "T4", "T4").keep(measured)
    known = node_links(tmp_path, "T4")
    found = known.find(now=NOW)
    assert found == MeasuredLinks(links=(link("n0", "n0", 7e8),), copies=(copies("n0", 1e9),))
    assert found.is_of("n0") and not found.is_of("n1")
    assert not node_links(tmp_path, "cpu").find(now=NOW), "other devices"
    assert not node_links(tmp_path, "T4", machine="there").find(now=NOW)
    assert not known.find(now=NOW + VALID_SECONDS + 1), "too old"


def test_an_agent_remembers_links_to_other_nodes_beside_those_of_its_machine(tmp_path: Path) -> None:
    cache(tmp_path, "T4").keep(MeasuredLinks(links=(link("here", "here", 7e8),)))
    known = node_links(tmp_path, "T4")
    known.keep(MeasuredLinks(links=(link("n0", "n1", 3e8), link("n1", "n2", 1.0))), now=NOW)
    known.keep(MeasuredLinks(links=(link("n1", "n0", 4e8), link("n2", "n0", 5e8))), now=NOW)
    found = {each.between: each.speed.bytes_per_second for each in node_links(tmp_path, "T4").find(now=NOW).links}
    assert found == {("n1", "n0"): 4e8, ("n2", "n0"): 5e8, ("n0", "n0"): 7e8}
    assert node_links(tmp_path, "T4", node="n1").find(now=NOW).links == (link("n1", "n1", 7e8),)
