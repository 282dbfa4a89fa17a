"""Every way to form virtual workers from a few devices, some of which may stay idle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from hetpipe.decide.planner.jobs import Groups
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import DeviceId

#: Devices taken of each class.
_Taken = tuple[int, ...]


def every_grouping(devices: Mapping[DeviceId, str], most_workers: int | None = None) -> Iterator[Groups]:
    """Groupings that differ in more than which of several equal devices of one node is where.

    Args:
        devices: device → type.
        most_workers: how many groups a grouping has at most; None: any number.

    >>> cluster = {DeviceId("n0/0"): "V", DeviceId("n0/1"): "V"}
    >>> [[list(group) for group in groups] for groups in every_grouping(cluster)]
    [[['n0/0', 'n0/1']], [['n0/0']], [['n0/0'], ['n0/1']]]
    """
    classes: dict[tuple[str, str], list[DeviceId]] = {}
    for device, kind in devices.items():
        classes.setdefault((node_of(device), kind), []).append(device)
    members = list(classes.values())
    everything = tuple(len(alike) for alike in members)

    def divide(left: _Taken, most: _Taken, num_groups: int) -> Iterator[list[_Taken]]:
        """Groups in descending order, none above `most`, so that each set of groups comes once."""
        for group in product(*(range(count, -1, -1) for count in left)):
            if any(group) and group <= most:
                yield [group]
                if num_groups > 1:
                    rest = tuple(count - taken for count, taken in zip(left, group, strict=True))
                    for others in divide(rest, group, num_groups - 1):
                        yield [group, *others]

    for grouping in divide(everything, everything, most_workers or len(devices)):
        yield _with_devices(grouping, members)


def _with_devices(grouping: Sequence[_Taken], members: Sequence[Sequence[DeviceId]]) -> Groups:
    used = [0] * len(members)
    found = []
    for taken in grouping:
        group: list[DeviceId] = []
        for index, count in enumerate(taken):
            group += members[index][used[index] : used[index] + count]
            used[index] += count
        found.append(group)
    return found
