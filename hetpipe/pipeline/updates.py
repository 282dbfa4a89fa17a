"""Updates of a stage's weights from the gradients of minibatches.

gradients of a minibatch ─► divide by its scale ─► average over an update ─► sum over replicas ─► clip ─► step or skip

Clipping by the norm over all stages takes a round trip: squared norms are sent upstream from stage to stage, and the
norm is sent back downstream. Meanwhile the gradient waits, as do the minibatches that need its update. Under
`precision: fp16` the same norm is the verdict whether a gradient of any stage overflowed: then it is not finite, and
all stages skip the update.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hetpipe.decide.schedule.loss_scale import LossScales
from hetpipe.errors import NonFiniteUpdate
from hetpipe.link.policy import Frame, FrameKind
from hetpipe.observe.timeline import Activity
from hetpipe.pipeline.clipping import clip_factor, layer_squares, norm_of, scaled, squared_norms
from hetpipe.pipeline.setup import SEND_SECONDS, StageParts
from hetpipe.pipeline.tally import Tally
from hetpipe.values.ids import Clock, Minibatch
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
    scale_exponent: int
    """The largest of its minibatches."""


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
        self._layers = {
            int(layer.index): tuple(layer.parameters.values()) for layer in parts.layers if layer.parameters
        }
        #: Minibatch → layer → squared norm of its gradient, of minibatches that tell them; until their wave is closed.
        self._squares: dict[int, dict[int, float]] = {}
        self._gathered = GradientSum()
        self._latest = Minibatch(start)
        self._waiting: deque[_Waiting] = deque()
        #: What was added before weights and the optimizer's state are here, in order; None: they are.
        self._held: list[Callable[[], None]] | None = None
        self._start = start
        #: Exponents of the scales of the gradients gathered.
        self._exponents: list[int] = []
        if parts.scales is not None:
            parts.scales.start(start)
        #: The last minibatch whose gradient is in a completed update.
        self.through = Minibatch(start)

    @property
    def is_settled(self) -> bool:
        """Whether every gradient added so far is in an update."""
        return not self._gathered.minibatches and not self._waiting and not self._held

    @property
    def is_held(self) -> bool:
        """Whether updates wait for `release`."""
        return self._held is not None

    def hold(self) -> None:
        """Make no updates for now: weights and the optimizer's state are still with the version of the plan before."""
        self._held = []

    def release(self) -> None:
        """Add what was added since `hold`."""
        held, self._held = self._held, None
        for add in held or ():
            add()

    def scale_exponent(self, p: Minibatch) -> int:
        """Exponent of the scale of minibatch `p`, the updates of whose weights are made; 0 without scales."""
        scales = self._parts.scales
        return 0 if scales is None else scales.exponent(self._seen_by(p))

    def add(
        self,
        p: Minibatch,
        gradients: GradientsByName,
        weight: int,
        scale_exponent: int,
        *,
        tells_norms: bool = False,
    ) -> None:
        """Add the gradients of minibatch `p`; makes an update if it is the last of one.

        Args:
            p: the minibatch.
            gradients: multiplied by its scale.
            weight: of the minibatch in means over several.
            scale_exponent: of its scale.
            tells_norms: whether norms of its gradients may decide what freezes.
        """
        if self._held is not None:
            self._held.append(partial(self.add, p, gradients, weight, scale_exponent, tells_norms=tells_norms))
            return
        unscaled = scaled(gradients, 2.0**-scale_exponent)
        if tells_norms:
            self._squares[p] = layer_squares(unscaled, self._layers)
        self._gathered.add(unscaled, weight)
        self._exponents.append(scale_exponent)
        if self._parts.scales is not None:
            self._parts.scales.forget_before(self._seen_by(p))
        self._latest = p
        if self._parts.versions.is_update(p):
            self._finish(p)

    def take_squares(self, last: Minibatch) -> dict[int, float]:
        """Layer → squared norm of its gradients, added over the minibatches up to `last` that were not taken before."""
        total: dict[int, float] = {}
        for p in sorted(p for p in self._squares if p <= last):
            for layer, square in self._squares.pop(p).items():
                total[layer] = min(total.get(layer, 0.0) + square, sys.float_info.max)
        return total

    def flush(self) -> None:
        """Make an update of the gradients added so far; no more minibatches follow."""
        if self._gathered.minibatches:
            self._finish(self._latest)

    def join_empty_wave(self, last: Minibatch) -> None:
        """Take part in a wave that ends at `last` without a minibatch of this replica."""
        if self._parts.replicas is not None:
            self._finish(last)

    def add_squares(self, frame: Frame) -> None:
        """Receive the squared norms of the later stages."""
        waiting = next(entry for entry in self._waiting if entry.p == frame.minibatch)
        (behind,) = frame.tensors
        assert behind is not None, "squared norms are a tensor"
        waiting.squares += behind.tolist()
        self._pass_on(waiting)

    def apply_norm(self, frame: Frame) -> None:
        """Receive the norm over all stages."""
        (norm,) = frame.tensors
        assert norm is not None, "a norm is a tensor"
        self._send_norm(frame.minibatch, norm)
        self._settle(float(norm))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _seen_by(self, p: Minibatch) -> Minibatch:
        """v(p), the same on every stage under the policies that have scales."""
        parts = self._parts
        return parts.versions.forward_through(p, start=Clock(self._start // parts.sync.minibatches_per_wave))

    def _finish(self, p: Minibatch) -> None:
        is_own = self._gathered.minibatches > 0
        gradients = self._averaged()
        clipping, scales = self._parts.clipping, self._parts.scales
        # A replica without a minibatch has the scale that one of the others would have.
        exponent = max(self._exponents) if self._exponents else self.scale_exponent(p)
        self._exponents.clear()
        if gradients is None:
            return
        if clipping is None and scales is None:
            self._step(p, gradients, is_own=is_own)
            return
        waiting = _Waiting(p, gradients, squared_norms(gradients, self._names), is_own, exponent)
        self._waiting.append(waiting)
        if scales is None and clipping is not None and not clipping.over_stages:
            self._settle(norm_of(waiting.squares))
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
        with self._parts.timeline.span(Activity.REDUCE, p=self._latest + self._parts.shift):
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
            self._settle(norm)
            return
        squares = torch.tensor(waiting.squares, dtype=torch.float64)
        upstream.send(Frame(FrameKind.SQUARES, waiting.p, 0, 0, (squares,)), deadline_seconds=SEND_SECONDS)

    def _send_norm(self, p: int, norm: Tensor) -> None:
        if self._parts.downstream is not None:
            frame = Frame(FrameKind.NORM, p, 0, 0, (norm,))
            self._parts.downstream.send(frame, deadline_seconds=SEND_SECONDS)

    def _settle(self, norm: float) -> None:
        """Step or skip the oldest waiting gradient, to which this norm belongs."""
        clipping, scales = self._parts.clipping, self._parts.scales
        waiting = self._waiting.popleft()
        if not math.isfinite(norm):
            if scales is not None and waiting.scale_exponent:
                self._skip(waiting, scales)
                return
            self._refuse_own(waiting)
        if scales is not None:
            scales.judge(waiting.p, waiting.scale_exponent, overflowed=False)
        gradients = waiting.gradients
        if clipping is not None:
            # Squared norms of the later stages stand behind those of this stage.
            norm = norm if clipping.over_stages else norm_of(waiting.squares[: len(self._names)])
            self._tally.gradient_norm = norm
            gradients = scaled(gradients, clip_factor(norm, clipping.max_norm))
        self._step(waiting.p, gradients, is_own=waiting.is_own)

    def _skip(self, waiting: _Waiting, scales: LossScales) -> None:
        """Leave everything as it is: a gradient of some stage overflowed at this scale."""
        parts, identity, p = self._parts, self._parts.identity, waiting.p
        scales.judge(p, waiting.scale_exponent, overflowed=True)
        parts.weights.step(p, None)
        if waiting.is_own and not parts.is_frozen:
            parts.history.skip(
                vw=identity.vw,
                incarnation=identity.incarnation,
                stage=identity.stage,
                p=p + parts.shift,
                scale=1 << waiting.scale_exponent,
                version=parts.plan_version,
                frozen=parts.frozen,
                inactive=parts.left_out,
            )
        self.through = p
        self._made(p)

    def _refuse_own(self, waiting: _Waiting) -> None:
        """Raise if the norm is not finite because of one of this stage's gradients.

        Raises:
            NonFiniteUpdate: names the first parameter with a non-finite gradient.
        """
        bad = (name for name, square in zip(self._names, waiting.squares, strict=False) if not math.isfinite(square))
        name = next(bad, None)
        if name is not None and waiting.is_own:
            p = waiting.p + self._parts.shift
            minibatches = range(p, p + 1)
            raise NonFiniteUpdate.in_parameter(name, quantity="gradient", minibatches=minibatches)

    def _step(self, p: Minibatch, gradients: GradientsByName, *, is_own: bool) -> None:
        parts, identity = self._parts, self._parts.identity
        started = parts.clock.monotonic()
        parts.weights.step(p, gradients)
        if is_own and not parts.is_frozen:
            parts.history.step(
                vw=identity.vw,
                incarnation=identity.incarnation,
                stage=identity.stage,
                p=p + parts.shift,
                version=parts.plan_version,
                frozen=parts.frozen,
                inactive=parts.left_out,
            )
        self._tally.computed(Activity.STEP, p, started)
        self.through = p
        self._made(p)
