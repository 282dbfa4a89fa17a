"""Exact search for the order of one virtual worker's devices together with the cuts: guess well, then prove.

Good plans are cheap to find: by sweeps that keep few states, and by local changes of the best order so far. The exact
sweeps then mostly prove that one tick less is impossible. From the bottom up:

* `DeviceMix`: devices of one type on one node are equivalent; two nodes are equivalent if they offer the same devices
  and swapping them changes no link. The state of a search is therefore how much of every node is used, up to swaps of
  equivalent nodes, and the node of the last stage: a `Front`. Its moves are the choices of the next device.
* `TypeBound`: lower bounds from the numbers of used devices of each type alone. The relaxation ignores nodes (every
  transfer uses the fastest link of the type) and lets a stage begin before the previous one ends. The result is a small
  dynamic programme over counts of types. It yields lower bounds and, for every search, the window of cuts to consider.
* `Sweeper`: decides whether a plan exists with no stage longer than a bound, by dynamic programming over fronts with
  sets of cuts as values. A state is a front with the link to the device chosen last; its value is the set of cuts at
  which that device's stage may begin. A stage's time is known only once the next device is chosen, hence this form.
  Sets are intersected with the windows of `TypeBound`, which empties most states of a tight bound.
* `OrderSearch`: the bisection over bounds.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise, permutations, product
from math import comb, prod
from typing import NamedTuple, NewType

from hetpipe.decide.planner.costs import MemoryModel
from hetpipe.decide.planner.cuts import (
    NO_LINK,
    LinkSet,
    Reach,
    ReachTables,
    cuts_within,
    latest_start,
    least_cuts,
    might_pass,
)

# -- the devices, up to what makes no difference -----------------------------------------------------------------------


#: Index of a type in `MixShape.kinds`.
KindIndex = NewType("KindIndex", int)

#: Id of a group of equivalent nodes with the number of devices of each type in use on one node of the group.
Usage = NewType("Usage", int)

#: Limit on codes; sufficient for four types with sixteen devices each.
MAX_CODES = 100_000


@dataclass(frozen=True, slots=True)
class MixShape:
    """Nodes by index, with their devices and links. Equal shapes have equal optima."""

    kinds: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """Per node, the number of devices of each type to use; at least one in total."""
    links: tuple[tuple[LinkSet, ...], ...]
    """Links between every two nodes, and within each: a symmetric matrix of single links."""


class Seat(NamedTuple):
    """Node and device type of a stage; which of the equivalent devices is left open."""

    node: int
    kind: KindIndex


@dataclass(slots=True, eq=False)
class Front:
    """The devices used so far and the node of the last stage. Immutable; unique within a `DeviceMix`."""

    others: tuple[Usage, ...]
    """The usage of every other node, sorted."""
    current: Usage
    """The usage of the node of the last stage, including its device."""
    used: int
    """Used devices of each class of types, encoded with `DeviceMix.strides`."""


class Move(NamedTuple):
    """The choice of the next stage's device."""

    kind: KindIndex
    link: LinkSet
    """Link from the previous stage; empty for the first."""
    same_node: bool
    front: Front
    """The resulting front."""


class DeviceMix:
    """All orders of the devices of a shape, with equivalent ones merged."""

    def __init__(self, shape: MixShape, *, max_codes: int = MAX_CODES) -> None:
        """Group the nodes of `shape`.

        Args:
            shape: adjacent types are the first to be merged into classes.
            max_codes: limit on the values of `Front.used`.
        """
        self.shape = shape
        #: Number of devices of each type.
        self.counts = tuple(sum(column) for column in zip(*shape.counts, strict=True))
        self.num_stages = sum(self.counts)
        #: Classes of types as counted in `Front.used`: single types, unless that makes too many codes.
        self.classes = _classes(self.counts, max_codes)
        class_strides = _strides([sum(self.counts[kind] for kind in kinds) for kinds in self.classes])
        #: Increment of `Front.used` for one device of each type.
        self.strides = tuple(stride for kinds, stride in zip(self.classes, class_strides, strict=True) for _ in kinds)
        self._groups = _alike(shape)
        members = [self._groups.index(group) for group in sorted(set(self._groups))]
        self._mixes = [shape.counts[member] for member in members]
        self._strides = [_strides(mix) for mix in self._mixes]
        self._usages = [prod(count + 1 for count in mix) for mix in self._mixes]
        self._offsets = [sum(self._usages[:group]) for group in range(len(members))]
        self._within = [shape.links[member][member] for member in members]
        self._between = [[self._link_between(a, b) for b in range(len(members))] for a in range(len(members))]
        self._free: dict[Usage, tuple[tuple[KindIndex, Usage], ...]] = {}
        self._fronts: dict[tuple[tuple[Usage, ...], Usage], Front] = {}
        self._moves: dict[Front, tuple[Move, ...]] = {}

    def links_of(self, kind: KindIndex) -> LinkSet:
        """Links between a device of a type and its possible neighbours."""
        found = NO_LINK
        for group, mix in enumerate(self._mixes):
            if mix[kind]:
                found = found.union(*self._between[group])
                if sum(mix) > 1:
                    found |= self._within[group]
        return found

    def num_fronts(self) -> int:
        """Number of fronts: uses of the nodes up to equivalence, times the possible nodes of the last stage."""
        sizes = Counter(self._groups)
        ways = [comb(sizes[group] + usages - 1, usages - 1) for group, usages in enumerate(self._usages)]
        return sum(
            (usages - 1) * comb(sizes[group] + usages - 2, usages - 1) * prod(ways[:group] + ways[group + 1 :])
            for group, usages in enumerate(self._usages)
        )

    def first_moves(self) -> tuple[Move, ...]:
        """The choices of the first stage's device."""
        idle = sorted(Usage(self._offsets[group]) for group in self._groups)
        moves = []
        for offset in self._offsets:
            others = list(idle)
            others.remove(Usage(offset))
            for kind, usage in self._unused(Usage(offset)):
                front = self._front(tuple(others), usage, self.strides[kind])
                moves.append(Move(kind, NO_LINK, same_node=False, front=front))
        return tuple(moves)

    def moves(self, front: Front) -> tuple[Move, ...]:
        """The choices of the next device, on the same node first."""
        found = self._moves.get(front)
        if found is None:
            here = self._group(front.current)
            moves = [
                Move(kind, self._within[here], same_node=True, front=self._front(front.others, usage, used))
                for kind, usage in self._unused(front.current)
                for used in (front.used + self.strides[kind],)
            ]
            for node in sorted(set(front.others)):
                free = self._unused(node)
                if free:
                    left = list(front.others)
                    left.remove(node)
                    left.append(front.current)
                    others = tuple(sorted(left))
                    link = self._between[here][self._group(node)]
                    moves += [
                        Move(
                            kind,
                            link,
                            same_node=False,
                            front=self._front(others, usage, front.used + self.strides[kind]),
                        )
                        for kind, usage in free
                    ]
            found = self._moves[front] = tuple(moves)
        return found

    def before(self, front: Front, kind: KindIndex) -> Usage:
        """Usage of the current node before its last device, of type `kind`, was chosen."""
        return Usage(front.current - self._strides[self._group(front.current)][kind])

    def seats(self, moves: Sequence[Move]) -> list[Seat]:
        """Seats of the stages after a sequence of moves from the beginning; of equivalent nodes the first is used."""
        usages = [Usage(self._offsets[group]) for group in self._groups]
        node = -1
        seats = []
        for move in moves:
            before = self.before(move.front, move.kind)
            if not move.same_node:
                node = next(i for i, usage in enumerate(usages) if usage == before and i != node)
            usages[node] = move.front.current
            seats.append(Seat(node, move.kind))
        return seats

    def _front(self, others: tuple[Usage, ...], current: Usage, used: int) -> Front:
        found = self._fronts.get((others, current))
        if found is None:
            found = self._fronts[others, current] = Front(others, current, used)
        return found

    def _group(self, usage: Usage) -> int:
        group = 0
        while group + 1 < len(self._offsets) and self._offsets[group + 1] <= usage:
            group += 1
        return group

    def _unused(self, usage: Usage) -> tuple[tuple[KindIndex, Usage], ...]:
        """Types with unused devices on a node, each with the resulting usage."""
        found = self._free.get(usage)
        if found is None:
            group = self._group(usage)
            strides, mix = self._strides[group], self._mixes[group]
            code = usage - self._offsets[group]
            found = self._free[usage] = tuple(
                (KindIndex(kind), Usage(usage + stride))
                for kind, stride in enumerate(strides)
                if code // stride % (mix[kind] + 1) < mix[kind]
            )
        return found

    def _link_between(self, group: int, other: int) -> LinkSet:
        """Link between different nodes of two groups; none if a group has no second node."""
        links = self.shape.links
        for a, group_a in enumerate(self._groups):
            for b, group_b in enumerate(self._groups):
                if a != b and (group_a, group_b) == (group, other):
                    return links[a][b]
        return NO_LINK


def _strides(counts: Sequence[int]) -> tuple[int, ...]:
    """Increments, per kind of item, of the mixed-radix code of a multiset with at most `counts` of each."""
    return tuple(prod(count + 1 for count in counts[:kind]) for kind in range(len(counts)))


def _classes(counts: Sequence[int], max_codes: int) -> tuple[tuple[KindIndex, ...], ...]:
    """Single types as classes; if that makes too many codes, adjacent ones are merged, the rarest first."""
    classes: list[tuple[KindIndex, ...]] = [(KindIndex(kind),) for kind in range(len(counts))]
    while True:
        sizes = [sum(counts[kind] for kind in kinds) for kinds in classes]
        if len(classes) == 1 or prod(size + 1 for size in sizes) <= max_codes:
            return tuple(classes)
        rarest = min(range(len(classes) - 1), key=lambda index: sizes[index] + sizes[index + 1])
        classes[rarest : rarest + 2] = [classes[rarest] + classes[rarest + 1]]


def _alike(shape: MixShape) -> list[int]:
    """Per node the number of its equivalence class: swapping two nodes of a class changes nothing.

    Swaps generate every permutation of a class, so it suffices to compare each node with one of each class.
    """
    links, firsts = shape.links, list[int]()
    groups = []
    for node, counts in enumerate(shape.counts):
        for group, first in enumerate(firsts):
            if (
                shape.counts[first] == counts
                and (sum(counts) == 1 or links[first][first] == links[node][node])
                and all(links[first][x] == links[node][x] for x in range(len(links)) if x not in (first, node))
            ):
                groups.append(group)
                break
        else:
            groups.append(len(firsts))
            firsts.append(node)
    return groups


# -- what no order can beat --------------------------------------------------------------------------------------------


class _Best:
    """Pointwise best of the reaches of several types."""

    def __init__(self, reaches: Sequence[Reach]) -> None:
        self._reaches = reaches

    def under(self, bound: int) -> _Best | Reach:
        """Simplify for `bound`; cf. `Reach.under`."""
        reaches = [reach.under(bound) for reach in self._reaches]
        return reaches[0] if len(reaches) == 1 else _Best(reaches)

    def furthest(self, first: int, bound: int) -> int:
        """The maximum over the alternatives of `Reach.furthest`."""
        return max(reach.furthest(first, bound) for reach in self._reaches)

    def earliest(self, last: int, bound: int) -> int:
        """The minimum over the alternatives of `Reach.earliest`."""
        return min(reach.earliest(last, bound) for reach in self._reaches)


class TypeBound:
    """Lower bounds by the counts of used types, encoded as in `Front.used`."""

    def __init__(self, mix: DeviceMix, num_layers: int, reach: Callable[[int, KindIndex], Reach]) -> None:
        """Prepare the relaxation.

        Args:
            mix: the devices.
            num_layers: number of layers of the model.
            reach: (stage, type) → the reach over the fastest links.
        """
        self._num_layers = num_layers
        self._num_stages = mix.num_stages
        #: Reach of each stage and class of types.
        self._reaches = [
            [_Best([reach(stage, kind) for kind in kinds]) for kinds in mix.classes] for stage in range(mix.num_stages)
        ]
        sizes = [sum(mix.counts[kind] for kind in kinds) for kinds in mix.classes]
        strides = [mix.strides[kinds[0]] for kinds in mix.classes]
        digits = product(*(range(size + 1) for size in reversed(sizes)))
        #: Per code: number of devices, and its classes with the code without one device of each.
        self._parts = [
            (
                sum(number),
                [
                    (index, code - stride)
                    for index, (used, stride) in enumerate(zip(reversed(number), strides, strict=True))
                    if used
                ],
            )
            for code, number in enumerate(digits)
        ]

    def feasible(self, bound: int) -> bool:
        """False proves that no plan has all stages within `bound` ticks."""
        return self._furthest(bound, [0] * len(self._parts))[-1] >= self._num_layers

    def windows(self, bound: int) -> list[int]:
        """Per code, the set of cuts at which its devices may end and the others begin; 0 if there are none."""
        earliest = self._earliest(bound)
        furthest = self._furthest(bound, earliest)
        return [(2 << high) - (1 << low) if low <= high else 0 for low, high in zip(earliest, furthest, strict=True)]

    def _furthest(self, bound: int, needed: Sequence[int]) -> list[int]:
        """Per code, the furthest end; −1 if it is before `needed` or there is none."""
        last = self._num_layers - self._num_stages
        rows = [[reach.under(bound).furthest for reach in row] for row in self._reaches]
        found = [0]
        for (size, parts), least in zip(self._parts[1:], needed[1:], strict=True):
            row = rows[size - 1]
            best = -1
            for index, before in parts:
                first = found[before]
                if first >= 0:
                    end = row[index](first, bound)
                    if end > best:  # noqa: PLR1730 - this loop is the hottest there is
                        best = end
            found.append(min(best, last + size) if best >= size and best >= least else -1)
        return found

    def _earliest(self, bound: int) -> list[int]:
        """Per code, the earliest cut from which the other devices can finish; num_layers + 1 if they cannot."""
        none = self._num_layers + 1
        rows = [[reach.under(bound).earliest for reach in row] for row in self._reaches]
        found = [self._num_layers]
        for size, parts in self._parts[1:]:
            stage = self._num_stages - size
            row = rows[stage]
            best = none
            for kind, before in parts:
                last = found[before]
                if last < none:
                    start = row[kind](last, bound)
                    if start < best:  # noqa: PLR1730 - as above
                        best = start
            found.append(max(best, stage) if best <= self._num_layers - size else none)
        return found[::-1]


# -- is there a plan within a bound? -----------------------------------------------------------------------------------


#: (type of the next stage's device, link to it) → cuts at which that stage may begin.
Arrivals = dict[tuple[KindIndex, LinkSet], int]


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Result of a sweep for a bound."""

    seats: tuple[Seat, ...] | None
    """An order that has cuts within the bound; None if none was found."""
    complete: bool
    """Whether no front was dropped, so that None is a proof."""


class Sweeper:
    """Sweeps over one mix of devices with one memory model."""

    def __init__(self, mix: DeviceMix, tables: ReachTables, memory: MemoryModel, num_layers: int) -> None:
        """Create a sweeper. `num_layers` must be at least the number of devices."""
        kinds, num_stages = mix.shape.kinds, mix.num_stages
        self._mix = mix
        self._tables = tables
        self._num_layers = num_layers
        self._loads = [[tables.load(kind, stage, num_stages, memory) for kind in kinds] for stage in range(num_stages)]
        self._reaches: list[dict[tuple[KindIndex, LinkSet, LinkSet], Reach]] = [{} for _ in range(num_stages)]
        #: The model's work before each cut.
        self._progress = tables.progress(kinds)
        around = [mix.links_of(KindIndex(kind)) for kind in range(len(kinds))]

        def best_case(stage: int, kind: KindIndex) -> Reach:
            arriving = around[kind] if stage else NO_LINK
            returning = around[kind] if stage + 1 < num_stages else NO_LINK
            return self._reach(stage, kind, arriving, returning)

        #: The relaxation of this mix.
        self.bound = TypeBound(mix, num_layers, best_case)

    def order(self, seats: Sequence[Seat]) -> list[Reach]:
        """The reaches of the stages of an order."""
        links = self._mix.shape.links
        between = [NO_LINK, *(links[a.node][b.node] for a, b in pairwise(seats)), NO_LINK]
        return [self._reach(stage, seat.kind, between[stage], between[stage + 1]) for stage, seat in enumerate(seats)]

    def sweep(self, bound: int, width: int | None) -> SweepResult:
        """Search for a plan with no stage longer than `bound` ticks.

        Args:
            bound: maximum stage time, in ticks.
            width: number of fronts to keep per stage, the most promising ones; None for all.
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
                return SweepResult(None, complete)
            history.append(states)
        return SweepResult(self._trace(history, bound), complete)

    def _next(
        self, stage: int, states: dict[Front, Arrivals], windows: Sequence[int], bound: int
    ) -> dict[Front, Arrivals]:
        """By front, the cuts at which the stage after `stage` may begin, given those of `stage`."""
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
        """Cuts within the window at which a stage may end if the next device is connected by `returning`."""
        cuts = 0
        for (kind, arriving), firsts in arrivals.items():
            reach = self._reach(stage, kind, arriving, returning).under(bound)
            cuts |= reach.image(firsts, bound, window & ~cuts)
            if cuts == window:
                break
        return cuts

    def _promise(self, front: Front, arrivals: Arrivals, windows: Sequence[int]) -> int:
        """Heuristic value of a front: the work between the earliest useful cut and its furthest one."""
        return max(
            self._progress[cuts.bit_length() - 1] - self._progress[(window & -window).bit_length() - 1]
            for (kind, _), cuts in arrivals.items()
            for window in (windows[front.used - self._mix.strides[kind]],)
        )

    def _trace(self, history: Sequence[dict[Front, Arrivals]], bound: int) -> tuple[Seat, ...] | None:
        """Backtrack the order of a plan from its end through the states of all stages."""
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
        """A state whose stage ends at `last` and that has `after` as a move; and whether that stays on its node."""
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


# -- the search --------------------------------------------------------------------------------------------------------


#: Fronts per stage with which a sweep nearly always finds a plan close to the best.
_FIRST_WIDTH = 32

#: With a width, the bisection ends when its range is the best bottleneck shifted right by this number of bits.
_BEAM_PRECISION = 9


@dataclass(frozen=True, slots=True)
class OrderWithCuts:
    """An order of devices with its best cuts."""

    seats: tuple[Seat, ...]
    ticks: int
    """Upper bound on its stage times; attained in a plan found by `solve`."""
    cuts: tuple[int, ...]
    """Last cut of every stage."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The result of a search."""

    found: OrderWithCuts | None
    """None if there is no plan, or none was found with a limited width."""
    lower_bound_ticks: int
    """Proven: no plan has a smaller bottleneck."""


class OrderSearch:
    """The search over one mix of devices with one memory model."""

    def __init__(self, mix: DeviceMix, tables: ReachTables, memory: MemoryModel, num_layers: int) -> None:
        """Create a search. `num_layers` must be at least the number of devices."""
        self._num_layers = num_layers
        self._sweeper = Sweeper(mix, tables, memory, num_layers)
        self._bound = self._sweeper.bound
        #: Upper bound on stage times.
        self._longest = tables.longest_ticks(mix.shape.kinds, frozenset().union(*sum(mix.shape.links, ())))
        #: The bottleneck if work were arbitrarily divisible and transfers were free.
        self._guess = tables.balanced_ticks(dict(zip(mix.shape.kinds, mix.counts, strict=True)))

    def solve(self, width: int | None, fits: Callable[[], bool]) -> Optimum:
        """The best plan; exact if `width` is None.

        Args:
            width: fronts that a sweep keeps per stage; None for all.
            fits: whether any plan exists; called only if none is found quickly.
        """
        if not self._bound.feasible(self._longest):
            return Optimum(None, self._longest)
        lower = self._least_bound()
        best = self._first_plan(lower, width, fits)
        if best is None:
            return Optimum(None, lower)
        return self._refine(self._improve(best, lower), lower, width)

    def _refine(self, best: OrderWithCuts, lower: int, width: int | None) -> Optimum:
        """Bisect between `lower` and the best plan so far, until it is proven optimal.

        Mostly the best plan is optimal already, so one tick less is tried first. If fronts were dropped, a sweep
        without a plan is no proof: the bisection continues above it, but `lower` stays.
        """
        floor, halve = lower, False
        while floor < best.ticks:
            target = (floor + best.ticks) // 2 if halve else best.ticks - 1
            swept = self._sweeper.sweep(target, width)
            if swept.seats is not None:
                best = self._improve(self._with_cuts(swept.seats, lower, target), lower)
                halve = True
            elif swept.complete:
                floor = lower = target + 1
                halve = False
            elif halve:
                floor = target + 1
            else:
                halve = True
            if width is not None and halve and best.ticks - floor < best.ticks >> _BEAM_PRECISION:
                break
        return Optimum(best, lower)

    def any_plan(self, width: int | None) -> OrderWithCuts | None:
        """Some plan that fits in memory, if there is one, regardless of its speed. Arguments as in `solve`."""
        if not self._bound.feasible(self._longest):
            return None
        swept = self._sweeper.sweep(self._longest, _FIRST_WIDTH)
        if swept.seats is None and not swept.complete:
            swept = self._sweeper.sweep(self._longest, width)
        if swept.seats is None:
            return None
        cuts = cuts_within(self._sweeper.order(swept.seats), self._num_layers, self._longest)
        assert cuts is not None, "a sweep found cuts for this order"
        return OrderWithCuts(swept.seats, self._longest, cuts)

    def _least_bound(self) -> int:
        """A bound below which no plan exists, within one part in a thousand: exponential search, then bisection."""
        low, high = 0, self._longest
        middle = min(high, self._guess)
        step = (middle >> 4) + 1
        while high - low > high >> 10:
            if self._bound.feasible(middle):
                high = middle
            else:
                low = middle + 1
            step *= 2
            if low == 0:
                middle = max(middle - step, 0)
            elif high == self._longest:
                middle = min(middle + step, (low + high) // 2)
            else:
                middle = (low + high) // 2
        return low

    def _first_plan(self, lower: int, width: int | None, fits: Callable[[], bool]) -> OrderWithCuts | None:
        """The initial incumbent: by sweeps of small width with growing bounds, then by one of full width."""
        bound, step = lower + (lower >> 7), (lower >> 6) + 1
        doubted = False
        while bound < self._longest:
            seats = self._sweeper.sweep(bound, _FIRST_WIDTH).seats
            if seats is not None:
                return self._with_cuts(seats, lower, bound)
            bound += step
            step *= 3
            if bound > 2 * lower and not doubted:
                doubted = True
                if not fits():
                    return None
        some = self.any_plan(width)
        return None if some is None else self._with_cuts(some.seats, lower, self._longest)

    def _with_cuts(self, seats: tuple[Seat, ...], lower: int, upper: int) -> OrderWithCuts:
        cuts = least_cuts(self._sweeper.order(seats), self._num_layers, lower, upper)
        assert cuts is not None, "a sweep found cuts for this order"
        return OrderWithCuts(seats, cuts.ticks, cuts.cuts)

    def _improve(self, best: OrderWithCuts, lower: int) -> OrderWithCuts:
        """Hill climbing: swap two devices, or move one, until no such change makes the plan faster."""
        pairs = list(permutations(range(len(best.seats)), 2))
        changes = [(_exchanged, i, j) for i, j in pairs if i < j] + [(_moved, i, j) for i, j in pairs if abs(i - j) > 1]
        num_failed = 0
        for change, i, j in cycle(changes):
            if num_failed == len(changes) or best.ticks <= lower:
                break
            num_failed += 1
            seats = change(best.seats, i, j)
            if seats != best.seats:
                order = self._sweeper.order(seats)
                if might_pass(order, self._num_layers, best.ticks - 1):
                    cuts = least_cuts(order, self._num_layers, lower, best.ticks - 1)
                    if cuts is not None:
                        best = OrderWithCuts(seats, cuts.ticks, cuts.cuts)
                        num_failed = 0
        return best


def _exchanged(seats: tuple[Seat, ...], i: int, j: int) -> tuple[Seat, ...]:
    changed = list(seats)
    changed[i], changed[j] = seats[j], seats[i]
    return tuple(changed)


def _moved(seats: tuple[Seat, ...], i: int, j: int) -> tuple[Seat, ...]:
    without = seats[:i] + seats[i + 1 :]
    return (*without[:j], seats[i], *without[j:])
