"""Layers move to a neighbouring stage while minibatches are in flight (plan-versions.md §9).

h is the last minibatch of the wave before the move. All of p ≤ h, forward, backward, step and push, is done by the old
version of the stage, all of p > h by the new one. For a while both exist:

old   … lends the weights of p > h that its updates end in … F(h) … B(h), step, push ─► hands the state over
new                         F(h + 1) … B(h + 1) … on lent weights ────────────────► takes over ─► step, …

Weights are lent as soon as the updates in them are made: mostly before F(h), which the stage behind computes later than
the one before could begin with h + 1.

Everything that the new version of a stage needs comes from the old version of the stage that had the layer, its own or
a neighbour's, by value. So the order in which messages arrive has no effect, and neither has one that comes twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from hetpipe import failpoints
from hetpipe.decide.elastic.moving import crossing
from hetpipe.decide.sync.records import PlanRecord
from hetpipe.link.policy import Frame, FrameKind
from hetpipe.observe.log import get_logger
from hetpipe.observe.timeline import Activity
from hetpipe.pipeline.chain import Layer, forget_weights
from hetpipe.pipeline.handover import LayerState, States, buffers_listed, groups_of, states_in
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.moving import BuiltStage, Rebuild, failures_named, layers_text, own_layers
from hetpipe.pipeline.setup import SEND_SECONDS, StageParts
from hetpipe.values.ids import Clock, LayerIndex, Minibatch
from hetpipe.weights.flat import FlatBuffer
from hetpipe.weights.policy import Succession

_log = get_logger(__name__)

#: Numbers of the messages; that of the weights of p is `_STATE` + p − h.
_CONSTANTS, _BUFFERS, _STATE = 0, 1, 2

#: Tensor bytes of a frame with constants: frames of minibatches that wait behind one are late by little.
_PART_BYTES = 4 << 20

#: Gradients that wait for the state of the version before, one beside that of B and one of a minibatch's weights.
_HELD_WITH_ANCHOR = 3

#: What a stage asks the loop for: the clock of a minibatch, once its weights are here; these, if they are not in use.
LentOn = Callable[[Minibatch], tuple[Clock, FlatBuffer | None] | None]


@dataclass(frozen=True, slots=True)
class Moment:
    """How far a stage has got in a segment."""

    forwarded: int
    backwarded: int
    through: int
    """The last minibatch whose gradient is in an update."""
    closed: int
    """Waves closed."""


class LiveMove:
    """One change of the plan of a virtual worker, at one of its stages.

    Attributes:
        last: h.
        new: the stage by the new version; None until it is built.
        is_complete: whether the old version has nothing left to do.
    """

    def __init__(self, parts: StageParts, inbox: Inbox, record: PlanRecord, start: Clock) -> None:
        """Change `parts`, the stage by the version before, as `record` says, in the segment from `start`."""
        self.record = record
        self.last = Minibatch(record.clock * parts.sync.minibatches_per_wave)
        self.new: StageParts | None = None
        self.is_complete = False
        self._old, self._inbox, self._start = parts, inbox, start
        stage, before, after = parts.identity.stage, parts.bounds, record.bounds
        self._had, self._own = own_layers(before, stage), own_layers(after, stage)
        #: Whether it is the previous stage → layers that come from it, or go to it.
        self._gained: dict[bool, range] = {}
        self._lost: dict[bool, range] = {}
        for is_previous, border in ((True, stage - 1), (False, stage)):
            if 0 <= border < len(before) - 2:
                found = crossing(before, after, border)
                if found.layers:
                    comes = found.down == is_previous
                    (self._gained if comes else self._lost)[is_previous] = found.layers
        #: The first minibatch whose weights contain every update of the old version.
        self.first_own = self.last + 1
        while self._through(self.first_own) < self.last:
            self.first_own += 1
        #: The next minibatch whose weights are to be lent, and the next one that gets them.
        self._to_lend = self._to_borrow = self.last + 1
        self._lent: dict[int, dict[str, Tensor]] = {}
        #: Lent minibatches with their clocks, on which the old version goes on after F(h).
        self._to_switch: deque[tuple[Minibatch, Clock]] = deque()
        self._succession: Succession | None = None
        self._built: BuiltStage | None = None
        self._optimizer: dict[str, dict[str, Tensor | float | int]] = {}
        #: Frames with constants that are still to be sent, with whether they go to the previous stage; None: unknown.
        self._constants: deque[tuple[bool, Frame]] | None = None
        self._constants_at = (0, 0)
        #: Layer, part of a parameter that is not trained → the new version's, until it is loaded; None: unknown.
        self._to_load: dict[tuple[LayerIndex, str], Tensor] | None = None
        #: The same of the old version, for layers that stay.
        self._own_parts: dict[tuple[LayerIndex, str], Tensor] = {}
        #: Is it the previous stage → the parts that its next frames carry, and the number of the next frame.
        self._listed: dict[bool, tuple[deque[tuple[LayerIndex, str]], int]] = {}
        self._has_sent_buffers = self._has_buffers = False
        #: (is from the previous stage, number) → number of a frame → frame.
        self._arrived: dict[tuple[bool, int], dict[int, Frame]] = {}

    def _through(self, p: int) -> Minibatch:
        """The newest own update in the weights of the forward of `p`."""
        return self._old.versions.forward_through(p, start=self._start)

    def _alike(self, p: Minibatch) -> range:
        """The minibatches from `p` on with its weights: they see the same updates, and no clock changes in between."""
        return range(p, next(q for q in count(p + 1) if q == self.first_own or self._through(q) > self._through(p)))

    @property
    def _has_constants(self) -> bool:
        """Whether the new version has all parameters that are not trained."""
        return self._to_load is not None and not self._to_load

    @property
    def changes_layers(self) -> bool:
        """Whether this stage has other layers afterwards."""
        return self._had != self._own

    def is_due(self, forwarded: int) -> bool:
        """Whether the new version is to be built: two waves before it. Constants travel before weights are lent."""
        return self.new is None and forwarded >= self.last - 2 * self._old.versions.minibatches_per_wave

    def build(self, rebuild: Rebuild, prepared: BuiltStage | None = None) -> None:
        """Create the new version of the stage, without weights, from what has been built for it, if anything.

        Raises:
            ScriptFailed: it cannot be built.
        """
        old, record = self._old, self.record
        common = {"plan_version": record.version, "bounds": record.bounds}
        if not self.changes_layers:
            self.new = replace(old, **common)  # type: ignore[arg-type]
            return
        assert rebuild.build is not None, "a stage of a run whose plans change knows how it is built"
        failpoints.reach("repartition.record_read")
        if prepared is None:
            with failures_named(old.identity, rebuild.line_at(record.clock)), old.guard:
                prepared = rebuild.build(record.bounds, 0)
        built = prepared
        built.weights.number_by(old.versions, old.shift)
        built.weights.begin(self._start, self.last)
        built.compute.shift = old.shift
        self.new = replace(
            old,
            layers=built.layers,
            compute=built.compute,
            pool=built.pool,
            weights=built.weights,
            data=replace(old.data, metrics=built.metrics, losses=built.losses),
            **common,  # type: ignore[arg-type]
        )
        self._built = built

    def advance(self, at: Moment, lent_on: LentOn, switch: Callable[[Minibatch, Clock], None]) -> bool:
        """Do the next part of what can be done now, a little at a time; returns whether there was any.

        Args:
            at: where the old version is; beyond h the new one.
            lent_on: tells W* of a minibatch beyond h.
            switch: rebuilds the old version's weights on another clock from a minibatch on.
        """
        if self.is_complete or self.new is None:
            return False
        if not self.changes_layers:
            self.is_complete = at.forwarded >= self.last and at.backwarded >= self.last <= at.through
            return self.is_complete
        self._collect()
        done = [self._send_constants(at), self._lend(at, lent_on), self._take_constants(), self._borrow()]
        if at.forwarded >= self.last:
            while self._to_switch:
                switch(*self._to_switch.popleft())
            done += [self._exchange_buffers(), self._hand_over(at), self._take_over()]
        return any(done)

    def may_forward(self, p: Minibatch) -> bool:
        """Whether `p` may be computed, as far as it depends on the move."""
        if p <= self.last:
            return True
        if self.new is None:
            return False
        if not self.changes_layers:
            return True
        return (
            self._has_constants and self._has_buffers and (self.is_complete or p < min(self._to_borrow, self.first_own))
        )

    def may_backward(self, p: Minibatch) -> bool:
        """Whether the gradient of `p` may be computed.

        Its update waits for the optimizer's state, and so do few gradients: as many as take the memory of what is not
        here yet, beside the one that a stage always has.
        """
        held = _HELD_WITH_ANCHOR if self._old.has_shards else 1
        return p <= self.last + held or self.is_complete or not self.changes_layers

    @property
    def awaited(self) -> str:
        """What it waits for, for messages."""
        sources = [f"the {'previous' if is_previous else 'next'} stage" for is_previous in self._gained]
        return f"version {self.record.version} of the plan: layers of {' and '.join(sources or ['this stage'])}"

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, is_previous: bool, number: int, states: States) -> None:  # noqa: FBT001 - as in the dictionaries
        for frame in self._frames(number, groups_of(states)):
            self._send_frame(is_previous, frame)

    def _frames(self, number: int, groups: Sequence[tuple[Tensor, ...]]) -> Iterator[Frame]:
        version = self.record.version
        for index, tensors in enumerate(groups):
            yield Frame(FrameKind.MOVE, index, self._start, len(groups), tensors, number, version=version)

    def _send_frame(self, is_previous: bool, frame: Frame) -> None:  # noqa: FBT001 - as in the dictionaries
        link = self._old.upstream if is_previous else self._old.downstream
        assert link is not None, "the layers of an outer border do not move"
        link.send(frame, deadline_seconds=SEND_SECONDS)

    def _collect(self) -> None:
        """Take the frames that have arrived; those of a move that came to nothing are dropped."""
        with self._inbox.condition:
            frames = [*self._inbox.about_moves]
            self._inbox.about_moves.clear()
            later = [entry for entry in frames if entry[1].version > self.record.version]
            self._inbox.about_moves.extend(later)
        for is_previous, frame in frames:
            if (frame.clock, frame.version) == (self._start, self.record.version):
                self._arrived.setdefault((is_previous, frame.weight), {})[frame.minibatch] = frame

    def _received(self, number: int, sources: Iterable[bool] | None = None) -> States | None:
        """The content of one message from every neighbour that sends layers; None: not all of it is here."""
        found: States = {}
        for is_previous in self._gained if sources is None else sources:
            frames = self._arrived.get((is_previous, number), {})
            if not frames or len(frames) < next(iter(frames.values())).local_through:
                return None
            found |= states_in([frames[index] for index in range(len(frames))])
        return found

    def _forget(self, number: int) -> None:
        for is_previous in self._gained:
            self._arrived.pop((is_previous, number), None)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _send_constants(self, at: Moment) -> bool:
        """Send the parameters that are not trained of layers that go: some after each pass.

        All of them before the first weights are lent, or where it is too late for that, before F(h).
        """
        if self._constants is None:
            self._constants = deque()
            for is_previous, layers in self._lost.items():
                found = {
                    layer.index: LayerState(buffers=_parts(_frozen(layer)))
                    for layer in self._old.layers
                    if layer.index in layers
                }
                frames = self._frames(_CONSTANTS, groups_of(found, frame_bytes=_PART_BYTES))
                self._constants.extend((is_previous, frame) for frame in frames)
        now = (at.forwarded, at.backwarded)
        passes = 2 * max(0, self._through(self.last + 1) - at.backwarded) or 2 * max(0, self.last - at.forwarded)
        if not self._constants or (now == self._constants_at and passes):
            return False
        self._constants_at = now
        # What is left then is before the weights that the next forward waits for.
        for _ in range(math.ceil(len(self._constants) / max(1, passes))):
            self._send_frame(*self._constants.popleft())
        return True

    @torch.no_grad()
    def _take_constants(self) -> bool:
        """Load the next of the parameters that are not trained: a part of its own, or a frame from a neighbour."""
        if self._has_constants:
            return False
        assert self.new is not None, "constants are taken by the new version"
        if self._to_load is None:
            self._to_load = _constant_parts(self.new.layers)
            kept = [layer for layer in self._old.layers if layer.index in range(*self._own)]
            self._own_parts = _constant_parts(kept)
            return True
        if self._own_parts:
            key, part = self._own_parts.popitem()
            self._to_load.pop(key).copy_(part)
            return True
        return any(self._take_constant_frame(is_previous, self._to_load) for is_previous in self._gained)

    def _take_constant_frame(self, is_previous: bool, to_load: dict[tuple[LayerIndex, str], Tensor]) -> bool:  # noqa: FBT001 - as in the dictionaries
        """Load the next frame with such parameters from a neighbour, if it is here."""
        names, number = self._listed.get(is_previous, (deque(), 0))
        frame = self._arrived.get((is_previous, _CONSTANTS), {}).pop(number, None)
        if frame is None:
            return False
        if number:
            for tensor in frame.tensors:
                assert tensor is not None, "every part has content"
                to_load.pop(names.popleft()).copy_(tensor)
        else:
            names = deque(buffers_listed(frame))
        self._listed[is_previous] = (names, number + 1)
        return True

    @torch.no_grad()
    def _exchange_buffers(self) -> bool:
        """After F(h): send the buffers of layers that go, and load those of the others and of layers that come."""
        if self._has_buffers:
            return False
        assert self.new is not None, "it is built before the last forward of the old version"
        own = {layer.index: _buffers(layer) for layer in self._old.layers}
        if not self._has_sent_buffers:
            for is_previous, layers in self._lost.items():
                copies = {
                    LayerIndex(index): LayerState(buffers=_copied(own[LayerIndex(index)]))
                    for index in layers
                    if own[LayerIndex(index)]
                }
                if copies:
                    self._send(is_previous, _BUFFERS, copies)
            self._has_sent_buffers = True
        with_buffers = {layer.index for layer in self.new.layers if layer.buffers}
        # Without any there is no need to wait until the neighbour has computed F(h).
        received = self._received(
            _BUFFERS, [source for source, layers in self._gained.items() if with_buffers.intersection(layers)]
        )
        if received is None:
            return False
        for layer in self.new.layers:
            found = received[layer.index].buffers if layer.index in received else own.get(layer.index, {})
            for name, tensor in _buffers(layer).items():
                tensor.copy_(found[name])
        forget_weights(self.new.layers)
        self._has_buffers = True
        self._forget(_BUFFERS)
        return True

    @torch.no_grad()
    def _lend(self, at: Moment, lent_on: LentOn) -> bool:
        """Lend the weights of the next minibatch beyond h that the old version's updates end in, once they are made.

        F(h) may be still to come, but not the first forward of its wave, before which another clock may come into use.
        """
        p = Minibatch(self._to_lend)
        has_begun = at.forwarded > self.last - self._old.versions.minibatches_per_wave
        if p >= self.first_own or not has_begun or at.through < self._through(p):
            return False
        on = lent_on(p)
        if on is None:
            return False
        weights = self._old.weights.lend(p, *on)
        self._to_switch.append((p, on[0]))
        for is_previous, layers in self._lost.items():
            self._send(is_previous, _STATE + p - self.last, self._of_layers(layers, {0: weights}, prefixes=False))
        self._lent[p] = weights
        self._to_lend = self._alike(p).stop
        return True

    @torch.no_grad()
    def _borrow(self) -> bool:
        """Take the weights of the next minibatch, and of those that have the same, from all that have some."""
        p = Minibatch(self._to_borrow)
        received = self._received(_STATE + p - self.last) if p < self._to_lend else None
        if received is None:
            return False
        assert self.new is not None, "it is built before the last forward of the old version"
        others = {name: tensor for state in received.values() for name, tensor in state.weights.items()}
        together = self._alike(p)
        self.new.weights.borrow(together, self._lent.pop(p) | others)
        self._forget(_STATE + p - self.last)
        self._to_borrow = together.stop
        return True

    def _hand_over(self, at: Moment) -> bool:
        """After the push of the last wave: send the state of the layers that go."""
        is_over = at.backwarded >= self.last <= at.through and at.closed >= self.record.clock
        if self._succession is not None or not is_over or self._to_lend < self.first_own:
            return False
        self._succession = self._old.weights.hand_over()
        self._optimizer = self._old.weights.optimizer.state()
        for is_previous, layers in self._lost.items():
            states = self._of_layers(layers, self._succession.terms, prefixes=True)
            self._send(is_previous, _STATE, {index: _owned(state) for index, state in states.items()})
        failpoints.reach("repartition.layers_half_moved")
        return True

    @torch.no_grad()
    def _take_over(self) -> bool:
        """Once all state is here: the new version goes on alone."""
        received, own, new, built = self._received(_STATE), self._succession, self.new, self._built
        if received is None or own is None or new is None or built is None:
            return False
        if self._to_borrow < self.first_own or not (self._has_constants and self._has_buffers):
            return False
        terms = {key: dict(tensors) for key, tensors in own.terms.items()}
        optimizer = dict(self._optimizer)
        for state in received.values():
            for key, tensor in state.weights.items():
                term, name = key.split("/", 1)
                terms.setdefault(int(term), {})[name] = tensor
            optimizer |= state.optimizer
        # What anchors still need every stage has; of older waves one may have forgotten more than another.
        names = new.pool.layout.slots
        terms = {key: found for key, found in terms.items() if all(slot.name in found for slot in names)}
        moved = f"{layers_text(self._had)} → {layers_text(self._own)}"
        span = new.timeline.span(Activity.MOVE, clock=self.record.clock, version=self.record.version, moved=moved)
        with span:
            new.weights.take_over(Succession(own.clock, own.through, terms))
            new.weights.optimizer.go_to(self._old.weights.optimizer.num_updates)
            new.weights.optimizer.load_state(optimizer)
            new.synchroniser.change_layers(built.slices, new.pool, deadline_seconds=new.stall_seconds)
            with self._inbox.condition:
                self._inbox.change_pool(new.pool)
        self.is_complete = True
        failpoints.reach("repartition.stage_built")
        _log.info(
            "layers_moved",
            clock=self.record.clock,
            version=self.record.version,
            before=list(self._had),
            after=list(self._own),
            live=True,
        )
        return True

    def _of_layers(self, layers: range, terms: Mapping[int, Mapping[str, Tensor]], *, prefixes: bool) -> States:
        """The weights of some layers, and with `prefixes`, which name the term, also their optimizer's state."""
        found: States = {}
        for layer in self._old.layers:
            if layer.index in layers:
                names = [*layer.parameters.values()]
                weights = {
                    f"{key}/{name}" if prefixes else name: tensors[name]
                    for key, tensors in terms.items()
                    for name in names
                }
                own = {name: self._optimizer[name] for name in names if prefixes and name in self._optimizer}
                found[layer.index] = LayerState(weights, {}, own)
        return found


def _frozen(layer: Layer) -> dict[str, Tensor]:
    """Parameters that are not trained, by the model's names; live."""
    return {name: layer.module.get_parameter(local).detach() for local, name in layer.frozen.items()}


def _buffers(layer: Layer) -> dict[str, Tensor]:
    return {name: layer.module.get_buffer(local) for local, name in layer.buffers.items()}


def _parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of the tensors of at most `_PART_BYTES` each, as far as these can be cut along their first dimension."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        rows = max(1, len(tensor) * _PART_BYTES // max(1, tensor.nbytes)) if tensor.dim() else 0
        views = torch.split(tensor, rows) if rows else (tensor,)
        found |= {f"{name}[{number}]": view for number, view in enumerate(views)}
    return found


def _constant_parts(layers: Iterable[Layer]) -> dict[tuple[LayerIndex, str], Tensor]:
    """Views of the parameters of layers that are not trained, by layer and part."""
    return {(layer.index, name): part for layer in layers for name, part in _parts(_frozen(layer)).items()}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _owned(state: LayerState) -> LayerState:
    """With copies, as the buffers of weights go back to their pool."""
    return replace(state, weights=_copied(state.weights))
