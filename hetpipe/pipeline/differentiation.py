"""The gradients of one minibatch, out of its graph.

`torch.autograd.grad` computes them, except where a layer recomputes with `torch.utils.checkpoint(use_reentrant=True)`:
such a region runs a backward of its own, which adds to `.grad` of the weights that it finds in the modules, and torch
allows it in `torch.autograd.backward` only. The two may return a gradient with other strides, so the second way is
taken only where it must be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

#: Where a backward starts: an edge of the graph and its gradient, None for a scalar loss.
Start = tuple[GradientEdge, Tensor | None]


class Differentiation:
    """Differentiates the minibatches of one stage. The first one with a graph tells whether its layers recompute so."""

    def __init__(self) -> None:
        self._is_reentrant: bool | None = None

    def run(
        self,
        starts: Sequence[Start],
        leaves: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        standing: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor | None], Sequence[Tensor | None]]:
        """Differentiate, and free the graph.

        Args:
            starts: where to begin.
            leaves: parameter name → the leaf that the graph knows.
            inputs: the other leaves.
            standing: parameter name → what stands in the modules meanwhile: what recomputed regions depend on.

        Returns:
            The gradients of the parameters by name, and those of the inputs; None for what was not used.
        """
        wanted = [*leaves.values(), *inputs]
        if not starts or not wanted:
            return dict.fromkeys(leaves), [None for _ in inputs]
        edges = [edge for edge, _ in starts]
        gradients = [gradient for _, gradient in starts]
        if self._is_reentrant is None:
            self._is_reentrant = _recomputes_reentrantly(edges)
        if not self._is_reentrant:
            found = torch.autograd.grad(edges, wanted, gradients, allow_unused=True)
            return dict(zip(leaves, found, strict=False)), found[len(leaves) :]
        torch.autograd.backward(edges, gradients)
        of_weights = {name: _taken(leaf) for name, leaf in leaves.items()}
        for name, weight in standing.items():
            of_weights[name] = _sum(of_weights[name], _taken(weight))
        return of_weights, [_taken(value) for value in inputs]


def _recomputes_reentrantly(edges: Iterable[GradientEdge]) -> bool:
    """Whether a node behind `edges` is a region under `torch.utils.checkpoint(use_reentrant=True)`."""
    ahead = [edge.node for edge in edges]
    seen: set[Node] = set()
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        ahead += [following for following, _ in node.next_functions if following is not None]
    return False


def _taken(leaf: Tensor) -> Tensor | None:
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one + other
