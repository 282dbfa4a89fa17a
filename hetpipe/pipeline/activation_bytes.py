"""Peak bytes of activations that a stage's forwards keep for their backwards.

Measured on the first minibatch and multiplied by the maximum number of minibatches in flight. The first forward (on the
last stage including the loss) runs under saved-tensor hooks. The first backward then sums the storages that are still
alive: each once and in full, however many views of it are kept, plus the stage's inputs, which are kept for their
gradients. Weights and model buffers are not activations; recomputed tensors are not kept.

Not covered: later minibatches of other sizes, and tensors that a layer keeps outside autograd. A constant that a layer
keeps outside its buffers counts once per minibatch that saves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar
from weakref import WeakSet

from torch import Tensor

from hetpipe.pipeline.chain import Layer, Values
from hetpipe.pipeline.saved_tensors import (
    Kept,
    Pack,
    Packed,
    keep,
    refuses_hooks,
    saving_with,
    storage_address,
    version_of,
)
from hetpipe.values.ids import Minibatch

T = TypeVar("T")


class ActivationBytes:
    """Measures one stage. Costs a few microseconds per saved tensor in the first minibatch, nothing afterwards."""

    def __init__(self, layers: Sequence[Layer], *, watches: bool = True) -> None:
        """Measure `layers`; `watches=False` disables it, for callers that set their own hooks around a forward."""
        self._layers = layers
        self._first: Minibatch | None = None
        self._kept: WeakSet[Kept] = WeakSet()
        self._is_over = not watches
        #: Bytes of one minibatch; 0 before the first backward, when disabled, and for layers that reject hooks.
        self.per_minibatch = 0

    def watch(self, p: Minibatch, inputs: Values, run: Callable[[], T], pack: Pack = keep) -> T:
        """Run a part of the forward of `p`; for the first minibatch, track the tensors that it saves.

        Args:
            p: the minibatch.
            inputs: tensors that `run` reads.
            run: the computation.
            pack: pack function to use while tracking.

        Returns:
            The result of `run`.
        """
        if self._first is None:
            self._first = p
        if p != self._first or self._is_over:
            return run()
        # A second attempt, without hooks, must start from the same state as the first: normalisations change buffers,
        # and in-place layers their inputs, which are not copied.
        buffers = [buffer for layer in self._layers for buffer in layer.module.buffers()]
        found = [buffer.to("cpu", copy=True) for buffer in buffers]
        versions = [version_of(value) for value in inputs]
        try:
            with saving_with(lambda tensor: self._seen(pack(tensor))):
                return run()
        except RuntimeError as error:
            if not refuses_hooks(error) or versions != [version_of(value) for value in inputs]:
                raise
        self._is_over = True
        for buffer, values in zip(buffers, found, strict=True):
            buffer.copy_(values)
        return run()

    def measure(self, p: Minibatch, inputs: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
        """Measure at the start of the backward of `p`, if it is the first minibatch.

        Args:
            p: the minibatch.
            inputs: tensors kept until the backward besides the saved ones.
            weights: tensors that do not count as activations.
        """
        if p != self._first or self._is_over:
            return
        self._is_over = True
        modules = [layer.module for layer in self._layers]
        lasting = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        of_model = {storage_address(tensor) for tensor in (*weights, *lasting)}
        storages = {
            address: tensor.untyped_storage().nbytes()
            for tensor in (*inputs, *(kept.tensor for kept in self._kept))
            if (address := storage_address(tensor)) is not None
        }
        self.per_minibatch = sum(num_bytes for address, num_bytes in storages.items() if address not in of_model)

    def _seen(self, packed: Packed) -> Packed:
        if isinstance(packed, Kept):
            self._kept.add(packed)
        return packed
