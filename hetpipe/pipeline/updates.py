"""Updates of a stage's weights from the gradients of minibatches.

gradients of a minibatch ─► average over an update ─► sum over replicas ─► clip ─► step

Clipping by the norm over all stages takes a round trip: squared norms are sent upstream from stage to stage, and the
norm is sent back downstream. Meanwhile the gradient waits, as do the minibatches that need its update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hetpipe.errors import NonFiniteUpdate
from hetpipe.link.policy import Frame, FrameKind
from hetpipe.observe.timeline import Activity
from hetpipe.pipeline.clipping import clip_factor, norm_of, scaled, squared_norms
from hetpipe.pipeline.setup import SEND_SECONDS, StageParts
from hetpipe.pipeline.tally import Tally
from hetpipe.values.ids import Minibatch
from hetpipe.weights.averaging import GradientsByName, GradientSum, divided


@dataclass(slots=True)
class _Waiting:
    """A gradient waiting for its norm."""

    p: Minibatch
    gradients: GradientsByName
    squares: list[float]
    """Squared norms of this stage and, once received, of all later stages."""
    is_own: bool
    """Whether it contains a minibatch of this replica."""


class Updates:
    """The updates of one stage in one segment."""

    def __init__(self, parts: StageParts, tally: Tally, made: Callable[[Minibatch], None], start: int) -> None:
        """Start after minibatch `start`.

        Args:
            parts: the stage.
            tally: receives norms and times.
            made: called after each update with its last minibatch.
            start: the last minibatch before the segment.
        """
        self._parts = parts
        self._tally = tally
        self._made = made
        self._names = tuple(name for layer in parts.layers for name in layer.parameters.values())
        self._gathered = GradientSum()
        self._latest = Minibatch(start)
        self._waiting: deque[_Waiting] = deque()
        #: The last minibatch whose gradient is in a completed update.
        self.through = Minibatch(start)

    @property
    def is_settled(self) -> bool:
        """Whether every gradient added so far is in an update."""
        return not self._gathered.minibatches and not self._waiting

    def add(self, p: Minibatch, gradients: GradientsByName, weight: int) -> None:
        """Add the gradients of minibatch `p`, of this weight in means; makes an update if it is the last of one."""
        self._gathered.add(gradients, weight)
        self._latest = p
        if self._parts.versions.is_update(p):
            self._finish(p)

    def flush(self) -> None:
        """Make an update of the gradients added so far; no more minibatches follow."""
        if self._gathered.minibatches:
            self._finish(self._latest)

    def join_empty_wave(self, last: Minibatch) -> None:
        """Take part in a wave that ends at `last` without a minibatch of this replica."""
        if self._parts.replicas is not None:
            self._finish(last)

    def hear_squares(self, frame: Frame) -> None:
        """Receive the squared norms of the later stages."""
        waiting = next(entry for entry in self._waiting if entry.p == frame.minibatch)
        (behind,) = frame.tensors
        assert behind is not None, "squared norms are a tensor"
        waiting.squares += behind.tolist()
        self._pass_on(waiting)

    def hear_norm(self, frame: Frame) -> None:
        """Receive the norm over all stages."""
        (norm,) = frame.tensors
        assert norm is not None, "a norm is a tensor"
        self._send_norm(frame.minibatch, norm)
        self._step_clipped(float(norm))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _finish(self, p: Minibatch) -> None:
        is_own = self._gathered.minibatches > 0
        gradients = self._averaged()
        clipping = self._parts.clipping
        if gradients is None:
            return
        if clipping is None:
            self._step(p, gradients, is_own=is_own)
            return
        waiting = _Waiting(p, gradients, squared_norms(gradients, self._names), is_own)
        self._waiting.append(waiting)
        if not clipping.over_stages:
            self._step_clipped(norm_of(waiting.squares))
        elif self._parts.identity.is_last:
            self._pass_on(waiting)

    def _averaged(self) -> GradientsByName | None:
        """The gradient of the update; None if no replica has a minibatch in it."""
        replicas = self._parts.replicas
        if replicas is None:
            return self._gathered.take_average()
        minibatches = self._gathered.minibatches
        own, weight = self._gathered.take_sum()
        # A replica that did not use a parameter, or had no minibatch, contributes zero.
        like = self._parts.weights.at_barrier.views
        summed = {name: torch.zeros_like(like[name]) if (g := own.get(name)) is None else g for name in self._names}
        counts = [float(weight), float(minibatches), *(float(own.get(name) is not None) for name in self._names)]
        counted = torch.tensor(counts, dtype=torch.float64, device=self._parts.pool.device)
        with self._parts.timeline.span(Activity.REDUCE, p=self._latest):
            replicas.sum_([counted, *summed.values()])
        total, num_minibatches, *uses = counted.tolist()
        found = {name: summed[name] if used else None for name, used in zip(self._names, uses, strict=True)}
        return divided(found, int(total)) if num_minibatches else None

    def _pass_on(self, waiting: _Waiting) -> None:
        """Send squared norms upstream, or, on the first stage, the norm downstream."""
        upstream = self._parts.upstream
        if upstream is None:
            norm = norm_of(waiting.squares)
            self._send_norm(waiting.p, torch.tensor([norm], dtype=torch.float64))
            self._step_clipped(norm)
            return
        squares = torch.tensor(waiting.squares, dtype=torch.float64)
        upstream.send(Frame(FrameKind.SQUARES, waiting.p, 0, 0, (squares,)), deadline_seconds=SEND_SECONDS)

    def _send_norm(self, p: int, norm: Tensor) -> None:
        if self._parts.downstream is not None:
            frame = Frame(FrameKind.NORM, p, 0, 0, (norm,))
            self._parts.downstream.send(frame, deadline_seconds=SEND_SECONDS)

    def _step_clipped(self, norm: float) -> None:
        """Step the oldest waiting gradient, to which this norm belongs."""
        clipping = self._parts.clipping
        assert clipping is not None, "gradients wait for clipping only"
        waiting = self._waiting.popleft()
        if not math.isfinite(norm):
            self._refuse_own(waiting)
        self._tally.gradient_norm = norm
        gradients = scaled(waiting.gradients, clip_factor(norm, clipping.max_norm))
        self._step(waiting.p, gradients, is_own=waiting.is_own)

    def _refuse_own(self, waiting: _Waiting) -> None:
        """Raise if the norm is not finite because of one of this stage's gradients.

        Raises:
            NonFiniteUpdate: names the first parameter with a non-finite gradient.
        """
        bad = (name for name, square in zip(self._names, waiting.squares, strict=False) if not math.isfinite(square))
        name = next(bad, None)
        if name is not None and waiting.is_own:
            minibatches = range(waiting.p, waiting.p + 1)
            raise NonFiniteUpdate.in_parameter(name, quantity="gradient", minibatches=minibatches)

    def _step(self, p: Minibatch, gradients: GradientsByName, *, is_own: bool) -> None:
        parts, identity = self._parts, self._parts.identity
        started = parts.clock.monotonic()
        parts.weights.step(p, gradients)
        if is_own:
            parts.history.step(vw=identity.vw, incarnation=identity.incarnation, stage=identity.stage, p=p)
        self._tally.computed(Activity.STEP, p, started)
        self.through = p
        self._made(p)
