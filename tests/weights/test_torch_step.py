"""Steps without torch's wrapper, as long as nobody listens there; the undocumented names of the installed torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hetpipe.weights.torch_step import TorchStep


class OwnSgd(torch.optim.SGD):
    """A user's class."""


def stepped(kind: type[torch.optim.SGD] = torch.optim.SGD) -> tuple[torch.nn.Parameter, torch.optim.SGD]:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return parameter, kind([parameter], lr=0.25)


@pytest.fixture
def no_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes through torch's wrapper fails."""
    monkeypatch.setattr(torch.autograd.profiler, "record_function", None)


@pytest.mark.usefixtures("no_scope")
def test_a_step_of_torchs_own_classes_goes_past_the_wrapper() -> None:
    parameter, optimizer = stepped()
    TorchStep(optimizer)()
    assert parameter.tolist() == [0.75] * 3
    assert parameter.requires_grad and torch.is_grad_enabled()


@pytest.mark.usefixtures("no_scope")
def test_classes_of_the_user_keep_theirs() -> None:
    _, optimizer = stepped(OwnSgd)
    with pytest.raises(TypeError, match="not callable"):
        TorchStep(optimizer)()


@pytest.mark.parametrize(
    "register",
    [
        lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
        lambda optimizer, hook: optimizer.register_step_post_hook(hook),
        lambda _, hook: register_optimizer_step_pre_hook(hook),
        lambda _, hook: register_optimizer_step_post_hook(hook),
    ],
    ids=["before", "after", "before all", "after all"],
)
def test_a_hook_that_is_registered_later_is_called(register: Callable[[torch.optim.Optimizer, Any], Any]) -> None:
    parameter, optimizer = stepped()
    step, calls = TorchStep(optimizer), []
    step()
    handle = register(optimizer, lambda *given: calls.append(given[0]))
    step()
    handle.remove()
    step()
    assert calls == [optimizer]
    assert parameter.tolist() == [0.25] * 3


def test_a_profiler_sees_steps() -> None:
    _, optimizer = stepped()
    step = TorchStep(optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    assert any(event.key == "Optimizer.step#SGD.step" for event in profile.key_averages())
