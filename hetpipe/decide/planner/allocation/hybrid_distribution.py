"""HD: two types per virtual worker, paired so that all virtual workers are about equally fast (§8.1).

The paper gives an example but no rule. Here: of all pairings of the types, the one whose virtual workers are closest in
aggregate compute (slowest over fastest); on ties the closest in aggregate memory; with an odd number, one type stays
single. The devices of a pair are divided evenly among as many virtual workers as nodes have such devices, as the paper
has one virtual worker per node; if that number does not divide both counts, among the next smaller one that does.
Within a pair, a virtual worker's devices of a type come from as few nodes as possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetpipe.decide.planner.jobs import Groups, JobPlan, Jobs
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import DeviceId

#: Number of types beyond which the strongest is paired with the weakest: there are too many pairings to enumerate.
_MOST_TYPES = 10

#: One or two types.
Team = tuple[str, ...]


def groups(jobs: Jobs) -> Groups:
    """The virtual workers of the closest pairing."""
    by_type: dict[str, list[DeviceId]] = {}
    for device, kind in jobs.devices.items():
        by_type.setdefault(kind, []).append(device)
    speed = {kind: 1 / max(jobs.costs.compute[kind][-1], 1) for kind in by_type}
    memory = jobs.costs.memory_bytes

    def imbalance(teams: Sequence[Team]) -> tuple[float, float]:
        workers = [[jobs.devices[device] for device in group] for group in _divided(teams, by_type)]
        computes = [sum(speed[kind] for kind in worker) for worker in workers]
        memories = [sum(memory[kind] for kind in worker) for worker in workers]
        # Rounded, because sums depend on the order of terms.
        return round(max(computes) / min(computes), 9), max(memories) / min(memories)

    kinds = sorted(by_type, key=lambda kind: (-speed[kind], -memory[kind], kind))
    return _divided(min(_pairings(kinds), key=imbalance), by_type)


def _pairings(kinds: Sequence[str]) -> Iterator[tuple[Team, ...]]:
    """All pairings of the types, strongest first; with an odd number, one type stays single."""
    if len(kinds) > _MOST_TYPES:
        half = len(kinds) // 2
        alone = ((kinds[half],),) if len(kinds) % 2 else ()
        yield (*zip(kinds[:half], reversed(kinds[-half:]), strict=True), *alone)
    elif len(kinds) % 2:
        for index, kind in enumerate(kinds):
            for teams in _pairings([*kinds[:index], *kinds[index + 1 :]]):
                yield (*teams, (kind,))
    elif not kinds:
        yield ()
    else:
        for index in range(1, len(kinds)):
            for teams in _pairings([*kinds[1:index], *kinds[index + 1 :]]):
                yield ((kinds[0], kinds[index]), *teams)


def _divided(teams: Sequence[Team], by_type: dict[str, list[DeviceId]]) -> list[list[DeviceId]]:
    found = []
    for team in teams:
        num_nodes = len({node_of(device) for kind in team for device in by_type[kind]})
        num_workers = next(n for n in range(num_nodes, 0, -1) if all(len(by_type[kind]) % n == 0 for kind in team))
        for worker in range(num_workers):
            shares = [(by_type[kind], len(by_type[kind]) // num_workers) for kind in team]
            found.append([device for members, n in shares for device in members[worker * n : (worker + 1) * n]])
    return found


def hybrid_distribution(jobs: Jobs) -> JobPlan:
    """The best plan with paired types."""
    return jobs.best(groups(jobs))
