"""The screen of a plan: everything asked for is there, in any width, with or without colour."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
from rich.console import Console

from hetpipe.decide.planner.choose import with_utilisation
from hetpipe.report.plan_reasons import reasons_of
from hetpipe.report.plan_screen import show_plan
from hetpipe.report.plan_view import PlanFacts, view_of
from hetpipe.report.text import percent
from hetpipe.values.plan_document import Alternative
from tests.cli import plans


def screen(
    facts: PlanFacts,
    width: int,
    *,
    why: Literal["brief", "full"] = "brief",
    encoding: str = "utf-8",
    color: bool = False,
) -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=stream, width=width, highlight=False, force_terminal=color, color_system="truecolor" if color else None
    )
    show_plan(view_of(facts), reasons_of(facts), console, why=why)
    stream.seek(0)
    return stream.read().splitlines()


@pytest.mark.parametrize("width", [60, 80, 103, 104, 120, 200])
@pytest.mark.parametrize("make", [plans.equal_mix, plans.node_by_node, plans.long_names])
def test_no_line_is_wider_than_the_screen(make: Callable[[], PlanFacts], width: int) -> None:
    lines = screen(make(), width, why="full")
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_every_stage_is_there_with_all_that_was_asked_for(width: int) -> None:
    facts = plans.node_by_node()
    lines = screen(facts, width)
    for worker in facts.plan.virtual_workers:
        for stage in worker.stages:
            at = next(index for index, line in enumerate(lines) if f" {stage.device} " in line)
            told = lines[at] if width == 120 else " ".join(lines[at : at + 2])
            first, last = stage.layers
            assert stage.type in told
            assert f" {first}–{last - 1}" in told
            assert f"block{first}.conv" in told
            assert f"of {plans.MEMORY_GIB[stage.type]} GiB" in told
            assert f"{stage.receive_ms:.2f}" in told or f"{stage.receive_ms:.3f}" in told
            assert ("~" in told) == (stage.type == "QUADRO_P4000")


def test_the_longest_stage_of_each_pipeline_is_marked() -> None:
    lines = screen(plans.node_by_node(), 120)
    marked = [line for line in lines if "◀" in line and "◀ longest" not in line]
    assert [line.split()[1] for line in marked] == ["n0/1", "n1/1", "n2/1", "n3/1"]


def test_bars_are_drawn_to_scale() -> None:
    facts = plans.node_by_node()
    lines = screen(facts, 120)
    bars = [
        [part for part in line.split() if part[-1] in "█▒░" and len(part) > 4]
        for line in lines
        if " TITAN_RTX " in line
    ]
    time, memory = bars[0]
    stage = facts.plan.virtual_workers[1].stages[0]
    longest = max(worker.bottleneck_ms for worker in facts.plan.virtual_workers)
    assert len(time) - time.count("░") == round(len(time) * stage.time_ms / longest)
    assert len(memory) - memory.count("░") == round(len(memory) * stage.memory_bytes / (24 * plans.GIB))


def test_pipelines_that_are_alike_are_shown_once() -> None:
    lines = screen(plans.equal_mix(), 120)
    assert sum(" TITAN_RTX " in line for line in lines) == 1
    assert any(line.startswith("virtual workers 0–3, equal") for line in lines)
    (others,) = [line for line in lines if line.startswith("  virtual worker 1: ")]
    assert others.endswith(" · 3: n2/3, n3/3, n1/3, n0/3"), "as many to a line as there is room for"
    assert "  virtual worker 3: n2/3, n3/3, n1/3, n0/3" in screen(plans.equal_mix(), 60)
    assert any("recomputes" in line and "n2/0" in line for line in lines)


def test_of_many_kinds_of_virtual_workers_the_slowest_are_shown() -> None:
    facts = plans.all_different()
    lines = screen(facts, 120)
    shown = {int(line.split(":")[0].split()[-1]) for line in lines if line.startswith("virtual worker ")}
    rates = [worker.samples_per_second for worker in facts.plan.virtual_workers]
    assert shown == set(sorted(range(12), key=rates.__getitem__)[:8])
    assert "and 4 faster kinds of virtual workers; --html draws them all" in lines


def test_totals_and_comparisons() -> None:
    facts = plans.equal_mix()
    text = "\n".join(screen(facts, 120))
    predicted = facts.plan.predicted.samples_per_second
    assert f"this plan    {predicted:.0f} samples/s" in text
    assert "loses 76.5 %; on 8 of 16 devices" in text
    assert "one TITAN_V  84.2 samples/s" in text
    assert "N = 4 minibatches; memory allows 5" in text
    assert "idle" in text
    assert "n3/4 (QUADRO_P4000)" in text
    assert "MiB between nodes per minibatch" in text


@pytest.mark.parametrize("width", [80, 120])
def test_utilisation_is_told_of_the_plan_and_of_each_stage(width: int) -> None:
    facts = plans.with_counted_operations(plans.node_by_node())
    predicted, lines = facts.plan.predicted, screen(facts, width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert f"{128 * predicted.samples_per_second:.0f} tokens/s" in text
    assert f"{percent(predicted.model_flops_utilisation or 0.0)} of the peak of the devices in use" in text
    for stage in facts.plan.virtual_workers[0].stages:
        at = next(index for index, line in enumerate(lines) if f" {stage.device} " in line)
        assert percent(stage.model_flops_utilisation or 0.0) in lines[at] + lines[at + 1]
    assert "MFU" not in "\n".join(screen(plans.node_by_node(), width))


def test_why_a_plan_has_no_utilisation_is_told() -> None:
    facts = plans.equal_mix()
    facts = replace(facts, plan=with_utilisation(facts.plan, facts.costs.profile, facts.costs.cluster))
    assert "MFU" in "\n".join(screen(facts, 120))
    assert "unknown: the profile has no FLOPs of its layers; create it again" in "\n".join(screen(facts, 200))


def test_policy_and_schedule() -> None:
    facts = plans.equal_mix()
    assert "weights wave · schedule 1f1b" in "\n".join(screen(facts, 120))
    drained = facts.plan.model_copy(update={"weights": "flush", "schedule": "gpipe"})
    assert "weights flush · schedule gpipe" in "\n".join(screen(replace(facts, plan=drained), 120))


def test_the_screen_says_how_far_n_was_searched_and_what_memory_allows() -> None:
    facts = plans.equal_mix()
    assert "minibatches; memory allows 5" in "\n".join(screen(facts, 120))
    free = facts.plan.model_copy(update={"searched_minibatches_per_wave": 4})
    assert "minibatches; up to 4 were tried, memory allows 5" in "\n".join(screen(replace(facts, plan=free), 120))
    endless = free.model_copy(update={"max_minibatches_per_wave": tuple(1024 for _ in free.virtual_workers)})
    assert "up to 4 were tried, memory allows 1024 and more" in "\n".join(screen(replace(facts, plan=endless), 120))


def test_without_parameter_servers_there_is_nothing_to_bound() -> None:
    facts = plans.equal_mix()
    assert "D = 0" in "\n".join(screen(facts, 120))
    alone = facts.plan.model_copy(
        update={
            "has_shards": False,
            "shards": (),
            "placement": {},
            "virtual_workers": facts.plan.virtual_workers[:1],
            "max_minibatches_per_wave": (5,),
        }
    )
    text = "\n".join(screen(replace(facts, plan=alone), 120))
    assert "none; the stages alone hold the weights" in text
    assert "D = 0" not in text


def test_what_is_faster_than_the_plan_is_said_plainly() -> None:
    facts = plans.equal_mix()
    better = tuple(Alternative(name=name, samples_per_second=1e6, reason="so") for name in ("allreduce", "HD"))
    plan = facts.plan.model_copy(update={"alternatives": better})
    text = " ".join(screen(replace(facts, plan=plan), 120))
    assert "All-reduce would be faster" in text
    assert "According to the simulation HD would be faster, 1000000 samples/s: plan it with --allocation HD." in text
    assert "faster" not in " ".join(screen(facts, 120))


def test_why_names_the_rejected_and_what_they_lose() -> None:
    facts = plans.equal_mix()
    lines = screen(facts, 120, why="full")
    heading = lines.index("alternatives, compared with this plan")
    told = {line.split()[0]: line for line in lines[heading + 1 :] if line.strip()}
    assert "290 samples/s   loses 69.4 %; number 2 is the slowest" in told["HD"]
    assert "222 samples/s   loses 76.5 %" in told["allreduce"]
    assert "-               the whole model needs 7 bytes" in told["single:RTX_2060"]
    assert list(told)[:3] == ["HD", "allreduce", "NP"]
    assert "why this N" in lines
    assert "why these cuts" in lines
    assert "why this N" not in screen(facts, 120)


def test_an_old_terminal_gets_ascii() -> None:
    lines = screen(plans.equal_mix(), 80, why="full", encoding="ascii")
    assert any("#" * 4 in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_names_can_do_nothing_to_the_terminal() -> None:
    facts = plans.equal_mix()
    facts = replace(facts, plan=facts.plan.model_copy(update={"model": "évil\x1b[2J\nmodel"}))
    assert screen(facts, 80)[0].startswith("évil?[2J?model: 4 virtual workers")
    assert screen(facts, 80, encoding="ascii")[0].startswith("?vil?[2J?model: 4 virtual workers")


def test_colour_is_for_terminals() -> None:
    assert not any("\x1b" in line for line in screen(plans.equal_mix(), 80))
    assert any("\x1b[1;31m" in line for line in screen(plans.equal_mix(), 80, color=True))
