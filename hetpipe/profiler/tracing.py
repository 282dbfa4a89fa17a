"""One look at a layer: what it keeps for its backward, and how much work it is."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hetpipe.pipeline.chain import Values
from hetpipe.pipeline.flop_counter import FlopCounter
from hetpipe.profiler.kept import Saved
from hetpipe.profiler.layer_run import LayerRun
from hetpipe.profiler.live_bytes import storage_identity
from hetpipe.values.measurement import Work


def trace_saved(run: LayerRun, inputs: Values) -> tuple[Values, Saved]:
    """Run the layer once on `inputs` themselves: its outputs, without a graph, and the storages that it saved."""
    module = run.layer.module
    own = _identities([*run.weights.values(), *module.parameters(), *module.buffers()])
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (identity := storage_identity(storage)) not in own:
            storages[identity] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run.forward(inputs)
    saved = Saved(storages, _identities(outputs))
    values = tuple(output.detach() for output in outputs)
    run.backward(run.gradients_for(outputs))
    return values, saved


def trace_work(run: LayerRun, inputs: Values) -> tuple[Work, Work]:
    """Run the layer once on `inputs`, which it may change; the work of its forward and of its backward."""
    with FlopCounter(is_backward=False) as forward:
        outputs = run.forward(inputs)
    gradients = run.gradients_for(outputs)
    with FlopCounter(is_backward=True) as backward:
        run.backward(gradients)
    return _work(forward), _work(backward)


def _work(counter: FlopCounter) -> Work:
    return Work(counter.flops, counter.num_operations, counter.recomputed_flops)


def _identities(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(storage_identity(tensor.untyped_storage()) for tensor in tensors)
