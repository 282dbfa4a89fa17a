"""The witness weights must themselves be beyond doubt: what was added can be read back, and every fault shows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.pipeline.witness import (
    Fault,
    FaultKind,
    Witness,
    WitnessDataset,
    decode,
    encode,
    sample_counts,
    witness_loss,
    witness_model,
)
from tests.reference.executor import ReferenceRun, run_reference

WITNESS = Witness(num_vws=3, num_waves=5, num_slices=4, copies=2)

#: (vw, wave, slice)
Push = tuple[int, int, int]

ALL_PUSHES: list[Push] = [(vw, wave, index) for vw in range(3) for wave in range(5) for index in range(4)]


def weights_after(pushes: Sequence[Push], witness: Witness = WITNESS) -> list[Tensor]:
    """The slices after `pushes`, each applied to its own slice."""
    slices = [torch.zeros(witness.slice_elements, dtype=witness.dtype) for _ in range(witness.num_slices)]
    for vw, wave, index in pushes:
        slices[index] += witness.update(vw, wave, index)
    return slices


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_digits_round_trip_exactly_up_to_the_full_mantissa(dtype: torch.dtype) -> None:
    total = torch.zeros_like(encode(0, num_digits=60, dtype=dtype))
    for digit in range(60):
        for _ in range(digit % 4):
            total += encode(digit, num_digits=60, dtype=dtype)
    assert decode(total, num_digits=60) == [digit % 4 for digit in range(60)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_wave_once_in_any_order_is_no_fault(dtype: torch.dtype) -> None:
    witness = Witness(num_vws=3, num_waves=5, num_slices=4, copies=2, dtype=dtype)
    for pushes in (ALL_PUSHES, ALL_PUSHES[::-1]):
        slices = weights_after(pushes, witness)
        assert witness.faults(slices) == []
        assert set(witness.counts(slices).values()) == {(1,) * 8}


def test_updates_are_distinct() -> None:
    updates = {tuple(WITNESS.update(*push).tolist()) for push in ALL_PUSHES}
    assert len(updates) == len(ALL_PUSHES)


def test_a_lost_wave_is_found() -> None:
    slices = weights_after([push for push in ALL_PUSHES if push[:2] != (1, 3)])
    assert WITNESS.faults(slices) == [Fault(FaultKind.LOST, 1, 3, (0,) * 8)]


@pytest.mark.parametrize("times", [2, 3])
def test_a_repeated_wave_is_found(times: int) -> None:
    slices = weights_after(ALL_PUSHES + [(2, 0, index) for index in range(4)] * (times - 1))
    assert WITNESS.faults(slices) == [Fault(FaultKind.DOUBLED, 2, 0, (times,) * 8)]


def test_a_wave_repeated_until_its_digit_overflows_is_found() -> None:
    slices = weights_after(ALL_PUSHES + [(0, 0, index) for index in range(4)] * 4)
    assert WITNESS.faults(slices)


def test_a_wave_torn_between_slices_is_found() -> None:
    slices = weights_after([push for push in ALL_PUSHES if push != (0, 4, 2)])
    assert WITNESS.faults(slices) == [Fault(FaultKind.TORN, 0, 4, (1, 1, 1, 1, 0, 0, 1, 1))]


def test_a_wave_torn_within_a_slice_is_found() -> None:
    slices = weights_after([push for push in ALL_PUSHES if push != (0, 4, 2)])
    half = WITNESS.update(0, 4, 2)
    half[: WITNESS.slice_elements // 2] = 0
    slices[2] += half
    assert WITNESS.faults(slices) == [Fault(FaultKind.TORN, 0, 4, (1, 1, 1, 1, 0, 1, 1, 1))]


def test_an_update_added_to_another_slice_is_found() -> None:
    slices = weights_after([push for push in ALL_PUSHES if push != (1, 2, 0)])
    slices[3] += WITNESS.update(1, 2, 0)
    kinds = {(fault.kind, fault.vw, fault.wave) for fault in WITNESS.faults(slices)}
    assert kinds == {(FaultKind.TORN, 1, 2), (FaultKind.MISPLACED, 1, 2)}


def test_an_uncommitted_wave_must_not_be_there() -> None:
    slices = weights_after([push for push in ALL_PUSHES if push[1] < 4])
    assert WITNESS.faults(slices, {0: 4, 1: 4, 2: 4}) == []
    assert WITNESS.faults(slices, {0: 4, 1: 3, 2: 4}) == [Fault(FaultKind.UNEXPECTED, 1, 3, (1,) * 8)]


@pytest.mark.parametrize("value", [0.5, -1.0, float("nan"), float(1 << 24)])
def test_weights_that_no_sum_gives_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="cell 0"):
        decode(torch.tensor([value]), num_digits=12)


@pytest.mark.parametrize(("vws", "n", "staleness"), [(1, 1, 0), (2, 2, 0), (3, 4, 1), (3, 2, 4)])
def test_a_run_counts_every_sample_once_per_epoch_in_every_layer(vws: int, n: int, staleness: int) -> None:
    num_samples = 41
    run = ReferenceRun(
        model=lambda: witness_model(3, num_samples),
        loss=witness_loss,
        train=WitnessDataset(num_samples),
        batch_size=3,
        seed=7,
        optimizer="SGD",
        arguments={"lr": 1.0},
        num_virtual_workers=vws,
        minibatches_per_wave=n,
        staleness=staleness,
        epochs=2,
        checkpoint_every_waves=3,
    )
    result = run_reference(run)
    assert list(result.weights) == ["0.cells", "1.cells", "2.cells"]
    for cells in result.weights.values():
        assert sample_counts(cells, num_samples) == [2] * num_samples
    for state in result.barriers.values():
        expected = [state.epoch + (index in state.used) for index in range(num_samples)]
        assert all(sample_counts(cells, num_samples) == expected for cells in state.weights.values())
