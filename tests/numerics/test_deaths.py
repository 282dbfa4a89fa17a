"""Virtual workers that die and come back: nothing is lost, nothing counts twice, and nobody else stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetpipe.checkpoint.format import CheckpointReader
from hetpipe.checkpoint.manifest import newest_checkpoint
from hetpipe.decide.sync.segment import divide, first_progress
from hetpipe.errors import CheckpointNotWritten, InjectedFault, LinkClosed, ProtocolViolation, StaleIncarnation
from hetpipe.job.file import Job
from hetpipe.pipeline.inbox import Inbox
from hetpipe.server.shard.client import ShardClient
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.run import StageDone, StageEvaluation
from hetpipe.values.sync import Progress
from tests import models
from tests.models import NUM_WITNESSES
from tests.numerics.compare import ADAMW, ROOT, Case, assert_same_bits, run, trained
from tests.numerics.test_witnesses import case, counts
from tests.pairwise import every_nth
from tests.polling import wait_until
from tests.reference.executor import run_reference
from tests.support.in_process import InProcessResult, InProcessRun, run_in_process
from tests.support.lives import Death

pytestmark = pytest.mark.matrix

#: Two layers with buffers, few minibatches.
BATCH_NORM: dict[str, Any] = {"model": "dropout_batch_norm", "data": "data32", "batch_size": 4}


def death(at: str, number: int | None = None, *, vw: int = 0, **changes: Any) -> Death:
    return Death(vw=vw, at=at, number=number, **changes)


def survive(what: Case, folder: Path, *deaths: Death, **options: Any) -> InProcessResult:
    """Run with deaths, all of which happen; the history checker finds nothing."""
    result = run(what, folder, deaths=deaths, stall_seconds=20.0, **options)
    num_deaths = sum(1 + len(each.also) for each in deaths)
    assert result.num_lives == what.workers + sum((1 + len(each.also)) * each.comes_back for each in deaths)
    assert len({(vw, incarnation) for vw, incarnation, *_ in result.ended}) <= num_deaths
    for *_, error in result.ended:
        assert isinstance(error, InjectedFault | StaleIncarnation | LinkClosed), error
    return result


# What a wave goes through, what a barrier asks for, and what comes before the run has begun.
@pytest.mark.parametrize(
    ("at", "number"),
    every_nth(
        3,
        [
            ("before join", None),
            ("after join", None),
            ("after initialized", None),
            ("before initialized", None),
            ("before forward", 3),
            ("after backward", 4),
            ("during push", 1),
            ("before push", 1),
            ("after staged", 1),
            ("before staged", 2),
            ("before pull", 0),
            ("before hold", None),
            ("before report_checkpoint", 3),
            ("after report_checkpoint", 3),
        ],
    ),
)
def test_every_sample_counts_once_wherever_a_life_ends(at: str, number: int | None, tmp_path: Path) -> None:
    survive(case(workers=2, stages=2, wave=2, every_waves=3), tmp_path, death(at, number))
    assert counts(tmp_path) == [[2] * NUM_WITNESSES] * 4


@pytest.mark.parametrize(
    ("changes", "deaths"),
    [
        # One after the other, in the same place of the pipeline or not.
        ({"workers": 3, "stages": 2, "staleness": 0}, [death("after staged", 1, vw=0), death("before push", 2, vw=2)]),
        (
            {"workers": 2, "stages": 3, "wave": 4},
            [death("before backward", vw=1, stage=2), death("after push", stage=1)],
        ),
        # The second life dies, too: before it has joined, and behind it.
        ({"workers": 2}, [death("before push", 1), death("after join", incarnation=1)]),
        pytest.param(
            {"workers": 2},
            [death("before push", 1), death("before staged", incarnation=1)],
            marks=pytest.mark.exhaustive,
        ),
        # At once: two of three, and all.
        ({"workers": 3, "deterministic": True}, [death("before staged", 2, also=(1,))]),
        pytest.param(
            {"workers": 2, "stages": 1, "every_waves": 2},
            [death("after forward", 6, also=(1,))],
            marks=pytest.mark.exhaustive,
        ),
        ({"workers": 1, "stages": 2}, [death("before staged", 3)]),
        pytest.param(
            {"workers": 1, "stages": 1, "wave": 1},
            [death("after staged", 3), death("before staged", incarnation=1)],
            marks=pytest.mark.exhaustive,
        ),
        # At the last barrier: the others finish.
        ({"workers": 2, "epochs": 1}, [death("before report_checkpoint", vw=1)]),
        # Nobody comes back.
        ({"workers": 3, "stages": 2}, [death("during push", 2, comes_back=False)]),
        pytest.param({"workers": 2}, [death("before initialized", comes_back=False)], marks=pytest.mark.exhaustive),
        # No clock holds anybody back.
        ({"workers": 2, "kind": "asp", "wave": 1}, [death("after staged", 2, vw=1)]),
    ],
)
def test_every_sample_counts_once_however_many_die(
    changes: dict[str, Any], deaths: list[Death], tmp_path: Path
) -> None:
    survive(case(**{"stages": 2, "wave": 2, **changes}), tmp_path, *deaths)
    assert counts(tmp_path) == [[changes.get("epochs", 2)] * NUM_WITNESSES] * 4


@pytest.mark.parametrize("weights", ["flush", "double_buffer", "predict"])
def test_every_policy_survives(weights: Any, tmp_path: Path) -> None:
    """The checker knows what each policy owes; where a wave is averaged, weights cannot be witnesses."""
    what = Case(weights=weights, wave=2, epochs=2, every_waves=3, optimizer=dict(ADAMW), **BATCH_NORM)
    survive(what, tmp_path, death("before staged", 1, vw=1), death("before push_buffers", 3))


@pytest.mark.parametrize(
    ("at", "number"), [("before follow", None), ("before forward", 2), ("before report_checkpoint", 3)]
)
def test_who_is_evicted_ends_soon_though_it_lives(at: str, number: int | None, tmp_path: Path) -> None:
    result = survive(case(workers=2, stages=2, wave=2, every_waves=3), tmp_path, death(at, number, vw=1, how="evicted"))
    assert counts(tmp_path) == [[2] * NUM_WITNESSES] * 4
    assert any(isinstance(error, StaleIncarnation) for *_, error in result.ended)


def test_a_segment_is_shared_by_all_who_were_there_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one of them is known to be gone before another has looked up what is its own."""
    progress = ShardClient.progress

    def late(client: ShardClient) -> Progress:
        found = progress(client)
        listener = client._listener
        assert isinstance(listener, Inbox)
        if client.requester.vw == 1 and found.clock == 0:
            wait_until(lambda: 0 not in listener.log.members, timeout_seconds=20.0, what="eviction")
        return found

    monkeypatch.setattr(ShardClient, "progress", late)
    what = case(workers=2, stages=1, wave=2)
    survive(what, tmp_path, death("before progress"))
    data = what.job().data_spec(NUM_WITNESSES)
    dealt = divide(first_progress(data), data, [VirtualWorkerIndex(0), VirtualWorkerIndex(1)])
    lines = [json.loads(line) for line in (tmp_path / "history" / "shard-0.jsonl").read_text().splitlines()]
    used = next(line["indices"] for line in lines if line["event"] == "used")
    assert used == [index for block in dealt[VirtualWorkerIndex(1)][:2] for index in block]
    assert counts(tmp_path) == [[2] * NUM_WITNESSES] * 4


def test_who_comes_when_the_run_is_over_finds_it_over(tmp_path: Path) -> None:
    what = case(workers=2, stages=1, epochs=1)
    result = survive(what, tmp_path, death("after report_checkpoint", vw=1))
    done = [(vw, report) for vw, _, report in result.reports if isinstance(report, StageDone)]
    assert {vw for vw, _ in done} == {0, 1}
    assert done[0][1] == done[1][1]
    assert counts(tmp_path) == [[1] * NUM_WITNESSES] * 4


@pytest.mark.parametrize("at", ["before join", "before initialized"])
def test_a_death_before_the_run_has_begun_leaves_no_trace(at: str, tmp_path: Path) -> None:
    """The weights are those of a run without it, bit for bit; also of a run that is resumed."""
    what = Case(stages=2, wave=2, epochs=2, combine="mean", every_waves=2, **BATCH_NORM)
    survive(what, tmp_path / "new", death(at))
    expected = run_reference(what.reference())
    assert_same_bits(trained(tmp_path / "new"), expected)

    middle = min((tmp_path / "new" / "checkpoints").iterdir())
    survive(what, tmp_path / "resumed", death(at), restore=middle)
    assert_same_bits(trained(tmp_path / "resumed"), expected)


def test_the_next_one_makes_the_initial_weights_if_the_first_is_gone(tmp_path: Path) -> None:
    """It makes the same ones; then it trains alone, as the only worker of a smaller job would."""
    common: dict[str, Any] = {"stages": 2, "wave": 2, "epochs": 1, "data": "data32"}
    survive(Case(**common), tmp_path, death("before initialized", comes_back=False))
    assert_same_bits(trained(tmp_path), run_reference(Case(workers=1, **common).reference()))


def test_who_joins_has_the_buffers_of_the_others_and_evaluates_with_them(tmp_path: Path) -> None:
    what = Case(workers=3, stages=2, wave=2, epochs=3, **BATCH_NORM)
    job = what.job().model_dump(mode="json")
    job["data"]["eval"] = "tests.models:data32"
    deaths = (death("before push", 1), death("after push_buffers", vw=1), death("before evaluation", vw=2, stage=1))
    found = InProcessRun(Job.model_validate(job), tmp_path, ROOT, stall_seconds=20.0, deaths=deaths)
    result = run_in_process(found)
    assert result.num_lives == 6
    evaluated = [report for *_, report in result.reports if isinstance(report, StageEvaluation)]
    last = max(report.clock for report in evaluated)
    assert sum(report.samples for report in evaluated if report.clock == last) == len(models.data32())
    files = sorted(newest_checkpoint(tmp_path).glob("vw-*-stage-0.safetensors"))
    both = [{k: v for k, v in load_file(path).items() if k.startswith("buffers/")} for path in files[:2]]
    assert both[0].keys() == both[1].keys() != set()
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def test_who_was_alone_gets_the_buffers_of_its_last_barrier(tmp_path: Path) -> None:
    what = Case(workers=1, stages=2, wave=2, epochs=2, every_waves=2, **BATCH_NORM)
    survive(what, tmp_path, death("before push", 2))
    tracked = [value for name, value in trained(tmp_path).items() if name.endswith("num_batches_tracked")]
    assert [int(value) for value in tracked] == [2 * 12]  # every minibatch that counts


@pytest.mark.parametrize("stages", [1, 2])
def test_who_joins_goes_on_where_the_others_are_in_the_schedule(stages: int, tmp_path: Path) -> None:
    rates = {"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 40}
    what = Case(workers=2, stages=stages, wave=1, staleness=0, minibatches=30, lr_schedule=rates)
    survive(what, tmp_path, death("before staged", 5, vw=1))
    folder = newest_checkpoint(tmp_path)
    found = [
        CheckpointReader(sorted(folder.glob(f"vw-{vw}-*"))).optimizer_state(["0.weight"])["0.weight"]["num_updates"]
        for vw in range(2)
    ]
    assert abs(found[0] - found[1]) <= 1, found
    assert min(found) >= 30


def test_who_was_alone_goes_on_in_the_schedule_by_what_is_trained(tmp_path: Path) -> None:
    what = Case(workers=1, stages=2, wave=2, minibatches=20, every_waves=4)
    survive(what, tmp_path, death("after staged", 6))
    state = CheckpointReader(sorted(newest_checkpoint(tmp_path).glob("vw-0-*"))).optimizer_state(["0.weight"])
    assert state["0.weight"]["num_updates"] == 20


def test_if_all_die_at_the_last_barrier_the_run_does_not_pass_for_finished(tmp_path: Path) -> None:
    """Its weights are on the shards only; a resumed run does the rest again."""
    what = case(workers=1, stages=2, every_waves=5)
    with pytest.raises(CheckpointNotWritten, match="resume from the newest complete one"):
        survive(what, tmp_path / "a", death("before report_checkpoint", 16))
    run(what, tmp_path / "b", restore=newest_checkpoint(tmp_path / "a"))
    assert counts(tmp_path / "b") == [[2] * NUM_WITNESSES] * 4


def test_where_only_stages_have_weights_nobody_comes_back(tmp_path: Path) -> None:
    what = Case(kind="none", workers=1, stages=2, minibatches=8)
    with pytest.raises(ProtocolViolation, match="cannot rejoin the run: its weights were in its stages only"):
        survive(what, tmp_path, death("before staged", 2))
