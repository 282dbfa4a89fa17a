"""Any optimizer of `torch.optim` or of the user's own, stepping the parameters of one stage in place on a flat buffer.

The buffer is the running sum ρ of a wave where parameter servers hold the weights (`wsp.md` §3, Arithmetic), else the
newest weights themselves. The optimizer's parameters *are* the buffer, and its own weight decay is disabled; decay is
added here, from the weights selected by the policy. An optimizer whose update depends on the weights in another way
steps a copy of those weights, and the difference is added to the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.job.file import LrScheduleSpec, OptimizerSpec
from hetpipe.weights.flat import FlatBuffer
from hetpipe.weights.lr_schedule import GroupOptions
from hetpipe.weights.optimizer_class import CallableLoader, optimizer_class
from hetpipe.weights.parameter_groups import members_of, overrides_of
from hetpipe.weights.prediction import UpdateState, rule_of

#: Keys of a parameter's state that are added by hetpipe.
_NUM_UPDATES = "num_updates"
_LAST_GRADIENT = "last_gradient"


class Decay(Enum):
    """The way an optimizer's `weight_decay` enters its update."""

    COUPLED = "coupled"
    """g ← g + λ·w before the step."""
    DECOUPLED = "decoupled"
    """The buffer is reduced by lr·λ·w before the step."""
    OWN = "own"
    """The optimizer reads the weights itself: step a copy and subtract."""


_DECAY = {
    "SGD": Decay.COUPLED,
    "Adam": Decay.COUPLED,
    "RMSprop": Decay.COUPLED,
    "Adagrad": Decay.COUPLED,
    "Adadelta": Decay.COUPLED,
    "Adamax": Decay.COUPLED,
    "NAdam": Decay.COUPLED,
    "RAdam": Decay.COUPLED,
    "Rprop": Decay.COUPLED,
    "SparseAdam": Decay.COUPLED,
    "AdamW": Decay.DECOUPLED,
    "Muon": Decay.DECOUPLED,
}


def decay_of(name: str, arguments: Mapping[str, Any]) -> Decay:
    """The decay of `torch.optim.NAME`; unknown optimizers step a copy of the weights, which is always correct."""
    decay = _DECAY.get(name, Decay.OWN)
    if decay is Decay.COUPLED and arguments.get("decoupled_weight_decay"):
        return Decay.DECOUPLED
    return decay


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters with common options."""

    options: dict[str, Any]
    """For the next update; torch's own dictionary, with its weight decay disabled unless the decay is `OWN`."""
    decay: Decay
    weight_decay: float
    """λ, which may be the optimizer's default; 0 without decay, or if the optimizer applies it."""

    def decayed(self, target: Tensor, gradient: Tensor, weights: Tensor | None) -> Tensor:
        """Apply decay before a step; returns the gradient for the optimizer.

        Args:
            target: the tensor stepped on; written if the decay is decoupled.
            gradient: of this update; never written.
            weights: the weights that decay; None if that is the target.
        """
        if self.decay is Decay.COUPLED:
            # A maximizing optimizer negates the gradient, but still decays towards zero.
            sign = -1.0 if self.options.get("maximize") else 1.0
            return gradient.add(target if weights is None else weights, alpha=sign * self.weight_decay)
        lost = self.options["lr"] * self.weight_decay
        if weights is None:
            target.mul_(1 - lost)  # rounds as torch does
        else:
            target.add_(weights, alpha=-lost)
        return gradient


class StageOptimizer:
    """The optimizer of one stage's parameters. State persists across waves and barriers. Not thread-safe."""

    def __init__(
        self,
        spec: OptimizerSpec,
        target: FlatBuffer,
        schedule: LrScheduleSpec | None = None,
        *,
        predicts: bool = False,
        include_decay: bool = True,
        load: CallableLoader | None = None,
    ) -> None:
        """Step on `target`: ρ, or the newest weights.

        Args:
            spec: class, arguments and groups; already validated (`pipeline.optimizer_choice`).
            target: views to step on, by the model's parameter names.
            schedule: of the learning rate; None: constant.
            predicts: whether `predict_` will be called, so that its inputs are kept.
            include_decay: whether a decoupled weight decay is part of the prediction.
            load: loads the callables of optimizer and schedule, given as `module:callable`.

        Raises:
            JobError, CallableError: the schedule cannot be used, or the optimizer's updates cannot be predicted.
        """
        self._name = spec.name
        kind: Any = optimizer_class(spec, load)
        self._rule = rule_of(kind, spec.name) if predicts else None
        self._includes_decay = include_decay
        self._upcoming = GroupOptions(spec, schedule, load)
        # Created on separate memory: a parameter keeps the version counter of its initial storage, which must not be a
        # buffer's.
        self._parameters = {name: nn.Parameter(torch.empty_like(view)) for name, view in target.views.items()}
        self._groups: dict[int, _Group] = {}
        self._group_of: dict[str, _Group] = {}
        #: Parameter → its last gradient, for rules that need it.
        self._last: dict[str, Tensor] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        if self._parameters:
            self.optimizer = self._build(spec, kind)
            self._take_options()
        self.rebind(target)

    def _build(self, spec: OptimizerSpec, kind: Any) -> torch.optim.Optimizer:
        """The torch optimizer, with this stage's groups, and its decay moved to this class."""
        members = members_of(spec, self._parameters)
        overrides = overrides_of(spec)
        groups = [
            {"params": [self._parameters[name] for name in names], **overrides[index]}
            for index, names in members.items()
        ]
        optimizer: torch.optim.Optimizer = kind(groups, **spec.arguments)
        for (index, names), options in zip(members.items(), optimizer.param_groups, strict=True):
            decay, rate = decay_of(spec.name, options), 0.0
            if decay is not Decay.OWN and "weight_decay" in options:
                rate, options["weight_decay"] = float(options["weight_decay"]), 0.0
            group = _Group(options, decay, rate)
            self._groups[index] = group
            self._group_of.update(dict.fromkeys(names, group))
        return optimizer

    def _take_options(self) -> None:
        """Set torch's options for the next update."""
        if self._upcoming.is_scheduled:
            for index, group in self._groups.items():
                upcoming = self._upcoming.of(index)
                group.options.update({k: v for k, v in upcoming.items() if k not in ("params", "weight_decay")})

    @property
    def num_updates(self) -> int:
        """Updates made; the next one has this number, counted from 0."""
        return self._upcoming.num_updates

    @property
    def learning_rate(self) -> float | None:
        """The rate of the next update, in the group of parameters that no pattern matches; None without parameters.

        Also None for an optimizer of the user's own that has no `lr`.
        """
        rate = self._upcoming.of(-1).get("lr") if self._parameters else None
        return None if rate is None else float(rate)

    def go_to(self, num_updates: int) -> None:
        """Set the options to those after `num_updates`; the optimizer's state is not changed.

        Raises:
            JobError: the schedule has no rate for it.
        """
        self._upcoming.go_to(num_updates)
        self._take_options()

    def rebind(self, target: FlatBuffer) -> None:
        """Step on `target` from now on."""
        self._target = target
        for name, parameter in self._parameters.items():
            parameter.data = target.views[name]

    def step(self, gradients: dict[str, Tensor | None], weights: Mapping[str, Tensor] | None) -> None:
        """Make one update.

        Args:
            gradients: parameter name → gradient, or None where nothing used it (no update, no decay). They are removed
                one by one, so that no gradient is kept besides its sum with the decay, and owned by this object.
            weights: parameter name → the weights that decay; None: those stepped on. A name is looked up at most once,
                where decay or the optimizer needs it, so the mapping may be lazy.

        Raises:
            JobError: the schedule has no rate for the next update.
        """
        used: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            gradient = gradients.pop(name, None)
            group = self._group_of[name]
            if gradient is not None and weights is not None and group.decay is Decay.OWN:
                used[name] = weights[name].detach()
                parameter.data = used[name].clone()
            elif gradient is not None and group.weight_decay:
                gradient = group.decayed(parameter.data, gradient, None if weights is None else weights[name].detach())
            self._keep(name, gradient, group)
            parameter.grad = gradient
        if self.optimizer is not None:
            self.optimizer.step()
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if name in used:
                target = self._target.views[name]
                target.add_(parameter.data - used[name])
                parameter.data = target
        self._upcoming.advance()
        self._take_options()

    def _keep(self, name: str, gradient: Tensor | None, group: _Group) -> None:
        if self._rule is None or gradient is None or not self._rule.needs_gradient(group.options):
            return
        # torch's foreach step adds the momentum to the gradient in place under Nesterov.
        self._last[name] = gradient.clone() if group.options.get("nesterov") else gradient

    def predict_(self, weights: FlatBuffer, steps: int) -> None:
        """Move `weights`, a copy of the newest ones, `steps` updates ahead, at the rate of the next update.

        PipeOptim eq. (5): Ŵ = W − lr·s·ΔW, with ΔW by `prediction.RULES`. A parameter without an update so far is not
        changed.
        """
        assert self._rule is not None, "created without `predicts`"
        if steps == 0 or self.optimizer is None:
            return
        for name, parameter in self._parameters.items():
            group, view = self._group_of[name], weights.views[name]
            has_own_term = self._includes_decay and group.decay is Decay.DECOUPLED
            change = self._rule.change(
                UpdateState(
                    group=group.options,
                    weight_decay=group.weight_decay if has_own_term else 0.0,
                    state=self.optimizer.state.get(parameter, {}),
                    gradient=self._last.get(name),
                    weights=view,
                )
            )
            if change is not None:
                view.add_(change, alpha=-(group.options["lr"] * steps))

    def state(self) -> dict[str, dict[str, Tensor | float | int]]:
        """Parameter name → the optimizer's state for it (tensors are live, copy before keeping).

        Beside torch's own keys: the number of updates, and the last gradient where a prediction needs it.
        """
        if self.optimizer is None:
            return {}
        state: dict[str, dict[str, Tensor | float | int]] = {}
        for name, parameter in self._parameters.items():
            state[name] = {**self.optimizer.state.get(parameter, {}), _NUM_UPDATES: self.num_updates}
            if name in self._last:
                state[name][_LAST_GRADIENT] = self._last[name]
        return state

    def load_state(self, state: Mapping[str, Mapping[str, Tensor | float | int]]) -> None:
        """Restore the state of the given parameters, as returned by `state`; may be called repeatedly.

        Older checkpoints do not contain the number of updates: their schedules restart.
        """
        if self.optimizer is None:
            return
        for name, entries in state.items():
            if not entries or name not in self._parameters:
                continue
            parameter, options = self._parameters[name], self._group_of[name].options
            kept = {key: _placed(key, value, parameter, options) for key, value in entries.items()}
            self._upcoming.go_to(int(kept.pop(_NUM_UPDATES, 0)))
            last = kept.pop(_LAST_GRADIENT, None)
            if isinstance(last, Tensor) and self._rule is not None and self._rule.needs_gradient(options):
                self._last[name] = last
            if kept:
                self.optimizer.state[parameter] = kept
        self._take_options()


def _placed(key: str, value: Tensor | float, parameter: Tensor, options: Mapping[str, Any]) -> Tensor | float:
    """`value` on the device expected by torch: that of its parameter, but step counts in host memory unless fused."""
    if not isinstance(value, Tensor) or (key == "step" and not options.get("fused")):
        return value
    return value.to(parameter.device)
