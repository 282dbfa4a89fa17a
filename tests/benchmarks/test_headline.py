"""What the headline benchmark compares with, simulated by hand; its losses and its pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks import data_parallel, headline, paper, pictures
from hetpipe.decide.planner.costs import Costs
from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.values.ids import DeviceId
from hetpipe.values.profile import LayerProfile, Profile

ROOT = Path(__file__).parents[2]
BUCKET = 25 * 2**20 // paper.BYTES


def costs(*layers: tuple[int, float, float], memory_bytes: int = 1 << 30, num_fast: int = 1) -> Costs:
    """Layers of so many bytes; milliseconds forward and backward on the slow type, half of them on the fast one."""
    profile = Profile(
        version=1,
        model="m",
        batch_size=8,
        input_bytes=0,
        layers=tuple(
            LayerProfile(
                name=str(index),
                parameter_bytes=parameters,
                activation_bytes=0,
                output_bytes=0,
                forward_ms={"slow": forward, "fast": forward / 2},
                backward_ms={"slow": backward, "fast": backward / 2},
            )
            for index, (parameters, forward, backward) in enumerate(layers)
        ),
    )
    link = LinkSpec(bandwidth_bytes_per_second=1e6, latency_seconds=0.0)
    kinds = {"slow": DeviceType(memory_bytes=memory_bytes), "fast": DeviceType(memory_bytes=1 << 30)}
    nodes = (Node(name="n0", devices=("fast",) * num_fast), Node(name="n1", devices=("slow",)))
    return Costs(profile, Cluster(device_types=kinds, nodes=nodes, links=Links(intra_node=link, inter_node=link)))


def test_a_step_of_data_parallelism_hides_the_ring_behind_what_is_left_of_the_backward() -> None:
    """Two members move each bucket once: 26.2 kB take 26.2 ms at 1 MB/s, while the first layer goes back in 50 ms."""
    full = costs((0, 10, 50), (2 * BUCKET, 10, 20))
    ring = data_parallel.ring_of(full)
    assert ring.devices == ("n0/0", "n1/0")
    # Each matrix of the second layer is a bucket of its own, ready when that layer is done.
    assert data_parallel.simulated_seconds(full, ring) == pytest.approx(max(0.090, 0.040 + 2 * BUCKET / 1e6), abs=1e-9)


def test_a_step_ends_with_the_last_ring() -> None:
    full = costs((2 * BUCKET, 10, 50), (0, 10, 20))
    ring = data_parallel.ring_of(full)
    assert data_parallel.simulated_seconds(full, ring) == pytest.approx(0.090 + 2 * BUCKET / 1e6, abs=1e-9)


def test_devices_that_do_not_hold_the_model_take_no_part() -> None:
    ring = data_parallel.ring_of(costs((1 << 20, 1, 1), memory_bytes=(2 << 20) - 1, num_fast=2))
    assert ring.devices == (DeviceId("n0/0"), DeviceId("n0/1"))


def test_a_loss_is_the_mean_over_as_many_samples_for_everybody() -> None:
    waves = [headline.Point(float(at), loss, 256) for at, loss in enumerate([8.0, 4.0, 4.0, 4.0, 4.0])]
    step = [headline.Point(1.0, 3.0, 2048)]
    assert headline.smoothed(waves) == [(3.0, 5.0), (4.0, 4.0)]
    assert headline.smoothed(step) == [(1.0, 3.0)]


def elements(picture: str, tag: str) -> list[ET.Element]:
    return ET.fromstring(picture).findall(f"{{http://www.w3.org/2000/svg}}{tag}")


def test_bars_are_as_long_as_their_values_and_marked() -> None:
    picture = pictures.bars("a < b", [("one", 50.0, 100.0), ("two", 25.0, None)], legend="")
    first, second = (float(bar.attrib["width"]) for bar in elements(picture, "rect"))
    assert first == pytest.approx(2 * second, abs=0.1)
    mark = next(one for one in elements(picture, "path") if one.get("class") == "mark")
    at = float(mark.attrib["d"].split()[0].lstrip("M"))
    left = float(elements(picture, "rect")[0].attrib["x"])
    assert at - left == pytest.approx(2 * first, abs=0.2)


@pytest.mark.parametrize("part", ["headline", "thousand"])
def test_the_pictures_in_the_docs_are_those_of_the_run_that_is_kept(tmp_path: Path, part: str) -> None:
    said: dict[str, Any] = json.loads((ROOT / "benchmarks" / f"{part}.json").read_text())
    pictures.draw(said, tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / part).glob("*.svg")}
    assert drawn
    assert drawn == kept
