"""Every weight policy: distributed = reference executor, bit for bit, whatever the timing."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checkpoint.manifest import checkpoint_dir, newest_checkpoint
from hetpipe.decide.sync.records import BarrierRecord, Record
from hetpipe.decide.sync.segment import STOP
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.segment_run import SegmentRun
from hetpipe.server.agent.stage_assembly import assemble
from hetpipe.values.ids import Clock
from hetpipe.values.policies import WEIGHT_POLICIES
from tests.numerics.compare import ADAMW, MOMENTUM, ROOT, SGD, Case, assert_same_bits, run, trained
from tests.pairwise import all_pairs, every_nth
from tests.reference.executor import run_reference
from tests.support import in_process
from tests.support.in_process import InProcessRun

ADAM: dict[str, Any] = {"name": "Adam", "lr": 0.01, "weight_decay": 0.02}
NESTEROV: dict[str, Any] = {"name": "SGD", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
RMSPROP: dict[str, Any] = {"name": "RMSprop", "lr": 0.005, "weight_decay": 0.01}
OPTIMIZERS = {
    "sgd": SGD,
    "momentum": MOMENTUM,
    "nesterov": NESTEROV,
    "adam": ADAM,
    "adamw": ADAMW,
    "rmsprop": RMSPROP,
}


def settled(case: Case) -> Case:
    """Enough waves for every version to be in use and for the bound to bite, and a short one at the end."""
    return replace(case, minibatches=case.wave * (case.staleness + 4) + 1)


def same(case: Case, folder: Path, **options: Any) -> None:
    run(case, folder, **options)
    assert_same_bits(trained(folder), run_reference(case.reference()))


def case_of(weights: Any, stages: int, optimizer: str, dtype: str = "32", **values: Any) -> Case:
    return settled(
        Case(
            weights=weights,
            stages=stages,
            wave=max(stages, 2),
            optimizer=OPTIMIZERS[optimizer],
            model=f"mlp{dtype}",
            data=f"more{dtype}",
            **values,
        )
    )


def _optimizers_of(weights: str) -> list[str]:
    return ["momentum"] if weights == "spectrain" else list(OPTIMIZERS)


#: Every policy, optimizer and number of stages in both dtypes: momentum each way, the others in double precision
#: without shards and in single precision with them.
POINTS = [
    (kind, weights, optimizer, stages, dtype)
    for kind, weights in itertools.product(("none", "wsp"), WEIGHT_POLICIES)
    for optimizer, stages, dtype in itertools.product(_optimizers_of(weights), (1, 2, 3, 4), ("32", "64"))
    if optimizer == "momentum" or dtype == {"none": "64", "wsp": "32"}[kind]
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "weights", "optimizer", "stages", "dtype"),
    all_pairs(POINTS, name=lambda *point: "-".join(map(str, point))),
)
def test_every_policy_equals_the_reference(
    kind: str, weights: str, optimizer: str, stages: int, dtype: str, tmp_path: Path
) -> None:
    number = POINTS.index((kind, weights, optimizer, stages, dtype))  # type: ignore[arg-type]
    if kind == "none":
        case = case_of(weights, stages, optimizer, dtype, kind="none", workers=1, every_waves=3)
    else:
        staleness = number % 3
        every_waves = None if staleness else 3  # a barrier starts the bound anew
        case = case_of(weights, stages, optimizer, dtype, workers=2, staleness=staleness, every_waves=every_waves)
    same(case, tmp_path, delay_seed=number)


ORDERS = [
    (weights, schedule, stages, kind)
    for weights, schedule in (("wave", "fifo"), ("flush", "gpipe"), ("flush", "fifo"))
    for stages, kind in itertools.product((1, 2, 3, 4), ("none", "wsp"))
]


@pytest.mark.matrix
@pytest.mark.parametrize(("weights", "schedule", "stages", "kind"), all_pairs(ORDERS))
def test_the_order_changes_no_bit(weights: Any, schedule: str, stages: int, kind: str, tmp_path: Path) -> None:
    workers = 1 if kind == "none" else 2
    case = case_of(weights, stages, "momentum", schedule=schedule, kind=kind, workers=workers, every_waves=4)
    same(case, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("workers", "optimizer", "weights", "stages"),
    all_pairs(itertools.product((1, 2, 3), ("momentum", "adamw"), ("flush", "double_buffer"), (1, 2, 3)), step=2),
)
def test_replicas_equal_the_reference(workers: int, optimizer: str, weights: str, stages: int, tmp_path: Path) -> None:
    case = case_of(weights, stages, optimizer, kind="allreduce", workers=workers, every_waves=4, max_norm=0.5)
    same(case, tmp_path)


CLIPPINGS = [
    *(("wave", "global"), ("vertical", "global"), ("flush", "global"), ("double_buffer", "global")),
    *(("wave", "stage"), ("stash", "stage"), ("predict", "stage"), ("spectrain", "stage"), ("flush", "stage")),
]
CLIPPED = [(*clipping, stages, kind) for clipping in CLIPPINGS for stages in (1, 2, 3) for kind in ("none", "wsp")]


@pytest.mark.matrix
@pytest.mark.parametrize(("weights", "clip", "stages", "kind"), all_pairs(CLIPPED, step=4))
def test_clipping_is_exact(weights: str, clip: Any, stages: int, kind: str, tmp_path: Path) -> None:
    """Gradients of these models are of norm 0.2 to 2, so that some are clipped and some are not."""
    workers = 1 if kind == "none" else 2
    case = case_of(
        weights, stages, "momentum", "64", kind=kind, workers=workers, max_norm=0.5, clip=clip, every_waves=4
    )
    same(case, tmp_path, delay_seed=stages)
    unclipped = run_reference(replace(case, max_norm=None).reference())
    found = trained(tmp_path)
    assert any(not torch.equal(found[name], value) for name, value in unclipped.weights.items()), "nothing was clipped"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("weights", "shape", "kind"),
    all_pairs(
        itertools.product(
            ("wave", "stash", "vertical", "predict", "spectrain"),
            ((4, 2, 2), (4, 4, 3), (6, 3, 2), (4, 2, 1)),
            ("none", "wsp"),
        ),
        by=lambda weights, shape, kind: (weights, *shape, kind),
        step=4,
    ),
)
def test_accumulation_is_exact(weights: str, shape: tuple[int, int, int], kind: str, tmp_path: Path) -> None:
    wave, accumulate, stages = shape
    workers = 1 if kind == "none" else 2
    case = case_of(
        weights, stages, "momentum", accumulate=accumulate, kind=kind, workers=workers, every_waves=4, batch_size=3
    )
    case = replace(case, wave=wave, data="data32", minibatches=None, epochs=2)  # an epoch's last minibatch is smaller
    same(case, tmp_path)


SCHEDULES: list[dict[str, Any]] = [
    {"name": "CosineAnnealingLR", "T_max": 30},
    {"name": "OneCycleLR", "max_lr": 0.02, "total_steps": 200},
    {"name": "StepLR", "step_size": 3, "gamma": 0.5},
]
BIASES: dict[str, Any] = {"parameters": ("*.bias",), "weight_decay": 0.0, "lr": 0.02}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("weights", "schedule", "kind"), all_pairs(itertools.product(WEIGHT_POLICIES, SCHEDULES, ("none", "wsp")), step=4)
)
def test_learning_rates_and_groups_are_exact(weights: str, schedule: dict[str, Any], kind: str, tmp_path: Path) -> None:
    workers = 1 if kind == "none" else 2
    optimizer = "momentum" if weights == "spectrain" else "adamw"
    groups = () if schedule["name"] == "OneCycleLR" else (BIASES,)
    case = case_of(
        weights, 2, optimizer, kind=kind, workers=workers, lr_schedule=schedule, groups=groups, every_waves=3
    )
    same(case, tmp_path)


def _kinds(*policies: str) -> list[Any]:
    """Each policy with shards or without, in turn, and the other way in `make exhaustive`; and replicas."""
    return [
        *((weights, ("wsp", "none")[number % 2]) for number, weights in enumerate(policies)),
        *(
            pytest.param(weights, ("none", "wsp")[number % 2], marks=pytest.mark.exhaustive)
            for number, weights in enumerate(policies)
        ),
        *((weights, "allreduce") for weights in policies if weights in ("flush", "double_buffer")),
    ]


@pytest.mark.matrix
@pytest.mark.parametrize(("weights", "kind"), _kinds(*WEIGHT_POLICIES))
def test_a_resumed_run_equals_an_uninterrupted_one(weights: str, kind: str, tmp_path: Path) -> None:
    optimizer = "nesterov" if weights in ("predict", "spectrain") else "adamw"
    case = case_of(
        weights,
        2,
        optimizer,
        kind=kind,
        workers=1 if kind == "none" else 2,
        every_waves=3,
        lr_schedule={"name": "StepLR", "step_size": 4, "gamma": 0.7},
    )
    run(case, tmp_path / "whole")
    first = min((tmp_path / "whole" / "checkpoints").iterdir())
    run(case, tmp_path / "resumed", restore=first)
    whole, resumed = trained(tmp_path / "whole"), trained(tmp_path / "resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert newest_checkpoint(tmp_path / "resumed") != first


@pytest.mark.matrix
@pytest.mark.parametrize(("weights", "kind"), _kinds("wave", "double_buffer", "flush", "predict"))
def test_a_stopped_and_resumed_run_equals_one_with_that_barrier(weights: str, kind: str, tmp_path: Path) -> None:
    case = replace(
        case_of(weights, 2, "momentum", kind=kind, workers=1 if kind == "none" else 2), minibatches=31, wave=3
    )
    stopped = run(case, tmp_path / "stopped", stop_when=lambda clocks: clocks.published >= 3)
    assert stopped.snapshot is not None
    barrier = stopped.snapshot.published
    assert barrier < 10, "it stopped early"
    run(case, tmp_path / "resumed", restore=checkpoint_dir(tmp_path / "stopped", Clock(barrier)))
    assert_same_bits(trained(tmp_path / "resumed"), run_reference(case.reference(extra_barriers=(barrier,))))


@pytest.mark.matrix
@pytest.mark.parametrize("stop_at", every_nth(4, range(1, 9)))
def test_replicas_of_unequal_length_stop_together(stop_at: int, tmp_path: Path) -> None:
    """One replica has a minibatch, and a wave, less than the other: wherever the stop falls, nobody waits in vain."""
    case = replace(
        case_of("flush", 2, "momentum", kind="allreduce", workers=2), minibatches=None, epochs=1, wave=2, batch_size=17
    )
    stopped = run(case, tmp_path, stop_when=lambda clocks: clocks.published >= stop_at)
    assert stopped.snapshot is not None
    found = stopped.snapshot.published
    assert_same_bits(trained(tmp_path), run_reference(case.reference(stop_at_clock=found)))


@pytest.mark.matrix
def test_a_stage_that_reads_late_of_a_stop_waits_for_no_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage of one replica does not read that the barrier was set lower until it has closed its waves."""
    case = replace(
        case_of("flush", 2, "momentum", kind="allreduce", workers=2), minibatches=None, epochs=1, wave=2, batch_size=17
    )
    closed = threading.Event()
    close, on_records = SegmentRun._close_empty_waves, Inbox.on_records

    def closing(segment: SegmentRun) -> None:
        close(segment)
        if segment._parts.identity.vw == 1 and segment._parts.identity.is_last:
            closed.set()

    def hearing(inbox: Inbox, records: Sequence[Record]) -> None:
        is_late = inbox._life == (1, 0) and inbox._links["downstream"] is None
        for record in records:
            if is_late and isinstance(record, BarrierRecord) and record.reason == STOP:
                closed.wait(10)
            on_records(inbox, [record])

    monkeypatch.setattr(SegmentRun, "_close_empty_waves", closing)
    monkeypatch.setattr(Inbox, "on_records", hearing)
    run(case, tmp_path, stop_when=lambda clocks: clocks.published >= 1, stall_seconds=5.0)
    assert closed.is_set()


@pytest.mark.parametrize(
    ("weights", "kind"),
    every_nth(
        2,
        (
            (weights, kind)
            for number, weights in enumerate(("wave", "vertical", "double_buffer", "flush"))
            for kind in (("none", "wsp") if number % 2 else ("wsp", "none"))
        ),
    ),
)
def test_another_partition_computes_the_same_bits(weights: str, kind: str, tmp_path: Path) -> None:
    """The number of stages stays: `vertical` depends on it."""
    workers = 1 if kind == "none" else 2
    found = []
    for counts in ([1, 4], [3, 2]):
        case = replace(case_of(weights, 2, "adamw", kind=kind, workers=workers), stages=[counts] * workers)
        run(case, tmp_path / str(counts[0]))
        found.append(trained(tmp_path / str(counts[0])))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("weights", ["stash", "predict", "spectrain"])
def test_policies_that_depend_on_the_partition_are_known(weights: str, tmp_path: Path) -> None:
    found = []
    for counts in ([1, 4], [3, 2]):
        case = replace(case_of(weights, 2, "momentum", kind="none", workers=1), stages=[counts])
        run(case, tmp_path / str(counts[0]))
        found.append(trained(tmp_path / str(counts[0])))
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])


SHARED = ("wave", "stash", "double_buffer", "predict")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        ("spectrain", "none"),
        *(pytest.param(one, "none", marks=pytest.mark.exhaustive) for one in WEIGHT_POLICIES if one != "spectrain"),
        *(pytest.param(one, "wsp", marks=pytest.mark.exhaustive) for one in SHARED[1:]),
        (SHARED[0], "wsp"),
    ],
)
def test_the_number_of_live_tensors_is_flat(
    weights: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted after runs of 10 and of 90 waves, with everything that their stages hold still alive."""
    gc.freeze()  # what other tests have left is neither looked through nor counted
    kept: list[object] = []

    def keeping(*arguments: Any) -> Any:
        assembled = assemble(*arguments)
        kept.append(assembled)
        return assembled

    monkeypatch.setattr(in_process, "assemble", keeping)
    counts = []
    for minibatches in (20, 180):
        case = replace(case_of(weights, 2, "momentum", kind=kind, workers=1), minibatches=minibatches)
        run = InProcessRun(job=case.job(), run_dir=tmp_path / str(minibatches), import_path=ROOT, keep_history=False)
        result = in_process.run_in_process(run)
        gc.collect()
        counts.append(sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()))
        del result
        kept.clear()
        gc.collect()
    # Timing decides how many buffers, of 8 tensors each, a pool ever had to make. A leak is a tensor per wave, or 80.
    assert counts[1] <= counts[0] + 8 * 8, counts
