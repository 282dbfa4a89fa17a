"""A stage is built by its next cut while it waits for the barrier at which its layers move."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hetpipe.decide.sync.records import BarrierRecord, NewCut
from hetpipe.errors import InjectedFault
from hetpipe.pipeline.moving import LayerMover, Rebuild
from hetpipe.values.ids import Clock, VirtualWorkerIndex


class Stage:
    """Of virtual worker 1, which has layers 0-1 and 2-3; what it was built with."""

    def __init__(self, *, scripted: dict[int, tuple[int, ...]] | None = None, fails: bool = False) -> None:
        self.built: list[tuple[tuple[int, ...], int]] = []
        self._fails = fails
        parts: Any = SimpleNamespace(
            identity=SimpleNamespace(vw=VirtualWorkerIndex(1)), bounds=(0, 2, 4), frozen_layers=1, guard=nullcontext()
        )
        unused: Any = None
        rebuild = Rebuild(self._build, cut_at=lambda _, upto: (scripted or {}).get(upto, ()))
        self.mover = LayerMover(parts, unused, unused, rebuild)

    def _build(self, bounds: tuple[int, ...], frozen: int) -> Any:
        self.built.append((bounds, frozen))
        if self._fails:
            raise InjectedFault("not enough memory")


def barrier(*cuts: tuple[int, tuple[int, ...]]) -> BarrierRecord:
    return BarrierRecord(3, Clock(4), "plan", 0, tuple(NewCut(VirtualWorkerIndex(vw), bounds) for vw, bounds in cuts))


@pytest.mark.parametrize(
    ("scripted", "cuts", "bounds"),
    [
        ({4: (0, 1, 4)}, [], (0, 1, 4)),
        ({}, [(0, (0, 3, 4)), (1, (0, 1, 4))], (0, 1, 4)),
        ({5: (0, 1, 4)}, [(0, (0, 3, 4))], None),
        ({}, [(1, (0, 2, 4))], None),
    ],
    ids=["script", "requested", "of-others", "as-it-is"],
)
def test_a_stage_is_built_for_the_barrier(
    scripted: dict[int, tuple[int, ...]], cuts: list[Any], bounds: tuple[int, ...] | None
) -> None:
    stage = Stage(scripted=scripted)
    stage.mover.prepare(Clock(1), barrier(*cuts))
    assert stage.built == ([] if bounds is None else [(bounds, 1)])


def test_one_that_cannot_be_built_says_so_only_when_its_layers_move() -> None:
    stage = Stage(fails=True)
    stage.mover.prepare(Clock(1), barrier((1, (0, 1, 4))))
    assert len(stage.built) == 1
