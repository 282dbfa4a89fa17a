"""Borders between stages: the tensors alive there, the cost of alternative borders, and places without one. Pure.

The searches in `cuts` and `pipelines` never use a forbidden cut. This module explains forbidden cuts and the chosen
borders to users.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from hetpipe.decide.planner.costs import Costs, MemoryModel, MemorySpan, milliseconds
from hetpipe.errors import PlanError
from hetpipe.values.cluster import LinkSpec, node_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.memory import LayerPolicy
from hetpipe.values.plan_document import BorderAlternative, PlannedBorder
from hetpipe.values.profile import ForbiddenCut, Profile
from hetpipe.values.quantities import bytes_text

#: Limit on the reasons in one sentence.
_MOST_REASONS = 4

#: Relative difference below which bottlenecks count as equal.
_SAME = 5e-4


class Forbidden(Protocol):
    """Adjacent places where the model cannot be cut."""

    @property
    def before(self) -> str:
        """The call after the first of them."""
        ...

    @property
    def upto(self) -> str:
        """The call after the last of them."""
        ...

    @property
    def places(self) -> int:
        """Their number."""
        ...

    @property
    def reason(self) -> str:
        """The reason why the model cannot be cut there."""
        ...


class Stage(MemorySpan, Protocol):
    """A stage of a plan."""

    @property
    def device(self) -> DeviceId:
        """`NODE/INDEX`."""
        ...


def forbidden_cuts(profile: Profile) -> tuple[ForbiddenCut, ...]:
    """All places where no stage may end, within and between layers, in order."""
    found: list[ForbiddenCut] = []
    for index, layer in enumerate(profile.layers):
        found += layer.forbidden
        if layer.no_cut:
            behind = profile.layers[index + 1].name
            found.append(ForbiddenCut(before=behind, upto=behind, reason=layer.no_cut))
    return tuple(found)


def place_text(forbidden: Forbidden) -> str:
    """Location of forbidden places, as text.

    >>> place_text(ForbiddenCut(before="h.0.attn", upto="h.0.mlp", places=7, reason=""))
    'before h.0.attn … h.0.mlp (7 places)'
    """
    if forbidden.places == 1:
        return f"before {forbidden.before}"
    where = forbidden.before if forbidden.before == forbidden.upto else f"{forbidden.before} … {forbidden.upto}"
    return f"before {where} ({forbidden.places} places)"


def too_few_cuts(num_stages: int, max_stages: int, forbidden: Sequence[Forbidden], *, fix: str) -> str:
    """The message for too many stages: the reasons for the forbidden cuts, each once, and the fix.

    >>> too_few_cuts(3, 2, [ForbiddenCut(before="b", upto="b", reason="n is written before it")], fix="use 2")
    'the model can be cut into at most 2 stages, not 3: no cut before b: n is written before it; use 2'
    """
    if not forbidden:
        return f"{num_stages} stages cannot share {max_stages} layers; {fix}"
    start = f"the model can be cut into at most {max_stages} stages, not {num_stages}"
    by_reason: dict[str, list[Forbidden]] = {}
    for each in forbidden:
        by_reason.setdefault(each.reason, []).append(each)
    told = []
    for reason, places in by_reason.items():
        left = sum(each.places for each in places[1:])
        more = f" and at {left} more {'place' if left == 1 else 'places'}" if left else ""
        told.append(f"no cut {place_text(places[0])}{more}: {reason}")
    further = len(told) - _MOST_REASONS
    shown = told[:_MOST_REASONS] + ([f"{further} more reasons (hetpipe plan --why lists them)"] if further > 0 else [])
    return f"{start}: {'; '.join(shown)}; {fix}"


def check_borders(cuts: Sequence[int], costs: Costs, vw: int) -> None:
    """Check that no stage of a user's plan ends at a forbidden cut.

    Args:
        cuts: the layers at which its stages but the last end (exclusive).
        costs: of the model.
        vw: the virtual worker, for the message.

    Raises:
        PlanError: names the reason and the closest allowed cuts.
    """
    for index, last in enumerate(cuts):
        reason = costs.forbidden.get(last)
        if reason is None:
            continue
        below = max((cut for cut in costs.allowed if cut < last), default=None)
        above = min((cut for cut in costs.allowed if cut > last), default=None)
        fixes = " or ".join(str(cut) for cut in (below, above) if cut is not None)
        fix = f"let it end after {fixes} layers" if fixes else "use one stage"
        raise PlanError(
            f"stage {index} of virtual worker {vw} ends before layer {last} "
            f"({costs.profile.layers[last].name}), where the model cannot be cut: {reason}; {fix}"
        )


@dataclass(frozen=True, slots=True)
class _Moved:
    """The stages of one virtual worker with one border moved."""

    stages: Sequence[_Span]
    costs: Costs
    memory: MemoryModel

    def bottleneck_ticks(self) -> int:
        """The largest stage time."""
        costs = self.costs
        links: list[LinkSpec | None] = [
            costs.cluster.link(node_of(here.device), node_of(behind.device)) for here, behind in pairwise(self.stages)
        ]
        return max(
            costs.computed_ticks(stage) + costs.receive_ticks(stage.first, stage.last, before, behind)
            for stage, before, behind in zip(self.stages, [None, *links], [*links, None], strict=True)
        )

    def shortage(self) -> tuple[int, DeviceId] | None:
        """The largest memory shortage and its device; None if everything fits."""
        missing = []
        for index, stage in enumerate(self.stages):
            needed = self.costs.bytes_of(stage, (index, len(self.stages)), self.memory)
            missing.append((needed - self.costs.memory_bytes[stage.kind], stage.device))
        most = max(missing)
        return most if most[0] > 0 else None


@dataclass(frozen=True, slots=True)
class _Span:
    device: DeviceId
    kind: str
    first: int
    last: int
    recompute: bool
    memory: tuple[LayerPolicy, ...] = ()
    policy_ticks: int = 0


def borders_of(
    workers: Sequence[Sequence[Stage]], costs: Costs, memories: Sequence[MemoryModel]
) -> tuple[PlannedBorder, ...]:
    """The borders of a plan; of equal virtual workers, those of the first. `memories`: of each virtual worker."""
    found: list[PlannedBorder] = []
    known: set[tuple[object, ...]] = set()
    for vw, (worker, memory) in enumerate(zip(workers, memories, strict=True)):
        stages = [
            _Span(one.device, one.kind, one.first, one.last, one.recompute, one.memory, one.policy_ticks)
            for one in worker
        ]
        links = [costs.cluster.link(node_of(a.device), node_of(b.device)) for a, b in pairwise(stages)]
        alike = (
            tuple((one.kind, one.first, one.last, one.recompute, one.memory) for one in stages),
            tuple((link.latency_seconds, link.effective_bytes_per_second) for link in links),
            memory,
        )
        if alike in known:
            continue
        known.add(alike)
        found += [_border(vw, index, stages, link, costs, memory) for index, link in enumerate(links)]
    return tuple(found)


def _border(
    vw: int, index: int, stages: Sequence[_Span], link: LinkSpec, costs: Costs, memory: MemoryModel
) -> PlannedBorder:
    cut = stages[index].last
    layer = costs.profile.layers[cut - 1]
    return PlannedBorder(
        virtual_worker=vw,
        stage=index,
        cut=cut,
        before=costs.profile.layers[cut].name,
        forward_bytes=layer.output_bytes,
        backward_bytes=layer.backward_bytes,
        tie_bytes=layer.tie_bytes,
        forward_ms=milliseconds(costs.arriving(link)[cut]),
        backward_ms=milliseconds(costs.returning(link)[cut]),
        alive=layer.alive,
        alternatives=tuple(_alternatives(index, stages, costs, memory)),
    )


def _alternatives(
    index: int, stages: Sequence[_Span], costs: Costs, memory: MemoryModel
) -> Iterator[BorderAlternative]:
    """Alternative borders: the next ones on both sides up to the first allowed one, and the one that moves least."""
    if any(set(stage.memory) - {"keep"} for stage in stages):
        return  # another border would have other policies, chosen together with it
    stages = [replace(stage, memory=()) for stage in stages]
    here, behind = stages[index], stages[index + 1]
    now = _Moved(stages, costs, memory).bottleneck_ticks()
    between = range(here.first + 1, behind.last)
    wanted: set[int] = set()
    for direction in (-1, 1):
        cut = here.last + direction
        while cut in between:
            wanted.add(cut)
            if cut not in costs.forbidden:
                break
            cut += direction
    allowed = [cut for cut in between if cut not in costs.forbidden]
    least = min(allowed, key=lambda cut: (costs.cut_bytes[cut] + costs.returning_bytes[cut], abs(cut - here.last)))
    if _moves(least, costs) < _moves(here.last, costs):
        wanted.add(least)
    for cut in sorted(wanted):
        yield _alternative(cut, index, stages, costs, memory, now)


def _moves(cut: int, costs: Costs) -> int:
    return costs.cut_bytes[cut] + costs.returning_bytes[cut]


def _alternative(
    cut: int, index: int, stages: Sequence[_Span], costs: Costs, memory: MemoryModel, now: int
) -> BorderAlternative:
    def with_reason(reason: str, bottleneck: int | None = None) -> BorderAlternative:
        return BorderAlternative(
            cut=cut,
            before=costs.profile.layers[cut].name,
            forward_bytes=costs.cut_bytes[cut],
            backward_bytes=costs.returning_bytes[cut],
            bottleneck_ms=None if bottleneck is None else milliseconds(bottleneck),
            reason=reason,
        )

    if cut in costs.forbidden:
        return with_reason(f"forbidden: {costs.forbidden[cut]}")
    changed = list(stages)
    changed[index] = replace(stages[index], last=cut)
    changed[index + 1] = replace(stages[index + 1], first=cut)
    moved = _Moved(changed, costs, memory)
    shortage = moved.shortage()
    if shortage is not None:
        return with_reason(f"{shortage[1]} would lack {bytes_text(shortage[0])}")
    ticks = moved.bottleneck_ticks()
    change = ticks / now - 1 if now else 0.0
    if change > _SAME:
        return with_reason(f"the longest stage would take {100 * change:.1f} % longer", ticks)
    if change < -_SAME:
        return with_reason(f"the longest stage would take {-100 * change:.1f} % less, but the job no less", ticks)
    return with_reason("the longest stage would take as long", ticks)
