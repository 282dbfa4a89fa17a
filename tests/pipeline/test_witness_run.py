"""The witness of a run must find every fault of one wave and name it, and find nothing where nothing is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hetpipe.checkpoint.manifest import newest_checkpoint
from hetpipe.errors import CheckpointError
from tests.models import NUM_WITNESSES
from tests.numerics.compare import run
from tests.numerics.test_witnesses import case
from tests.pipeline import witness_run
from tests.pipeline.witness import FaultKind, WitnessDataset
from tests.pipeline.witness_run import Found, Judgement, WaveKey, explain, judge, main

Line = dict[str, Any]
Change = Callable[[list[Line]], list[Line]]

LAYERS = tuple(f"{index}.cells" for index in range(4))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three virtual workers with checkpoints under way."""
    folder = tmp_path_factory.mktemp("witness")
    run(case(staleness=1, wave=2, stages=2, every_waves=3), folder)
    return folder


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def commits_of(run_dir: Path) -> Iterator[Line]:
    """Those that counted something, in order."""
    lines = (run_dir / "history" / "shard-0.jsonl").read_text().splitlines()
    yield from (line for line in map(json.loads, lines) if line["event"] == "commit" and line["samples"])


def rewrite(run_dir: Path, change: Change) -> None:
    path = run_dir / "history" / "shard-0.jsonl"
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def with_weights(run_dir: Path, change: Callable[[dict[str, Tensor]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the final weights be others."""
    clock, cells = witness_run._final_weights(run_dir)
    change(cells)
    monkeypatch.setattr(witness_run, "_final_weights", lambda _: (clock, cells))


def update(judged: WaveKey, run_dir: Path) -> Tensor:
    """What a wave adds to a layer."""
    samples = witness_run.read_ledger(run_dir, below=10**9).waves[judged]
    data = WitnessDataset(NUM_WITNESSES, next(iter(witness_run._final_weights(run_dir)[1].values())).dtype)
    return sum((data[sample][0][0] for sample in samples[1:]), start=data[samples[0]][0][0])


def first_wave(run_dir: Path) -> WaveKey:
    commit = next(commits_of(run_dir))
    return WaveKey(commit["vw"], commit["wave"])


def only_fault(judgement: Judgement) -> Found:
    (fault,) = judgement.faults
    assert not judgement.problems
    return fault


class TestARun:
    def test_a_clean_one_is_clean(self, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
        judgement = judge(finished)
        assert judgement.ok, judgement.sentences()
        assert judgement.samples == 2 * NUM_WITNESSES
        assert judgement.waves == len(list(commits_of(finished)))
        assert main([str(finished)]) == 0
        (told,) = capsys.readouterr().out.splitlines()
        assert told.endswith("0 lost, 0 doubled, 0 torn, 0 unexpected")

    @pytest.mark.parametrize(
        ("factor", "layers", "kind"),
        [
            (-1, LAYERS, FaultKind.LOST),
            (1, LAYERS, FaultKind.DOUBLED),
            (-1, LAYERS[2:], FaultKind.TORN),
            (1, LAYERS[:1], FaultKind.TORN),
        ],
    )
    def test_a_wave_not_added_once_is_named(
        self, factor: int, layers: tuple[str, ...], kind: FaultKind, run_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wave = first_wave(run_dir)
        added = factor * update(wave, run_dir)

        def spoil(cells: dict[str, Tensor]) -> None:
            for name in layers:
                cells[name] += added

        with_weights(run_dir, spoil, monkeypatch)
        fault = only_fault(judge(run_dir))
        assert (fault.kind, fault.wave) == (kind, wave)
        assert dict(fault.layers) == dict.fromkeys(layers, factor * len(fault.samples))
        assert main([str(run_dir)]) == 1

    def test_weights_that_no_sum_gives_are_a_problem(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with_weights(run_dir, lambda cells: cells.update({"1.cells": -cells["1.cells"]}), monkeypatch)
        assert any(problem.startswith("1.cells: cell ") for problem in judge(run_dir).problems)

    def test_a_wave_that_the_log_does_not_have_is_unexpected(self, run_dir: Path) -> None:
        wave = first_wave(run_dir)
        samples = witness_run.read_ledger(run_dir, below=10**9).waves[wave]
        rewrite(run_dir, lambda lines: [line for line in lines if not _is_of(line, wave, "commit", "used")])
        fault = only_fault(judge(run_dir))
        assert (fault.kind, fault.wave, set(fault.samples)) == (FaultKind.UNEXPECTED, None, set(samples))

    def test_a_wave_that_the_log_has_too_many_is_lost(self, run_dir: Path) -> None:
        """As if a commit had been decided on, and no shard had followed it."""
        commit = list(commits_of(run_dir))[-1]
        invented = WaveKey(7, commit["wave"])
        used = {**commit, "event": "used", "vw": 7, "epoch": 1, "indices": list(range(commit["samples"]))}
        rewrite(run_dir, lambda lines: [*lines, {**commit, "vw": 7}, used])
        fault = only_fault(judge(run_dir))
        assert (fault.kind, fault.wave) == (FaultKind.LOST, invented)

    @pytest.mark.parametrize(
        ("event", "change", "said"),
        [
            ("commit", lambda line: [{**line, "samples": line["samples"] + 1}], "and its line `used`"),
            ("commit", lambda _line: [], "are used, and it was never committed"),
            ("commit", lambda line: [line, line], "is committed twice"),
            ("used", lambda line: [line, line], "is used twice"),
            ("used", lambda _line: [], "and its line `used` 0"),
        ],
    )
    def test_a_ledger_that_contradicts_itself_proves_nothing(
        self, event: str, change: Callable[[Line], list[Line]], said: str, run_dir: Path
    ) -> None:
        wave = first_wave(run_dir)
        rewrite(
            run_dir,
            lambda lines: [new for line in lines for new in (change(line) if _is_of(line, wave, event) else [line])],
        )
        assert any(said in problem for problem in judge(run_dir).problems)

    def test_waves_that_a_rewind_undid_do_not_count(self, run_dir: Path) -> None:
        """A second term begins at an older clock and does the rest again."""
        judged = judge(run_dir)
        start = judged.clock // 2

        def twice(lines: list[Line]) -> list[Line]:
            begun = [{**line, "term": 2} for line in lines if line["event"] == "publish" and line["clock"] >= start]
            again = [{**line, "term": 2} for line in lines if line.get("wave", -1) >= start]
            return [*lines, begun[0], *again, *begun[1:]]

        rewrite(run_dir, twice)
        assert judge(run_dir) == judged

    def test_a_resumed_run_has_what_it_began_with(self, finished: Path, tmp_path: Path) -> None:
        whole = case(staleness=1, wave=2, stages=2, every_waves=3)
        early = min((finished / "checkpoints").iterdir())
        assert early != newest_checkpoint(finished)
        run(whole, tmp_path, restore=early)
        judgement = judge(tmp_path)
        assert judgement.ok, judgement.sentences()
        assert judgement.samples < 2 * NUM_WITNESSES

    def test_a_run_without_weights_cannot_be_judged(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shutil.rmtree(run_dir / "checkpoints")
        with pytest.raises(CheckpointError):
            judge(run_dir)
        assert main([str(run_dir)]) == 2
        assert capsys.readouterr().err


def _is_of(line: Line, wave: WaveKey, *events: str) -> bool:
    return line["event"] in events and (line["vw"], line["wave"]) == (wave.vw, wave.wave)


#: Two passes over twelve samples, dealt differently, to two virtual workers.
WAVES: Mapping[WaveKey, tuple[int, ...]] = {
    WaveKey(0, 0): (0, 1, 2),
    WaveKey(1, 0): (3, 4, 5),
    WaveKey(0, 1): (6, 7, 8),
    WaveKey(1, 1): (9, 10, 11),
    WaveKey(0, 2): (0, 5, 7),
    WaveKey(1, 2): (1, 3, 9),
    WaveKey(0, 3): (2, 6, 10),
    WaveKey(1, 3): (4, 8, 11),
}


def wrong(*faults: tuple[WaveKey, int, tuple[str, ...]]) -> dict[str, list[int]]:
    counts = {name: [0] * 12 for name in LAYERS}
    for key, by, layers in faults:
        for name in layers:
            for sample in WAVES[key]:
                counts[name][sample] += by
    return counts


class TestExplaining:
    @pytest.mark.parametrize("key", WAVES)
    @pytest.mark.parametrize(("by", "kind"), [(-1, FaultKind.LOST), (1, FaultKind.DOUBLED)])
    def test_each_wave_alone(self, key: WaveKey, by: int, kind: FaultKind) -> None:
        (found,) = explain(wrong((key, by, LAYERS)), WAVES)
        assert (found.kind, found.wave) == (kind, key)

    def test_several_at_once(self) -> None:
        lost, doubled, torn = WaveKey(0, 0), WaveKey(1, 1), WaveKey(0, 1)
        found = explain(wrong((lost, -1, LAYERS), (doubled, 1, LAYERS), (torn, -1, LAYERS[:2])), WAVES)
        assert {(each.kind, each.wave) for each in found} == {
            (FaultKind.LOST, lost),
            (FaultKind.DOUBLED, doubled),
            (FaultKind.TORN, torn),
        }

    def test_twice_too_many_is_told_twice(self) -> None:
        found = explain(wrong((WaveKey(0, 0), 2, LAYERS)), WAVES)
        assert [(each.kind, each.wave) for each in found] == [(FaultKind.DOUBLED, WaveKey(0, 0))] * 2

    def test_a_part_of_a_layer(self) -> None:
        """A shard that holds some of a layer's digits has missed a wave."""
        counts = wrong()
        counts["2.cells"][3] = counts["2.cells"][4] = -1
        (found,) = explain(counts, WAVES)
        assert (found.kind, found.wave, dict(found.layers)) == (FaultKind.TORN, WaveKey(1, 0), {"2.cells": -2})

    def test_nothing_is_nothing(self) -> None:
        assert explain(wrong(), WAVES) == []
        assert explain({}, {}) == []

    def test_whatever_is_wrong_is_told(self) -> None:
        for sample in range(12):
            for by in (-1, 1):
                counts = wrong()
                counts["0.cells"][sample] = by
                assert explain(counts, WAVES)
