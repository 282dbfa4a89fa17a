"""The scale of a loss is that of `torch.amp.GradScaler`; with a delay it follows from the updates in the weights."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.decide.schedule import loss_scale
from hetpipe.decide.schedule.loss_scale import LossScale, LossScales
from hetpipe.values.precision import LARGEST_SCALE_EXPONENT


@given(st.lists(st.booleans(), max_size=40))
def test_without_delay_it_is_torchs(verdicts: list[bool]) -> None:
    """As long as torch's stays between 1 and the largest: it has no bounds."""
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scales = LossScales()
    with mock.patch.object(loss_scale, "GROWTH_INTERVAL", 3):
        for p, overflowed in enumerate(verdicts, start=1):
            wanted = int(torchs.get_scale())
            if not 1 <= wanted <= 1 << LARGEST_SCALE_EXPONENT:
                return
            assert 1 << scales.exponent(p - 1) == wanted
            torchs.scale(parameter.sum()).backward()  # type: ignore[no-untyped-call]  # torch ships it untyped
            parameter.grad = torch.tensor(float("inf") if overflowed else 1.0)
            torchs.step(optimizer)
            torchs.update()
            optimizer.zero_grad()
            scales.judge(p, scales.exponent(p - 1), overflowed=overflowed)
    assert scales.skipped_updates == sum(verdicts)


def test_minibatches_in_flight_do_not_halve_it_once_each() -> None:
    scales = LossScales()
    for p in range(1, 5):
        scales.judge(p, 16, overflowed=True)
    assert [scales.exponent(through) for through in range(5)] == [16, 15, 15, 15, 15]
    scales.judge(5, 15, overflowed=True)
    assert scales.exponent(5) == 14
    assert scales.skipped_updates == 5


def test_verdicts_that_are_not_in_its_weights_do_not_count() -> None:
    scales = LossScales()
    scales.judge(2, 16, overflowed=True)
    scales.judge(4, 16, overflowed=False)
    scales.judge(6, 15, overflowed=True)
    assert [scales.exponent(through) for through in (0, 1, 2, 3, 4, 5, 6, 9)] == [16, 16, 15, 15, 15, 15, 14, 14]
    scales.forget_before(5)
    assert (scales.exponent(5), scales.exponent(6)) == (15, 14)
    scales.start(8)
    assert scales.exponent(8) == 14


def test_it_stays_between_1_and_the_largest() -> None:
    assert LossScale(0).after_overflow(0) == LossScale(0)
    full = LossScale(LARGEST_SCALE_EXPONENT, loss_scale.GROWTH_INTERVAL - 1)
    assert full.after_success() == LossScale(LARGEST_SCALE_EXPONENT)
    assert LossScale(3, loss_scale.GROWTH_INTERVAL - 1).after_success() == LossScale(4)


def test_its_state_is_restored() -> None:
    scales, again = LossScales(), LossScales()
    scales.judge(1, 16, overflowed=True)
    scales.judge(2, 15, overflowed=False)
    again.load_state(scales.state())
    assert again.newest == LossScale(15, 1)
    again.load_state({})  # a checkpoint of another precision
    assert again.newest == LossScale(15, 1)
    again.load_state({"exponent": 99, "finite_updates": -1})
    assert again.newest == LossScale(LARGEST_SCALE_EXPONENT)
