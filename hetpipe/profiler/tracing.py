"""One look at a layer: what it keeps for its backward, and how much work it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hetpipe.pipeline.chain import Values
from hetpipe.profiler.kept import Saved
from hetpipe.profiler.layer_run import LayerRun
from hetpipe.profiler.live_bytes import storage_identity
from hetpipe.spec.measurement import Work

_aten = torch.ops.aten


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]  # torch ships it untyped


def _attention_backward(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    flops = sdpa_backward_flop_count(gradient, query, key, value)  # type: ignore[no-untyped-call]  # as above
    return int(flops)


#: Attention on the CPU, which torch's counter leaves out. Formulas of the arguments' shapes.
_CPU_ATTENTION: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,  # noqa: SLF001 - the operator has no other name
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,  # noqa: SLF001 - as above
}


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
    with _WorkCounter() as forward:
        outputs = run.forward(inputs)
    gradients = run.gradients_for(outputs)
    with _WorkCounter() as backward:
        run.backward(gradients)
    return forward.work, backward.work


def _identities(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(storage_identity(tensor.untyped_storage()) for tensor in tensors)


class _WorkCounter:
    """Counts operations, and their floating-point operations."""

    def __init__(self) -> None:
        self._flops = FlopCounterMode(display=False, custom_mapping=dict(_CPU_ATTENTION))
        self._operations = _OperationCounter()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._operations)
        self._stack.enter_context(self._flops)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def work(self) -> Work:
        """What was counted."""
        return Work(flops=self._flops.get_total_flops(), operations=self._operations.count)


class _OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch ships it untyped
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch ships it untyped
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count and run."""
        self.count += not getattr(func, "is_view", False)
        return func(*args, **(kwargs or {}))
