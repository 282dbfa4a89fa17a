"""Runs that are stopped, poisoned, or resumed: what is on disk then, and who is named."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import hetpipe
from hetpipe.checkpoint.format import CheckpointReader
from hetpipe.checkpoint.manifest import newest_checkpoint
from hetpipe.decide.sync.records import BarrierRecord
from hetpipe.decide.sync.segment import divide, first_progress
from hetpipe.errors import NonFiniteUpdate
from hetpipe.server.shard.in_process import clock_calls
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.wire.call import Calls, ReplyT, RequestT, Unary
from hetpipe.wire.calls import FOLLOW_LOG, FollowLogRequest, HeldClock, HoldClockRequest, LogRecords
from tests import models
from tests.numerics.compare import ADAMW, MOMENTUM, ROOT, Case, assert_same_bits, run, trained
from tests.pairwise import all_pairs
from tests.reference.executor import ReferenceState, run_reference
from tests.support import in_process
from tests.support.in_process import InProcessRun, run_in_process
from tests.support.method_calls import MethodCalls

pytestmark = pytest.mark.matrix


def assert_same_optimizers(checkpoint: Path, expected: ReferenceState) -> None:
    """Every virtual worker's optimizer state in `checkpoint` equals the reference's, bit for bit."""
    for vw, states in enumerate(expected.optimizers):
        reader = CheckpointReader(sorted(checkpoint.glob(f"vw-{vw}-*.safetensors")))
        found = reader.optimizer_state(states)
        for name, state in states.items():
            assert found[name].pop("num_updates") == expected.updates[vw]
            if (last := found[name].pop("last_gradient", None)) is not None:
                assert torch.equal(last, expected.last_gradients[vw][name])
            assert found[name].keys() == state.keys()
            for key, value in state.items():
                mine = found[name][key]
                assert torch.equal(mine, value) if isinstance(value, Tensor) else mine == value, f"{vw} {name} {key}"


@pytest.mark.parametrize(
    ("optimizer", "stages", "staleness"), all_pairs(product((MOMENTUM, ADAMW), ([[1, 3], [3, 1]], 4), (0, 1)), step=2)
)
def test_a_stopped_and_resumed_run_has_the_state_of_one_with_that_barrier(
    *, staleness: int, stages: Any, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    """Weights, buffers of batch normalisation, and every optimizer's state, at the stop and at the end."""
    case = Case(
        model="dropout_batch_norm",
        data="data32",
        batch_size=4,
        epochs=5,
        stages=stages,
        staleness=staleness,
        optimizer=optimizer,
        combine="mean",
        servers=3,
    )
    run(case, tmp_path / "stopped", stop_when=lambda clocks: clocks.published >= 5)
    middle = newest_checkpoint(tmp_path / "stopped")
    barrier = int(middle.name.removeprefix("clock-"))
    assert 5 <= barrier < 15
    expected = run_reference(case.reference(extra_barriers=(barrier,)))
    at_stop = trained(tmp_path / "stopped")
    state = expected.barriers[Clock(barrier)]
    wanted: Mapping[str, Tensor] = {**state.weights, **state.buffers}
    assert all(torch.equal(at_stop[name], value) for name, value in wanted.items())
    assert_same_optimizers(middle, state)

    run(case, tmp_path / "resumed", restore=middle)
    assert_same_bits(trained(tmp_path / "resumed"), expected)
    assert_same_optimizers(newest_checkpoint(tmp_path / "resumed"), expected.final)


def test_every_kept_checkpoint_is_the_state_at_its_barrier(tmp_path: Path) -> None:
    case = Case(model="dropout_batch_norm", data="data32", batch_size=4, epochs=2, every_waves=2, stages=3)
    run(case, tmp_path)
    expected = run_reference(case.reference())
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert len(folders) == 3
    for folder in folders:
        state = expected.barriers[Clock(int(folder.name.removeprefix("clock-")))]
        found: dict[str, Tensor] = {}
        for path in folder.glob("*.safetensors"):
            found.update(load_file(path))
        assert all(torch.equal(found[f"weights/{name}"], value) for name, value in state.weights.items())
        assert all(torch.equal(found[f"buffers/{name}"], value) for name, value in state.buffers.items())
        assert_same_optimizers(folder, state)


class SlowReader(MethodCalls):
    """Answers at once, but the log's record of a stop reaches the stages late.

    It is let through at the second question whose answer shows that the barrier is not beyond what was asked about.
    """

    def __init__(self, inner: Calls) -> None:
        self._inner = inner
        self._num_late = 0
        self._released = threading.Event()

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        reply = self._inner.invoke(call, request)
        if isinstance(reply, HeldClock) and isinstance(request, HoldClockRequest):
            self._num_late += request.switch >= reply.barrier
            if self._num_late > 1:
                self._released.set()
        return reply

    def follow_log(self, request: FollowLogRequest) -> Iterator[LogRecords]:
        for found in self._inner.stream(FOLLOW_LOG, request):
            records = found.records
            stops = [i for i, r in enumerate(records) if isinstance(r, BarrierRecord) and "stop" in r.reason]
            if not stops or self._released.is_set():
                yield found
            elif stops[0] > 0:
                yield LogRecords(records[: stops[0]])
            else:
                self._released.wait(0.01)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("wave", [2, 4])
def test_an_answer_that_knows_of_a_barrier_before_the_log_view_does_counts(
    wave: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `asp` nothing but the barrier holds a worker back: minibatches after the switch point must know it, too."""
    monkeypatch.setattr(in_process, "clock_calls", lambda shard: SlowReader(clock_calls(shard)))
    case = Case(kind="asp", workers=1, stages=2, wave=wave, deterministic=False, minibatches=200, servers=1)
    result = run(case, tmp_path, stop_when=lambda clocks: clocks.published >= 2)
    assert result.snapshot is not None
    assert 2 <= result.snapshot.published < 200 // wave


@pytest.mark.parametrize(
    ("optimizer", "max_norm", "what"),
    [
        ({"name": "SGD", "lr": 0.1}, 1.0, "gradient"),
        ({"name": "SGD", "lr": 0.1, "momentum": 0.9}, None, "gradient"),
        ({"name": "SGD", "lr": 0.1}, None, "update"),
    ],
    ids=["by its norm", "by the optimizer's state", "with nothing kept of it"],
)
def test_a_gradient_that_is_not_finite_is_told_from_an_update(
    optimizer: dict[str, Any], max_norm: float | None, what: str, tmp_path: Path
) -> None:
    """Also by a stage in the middle, which reads no data, with the samples of the minibatch."""
    case = Case(
        model="infinite_gradient",
        data="data32",
        workers=1,
        stages=3,
        wave=1,
        epochs=1,
        batch_size=4,
        optimizer=optimizer,
        max_norm=max_norm,
    )
    with pytest.raises(NonFiniteUpdate) as caught:
        run_in_process(InProcessRun(job=case.job(), run_dir=tmp_path, import_path=ROOT, stall_seconds=20.0))
    told = str(caught.value)
    where = f"stage 1 of virtual worker 0: the {what} of minibatch 1 is not finite in parameter 1.w of layer 1 (1); "
    assert told.startswith(where), told
    job = str(tmp_path / "job.json")
    samples = divide(first_progress(case.job().data_spec(46)), case.job().data_spec(46), [VirtualWorkerIndex(0)])
    indices = list(samples[VirtualWorkerIndex(0)][0])
    assert told.endswith(f"its samples are those of: hetpipe.minibatch({job!r}, vw=0, p=1, indices={indices})")


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_poisoned_sample_is_found_in_its_minibatch(stages: int, tmp_path: Path) -> None:
    """Whichever stage notices first, it names the minibatch that read sample 17, and one of its own layers."""
    case = Case(data="poisoned32", workers=2, stages=stages, epochs=1, batch_size=4, wave=3)
    with pytest.raises(NonFiniteUpdate) as caught:
        run_in_process(InProcessRun(job=case.job(), run_dir=tmp_path, import_path=ROOT, stall_seconds=5.0))
    found = re.fullmatch(
        r"stage (\d) of virtual worker (\d): the loss of minibatch (\d+) is nan; its samples are those of: "
        r"(hetpipe\.minibatch\(.*\))",
        str(caught.value),
    )
    assert found is not None, str(caught.value)
    spec = case.job().data_spec(len(models.poisoned32()))
    dealt = divide(first_progress(spec), spec, [VirtualWorkerIndex(0), VirtualWorkerIndex(1)])
    ((vw, p),) = [(vw, p) for vw, blocks in dealt.items() for p, block in enumerate(blocks, 1) if 17 in block]
    assert (int(found[1]), int(found[2]), int(found[3])) == (stages - 1, vw, p)
    inputs, _ = eval(found[4], {"hetpipe": hetpipe})
    assert not inputs.isfinite().all()
