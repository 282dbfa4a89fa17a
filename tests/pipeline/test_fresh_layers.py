"""What two processes build anew is the same."""

from __future__ import annotations

import random

import torch

from hetpipe.pipeline.fresh_layers import built_anew
from hetpipe.values.ids import Clock, LayerIndex
from tests import models
from tests.numerics.compare import ROOT, Case


def test_they_depend_on_seed_and_clock_alone_and_draw_from_no_generator() -> None:
    job, state = Case(model="supernet", minibatches=8).job(), (torch.get_rng_state(), random.getstate())
    built = built_anew(job, ROOT, Clock(3), (1, 4))
    torch.manual_seed(1)
    again = built_anew(job, ROOT, Clock(3), (1, 4))
    torch.set_rng_state(state[0])
    assert built.keys() == again.keys() == {1, 4}
    assert [state.digest for state in built.values()] == [state.digest for state in again.values()]
    assert random.getstate() == state[1]
    later, first = built_anew(job, ROOT, Clock(4), (1,)), dict(models.supernet().named_parameters())
    (one,) = later.values()
    assert one.digest != built[LayerIndex(1)].digest
    assert one.weights.keys() == {"1.0.weight", "1.0.bias"} < first.keys()
    assert not built_anew(job, ROOT, Clock(3), ())
