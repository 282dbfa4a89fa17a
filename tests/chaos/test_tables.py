"""The tables of chaos and partitions are whole, and results are told as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetpipe.failpoints import POINTS
from hetpipe.job.file import Job
from tests.chaos import witness_job
from tests.chaos.cells import UNREACHED, all_cells, skips
from tests.chaos.cluster import COORDINATOR, REDIS, Layout
from tests.chaos.compressions import FREEZE, all_compressions
from tests.chaos.nemesis import LAST_WORKER
from tests.chaos.outcome import Outcome, Results, Tally
from tests.chaos.pair_table import WORKER, Opening, all_pairs
from tests.chaos.takeovers import AT_CLOCK, TAKERS, all_takeovers, script
from tests.chaos.transformations import all_transformations
from tests.chaos.transformations import script as transformation
from tests.chaos.wires import Damage, all_wires
from tests.support.network_namespaces import Direction


def test_every_role_at_every_point_is_tried_or_skipped_with_a_reason() -> None:
    names = {cell.name for cell in all_cells()}
    assert len(names) == len(all_cells()) >= 100
    assert not names & skips().keys()
    assert all(skips().values())
    points = {name.partition("/")[0] for name in {*names, *skips()}} - {"any"}
    assert points == set(POINTS)


def test_reasons_for_skips_are_about_points_that_exist() -> None:
    groups = {name.partition(".")[0] for name in POINTS}
    assert UNREACHED.keys() <= {*POINTS, *groups}


def test_every_pair_of_roles_is_cut_both_ways_and_each_way() -> None:
    cuts = [wire for wire in all_wires() if wire.damage is Damage.CUT]
    assert len(cuts) == 8 * 3
    assert {wire.direction for wire in cuts} == set(Direction)
    roles = {frozenset({wire.first.partition("-")[0], wire.second.partition("-")[0]}) for wire in cuts}
    assert len(roles) == 8, "six pairs of four roles, two shards, two agents"


def test_every_moment_of_a_take_over_is_tried_with_a_job_that_has_one() -> None:
    names = [cell.name for cell in all_takeovers()]
    assert len(set(names)) == len(names)
    assert {cell.point for cell in all_takeovers()} == {point for point in POINTS if point.startswith("takeover.")}
    elastic = Job.model_validate(witness_job.job(elastic={"script": script()})).elastic
    assert [vw for vw in range(4) if not elastic.is_absent(vw, AT_CLOCK - 1)] == [0, LAST_WORKER]
    assert [vw for vw in range(4) if not elastic.is_absent(vw, AT_CLOCK)] == [0, *TAKERS]


def test_every_moment_of_a_transformation_is_tried_with_a_job_that_has_one() -> None:
    points = {cell.point for cell in all_transformations()}
    assert points >= {point for point in POINTS if point.startswith("freezing.")}
    assert points <= POINTS.keys()
    lines = Job.model_validate(witness_job.job(elastic={"script": transformation()})).elastic
    assert [vw for vw in range(4) if not lines.is_absent(vw, AT_CLOCK)] == [0, LAST_WORKER]
    assert [vw for vw in range(4) if not lines.is_absent(vw, AT_CLOCK + 1)] == [0, *TAKERS]


def test_every_moment_of_a_compression_is_tried_with_a_job_that_has_one() -> None:
    names = [cell.name for cell in all_compressions()]
    assert len(set(names)) == len(names)
    points = {cell.point for cell in all_compressions()} - {"any"}
    groups = {point for point in POINTS if point.startswith(("freezing.", "takeover."))}
    assert points == groups - {"takeover.before_ready"}, "those that join are ready from the start"
    assert Job.model_validate(witness_job.job(freeze=FREEZE)).freeze.compress


def test_pairs_are_told_apart_and_hit_who_is_there() -> None:
    layout = Layout()
    there = {COORDINATOR, REDIS, *layout.shards, *layout.agents, "stage-0", "stage-1"}
    pairs = all_pairs()
    assert len({pair.name for pair in pairs}) == len(pairs)
    assert {pair.opening for pair in pairs} == set(Opening)
    for pair in pairs:
        assert {pair.second, *pair.victims} <= there | {WORKER}, pair.name
        assert pair.second != WORKER


@dataclass(frozen=True)
class Fall:
    name: str
    row: str = "falls"
    column: str = "down"


def test_what_is_not_survived_is_named_with_its_reason_and_how_to_play_it_again() -> None:
    found = Results(
        outcomes=[
            Outcome(case=Fall("a"), survived=True, again=True),
            Outcome(case=Fall("b"), survived=False, sentence="nobody came"),
            Outcome(case=Fall("d"), survived=False, judged=False, sentence="no cluster"),
        ],
        skipped={"c": "there is no c"},
        seconds=2.0,
        seed=7,
        again="play",
        tally=Tally(jobs=2, waves=9, samples=18, lost_samples=1),
        missing=["e"],
    )
    assert not found.ok
    assert found.lines() == [
        "              down   survived / tried",
        "falls          1/3",
        "all: 1 of 3 survived in 2 s, seed 7",
        "history checker: 0 violations in 9 waves of 2 jobs; 0 waves doubled, 0 torn, 0 beyond the bound of staleness",
        "witness weights: 18 samples; 1 lost, 0 doubled, 0 layers torn",
        "skipped: 1 because there is no c",
        "not played, because this was broken off: e",
        "played a second time, because their first job broke off: a",
        "not survived: b: nobody came",
        "  again with: play b",
        "no verdict: d: no cluster",
        "  again with: play d",
    ]
    assert (found.to_json()["tried"], found.to_json()["survived"]) == (3, 1)


def test_what_was_not_played_does_not_count_as_survived() -> None:
    whole = Results(outcomes=[Outcome(case=Fall("a"), survived=True)], skipped={}, seconds=2.0, seed=7, again="play")
    assert whole.ok
    assert not replace(whole, missing=["b"]).ok
