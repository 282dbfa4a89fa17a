"""What a machine remembers of its links, and under which name its agent tells of it."""

from __future__ import annotations

from pathlib import Path

from hetpipe.profiler.link_cache import LinkCache
from hetpipe.spec.link_measurement import VALID_SECONDS, MeasuredLinks
from tests.coordinator.test_known_links import NOW, copies, link


def cache(folder: Path, *types: str, machine: str = "here") -> LinkCache:
    return LinkCache({"XDG_CACHE_HOME": str(folder)}, machine=machine, device_types=types)


def test_an_agent_tells_what_was_measured_on_its_machine_under_its_own_name(tmp_path: Path) -> None:
    """`hetpipe profile --links` knows the machine's name, an agent may have been given another one."""
    measured = MeasuredLinks(
        links=(link("here", "here", 7e8), link("there", "there", 1.0)), copies=(copies("here", 1e9),)
    )
    cache(tmp_path, "T4", "T4").keep(measured)
    found = cache(tmp_path, "T4").find_of_node("n0", now=NOW)
    assert found == MeasuredLinks(links=(link("n0", "n0", 7e8),), copies=(copies("n0", 1e9),))
    assert found.is_of("n0") and not found.is_of("n1")
    assert not cache(tmp_path, "cpu").find_of_node("n0", now=NOW), "other devices"
    assert not cache(tmp_path, "T4", machine="there").find_of_node("n0", now=NOW)
    assert not cache(tmp_path, "T4").find_of_node("n0", now=NOW + VALID_SECONDS + 1), "too old"
