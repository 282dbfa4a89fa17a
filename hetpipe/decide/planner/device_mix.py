"""The devices of one virtual worker up to what makes no difference: which one of several alike is used.

Devices of one type on one node are alike; two nodes are alike if they offer the same devices and swapping them changes
no link. So a search has to remember how much of every node is used, where alike nodes are interchangeable, and which
node the pipeline is on: a `Front`. Its moves are the choices of the next device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, prod
from typing import NamedTuple, NewType

from hetpipe.decide.planner.reach_tables import NO_LINK, LinkSet

#: Position of a type in `MixShape.kinds`.
KindIndex = NewType("KindIndex", int)

#: A group of alike nodes together with how many devices of each type one of its nodes has in use.
Usage = NewType("Usage", int)

#: Enough for four types with sixteen devices each.
MAX_CODES = 100_000


@dataclass(frozen=True, slots=True)
class MixShape:
    """Nodes by position, with what they offer and how they are linked. Equal shapes have equal optima."""

    kinds: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """For every node, how many devices of each type are to be used; at least one in all."""
    links: tuple[tuple[LinkSet, ...], ...]
    """Between every two nodes, and within one: a symmetric matrix of single links."""


class Seat(NamedTuple):
    """Where a stage runs; which of the alike devices there is left open."""

    node: int
    kind: KindIndex


@dataclass(slots=True, eq=False)
class Front:
    """The devices used so far and where the pipeline is. Never changed; a `DeviceMix` makes each only once."""

    others: tuple[Usage, ...]
    """The usage of every other node, sorted."""
    current: Usage
    """The usage of the node of the last stage; includes its device."""
    used: int
    """Devices used of each class of types, in the code of `DeviceMix.strides`."""


class Move(NamedTuple):
    """The choice of the next stage's device."""

    kind: KindIndex
    link: LinkSet
    """From the previous stage; empty for the first."""
    same_node: bool
    front: Front
    """Where it leads."""


class DeviceMix:
    """Every order of using the devices of a shape, alike ones merged."""

    def __init__(self, shape: MixShape, *, max_codes: int = MAX_CODES) -> None:
        """Group the nodes of `shape`.

        Args:
            shape: types that are next to each other are told apart last.
            max_codes: values of `Front.used` that are told apart.
        """
        self.shape = shape
        #: Devices of each type in all.
        self.counts = tuple(sum(column) for column in zip(*shape.counts, strict=True))
        self.num_stages = sum(self.counts)
        #: The types, grouped as `Front.used` counts them: one by one, unless that makes too many codes.
        self.classes = _classes(self.counts, max_codes)
        class_strides = _strides([sum(self.counts[kind] for kind in kinds) for kinds in self.classes])
        #: What one device of each type adds to `Front.used`.
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
        """The links over which a device of a type may have its neighbours."""
        found = NO_LINK
        for group, mix in enumerate(self._mixes):
            if mix[kind]:
                found = found.union(*self._between[group])
                if sum(mix) > 1:
                    found |= self._within[group]
        return found

    def num_fronts(self) -> int:
        """How many fronts there are: alike-merged uses of the nodes, times the nodes the pipeline may be on."""
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
        """What the current node had in use before its last device, of type `kind`, was."""
        return Usage(front.current - self._strides[self._group(front.current)][kind])

    def seats(self, moves: Sequence[Move]) -> list[Seat]:
        """Where the stages run after a sequence of moves from the beginning; of alike nodes the first goes first."""
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
        """The types of which a node has devices left, each with the usage that follows."""
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
        """The link between different nodes of two groups; none if a group has no second node."""
        links = self.shape.links
        for a, group_a in enumerate(self._groups):
            for b, group_b in enumerate(self._groups):
                if a != b and (group_a, group_b) == (group, other):
                    return links[a][b]
        return NO_LINK


def _strides(counts: Sequence[int]) -> tuple[int, ...]:
    """What one item of each kind adds to the mixed-radix code of a multiset with at most `counts` of each."""
    return tuple(prod(count + 1 for count in counts[:kind]) for kind in range(len(counts)))


def _classes(counts: Sequence[int], max_codes: int) -> tuple[tuple[KindIndex, ...], ...]:
    """Types by themselves; where that makes too many codes, neighbours together, the rarest first."""
    classes: list[tuple[KindIndex, ...]] = [(KindIndex(kind),) for kind in range(len(counts))]
    while True:
        sizes = [sum(counts[kind] for kind in kinds) for kinds in classes]
        if len(classes) == 1 or prod(size + 1 for size in sizes) <= max_codes:
            return tuple(classes)
        rarest = min(range(len(classes) - 1), key=lambda index: sizes[index] + sizes[index + 1])
        classes[rarest : rarest + 2] = [classes[rarest] + classes[rarest + 1]]


def _alike(shape: MixShape) -> list[int]:
    """For every node the number of its group: swapping two nodes of a group changes nothing.

    Such swaps generate every permutation of a group, so it suffices to compare each node with one of each group.
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
