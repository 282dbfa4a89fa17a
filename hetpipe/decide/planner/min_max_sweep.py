"""Is there any plan with no stage longer than a bound? Dynamic programming over fronts, with sets of cuts as values.

A state is a front (`device_mix`) together with the link to the device that was chosen last; its value is the set of
cuts at which that device's stage may begin. The device behind a stage must be chosen before the stage's time is known,
hence that order. Sets are intersected with the windows of `type_bound`, which empties most states of a tight bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetpipe.decide.planner.costs import MemoryModel
from hetpipe.decide.planner.device_mix import DeviceMix, Front, KindIndex, Move, Seat
from hetpipe.decide.planner.order_cuts import latest_start
from hetpipe.decide.planner.reach_tables import NO_LINK, LinkSet, ReachTables
from hetpipe.decide.planner.stage_reach import Reach
from hetpipe.decide.planner.type_bound import TypeBound

#: Cuts at which the next stage may begin, by the type of its device and the link to it.
Arrivals = dict[tuple[KindIndex, LinkSet], int]


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found out about a bound."""

    seats: tuple[Seat, ...] | None
    """An order with cuts within the bound, or None if none was found."""
    complete: bool
    """No front was dropped: None is a proof."""


class Sweeper:
    """Sweeps over one mix of devices with one memory model."""

    def __init__(self, mix: DeviceMix, tables: ReachTables, memory: MemoryModel, num_layers: int) -> None:
        """Prepare. `num_layers` is at least the number of devices."""
        kinds, num_stages = mix.shape.kinds, mix.num_stages
        self._mix = mix
        self._tables = tables
        self._num_layers = num_layers
        self._loads = [[tables.load(kind, stage, num_stages, memory) for kind in kinds] for stage in range(num_stages)]
        self._reaches: list[dict[tuple[KindIndex, LinkSet, LinkSet], Reach]] = [{} for _ in range(num_stages)]
        #: The share of the model's work before each cut.
        self._progress = tables.progress(kinds)
        around = [mix.links_of(KindIndex(kind)) for kind in range(len(kinds))]

        def best_case(stage: int, kind: KindIndex) -> Reach:
            arriving = around[kind] if stage else NO_LINK
            returning = around[kind] if stage + 1 < num_stages else NO_LINK
            return self._reach(stage, kind, arriving, returning)

        #: What no plan of this mix can beat.
        self.bound = TypeBound(mix, num_layers, best_case)

    def order(self, seats: Sequence[Seat]) -> list[Reach]:
        """The reaches of the stages of one order."""
        links = self._mix.shape.links
        between = [NO_LINK, *(links[a.node][b.node] for a, b in pairwise(seats)), NO_LINK]
        return [self._reach(stage, seat.kind, between[stage], between[stage + 1]) for stage, seat in enumerate(seats)]

    def sweep(self, bound: int, width: int | None) -> Swept:
        """Is there a plan with no stage longer than `bound` ticks?

        Args:
            bound: in ticks.
            width: how many fronts to keep per stage, the most promising ones, or None for all.
        """
        windows = self.bound.windows(bound)
        states: dict[Front, Arrivals] = {
            move.front: {(move.kind, move.link): 1} for move in self._mix.first_moves() if windows[move.front.used]
        }
        history = [states]
        complete = True
        for stage in range(self._mix.num_stages - 1):
            states = self._next(stage, states, windows, bound)
            if width is not None and len(states) > width:
                complete = False
                promises = {front: self._promise(front, arrivals, windows) for front, arrivals in states.items()}
                states = {front: states[front] for front in heapq.nlargest(width, states, key=promises.__getitem__)}
            if not states:
                return Swept(None, complete)
            history.append(states)
        return Swept(self._trace(history, bound), complete)

    def _next(
        self, stage: int, states: dict[Front, Arrivals], windows: Sequence[int], bound: int
    ) -> dict[Front, Arrivals]:
        """Where the stage after `stage` may begin, by front, from where `stage` may."""
        after: dict[Front, Arrivals] = {}
        for front, arrivals in states.items():
            window = windows[front.used]
            ends: dict[LinkSet, int] = {}
            for move in self._mix.moves(front):
                if not windows[move.front.used]:
                    continue
                link = move.link
                cuts = ends.get(link)
                if cuts is None:
                    cuts = ends[link] = self._ends(stage, arrivals, link, bound, window)
                if cuts:
                    known = after.setdefault(move.front, {})
                    slot = (move.kind, link)
                    known[slot] = known.get(slot, 0) | cuts
        return after

    def _ends(self, stage: int, arrivals: Arrivals, returning: LinkSet, bound: int, window: int) -> int:
        """The cuts within the window at which a stage may end if the next device is behind `returning`."""
        cuts = 0
        for (kind, arriving), firsts in arrivals.items():
            reach = self._reach(stage, kind, arriving, returning).under(bound)
            cuts |= reach.image(firsts, bound, window & ~cuts)
            if cuts == window:
                break
        return cuts

    def _promise(self, front: Front, arrivals: Arrivals, windows: Sequence[int]) -> int:
        """How much further than needed a front got: the work between the earliest useful cut and its furthest."""
        return max(
            self._progress[cuts.bit_length() - 1] - self._progress[(window & -window).bit_length() - 1]
            for (kind, _), cuts in arrivals.items()
            for window in (windows[front.used - self._mix.strides[kind]],)
        )

    def _trace(self, history: Sequence[dict[Front, Arrivals]], bound: int) -> tuple[Seat, ...] | None:
        """The order of a plan, from its end back through the states of all stages."""
        last, after = self._num_layers, None
        moves: list[Move] = []
        for stage in reversed(range(len(history))):
            returning = NO_LINK if after is None else after.link
            entry = self._entry(stage, history[stage], after, bound, last)
            if entry is None:
                assert after is None, "every state has a state before it"
                return None
            front, (kind, arriving), same_node = entry
            if after is not None:
                moves.append(after._replace(same_node=same_node))
            after = Move(kind, arriving, same_node=False, front=front)
            reach = self._reach(stage, kind, arriving, returning)
            last = latest_start(reach, history[stage][front][kind, arriving], last, bound)
        assert after is not None
        moves.append(after)
        return tuple(self._mix.seats(moves[::-1]))

    def _entry(
        self, stage: int, states: dict[Front, Arrivals], after: Move | None, bound: int, last: int
    ) -> tuple[Front, tuple[KindIndex, LinkSet], bool] | None:
        """A state whose stage ends at `last` and from which `after` is a move, and whether that is on the same node."""
        returning = NO_LINK if after is None else after.link
        used = None if after is None else after.front.used - self._mix.strides[after.kind]
        for front, arrivals in states.items():
            if after is None or used is None:
                leading = [False]
            elif front.used == used:
                leading = [
                    move.same_node
                    for move in self._mix.moves(front)
                    if move.front is after.front and move.kind == after.kind and move.link == after.link
                ]
            else:
                continue
            for slot, firsts in arrivals.items() if leading else ():
                if self._reach(stage, slot[0], slot[1], returning).image(firsts, bound, 1 << last):
                    return front, slot, leading[0]
        return None

    def _reach(self, stage: int, kind: KindIndex, arriving: LinkSet, returning: LinkSet) -> Reach:
        key = (kind, arriving, returning)
        found = self._reaches[stage].get(key)
        if found is None:
            found = self._reaches[stage][key] = self._tables.reach(
                self._mix.shape.kinds[kind], self._loads[stage][kind], arriving, returning
            )
        return found
