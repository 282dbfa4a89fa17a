"""Cuts of virtual workers from a peer are validated before use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.errors import ProtocolViolation
from hetpipe.server.shard.config_check import check_config, check_life
from hetpipe.values.activation import Activation
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex
from hetpipe.values.sync import MemberChange, PlanChange, PlanVersion, WaveChange
from tests.server.shard.test_run_document import CONFIG

VW = VirtualWorkerIndex(0)
STAGES = CONFIG.membership.num_stages[VW]
CUT = tuple(range(STAGES + 1))


@pytest.mark.parametrize("cut", [(0,), (1, 2), (0, 2, 2), (0, 3, 1), (0, 1 << 53), tuple(range(300_000))])
def test_what_is_no_cut(cut: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolViolation, match=r"is not a cut: bounds of stages increase from 0"):
        check_life(VW, Incarnation(1), 1, cut)


def test_a_cut_is_accepted() -> None:
    check_life(VW, Incarnation(1), STAGES, CUT)


@pytest.mark.parametrize(
    ("plan", "wrong"),
    [
        (PlanVersion(0, (0, *CUT), CUT), "virtual worker 0 of .* stages cut at"),
        (PlanVersion(0, (*CUT, CUT[-1] + 1), CUT), "virtual worker 0 of .* stages cut at"),
        (PlanVersion(0, CUT, (5, 6)), "virtual worker 0 of .* stages cut at"),
        (PlanVersion(-1, CUT, CUT), "version -1 of the plan of virtual worker 0"),
    ],
)
def test_a_configuration_with_an_impossible_plan_version(plan: PlanVersion, wrong: str) -> None:
    membership = replace(CONFIG.membership, plans={VW: plan})
    with pytest.raises(ProtocolViolation, match=wrong):
        check_config(replace(CONFIG, membership=membership), memory_bytes=1 << 20)


@pytest.mark.parametrize(
    "change",
    [WaveChange(Clock(0), (2,)), WaveChange(Clock(1), ()), WaveChange(Clock(1), (0,)), WaveChange(Clock(1), (2,) * 9)],
)
def test_a_configuration_with_an_impossible_n(change: WaveChange) -> None:
    with pytest.raises(ProtocolViolation, match=r"a change of N at clock [01] to \(.*\) for \d+ virtual workers"):
        check_config(replace(CONFIG, wave_changes=(change,)), memory_bytes=1 << 20)
    check_config(replace(CONFIG, wave_changes=(WaveChange(Clock(1), (2,)),)), memory_bytes=1 << 20)


def test_a_change_may_need_a_barrier_only() -> None:
    check_config(replace(CONFIG, plan_changes=(PlanChange(Clock(1), VW),)), memory_bytes=1 << 20)


@pytest.mark.parametrize(
    "change", [MemberChange(Clock(0), VW, joins=True), MemberChange(Clock(1), VirtualWorkerIndex(99), joins=False)]
)
def test_a_configuration_with_impossible_members(change: MemberChange) -> None:
    with pytest.raises(ProtocolViolation, match=r"a change of members at clock [01] of virtual worker (0|99)"):
        check_config(replace(CONFIG, member_changes=(change,)), memory_bytes=1 << 20)


@pytest.mark.parametrize("layers", [(2, 1), (1, 1), (-1, 2)])
def test_a_configuration_with_impossible_inactive_layers(layers: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolViolation, match=r"inactive layers \(.*\) from clock 3 on"):
        check_config(replace(CONFIG, activations=(Activation(Clock(3), layers),)), memory_bytes=1 << 20)
    with pytest.raises(ProtocolViolation, match=r"a start with the inactive layers \("):
        check_config(replace(CONFIG, progress=replace(CONFIG.progress, inactive=layers)), memory_bytes=1 << 20)
    with pytest.raises(ProtocolViolation, match=r"layers \(.*\) that are built anew at clock 3"):
        check_config(replace(CONFIG, activations=(Activation(Clock(3), (2,), layers),)), memory_bytes=1 << 20)
    with pytest.raises(ProtocolViolation, match=r"a start with layers \(.*\) that are built anew"):
        check_config(replace(CONFIG, progress=replace(CONFIG.progress, fresh=layers)), memory_bytes=1 << 20)
