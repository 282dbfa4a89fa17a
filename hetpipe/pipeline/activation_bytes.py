"""How many bytes do the forwards of a stage keep for their backwards, at most at once?

Measured on the first minibatch, times the most minibatches in flight. The first forward (on the last stage with the
loss) runs under hooks that see what its operations save; the first backward finds what is still kept of that, and adds
the storages up: each once, whole, however many views of it are kept, and with the stage's inputs, which wait for their
gradients. Weights and buffers of the model are not activations, and what a layer recomputes is not kept.

So minibatches of other sizes than the first one are not seen, nor tensors that a layer keeps without telling autograd.
A constant that a layer keeps outside of its buffers is counted with every minibatch that saves it.
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
    """Measures one stage. Costs the first minibatch some microseconds per saved tensor, the others nothing."""

    def __init__(self, layers: Sequence[Layer], *, watches: bool = True) -> None:
        """Measure `layers`, or, for who sets hooks of its own around a forward, do not."""
        self._layers = layers
        self._first: Minibatch | None = None
        self._kept: WeakSet[Kept] = WeakSet()
        self._is_over = not watches
        #: Of one minibatch; 0 until the first backward, and if nothing watches or the layers do not run under hooks.
        self.per_minibatch = 0

    def watch(self, p: Minibatch, inputs: Values, run: Callable[[], T], pack: Pack = keep) -> T:
        """Run a part of the forward of `p`: what it saves counts if `p` is the first minibatch.

        Args:
            p: the minibatch.
            inputs: what `run` reads.
            run: computes.
            pack: how it saves tensors while it is watched.

        Returns:
            What `run` returns.
        """
        if self._first is None:
            self._first = p
        if p != self._first or self._is_over:
            return run()
        # A second try, without hooks, must find what the first one found: normalisations change buffers, and layers
        # that work in place their inputs, of which no copy is made.
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
        """The backward of `p` begins: if it is the first minibatch, add up what there is for it.

        Args:
            p: the minibatch.
            inputs: kept until the backward beside what was saved.
            weights: no activations.
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
