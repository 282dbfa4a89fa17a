"""Why each stage ends where it does, and where none can: on the terminal, as JSON, and as a picture."""

from __future__ import annotations

import io
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from hetpipe.decide.planner.choose import choose_plan, closed_form
from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.simulator.documents import simulated_plan
from hetpipe.errors import PlanError
from hetpipe.report.model_picture import StageColumn, draw_model
from hetpipe.report.plan_page import page_of, picture_of
from hetpipe.report.plan_reasons import reasons_of
from hetpipe.report.plan_screen import show_plan
from hetpipe.report.plan_view import PlanFacts, view_of
from hetpipe.values.cluster import Cluster, DeviceType, Links, LinkSpec, Node
from hetpipe.values.document import to_plain
from hetpipe.values.ids import DeviceId
from hetpipe.values.profile import AliveValue, ForbiddenCut, LayerProfile, Profile

MIB = 1 << 20
BUFFER = "buffer seen is written before it and used after it"


def layer(
    name: str, forward_ms: float, *alive: AliveValue, no_cut: str = "", forbidden: tuple[ForbiddenCut, ...] = ()
) -> LayerProfile:
    return LayerProfile(
        name=name,
        parameter_bytes=MIB,
        activation_bytes=MIB,
        output_bytes=sum(value.num_bytes for value in alive),
        gradient_bytes=sum(value.num_bytes for value in alive if value.has_gradient),
        alive=alive,
        no_cut=no_cut,
        forbidden=forbidden,
        forward_ms={"T": forward_ms},
        backward_ms={"T": 2 * forward_ms},
    )


def alive(name: str, mib: float, *, gradient: bool = True) -> AliveValue:
    return AliveValue(name=name, num_bytes=int(mib * MIB), has_gradient=gradient)


TIE, MASK = alive("parameter:embed.weight", 8), alive("mask:0", 0.5, gradient=False)

#: A tied weight is used by the first and the last layer; before `b` the cut is forbidden, and within `c`, too.
PROFILE = Profile(
    version=2,
    model="tied",
    batch_size=4,
    input_bytes=64,
    layers=(
        layer("embed", 1.0, TIE, MASK, alive("embed:0", 1)),
        layer("a", 3.0, TIE, MASK, alive("a:0", 1), no_cut=BUFFER),
        layer("b", 3.0, TIE, MASK, alive("b:0", 1)),
        layer(
            "c",
            3.0,
            TIE,
            alive("c:0", 1),
            forbidden=(ForbiddenCut(before="c.up", upto="c.down", places=3, reason="it is recomputed"),),
        ),
        layer("head", 2.0, alive("head:0", 4)),
    ),
)
CLUSTER = Cluster(
    device_types={"T": DeviceType(memory_bytes=1 << 30)},
    nodes=(Node(name="n0", devices=("T", "T")),),
    links=Links(
        intra_node=LinkSpec(bandwidth_bytes_per_second=8e9, latency_seconds=1e-5),
        inter_node=LinkSpec(bandwidth_bytes_per_second=1e9, latency_seconds=1e-5),
    ),
)
OPTIONS = PlanOptions(
    allocation="explicit", workers=((DeviceId("n0/0"), DeviceId("n0/1")),), minibatches_per_wave=2, with_shards=True
)


@pytest.fixture(scope="module")
def facts() -> PlanFacts:
    document = choose_plan(PROFILE, CLUSTER, OPTIONS, predict=closed_form)
    return PlanFacts(document, Costs(PROFILE, CLUSTER), OPTIONS)


WHY = """\
borders of stages
virtual worker 0, stage 0 | 1: before layer 3 (c)
  9.5 MiB forward (1.26 ms), 9 MiB back (1.19 ms), of both 8 MiB tied weights; alive: parameter:embed.weight 8 MiB, \
b:0 1 MiB, mask:0 512 KiB (no gradient)
  not before layer 1 (a): 9.5 MiB forward, 9 MiB back; the longest stage would take 54.4 % longer
  not before layer 2 (b): 9.5 MiB forward, 9 MiB back; forbidden: buffer seen is written before it and used after it
  not before layer 4 (head): 9 MiB forward, 9 MiB back; the longest stage would take 40.6 % longer

forbidden cuts
no cut before b: buffer seen is written before it and used after it
no cut before c.up … c.down (3 places): it is recomputed
"""


def test_why_names_what_is_alive_the_bytes_each_way_the_alternatives_and_what_is_forbidden(facts: PlanFacts) -> None:
    stream = io.StringIO()
    show_plan(view_of(facts), reasons_of(facts), Console(file=stream, width=400, highlight=False), why="full")
    text = "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"

    assert text[text.index("borders of stages") :] == WHY


def test_json_has_them_too(facts: PlanFacts) -> None:
    plain = to_plain(facts.plan)
    (border,) = plain["borders"]

    assert (border["cut"], border["before"], border["tie_bytes"]) == (3, "c", 8 * MIB)
    assert border["forward_bytes"] == border["backward_bytes"] + MIB // 2
    assert [one["cut"] for one in border["alternatives"]] == [1, 2, 4]
    assert [one["bottleneck_ms"] is None for one in border["alternatives"]] == [False, True, False]
    assert [(each["before"], each["reason"]) for each in plain["forbidden"]] == [
        ("b", BUFFER),
        ("c.up", "it is recomputed"),
    ]


def test_a_stated_plan_that_ends_a_stage_at_a_forbidden_cut_is_refused_with_the_neighbours(facts: PlanFacts) -> None:
    (worker,) = facts.plan.virtual_workers
    first, second = worker.stages
    moved = worker.model_copy(
        update={
            "stages": (
                first.model_copy(update={"layers": (0, 2)}),
                second.model_copy(update={"layers": (2, 5)}),
            )
        }
    )
    with pytest.raises(PlanError) as caught:
        simulated_plan(facts.plan.model_copy(update={"virtual_workers": (moved,)}), facts.costs)
    assert str(caught.value) == (
        f"stage 0 of virtual worker 0 ends before layer 2 (b), where the model cannot be cut: {BUFFER}; let it end "
        "after 1 or 3 layers"
    )


def test_the_picture_has_a_box_per_layer_bars_each_way_and_the_reasons(facts: PlanFacts) -> None:
    svg = ET.fromstring(str(draw_model(PROFILE.layers, [StageColumn("VW 0", (3,))], title="tied & cut")))
    name = "{http://www.w3.org/2000/svg}" if svg.tag.startswith("{") else ""
    rects = [(rect.get("class"), float(rect.get("width") or 0)) for rect in svg.iter(f"{name}rect")]
    texts = ["".join(text.itertext()) for text in svg.iter(f"{name}text")]

    assert [kind for kind, _ in rects].count("unit") == len(PROFILE.layers)
    assert [kind for kind, _ in rects if str(kind).startswith("stage")] == ["stage0"] * 3 + ["stage1"] * 2
    forward = [width for kind, width in rects if kind == "forward"]
    backward = [width for kind, width in rects if kind == "backward"]
    assert forward[0] > backward[0]
    assert forward[-1] == backward[-1]
    assert len([line for line in svg.iter(f"{name}line") if line.get("class") == "border"]) == 2
    assert len([line for line in svg.iter(f"{name}line") if line.get("class") == "barred"]) == 1
    assert any(BUFFER in text for text in texts)
    assert any("not cut at 3 places within: it is recomputed" in text for text in texts)
    whole = page_of(view_of(facts), reasons_of(facts), picture_of(facts))
    assert 'class="model"' in whole
    assert "Forbidden cuts" in whole


def test_names_of_a_model_cannot_leave_the_picture() -> None:
    hostile = PROFILE.layers[0].model_copy(update={"name": "</title><script>alert(1)</script>"})
    drawn = str(draw_model((hostile, *PROFILE.layers[1:]), [StageColumn("<b>", (3,))], title="<i>"))
    assert "<script>" not in drawn
    ET.fromstring(drawn)
