"""Layers move between the running stages of a virtual worker, at a barrier (plan-versions.md §4), or are frozen.

Every stage does this after the barrier's work, which the old version of the plan does: it hands the layers that it
loses to the neighbour in whose direction they go, takes those that it gets, and is built anew from the user's code with
its new layers. Weights, buffers and the optimizer's state are those of the barrier, bit for bit. Where layers are
frozen there (freezing.md), a stage is built in the same way, with or without layers that move. So it is where some of
its layers are built anew (dynamic-models.md §3): these then have no state but that with which they are built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from hetpipe import failpoints
from hetpipe.decide.elastic.moving import Crossing, crossing
from hetpipe.decide.sync.records import BarrierRecord, SegmentMember, SegmentRecord
from hetpipe.errors import HetpipeError, ScriptFailed, Unavailable
from hetpipe.link.policy import Frame, FrameKind, Link
from hetpipe.observe.log import get_logger
from hetpipe.observe.timeline import Activity
from hetpipe.pipeline.callables import LossFunction, WeightedLosses
from hetpipe.pipeline.chain import Layer, constants_of, forget_weights
from hetpipe.pipeline.compute import StageCompute
from hetpipe.pipeline.handover import LayerState, States, constant_state, frames_of, received
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.setup import SEND_SECONDS, StageIdentity, StageParts
from hetpipe.pipeline.waiting import Waiter
from hetpipe.values.ids import Clock, LayerIndex, Wave
from hetpipe.values.plan import SlicePlan
from hetpipe.weights.flat import BufferPool, FlatBuffer
from hetpipe.weights.policy import StageWeights

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltStage:
    """A stage as built from the user's code: its layers, and what depends on them."""

    layers: tuple[Layer, ...]
    compute: StageCompute
    pool: BufferPool
    target: FlatBuffer
    """On which the optimizer of `weights` steps: zero; or, without shards, the weights."""
    weights: StageWeights
    slices: tuple[SlicePlan, ...]
    metrics: Mapping[str, LossFunction]
    losses: WeightedLosses | None


#: Bounds of all stages of the virtual worker, and the number of frozen layers → this stage, built by them.
BuildStage = Callable[[tuple[int, ...], int], BuiltStage]


@dataclass(frozen=True, slots=True)
class Rebuild:
    """How a stage is built by another cut."""

    build: BuildStage | None = None
    """None: there is only one cut."""
    line_at: Callable[[Clock], str] = lambda _clock: ""
    """The line of the script by which it is built at a clock, for messages; empty: none."""
    cut_at: Callable[[Clock, Clock], tuple[int, ...]] = lambda _after, _upto: ()
    """The bounds that the script decides above the first clock, up to the second one; empty: none."""
    build_layers: Callable[[Clock, Collection[int]], States] | None = None
    """The states of layers as they are built anew at the barrier at a clock; None: none ever is."""


#: Of a stage whose layers never change.
ONE_CUT = Rebuild()


class LayerMover:
    """Moves layers to and from one stage."""

    def __init__(self, parts: StageParts, inbox: Inbox, waiter: Waiter, rebuild: Rebuild) -> None:
        self._parts = parts
        self._inbox = inbox
        self._waiter = waiter
        self._rebuild = rebuild
        #: What `prepare` has built, with its bounds and the number of frozen layers.
        self._prepared: tuple[tuple[int, ...], int, BuiltStage] | None = None

    def prepare(self, after: Clock, barrier: BarrierRecord) -> None:
        """Build the stage by the cut that is requested for a barrier, or that the script has, before that is passed.

        Nothing is in flight. What has been built is dropped if the segment from there on has another cut.

        Args:
            after: the barrier before it.
            barrier: the next one.
        """
        parts = self._parts
        bounds = barrier.cut_of(parts.identity.vw) or self._rebuild.cut_at(after, barrier.clock)
        if not bounds or bounds == parts.bounds:
            return
        assert self._rebuild.build is not None, "a stage of a run whose plans change knows how it is built"
        with suppress(Exception), parts.guard:  # `move` builds it again, and reports why it cannot
            self._prepared = bounds, parts.frozen_layers, self._rebuild.build(bounds, parts.frozen_layers)

    def move(self, segment: SegmentRecord, member: SegmentMember) -> None:
        """Adopt the plan version of `member`, and the frozen, inactive and fresh layers with which `segment` begins.

        The weights of its start are loaded.

        Raises:
            LinkClosed, DeadlineExceeded: the connection to a neighbour that sends layers was lost.
            ScriptFailed: the stage cannot be built as the script demands; without a script whatever prevents it.
        """
        parts = self._parts
        before, stage = parts.bounds, parts.identity.stage
        after = member.bounds or before
        own = after[stage : stage + 2]
        is_frozen = own and _concerned(parts.frozen_layers, own) != _concerned(segment.frozen_layers, own)
        parts.frozen, parts.frozen_layers = segment.frozen, segment.frozen_layers
        fresh = [LayerIndex(layer) for layer in segment.fresh if layer in range(*own)]
        if after != before or is_frozen or fresh:
            self._become(segment, member, fresh)
            parts.leave_out(segment.inactive)
        elif parts.inactive != frozenset(segment.inactive):
            parts.leave_out(segment.inactive)
        self._prepared = None

    def _become(self, segment: SegmentRecord, member: SegmentMember, fresh: Sequence[LayerIndex]) -> None:
        """Exchange layers with the neighbours, and replace the stage by one with its new layers; see `move`.

        Its layers `fresh` are built anew.
        """
        parts, clock = self._parts, segment.start
        prepared, self._prepared = self._prepared, None
        before, stage = parts.bounds, parts.identity.stage
        after = member.bounds or before
        own = after[stage : stage + 2]
        assert self._rebuild.build is not None, "a stage of a run whose plans change knows how it is built"
        started = parts.clock.monotonic()
        failpoints.reach("repartition.record_read")
        moved = f"{layers_text(before[stage : stage + 2])} → {layers_text(own)}"
        span = parts.timeline.span(Activity.MOVE, clock=clock, version=member.version, moved=moved)
        with span, failures_named(self._parts.identity, self._rebuild.line_at(clock)):
            states = self._exchanged(self._own_states(), after, clock)
            failpoints.reach("repartition.layers_half_moved")
            states |= self._built_anew(fresh, clock)
            if prepared is not None and prepared[:2] == (after, segment.frozen_layers):
                built = prepared[2]
            else:
                prepared = None  # its memory is free for the one to be built
                with parts.guard:
                    built = self._rebuild.build(after, segment.frozen_layers)
            self._adopt(built, states, clock)
        if fresh and parts.has_shards:
            weights = built.pool.take_on_host()
            for name, value in ((name, value) for layer in fresh for name, value in states[layer].weights.items()):
                weights.views[name].copy_(value)
            parts.synchroniser.push_fresh(Wave(clock), weights, fresh)
        parts.bounds = after
        failpoints.reach("repartition.stage_built")
        _log.info(
            "layers_moved",
            clock=clock,
            version=member.version,
            before=list(before[stage : stage + 2]),
            after=list(own),
            frozen=list(range(own[0], min(max(own[0], segment.frozen_layers), own[1]))),
            seconds=round(parts.clock.monotonic() - started, 3),
        )

    # -- states of layers --------------------------------------------------------------------------------------------

    def _own_states(self) -> States:
        """Of the layers that it has; the tensors are live."""
        parts = self._parts
        weights, optimizer = parts.weights.at_barrier.views, parts.weights.optimizer.state()
        states: States = {}
        for layer in parts.layers:
            names = [name for name in layer.parameters.values() if name in weights]
            states[layer.index] = LayerState(
                {name: weights[name] for name in names} | constants_of((layer,)),
                constant_state(layer),
                {name: optimizer[name] for name in names if name in optimizer},
            )
        return states

    def _built_anew(self, fresh: Sequence[LayerIndex], clock: Clock) -> States:
        """The states of these layers as they are built anew; tells the history what all members must have alike."""
        if not fresh:
            return {}
        parts, build = self._parts, self._rebuild.build_layers
        assert build is not None, "a stage of a run whose layers are built anew knows how"
        with parts.guard:
            states = build(clock, fresh)
        parts.history.fresh(
            vw=parts.identity.vw,
            incarnation=parts.identity.incarnation,
            stage=parts.identity.stage,
            clock=clock,
            layers=list(states),
            digests=[state.digest for state in states.values()],
        )
        return states

    def _exchanged(self, states: States, after: Sequence[int], clock: Clock) -> States:
        """Exchange layers with the neighbours; returns the states of the new layers."""
        parts, stage = self._parts, self._parts.identity.stage
        none = Crossing(range(0), down=True)
        above = none if parts.identity.is_first else crossing(parts.bounds, after, stage - 1)
        below = none if parts.identity.is_last else crossing(parts.bounds, after, stage)
        # A stage that forwards layers receives them first; no two stages send to each other, so there is no deadlock.
        for source, border, comes in (("previous", above, above.down), ("next", below, not below.down)):
            if border.layers and comes:
                states |= received(lambda source=source: self._receive(source), clock, border.layers)  # type: ignore[misc]
        for link, border, goes in ((parts.upstream, above, not above.down), (parts.downstream, below, below.down)):
            if border.layers and goes:
                assert link is not None, "the layers of an outer border do not move"
                self._send(link, {LayerIndex(index): states.pop(LayerIndex(index)) for index in border.layers}, clock)
        return dict(sorted(states.items()))

    def _send(self, link: Link, states: States, clock: Clock) -> None:
        for frame in frames_of(states, clock):
            link.send(frame, deadline_seconds=SEND_SECONDS)

    def _receive(self, source: str) -> Frame:
        """Wait for the next frame of a handover from the previous or the next stage."""
        with self._inbox.condition:
            queue = self._inbox.from_upstream if source == "previous" else self._inbox.from_downstream
            while True:
                self._inbox.collect(needs_frames=True)
                if queue and queue[0].frame.kind is FrameKind.HANDOVER:
                    self._waiter.proceed()
                    return queue.popleft().frame
                self._waiter.sleep(f"layers from the {source} stage", for_clock=False)

    # -- the new stage -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _adopt(self, built: BuiltStage, states: States, clock: Clock) -> None:
        """Load the states into the new stage, and replace the old one by it."""
        parts = self._parts
        built.weights.number_by(parts.versions, parts.shift)
        built.compute.shift = parts.shift
        weights = {name: value for state in states.values() for name, value in state.weights.items()}
        buffers = {name: value for state in states.values() for name, value in state.buffers.items()}
        filled = built.pool.take_on_host() if parts.has_shards else built.target
        for name, view in filled.views.items():
            view.copy_(weights[name])
        optimizer = built.weights.optimizer
        optimizer.go_to(parts.weights.optimizer.num_updates)
        for state in states.values():
            optimizer.load_state(state.optimizer)
        for layer in built.layers:
            for name, parameter in constants_of((layer,)).items():
                parameter.copy_(weights[name])
            for name, tensor in constant_state(layer).items():
                tensor.copy_(buffers[name])
        forget_weights(built.layers)
        built.weights.start(clock, filled if parts.has_shards else None)
        parts.synchroniser.change_layers(built.slices, built.pool, deadline_seconds=parts.stall_seconds)
        with self._inbox.condition:
            self._inbox.change_pool(built.pool)
        parts.layers, parts.compute, parts.pool, parts.weights = built.layers, built.compute, built.pool, built.weights
        parts.data = replace(parts.data, metrics=built.metrics, losses=built.losses)


@contextmanager
def failures_named(who: StageIdentity, line: str) -> Iterator[None]:
    """Name the line of the script that a stage cannot do; empty: there is none."""
    try:
        yield
    except Unavailable:
        raise
    except Exception as error:
        if not line:
            raise
        what = str(error) if isinstance(error, HetpipeError) else f"{type(error).__name__}: {error}"
        raise ScriptFailed(f"{line}, but {who} cannot: {what}; change the line, or remove it") from error


def own_layers(bounds: Sequence[int], stage: int) -> tuple[int, ...]:
    """The first layer of a stage, and the first one after it."""
    return tuple(bounds[stage : stage + 2])


def layers_text(own: Sequence[int]) -> str:
    """Layers of a stage, of its first one and the one after its last: `layers 0-2`."""
    first, last = own
    return f"layer {first}" if last == first + 1 else f"layers {first}-{last - 1}"


def _concerned(frozen: int, own: Sequence[int]) -> int:
    """The number of frozen layers as far as a stage with the layers `own` depends on it.

    That is how many of its own are frozen, and whether the stage before has any that is trained.
    """
    first, last = own
    return min(max(frozen, first - 1), last)
