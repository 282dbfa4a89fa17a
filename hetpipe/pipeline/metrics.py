"""Common metrics. A metric is called like a loss and returns the mean over the minibatch's samples.

Job file: `metrics: {accuracy: hetpipe.pipeline.metrics:accuracy}`.

Shape suffixes: … any leading dimensions, C classes.
"""

from __future__ import annotations

from torch import Tensor


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of entries whose highest score belongs to the target class; a float32 scalar.

    Args:
        output: scores [… C].
        target: class indices […].

    Raises:
        ValueError: the shapes do not match.
    """
    if output.shape[:-1] != target.shape:
        raise ValueError(
            f"accuracy takes scores [..., classes] and class indices [...], not {list(output.shape)} and "
            f"{list(target.shape)}; move the classes to the last dimension"
        )
    return (output.argmax(dim=-1) == target).float().mean()
