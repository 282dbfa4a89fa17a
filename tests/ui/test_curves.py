"""The charts: means over the virtual workers, and what a rewind has undone beside what counts."""

from __future__ import annotations

from pathlib import Path

from hetpipe.observe.metrics import metrics_path
from hetpipe.report.charts import Chart
from hetpipe.ui.curves import bound_of, charts_of, clock_chart, compared
from hetpipe.ui.snapshot import OpenRun, RunSnapshot
from tests.cli.fakes import FakeCoordinator, shell_with
from tests.ui import folders


def snapshot_of(path: Path) -> RunSnapshot:
    found = OpenRun(path, path.name).read(None, shell_with(FakeCoordinator(), path.parent))
    assert found is not None
    return found


def chart(charts: list[Chart], title: str) -> Chart:
    (found,) = [one for one in charts if one.title == title]
    return found


def test_a_point_is_the_mean_over_the_virtual_workers(tmp_path: Path) -> None:
    path = folders.run_in(tmp_path, "a")
    folders.planned(path)
    folders.trained(path, waves=1)
    (line,) = chart(charts_of(snapshot_of(path)), "Loss").lines
    (point,) = line.points
    assert point.x == 8
    assert point.least < point.mean < point.most
    assert abs(point.mean - (point.least + point.most) / 2) < 1e-12


def test_minibatches_before_a_resume_count(tmp_path: Path) -> None:
    path = folders.run_in(tmp_path, "a")
    folders.planned(path, start=800)
    folders.trained(path, waves=2)
    (line,) = chart(charts_of(snapshot_of(path)), "Loss").lines
    assert [point.x for point in line.points] == [808, 816]


def test_what_a_rewind_has_undone_is_a_line_of_its_own(tmp_path: Path) -> None:
    run = snapshot_of(folders.rewound(tmp_path, "a"))
    undone, training, undone_evaluations, evaluations = chart(charts_of(run), "Loss").lines
    assert (undone.name, undone.colour) == ("training, undone by rewind 1", "--faint")
    assert [(line.points[0].x, line.points[-1].x) for line in (undone, training)] == [(88, 160), (8, 240)]
    places = [point.x for point in training.points]
    assert places == sorted(set(places)), "no place twice"
    assert undone_evaluations.name == "evaluation, undone"
    assert [point.x for point in undone_evaluations.points] == [160]
    assert [point.x for point in evaluations.points] == [80, 160, 240]


def test_the_distance_of_the_clocks_has_its_bound(tmp_path: Path) -> None:
    run = snapshot_of(folders.finished(tmp_path, "a"))
    distance, bound = clock_chart(run).lines
    assert {point.mean for point in bound.points} == {2} == {bound_of(run)}
    assert max(point.mean for point in distance.points) >= 1
    free = snapshot_of(folders.finished(tmp_path, "b", sync={"kind": "asp", "minibatches_per_wave": 2}))
    assert bound_of(free) is None
    assert [line.name for line in clock_chart(free).lines] == ["largest distance"]


def test_many_virtual_workers_are_one_line(tmp_path: Path) -> None:
    path = folders.finished(tmp_path, "a", num_workers=64)
    (training, evaluation) = chart(charts_of(snapshot_of(path)), "Loss").lines
    assert len(training.points) == 40
    assert training.points[-1].x == 64 * 4 * 40
    assert evaluation.name == "evaluation"


def test_runs_over_the_same_axes(tmp_path: Path) -> None:
    runs = [snapshot_of(folders.finished(tmp_path, "a")), snapshot_of(folders.rewound(tmp_path, "b"))]
    training = compared(runs)[0]
    assert [(line.name, line.colour) for line in training.lines] == [("a", "--series-0"), ("b", "--series-1")]
    assert compared([snapshot_of(folders.run_in(tmp_path, "new"))]) == []


def test_a_learning_rate_that_stays_is_not_drawn(tmp_path: Path) -> None:
    path = folders.finished(tmp_path, "a")
    assert "Learning rate" not in [one.title for one in charts_of(snapshot_of(path))]
    file = metrics_path(path, 0)
    file.write_bytes(file.read_bytes().replace(b'"learning_rate":0.1', b'"learning_rate":0.01', 1))
    assert "Learning rate" in [one.title for one in charts_of(snapshot_of(path))]
