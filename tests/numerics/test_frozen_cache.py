"""What enters the layers behind frozen ones, read from a cache: every bit is that of the reference executor."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checker import Kind, check_run
from hetpipe.values.ids import StageIndex, VirtualWorkerIndex
from hetpipe.values.policies import POLICIES
from hetpipe.values.run import CacheUse, StageProgress, StageReport
from tests import models
from tests.checker.cache_corruptions import CACHE_CORRUPTIONS, SAMPLE_CORRUPTIONS, Lines
from tests.histories import whole_lines
from tests.numerics.compare import Case, assert_same_bits, run, trained
from tests.numerics.test_freezing import OPTIMIZERS, SCHEDULE, frozen_clocks
from tests.numerics.test_leavers import barriers, drain, membership
from tests.pairwise import every_nth
from tests.reference.executor import run_reference

pytestmark = pytest.mark.matrix

IN_ORDER: dict[str, Any] = {"shuffle": False}
ON: dict[str, Any] = {**SCHEDULE, "cache": "on"}

POINTS = [
    (weights, kind, optimizer, cut)
    for (weights, policy), kind, cut in itertools.product(
        POLICIES.items(), ("wsp", "bsp", "none", "allreduce"), ((1, 4), (2, 1, 2), (5,))
    )
    if kind != "allreduce" or policy.one_update_per_wave
    for optimizer in (["momentum"] if weights == "spectrain" else OPTIMIZERS)
]


def crossings(folder: Path) -> list[dict[str, Any]]:
    """The lines of stages about minibatches behind their frozen layers."""
    files = sorted((folder / "history").glob("vw-*.jsonl"))
    return [line for file in files for line in whole_lines(file) if line["event"] == "crossed"]


def assert_cached(what: Case, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """A run of the case has the bits of the reference executor, which computes everything; returns its crossings."""
    order = range(len(getattr(models, what.data)()))
    run(what, folder, **options)
    is_in_order = what.reads == IN_ORDER
    reference = what.reference(frozen=frozen_clocks(what, folder), order=(lambda _: order) if is_in_order else None)
    assert_same_bits(trained(folder), run_reference(reference))
    return crossings(folder)


class Heard:
    """Why stages keep nothing more, as they report."""

    def __init__(self) -> None:
        self.reasons = set[str]()
        self.uses: list[CacheUse] = []

    def hear(self, vw: VirtualWorkerIndex, stage: StageIndex, report: StageReport) -> None:
        del vw, stage
        if isinstance(report, StageProgress) and report.cache is not None:
            self.reasons.add(report.cache.stopped)
            self.uses.append(report.cache)


def scheduled(weights: Any, kind: str, optimizer: str, cut: tuple[int, ...], **changes: Any) -> Case:
    """Virtual workers cut alike, with more layers frozen from epoch to epoch."""
    workers = 1 if kind == "none" else 2
    return Case(
        workers=workers,
        stages=[list(cut)] * workers,
        wave=3,
        data="data32",
        batch_size=6,
        staleness=0 if kind == "bsp" else 1,
        kind=kind,
        weights=weights,
        optimizer=dict(OPTIMIZERS[optimizer]),
        freeze=ON,
        **changes,
    )


@pytest.mark.parametrize(("weights", "kind", "optimizer", "cut"), every_nth(46, POINTS))
def test_every_policy_equals_the_reference(
    weights: Any, kind: str, optimizer: str, cut: tuple[int, ...], tmp_path: Path
) -> None:
    """In the epochs with F = 1, 2, 2, 2 a minibatch is computed, computed from layer 2 on, and read twice."""
    what = scheduled(weights, kind, optimizer, cut, epochs=5, reads=IN_ORDER)
    found = assert_cached(what, tmp_path)
    computed = Counter(tuple(line["computed"]) for line in found if line["computed"][0] < line["computed"][1])
    per_epoch = 8
    assert sum((last - first) * count for (first, last), count in computed.items()) == per_epoch * 4, computed
    first_stages = [line for line in found if line["stage"] == 0]
    assert Counter(line["read"] for line in first_stages) == {0: per_epoch, 2: per_epoch, 4: 2 * per_epoch}


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which a stage of frozen layers alone is spared."""
    what = Case(stages=[[1, 4]] * 2, wave=2, data="data32", batch_size=6, epochs=4, freeze=ON, reads=IN_ORDER)
    folder = tmp_path_factory.mktemp("cached")
    assert_cached(what, folder)
    return folder


def assert_reported(run_dir: Path, corrupt: Callable[[Lines], None], kind: Kind, folder: Path) -> None:
    """The checker reports the kind for the history of the run with these changes, written to `folder`."""
    for name in ("job.json", "plan.json", "facts.json"):
        shutil.copy(run_dir / name, folder / name)
    lines = {file: list(whole_lines(file)) for file in (run_dir / "history").glob("*.jsonl")}
    corrupt(lines)
    (folder / "history").mkdir()
    for file, own in lines.items():
        (folder / "history" / file.name).write_text("".join(json.dumps(line) + "\n" for line in own))
    assert kind in {violation.kind for violation in check_run(folder).violations}


@pytest.mark.parametrize(("corrupt", "kind"), CACHE_CORRUPTIONS)
def test_the_history_of_a_cache_is_verified(
    cached: Path, corrupt: Callable[[Lines], None], kind: Kind, tmp_path: Path
) -> None:
    assert_reported(cached, corrupt, kind, tmp_path)


def test_a_virtual_worker_that_comes_back_reads_what_its_node_has(tmp_path: Path) -> None:
    what = Case(
        stages=[[2, 3]] * 2,
        staleness=0,
        data="data32",
        batch_size=6,
        epochs=6,
        freeze={"layers": 2, "cache": "on"},
        reads=IN_ORDER,
    )
    result = run(what, tmp_path, deaths=(drain(number=7),))
    assert result.num_lives == 3
    order = range(46)
    reference = what.reference(
        membership=membership(tmp_path, 2),
        extra_barriers=barriers(tmp_path),
        frozen=frozen_clocks(what, tmp_path),
        order=lambda _: order,
    )
    assert_same_bits(trained(tmp_path), run_reference(reference))
    assert any(line["read"] == 4 for line in crossings(tmp_path) if line["incarnation"] and not line["stage"])


def test_layers_that_move_change_who_reads(tmp_path: Path) -> None:
    """The stage that kept before sends on, and the other way round."""
    what = Case(
        workers=1,
        stages=[[1, 1, 3]],
        wave=4,
        data="data32",
        batch_size=6,
        epochs=5,
        weights="stash",
        freeze={"layers": 1, "cache": "on"},
        moves=((4, 0, (3, 1, 1)), (6, 0, (1, 3, 1))),
        reads=IN_ORDER,
    )
    found = assert_cached(what, tmp_path)
    assert {line["read"] for line in found if line["p"] > 8 and line["stage"] == 0} == {2}


def test_a_cache_without_room_computes(tmp_path: Path) -> None:
    what = Case(
        stages=[[2, 3]] * 2,
        wave=2,
        data="data32",
        batch_size=6,
        epochs=3,
        freeze={**ON, "cache_memory_bytes": 1000},
        reads=IN_ORDER,
    )
    heard = Heard()
    found = assert_cached(what, tmp_path, coordinate=heard.hear)
    kept = sum(line["kept"] for line in found)
    assert 0 < kept < sum(line["computed"][0] < line["computed"][1] for line in found)
    assert "there is no room in 1000 bytes of memory and 0 bytes of disk" in heard.reasons


def test_layers_that_draw_in_evaluation_mode_are_computed_each_time(tmp_path: Path) -> None:
    what = Case(
        model="always_dropping",
        stages=[[2, 3]] * 2,
        wave=2,
        data="data32",
        batch_size=6,
        epochs=3,
        freeze=ON,
        reads=IN_ORDER,
    )
    heard = Heard()
    found = assert_cached(what, tmp_path, coordinate=heard.hear)
    assert found
    assert not any(line["read"] or line["kept"] for line in found)
    drawing = "they draw random numbers or write buffers, also in evaluation mode"
    assert any(reason.endswith(drawing) for reason in heard.reasons)


def test_auto_keeps_nothing_that_does_not_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetpipe.pipeline.frozen_prefix.pays", lambda _costs, _passes: False)
    what = Case(
        stages=[[2, 3]] * 2,
        wave=2,
        data="data32",
        batch_size=6,
        epochs=4,
        freeze={**SCHEDULE, "cache": "auto"},
        reads=IN_ORDER,
    )
    heard = Heard()
    found = assert_cached(what, tmp_path, coordinate=heard.hear)
    assert found
    assert not any(line["read"] or line["kept"] for line in found)
    assert any(reason.startswith("it would not pay: a minibatch takes ") for reason in heard.reasons)
    assert any(line["units"] for line in found)
    assert max(line["p"] for line in found) <= 4 * 3, "nobody asks any more, and layers compute as without a cache"
    assert max(use.computed for use in heard.uses) == 3 * 4, "which counts, too"


def test_auto_keeps_what_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two minibatches are only measured; they are computed and kept when they come back, and read then."""
    monkeypatch.setattr("hetpipe.pipeline.frozen_prefix.pays", lambda _costs, passes: passes > 0)
    what = Case(
        workers=1,
        stages=[[2, 3]],
        wave=4,
        data="data32",
        batch_size=6,
        epochs=4,
        freeze={"layers": 2, "cache": "auto"},
        reads=IN_ORDER,
    )
    found = [line for line in assert_cached(what, tmp_path) if line["stage"] == 1]
    assert [line["kept"] for line in found[:8]] == [0, 0, 1, 1, 1, 1, 1, 1]
    read = [line["p"] for line in crossings(tmp_path) if line["stage"] == 0 and line["read"]]
    assert sorted(read) == [*range(11, 17), *range(17, 33)]


@pytest.mark.parametrize(("weights", "kind", "optimizer", "cut"), every_nth(12, POINTS[::4]))
def test_shuffled_samples_equal_the_reference(
    weights: Any, kind: str, optimizer: str, cut: tuple[int, ...], tmp_path: Path
) -> None:
    """From the second epoch with two frozen layers on, samples are read in whatever minibatch they come."""
    what = scheduled(weights, kind, optimizer, cut, epochs=6, model="rows32")
    first_stages = [line for line in assert_cached(what, tmp_path) if line["stage"] == 0]
    assert {len(line["units"]) for line in first_stages} == {6, 4}
    per_epoch = 8
    read = [line["read"] for line in sorted(first_stages, key=lambda line: line["t"])]
    assert set(read[:per_epoch]) == {0}
    assert read[-2 * per_epoch :].count(4) > per_epoch


def shuffled(model: str = "rows32", **changes: Any) -> Case:
    """Two virtual workers of two stages, whose first layers are frozen from the start."""
    freeze = {"layers": 2, "cache": "on"}
    values: dict[str, Any] = {"stages": [[1, 4]] * 2, "wave": 2, "data": "data32", "epochs": 4, "freeze": freeze}
    return Case(model=model, batch_size=6, **(values | changes))


@pytest.fixture(scope="module")
def cached_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached-samples")
    assert_cached(shuffled(), folder)
    return folder


@pytest.mark.parametrize(("corrupt", "kind"), SAMPLE_CORRUPTIONS)
def test_the_history_of_cached_samples_is_verified(
    cached_samples: Path, corrupt: Callable[[Lines], None], kind: Kind, tmp_path: Path
) -> None:
    assert_reported(cached_samples, corrupt, kind, tmp_path)


def test_what_belongs_to_all_samples_is_read_with_them(tmp_path: Path) -> None:
    folders = {cache: tmp_path / cache for cache in ("on", "off")}
    for cache, folder in folders.items():
        run(shuffled("rotated", stages=[[5, 8]] * 2, freeze={"layers": 2, "cache": cache}), folder)
    with_cache, without = map(trained, folders.values())
    (kept,) = {line["computed"][1] for line in crossings(folders["on"]) if line["kept"]}
    # The samples, those of the four short minibatches apart, as the number of samples counts, and the angles.
    assert len(list((folders["on"] / "cache").glob(f"n0/*/{kept}/*"))) == 46 + 4 * 4 + 1
    assert all(value.equal(with_cache[name]) for name, value in without.items())
    assert any(line["read"] for line in crossings(folders["on"]))


def test_a_frozen_stage_may_have_other_outputs_than_the_next_one_has_inputs(tmp_path: Path) -> None:
    """The cut is within a block, where two values cross; the second stage reads what enters the next block."""
    folders = {cache: tmp_path / cache for cache in ("on", "off")}
    for cache, folder in folders.items():
        run(shuffled("residual", stages=[[2, 11]] * 2, freeze={"layers": 2, "cache": cache}), folder)
    with_cache, without = map(trained, folders.values())
    assert all(value.equal(with_cache[name]) for name, value in without.items())
    assert any(line["read"] for line in crossings(folders["on"]))


@pytest.mark.parametrize("cut", [(5, 6), (7, 4)], ids=["a-frozen-stage", "within-a-stage"])
def test_a_model_that_is_cut_within_its_own_forward(cut: tuple[int, ...], tmp_path: Path) -> None:
    """A frozen dropout returns what it is given, which the log of a training forward has no short name for."""
    freeze = {"layers": 2, "tied": "everywhere"}
    what = shuffled("tied_rows", data="tokens", stages=[list(cut)] * 2, freeze={**freeze, "cache": "on"})
    run(what, tmp_path)
    reference = what.reference(frozen={0: 5}, frozen_modules={5: ("embedding", "first", "drop")})
    assert_same_bits(trained(tmp_path), run_reference(reference))
    assert any(line["read"] for line in crossings(tmp_path))


def test_whatever_the_trial_of_matrix_products_says_here_the_bits_hold(tmp_path: Path) -> None:
    """Where a row of such a small product depends on its place, on this machine, all is computed each time."""
    found = [line for line in assert_cached(shuffled("mlp32"), tmp_path) if len(line["units"]) in (0, 6)]
    num_kept, num_read = (sum(line[event] > 0 for line in found) for event in ("kept", "read"))
    assert (num_kept > 0) == (num_read > 0), (num_kept, num_read)


def test_layers_that_mix_samples_are_computed_each_time(tmp_path: Path) -> None:
    found = assert_cached(shuffled("centring"), tmp_path)
    assert found
    assert not any(line["read"] or line["kept"] for line in found if line["computed"][1] > 1)


def test_auto_keeps_the_samples_on_which_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is missing would spoil a minibatch of the next epoch."""
    monkeypatch.setattr("hetpipe.pipeline.frozen_prefix.pays", lambda _costs, passes: passes > 0)
    what = shuffled(freeze={"layers": 2, "cache": "auto"})
    found = [line for line in assert_cached(what, tmp_path) if line["stage"] == 0]
    in_time = sorted(found, key=lambda line: line["t"])
    assert sum(line["read"] > 0 for line in in_time[8:16]) >= 3


def test_auto_stops_where_no_minibatch_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Augmented samples are kept in the first pass; after the second, which reads none of them, none any more."""
    monkeypatch.setattr("hetpipe.pipeline.frozen_prefix.pays", lambda _costs, passes: passes > 0)
    what = shuffled(data="augmented32", loss="distance", freeze={"layers": 2, "cache": "auto"}, epochs=5)
    heard = Heard()
    run(what, tmp_path, coordinate=heard.hear)
    assert any("the data change from pass to pass" in reason for reason in heard.reasons)
    found = crossings(tmp_path)
    assert not any(line["read"] for line in found)
    kept = [sum(line["kept"] for line in found if 4 * epoch < line["p"] <= 4 * epoch + 4) for epoch in range(5)]
    assert kept[:2] == [8, 8]
    assert kept[2:] == [0, 0, 0]


def test_samples_that_belong_to_nodes_come_back_there(tmp_path: Path) -> None:
    """Each node reads its own from the second pass on; on any node few minibatches have all of theirs so soon."""
    what = shuffled(reads={"division": "by_node"})
    run(what, tmp_path, nodes=2)
    reference = what.reference(frozen=frozen_clocks(what, tmp_path), homes=(0, 1))
    assert_same_bits(trained(tmp_path), run_reference(reference))
    assert {line["cache"] for line in crossings(tmp_path)} == {"n0/1", "n1/1"}
    again = tmp_path / "any"
    run(shuffled(), again, nodes=2)
    at_home, anywhere = (
        sum(line["read"] > 0 for line in crossings(folder) if line["stage"] == 0 and line["p"] <= 8)
        for folder in (tmp_path, again)
    )
    assert at_home > anywhere, "in the second pass, where those of the short minibatch of the first one are missing"


def test_who_dies_does_not_move_the_samples_of_others(tmp_path: Path) -> None:
    """While one is away all samples are the other's, and most of its own are still there afterwards."""
    what = shuffled(reads={"division": "by_node"}, staleness=0, epochs=6)
    run(what, tmp_path, nodes=2, deaths=(drain(number=7),))
    reference = what.reference(
        membership=membership(tmp_path, 2),
        extra_barriers=barriers(tmp_path),
        frozen=frozen_clocks(what, tmp_path),
        homes=(0, 1),
    )
    assert_same_bits(trained(tmp_path), run_reference(reference))
